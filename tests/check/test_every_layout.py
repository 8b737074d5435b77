"""Each of the ten checkpoints in each layout that a kernel reads: the kernels agree with the reference."""

from __future__ import annotations

import pytest
import torch

from moeq.check.run_check import CheckOptions, run_check
from moeq.layouts.registry import LAYOUTS
from moeq_kernels.formats import FORMATS

INTEGER = ("marlin-wna16/1", "triton-wna16/1")
MXFP4 = (
    "marlin-mxfp4/1",
    "marlin-mxfp4-interleaved/1",
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
}
PAIRS = [(name, layout) for name, layouts in LAYOUTS_OF.items() for layout in layouts]

ON_GPU = torch.cuda.is_available()  # then the very same tests run compiled kernels
QUICK = CheckOptions(layers=[1], tokens=[1, 5])


def test_no_layout_with_a_kernel_is_left_out() -> None:
    readable = {layout for layout, _ in FORMATS} & set(LAYOUTS)
    assert readable == {layout for layouts in LAYOUTS_OF.values() for layout in layouts}


@pytest.mark.parametrize(("name", "layout"), PAIRS, ids=[f"{name}@{layout}" for name, layout in PAIRS])
def test_kernels_agree_with_the_reference(name, layout, conversions, checkpoints) -> None:
    report = run_check(conversions(name, layout), checkpoints / name, options=QUICK)
    assert report.ok, report.results
    (layer,) = report.layers
    assert layer.sample.complete
    assert layer.repeated == (len(layer.sample.runs) if ON_GPU else 1)
    assert [result.name for result in layer.results] == ["gate", "up", "down", "layer"]
    for result in layer.results:
        assert len(result.experts) == 4, "every expert got tokens"
        assert 0 < result.exceedance < (1 if ON_GPU else 0.6), "the sums of a CPU stay well inside their bounds"
        assert result.relative <= max(1.2 * result.baseline, 1e-6), result
