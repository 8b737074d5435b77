"""MXFP4 in the checkpoint's own order: XPU, B12X and emulation.

`weight` uint8 `[N, K / 2]`, low nibble first, `scale` uint8 `[N, G]`, `bias` as stored; w13 is gate rows, then up rows.
Source: vLLM 0.33.0, `oracle/mxfp4.py`.
"""

from __future__ import annotations

from moeq.layouts.arranged import STORED_DTYPE, Part
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY, IDENTITY_SCALE, MXFP4Layout, bias_as, scale_bytes, weight_bytes
from moeq.matrix import MatrixSpec


class IdentityMXFP4(MXFP4Layout):
    """See the module."""

    id = "mxfp4-identity/1"
    title = "MXFP4 as stored (XPU, B12X, emulation)"
    source = "vLLM 0.33.0"
    arch = "any"
    slicing = "N by 1, K by 32"
    padding = PaddingRule(intermediate=32)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, IDENTITY),
            "scale": scale_bytes(spec, IDENTITY_SCALE),
            **bias_as(spec, IDENTITY_SCALE, STORED_DTYPE.get(spec.bias_dtype or "", "")),
        }
