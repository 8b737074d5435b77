"""CPU (AMX) MXFP4: blocks of 32 rows; byte column c of a block holds the 64 codes of its rows, 32 apart in one byte.

`weight` uint8 `[N, K / 2]`, `scale` uint8 `[N / 32, G, 32]`, `bias` float32. Source: vLLM 0.33.0, CPU experts (MXFP4).
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.mxfp4 import IDENTITY_SCALE, MXFP4Layout, bias_as, scale_bytes, weight_bytes
from moeq.matrix import MatrixSpec

_WEIGHT = Arrangement("n y2 r16, k b2 -> n k r b | y")
_SCALE = Arrangement("n r32, g -> n g r")


class CpuAmxMXFP4(MXFP4Layout):
    """See the module."""

    id = "cpu-amx-mxfp4/1"
    title = "CPU AMX MXFP4"
    source = "vLLM 0.33.0"
    arch = "x86 with AMX"
    slicing = "N by 32, K by 32"
    padding = PaddingRule(intermediate=32, hidden=32)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, _WEIGHT),
            "scale": scale_bytes(spec, _SCALE, (spec.n // 32, spec.num_groups, 32)),
            **bias_as(spec, IDENTITY_SCALE, "F32"),
        }
