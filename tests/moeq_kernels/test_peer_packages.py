"""FlashInfer's contenders against the package itself: arguments, and weights by its own functions.

Each part is skipped where it is not installed.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import packing
from support.cases import E2M1

from bench import shapes
from bench.peers.contenders import flashinfer_cutlass
from bench.peers.problem import Problem, Stack, make_problem, route
from bench.shapes import Group, Shape


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(shapes.SHAPES, "tiny", Shape(4, 2, 192, 128))


def problem_of(name: str) -> Problem:
    return make_problem(Group(name, "tiny"), "cpu")


class OnGpu(torch.Tensor):
    """A tensor that says it lies on a GPU: the functions that ask for that are plain torch."""

    is_cuda = True  # type: ignore[assignment]


class TestFlashInfer:
    @pytest.fixture
    def moe(self) -> Any:
        return pytest.importorskip("flashinfer.fused_moe")

    @pytest.mark.parametrize("name", ["mxfp4", "mxfp4-silu"])
    def test_up_comes_before_gate(self, name: str) -> None:
        problem = problem_of(name)
        swapped = flashinfer_cutlass.up_before_gate(problem.w13, problem.format)
        values, stored = Stack(swapped, problem.format)[1], Stack(problem.w13, problem.format)[1]
        gate, up = (stored[::2], stored[1::2]) if name == "mxfp4" else stored.chunk(2)
        assert torch.equal(values, torch.cat([up, gate]))
        if problem.w13.bias is not None and swapped.bias is not None:
            assert torch.equal(swapped.bias[:, :128], problem.w13.bias[:, 1::2])

    @pytest.mark.parametrize("kind", [flashinfer_cutlass.Bf16, flashinfer_cutlass.Fp8])
    @pytest.mark.parametrize("name", ["mxfp4", "mxfp4-silu"])
    def test_calls_fit_the_signatures(self, kind: type[flashinfer_cutlass.Bf16], name: str, moe: Any) -> None:
        problem = problem_of(name)
        contender = kind()
        contender.packed = lambda parts: ([part.codes for part in parts], [])  # type: ignore[method-assign]
        weights = contender.prepare(problem)
        assert (weights.hidden, weights.intermediate) == (256, 128)
        inputs = flashinfer_cutlass.Inputs(route(problem, 3, 0), torch.empty(3, 256))
        inspect.signature(moe.cutlass_fused_moe).bind(**flashinfer_cutlass.call(weights, inputs))
        size = inspect.signature(moe.core.cutlass_fused_moe_workspace_size)
        size.bind(3, 256, 128, 4, 2, x_dtype=torch.bfloat16, weight_dtype=torch.uint8, **kind.options)
        assert "profile_ids" in inspect.signature(moe.cutlass_fused_moe).parameters

    def test_scales_are_folded_as_the_kernels_read_them(self, moe: Any) -> None:
        """[E, rows / 64, K / 128, 16, 16 bytes], which the extension checks (as int32: 4) for e4m3 activations."""
        w13, _ = problem_of("mxfp4-silu").padded(256, 128)
        folded = moe.interleave_moe_scales_for_sm90_mixed_gemm(w13.scales)
        assert folded.shape == (4, 4, 2, 16, 16)
        assert folded.view(torch.int32).shape == (4, 4, 2, 16, 4)

    def test_codes_and_scales_for_e4m3_activations_mean_the_weights(self, moe: Any) -> None:
        """A code becomes e4m3 with the offset added to its exponent, 2^-6 of what it is: hence the compensation."""
        problem = problem_of("mxfp4-fp8")
        part = problem.w2
        words, offset, residual = moe.preprocess_moe_weights_for_sm90_mixed_gemm_humming(
            packing.nibbles(part.codes).as_subclass(OnGpu), part.scales.as_subclass(OnGpu), interleave=False
        )
        words, offset, residual = (one.as_subclass(torch.Tensor) for one in (words, offset, residual))
        codes = torch.stack([words & 15, words >> 4], -1).flatten(-2)
        e4m3 = torch.tensor(E2M1)[codes.int()] * torch.exp2(offset.float() - 6).repeat_interleave(32, -1)
        assert torch.equal(e4m3.to(torch.float8_e4m3fn).float(), e4m3)
        values = e4m3 * (residual * flashinfer_cutlass.COMPENSATION)[:, None, None]
        assert torch.equal(values, torch.stack([Stack(part, problem.format)[expert] for expert in range(4)]))


class Tuner:
    """FlashInfer's tuner, which is told the tactics of both products."""

    def choose_one(self, name: str, runners: list[Any], config: Any, tensors: Any, gemm_idx: int) -> Any:
        raise AssertionError("it chooses nothing")


def test_flashinfer_runs_its_fastest_tactics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tactics 0 to 2 are the first product's, 3 to 6 the second's; one of each does not run these sizes."""
    tuner, ran = Tuner(), list[Any]()

    def fused(profile_ids: list[int] | None, **_given: Any) -> None:
        if profile_ids is None:
            for product, tactics in enumerate(([0, 1, 2], [3, 4, 5, 6])):
                runner = SimpleNamespace(get_valid_tactics=lambda tensors, profile, found=tactics: found)
                tuner.choose_one(f"gemm{product + 1}", [runner], None, [], gemm_idx=product + 1)
            raise AssertionError("the default tactics run, which may not be for these sizes")
        if {1, 3} & set(profile_ids):
            raise RuntimeError("not for these sizes")
        ran.append(tuple(profile_ids))

    def event_us(call: Any) -> float:
        call()
        first, second = ran[-1]
        return {0: 30.0, 2: 20.0}[first] + {4: 9.0, 5: 7.0, 6: 8.0}[second]

    monkeypatch.setattr(flashinfer_cutlass, "event_us", event_us)
    contender = object.__new__(flashinfer_cutlass.Bf16)
    core = SimpleNamespace(cutlass_fused_moe_workspace_size=lambda *given, **more: 16)
    contender.flashinfer = SimpleNamespace(
        tuner=SimpleNamespace(get=lambda: tuner), moe=SimpleNamespace(cutlass_fused_moe=fused, core=core)
    )
    contender.tactics = {}
    weights = flashinfer_cutlass.Weights({}, 4, 2, 192, 128)
    for tokens in (3, 5, 3):
        inputs = contender.inputs(weights, route(problem_of("mxfp4"), tokens, 0))
        timed = len(ran)
        contender.run(weights, inputs)
        assert ran[timed:] == [(2, 5)]
    assert sorted(contender.tactics) == [(4, 2, 192, 128, 3), (4, 2, 192, 128, 5)]
    monkeypatch.setattr(flashinfer_cutlass, "gpu_works", lambda: False)
    with pytest.raises(RuntimeError, match=r"tactic 3 of product 2: not for these sizes"):
        contender.inputs(weights, route(problem_of("mxfp4"), 7, 0))
    monkeypatch.setattr(flashinfer_cutlass, "gpu_works", lambda: True)
    monkeypatch.setattr(flashinfer_cutlass, "event_us", lambda call: contender.flashinfer.moe.fail())
    contender.flashinfer.moe.fail = lambda: fused([1, 3])
    with pytest.raises(RuntimeError, match=r"none of 4 tactics of product 2 runs these sizes"):
        contender.inputs(weights, route(problem_of("mxfp4"), 7, 0))
