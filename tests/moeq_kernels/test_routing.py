"""The routing and summing kernels, in Triton's interpreter (or on a GPU)."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from support import routing_launches

from moeq_kernels import interpreter
from moeq_kernels.device import routing
from moeq_kernels.launch import run_with_triton
from moeq_kernels.tuning import next_power_of_two

GARBAGE = 2**31 - 1


def _expected(local: torch.Tensor, experts: int, tile: int, grain: int) -> tuple[torch.Tensor, list[list[int]]]:
    """Pairs in sorted order, and the rows of the list of tiles."""
    pairs = local.numel()
    keys = torch.where((local >= 0) & (local < experts), local, experts)
    order = torch.sort(keys, stable=True).indices[: int((keys < experts).sum())]
    tiles: list[list[int]] = []
    start = 0
    for expert in range(experts):
        count = int((keys == expert).sum())
        fewest = max(1, -(-count // tile))
        height = max(1, math.ceil(math.ceil(count / fewest) / grain)) * grain
        number = -(-count // height)
        first = len(tiles)
        tiles += [[expert, start + i * height, start + count, first, number, height] for i in range(number)]
        start += count
    assert start == order.numel() <= pairs
    return order, tiles


@pytest.mark.cover(every=7)
@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "tile", "grain", "few", "mapped"),
    [(33, 8, 60, 8, 8, True, False), (5, 2, 6, 4, 4, True, True), (1, 2, 4, 8, 8, True, False),
     (33, 8, 60, 16, 16, False, False), (70, 2, 5, 32, 32, False, True), (70, 2, 5, 12, 4, True, False),
     (90, 4, 8, 20, 4, False, True)],
)  # fmt: skip
def test_pairs_are_sorted_by_expert_and_tokens_copied(
    device: torch.device, tokens: int, top_k: int, experts: int, tile: int, grain: int, few: bool, mapped: bool
) -> None:
    hidden, known = 48, 2 * experts if mapped else experts
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, known, generator=generator).topk(top_k, dim=1).indices.int()
    ids[tokens // 2, 0] = -1
    expert_map = torch.arange(known).roll(3).int() - experts // 2 if mapped else None
    local = ids.reshape(-1).long()
    if expert_map is not None:
        local = torch.where(local >= 0, expert_map.long()[local.clamp(min=0)], -1)
    x = torch.randn(tokens, hidden, generator=generator).bfloat16().to(device)
    pairs = tokens * top_k
    most = min(pairs, pairs // tile + experts)
    sorted_x = torch.full((pairs, hidden), float("nan"), dtype=torch.bfloat16, device=device)
    pair_of_row, inverse = (torch.full((pairs,), GARBAGE, dtype=torch.int32, device=device) for _ in range(2))
    tiles = torch.full((most, 8), GARBAGE, dtype=torch.int32, device=device)
    num_tiles = torch.full((1,), GARBAGE, dtype=torch.int32, device=device)
    cleared = torch.ones(7, dtype=torch.int32, device=device)
    ids = ids.to(device)
    given = expert_map.to(device) if expert_map is not None else None
    bins = next_power_of_two(max(experts, 16))
    common = {"MAPPED": mapped, "BINS": bins, "DEPENDENT": False}
    sizes = (experts, known, most, tile, grain)
    if few:
        routing.route_few[(3 + -(-pairs // 4), 3)](
            ids, given, x, sorted_x, pair_of_row, inverse, tiles, num_tiles, cleared, 7, pairs, top_k, hidden, hidden,
            *sizes, 3, PAIRS=next_power_of_two(max(pairs, 16)), ROWS=4, COPY=True, COLUMNS=16, **common,
        )  # fmt: skip
    else:
        blocks = -(-pairs // 64)
        counts = torch.empty(blocks, bins, dtype=torch.int32, device=device)
        routing.count_pairs[(blocks,)](ids, given, counts, cleared, 7, pairs, experts, known, BLOCK=64, **common)
        routing.place_pairs[(blocks,)](
            ids, given, counts, pair_of_row, inverse, tiles, num_tiles, pairs, *sizes, BLOCK=64, GROUP=2, **common
        )
        routing.gather_rows[(-(-pairs // 8), 2)](
            x,
            sorted_x,
            pair_of_row,
            tiles,
            num_tiles,
            pairs,
            top_k,
            hidden,
            hidden,
            ROWS=8,
            COLUMNS=32,
            DEPENDENT=False,
        )
    assert cleared.sum() == 0
    order, wanted = _expected(local, experts, tile, grain)
    used = order.numel()
    assert torch.equal(pair_of_row[:used].cpu().long(), order)
    assert torch.equal(sorted_x[:used].cpu(), x.cpu()[order // top_k])
    back = torch.full((pairs,), -1)
    back[order] = torch.arange(used)
    assert torch.equal(inverse.cpu().long(), back)
    assert num_tiles.item() == len(wanted) <= most
    assert tiles[: len(wanted), :6].tolist() == wanted
    assert (tiles[len(wanted) :, 0] == -1).all()


def test_choices_and_shares_are_summed_with_weights(device: torch.device) -> None:
    tokens, top_k, splits, hidden = 5, 3, 2, 40
    generator = torch.Generator().manual_seed(0)
    rows = tokens * top_k
    parts = torch.randn(splits, rows, hidden, generator=generator).to(device)
    inverse = torch.randperm(rows, generator=generator).int()
    inverse[4] = -1
    weights = torch.rand(tokens, top_k, generator=generator)
    y = torch.full((tokens, hidden), float("nan"), device=device)
    routing.sum_rows[(3, 2)](
        parts, inverse.to(device), weights.to(device), y, tokens, hidden, rows, top_k, TOP_K=top_k, SPLITS=splits,
        COLUMNS=32, TOKENS=2, DEPENDENT=False, INTERPRET=interpreter.active(),
    )  # fmt: skip
    found = torch.where(inverse[:, None] >= 0, parts.cpu().sum(0)[inverse.long()], 0.0).view(tokens, top_k, hidden)
    torch.testing.assert_close(y.cpu(), (found * weights[..., None]).sum(1), rtol=1e-5, atol=1e-5)


def test_results_in_sixteen_bits_are_read_again(device: torch.device) -> None:
    """A sign, 7 bits of an exponent (2^-64 times the value), 8 of a fraction, made here by arithmetic, not by bits."""
    values = torch.tensor([0.0, 1.0, -1.0, 1.00390625, -255.5, 2.0**-61, -1.5 * 2.0**63, 0.3, -1e-30, 7e18])
    mantissa, exponent = torch.frexp(values)  # mantissa in [1/2, 1)
    fraction = torch.round((mantissa.abs() * 2 - 1) * 256).int()
    code = torch.where(values.abs() < 2.0**-62, 0, (exponent.int() - 1 - 64 + 127) * 256 + fraction)
    parts = torch.where(values < 0, code - 32768, code).to(torch.int16)
    parts = torch.cat([parts, torch.tensor([32767], dtype=torch.int16)])
    y = torch.full((1, 11), 5.0, device=device)
    zero, one = torch.zeros(1, dtype=torch.int32, device=device), torch.ones(1, 1, device=device)
    routing.sum_rows[(1, 1)](
        parts.view(1, 1, 11).to(device),
        zero,
        one,
        y,
        1,
        11,
        1,
        1,
        TOP_K=1,
        SPLITS=1,
        COLUMNS=16,
        TOKENS=1,
        DEPENDENT=False,
        INTERPRET=interpreter.active(),
    )
    wanted = torch.where(values.abs() < 2.0**-62, 0.0, values)
    torch.testing.assert_close(y[0, :10].cpu(), wanted, rtol=2.0**-9, atol=1e-18)
    assert torch.equal(y[0, :4].cpu(), values[:4])  # exact where 8 bits of a fraction are enough
    assert y[0, 10].isnan()


def _cases(number: int) -> list[tuple[int, int, int, int, int, int | None, bool, int]]:
    """Random experts, choices, tokens, tile, grain, experts that ids name (None: no map), sizes of a GPU, seed."""
    found = []
    for seed in range(number):
        rng = random.Random(seed)
        experts = rng.choice([1, 2, 3, 7, 16, 17, 64, 127, 128, 129, 256, 384, 512, 1000, 1024])
        top_k = rng.choice([1, 2, 3, 6, 8, 10, 17, 32])
        on_gpu = rng.random() < 0.6
        pairs = rng.choice([1, 20, 64, 65, 200, 256, 500]) if on_gpu else rng.choice([64, 700, 1030, 2100])
        grain = rng.choice([1, 4, 8, 16])
        tile = grain * rng.choice([1, 2, 3, 8])
        known = rng.choice([None, None, 2 * experts, experts // 2 + 1])
        found.append((experts, top_k, max(1, pairs // top_k), tile, grain, known, on_gpu, seed))
    return found


@pytest.mark.cover(every=10)
@pytest.mark.parametrize("kind", routing_launches.KINDS)
@pytest.mark.parametrize(("experts", "top_k", "tokens", "tile", "grain", "known", "on_gpu", "seed"), _cases(10))
def test_random_pairs_are_routed_as_by_numpy(
    device: torch.device, kind: str, experts: int, top_k: int, tokens: int, tile: int, grain: int, known: int | None,
    on_gpu: bool, seed: int,
) -> None:  # fmt: skip
    """Ids of no expert, experts without pairs, and experts with nearly all of them are among these."""
    quantised = kind.startswith("quantised")
    tokens = max(tokens, 2)  # nothing sorts the pairs of one token before int8 products: see the tests of the layer
    tile, grain = (1 << (tile - 1).bit_length(), 0) if quantised else (tile, grain)
    problem = routing_launches.problem_of(experts, top_k, 40, known=known, interpret=not on_gpu)
    generator = torch.Generator().manual_seed(seed)
    named = problem.known
    ids = torch.randint(-1, named + 1, (tokens, top_k), generator=generator, dtype=torch.int32)
    if seed % 3 == 0:
        ids = torch.where(torch.rand(tokens, top_k, generator=generator) < 0.9, named // 2, ids)
    planned = routing_launches.plan(kind, problem, tokens, tile, grain, copy=kind == "few")
    roots = routing_launches.roots_of(planned, problem, ids.int().to(device), seed)
    if known is not None:
        places = torch.randperm(max(named, experts), generator=generator)[:named]
        given = torch.where(places < experts, places, -1).int()
        given[places == 0] = experts + 3  # beyond the last one: none that is here
        roots["expert_map"] = given.to(device)
    # Planned as for a GPU, but here the interpreter's own ways to round are needed.
    launches = [
        replace(launch, constants=launch.constants | {"INTERPRET": interpreter.active()})
        if "INTERPRET" in launch.constants else launch
        for launch in planned.schedule.launches
    ]  # fmt: skip
    run_with_triton(launches, roots)
    assert routing_launches.differences(planned, roots, problem, tile, grain or None) == []
