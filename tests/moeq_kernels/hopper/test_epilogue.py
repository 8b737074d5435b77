"""Functions of device code that end a product, one by one, on a CPU (`support.gluon_on_cpu`)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from support import gluon_on_cpu
from support.gluon_on_cpu import Pointer
from support.packing import marlin_scale
from support.ptx_on_cpu import value
from torch import Tensor

from moeq.reference import moe
from moeq_kernels.epilogue import Epilogue

EPILOGUE: Any = gluon_on_cpu._module("moeq_kernels.hopper.device.epilogue")
FEW: Any = gluon_on_cpu._module("moeq_kernels.hopper.device.few")
COMMON: Any = gluon_on_cpu._module("moeq_kernels.hopper.w4a16.device.common")

#: Both sides of every bend, and what is far from all.
NUMBERS = torch.tensor([-40.0, -9.0, -3.0, -1.0, -0.25, -0.2, -1e-3, 0.0, 1e-4, 0.125, 0.25, 0.3, 1.5, 6.9, 7.1, 50.0])


def close(found: Any, wanted: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(found).as_subclass(Tensor), wanted, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_activations(name: str) -> None:
    close(EPILOGUE.activate(value(NUMBERS), name), moe.ACTIVATIONS[name](NUMBERS.double()).float())
    assert math.isnan(float(EPILOGUE.activate(value(torch.tensor(math.nan)), name)))


def test_tanh_keeps_its_digits_near_zero() -> None:
    for x in (NUMBERS, torch.linspace(-0.26, 0.26, 1001), torch.logspace(-20, 0, 99)):
        found = torch.as_tensor(EPILOGUE.tanh(value(x))).as_subclass(Tensor)
        torch.testing.assert_close(found, x.double().tanh().float(), rtol=2e-6, atol=0)


@pytest.mark.parametrize(
    ("epilogue", "meant"),
    [
        (Epilogue("silu", gated=True), moe.Activation("silu")),
        (Epilogue("silu", gated=True, limit=7.0), moe.Activation("silu", limit=7.0)),
        (Epilogue("gelu_tanh", gated=True), moe.Activation("gelu_tanh")),
        (Epilogue("swiglu_oai", True, alpha=1.5, limit=7.0), moe.Activation("swigluoai", 1.5, 7.0)),
        (Epilogue("swiglu_oai", True, alpha=1.5), moe.Activation("swigluoai", 1.5)),
        (Epilogue("swiglu_step", True, limit=7.0), moe.Activation("swiglustep", limit=7.0)),
        (Epilogue("situ", True, alpha=4.0), moe.Activation("situ", 4.0)),
        (Epilogue("situ", True, alpha=4.0, limit=25.0), moe.Activation("situ", 4.0, 25.0)),
    ],
    ids=str,
)
def test_gate_and_up(epilogue: Epilogue, meant: moe.Activation) -> None:
    gate, up = torch.meshgrid(NUMBERS, NUMBERS, indexing="ij")
    found = EPILOGUE.activate_gated(value(gate), value(up), epilogue)
    close(found, moe.activate(gate.double(), up.double(), meant).float())


def test_the_number_that_gpt_oss_adds_to_up() -> None:
    epilogue = Epilogue("swiglu_oai", True, alpha=1.0, beta=0.0)
    found = EPILOGUE.activate_gated(value(NUMBERS), value(2 * NUMBERS), epilogue)
    close(found, (torch.nn.functional.silu(NUMBERS.double()) * 2 * NUMBERS).float())


def test_clamps_keep_what_is_not_a_number() -> None:
    given = value(torch.tensor([math.nan, -8.0, -7.0, 7.0, 8.0]))
    for clamp, low in ((EPILOGUE.at_most, -8.0), (EPILOGUE.within, -7.0)):
        found = clamp(given, 7.0).tolist()
        assert math.isnan(found[0])
        assert found[1:] == [low, -7.0, 7.0, 7.0]


def test_columns_of_scales_lie_in_marlins_order() -> None:
    columns = torch.arange(128)
    stored = marlin_scale(columns.to(torch.int32)[None, :, None])[0, 0].flatten()
    places = EPILOGUE.single_order(value(columns))
    assert torch.equal(stored[torch.as_tensor(places).as_subclass(Tensor)].long(), columns)


def test_scales_and_biases_are_those_of_the_expert() -> None:
    scale, bias = torch.arange(128.0), 1000 + torch.arange(128.0)
    feature = value(torch.arange(64)[None])
    place = 64 + EPILOGUE.single_order(feature).as_subclass(Tensor)
    inside = value(torch.arange(64)[None] < 40)
    expert, ones = value(torch.tensor(1)), value(torch.ones(1, 64))

    def affine(scale: Tensor | None, bias: Tensor | None, here: bool, **unit: float) -> Tensor:
        pointers = [None if one is None else Pointer(one) for one in (scale, bias)]
        found = EPILOGUE.affine(ones, feature, *pointers, value(here), expert, 64, inside, **unit)
        return torch.as_tensor(found).as_subclass(Tensor)

    held = inside.as_subclass(Tensor)
    factor, shift = torch.where(held, scale[place], 0.0), torch.where(held, bias[place], 0.0)
    assert torch.equal(affine(None, None, True), torch.ones(1, 64))
    assert torch.equal(affine(scale, None, True), factor)
    assert torch.equal(affine(scale, bias, True, UNIT=0.5), factor / 2 + shift)
    assert torch.equal(affine(scale, bias, False), factor)
    assert torch.equal(affine(None, bias, True), 1 + shift)


@pytest.mark.parametrize("mapped", [False, True])
def test_the_expert_of_a_pair(mapped: bool) -> None:
    """Ids of six known experts; three are here, where the map says. Others are none, and no map is read beyond."""
    ids = torch.tensor([0, 1, 2, 5, 6, -1, 2**31 - 1, -(2**31)], dtype=torch.int32)
    places = torch.tensor([2, -1, 0, 3, 1, -5], dtype=torch.int32)
    found = [
        int(FEW.expert_of(Pointer(ids), Pointer(places), value(torch.tensor(pair)), 3, 6, mapped))
        for pair in range(len(ids))
    ]
    assert found == ([2, -1, 0, -1, -1, -1, -1, -1] if mapped else [0, 1, 2, 5, -1, -1, -1, -1])


def test_results_in_sixteen_bits() -> None:
    """A sign, 7 bits of an exponent (2^-64 times the value), 8 of a fraction, made here by arithmetic, not by bits."""
    made = torch.Generator().manual_seed(0)
    values = torch.randn(999, generator=made) * torch.exp2(torch.randint(-50, 60, (999,), generator=made))
    values = torch.cat([values, torch.tensor([0.0, 1.0, -1.0, 1.00390625, -255.5, 2.0**-61, -1.5 * 2.0**63])])
    mantissa, exponent = torch.frexp(values.double())  # mantissa in [1/2, 1)
    fraction = torch.floor((mantissa.abs() * 2 - 1) * 256 + 0.5).int()
    code = torch.where(values == 0, 0, (exponent.int() - 1 - 64 + 127) * 256 + fraction)  # 256 is the next exponent
    found = torch.as_tensor(COMMON.rounded(value(values), torch.int16)).as_subclass(Tensor)
    assert torch.equal(found, torch.where(values < 0, code - 32768, code).to(torch.int16))
    beyond = torch.tensor([2.0**64, -(2.0**65), math.inf, -math.inf, math.nan])
    assert torch.equal(
        torch.as_tensor(COMMON.rounded(value(beyond), torch.int16)).as_subclass(Tensor),
        torch.full((5,), 0x7FFF, dtype=torch.int16),
    )
