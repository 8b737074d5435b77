"""`moeq.transcode.act_order` on stored bytes: columns sorted into groups, and the proof that nothing else changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeq.checkpoint.names import StoredName
from moeq.layouts.loops import columns
from moeq.pipeline.pack.fast.formats import Fields
from moeq.pipeline.pack.fast.path import Inputs, ProjectionReader, ReadMatrix
from moeq.pipeline.pack.fast.scales import WIDTH
from moeq.pipeline.pack.fast.scratch import Array, Region, regions_of

#: Fields that have a row for each output feature.
_ROWS = ("codes", "scales", "zeros", "bias")


@dataclass(frozen=True)
class Sorting:
    """Plan that sorts the columns of a down projection into groups, or the rows of gate and up in the same order."""

    bits: int
    #: Stored projection and part of the down projection's group index; None for modules outside the experts.
    index: tuple[StoredName, str] | None
    group_size: int  #: columns in a group of the down projection
    own_sizes: tuple[int, ...]  #: columns in a group, for every projection of the item
    is_down: bool  #: whether the item is the down projection
    regions: tuple[dict[str, Region], ...]  #: scratch for the sorted fields of every projection

    @classmethod
    def of(
        cls, readers: Sequence[ProjectionReader[ReadMatrix]], index: tuple[StoredName, str, int] | None, start: int
    ) -> Sorting:
        """Plan the sorting of an item; `moeq.transcode.fast_item.build_fast_item` describes `readers` and `index`."""
        is_down = index is not None and readers[0].name == index[0]
        regions = []
        specs = [spec for reader in readers for _, spec in reader.holds]
        for spec in specs:
            sizes = {"codes": spec.n * spec.k * spec.bits // 8}
            if index is not None and not is_down:
                scale_bytes = np.dtype(WIDTH[spec.scale_dtype]).itemsize
                bias_bytes = np.dtype(WIDTH[spec.bias_dtype]).itemsize if spec.bias_dtype else 0
                groups = spec.n * spec.num_groups
                sizes |= {"scales": groups * scale_bytes, "zeros": groups, "bias": spec.n * bias_bytes}
            regions.append(regions_of(sizes, start))
            start = max(region.stop for region in regions[-1].values())
        own_sizes = tuple(spec.group_size for spec in specs)
        group_size = own_sizes[0] if index is None else index[2]
        return cls(specs[0].bits, index and index[:2], group_size, own_sizes, is_down, tuple(regions))

    @property
    def reads(self) -> tuple[tuple[StoredName, str], ...]:
        """Parts that have to be read beside the item's own."""
        return () if self.index is None else (self.index,)

    @property
    def stop(self) -> int:
        """End of the scratch regions."""
        return max(region.stop for regions in self.regions for region in regions.values())

    def sort(self, source: Sequence[Fields], inputs: Inputs, scratch: Array) -> list[Fields] | None:
        """Sort the fields in the order of the target; None leaves the item to the reference path."""
        order = None
        if self.index is not None:
            group_of_column = inputs[self.index].view(np.int32)
            order = np.argsort(group_of_column, kind="stable")
            if not _in_groups(group_of_column[order], self.group_size):
                return None
            if _in_groups(group_of_column, self.group_size):
                order = None
        sorted_fields = []
        for fields, own_size, regions in zip(source, self.own_sizes, self.regions, strict=True):
            made = {name: field for name, field in fields.items() if name != "index"}
            if not self.is_down and "index" in fields and not _in_groups(fields["index"], own_size):
                return None
            if order is not None:
                changed = ("codes",) if self.is_down else [name for name in _ROWS if name in fields]
                for name in changed:
                    sorted_field = self._sorted(fields[name], order, regions[name], scratch)
                    if sorted_field is None:
                        return None
                    made[name] = sorted_field
            sorted_fields.append(made)
        return sorted_fields

    def _sorted(self, field: Array, order: Array, region: Region, scratch: Array) -> Array | None:
        """Reorder the features of a field along N, or along K for the down projection, and prove that by going back.

        The result is None if `order` is no permutation, or if sorting back does not give the stored field.
        """
        out = region.array(scratch, (field.shape[1], field.shape[0]), field.dtype.str).T
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        if not np.array_equal(order[inverse], np.arange(len(order))):
            return None
        if self.is_down:
            columns.take_codes(field.T, order, self.bits, out.T)
            return out if columns.holds_taken_codes(field.T, inverse, self.bits, out.T) else None
        columns.take_elements(field.T, order, out.T)
        return out if columns.holds_taken_elements(field.T, inverse, out.T) else None


def _in_groups(index: Array, group_size: int) -> bool:
    """Return whether groups are runs of columns, all of one size except the last."""
    return np.array_equal(index, np.arange(len(index)) // group_size)
