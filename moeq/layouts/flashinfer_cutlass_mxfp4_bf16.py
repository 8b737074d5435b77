"""FlashInfer CUTLASS MXFP4 for bf16 activations (SM90 only).

w13 rows are up, then gate. Weights are interleaved for the mixed-input tensor-core tile, four bytes to a 32-bit word,
and the bits of each word are permuted for a decoding without multiplication tables (`bits.MUL_FREE`): `weight` uint8
`[N, K / 2]`. `scale` uint8 `[N / 64, K / 128, 16, 16]`, `bias` bf16.
Source: FlashInfer 0.7.2, SM90 mixed-input MoE GEMM and `prepare.py`; vLLM 0.33.0.
"""

from __future__ import annotations

from dataclasses import replace

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.bits import MUL_FREE
from moeq.layouts.mxfp4 import (
    IDENTITY_SCALE,
    UP_GATE_ROWS,
    MXFP4Layout,
    bias_as,
    by_role,
    scale_bytes,
    weight_bytes,
)
from moeq.matrix import MatrixSpec

# Byte columns split as k (32 bytes), m v (the MMA step of 8 bytes), j, x; rows as n (16), o (octet), r.
_WEIGHT = Arrangement("n o2 r8, k m2 v2 j2 x4 b2 -> n v r k m x | j o b")
_WEIGHT_W13 = Arrangement("h2 n o2 r8, k m2 v2 j2 x4 b2 -> ~h n v r k m x | j o b")
_SCALE = Arrangement("n y4 z16, c x4 -> n c z y x")
_SCALE_W13 = Arrangement("h2 n y4 z16, c x4 -> ~h n c z y x")


class FlashInferCutlassBF16(MXFP4Layout):
    """See the module."""

    id = "flashinfer-cutlass-mxfp4-bf16/1"
    title = "FlashInfer CUTLASS MXFP4, bf16 activations"
    source = "vLLM 0.33.0, FlashInfer 0.7.2"
    arch = "SM90"
    slicing = "N by 64, K by 128"
    padding = PaddingRule(intermediate=128, hidden=128)
    w13_order = "up-gate"
    lossy = "biases are rounded to bf16"
    n_multiple = 64
    k_multiple = 128

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight = weight_bytes(spec, by_role(_WEIGHT_W13, _WEIGHT, spec))
        return {
            "weight": replace(weight, rewrite=MUL_FREE),
            "scale": scale_bytes(spec, by_role(_SCALE_W13, _SCALE, spec), (spec.n // 64, spec.k // 128, 16, 16)),
            **bias_as(spec, by_role(UP_GATE_ROWS, IDENTITY_SCALE, spec), "BF16"),
        }
