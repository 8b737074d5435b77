"""Every reason against the Hopper kernels, each beside the nearest layer that has none."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import triton
from support.cases import Recipe, make_layer

from moeq_kernels.epilogue import Epilogue
from moeq_kernels.errors import KernelUnsupportedError
from moeq_kernels.gpu import GPUS, H200
from moeq_kernels.hopper import support
from moeq_kernels.problem import Problem, describe

INT4 = Recipe(experts=4, hidden=256, intermediate=128, group_size=64)
INT8 = Recipe("int8-w8a8/1", "int8", experts=4, hidden=256, intermediate=128)


def problem_of(recipe: Recipe, **others: object) -> Problem:
    packed, _ = make_layer(recipe)
    x = torch.empty(1, recipe.hidden, dtype=torch.bfloat16)
    return replace(describe(x, packed, Epilogue("silu", gated=True), 2, gpu=H200), interpret=False, **others)


def said(problem: Problem, reasons: Callable[[Problem], Iterator[str]]) -> list[str]:
    return list(reasons(problem))


def test_layers_without_a_reason() -> None:
    for recipe, family in ((INT4, "hopper-w4a16"), (INT8, "hopper-w8a8")):
        problem = problem_of(recipe)
        assert support.family(problem) == family
        assert support.unsupported_reason(problem) is None
    assert said(problem_of(INT4), support.w4a8_reasons) == []
    support.require_w4a8(problem_of(INT4))


def test_machines() -> None:
    problem = problem_of(INT4)
    for gpu, reason in (
        (replace(H200, capability=(9, 1)), "H200 has compute capability 9.1; these kernels are for 9.0 (Hopper)"),
        (replace(H200, capability=(8, 0)), "H200 has compute capability 8.0; these kernels are for 9.0 (Hopper)"),
        (GPUS["MI300X"], "MI300X is not an NVIDIA GPU"),
    ):
        assert said(replace(problem, gpu=gpu), support.machine_reasons) == [reason]
    assert said(replace(problem, interpret=True), support.machine_reasons) == ["x is on cpu, not on an NVIDIA GPU"]
    with pytest.raises(KernelUnsupportedError, match=r"fp8 activations beside .* int4 weights: x is on cpu"):
        support.require_w4a8(replace(problem, interpret=True))


@pytest.mark.parametrize(
    ("version", "runs"),
    [("3.5.1", False), ("3.6.0", True), ("3.9.2+git", True), ("3.10.0", False), ("4.0.0", False), ("main", False)],
)
def test_versions_of_triton(version: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    reason = None if runs else f"triton is {version}; these kernels are checked with 3.6 to 3.9"
    assert support.triton_reason() == reason
    assert said(problem_of(INT4), support.machine_reasons) == ([] if runs else [reason])
    monkeypatch.setitem(sys.modules, "triton", None)
    assert support.triton_reason() == "triton is not installed"


@pytest.mark.parametrize("recipe", [INT4, INT8])
def test_what_no_family_takes(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(recipe)
    first = replace(problem, epilogue=Epilogue("silu", gated=True, weight="first"))
    assert support.unsupported_reason(first) == "router weights multiply the input; these kernels multiply the output"
    monkeypatch.setattr(support, "MAX_EXPERTS", 4)
    assert support.unsupported_reason(problem) is None
    monkeypatch.setattr(support, "MAX_EXPERTS", 3)
    assert support.unsupported_reason(problem) == "4 experts; these kernels sort pairs among at most 3"


def test_rows_that_are_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(INT8)
    ungated = replace(problem, epilogue=Epilogue("relu2"))
    assert said(ungated, support.int8_reasons) == ["w13 has no gate; these kernels multiply with gate and up"]
    for most, widest in ((256, []), (255, [256]), (128, [256])):
        monkeypatch.setattr(support, "MAX_QUANTISED_FEATURES", most)
        found = [f"rows have {one} features; these kernels quantise at most {most}" for one in widest]
        assert said(problem, support.int8_reasons) == found
        wide = [f"rows have more than {most} features; these kernels quantise at most that many"] * len(widest)
        assert said(problem_of(INT4), support.w4a8_reasons) == wide


def test_sizes_that_the_copy_engine_takes() -> None:
    problem = problem_of(INT4)
    assert said(replace(problem, hidden=248), support.reasons) == []
    assert said(replace(problem, hidden=252), support.reasons) == [
        "x has 252 features; the copy engine needs a multiple of 8"
    ]
    assert said(replace(problem, hidden=240), support.w4a8_reasons) == []
    assert said(replace(problem, hidden=248), support.w4a8_reasons) == [
        "x has 248 features; these kernels order them in sixteens"
    ]
    int8 = problem_of(INT8)
    odd = replace(int8, w2=replace(int8.w2, k=120))
    assert said(odd, support.int8_reasons) == ["w2 has k = 120; the copy engine needs a multiple of 16"]


def test_parts_and_formats() -> None:
    problem, other = problem_of(INT4), problem_of(INT8)
    mixed = replace(problem, w2=other.w2)
    known = "marlin-wna16/1 int4"
    assert f"w2 is int8-w8a8/1 int8; these kernels read {known}" in str(said(mixed, support.w4a8_reasons))
    assert "w13 is int4, but w2 is int8; these kernels read one format in a layer" in said(mixed, support.w4a8_reasons)
    assert said(replace(other, w13=problem.w13), support.int8_reasons)[0].startswith("w13 is marlin-wna16/1 int4; ")
    asked = replace(problem, w13=replace(problem.w13, activation_dtype="fp8"))
    assert said(asked, support.reasons) == ["w13 asks for fp8 activations; these kernels multiply 16-bit ones"]
    scale = problem.w2.scale
    assert scale is not None
    wrong = replace(problem, w2=replace(problem.w2, scale=replace(scale, dtype=torch.float32)))
    (reason,) = said(wrong, support.reasons)
    assert reason.startswith("w2.scale is float32; these kernels read bfloat16")
    group = replace(problem, w13=replace(problem.w13, group_index=scale))
    assert said(group, support.reasons) == ["w13 has a group_index, which these kernels do not apply"]
    multiplied = replace(other, w2=replace(other.w2, global_scale=scale))
    assert said(multiplied, support.int8_reasons) == ["w2 has a global_scale, which these kernels do not apply"]
