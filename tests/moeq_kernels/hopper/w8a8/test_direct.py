"""W8A8 layers for very few tokens, without a GPU: both kernels are replaced by torch, from the arguments they get."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from support.cases import Recipe, make_layer, meta_experts, route
from support.comparison import random_map
from support.planned import hopper_int8_moe, quantize
from torch import Tensor

from moeq_kernels import fused_moe, prepare
from moeq_kernels.epilogue import SILU, Epilogue
from moeq_kernels.hopper.w8a8.device import direct
from moeq_kernels.hopper.w8a8.direct_launches import gate_up_rows
from moeq_kernels.hopper.w8a8.w8a8_plan import Int8Direct, Int8Plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the real kernels are tested")
OAI = Epilogue("swiglu_oai", gated=True, interleaved=True, limit=7.0)


class Kernel:
    """Stands in for a kernel that takes its arguments by name."""

    def __init__(self, name: str) -> None:
        self.parameters = set(getattr(direct, name).arg_names)
        self.grid: tuple[int, ...] = ()

    def __getitem__(self, grid: tuple[int, ...]) -> Kernel:
        self.grid = grid
        return self

    def __call__(self, **given: Any) -> None:
        assert given.keys() - {"num_warps", "launch_pdl"} == self.parameters
        assert given["SHARE"] <= given["STEPS"] < 2 * given["SHARE"]
        assert given["STAGES"] <= given["SHARE"]
        blocks, pairs, shares = self.grid
        assert pairs == given["pairs"]
        assert (shares - 1) * given["SHARE"] < given["count"] <= shares * given["SHARE"]
        self.run(given, blocks, shares)

    def run(self, given: dict[str, Any], blocks: int, shares: int) -> None:
        raise NotImplementedError


def _expert(given: dict[str, Any], pair: int) -> int:
    expert, expert_map = int(given["ids"].flatten()[pair]), given["expert_map"]
    assert (expert_map is not None) == given["MAPPED"]
    return expert if expert < 0 or expert_map is None else int(expert_map[expert])


def _products(given: dict[str, Any], expert: int, codes: Tensor, shares: int) -> tuple[Tensor, Tensor]:
    """Exact sums `[shares, rows]` with both of the weights' descriptors."""
    results = []
    for desc in (given["first_desc"], given["second_desc"]):
        assert tuple(desc.block_shape) == (1, 64, 128)
        each = 128 * given["SHARE"]
        weights = desc.base[expert].double()
        parts = [slice(share * each, (share + 1) * each) for share in range(shares)]
        full = torch.nn.functional.pad(codes, (0, weights.shape[1] - len(codes))).double()
        results.append(torch.stack([weights[:, part] @ full[part] for part in parts]))
    return results[0], results[1]


