"""triton_kernels MXFP4 on Hopper (SM90).

`weight` uint8 `[N / 4, 2 K]` (`HopperMXValueLayout`; N is filled up to 16 and K to 64), the bits of each 32-bit
word permuted as in `bits.MUL_FREE`. `scale` uint8 `[N / 32, 32 G]` (`HopperMXScaleLayout`; N is filled up to 32 times
the number of warps and G to 4). The scale order depends on the number of warps: 8 in vLLM, 4 in the `-w4` id.
Source: triton_kernels 3.5.1 (vLLM 0.33.0).
"""

from __future__ import annotations

from typing import ClassVar

from moeq.layouts.arranged import Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.bits import MUL_FREE
from moeq.layouts.mxfp4 import by_role, scale_bytes
from moeq.layouts.triton_kernels import TritonKernelsLayout
from moeq.matrix import MatrixSpec

# Row 16 n + 8 o + 2 r + s: for a gated w13, s is the half. Byte column 32 k + 8 m + 4 j + x.
WEIGHT = Arrangement("n o2 r4 s2, k m4 j2 x4 b2 -> n r k s x m | j o b")
WEIGHT_W13 = Arrangement("h2 n o2 r4, k m4 j2 x4 b2 -> n r k h x m | j o b")


class TritonKernelsHopper(TritonKernelsLayout):
    """Scales for 8 warps (see the module)."""

    id = "triton-kernels-hopper/1"
    title = "triton_kernels MXFP4, Hopper, 8 warps"
    arch = "SM90"
    slicing = "N by 256 (128 per half of w13), K by 128"
    warps: ClassVar[int] = 8

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        w, unit = self.warps, 32 * self.warps
        scale = by_role(
            Arrangement(f"h2 n u2 x{w} o2 r4, g s2 -> n x g u r h s o"),
            Arrangement(f"n u2 x{w} o2 r8, g s2 -> n x g u r s o"),
            spec,
        )
        rows, columns = -(-spec.n // 16) * 16, -(-spec.k // 64) * 64
        scale_shape = (-(-spec.n // unit) * unit // 32, 32 * (-(-spec.num_groups // 4) * 4))
        scales = scale_bytes(spec, scale, scale_shape)
        shape = (rows // 4, 2 * columns)
        return {
            "weight": Part("codes", by_role(WEIGHT_W13, WEIGHT, spec), shape, "U8", 4, pad=(16, 64), rewrite=MUL_FREE),
            "scale": Part("scales", scale, scales.shape, "U8", 8, pad=(unit, 4), group=spec.group_size),
            **self.bias(spec),
        }


class TritonKernelsHopper4(TritonKernelsHopper):
    """Scales for 4 warps."""

    id = "triton-kernels-hopper-w4/1"
    title = "triton_kernels MXFP4, Hopper, 4 warps"
    slicing = "N by 128 (64 per half of w13), K by 128"
    warps = 4
