"""What a conversion will write, known from headers alone: files, tensors, shapes, sizes.

The plan is deterministic: the same source, layout, deployment and version give the same plan and so the same bytes.
Its digest names the job and is how an interrupted conversion recognises its own work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from moeq.checkpoint.manifest import (
    STACKED_ROLES,
    CopiedLayer,
    LayerEntry,
    MatrixEntry,
    RankEntry,
    Sharding,
    StackedRole,
)
from moeq.checkpoint.writer import tensor_bytes
from moeq.errors import MoeqError
from moeq.layouts.base import Layout, TensorSpec
from moeq.layouts.padding import PaddingPlan, plan_padding
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint
from moeq.model.shards import Range, shard_spec
from moeq.pipeline.sharding import UNEVEN_FORMATS, Division, Shard, Specs, divide
from moeq.pipeline.targets import Targets

#: Tensors that are only copied are gathered into files of about this size.
REST_FILE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class ShardPlan:
    """What is packed for one rank, or for all of them at once.

    Attributes:
        shard: experts and intermediate features.
        padding: how sizes are rounded up.
        matrices: what the manifest will say.
        parts: per stacked matrix, shape and dtype of each part of *one* expert.
    """

    shard: Shard
    padding: PaddingPlan
    matrices: Mapping[StackedRole, MatrixEntry]
    parts: Mapping[StackedRole, Mapping[str, TensorSpec]]

    def tensors(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Its stacked tensors, by name."""
        return {
            self.matrices[role].tensors[part]: ((self.shard.experts.size, *spec.shape), spec.dtype)
            for role in STACKED_ROLES
            for part, spec in self.parts[role].items()
        }


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one layer as they will be written.

    Attributes:
        entry: what the manifest will say (digests still empty).
        shards: one plan per rank, or a single one that holds everything.
        allow_lossy: lossy packing was asked for.
    """

    entry: LayerEntry
    shards: tuple[ShardPlan, ...]
    allow_lossy: bool = False

    @property
    def layout(self) -> Layout:
        """The layout that packs this layer."""
        return get_layout(self.entry.layout, allow_lossy=self.allow_lossy)

    @property
    def padding_bytes(self) -> int:
        """Bytes that are padding."""
        return sum(plan.padding.extra_bytes * plan.shard.experts.size for plan in self.shards)


@dataclass(frozen=True)
class FilePlan:
    """One output file: either the experts of a layer, or tensors copied from the source.

    Attributes:
        name: file name.
        tensors: name to `(shape, dtype)`, in file order.
        layer: the layer whose experts it holds, or None for copied tensors.
    """

    name: str
    tensors: Mapping[str, tuple[tuple[int, ...], str]]
    layer: LayerPlan | None

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor_bytes(shape, dtype) for shape, dtype in self.tensors.values())


@dataclass(frozen=True)
class Plan:
    """A whole conversion.

    Attributes:
        files: output files in order.
        copied: layers whose experts are copied unchanged.
        expert_bytes_in: bytes of the expert tensors that are converted.
        padding_bytes: bytes of the output that are padding.
        digest: sha256 over everything that decides the output bytes.
    """

    files: tuple[FilePlan, ...]
    copied: tuple[CopiedLayer, ...]
    expert_bytes_in: int
    padding_bytes: int
    digest: str

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Layers with experts, in order."""
        return tuple(file.layer for file in self.files if file.layer is not None)

    @property
    def expert_bytes_out(self) -> int:
        """Bytes of packed experts."""
        return sum(file.data_bytes for file in self.files if file.layer is not None)

    @property
    def rest_bytes(self) -> int:
        """Bytes copied unchanged."""
        return sum(file.data_bytes for file in self.files if file.layer is None)

    @property
    def bytes_out(self) -> int:
        """Bytes of tensor data to write."""
        return self.expert_bytes_out + self.rest_bytes


@dataclass(frozen=True)
class PlanOptions:
    """What beside the source decides a plan.

    Attributes:
        tp: ranks that share an expert (1 under expert parallelism, which takes them all).
        ep: ranks that share the experts.
        skip_unfit: copy layers that cannot be converted instead of refusing.
        allow_lossy: allow packing that changes stored numbers.
    """

    tp: int = 1
    ep: int = 1
    skip_unfit: bool = False
    allow_lossy: bool = False


