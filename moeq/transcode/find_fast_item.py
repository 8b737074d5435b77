"""Find the fast path of each item of a transcoding. Loads compiled code only for items that need it, and no torch."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import StoredName
from moeq.checkpoint.writer import FileForm
from moeq.layouts.words import use_cached, use_compiled
from moeq.model import Checkpoint
from moeq.pipeline.pack.inputs import Place
from moeq.pipeline.plan.units import Span, place_of, signature_of
from moeq.schemes.format import Described, PartSig
from moeq.schemes.gguf import METHOD
from moeq.schemes.registry import get_format
from moeq.transcode.transcode_plan import ExpertItem, Item, ModuleItem, TranscodePlan

if TYPE_CHECKING:
    from moeq.pipeline.pack.fast.path import ProjectionReader, ReadMatrix
    from moeq.transcode.fast_item import CachedItem, FastItem

_Signatures = Mapping[StoredName, Mapping[str, PartSig]]


def rows_of(entry: TensorEntry, rows: Span | None) -> Span:
    """Return the span of some rows of a stored tensor, or of all rows where `rows` is None."""
    if rows is None:
        return entry.start, entry.end
    size = entry.nbytes // entry.shape[0]
    return entry.start + rows[0] * size, entry.start + rows[1] * size


class FastPaths:
    """The fast paths of a unit's items. Items of one kind share a path; any thread may call the methods."""

    def __init__(self, checkpoint: Checkpoint, plan: TranscodePlan, form: FileForm) -> None:
        self._checkpoint = checkpoint
        self._plan = plan
        self._form = form
        self._known: dict[object, FastItem | CachedItem | None] = {}
        self._lock = threading.Lock()

    def find(self, item: Item) -> FastItem | CachedItem | None:
        """Return the fast path of an item; None leaves it to the reference path."""
        signatures = self._signatures(item)
        key = self._key(item, signatures)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._build(item, signatures)
            found = self._known[key]
        return None if getattr(found, "missing", False) else found

    def places(self, item: Item, reads: Sequence[tuple[StoredName, str]]) -> list[Place]:
        """Return the places of an item's parts in the source; gate and up may be stored together."""
        entries = self._entries(item)
        if not isinstance(item, ExpertItem):
            parts = (entries[name][part] for name, part in reads)
            return [(entry.file, *rows_of(entry, item.rows)) for entry in parts]
        experts = self._checkpoint.experts(item.layer)
        found = [(part, (entries.get(name) or entries["gate_up"])[part]) for name, part in reads]
        return [(entry.file, *place_of(entry, part, experts, item.expert)) for part, entry in found]

    def _entries(self, item: Item) -> Mapping[StoredName, Mapping[str, TensorEntry]]:
        if isinstance(item, ExpertItem):
            return self._checkpoint.experts(item.layer).layer.unit(item.expert)
        return {"down": self._plan.modules_by_name[item.name].source.parts}

    def _signatures(self, item: Item) -> _Signatures:
        """Return dtype and shape of every stored part of one expert (of `w13` and `w2`), or of a module."""
        fused = isinstance(item, ExpertItem) and self._checkpoint.experts(item.layer).layer.fused
        rows = item.rows if isinstance(item, ModuleItem) else None

        def signature(part: str, entry: TensorEntry) -> PartSig:
            if rows is not None:
                return PartSig(entry.dtype, (rows[1] - rows[0], *entry.shape[1:]))
            return signature_of(entry, part, fused=fused)

        entries = self._entries(item)
        return {name: {part: signature(part, one) for part, one in parts.items()} for name, parts in entries.items()}

    def _key(self, item: Item, signatures: _Signatures) -> object:
        """Return the key of everything that the fast path of an item depends on."""
        stored = tuple((name, *sorted(parts.items())) for name, parts in sorted(signatures.items()))
        if not isinstance(item, ExpertItem):
            return stored, self._plan.modules_by_name[item.name].projected
        # Experts that are written alike share the table of their projections.
        projected = self._plan.layers_by_number[item.layer].kinds[item.expert]
        return item.role, stored, id(projected), id(self._checkpoint.kind_of(item.layer, item.expert))

    def _build(self, item: Item, signatures: _Signatures) -> FastItem | CachedItem | None:
        outputs = self._plan.outputs(item, self._form)
        specs = [output.described.spec for output in outputs.values()]
        size = sum(spec.n * spec.k for spec in specs)
        large = use_compiled(size)
        if not specs or not (large or use_cached(size)):
            return None
        from moeq.transcode.fast_item import CachedItem, build_fast_item

        readers = self._readers(item, signatures)
        interleaved = isinstance(item, ExpertItem) and self._plan.layers_by_number[item.layer].naming.interleaved
        if readers is None:
            return None
        sort = self._plan.request.sort_act_order
        index = self._group_index(item, signatures) if sort and isinstance(item, ExpertItem) else None
        found = build_fast_item(readers, outputs, interleaved=interleaved, index=index, sort=sort)
        return found if large or found is None else CachedItem(found)

    def _group_index(self, item: ExpertItem, signatures: _Signatures) -> tuple[StoredName, str, int] | None:
        """Return (projection, part, group size) of the down projection's group index; None if it has none."""
        down = self._checkpoint.kind_of(item.layer, item.expert).projections["down"]
        roles = get_format(down.scheme.format).parts
        names = [part for part in signatures["down"] if roles.get(part) == "index"]
        return ("down", names[0], down.spec.group_size) if names else None

    def _readers(self, item: Item, signatures: _Signatures) -> tuple[ProjectionReader[ReadMatrix], ...] | None:
        from moeq.pipeline.pack.fast.find import projection_readers
        from moeq.pipeline.pack.fast.formats import stored_projection
        from moeq.pipeline.pack.fast.path import ProjectionReader
        from moeq.pipeline.pack.fast.scratch import Region
        from moeq.transcode.stored_matrices import stored_blocks

        def stored_as(name: StoredName, described: Described) -> ReadMatrix | None:
            sigs = signatures[name]
            return stored_blocks(sigs, described) or stored_projection(sigs, described, any_order=True)

        if isinstance(item, ExpertItem):
            kind = self._checkpoint.kind_of(item.layer, item.expert)
            # Blocks of interleaved rows cannot be cut into gate and up.
            mixed = kind.interleaved and any(scheme.format == METHOD for scheme in kind.schemes)
            if self._checkpoint.experts(item.layer).flat or (mixed and "gate_up" in kind.projections):
                return None
            return projection_readers(kind, item.role, stored_as)
        described = self._plan.modules_by_name[item.name].source.described
        if item.rows is not None:
            described = replace(described, spec=described.spec.with_sizes(n=item.rows[1] - item.rows[0]))
        stored = stored_as("down", described)
        if stored is None:
            return None
        return (ProjectionReader("down", stored, (("down", described.spec),), False, Region(0, stored.scratch_bytes)),)
