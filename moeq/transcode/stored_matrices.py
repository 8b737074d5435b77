"""Readers and fillers that only transcoding's fast path has: GGUF's blocks, floats, ktransformers' tiles.

Blocks of types that are codes under scales give the fields of `moeq.pipeline.pack.fast.formats`. Blocks of other types
give `blocks`, uint8 `[N, bytes of a row]`, whose numbers are computed some rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeq.layouts.loops import blocks, kt_amx, transpose
from moeq.layouts.loops.codebooks import CODEBOOKS, is_installed
from moeq.layouts.loops.compare import any_all_ones
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.formats import Fields, Stored
from moeq.pipeline.pack.fast.scales import EXPONENT, WIDTH
from moeq.pipeline.pack.fast.scratch import Array, Region, regions_of
from moeq.schemes.format import Described, PartSig
from moeq.schemes.gguf import METHOD, part_of
from moeq.schemes.kt_amx import KtAmx, scale_part, weight_part

#: Types of floats that are stored as they are.
PLAIN_TYPES = ("f32", "f16", "bf16")

#: Least bits of an E4M3 scale that is negative or NaN.
_NEGATIVE_E4M3 = 0x7F


@dataclass(frozen=True)
class StoredBlocks:
    """A projection in GGUF blocks of one type."""

    type: str  #: name of the type, such as `q4_k`
    spec: MatrixSpec
    reads: tuple[str, ...]  #: parts that are read

    @property
    def scratch_bytes(self) -> int:
        return self._regions["global scale"].stop if self.type in blocks.SCALE_BYTES else 0

    @cached_property
    def _regions(self) -> dict[str, Region]:
        spec, width = self.spec, np.dtype(WIDTH[self.spec.scale_dtype]).itemsize
        sizes = {"codes": spec.n * spec.k * spec.bits // 8, "scales": spec.n * spec.num_groups * width}
        return regions_of({**sizes, "global scale": 4 * spec.n if self.type == "nvfp4" else 0})

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        """Return the fields; None if a scale is negative or NaN."""
        n = self.spec.n
        fields: Fields = {}
        if "bias" in stored:
            bias = stored["bias"]
            fields["bias"] = bias.view(f"u{len(bias) // n}").reshape(-1, 1)
        rows = stored[part_of(self.type)].reshape(n, -1)
        if self.type not in blocks.SCALE_BYTES:
            return {"blocks": rows, **fields}
        codes = self._regions["codes"].array(scratch, (n, self.spec.k * self.spec.bits // 32), "u4")
        scales = self._regions["scales"].array(scratch, (n, self.spec.num_groups), WIDTH[self.spec.scale_dtype])
        blocks.split(self.type, rows, codes.view(np.uint8), scales.view(np.uint8))
        if any_all_ones(scales, EXPONENT[self.spec.scale_dtype]):
            return None
        if self.type == "nvfp4":
            if scales.max() >= _NEGATIVE_E4M3:
                return None
            shared = self._regions["global scale"].array(scratch, (n, 1), "u4")
            shared.view(np.float32).fill(1)
            fields["global_scale"] = shared
        return {"codes": codes, "scales": scales, **fields}


def stored_blocks(sigs: Mapping[str, PartSig], described: Described) -> StoredBlocks | None:
    """Return the reader of a projection; None unless the projection is stored in blocks that loops can read."""
    block_type = described.scheme.checkpoint_format
    known = block_type in (*blocks.SCALE_BYTES, *blocks.NUMBERS, *PLAIN_TYPES)
    if described.scheme.format != METHOD or not known or (block_type in CODEBOOKS and not is_installed()):
        return None
    return StoredBlocks(block_type, described.spec, tuple(sigs))


@dataclass(frozen=True)
class StoredFloats:
    """A projection that is not quantised: `values`, uint16 or uint32 `[N, K]`, and a bias if there is one."""

    spec: MatrixSpec
    reads: tuple[str, ...]  #: parts that are read
    transposed: bool  #: whether the stored tensor is the transpose, `[K, N]`

    @property
    def scratch_bytes(self) -> int:
        return Region(0, self.spec.n * self.spec.k * self.spec.bits // 8).stop if self.transposed else 0

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        """Return `values`, and `bias` if there is one."""
        fields = self.blank(stored, scratch)
        if self.transposed:
            transpose.copy_any(self._weight(stored).T, fields["values"])
        return fields

    def blank(self, stored: Stored, scratch: Array) -> Fields:
        """Return memory for `values`, and `bias` if there is one."""
        shape = self.spec.n, self.spec.k
        region = Region(0, self.scratch_bytes)
        fields = {"values": region.array(scratch, shape, self._dtype) if self.transposed else self._weight(stored)}
        if "bias" in stored:
            width = len(stored["bias"]) // self.spec.n
            fields["bias"] = stored["bias"].view(f"u{width}")[:, None]
        return fields

    def finish(self, stored: Stored, scratch: Array) -> None:
        """Write `values` to the stored tensor if `blank` put them into scratch."""
        if self.transposed:
            transpose.copy_any(self.blank(stored, scratch)["values"].T, self._weight(stored))

    @property
    def _dtype(self) -> str:
        return f"u{self.spec.bits // 8}"

    def _weight(self, stored: Stored) -> Array:
        n, k = self.spec.n, self.spec.k
        return stored["weight"].view(self._dtype).reshape((k, n) if self.transposed else (n, k))


@dataclass(frozen=True)
class StoredTiles:
    """A projection in ktransformers' tiles, cut by NUMA node. Its codes and scales lie in scratch."""

    spec: MatrixSpec
    form: KtAmx
    nodes: int  #: count of NUMA nodes

    @cached_property
    def reads(self) -> tuple[str, ...]:
        return tuple(self.form.signatures(self.spec, self.nodes))

    @property
    def scratch_bytes(self) -> int:
        return self._regions["scales"].stop

    @cached_property
    def _regions(self) -> dict[str, Region]:
        spec = self.spec
        return regions_of({"codes": spec.n * spec.k * spec.bits // 8, "scales": 4 * spec.n * spec.num_groups})

    def blank(self, stored: Stored, scratch: Array) -> Fields:
        spec = self.spec
        return {
            "codes": self._regions["codes"].array(scratch, (spec.n, spec.k * spec.bits // 32), "u4"),
            "scales": self._regions["scales"].array(scratch, (spec.n, spec.num_groups), "u4"),
        }

    def finish(self, stored: Stored, scratch: Array) -> None:
        for codes, scales, tiles, stored_scales in self._nodes(stored, scratch):
            kt_amx.tile(codes, self.spec.bits, self.form.row_block, self.form.column_block, tiles)
            np.divide(scales, np.float32(self.form.step), out=stored_scales)

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        for codes, scales, tiles, stored_scales in self._nodes(stored, scratch):
            kt_amx.untile(tiles, self.spec.bits, self.form.row_block, self.form.column_block, codes)
            np.multiply(stored_scales, np.float32(self.form.step), out=scales)
        return self.blank(stored, scratch)

    def _nodes(self, stored: Stored, scratch: Array) -> Iterator[tuple[Array, Array, Array, Array]]:
        """Yield (codes, scales, stored tiles, stored scales) of every node; the first two lie in scratch."""
        fields = self.blank(stored, scratch)
        by_columns = self.spec.role in ("down", "w2")
        for node in range(self.nodes):
            codes, scales = (_share(fields[name], node, self.nodes, by_columns) for name in ("codes", "scales"))
            tiles, stored_scales = stored[weight_part(node)].view(np.uint32), stored[scale_part(node)]
            yield codes, scales.view(np.float32), tiles, stored_scales.view(np.float32).reshape(-1, 1)


def _share(matrix: Array, node: int, nodes: int, by_columns: bool) -> Array:
    """Return a node's share of a matrix: some of its columns or rows."""
    size = matrix.shape[by_columns] // nodes
    share = slice(node * size, (node + 1) * size)
    return matrix[:, share] if by_columns else matrix[share]
