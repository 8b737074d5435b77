"""Find the fast path of a layer, if its format, its layout and its sizes allow one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from moeq.checkpoint.manifest import Projection, StackedRole
from moeq.checkpoint.names import FUSED, StoredName
from moeq.layouts.layout import Layout
from moeq.matrix import MatrixSpec, projection_spec
from moeq.model.expert_kinds import ExpertKind, Experts
from moeq.pipeline.pack.fast.codecs import Shifted, codecs_of
from moeq.pipeline.pack.fast.formats import StoredProjection, stored_projection
from moeq.pipeline.pack.fast.parts import BLOCK, packed_parts
from moeq.pipeline.pack.fast.path import FastPath, M, ProjectionReader, ShardPath
from moeq.pipeline.pack.fast.scales import WIDTH
from moeq.pipeline.pack.fast.scratch import Region
from moeq.pipeline.pack.fast.shared import shared_scale
from moeq.pipeline.plan.layer_plan import ShardPlan
from moeq.pipeline.plan.units import signature_of
from moeq.schemes.format import Described, PartSig


def build_fast_path(
    experts: Experts, role: StackedRole, layout: Layout, shards: Sequence[ShardPlan], written: MatrixSpec
) -> FastPath | None:
    """Return the fast path of a role, or None if it has none; `find_fast_path` checks for compiled loops first."""
    kinds = experts.kinds()
    sigs = _signatures(experts)
    if len(kinds) != 1 or sigs is None:
        return None
    if codecs_of(layout, written) is None:
        return None
    kind = kinds[0].kind
    readers = projection_readers(kind, role, lambda name, described: stored_projection(sigs[name], described))
    if readers is None:
        return None
    spec, splits = kind.spec(role), kind.spec(role).group_size // written.group_size
    if replace(spec, group_size=written.group_size) != written:
        return None
    # Views are contiguous or transposed only if nothing is cut out: no shard, and no half of a stacked gate_up.
    whole = len(shards) == 1 and shards[0].shard.intermediate.size == kind.spec("w2").k
    dense = whole and all(len(reader.holds) == 1 for reader in readers)
    scale_rows = {reader.stored.scale_rows if len(reader.holds) == 1 else 1 for reader in readers}
    repeats = scale_rows.pop() if len(scale_rows) == 1 else 1
    ranks = [_shard_path(layout, written, plan, dense=dense, repeats=repeats) for plan in shards]
    found = [rank for rank in ranks if rank is not None]
    if len(found) < len(ranks) or len({plan.shard.experts for plan in shards}) != 1:
        return None
    parts = [part for rank in found for part in rank.parts]
    elements = Region(readers[-1].region.stop, max(part.element_bytes for part in parts))
    expected = Region(elements.stop, max(BLOCK, *(part.spare_bytes for part in parts)))
    repeated = tuple(_repeated(expected.stop, readers, written) if splits > 1 else ())
    last = repeated[-1][-1].stop if repeated else expected.stop
    exact, may_round = layout.exact_scales, layout.allow_lossy and splits == 1
    return FastPath(written, readers, tuple(found), exact, elements, expected, last, splits, repeated, may_round)


def _repeated(
    start: int, readers: Sequence[ProjectionReader[StoredProjection]], written: MatrixSpec
) -> Iterator[tuple[Region, Region]]:
    """Yield scratch for scales and zero points in smaller groups than the source's, for each logical projection."""
    for _, held in (row for reader in readers for row in reader.holds):
        groups = held.n * written.num_groups
        scales = Region(start, groups * np.dtype(WIDTH[written.scale_dtype]).itemsize)
        zeros = Region(scales.stop, 0 if written.symmetric else groups)
        start = zeros.stop
        yield scales, zeros


def _signatures(experts: Experts) -> dict[StoredName, dict[str, PartSig]] | None:
    """Return dtype and shape of every part of one expert; None unless they are equal for all experts."""
    if experts.flat:
        return None
    found: dict[StoredName, dict[str, PartSig]] = {}
    for (projection, part), entries in experts.layer.parts.items():
        alike = {entry[1:3] for entry in entries.values()}
        if len(alike) != 1 or (FUSED not in entries and len(entries) != experts.num_experts):
            return None
        found.setdefault(projection, {})[part] = signature_of(
            next(iter(entries.values())), part, fused=experts.layer.fused
        )
    return found


def projection_readers(
    kind: ExpertKind, role: StackedRole, stored_as: Callable[[StoredName, Described], M | None]
) -> tuple[ProjectionReader[M], ...] | None:
    """Return readers of the stored projections of a role, in the order of the packed rows.

    `stored_as` returns how a stored projection is read; if it returns None, the reference path reads all of them.
    """
    names: tuple[StoredName, ...] = ("down",) if role == "w2" else ("gate", "up", "gate_up")
    readers: list[ProjectionReader[M]] = []
    start = 0
    for name in (name for name in names if name in kind.projections):
        stored = stored_as(name, kind.projections[name])
        if stored is None or (name == "gate_up" and kind.interleaved is None):
            return None
        held: tuple[Projection, ...] = ("gate", "up") if name == "gate_up" else (name,)
        specs = tuple((projection, projection_spec(kind.spec(role), projection)) for projection in held)
        region = Region(start, stored.scratch_bytes)
        readers.append(ProjectionReader(name, stored, specs, bool(kind.interleaved), region))
        start = region.stop
    return tuple(readers) or None


def _shard_path(layout: Layout, spec: MatrixSpec, plan: ShardPlan, *, dense: bool, repeats: int) -> ShardPath | None:
    """Return the parts of one rank, or None if one of them needs the reference path.

    `dense`: views of the parts are contiguous or transposes. `repeats`: count of rows of the matrix that share a scale.
    """
    padding, features = plan.padding, plan.shard.intermediate
    shard, padded = (padding.original_w2, padding.w2) if spec.role == "w2" else (padding.original_w13, padding.w13)
    per_word = 32 // spec.bits
    cuts_words = spec.role == "w2" and bool(features.start % per_word or features.stop % per_word)
    if padding.rule.midpoint or cuts_words:
        return None
    parts = tuple(replace(part, dense=dense) for part in packed_parts(layout, shard, padded))
    if spec.role == "w2" or features.start % repeats == 0:
        parts = tuple(
            replace(part, widen=replace(part.widen, repeats=repeats)) if isinstance(part.widen, Shifted) else part
            for part in parts
        )
    if {part.field for part in parts} != _fields(spec):
        return None
    return ShardPath(
        parts, features, holds_all=shard == spec, is_first=plan.shard.rank == 0, shared=shared_scale(layout)
    )


def _fields(spec: MatrixSpec) -> set[str]:
    optional = {"zeros": not spec.symmetric, "bias": spec.bias_dtype is not None}
    return {"codes", "scales", *(field for field, there in optional.items() if there)}
