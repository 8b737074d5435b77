"""NVFP4 in all libraries: e2m1 codes two to a byte, e4m3 scales of 16 codes in 128 x 4 tiles, a global scale.

Parts of one expert: `weight` uint8 `[N, K / 2]`, low nibble first; `scale` F8_E4M3, zero-filled to whole tiles;
`global_scale` float32 `[1]`, the checkpoint's as a multiplier. Only the order of rows differs between kernels. Scales
of activations (`input_scale`) stay as they are in the source.

The kernels have one global scale for gate and up. Where a checkpoint has two, the engine takes the gate's for both,
which changes the up projection; packing is refused then unless losses are allowed.

Source: vLLM 0.33.0, `flashinfer_fp4_moe.py` and `nvfp4_utils.py` (`swizzle_blockscale`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import SliceRule, TensorSpec
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import IDENTITY, TILE_128X4, TILE_128X4_UP_GATE, UP_GATE, Maps, by_role, weight_bytes
from moeq.layouts.parts import Part, changed
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

#: Codes that share a scale.
GROUP = 16

#: Rows and groups of a scale tile.
TILE = (128, 4)


class NVFP4Layout(Layout):
    """Base of layouts for NVFP4 whose codes and scales keep their values."""

    source = "vLLM 0.33.0"
    family = "nvfp4"
    elements = ("e2m1",)
    schemes = "nvfp4 (e2m1 codes, e4m3 scales of 16, float32 scale per tensor), no bias"
    scale_dtypes = ("e4m3",)
    group_sizes = (GROUP,)
    channelwise = False
    biased = False
    rearranges = True  # the fast path copies the global scale beside the arranged parts
    lossy = "where gate and up have different global scales, up gets the gate's"
    weight_maps: ClassVar[Maps] = (IDENTITY,)
    scale_maps: ClassVar[Maps] = (TILE_128X4,)

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        weight = weight_bytes(spec, by_role(self.weight_maps, spec))
        return {"weight": weight, "scale": nvfp4_scale(spec, by_role(self.scale_maps, spec))}

    def extra_tensors(self, spec: MatrixSpec) -> dict[str, TensorSpec]:
        return {"global_scale": TensorSpec((1,), "F32")}

    def fill_extra(self, matrix: QuantizedMatrix, out: Mapping[str, Tensor]) -> None:
        if "global_scale" in out:
            out["global_scale"].copy_(global_scale_of(matrix)[:1])

    def losses(self, matrix: QuantizedMatrix) -> int:
        return super().losses(matrix) + lost_global_scales(matrix)

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        import torch

        found = super().encode(name, matrix)
        return found.view(torch.uint8) if name == "scale" else found  # torch cannot fill float8 with zeros

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec) -> QuantizedMatrix:
        stored = parts["global_scale"].reshape(-1)[:1]
        return replace(super().unpack(parts, spec), global_scale=stored.expand(spec.n).contiguous())


class TiledNVFP4(NVFP4Layout):
    """Base of layouts whose scales are tiled in the order of the rows, gate and up one after the other.

    Where a half is an odd number of 64 rows, a tile has rows of both: such packings cannot be sliced.
    """

    slicing = "N by 128, K by 64; none where a half is an odd multiple of 64"
    n_multiple = 64

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        up_first = self.w13_order == "up-gate" and spec.halves == 2
        weight = UP_GATE if up_first else IDENTITY
        # A tile that holds rows of both halves cannot be arranged half by half.
        scale = replace(nvfp4_scale(spec, TILE_128X4), halves_swapped=up_first)
        if up_first and not _straddles(spec):
            scale = nvfp4_scale(spec, TILE_128X4_UP_GATE)
        return {"weight": weight_bytes(spec, weight), "scale": scale}

    def slices(self, spec: MatrixSpec) -> SliceRule:
        return SliceRule(None, None) if spec.halves == 2 and _straddles(spec) else super().slices(spec)


def _straddles(spec: MatrixSpec) -> bool:
    """Return whether a scale tile has rows of gate and up."""
    return bool(spec.n // 2 % TILE[0])


def nvfp4_scale(spec: MatrixSpec, arrangement: Arrangement) -> Part:
    """Return the part of the scales: F8_E4M3 `[N, G]`, both rounded up to whole tiles."""
    rows, groups = (-(-size // unit) * unit for size, unit in zip((spec.n, spec.num_groups), TILE, strict=True))
    # Halves are whole tiles where they are arranged apart, so that nothing has to be filled between them.
    pad = (1 if arrangement.has_halves else TILE[0], TILE[1])
    return Part("scales", arrangement, (rows, groups), "F8_E4M3", 8, pad=pad, group=GROUP)


def lost_global_scales(matrix: QuantizedMatrix) -> int:
    """Count the rows whose global scale is not that of the first row, which is the one that is stored."""
    scales = global_scale_of(matrix)
    return changed(scales, scales[:1].expand_as(scales))


def global_scale_of(matrix: QuantizedMatrix) -> Tensor:
    """Return the global scale of every row, float32 `[N]`. Raises MoeqError `source.missing-part`."""
    if matrix.global_scale is None:
        raise MoeqError("source.missing-part", f"{matrix.spec.role}: the global scale of NVFP4 is missing")
    return matrix.global_scale
