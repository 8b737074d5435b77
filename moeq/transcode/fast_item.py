"""The fast path of transcoding: stored bytes to stored bytes, without decoding. Import it only if numba is installed.

Source and target are read and filled as the same matrices (`moeq.pipeline.pack.fast.formats`), in one pass from one to
the other. Then the filled bytes are read again, as a reader of the target reads them, and compared with the source by
other loops. Items that are not proven equal are left to the reference path, which measures the changes, and writes the
item if losses are allowed. For floats the comparison measures the changes itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from moeq.checkpoint.manifest import Projection
from moeq.checkpoint.names import StoredName
from moeq.layouts.loops import floats
from moeq.layouts.loops.native import NotCachedError, only_cached
from moeq.pipeline.pack.fast.formats import stored_projection
from moeq.pipeline.pack.fast.path import FilledMatrix, Inputs, ProjectionReader, ReadMatrix
from moeq.pipeline.pack.fast.scratch import Array, Region
from moeq.schemes.kt_amx import KtAmx
from moeq.schemes.registry import get_format
from moeq.transcode.act_order_fast import Sorting
from moeq.transcode.recode_fields import PLAIN, Changes, Matrices, Recoder, recoders_of, same_bits
from moeq.transcode.stored_matrices import StoredFloats, StoredTiles
from moeq.transcode.transcode_plan import WrittenProjection


@dataclass(frozen=True)
class FastItem:
    """The fast path of an item. Immutable; any number of threads may use it."""

    readers: tuple[ProjectionReader[ReadMatrix], ...]  #: readers of the source's projections
    writers: tuple[ProjectionReader[FilledMatrix], ...]  #: writers of the target's, in scratch behind the readers'
    recoders: tuple[Recoder, ...]  #: recoders from source to target; the first that proves its result is taken
    sorting: Sorting | None  #: sorter of columns into groups, which works before the recoder; None: keep their order

    @cached_property
    def reads(self) -> tuple[tuple[StoredName, str], ...]:
        found = [(reader.name, part) for reader in self.readers for part in reader.stored.reads]
        return tuple(dict.fromkeys([*found, *(self.sorting.reads if self.sorting else ())]))

    @property
    def scratch_bytes(self) -> int:
        return self.sorting.stop if self.sorting else self.writers[-1].region.stop

    def transcode(self, inputs: Inputs, outputs: Inputs, scratch: Array) -> Changes | None:
        """Fill the outputs, every part of the target's projections, from the inputs of `reads`, and prove them.

        Returns:
            The changes of every projection that is written. None if they are unknown: the outputs must not be used.
        """
        source: Matrices | None = [fields for reader in self.readers for fields in reader.read(inputs, scratch) or [{}]]
        if source and all(source) and self.sorting is not None:
            source = self.sorting.sort(source, inputs, scratch)
        if not source or not all(source):
            return None
        for recoder in self.recoders:
            changes = self._recoded(recoder, source, outputs, scratch)
            if changes is not None:
                return self._as_written(changes)
        return None

    def _recoded(self, recoder: Recoder, source: Matrices, outputs: Inputs, scratch: Array) -> Changes | None:
        target = [fields for writer in self.writers for fields in writer.blank(outputs, scratch)]
        recoder.fill(source, target)
        for one, other in zip(source, target, strict=True):
            if "bias" in other:
                np.copyto(other["bias"], one["bias"])
        for writer in self.writers:
            writer.finish(outputs, scratch)
        found = [fields for writer in self.writers for fields in writer.read(outputs, scratch) or [{}]]
        if not all(found):
            return None
        for one, other in zip(source, found, strict=True):
            if ("bias" in one) != ("bias" in other):
                return None
            if "bias" in one and not same_bits(one["bias"], other["bias"]):
                return None
        return recoder.changes(source, found)

    def _as_written(self, changes: Changes) -> Changes:
        """Return the changes of the written matrices, joined from the changes of the projections that they hold."""
        found: list[floats.MeasuredChange | None] = []
        for writer in self.writers:
            count = len(writer.holds)
            here, changes = changes[:count], changes[count:]
            found.append(floats.joined(here, writer.stored.spec.n, writer.interleaved) if count > 1 else here[0])
        return found


class CachedItem:
    """The fast path of an item that is too small to compile loops for: it works if all loops are in the cache.

    Where a loop is `missing`, the item is left to the reference path.
    """

    def __init__(self, item: FastItem) -> None:
        self._item = item
        self.reads, self.scratch_bytes = item.reads, item.scratch_bytes
        self.missing = False

    def transcode(self, inputs: Inputs, outputs: Inputs, scratch: Array) -> Changes | None:
        """Transcode as `FastItem.transcode` does; return None if a loop is not in the cache."""
        try:
            with only_cached():
                return self._item.transcode(inputs, outputs, scratch)
        except NotCachedError:
            self.missing = True
            return None


def build_fast_item(
    readers: tuple[ProjectionReader[ReadMatrix], ...],
    written: Mapping[StoredName, WrittenProjection],
    *,
    interleaved: bool,
    index: tuple[StoredName, str, int] | None = None,
    sort: bool = False,
) -> FastItem | None:
    """Return the fast path of an item that `readers` read and `written` describes; None if there is none.

    Args:
        interleaved: whether gate and up rows are interleaved if they are written as one matrix.
        index: stored projection and part of the group index of an expert's down projection, and its group size.
        sort: whether columns in activation order are sorted.
    """
    writers: list[ProjectionReader[FilledMatrix]] = []
    start = readers[-1].region.stop
    recoders: list[tuple[Recoder, ...]] = []
    for name, one in written.items():
        stored = _stored(one)
        if stored is None or (one.projected.source.spec.act_order and len(readers) != len(written)):
            return None
        spec = one.described.spec
        names: tuple[Projection, ...] = ("gate", "up") if name == "gate_up" else (name,)
        held = tuple((projection, spec) for projection in names)
        writers.append(ProjectionReader(name, stored, held, interleaved, Region(start, stored.scratch_bytes)))
        start = writers[-1].region.stop
        recoders.append(recoders_of(one, halved=len(names) > 1))
    held_by = [sum(len(one.holds) for one in some) for some in (readers, writers)]
    if not recoders[0] or any(other != recoders[0] for other in recoders) or held_by[0] != held_by[1]:
        return None
    sorting = Sorting.of(readers, index, start) if sort else None
    return FastItem(readers, tuple(writers), recoders[0], sorting)


def _stored(one: WrittenProjection) -> FilledMatrix | None:
    if one.projected.spelling in PLAIN:
        return StoredFloats(one.described.spec, tuple(one.packed), one.projected.spelling != "plain")
    if isinstance(form := get_format(one.described.scheme.format), KtAmx):
        return StoredTiles(one.described.spec, form, len(one.packed) // 2)
    return stored_projection(one.packed, one.described, any_order=True)
