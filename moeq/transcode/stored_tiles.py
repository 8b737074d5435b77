"""ktransformers' experts as the fast path of transcoding fills and reads them (`moeq.schemes.kt_amx`)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeq.layouts.loops import kt_amx
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.formats import Fields, Stored
from moeq.pipeline.pack.fast.scratch import Array, Region
from moeq.schemes.kt_amx import KtAmx, scale_part, weight_part


@dataclass(frozen=True)
class StoredTiles:
    """A projection in the order of tiles, cut by NUMA node. Its codes and scales lie in scratch."""

    spec: MatrixSpec
    form: KtAmx
    nodes: int

    @cached_property
    def reads(self) -> tuple[str, ...]:
        """Parts of all nodes."""
        return tuple(self.form.signatures(self.spec, self.nodes))

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch for codes and scales."""
        return self._scale_region.stop

    @cached_property
    def _code_region(self) -> Region:
        return Region(0, self.spec.n * self.spec.k * self.spec.bits // 8)

    @cached_property
    def _scale_region(self) -> Region:
        return Region(self._code_region.stop, 4 * self.spec.n * self.spec.num_groups)

    def blank(self, stored: Stored, scratch: Array) -> Fields:
        """Return memory for codes and scales."""
        spec = self.spec
        return {
            "codes": self._code_region.array(scratch, (spec.n, spec.k * spec.bits // 32), "u4"),
            "scales": self._scale_region.array(scratch, (spec.n, spec.num_groups), "u4"),
        }

    def finish(self, stored: Stored, scratch: Array) -> None:
        """Store every node's tiles and scales."""
        for codes, scales, tiles, stored_scales in self._nodes(stored, scratch):
            kt_amx.tile(codes, self.spec.bits, self.form.row_block, self.form.column_block, tiles)
            np.divide(scales, np.float32(self.form.step), out=stored_scales)

    def read(self, stored: Stored, scratch: Array) -> Fields | None:
        """Return codes and scales."""
        for codes, scales, tiles, stored_scales in self._nodes(stored, scratch):
            kt_amx.untile(tiles, self.spec.bits, self.form.row_block, self.form.column_block, codes)
            np.multiply(stored_scales, np.float32(self.form.step), out=scales)
        return self.blank(stored, scratch)

    def _nodes(self, stored: Stored, scratch: Array) -> Iterator[tuple[Array, Array, Array, Array]]:
        """Yield every node's codes and scales in scratch, and its stored parts."""
        fields = self.blank(stored, scratch)
        by_columns = self.spec.role in ("down", "w2")
        for node in range(self.nodes):
            codes, scales = (_share(fields[name], node, self.nodes, by_columns) for name in ("codes", "scales"))
            tiles, stored_scales = stored[weight_part(node)].view(np.uint32), stored[scale_part(node)]
            yield codes, scales.view(np.float32), tiles, stored_scales.view(np.float32).reshape(-1, 1)


def _share(matrix: Array, node: int, nodes: int, by_columns: bool) -> Array:
    """Return a node's rows or columns."""
    size = matrix.shape[by_columns] // nodes
    share = slice(node * size, (node + 1) * size)
    return matrix[:, share] if by_columns else matrix[share]