class GateUp(Kernel):
    """Of `few_gate_up_int8`."""

    def run(self, given: dict[str, Any], blocks: int, shares: int) -> None:
        columns = given["columns"]
        assert blocks == -(-columns // 64)
        assert given["COLUMNS"] >= given["hidden"]
        assert given["sums"].shape == (shares, given["pairs"], 2 * columns)
        given["arrived"][: given["to_clear"]] = 0
        for pair in range(given["pairs"]):
            expert = _expert(given, pair)
            if expert >= 0:
                row = given["x"][pair // given["top_k"]]
                codes, scale = quantize(row[None], given["static_scale"])
                gate, up = _products(given, expert, codes[0], shares)
                given["sums"][:, pair] = torch.cat([gate, up], 1).int()
                given["scales"][pair] = scale


class Down(Kernel):
    """Of `few_down_int8`."""

    def run(self, given: dict[str, Any], blocks: int, shares: int) -> None:
        columns, hidden, epilogue = given["columns"], given["hidden"], given["EPILOGUE"]
        assert blocks == -(-hidden // given["ROWS"])
        assert given["COLUMNS"] >= columns
        tokens = given["pairs"] // given["TOP_K"]
        assert torch.equal(given["arrived"], torch.zeros(tokens * blocks, dtype=torch.int32))
        y = torch.zeros(tokens, hidden)
        for pair in range(given["pairs"]):
            expert, token = _expert(given, pair), pair // given["TOP_K"]
            if expert < 0:
                continue
            total = given["sums"][: given["UP_SHARES"], pair].sum(0)
            values = []
            for part, start in ((total[:columns], 0), (total[columns:], given["up_row"])):
                row = start + torch.arange(columns) * given["row_step"]
                value = part.float() * given["up_scale"].view(-1, 2 * columns)[expert, row] * given["scales"][pair]
                values.append(value if given["up_bias"] is None else value + given["up_bias"][expert, row].float())
            gate, up = values
            if epilogue.limit:
                gate, up = gate.clamp(max=epilogue.limit), up.clamp(-epilogue.limit, epilogue.limit)
            oai = epilogue.activation == "swiglu_oai"
            value = (
                gate * torch.sigmoid(gate * (epilogue.alpha if oai else 1.0)) * (up + (epilogue.beta if oai else 0.0))
            )
            codes, scale = quantize(value.to(given["y"].dtype)[None], given["static_scale"])
            first, second = _products(given, expert, codes[0], shares)
            assert torch.equal(first, second)
            result = first.sum(0).float() * given["w_scale"].view(-1, given["w_rows"])[expert] * scale
            result = result if given["bias"] is None else result + given["bias"][expert].float()
            y[token] += float(given["topk_weights"][token, pair % given["TOP_K"]]) * result[:hidden]
        given["y"].copy_(y)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "few_gate_up_int8", GateUp("few_gate_up_int8"))
    monkeypatch.setattr(direct, "few_down_int8", Down("few_down_int8"))


@pytest.mark.cover(every=3)
@pytest.mark.parametrize(
    ("tokens", "plan", "mapped", "bias", "epilogue", "static"),
    [
        (3, Int8Plan(Int8Direct(), 3, 2), True, True, OAI, False),
        (1, Int8Plan(Int8Direct()), False, False, SILU, False),
        (2, Int8Plan(Int8Direct(2), 2, 3), True, False, SILU, True),
    ],
)
def test_layer_equals_the_portable_kernels(
    tokens: int, plan: Int8Plan, mapped: bool, bias: bool, epilogue: Epilogue, static: bool
) -> None:
    limit, order = epilogue.limit or None, "gate-up" if epilogue is SILU else "interleaved"
    recipe = Recipe("int8-w8a8/1", "int8", experts=4, hidden=352, intermediate=304, bias=bias,
                    activation=epilogue.activation, order=order, limit=limit)  # fmt: skip
    packed, _ = make_layer(recipe)
    if static:
        w13, w2 = (dataclasses.replace(one, input_scale=torch.tensor([0.03])) for one in (packed.w13, packed.w2))
        packed = dataclasses.replace(packed, w13=w13, w2=w2)
    known = 8 if mapped else 4
    expert_map = random_map(known, 4, 1, "cpu") if mapped else None
    given = route(tokens, 350 if mapped else 352, known, 2, dtype=torch.float16)  # bf16 is cut off in the interpreter
    ids = given.ids.clone()
    ids[tokens // 2, 0] = -1
    y = hopper_int8_moe(given.x, packed, given.weights, ids, epilogue=epilogue, expert_map=expert_map, plan=plan)
    wanted = fused_moe(given.x, packed, given.weights, ids, activation=epilogue.activation,
                       limit=limit, expert_map=expert_map)  # fmt: skip
    assert (y.float() - wanted.float()).norm() <= 1e-3 * wanted.float().norm()


def test_up_rows_come_after_gate_rows_or_between_them() -> None:
    problem = prepare(meta_experts(4, 256, 128, "int8-w8a8/1", "int8", -1), top_k=2, max_tokens=1, gpu="H100").problem
    assert gate_up_rows(problem) == (128, 1)
    assert gate_up_rows(dataclasses.replace(problem, epilogue=OAI)) == (1, 2)
