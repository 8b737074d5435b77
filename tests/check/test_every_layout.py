"""Each of the checkpoints in each layout that a kernel reads: the kernels agree with the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import moeq
from moeq.check import activation_loss
from moeq.check.run_check import CheckOptions, run_check
from moeq.errors import MoeqError
from moeq.layouts.registry import LAYOUTS
from moeq.reference.moe import Expert, Linear, moe
from moeq_kernels import fused_moe
from moeq_kernels.formats import FORMATS

INTEGER = ("marlin-wna16/1", "triton-wna16/1")
MXFP4 = (
    "marlin-mxfp4/1",
    "marlin-mxfp4-interleaved/1",
    "moeq-mxfp4/1",
    "mxfp4-identity/1",
    "triton-kernels-hopper/1",
    "triton-kernels-hopper-w4/1",
)
LAYOUTS_OF = {
    "gptq-int4-g32-qwen3moe": INTEGER,
    "gptq-int4-g128-mixtral": INTEGER,
    "gptq-int8-g64-qwen3moe": INTEGER,
    "gptq-int4-g32-actorder-qwen3moe": ("marlin-act-order/1",),
    "awq-int4-g32-qwen3moe": INTEGER,
    "ct-int4-g128-qwen3moe": INTEGER,
    "ct-int4-asym-g32-mixtral": INTEGER,
    "ct-w8a8-qwen3moe": ("int8-w8a8/1",),
    "ct-mxfp4-qwen3moe": MXFP4,
    "mxfp4-gptoss": MXFP4,
    "ct-nvfp4-qwen3moe": ("marlin-nvfp4/1", "moeq-nvfp4/1"),
    "ct-nvfp4a16-qwen3moe": ("marlin-nvfp4/1", "moeq-nvfp4/1"),
    "ct-fp8-block-qwen3moe": ("marlin-fp8/1",),
    "ct-fp8-channel-qwen3moe": ("marlin-fp8/1",),
    "ct-fp8-tensor-qwen3moe": ("marlin-fp8/1",),
    "ct-mxfp8-qwen3moe": ("marlin-mxfp8/1",),
}
#: Layouts for parameters of float16, which those checkpoints do not have.
HALF = {"marlin-nvfp4-fp16/1", "marlin-fp8-fp16/1"}
PAIRS = [(name, layout) for name, layouts in LAYOUTS_OF.items() for layout in layouts]

ON_GPU = torch.cuda.is_available()  # then the very same tests run compiled kernels
QUICK = CheckOptions(layers=[1], tokens=[1, 5])


def test_no_layout_with_a_kernel_is_left_out() -> None:
    readable = {layout for layout, _ in FORMATS} & set(LAYOUTS) - HALF - {"moeq-wna16/1"}  # `test_few_bits`
    assert readable == {layout for layouts in LAYOUTS_OF.values() for layout in layouts}


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("name", ["ct-nvfp4-qwen3moe", "ct-fp8-block-qwen3moe", "ct-mxfp8-qwen3moe"])
def test_loaded_experts_are_those_of_the_source(name, conversions, checkpoints) -> None:
    layout = LAYOUTS_OF[name][-1]
    experts = moeq.load_experts(conversions(name, layout), 1, device="cpu", check_gpu=False)
    source, generator = moeq.open(checkpoints / name), torch.Generator().manual_seed(3)
    x = torch.randn(4, experts.w13.k, generator=generator).to(torch.bfloat16)
    weights = torch.rand(4, 2, generator=generator)
    ids = torch.stack([torch.randperm(experts.num_experts, generator=generator)[:2] for _ in range(4)])

    def expert(number: int) -> Expert:
        return Expert(*(Linear(source.dequantize(1, number, part)) for part in ("gate", "up", "down")))

    wanted = moe(x.float(), expert, weights, ids)
    assert float((fused_moe(x, experts, weights, ids).float() - wanted).norm() / wanted.norm()) < 0.005


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ct-fp8-block-qwen3moe", "ct-fp8-channel-qwen3moe", "ct-fp8-tensor-qwen3moe"])
def test_e4m3_activations_agree_with_their_emulation(name, conversions, checkpoints) -> None:
    options = replace(QUICK, activation_dtype="fp8")
    report = run_check(conversions(name, "marlin-fp8/1"), checkpoints / name, options=options)
    assert report.ok, report.results
    assert {result.arithmetic for result in report.results if result.name != "e4m3 loss"} == {
        "e4m3 activations",
        "all roundings together",
    }
    assert any("products of e4m3 codes are exact" in line for line in report.derivation)
    if not ON_GPU:
        assert all(0 < result.exceedance < 0.6 for result in report.results)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout"), [("ct-int4-g128-qwen3moe", "marlin-wna16/1"), ("ct-mxfp4-qwen3moe", "moeq-mxfp4/1")]
)
def test_the_loss_of_e4m3_activations_is_bounded_by_layer(name, layout, conversions, checkpoints, monkeypatch) -> None:
    """Kernels of 4-bit weights run with 16-bit activations; the loss is that of both roundings, 2.6 % each."""
    options = replace(QUICK, activation_dtype="fp8")
    report = run_check(conversions(name, layout), checkpoints / name, options=options)
    (loss,) = (result for result in report.results if result.name == "e4m3 loss")
    assert report.ok, report.results
    assert 0.025 < loss.relative < 0.06
    assert all(result.relative < 0.01 for result in report.results if result is not loss)
    assert "e4m3 loss" in report.derivation[-1]
    monkeypatch.setattr(activation_loss, "LIMIT", loss.relative / 1.01)
    again = run_check(conversions(name, layout), checkpoints / name, options=options)
    assert not again.ok
    assert [result.name for result in again.results if not result.passed] == ["e4m3 loss"]


def test_weights_that_no_kernel_takes_beside_e4m3_are_refused(conversions, checkpoints) -> None:
    options = replace(QUICK, activation_dtype="fp8")
    name = "awq-int4-g32-qwen3moe"
    with pytest.raises(MoeqError, match="has zero points; these kernels read codes around 8") as caught:
        run_check(conversions(name, "marlin-wna16/1"), checkpoints / name, options=options)
    assert caught.value.code == "answer.no-kernel"


def test_e4m3_activations_are_refused_where_no_kernel_has_them(conversions, checkpoints) -> None:
    name = "ct-mxfp8-qwen3moe"
    options = replace(QUICK, activation_dtype="fp8")
    with pytest.raises(MoeqError, match="no kernel that multiplies e4m3 weights in layout marlin-mxfp8/1 with e4m3"):
        run_check(conversions(name, "marlin-mxfp8/1"), checkpoints / name, options=options)


@pytest.mark.cover(every=17)
@pytest.mark.parametrize(("name", "layout"), PAIRS, ids=[f"{name}@{layout}" for name, layout in PAIRS])
def test_kernels_agree_with_the_reference(name, layout, conversions, checkpoints) -> None:
    report = run_check(conversions(name, layout), checkpoints / name, options=QUICK)
    assert report.ok, report.results
    (layer,) = report.layers
    assert layer.sample.complete
    assert layer.repeated == (len(layer.sample.runs) if ON_GPU else 1)
    assert [result.name for result in layer.results] == ["gate", "up", "down", "layer"]
    for result in layer.results:
        assert len(result.experts) == len(layer.sample.experts) >= 2, "every expert got tokens"
        assert 0 < result.exceedance < (1 if ON_GPU else 0.6), "the sums of a CPU stay well inside their bounds"
        assert result.relative <= max(1.2 * result.baseline, 1e-6), result
