"""FlashInfer CUTLASS MXFP4 for MXFP8 activations (SM100 and newer, SM120).

w13 rows are up, then gate; bytes stay. `weight` uint8 `[N, K / 2]`, `scale` uint8 `[N, G]` in 128 x 4 tiles, `bias`
bf16. Source: vLLM 0.33.0, `oracle/mxfp4.py`; FlashInfer 0.7.2.
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import (
    IDENTITY,
    IDENTITY_SCALE,
    TILE_128X4,
    TILE_128X4_UP_GATE,
    UP_GATE,
    UP_GATE_ROWS,
    MXFP4Layout,
    bias_as,
    by_role,
    scale_bytes,
    weight_bytes,
)
from moeq.matrix import MatrixSpec


class FlashInferCutlassMXFP8(MXFP4Layout):
    """See the module."""

    id = "flashinfer-cutlass-mxfp4-mxfp8/1"
    title = "FlashInfer CUTLASS MXFP4, MXFP8 activations"
    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    arch = "SM100 and newer, SM120"
    slicing = "N by 128, K by 128"
    padding = PaddingRule(intermediate=128, hidden=128)
    w13_order = "up-gate"
    lossy = "biases are rounded to bf16"
    n_multiple = 128
    k_multiple = 128

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, by_role(UP_GATE, IDENTITY, spec)),
            "scale": scale_bytes(spec, by_role(TILE_128X4_UP_GATE, TILE_128X4, spec)),
            **bias_as(spec, by_role(UP_GATE_ROWS, IDENTITY_SCALE, spec), "BF16"),
        }
