"""FlashInfer TRTLLM NVFP4: shuffled rows, w13 rows paired up, gate (`flashinfer.py`), scales in 128 x 4 tiles.

`weight`, `scale` and `global_scale` as in `nvfp4.py`. The intermediate size is rounded up to 64 (128 without a gate),
the hidden size to 256; with one activation scale per token and without a gate the engine rounds it up to 512, which is
no layout of moeq.

Source: vLLM 0.33.0, `flashinfer_fp4_moe.py` (`prepare_static_weights_for_trtllm_fp4_moe`); FlashInfer 0.7.2.
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.base import PaddingRule
from moeq.layouts.flashinfer import SCALE, SCALE_W13, SHUFFLED, SHUFFLED_W13
from moeq.layouts.mxfp4 import by_role
from moeq.layouts.nvfp4 import NVFP4Layout, nvfp4_scale, nvfp4_weight
from moeq.matrix import MatrixSpec


class TrtllmNVFP4(NVFP4Layout):
    """See the module."""

    id = "trtllm-nvfp4/1"
    title = "FlashInfer TRTLLM NVFP4"
    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    arch = "SM100 family"
    slicing = "N by 64 per half of w13, by 128 of w2; K by 64"
    padding = PaddingRule(intermediate=64, hidden=256, ungated=128)
    w13_order = "up-gate"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": nvfp4_weight(spec, by_role(SHUFFLED_W13, SHUFFLED, spec)),
            "scale": nvfp4_scale(spec, by_role(SCALE_W13, SCALE, spec)),
        }
