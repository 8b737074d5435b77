"""FlashInfer CuteDSL NVFP4: 64 rows of up and 64 of gate in turns, scales in 128 x 4 tiles.

`weight`, `scale` and `global_scale` as in `nvfp4.py`. The intermediate size is rounded up to 64 (128 without a gate),
the hidden size to 256; before 0.32.0 the engine rounds neither. The kernel takes the scales as a view of these bytes.

Source: vLLM 0.33.0, `flashinfer_fp4_moe.py` (`prepare_nvfp4_moe_layer_for_flashinfer_cutedsl`).
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY, TILE_128X4, by_role
from moeq.layouts.nvfp4 import NVFP4Layout, nvfp4_scale, nvfp4_weight
from moeq.matrix import MatrixSpec

_WEIGHT_W13 = Arrangement("h2 n r64, k b2 -> n ~h r k | b")
_SCALE_W13 = Arrangement("h2 n y2 z32, c x4 -> n c z ~h y x")


class CuteDslNVFP4(NVFP4Layout):
    """See the module."""

    id = "flashinfer-cutedsl-nvfp4/1"
    title = "FlashInfer CuteDSL NVFP4"
    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    arch = "SM100 family"
    slicing = "N by 64 per half of w13, by 128 of w2; K by 64"
    padding = PaddingRule(intermediate=64, hidden=256, ungated=128)
    w13_order = "up-gate"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": nvfp4_weight(spec, by_role(_WEIGHT_W13, IDENTITY, spec)),
            "scale": nvfp4_scale(spec, by_role(_SCALE_W13, TILE_128X4, spec)),
        }
