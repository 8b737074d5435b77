"""Peers that have not met a GPU, against the packages themselves: arguments, and weights by their own functions.

Each part is skipped where its package is not installed. TurboMind's extension loads on a CPU where its libraries are
found (CUDA 12, its driver, NCCL), which need not do anything.
"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support import packing
from support.cases import E2M1

from bench.peers import shapes
from bench.peers.contenders import flashinfer_cutlass, turbomind, vllm_w4a8
from bench.peers.problem import Problem, Stack, make_problem, route
from bench.peers.shapes import Group, Shape


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
        assert "tuning_buckets" in inspect.signature(contender.flashinfer.autotune).parameters

    @pytest.mark.parametrize("tokens", [3, 512, 16384])
    def test_timed_calls_find_what_was_tuned(self, tokens: int, moe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A tactic is kept under the number of tokens that FlashInfer maps the call's to, at tuning and afterwards."""
        from flashinfer import autotuner

        utils = pytest.importorskip("flashinfer.fused_moe.utils")
        spec = autotuner.DynamicTensorSpec(
            (0,), (0,), utils.get_hybrid_num_tokens_buckets(8192), utils.make_hybrid_bucket_mapper(8192)
        )
        config = autotuner.TuningConfig(dynamic_tensor_specs=(spec,))
        seen: list[tuple[bool, int]] = []

        def fused(**given: Any) -> None:
            tuner = autotuner.AutoTuner.get()
            key = tuner.get_effective_map_to_tuning_buckets(config)(given["input"].shape[0])
            seen.append((tuner.is_tuning_mode, key))

        monkeypatch.setattr(moe, "cutlass_fused_moe", fused)
        monkeypatch.setattr(moe.core, "cutlass_fused_moe_workspace_size", lambda *given, **more: 16)
        contender = flashinfer_cutlass.Bf16()
        weights = flashinfer_cutlass.Weights({}, 4, 2, 192, 128)
        inputs = contender.inputs(weights, route(problem_of("mxfp4"), tokens, 0))
        contender.run(weights, inputs)
        assert seen == [(True, tokens), (False, tokens)]

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


class TestTurboMind:
    @pytest.fixture
    def lmdeploy(self) -> Any:
        try:
            return turbomind.load()
        except ImportError as error:
            pytest.skip(str(error))

    @pytest.mark.parametrize("name", ["int4", "mxfp4-silu"])
    def test_its_formats_read_our_tensors_as_the_codes_they_are(self, name: str, lmdeploy: Any) -> None:
        problem = problem_of(name)
        w13, _ = problem.padded(256, 128)
        formats = lmdeploy.weight_format
        source = formats.MXFP4Format() if name == "mxfp4-silu" else formats.CompressedTensorFormat(block_in=128)
        given = turbomind.tensors(w13)
        codes, scales = (source.normalize(given[kind][2], kind[:6]) for kind in ("weight", "scales"))
        assert torch.equal(codes, w13.codes[2].T)
        assert torch.equal(scales, w13.scales[2].T)
        assert source.make_data_format().is_quantized()
        packed = source.pack(codes.contiguous(), "weight")
        assert (packed.alloc_shape, packed.tensor.shape) == ([256, 256], (256, 32))

    def test_calls_fit_the_signatures(self, lmdeploy: Any) -> None:
        linear, made = lmdeploy.linear.Linear, turbomind.routes(5, 2, 4, torch.device("cpu"))
        inputs = turbomind.Inputs(torch.empty(5, 256), {}, made, [torch.empty(10, 128)] * 2 + [torch.empty(5, 256)])
        for given in turbomind.products(inputs):
            inspect.signature(linear.forward_moe).bind(None, weight=None, exec_plan=None, **given)
            inspect.signature(linear.tune).bind(None, weight=None, **given)
        fusion = {"weight_format": None, "dtype": torch.bfloat16, "grouped": True, "fusion_type": "silu"}
        inspect.signature(linear.get_weight_plan).bind(None, **fusion)
        inspect.signature(linear.fuse_weight).bind(None, (None, None), plan=None, scales=(None, None))
        inspect.signature(linear.prepare_weight).bind(None, plan=None, weight=[], scales=[])
        gate, total = lmdeploy.tm.moe_gate_v2.__doc__, lmdeploy.tm.invokeMoeCombine.__doc__
        for name in ("logits", "token_mask", "experts_per_token", "norm_topk", "stream_ptr", *made):
            assert f"{name}: " in gate.split("\n")[0]
        for name in ("out", "src", "scales", "en2f", "experts_per_token"):
            assert f"{name}: " in total

    def test_sizes_are_rounded_for_both_products(self) -> None:
        assert turbomind.rounded((2880, 2880), [((64, 64), (64, 128)), ((128, 64), (32, 256))]) == (3072, 2944)


class TestVllmW4A8:
    def test_calls_fit_the_signature(self) -> None:
        pytest.importorskip("vllm")
        module = pytest.importorskip("vllm.model_executor.layers.fused_moe.experts.cutlass_moe")
        call = inspect.signature(module.run_cutlass_moe_w4a8_fp8)
        convert = inspect.signature(
            pytest.importorskip("vllm.model_executor.layers.fused_moe.oracle.w4a8").convert_to_w4a8_moe_kernel_format
        )
        convert.bind(None, None, None, None)
        problem = problem_of("int4-fp8")
        made = dict.fromkeys(("w1", "w2", "w1_scale", "w2_scale", "w1_chan_scale", "w2_chan_scale"))
        steps = vllm_w4a8.strides(4, 256, 256, torch.device("cpu"))
        assert steps["s_strides1"].tolist() == [[512, 0]] * 4
        weights = vllm_w4a8.Weights({**made, "b_strides1": None, "b_strides2": None, **steps}, 4, 256, 256)
        inputs = vllm_w4a8.Inputs(route(problem, 3, 0), *[torch.empty(0)] * 3, None)
        call.bind(activation=None, **vllm_w4a8.arguments(weights, inputs, torch.empty(0), torch.empty(0)))
