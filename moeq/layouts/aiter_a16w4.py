"""AITER MXFP4 for bf16 activations (a16w4): 16-row tiles of gate and up alternate in w13.

`weight` uint8 `[N, K / 2]`, `scale` uint8 `[N, G]`, `bias` float32 (gate, then up; tiles alternate only in weights
and scales). Source: AITER e4048607, `shuffle_weight_a16w4` and `shuffle_scale_a16w4`; vLLM 0.33.0.
"""

from __future__ import annotations

from moeq.layouts.aiter import A16W4, A16W4_GATE_UP, E8M0, E8M0_GATE_UP
from moeq.layouts.arranged import Part
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY_SCALE, MXFP4Layout, bias_as, by_role, scale_bytes, weight_bytes
from moeq.matrix import MatrixSpec


class AiterA16W4(MXFP4Layout):
    """See the module."""

    id = "aiter-a16w4/1"
    title = "AITER MXFP4, bf16 activations"
    source = "AITER e4048607, vLLM 0.33.0"
    arch = "gfx942, gfx950"
    slicing = "N by 16 per half of w13, by 32 of w2; K by 256"
    padding = PaddingRule(intermediate=256, hidden=256)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, by_role(A16W4_GATE_UP, A16W4, spec)),
            "scale": scale_bytes(spec, by_role(E8M0_GATE_UP, E8M0, spec)),
            **bias_as(spec, IDENTITY_SCALE, "F32"),
        }