def make_plan(checkpoint: Checkpoint, targets: Targets, options: PlanOptions | None = None) -> Plan:
    """Plan the conversion of a source checkpoint.

    Raises:
        MoeqError: `usage.layout-does-not-fit`, `usage.mixed-experts`, `usage.tp`, `usage.ep`, `usage.group-cut` where a
            layer cannot be packed, with all reasons; with `skip_unfit` only where no layer can.
    """
    options = options or PlanOptions()
    layers, refused = [], dict(targets.refused or {})
    for layer, layout_id in targets.layouts.items():
        try:
            layers.append(plan_layer(checkpoint, layer, layout_id, options))
        except MoeqError as error:
            refused[layer] = error
    if refused and not (options.skip_unfit and layers):
        raise _refusal(refused, options, someone_fits=bool(layers))
    copied = [*targets.copied, *(CopiedLayer(layer, error.message) for layer, error in refused.items())]
    consumed = [entry for plan in layers for entry in checkpoint.experts(plan.entry.layer).layer.tensors()]
    rest = list(_rest_files(checkpoint, frozenset(entry.name for entry in consumed)))
    names = _file_names(len(rest) + len(layers))
    files = [FilePlan(name, tensors, None) for name, tensors in zip(names, rest, strict=False)]
    for name, plan in zip(names[len(rest) :], layers, strict=True):
        tensors = {key: value for shard in plan.shards for key, value in shard.tensors().items()}
        files.append(FilePlan(name, tensors, plan))
    return Plan(
        files=tuple(files),
        copied=tuple(sorted(copied, key=lambda row: row.layer)),
        expert_bytes_in=sum(entry.nbytes for entry in consumed),
        padding_bytes=sum(plan.padding_bytes for plan in layers),
        digest=_digest(checkpoint, files, options),
    )


def _refusal(refused: Mapping[int, MoeqError], options: PlanOptions, *, someone_fits: bool) -> MoeqError:
    """The first layer's error; where other layers fit, with how to go on without it."""
    error = next(iter(refused.values()))
    more = f" (and {len(refused) - 1} more layers)" if len(refused) > 1 and someone_fits else ""
    skip = "--skip-unfit copies it unchanged" if someone_fits and not options.skip_unfit else None
    hint = (
        "; ".join(part for part in (error.hint, skip) if part and "--skip-unfit" not in (error.hint or ""))
        or error.hint
    )
    return MoeqError(error.code, error.message + more, hint)


def plan_layer(checkpoint: Checkpoint, layer: int, layout_id: str, options: PlanOptions) -> LayerPlan:
    """Plan one layer. Raises MoeqError as `make_plan` does."""
    layout = get_layout(layout_id, allow_lossy=options.allow_lossy)
    specs = {role: _uniform_spec(checkpoint, layer, role) for role in STACKED_ROLES}
    count = checkpoint.num_experts(layer)
    unit = UNEVEN_FORMATS.get(checkpoint.scheme_of(layer).format)
    division = divide(f"layer {layer}", specs, layout, count, options.tp, options.ep, unit)
    prefix = checkpoint.expert_prefix(layer)
    sharding = Sharding(division.axis, division.written, division.why)
    if division.written == "unsharded":
        everything = Shard(0, Range(0, count), Range(0, specs["w2"].k))
        plan = _plan_shard(layer, prefix, layout, specs, everything)
        entry = LayerEntry(layer, prefix, count, layout.id, plan.matrices, sharding=sharding)
        return LayerPlan(entry, (plan,), options.allow_lossy)
    shards = _plan_ranks(layer, prefix, layout, specs, division)
    ranks = tuple(
        RankEntry(
            rank=plan.shard.rank,
            experts=(plan.shard.experts.start, plan.shard.experts.stop),
            intermediate=(plan.shard.intermediate.start, plan.shard.intermediate.stop),
            matrices=plan.matrices,
        )
        for plan in shards
    )
    wholes = {role: MatrixEntry(spec, spec.n, spec.k, {}) for role, spec in specs.items()}
    entry = LayerEntry(layer, prefix, count, layout.id, wholes, sharding=sharding, ranks=ranks)
    return LayerPlan(entry, shards, options.allow_lossy)


def _plan_ranks(layer: int, prefix: str, layout: Layout, specs: Specs, division: Division) -> tuple[ShardPlan, ...]:
    """One plan per rank, all padded to the size of the fullest."""
    fullest = max(division.shards, key=lambda shard: shard.intermediate.size)
    sizes = _plan_shard(layer, prefix, layout, specs, fullest, f".rank{fullest.rank}").padding
    plans = []
    for shard in division.shards:
        plan = _plan_shard(layer, prefix, layout, specs, shard, f".rank{shard.rank}", sizes)
        plans.append(plan)
    return tuple(plans)


