"""MXFP4 in all libraries: e2m1 codes two to a byte, e8m0 scales of 32 codes, the 128 x 4 scale tile.

In the patterns, `h` leads the rows of a gated w13 (0: gate, 1: up) and `b` is the nibble of a byte.
"""

from __future__ import annotations

from typing import ClassVar

from moeq.errors import MoeqError
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.layout import Layout
from moeq.layouts.parts import DTYPE_BITS, STORED_DTYPE, Part
from moeq.matrix import MatrixSpec, QuantizedMatrix

#: The OCP Microscaling group.
GROUP = 32

#: Index maps of a part: the first is for a matrix of gate and up, the last for all others.
Maps = tuple[Arrangement, ...]

#: Rows and columns as they are.
IDENTITY = Arrangement("n, k b2 -> n k | b")
IDENTITY_SCALE = Arrangement("n, g -> n g")
#: Rows gate 0, up 0, gate 1, up 1, ...
INTERLEAVED = Arrangement("h2 n, k b2 -> n h k | b")
INTERLEAVED_ROWS = Arrangement("h2 n, g -> n h g")
#: Rows up, then gate.
UP_GATE = Arrangement("h2 n, k b2 -> ~h n k | b")
UP_GATE_ROWS = Arrangement("h2 n, g -> ~h n g")
#: The 128 x 4 tile of block scales that SM100 tensor cores read: row = 128 m + 32 y + z, column = 4 c + x.
TILE_128X4 = Arrangement("n y4 z32, c x4 -> n c z y x")
TILE_128X4_UP_GATE = Arrangement("h2 n y4 z32, c x4 -> ~h n c z y x")


class MXFP4Layout(Layout):
    """Base of layouts for e2m1 codes with an e8m0 byte per 32 of them."""

    weight_maps: ClassVar[Maps] = (IDENTITY,)
    scale_maps: ClassVar[Maps] = (IDENTITY_SCALE,)
    bias_maps: ClassVar[Maps] = (IDENTITY_SCALE,)
    bias_dtype: ClassVar[str | None] = None  #: stored dtype of the bias; None: that of the matrix

    family = "mxfp4"
    elements = ("e2m1",)
    schemes = "mxfp4 (e2m1 codes, e8m0 scales of 32), with bias"
    scale_dtypes = ("e8m0",)
    group_sizes = (GROUP,)
    channelwise = False

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": weight_bytes(spec, by_role(self.weight_maps, spec)),
            "scale": scale_bytes(spec, by_role(self.scale_maps, spec)),
            **bias_as(spec, by_role(self.bias_maps, spec), self.bias_dtype),
        }


def weight_bytes(spec: MatrixSpec, arrangement: Arrangement) -> Part:
    """Return the part of the codes: uint8 `[N, K / 2]`. The arrangement ends in two nibbles per byte."""
    return Part("codes", arrangement, (spec.n, spec.k // 2), "U8", 4)


def scale_bytes(spec: MatrixSpec, arrangement: Arrangement, shape: tuple[int, ...] | None = None) -> Part:
    """Return the part of the scales: one byte per group, `[N, G]` unless `shape` says otherwise."""
    return Part("scales", arrangement, shape or (spec.n, spec.num_groups), "U8", 8, group=spec.group_size)


def scale_as(spec: MatrixSpec, arrangement: Arrangement, shape: tuple[int, int]) -> Part:
    """Return the part of the scales in the dtype in which they are stored."""
    dtype = STORED_DTYPE[spec.scale_dtype]
    return Part("scales", arrangement, shape, dtype, DTYPE_BITS[dtype], group=spec.group_size)


def bias_as(spec: MatrixSpec, arrangement: Arrangement, dtype: str | None = None) -> dict[str, Part]:
    """Return the part of the bias, `[N]` in a fixed dtype or (None) as it is stored; empty if the matrix has none."""
    if spec.bias_dtype is None:
        return {}
    dtype = dtype or STORED_DTYPE[spec.bias_dtype]
    return {"bias": Part("bias", arrangement, (spec.n,), dtype, DTYPE_BITS[dtype])}


def refuse_exponents_above(greatest: int, matrix: QuantizedMatrix, why: str, hint: str) -> None:
    """Raise MoeqError `usage.scale-range` if a scale's exponent byte is larger than `greatest`."""
    largest = int(matrix.scales.max())
    if largest > greatest:
        raise MoeqError("usage.scale-range", f"{why}; {matrix.spec.role} has {largest}", hint)


def by_role(maps: Maps, spec: MatrixSpec) -> Arrangement:
    """Return the index map for a matrix: the first for gate and up where it has both, else the last."""
    return maps[0 if spec.halves == 2 else -1]
