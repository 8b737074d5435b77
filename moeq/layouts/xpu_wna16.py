"""Intel XPU int4: the canonical order of checkpoints.

`weight` uint8 `[N, K / 2]`, low nibble first; `scale` `[N, G]` as stored. The backend drops zero points, so there
is no place for them. Source: vLLM 0.33.0, `XPUExpertsWNA16`.
"""

from __future__ import annotations

from moeq.layouts.arranged import STORED_DTYPE, ArrangedLayout, Part
from moeq.layouts.mxfp4 import IDENTITY, IDENTITY_SCALE
from moeq.matrix import MatrixSpec


class XpuWNA16(ArrangedLayout):
    """See the module."""

    id = "xpu-wna16/1"
    title = "XPU int4 as stored"
    source = "vLLM 0.33.0"
    elements = ("int4",)
    schemes = "int4 symmetric"
    arch = "Intel XPU"
    slicing = "N by 1, K by whole groups"
    biased = False

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        dtype = STORED_DTYPE[spec.scale_dtype]
        return {
            "weight": Part("codes", IDENTITY, (spec.n, spec.k // 2), "U8", 4),
            "scale": Part("scales", IDENTITY_SCALE, (spec.n, spec.num_groups), dtype, 16, group=spec.group_size),
        }
