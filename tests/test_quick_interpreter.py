"""Triton's interpreter gives the same numbers with what `quick_interpreter` leaves out and without."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch

from bench.cases import Recipe, make_layer, route
from moeq_kernels import fused_moe, interpreter

pytestmark = pytest.mark.skipif(not interpreter.active(), reason="kernels run on a GPU here")


def layer() -> torch.Tensor:
    packed, _ = make_layer(Recipe("fp8-block-identity/1", "e4m3", activation_dtype="fp8", hidden=256, intermediate=128))
    routed = route(5, 256, 4, 2)
    return fused_moe(routed.x, packed, routed.weights, routed.ids)


def test_the_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.language.core import is_builtin
    from triton.runtime import interpreter as triton

    def patch(place: Any, builder: Any, scope: Any) -> None:
        """As triton 3.7 does it."""
        for name, member in inspect.getmembers(place):
            if is_builtin(member):
                triton._patch_attr(place, name, member, builder, scope)

    quick = layer()
    monkeypatch.setattr(triton, "_patch_builtin", patch)
    options = triton.interpreter_builder.options
    assert not options.debug, "the outcome of looking for overflow is not looked at"
    monkeypatch.setattr(triton.interpreter_builder, "options", replace(options, sanitize_overflow=True))
    assert torch.equal(layer(), quick)


def test_the_language_is_as_before_after_a_kernel() -> None:
    import triton.language as tl

    before = dict(vars(tl)), dict(vars(tl.math))
    layer()
    assert (dict(vars(tl)), dict(vars(tl.math))) == before
