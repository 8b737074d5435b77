"""Activations of both kinds of kernels beside the engines' own formulas (`support.engine_activations` records them)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from support import gluon_on_cpu
from support.cases import Recipe, make_layer
from support.ptx_on_cpu import value
from support.reference import Layer
from support.reference import activate as plain_activate

from moeq_kernels.activations import ACTIVATIONS, BY_ENGINE_NAME, GATED, UNGATED
from moeq_kernels.device.activations import activate, activate_gated
from moeq_kernels.epilogue import Epilogue
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.validate import epilogue_of

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "activations.json").read_text())
ROWS = [(row["activation"].removesuffix("_ungated"), row) for row in GOLDEN["rows"]]
IDS = [f"{row['source'].partition(': ')[2]}-{row['constants']}" for row in GOLDEN["rows"]]


@triton.jit
def _apply(gate, up, out, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr, LIMIT: tl.constexpr):
    place = tl.arange(0, 32)
    if up is None:
        found = activate(tl.load(gate + place), ACTIVATION)
    else:
        found = activate_gated(tl.load(gate + place), tl.load(up + place), ACTIVATION, ALPHA, BETA, LIMIT)
    tl.store(out + place, found)


def inputs(row: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
    gate, up = (torch.nn.functional.pad(torch.tensor(GOLDEN[one]), (0, 12)) for one in ("gate", "up"))
    return gate, None if row["activation"].endswith("_ungated") else up


def epilogue(name: str, row: dict) -> Epilogue:
    order = "ungated" if row["activation"].endswith("_ungated") else "gate-up"
    packed, _ = make_layer(Recipe(order=order, activation=name))
    numbers = {key: row["constants"].get(key) for key in ("alpha", "beta", "limit")}
    return epilogue_of(packed, name, **numbers, weight_first=False)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=IDS)
def test_portable_kernels_agree_with_the_engines(name: str, row: dict, device: torch.device) -> None:
    gate, up = inputs(row)
    made = epilogue(name, row)
    out = torch.empty_like(gate, device=device)
    other = None if up is None else up.to(device)
    _apply[(1,)](gate.to(device), other, out, name, made.alpha, made.beta, made.limit)
    torch.testing.assert_close(out[:20].cpu(), torch.tensor(row["values"]), rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=IDS)
def test_gluon_kernels_agree_with_the_engines(name: str, row: dict) -> None:
    gate, up = inputs(row)
    functions = gluon_on_cpu._module("moeq_kernels.hopper.device.epilogue")
    made = epilogue(name, row)
    if up is None:
        found = functions.activate(value(gate), name)
    else:
        found = functions.activate_gated(value(gate), value(up), made)
    torch.testing.assert_close(torch.Tensor(found[:20]), torch.tensor(row["values"]), rtol=3e-6, atol=1e-9)


@pytest.mark.parametrize(("name", "row"), ROWS, ids=IDS)
def test_the_plain_layer_of_the_tests_agrees_with_the_engines(name: str, row: dict) -> None:
    gate, up = inputs(row)
    made = epilogue(name, row)
    order = "ungated" if up is None else "gate-up"
    both = gate[None, :20] if up is None else torch.cat((gate[:20], up[:20]))[None]
    layer = Layer(torch.empty(0), torch.empty(0), None, None, order, name, made.alpha, made.beta, made.limit or None)
    torch.testing.assert_close(plain_activate(both, layer)[0], torch.tensor(row["values"]), rtol=2e-6, atol=1e-9)


def test_every_formula_has_values_of_an_engine() -> None:
    """Gated ReLU² and ungated SiLU and GELU are the same functions as those with values."""
    assert {name for name, _ in ROWS} == set(ACTIVATIONS)
    assert set(GATED) | set(UNGATED) == set(ACTIVATIONS)
    assert {"silu", "silu_no_mul", "relu2", "swigluoai_uninterleave", "situ", "swiglustep"} <= set(BY_ENGINE_NAME)
    assert "situ_no_mul" not in BY_ENGINE_NAME


def test_nan_passes_clamps(device: torch.device) -> None:
    gate, up = torch.full((32,), float("nan"), device=device), torch.ones(32, device=device)
    for name in ("silu", "swiglu_oai", "swiglu_step"):
        for one, other in ((gate, up), (up, gate)):
            out = torch.empty_like(gate)
            _apply[(1,)](one, other, out, name, 1.702, 1.0, 7.0)
            assert out.isnan().all(), name


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("silu", {"alpha": 1.0}, "alpha belongs to swiglu_oai, situ, not to silu"),
        ("situ", {"alpha": 4.0, "beta": 1.0}, "beta belongs to swiglu_oai, not to situ"),
        ("situ", {}, "situ needs an alpha other than 0"),
        ("situ", {"alpha": 0.0}, "situ needs an alpha other than 0"),
        ("swiglu_step", {"limit": 0.0}, "limit is 0.0; it must be positive"),
        ("swish", {}, "unknown activation 'swish'"),
    ],
)
def test_numbers_that_a_formula_does_not_have(name: str, numbers: dict[str, float], message: str) -> None:
    packed, _ = make_layer(Recipe())
    given = {"alpha": None, "beta": None, "limit": None, **numbers}
    with pytest.raises(KernelArgumentError, match=message):
        epilogue_of(packed, name, **given, weight_first=False)
