"""Example checkpoints and the layouts that hold them: one list for tests of conversion and updates, and for a page."""

from __future__ import annotations

from layouts.families import fp8_scope, layouts_of

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.layouts.fp8 import MXFP8Layout
from moeq.layouts.marlin.fp8 import MarlinFp8, MarlinMXFP8
from moeq.layouts.marlin.nvfp4 import MarlinNVFP4
from moeq.layouts.mxfp4 import MXFP4Layout
from moeq.layouts.nvfp4 import NVFP4Layout

FP16_MXFP4 = {"marlin-mxfp4-fp16/1", "marlin-mxfp4-fp16-interleaved/1"}
NVFP4_LOSSY = {"flashinfer-b12x-nvfp4/1"}
FP8_LARGER = {"trtllm-fp8-tensor/1", "flashinfer-cutlass-fp8-tensor/1"}
FP8_LOSSY = {"deepgemm-fp8-sm90/1", "deepgemm-fp8-sm100/1"}
#: Layouts whose sizes are too large for the example checkpoint.
MXFP8_LARGE = {"trtllm-mxfp8/1", "aiter-mxfp8/1"}

INT4 = layouts_of(lambda kind: "int4" in kind.elements and kind.zero_points) - {"marlin-wna16-int8act/1"}
MXFP4 = layouts_of(MXFP4Layout) - FP16_MXFP4
NVFP4 = layouts_of(NVFP4Layout, MarlinNVFP4) - NVFP4_LOSSY
MXFP8 = layouts_of(MXFP8Layout, MarlinMXFP8) - MXFP8_LARGE
FP8 = layouts_of(MarlinFp8)
FP8_BLOCK = layouts_of(fp8_scope("block")) - FP8_LOSSY
FP8_CHANNEL = layouts_of(fp8_scope("channel"))
FP8_TENSOR = layouts_of(fp8_scope("tensor"))

#: Layouts that hold a checkpoint exactly. Everything else has to be refused.
EXACT: dict[str, set[str]] = {
    "awq-int4-g32-qwen3moe": INT4,
    "ct-int4-asym-g32-mixtral": INT4,
    "ct-int4-g128-qwen3moe": INT4 | {"xpu-wna16/1"},
    "ct-mxfp4-qwen3moe": MXFP4 | FP16_MXFP4,
    "ct-w8a8-qwen3moe": {
        "marlin-wna16/1",
        "marlin-wna16-int8act/1",
        "marlin-act-order/1",  # one group: every order of columns is the same
        "triton-wna16/1",
        "int8-w8a8/1",
        "cpu-amx-int8/1",
        "humming-wna16/1",
    },
    "ct-nvfp4a16-qwen3moe": NVFP4,
    "ct-nvfp4-qwen3moe": NVFP4,
    "ct-fp8-block-qwen3moe": FP8 | FP8_BLOCK,
    "ct-fp8-channel-qwen3moe": FP8 | FP8_CHANNEL,
    "ct-fp8-tensor-qwen3moe": FP8 | FP8_CHANNEL,
    "ct-mxfp8-qwen3moe": MXFP8,
    "modelopt-nvfp4-qwen3moe": NVFP4,
    "modelopt-fp8-qwen3moe": FP8_CHANNEL | FP8_TENSOR,
    "gptq-int4-g128-mixtral": INT4 | {"xpu-wna16/1"},
    "gptq-int4-g32-actorder-qwen3moe": {"marlin-act-order/1"},
    "gptq-int4-g32-qwen3moe": INT4 | {"xpu-wna16/1", "rdna3-int4/1"},
    "gptq-int8-g64-qwen3moe": {"marlin-wna16/1", "triton-wna16/1", "humming-wna16/1"},
    "mxfp4-gptoss": MXFP4,
}

#: Layouts that hold a checkpoint only with losses, which have to be allowed.
LOSSY: dict[str, set[str]] = {
    **{name: {"marlin-wna16-int8act/1"} for name in EXACT if "int4-g" in name and "actorder" not in name},
    "ct-int4-asym-g32-mixtral": {"marlin-wna16-int8act/1"},
    "gptq-int8-g64-qwen3moe": {"marlin-wna16-int8act/1"},
    "mxfp4-gptoss": FP16_MXFP4,
    "modelopt-fp8-qwen3moe": FP8,
    "ct-fp8-block-qwen3moe": FP8_LOSSY,
    "ct-fp8-tensor-qwen3moe": FP8_LARGER,
    "ct-nvfp4a16-qwen3moe": NVFP4_LOSSY,
    "ct-nvfp4-qwen3moe": NVFP4_LOSSY,
    "modelopt-nvfp4-qwen3moe": NVFP4_LOSSY,
}

CASES = [(name, layout) for name, layouts in EXACT.items() for layout in sorted(layouts)]
LOSSY_CASES = [(name, layout) for name, layouts in LOSSY.items() for layout in sorted(layouts)]
DEPLOYMENT = Deployment(gpu=parse_gpu("A100"))
