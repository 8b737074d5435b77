"""Plan of how one layer's experts will be written, made from headers alone: shards, padding, tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, MatrixEntry, RankEntry, Sharding, StackedRole
from moeq.checkpoint.writer import tensor_bytes
from moeq.errors import MoeqError
from moeq.layouts.base import TensorSpec
from moeq.layouts.layout import Layout
from moeq.layouts.padding import PaddingPlan, logical_bytes, plan_padding
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model import Checkpoint
from moeq.model.division import UNEVEN_FORMATS, Division, Shard, Specs, divide
from moeq.model.regroup import regroup, regrouped_spec
from moeq.model.shards import Range, shard_matrix, shard_spec
from moeq.pipeline.plan.options import DEFAULTS, ONE_RANK, ConvertOptions, Ranks
from moeq.spelling import option


@dataclass(frozen=True)
class ShardPlan:
    """Packing plan of one rank, or of all ranks at once."""

    shard: Shard  #: experts and intermediate features
    padding: PaddingPlan  #: sizes before and after rounding up
    matrices: Mapping[StackedRole, MatrixEntry]  #: entries of the manifest
    #: Per stacked matrix, shape and dtype of each part of *one* expert.
    parts: Mapping[StackedRole, Mapping[str, TensorSpec]]

    def cut_and_pad(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Cut the rank's part out of one expert's matrix and pad it to the sizes of its layout."""
        return self.padding.pad(shard_matrix(matrix, self.shard.intermediate, first=self.shard.rank == 0))

    def padding_bytes(self, role: StackedRole) -> int:
        padding = self.padding
        before, after = (padding.original_w2, padding.w2) if role == "w2" else (padding.original_w13, padding.w13)
        return logical_bytes(after) - logical_bytes(before)

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return the stacked tensors by name, the largest first, so that these begin at whole blocks of the file."""
        found = {
            self.matrices[role].tensors[part]: ((self.shard.experts.size, *spec.shape), spec.dtype)
            for role in STACKED_ROLES
            for part, spec in self.parts[role].items()
        }
        return dict(sorted(found.items(), key=lambda row: -tensor_bytes(*row[1])))


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one layer as they will be written."""

    entry: LayerEntry  #: entry of the manifest, still without digests
    shards: tuple[ShardPlan, ...]  #: one plan per rank, or a single plan that holds everything
    allow_lossy: bool = False  #: whether packing may change values

    @property
    def layout(self) -> Layout:
        return get_layout(self.entry.layout, allow_lossy=self.allow_lossy)

    def regrouped(self, matrix: QuantizedMatrix, role: StackedRole) -> QuantizedMatrix:
        """Return one expert's matrix with the group size that is written."""
        if self.entry.source_group is None:
            return matrix
        return regroup(matrix, self.entry.matrices[role].spec.group_size)


def plan_layer(
    checkpoint: Checkpoint, layer: int, layout_id: str, ranks: Ranks = ONE_RANK, options: ConvertOptions = DEFAULTS
) -> LayerPlan:
    """Plan one layer. Raises MoeqError as `make_plan` does."""
    entry, layout, division = _read(checkpoint, layer, layout_id, ranks, options)
    entry = replace(entry, sharding=Sharding(division.axis, division.written, division.why))
    if division.written == "unsharded":
        everything = Shard(0, Range(0, entry.num_experts), Range(0, entry.matrices["w2"].spec.k))
        plan = _plan_shard(entry, layout, everything)
        return LayerPlan(replace(entry, matrices=plan.matrices), (plan,), options.allow_lossy)
    shards = _plan_ranks(entry, layout, division)
    rank_entries = tuple(
        RankEntry(
            rank=plan.shard.rank,
            experts=(plan.shard.experts.start, plan.shard.experts.stop),
            intermediate=(plan.shard.intermediate.start, plan.shard.intermediate.stop),
            matrices=plan.matrices,
        )
        for plan in shards
    )
    return LayerPlan(replace(entry, ranks=rank_entries), shards, options.allow_lossy)


def plan_layer_on_rank(checkpoint: Checkpoint, layer: int, layout_id: str, ranks: Ranks, number: int) -> LayerPlan:
    """Plan the packing of one rank alone: the bytes that it would read of the layer that `plan_layer` plans.

    `number` is that of the rank, within tensor or expert parallelism. Raises MoeqError as `make_plan`.
    """
    entry, layout, division = _read(checkpoint, layer, layout_id, ranks, DEFAULTS)
    if division.written == "ranks":
        return LayerPlan(entry, (_plan_ranks(entry, layout, division)[number],))
    return LayerPlan(entry, (_plan_shard(entry, layout, division.shards[number]),))


def _read(
    checkpoint: Checkpoint, layer: int, layout_id: str, ranks: Ranks, options: ConvertOptions
) -> tuple[LayerEntry, Layout, Division]:
    """Return the entry of a layer with its whole matrices, the layout, and how the ranks divide it."""
    layout = get_layout(layout_id, allow_lossy=options.allow_lossy)
    specs, group = _written_specs(checkpoint, layer, options)
    count, unit = checkpoint.num_experts(layer), UNEVEN_FORMATS.get(checkpoint.scheme_of(layer).format)
    division = divide(f"layer {layer}", specs, layout, count, ranks.tp, ranks.ep, unit)
    matrices = {role: MatrixEntry(spec, spec.n, spec.k, {}) for role, spec in specs.items()}
    entry = LayerEntry(layer, checkpoint.expert_prefix(layer), count, layout.id, matrices, source_group=group)
    return entry, layout, division