def _plan_shard(
    layer: int,
    prefix: str,
    layout: Layout,
    specs: Specs,
    shard: Shard,
    suffix: str = "",
    sizes: PaddingPlan | None = None,
) -> ShardPlan:
    """Pack one shard: padded sizes, the checks on them, and names. `sizes`: pad to those of another shard."""
    own = {role: shard_spec(specs[role], shard.intermediate) for role in STACKED_ROLES}
    padding = plan_padding(layout, own["w13"], own["w2"])
    if sizes is not None:
        w13 = own["w13"].with_sizes(n=sizes.w13.n, k=sizes.w13.k)
        padding = replace(padding, w13=w13, w2=own["w2"].with_sizes(n=sizes.w2.n, k=sizes.w2.k))
    group = _padded_group(specs["w2"], own["w2"], padding.w2)
    if group is not None:
        padding = replace(padding, w2=replace(padding.w2, group_size=group))
    padded = {"w13": padding.w13, "w2": padding.w2}
    problems = [(role, problem) for role in STACKED_ROLES for problem in layout.problems(padded[role])]
    if problems:
        reasons = "; ".join(f"{role}: {problem.message}" for role, problem in problems)
        remedies = [problem.remedy for _, problem in problems if problem.remedy]
        raise MoeqError(
            "usage.layout-does-not-fit",
            f"layer {layer} does not fit layout {layout.id}: {reasons}",
            "; ".join(dict.fromkeys(remedies)) or "moeq oracle SRC lists the backends that fit",
        )
    parts = {role: layout.tensors(padded[role]) for role in STACKED_ROLES}
    matrices = {
        role: MatrixEntry(
            spec=own[role],
            padded_n=padded[role].n,
            padded_k=padded[role].k,
            tensors={part: f"{prefix}.{role}_{part}{suffix}" for part in parts[role]},
            padded_group=group if role == "w2" else None,
        )
        for role in STACKED_ROLES
    }
    return ShardPlan(shard, padding, matrices, parts)


def _padded_group(whole: MatrixSpec, shard: MatrixSpec, padded: MatrixSpec) -> int | None:
    """Group size of a shard of one group that is padded to several; None where padding leaves the groups as they are.

    A single group is otherwise one scale per channel, whatever the size. That is not so where the format has groups
    of a fixed size, nor where the whole matrix has several: engines then pad with groups of zeros.
    """
    grouped = whole.num_groups > 1 or whole.element == "e2m1"
    if not grouped or shard.act_order or shard.num_groups > 1 or padded.k == shard.k or padded.k % shard.k:
        return None
    return shard.k


def _uniform_spec(checkpoint: Checkpoint, layer: int, role: StackedRole) -> MatrixSpec:
    """The spec that all experts of a layer share; a stack cannot hold two."""
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
    """One phrase about a matrix, for messages."""
    if spec.bits > 8:
        return f"not quantised [{spec.n}, {spec.k}] {spec.element}"
    symmetry = "symmetric" if spec.symmetric else "with zero points"
    order = ", act-order" if spec.act_order else ""
    return f"{spec.element} g{spec.group_size} {symmetry}{order} [{spec.n}, {spec.k}] {spec.scale_dtype}"


def _rest_files(checkpoint: Checkpoint, consumed: frozenset[str]) -> Iterable[dict[str, tuple[tuple[int, ...], str]]]:
    """Group the tensors that are copied into files of bounded size, in source order."""
    group: dict[str, tuple[tuple[int, ...], str]] = {}
    size = 0
    for name, entry in checkpoint.source.tensors.items():
        if name in consumed:
            continue
        if group and size + entry.nbytes > REST_FILE_BYTES:
            yield group
            group, size = {}, 0
        group[name] = (entry.shape, entry.dtype)
        size += entry.nbytes
    if group:
        yield group


def _file_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _digest(checkpoint: Checkpoint, files: Iterable[FilePlan], options: PlanOptions) -> str:
    """Names the job: source identity, options, layouts, and every output tensor."""
    job = {
        "source": checkpoint.source.identity(),
        "options": asdict(options),
        "files": [[file.name, {name: [list(s), d] for name, (s, d) in file.tensors.items()}] for file in files],
        "layers": [asdict(file.layer.entry) for file in files if file.layer is not None],
    }
    return hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()
