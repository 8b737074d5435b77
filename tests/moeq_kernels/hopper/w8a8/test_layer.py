"""W8A8 layers of the Hopper kernels up to what needs a Hopper GPU: routing, quantising and launches are the real ones.

Gluon has no interpreter, so the two product kernels are replaced by the product in torch, from the very arguments
that they get: descriptors, tiles, scales, places, counters.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support.cases import Recipe, make_layer, route
from support.comparison import random_map
from support.planned import hopper_int8_moe, quantize

from moeq_kernels import fused_moe
from moeq_kernels.areas import Arena
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.hopper.w8a8 import w8a8_launches as layer
from moeq_kernels.hopper.w8a8.device import narrow, wide
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Narrow, Int8Plan, Int8Wide
from moeq_kernels.launch import run_with_triton
from moeq_kernels.prepared import prepare_for
from moeq_kernels.problem import Piece

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the real kernels are tested")


class Product:
    """Stands in for a product kernel; `seen` are the constants of its launches."""

    def __init__(self, wide: bool) -> None:
        self.wide = wide
        self.seen: list[dict[str, Any]] = []

    def __getitem__(self, _grid: tuple[int, ...]) -> Product:
        return self

    def __call__(self, first_desc: Any, second_desc: Any, x_desc: Any, x_scale: Any, w_scale: Any, bias: Any, out: Any,
                 tiles: Any, num_tiles: Any, steps: int, blocks: int, columns: int, stride: int, w_rows: int,
                 up_row: int, row_step: int, **constants: Any) -> None:  # fmt: skip
        self.seen.append(constants)
        first, second, x = first_desc, second_desc, x_desc
        splits, rows = constants.get("splits", 1), constants.get("rows", out.shape[1])
        gated, split = constants["EPILOGUE"].gated, constants.get("SPLIT", False)
        if self.wide:
            self.count(constants, (len(tiles), blocks))
        tile = 128 if self.wide else constants["TOKENS"]
        item = (128 if gated else 256) if self.wide else (64 if gated else 128) * constants["WARPGROUPS"]
        assert blocks == -(-columns // item)
        assert (rows, stride) == (out.shape[1], out.stride(1))
        assert columns * (2 if split else 1) <= stride
        scale = w_scale.reshape(-1, w_rows).float()
        if constants.get("DIRECT"):
            known = [one if num_tiles is None or one < 0 else int(num_tiles[one]) for one in tiles.flatten().tolist()]
            items = [[max(one, 0), row, row + (one >= 0)] for row, one in enumerate(known)]
        else:
            items = tiles[: int(num_tiles[0]), :3].tolist()
        for expert, start, end in items:
            some = slice(start, min(start + tile, end))
            for number in range(splits):
                each = -(-steps // splits) * 128
                k = slice(number * each, min((number + 1) * each, x.base.shape[1]))
                both = []
                for desc, begin in ((first, 0), (second, up_row)):
                    assert tuple(desc.block_shape) == (1, 128 if self.wide else 64, 128)
                    total = x.base[some, k].double() @ desc.base[expert][:, k].double().T
                    where = begin * gated + row_step * torch.arange(columns)
                    total = total[:, :columns]
                    value = total.float() * scale[expert, where] * x_scale[some, None]
                    if bias is not None and number == 0:
                        value = value + bias[expert, where].float()
                    both.append(total if split else value)
                if not gated:
                    out[number, some] = both[0].to(out.dtype)
                elif split:
                    out[number, some] = torch.cat(both, 1).to(torch.int32)
                else:
                    out[number, some] = _activate(constants["EPILOGUE"], *both).to(out.dtype)

    def count(self, constants: dict[str, Any], most: tuple[int, int]) -> None:
        """Takes all items from the counter, as programs do until there are no more: each product has its own."""
        assert constants["queue"].tolist() == [0]
        constants["queue"] += math.prod(most)
        # Integers are quantised by a kernel behind the gate-up product, for which the down product waits as a whole.
        assert (constants["out_scale"], constants["ROUNDED"], constants["FOLLOWS"]) == (None, None, False)
        assert not constants["done"].any()


def _activate(epilogue: Epilogue, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    limit = epilogue.limit
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    if epilogue.activation == "silu":
        return gate * torch.sigmoid(gate) * up
    return gate * torch.sigmoid(epilogue.alpha * gate) * (up + epilogue.beta)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> dict[str, Product]:
    torch.utils.deterministic.fill_uninitialized_memory = True
    found = {"narrow": Product(wide=False), "wide": Product(wide=True)}
    monkeypatch.setattr(narrow, "w8a8_product_narrow", found["narrow"])
    monkeypatch.setattr(wide, "w8a8_product_wide", found["wide"])
    return found


NARROW, WIDE = Int8Narrow(8, 2), Int8Wide(2)
OAI = Epilogue("swiglu_oai", gated=True, interleaved=True, limit=7.0)


@pytest.mark.cover(every=8)
@pytest.mark.parametrize(
    ("tokens", "top_k", "plan", "mapped", "bias", "epilogue", "few"),
    [
        (5, 2, Int8Plan(NARROW), False, False, SILU, 16),
        (7, 2, Int8Plan(NARROW, 2, 2), True, True, OAI, 16),
        (3, 3, Int8Plan(NARROW, 3, 1), False, True, SILU, 16),
        (9, 2, Int8Plan(WIDE), True, True, OAI, 18),
        (1, 3, Int8Plan(NARROW), True, False, SILU, 16),
        (1, 2, Int8Plan(NARROW, 2, 1), False, True, OAI, 16),
        (21, 2, Int8Plan(WIDE), False, False, SILU, 16),
        (21, 2, Int8Plan(NARROW), False, False, SILU, 16),  # the kernels for many pairs
    ],
)
def test_layer_equals_the_portable_kernels(
    products: dict[str, Product], monkeypatch: pytest.MonkeyPatch, tokens: int, top_k: int, plan: Int8Plan,
    mapped: bool, bias: bool, epilogue: Epilogue, few: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(layer, "MAX_FEW_PAIRS", few)
    monkeypatch.setattr(layer, "MAX_SINGLE_ROW_PAIRS", few)
    limit, order = epilogue.limit or None, "gate-up" if epilogue is SILU else "interleaved"
    recipe = Recipe("int8-w8a8/1", "int8", experts=4, hidden=352, intermediate=304, bias=bias,
                    activation=epilogue.activation, order=order, limit=limit)  # fmt: skip
    packed, _ = make_layer(recipe)
    known = 8 if mapped else 4
    expert_map = random_map(known, 4, 1, "cpu") if mapped else None
    given = route(tokens, 350 if mapped else 352, known, top_k, dtype=torch.float16)  # bf16 is cut off here
    ids = given.ids.clone()
    ids[tokens // 2, 0] = -1
    torch.use_deterministic_algorithms(True)  # fills what is not written with NaN
    try:
        y = hopper_int8_moe(
            given.x, packed, given.weights, ids, epilogue=epilogue, expert_map=expert_map, plan=plan, dependent=False
        )
    finally:
        torch.use_deterministic_algorithms(False)
    wanted = fused_moe(given.x, packed, given.weights, ids, activation=epilogue.activation,
                       limit=limit, expert_map=expert_map)  # fmt: skip
    used = products["narrow" if isinstance(plan.kernel, Int8Narrow) else "wide"].seen
    assert [one["EPILOGUE"].gated for one in used] == [True, False]
    # What may differ: the last bit of the activation, hence a code now and then, and where results are rounded.
    difference = (y.float() - wanted.float()).norm() / wanted.float().norm()
    assert difference < 1e-3


def test_codes_and_scales_are_those_of_the_portable_kernel(products: dict[str, Product]) -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(37, 300, generator=generator).to(torch.bfloat16)
    x[5] = 0
    x[6] = torch.linspace(-127, 127, 300).to(torch.bfloat16) / 2  # many ties
    ids = torch.rand(37, 6, generator=generator).topk(2, dim=1).indices.int()
    packed, _ = make_layer(Recipe("int8-w8a8/1", "int8", experts=6, hidden=300 // 4 * 4, intermediate=64))
    codes, scales = quantize(x, None)
    for tokens in (8, 37):  # 37 tokens: in one kernel; and as with many pairs
        prepared = prepare_for(
            x[:tokens], packed, 2, tokens, SILU, None, family="hopper-w8a8", plan=Int8Plan(NARROW), dependent=False
        )
        arena = Arena()
        piece = Piece.whole(prepared.problem, tokens)
        launches, found = layer._quantised(prepared.problem, piece, arena, Int8Plan(NARROW), None)
        roots = {"x": x[:tokens], "topk_ids": ids[:tokens], "workspace": torch.empty(arena.used, dtype=torch.uint8)}
        run_with_triton(launches, roots)
        rows = found.sorted.inverse.bind(roots).long()
        order = torch.sort(ids[:tokens].reshape(-1), stable=True).indices
        assert torch.equal(rows[order], torch.arange(2 * tokens))
        assert torch.equal(found.rows.codes.bind(roots)[rows], codes[:tokens].repeat_interleave(2, dim=0))
        assert torch.equal(found.rows.scales.bind(roots)[rows], scales[:tokens].repeat_interleave(2))


def test_static_scales_are_used(products: dict[str, Product]) -> None:
    import dataclasses

    packed, _ = make_layer(Recipe("int8-w8a8/1", "int8", experts=4, hidden=128, intermediate=64))
    packed = dataclasses.replace(
        packed,
        w13=dataclasses.replace(packed.w13, input_scale=torch.tensor([0.03])),
        w2=dataclasses.replace(packed.w2, input_scale=torch.tensor([0.01])),
    )
    given = route(9, 128, 4, 2, dtype=torch.float16)
    y = hopper_int8_moe(given.x, packed, given.weights, given.ids, plan=Int8Plan(NARROW), dependent=False)
    wanted = fused_moe(given.x, packed, given.weights, given.ids)
    assert (y.float() - wanted.float()).norm() / wanted.float().norm() < 1e-3
