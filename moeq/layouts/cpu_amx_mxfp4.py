"""CPU (AMX) MXFP4: blocks of 32 rows; byte column c of a block holds the 64 codes of its rows, 32 apart in one byte.

`weight` uint8 `[N, K / 2]`, `scale` uint8 `[N / 32, G, 32]`, `bias` float32. The rows of a gated w13 are those of gate,
then those of up; in `cpu-amx-mxfp4-interleaved/1` they lie by turns, which vLLM's kernel wants for gpt-oss.

Source: vLLM 0.33.0, CPU experts (MXFP4). Golden bytes: `convert_weight_packed` and `convert_scale_packed` of 0.32.0.
"""

from __future__ import annotations

from typing import ClassVar

from moeq.layouts.arranged import Part, is_gated_w13
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule, W13Order
from moeq.layouts.mxfp4 import IDENTITY_SCALE, INTERLEAVED_ROWS, MXFP4Layout, bias_as, scale_bytes, weight_bytes
from moeq.matrix import MatrixSpec

_WEIGHT = Arrangement("n y2 r16, k b2 -> n k r b | y")
_SCALE = Arrangement("n r32, g -> n g r")
# The same on row 2 i + h: the lowest row digit gives its last bit to h.
_WEIGHT_PAIRS = Arrangement("h2 n y2 r8, k b2 -> n k r h b | y")
_SCALE_PAIRS = Arrangement("h2 n r16, g -> n g r h")


class CpuAmxMXFP4(MXFP4Layout):
    """See the module."""

    id = "cpu-amx-mxfp4/1"
    title = "CPU AMX MXFP4"
    source = "vLLM 0.33.0"
    arch = "x86 with AMX"
    slicing = "N by 32, K by 32"
    padding = PaddingRule(intermediate=32, hidden=32)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        pairs = self.w13_order == "interleaved" and is_gated_w13(spec)
        return {
            "weight": weight_bytes(spec, _WEIGHT_PAIRS if pairs else _WEIGHT),
            "scale": scale_bytes(spec, _SCALE_PAIRS if pairs else _SCALE, (spec.n // 32, spec.num_groups, 32)),
            **bias_as(spec, INTERLEAVED_ROWS if pairs else IDENTITY_SCALE, "F32"),
        }


class CpuAmxMXFP4Interleaved(CpuAmxMXFP4):
    """w13 rows interleaved."""

    id = "cpu-amx-mxfp4-interleaved/1"
    title = "CPU AMX MXFP4, gate and up interleaved (gpt-oss on vLLM)"
    w13_order: ClassVar[W13Order] = "interleaved"
