"""MXFP4 for triton_kernels, generation 3.5.1, as vendored in vLLM 0.33.0.

Shapes are of one expert's contiguous tensor in memory; the kernel takes its transposed view. w13 rows are interleaved
(gate 0, up 0, gate 1, ...), as the SwiGLU epilogue reads pairs, and biases are float32. Newer generations of
triton_kernels pad more; these ids mean generation 3.5.1.

vLLM 0.33.0 interleaves the last dimension, not the rows, of models other than gpt-oss on this backend, which does not
fit the kernel; moeq writes interleaved rows for every model.
"""

from __future__ import annotations

from typing import ClassVar

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import PaddingRule
from moeq.layouts.bits import MUL_FREE
from moeq.layouts.mxfp4 import (
    IDENTITY,
    IDENTITY_SCALE,
    INTERLEAVED,
    INTERLEAVED_ROWS,
    TILE_128X4,
    MXFP4Layout,
    by_role,
    scale_bytes,
)
from moeq.layouts.parts import Part
from moeq.layouts.readers import MOEQ, VLLM, Only, Reader
from moeq.matrix import MatrixSpec


def _triton(*devices: str, max_tp: int | None = None) -> tuple[VLLM, ...]:
    """Return the two backends of vLLM that run triton_kernels, restricted to the given devices."""
    only = Only(devices=devices, max_tp=max_tp)
    return tuple(VLLM(name, name.lower(), dtypes=("bf16",), only=only) for name in ("TRITON", "TRITON_UNFUSED"))


class TritonKernelsLayout(MXFP4Layout):
    source = "triton_kernels 3.5.1 (vLLM 0.33.0)"
    padding = PaddingRule(intermediate=64)
    w13_order = "interleaved"
    weight_maps = (INTERLEAVED, IDENTITY)
    bias_maps = (INTERLEAVED_ROWS, IDENTITY_SCALE)
    bias_dtype = "F32"


# Stored row: 16 n + 8 o + 2 r + s; a gated w13 has its half, h, in the place of s. Byte column: 32 k + 8 m + 4 j + x.
HOPPER_WEIGHT = Arrangement("n o2 r4 s2, k m4 j2 x4 b2 -> n r k s x m | j o b")
HOPPER_WEIGHT_W13 = Arrangement("h2 n o2 r4, k m4 j2 x4 b2 -> n r k h x m | j o b")


class TritonKernelsHopper(TritonKernelsLayout):
    """SM90: scales for 8 warps, as in vLLM.

    `weight` uint8 `[N / 4, 2 K]` (`HopperMXValueLayout`; N is padded to a multiple of 16, K of 64), the bits of each
    32-bit word permuted as in `bits.MUL_FREE`. `scale` uint8 `[N / 32, 32 G]` (`HopperMXScaleLayout`; N is padded to
    a multiple of 32 times the number of warps, G of 4).
    """

    id = "triton-kernels-hopper/1"
    title = "triton_kernels MXFP4, Hopper, 8 warps"
    readers: ClassVar[tuple[Reader, ...]] = (
        *_triton("cuda 9.0"),
        MOEQ("TRITON_KERNELS_HOPPER"),
    )
    arch = "SM90"
    slicing = "N by 256 (128 per half of w13), K by 128"
    warps: ClassVar[int] = 8

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        w, unit = self.warps, 32 * self.warps
        scale = by_role(
            (
                Arrangement(f"h2 n u2 x{w} o2 r4, g s2 -> n x g u r h s o"),
                Arrangement(f"n u2 x{w} o2 r8, g s2 -> n x g u r s o"),
            ),
            spec,
        )
        weight = by_role((HOPPER_WEIGHT_W13, HOPPER_WEIGHT), spec)
        shape = (-(-spec.n // 16) * 4, -(-spec.k // 64) * 128)
        scale_shape = (-(-spec.n // unit) * self.warps, -(-spec.num_groups // 4) * 128)
        return super().parts(spec) | {
            "weight": Part("codes", weight, shape, "U8", 4, pad=(16, 64), rewrite=MUL_FREE),
            "scale": Part("scales", scale, scale_shape, "U8", 8, pad=(unit, 4), group=spec.group_size),
        }


class TritonKernelsHopper4(TritonKernelsHopper):
    id = "triton-kernels-hopper-w4/1"
    title = "triton_kernels MXFP4, Hopper, 4 warps"
    readers = (MOEQ(),)
    slicing = "N by 128 (64 per half of w13), K by 128"
    warps = 4


# Row of the interleaved matrix: 128 n + 32 y + 2 z + h.
_BLACKWELL_SCALE_W13 = Arrangement("h2 n y4 z16, c x4 -> n c z h y x")


class TritonKernelsBlackwell(TritonKernelsLayout):
    """SM100 and SM120: values in row order, scales in 128 x 4 tiles.

    `weight` uint8 `[N, K / 2]`, K padded to a multiple of 256 (`BlackwellMXValueLayout`: no permutation). `scale` uint8
    `[N / 128, G / 4, 2, 256]`, N padded to a multiple of 128, G of 8 (`BlackwellMXScaleLayout`; the kernel takes all
    experts as `[1, E N / 128, G / 4, 2, 256]`).
    """

    id = "triton-kernels-blackwell/1"
    title = "triton_kernels MXFP4, Blackwell"
    readers = _triton("cuda 10.x", "cuda 12.x")
    arch = "SM100, SM120"
    slicing = "N by 128 (64 per half of w13), K by 256"

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight, scale = by_role((INTERLEAVED, IDENTITY), spec), by_role((_BLACKWELL_SCALE_W13, TILE_128X4), spec)
        shape = (-(-spec.n // 128), -(-spec.num_groups // 8) * 2, 2, 256)
        return super().parts(spec) | {
            "weight": Part("codes", weight, (spec.n, -(-spec.k // 256) * 128), "U8", 4, pad=(1, 256)),
            "scale": Part("scales", scale, shape, "U8", 8, pad=(128, 8), group=spec.group_size),
        }


_CDNA4_SCALE = Arrangement("n o2 r16, g u2 q4 -> n g q r u o")
_CDNA4_SCALE_W13 = Arrangement("h2 n o2 r8, g u2 q4 -> n g q r h u o")


class TritonKernelsCDNA4(TritonKernelsLayout):
    """gfx950: values in row order, scales for its matrix cores.

    `weight` uint8 `[N, K / 2]`, `scale` uint8 `[N / 32, 32 G]` (`CDNA4MXScaleLayout`). vLLM takes this scale order only
    for TP up to 2 and the plain one (`mxfp4-identity/1` with interleaved rows) beyond.
    """

    id = "triton-kernels-cdna4/1"
    title = "triton_kernels MXFP4, CDNA4 scales"
    readers = (
        *_triton("rocm gfx950", max_tp=2),
        VLLM(
            "AITER_TRITON_MXFP4_BF16",
            "aiter_triton_mxfp4_bf16",
            since="0.30.0",
            dtypes=("bf16",),
            activates=True,
            only=Only(devices=("rocm gfx950",), max_tp=2),
        ),
    )
    arch = "gfx950, TP up to 2"
    slicing = "N by 32 (16 per half of w13), K by 256"
    padding = PaddingRule(intermediate=256, hidden=256)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        shape = (spec.n // 32, 32 * spec.num_groups)
        return super().parts(spec) | {
            "scale": scale_bytes(spec, by_role((_CDNA4_SCALE_W13, _CDNA4_SCALE), spec), shape)
        }
