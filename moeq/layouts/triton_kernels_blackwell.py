"""triton_kernels MXFP4 on Blackwell (SM100, SM120).

`weight` uint8 `[N, K / 2]`, K filled up to 256 (`BlackwellMXValueLayout`: no permutation); `scale` uint8 `[N / 128,
G / 4, 2, 256]` in 128 x 4 tiles, N filled up to 128 and G to 8 (`BlackwellMXScaleLayout`; the kernel takes all
experts as `[1, E N / 128, G / 4, 2, 256]`). Source: triton_kernels 3.5.1 (vLLM 0.33.0).
"""

from __future__ import annotations

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.mxfp4 import IDENTITY, INTERLEAVED, TILE_128X4, by_role
from moeq.layouts.triton_kernels import TritonKernelsLayout
from moeq.matrix import MatrixSpec

# Row 128 n + 32 y + 2 z + h of the interleaved matrix.
_SCALE_W13 = Arrangement("h2 n y4 z16, c x4 -> n c z h y x")


class TritonKernelsBlackwell(TritonKernelsLayout):
    """See the module."""

    id = "triton-kernels-blackwell/1"
    title = "triton_kernels MXFP4, Blackwell"
    arch = "SM100, SM120"
    slicing = "N by 128 (64 per half of w13), K by 256"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight, scale = by_role(INTERLEAVED, IDENTITY, spec), by_role(_SCALE_W13, TILE_128X4, spec)
        shape = (-(-spec.n // 128), -(-spec.num_groups // 8) * 2, 2, 256)
        return {
            "weight": Part("codes", weight, (spec.n, -(-spec.k // 256) * 128), "U8", 4, pad=(1, 256)),
            "scale": Part("scales", scale, shape, "U8", 8, pad=(128, 8), group=spec.group_size),
            **self.bias(spec),
        }
