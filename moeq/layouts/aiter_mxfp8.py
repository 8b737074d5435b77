"""AITER MXFP8 (FlyDSL): bytes in the order of `aiter-a16w4`; 16-row tiles of gate and up alternate in w13.

`weight` F8_E4M3 `[N, K]`, `scale` uint8 `[N, G]`. AITER fills the scales of w2 up to 256 rows, all experts together,
and to 8 groups with whatever lies in memory, so here the hidden and the intermediate size have to be multiples of 256.
It takes the halves of w13 for gate and up, so there have to be both.

Source: AITER e4048607 (`shuffle_weight`, `shuffle_scale`); vLLM 0.33.0, `_aiter_ops.py` (`shuffle_mxfp8_moe_weights`).
"""

from __future__ import annotations

from moeq.layouts.aiter import E8M0, E8M0_GATE_UP
from moeq.layouts.arranged import ArrangedLayout, Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import Problem, SliceRule
from moeq.layouts.fp8 import fp8_bytes
from moeq.layouts.mxfp4 import by_role, scale_bytes
from moeq.matrix import MatrixSpec

_WEIGHT = Arrangement("n r16, k m4 x16 -> n k m r x")
_WEIGHT_W13 = Arrangement("h2 n r16, k m4 x16 -> n h k m r x")

#: What the hidden size has to be a multiple of, as the intermediate size is by its groups.
_HIDDEN = 256


class AiterMXFP8(ArrangedLayout):
    """See the module."""

    id = "aiter-mxfp8/1"
    title = "AITER MXFP8"
    source = "AITER e4048607, vLLM 0.33.0"
    elements = ("e4m3",)
    schemes = "mxfp8 (e4m3 codes, e8m0 scales of 32), with a gate, no bias"
    arch = "gfx950"
    slicing = "I by 256, H by 256"
    scale_dtypes = ("e8m0",)
    group_sizes = (32,)
    channelwise = False
    biased = False

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        if spec.role == "w13" and not spec.gated:
            found.append(Problem("layout.gate", "its kernel takes the rows of w13 for gate and up"))
        if spec.role == "w2" and spec.n % _HIDDEN:
            rest = f"{spec.n} % {_HIDDEN} = {spec.n % _HIDDEN}"
            found.append(Problem("layout.n-multiple", f"N = {spec.n} is not a multiple of {_HIDDEN} ({rest})"))
        return found

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return SliceRule(_HIDDEN, super().slices(spec).k)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": fp8_bytes(spec, by_role(_WEIGHT_W13, _WEIGHT, spec)),
            "scale": scale_bytes(spec, by_role(E8M0_GATE_UP, E8M0, spec)),
        }