def _written_specs(checkpoint: Checkpoint, layer: int, options: ConvertOptions) -> tuple[Specs, int | None]:
    """Return the matrices in the groups that are written, and the source's group size if that differs."""
    specs: Specs = {role: _uniform_spec(checkpoint, layer, role) for role in STACKED_ROLES}
    if options.regroup is None or options.regroup == specs["w2"].group_size:
        return specs, None
    sizes = {role: spec.group_size for role, spec in specs.items()}
    if sizes["w13"] != sizes["w2"]:
        raise MoeqError(
            "usage.regroup",
            f"layer {layer} cannot be regrouped: w13 has groups of {sizes['w13']}, w2 of {sizes['w2']}",
            f"leave out {option('regroup')}",
        )
    return {role: regrouped_spec(spec, options.regroup) for role, spec in specs.items()}, sizes["w2"]


def _plan_ranks(entry: LayerEntry, layout: Layout, division: Division) -> tuple[ShardPlan, ...]:
    """Plan every rank, with all ranks padded to the sizes of the fullest rank."""
    fullest = max(division.shards, key=lambda shard: shard.intermediate.size)
    sizes = _plan_shard(entry, layout, fullest, f".rank{fullest.rank}").padding
    return tuple(_plan_shard(entry, layout, shard, f".rank{shard.rank}", sizes) for shard in division.shards)


def _plan_shard(
    entry: LayerEntry, layout: Layout, shard: Shard, suffix: str = "", sizes: PaddingPlan | None = None
) -> ShardPlan:
    """Plan one shard: padded sizes, checks on them, and names. `sizes`: pad to the sizes of another shard."""
    whole = {role: entry.matrices[role].spec for role in STACKED_ROLES}
    own = {role: shard_spec(whole[role], shard.intermediate) for role in STACKED_ROLES}
    padding = plan_padding(layout, own["w13"], own["w2"])
    if sizes is not None:
        w13 = own["w13"].with_sizes(n=sizes.w13.n, k=sizes.w13.k)
        padding = replace(padding, w13=w13, w2=own["w2"].with_sizes(n=sizes.w2.n, k=sizes.w2.k))
    group = _padded_group(whole["w2"], own["w2"], padding.w2)
    if group is not None:
        padding = replace(padding, w2=replace(padding.w2, group_size=group))
    padded = {"w13": padding.w13, "w2": padding.w2}
    problems = [(role, problem) for role in STACKED_ROLES for problem in layout.problems(padded[role])]
    if problems:
        reasons = "; ".join(f"{role}: {problem.message}" for role, problem in problems)
        remedies = [problem.remedy for _, problem in problems if problem.remedy]
        raise MoeqError(
            "usage.layout-does-not-fit",
            f"layer {entry.layer} does not fit layout {layout.id}: {reasons}",
            "; ".join(dict.fromkeys(remedies)) or "moeq oracle SRC lists the backends that fit",
        )
    parts = {role: layout.tensors(padded[role]) for role in STACKED_ROLES}
    matrices = {
        role: MatrixEntry(
            spec=own[role],
            padded_n=padded[role].n,
            padded_k=padded[role].k,
            tensors={part: f"{entry.prefix}.{role}_{part}{suffix}" for part in parts[role]},
            padded_group=group if role == "w2" else None,
        )
        for role in STACKED_ROLES
    }
    return ShardPlan(shard, padding, matrices, parts)


def _padded_group(whole: MatrixSpec, shard: MatrixSpec, padded: MatrixSpec) -> int | None:
    """Return the group size of a shard of one group that is padded to several groups; None in all other cases.

    A single group usually means one scale per channel, whatever the size. If the format has groups of a fixed size, or
    the whole matrix has several groups, engines pad with groups of zeros.
    """
    grouped = whole.num_groups > 1 or whole.element == "e2m1"
    if not grouped or shard.act_order or shard.num_groups > 1 or padded.k == shard.k or padded.k % shard.k:
        return None
    return shard.k


def _uniform_spec(checkpoint: Checkpoint, layer: int, role: StackedRole) -> MatrixSpec:
    """Return the spec that all experts of a layer share, since a stack holds only one.

    Raises MoeqError `usage.mixed-experts`.
    """
    groups = checkpoint.experts(layer).kinds()
    first = groups[0].kind.spec(role)
    for group in groups[1:]:
        spec = group.kind.spec(role)
        if spec != first:
            raise MoeqError(
                "usage.mixed-experts",
                f"layer {layer} cannot be stacked: {role} of expert {groups[0].experts[0]} is {describe(first)}, of "
                f"expert {group.experts[0]} {describe(spec)} ({len(group.experts)} of "
                f"{checkpoint.num_experts(layer)} experts)",
                "re-quantise the layer with one scheme for all its experts",
            )
    return first


def describe(spec: MatrixSpec) -> str:
    """Describe a matrix in one phrase, for messages."""
    if spec.bits > 8:
        return f"not quantised [{spec.n}, {spec.k}] {spec.element}"
    symmetry = "symmetric" if spec.symmetric else "with zero points"
    order = ", act-order" if spec.act_order else ""
    return f"{spec.element} g{spec.group_size} {symmetry}{order} [{spec.n}, {spec.k}] {spec.scale_dtype}"
