"""Triton's interpreter gives the same numbers with what `quick_interpreter` leaves out and without."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import quick_interpreter
import torch
import triton
import triton.language as tl
from support.cases import Recipe, make_layer, route

from moeq_kernels import fused_moe, interpreter

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="kernels run on a GPU here")


def layer() -> torch.Tensor:
    packed, _ = make_layer(Recipe("fp8-block-identity/1", "e4m3", activation_dtype="fp8", hidden=256, intermediate=128))
    routed = route(5, 256, 4, 2)
    return fused_moe(routed.x, packed, routed.weights, routed.ids)


def test_the_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter as runtime

    def patch(place: Any, builder: Any, scope: Any) -> None:
        """As triton 3.7 does it."""
        for name, member in inspect.getmembers(place):
            if is_builtin(member):
                runtime._patch_attr(place, name, member, builder, scope)

    quick = layer()
    monkeypatch.setattr(runtime, "_patch_builtin", patch)
    options = runtime.interpreter_builder.options
    assert not options.debug, "the outcome of looking for overflow is not looked at"
    monkeypatch.setattr(runtime.interpreter_builder, "options", replace(options, sanitize_overflow=True))
    assert torch.equal(layer(), quick)


def test_the_language_is_as_before_after_a_kernel() -> None:
    import triton.language as tl

    before = dict(vars(tl)), dict(vars(tl.math))
    layer()
    assert (dict(vars(tl)), dict(vars(tl.math))) == before


@triton.jit
def _later(value, at, other, place):
    """Depends on the order in which elements are combined."""
    return value * 2 + other, tl.maximum(at, place) + (value > other).to(tl.int32)


@triton.jit
def _reduce(x, out, AXIS: tl.constexpr, KEEP: tl.constexpr):
    i = tl.arange(0, 4)[:, None, None] * 16 + tl.arange(0, 2)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    value = tl.load(x + i)
    both = tl.reduce(tl.xor_sum(value, AXIS, KEEP), None, tl.standard._xor_combine)
    first, second = tl.reduce((value, value % 7), AXIS, _later, KEEP)
    tl.store(out, both)
    tl.store(out + 1, tl.sum(tl.sort(tl.reshape(value, [64])) * tl.arange(0, 64)))
    rows: tl.constexpr = first.numel
    tl.store(out + 2 + tl.arange(0, rows), tl.reshape(first, [rows]))
    tl.store(out + 66 + tl.arange(0, rows), tl.reshape(second, [rows]))


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_reductions_stay(axis: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime.interpreter import ReduceOps

    def reduced() -> torch.Tensor:
        x = torch.randint(-100, 100, (64,), generator=torch.Generator().manual_seed(axis), dtype=torch.int32)
        out = torch.zeros(130, dtype=torch.int32)
        _reduce[(1,)](x, out, AXIS=axis, KEEP=keep)
        return out

    quick = reduced()
    assert quick.count_nonzero() > 10
    monkeypatch.setattr(ReduceOps, "generic_reduce", quick_interpreter.REPLACED["generic_reduce"])
    assert torch.equal(reduced(), quick)
