"""Each kind of damage changes what it says, in its rows, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from moeq.check.sabotage import SABOTAGES, Damaged, Sabotage
from moeq.matrix import MatrixSpec, QuantizedMatrix

KINDS: dict[str, Sabotage] = {kind.name: kind for kind in SABOTAGES}
ROWS = slice(16, 48)
SPEC = MatrixSpec("w13", 48, 64, "int4", 16, "f16", symmetric=False, act_order=True, bias_dtype="f16")


def matrix(seed: int, spec: MatrixSpec = SPEC) -> QuantizedMatrix:
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=generator)

    scales = 1 + torch.randperm(spec.n * spec.num_groups, generator=generator).view(spec.n, -1)
    return QuantizedMatrix(
        spec,
        integers(16, spec.n, spec.k).to(torch.uint8),
        scales.half() if spec.scale_dtype == "f16" else (scales % 127).to(torch.uint8),
        zeros=integers(16, spec.n, spec.num_groups).to(torch.uint8),
        group_index=integers(spec.num_groups, spec.k).to(torch.int32),
        global_scale=torch.rand(spec.n, generator=generator),
        bias=torch.randn(spec.n, generator=generator).half(),
    )


def damaged(name: str, seed: int, given: QuantizedMatrix, rows: slice = ROWS) -> Damaged | None:
    return KINDS[name].damage(given, rows, torch.Generator().manual_seed(seed))


def changed(before: QuantizedMatrix, after: QuantizedMatrix) -> dict[str, list[list[int]]]:
    """Places of the values that differ, by part."""
    parts = ("codes", "scales", "zeros", "group_index", "global_scale", "bias")
    pairs = {name: (getattr(before, name), getattr(after, name)) for name in parts}
    found = {name: torch.argwhere(one != other).tolist() for name, (one, other) in pairs.items()}
    return {name: places for name, places in found.items() if places}


def numbers(text: str) -> list[int]:
    return [int(one) for one in re.findall(r"\d+", text)]


SEEDS = pytest.mark.parametrize("seed", range(4))


@SEEDS
def test_a_code(seed: int) -> None:
    before = matrix(seed)
    after, text = damaged("flip a code", seed, before)  # type: ignore[misc]
    ((n, k),) = changed(before, after)["codes"]
    assert list(changed(before, after)) == ["codes"]
    assert text == f"lowest bit of weight ({n - 16}, {k})"
    assert n >= 16
    assert int(after.codes[n, k]) == int(before.codes[n, k]) ^ 1


@SEEDS
def test_two_scales(seed: int) -> None:
    before = matrix(seed)
    after, text = damaged("swap two scales", seed, before)  # type: ignore[misc]
    one, other = changed(before, after)["scales"]
    assert list(changed(before, after)) == ["scales"]
    n, g, row, group = numbers(text)
    assert sorted([[n + 16, g], [row + 16, group]]) == [one, other]
    assert torch.equal(after.scales[tuple(one)], before.scales[tuple(other)])
    assert torch.equal(after.scales[tuple(other)], before.scales[tuple(one)])
    assert damaged("swap two scales", seed, replace(before, scales=torch.ones_like(before.scales))) is None


@SEEDS
def test_a_tile(seed: int) -> None:
    before = matrix(seed)
    after, text = damaged("transpose a tile", seed, before)  # type: ignore[misc]
    _, _, n, k = numbers(text)
    assert text == f"16 x 16 tile at ({n}, {k}) transposed"
    assert (n % 16, k % 16) == (0, 0)
    tile = (slice(n + 16, n + 32), slice(k, k + 16))
    wanted = before.codes.clone()
    wanted[tile] = before.codes[tile].T
    assert torch.equal(after.codes, wanted)
    assert list(changed(before, after)) == ["codes"]


@SEEDS
def test_a_zero_point(seed: int) -> None:
    before = matrix(seed)
    after, text = damaged("drop a zero point", seed, before)  # type: ignore[misc]
    ((n, g),) = changed(before, after)["zeros"]
    assert list(changed(before, after)) == ["zeros"]
    assert text == f"zero point of row {n - 16} group {g} forgotten (taken as 8)"
    assert int(after.zeros[n, g]) == 8  # type: ignore[index]
    assert before.zeros is not None
    assert damaged("drop a zero point", seed, replace(before, zeros=None)) is None
    assert damaged("drop a zero point", seed, replace(before, zeros=torch.full_like(before.zeros, 8))) is None


@SEEDS
def test_scales_of_a_row_of_groups(seed: int) -> None:
    before = matrix(seed)
    after, text = damaged("shift a group", seed, before)  # type: ignore[misc]
    (n,) = {row for row, _ in changed(before, after)["scales"]}
    assert list(changed(before, after)) == ["scales"]
    assert text == f"scales of row {n - 16} shifted by one group"
    assert after.scales[n].tolist() == [before.scales[n].tolist()[g - 1] for g in range(4)]
    assert damaged("shift a group", seed, replace(before, scales=torch.ones_like(before.scales))) is None


def test_scales_of_rows() -> None:
    before = matrix(0, replace(SPEC, group_size=64))
    after, text = damaged("shift a group", 0, before)  # type: ignore[misc]
    assert text == "scales shifted by one row"
    assert after.scales[:16].tolist() == before.scales[:16].tolist()
    assert after.scales[16:].tolist() == [*before.scales[-1:].tolist(), *before.scales[16:-1].tolist()]
    assert damaged("shift a group", 0, replace(before, scales=torch.ones_like(before.scales))) is None


@SEEDS
def test_groups_of_two_features(seed: int) -> None:
    before = matrix(seed)
    after, text = damaged("change a group", seed, before)  # type: ignore[misc]
    ((one,), (other,)) = changed(before, after)["group_index"]
    assert list(changed(before, after)) == ["group_index"]
    assert sorted(numbers(text)) == [one, other]
    assert before.group_index is not None
    assert after.group_index is not None
    assert [int(after.group_index[at]) for at in (one, other)] == [int(before.group_index[at]) for at in (other, one)]
    assert damaged("change a group", seed, replace(before, group_index=None)) is None


@SEEDS
def test_the_largest_bias(seed: int) -> None:
    before = matrix(seed)
    after, text = damaged("change a bias", seed, before)  # type: ignore[misc]
    assert before.bias is not None
    assert after.bias is not None
    largest = max(range(16, 48), key=lambda row: abs(float(before.bias[row])))  # type: ignore[index]
    assert changed(before, after) == {"bias": [[largest]]}
    assert text == f"bias of row {largest - 16} times 1.125"
    assert float(after.bias[largest]) == pytest.approx(1.125 * float(before.bias[largest]), rel=1e-3)
    assert damaged("change a bias", seed, replace(before, bias=None)) is None


@SEEDS
@pytest.mark.parametrize(
    ("name", "dtype", "stored", "then", "text"),
    [
        ("e8m0 off by one", "e8m0", None, None, "exponent of row {} group {} off by one"),
        ("e8m0 off by one", "e8m0", 253, 254, "exponent of row {} group {} off by one"),
        ("e8m0 off by one", "e8m0", 254, 253, "exponent of row {} group {} off by one"),
        ("e4m3 scale off by one", "e4m3", 125, 126, "e4m3 scale of row {} group {} one step larger"),
        ("e4m3 scale off by one", "e4m3", 126, 125, "e4m3 scale of row {} group {} one step larger"),
    ],
)
def test_the_next_scale(name: str, dtype: str, stored: int | None, then: int | None, text: str, seed: int) -> None:
    before = matrix(seed, replace(SPEC, scale_dtype=dtype))
    if stored is not None:
        before = replace(before, scales=torch.full_like(before.scales, stored))
    after, words = damaged(name, seed, before)  # type: ignore[misc]
    ((n, g),) = changed(before, after)["scales"]
    assert words == text.format(n - 16, g)
    assert int(after.scales[n, g]) == (int(before.scales[n, g]) + 1 if then is None else then)


def test_the_second_scale_and_the_halves() -> None:
    before = matrix(0)
    after, _ = damaged("change the second scale", 0, before)  # type: ignore[misc]
    assert list(changed(before, after)) == ["global_scale"]
    assert before.global_scale is not None
    assert torch.equal(after.global_scale, before.global_scale * 1.015625)  # type: ignore[arg-type]
    assert damaged("change the second scale", 0, replace(before, global_scale=None)) is None
    swapped, _ = damaged("swap gate and up", 0, before)  # type: ignore[misc]
    for name in ("codes", "scales", "zeros", "bias", "global_scale"):
        one, other = getattr(before, name), getattr(swapped, name)
        assert torch.equal(other, torch.cat([one[24:], one[:24]])), name
    assert [kind.name for kind in SABOTAGES if kind.both_halves] == ["swap gate and up"]


@pytest.mark.parametrize(
    ("change", "kinds"),
    [
        ({}, {"drop a zero point", "change a group", "change a bias", "swap gate and up"}),
        ({"symmetric": True, "act_order": False, "bias_dtype": None, "gated": False}, set()),
        (
            {"symmetric": True, "act_order": False, "scale_dtype": "e8m0"},
            {"change a bias", "e8m0 off by one", "swap gate and up"},
        ),
        (
            {"symmetric": True, "act_order": False, "bias_dtype": None, "scale_dtype": "e4m3", "role": "w2"},
            {"e4m3 scale off by one", "change the second scale"},
        ),
    ],
)
def test_what_a_matrix_can_have(change: dict[str, object], kinds: set[str]) -> None:
    always = {"flip a code", "swap two scales", "transpose a tile", "shift a group"}
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    assert {kind.name for kind in SABOTAGES if kind.possible(spec)} == always | kinds
