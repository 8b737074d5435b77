"""What a conversion will write, known from headers alone: files, tensors, shapes, sizes.

The plan is deterministic: the same source, layout and version give the same plan and so the same bytes. Its digest
names the job and is how an interrupted conversion recognises its own work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, MatrixEntry, StackedRole
from moeq.checkpoint.writer import tensor_bytes
from moeq.errors import MoeqError
from moeq.layouts.base import Layout, TensorSpec
from moeq.layouts.padding import PaddingPlan, plan_padding
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint

#: Tensors that are only copied are gathered into files of about this size.
REST_FILE_BYTES = 4 * 2**30


@dataclass(frozen=True)
class LayerPlan:
    """The experts of one layer as they will be written.

    Attributes:
        entry: what the manifest will say (digests still empty).
        padding: how sizes are rounded up.
        parts: per stacked matrix, shape and dtype of each part of *one* expert.
    """

    entry: LayerEntry
    padding: PaddingPlan
    parts: Mapping[StackedRole, Mapping[str, TensorSpec]]

    @property
    def layout(self) -> Layout:
        """The layout that packs this layer."""
        return get_layout(self.entry.layout)


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
        expert_bytes_in: bytes of expert tensors in the source.
        padding_bytes: bytes of the output that are padding.
        digest: sha256 over everything that decides the output bytes.
    """

    files: tuple[FilePlan, ...]
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


def make_plan(checkpoint: Checkpoint, layout_id: str) -> Plan:
    """Plan the conversion of a source checkpoint to one layout.

    Raises:
        MoeqError: `usage.layout-does-not-fit` where a layer cannot be packed, with all reasons.
    """
    layout = get_layout(layout_id)
    layers = [_plan_layer(checkpoint, layer, layout) for layer in checkpoint.info.moe_layers]
    rest = list(_rest_files(checkpoint))
    names = _file_names(len(rest) + len(layers))
    files = [FilePlan(name, tensors, None) for name, tensors in zip(names, rest, strict=False)]
    for name, layer in zip(names[len(rest) :], layers, strict=True):
        files.append(FilePlan(name, _layer_tensors(layer), layer))
    source = checkpoint.source
    return Plan(
        files=tuple(files),
        expert_bytes_in=sum(source.tensors[name].nbytes for name in source.expert_names),
        padding_bytes=sum(layer.padding.extra_bytes * layer.entry.num_experts for layer in layers),
        digest=_digest(checkpoint, layout_id, files),
    )


def _plan_layer(checkpoint: Checkpoint, layer: int, layout: Layout) -> LayerPlan:
    specs = {role: _uniform_spec(checkpoint, layer, role) for role in STACKED_ROLES}
    padding = plan_padding(layout, specs["w13"], specs["w2"])
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
    prefix = checkpoint.expert_prefix(layer)
    parts = {role: layout.tensors(padded[role]) for role in STACKED_ROLES}
    matrices = {
        role: MatrixEntry(
            spec=specs[role],
            padded_n=padded[role].n,
            padded_k=padded[role].k,
            tensors={part: f"{prefix}.{role}_{part}" for part in parts[role]},
        )
        for role in STACKED_ROLES
    }
    entry = LayerEntry(layer, prefix, checkpoint.info.num_experts, layout.id, matrices)
    return LayerPlan(entry, padding, parts)


def _uniform_spec(checkpoint: Checkpoint, layer: int, role: StackedRole) -> MatrixSpec:
    """The spec that all experts of a layer share; a stack cannot hold two."""
    first = checkpoint.spec(layer, role, 0)
    for expert in range(1, checkpoint.info.num_experts):
        spec = checkpoint.spec(layer, role, expert)
        if spec != first:
            raise MoeqError(
                "usage.mixed-experts",
                f"layer {layer} cannot be stacked: {role} of expert 0 is {describe(first)}, of expert {expert} "
                f"{describe(spec)}",
                "re-quantise the layer with one scheme for all its experts",
            )
    return first


def describe(spec: MatrixSpec) -> str:
    """One phrase about a matrix, for messages."""
    symmetry = "symmetric" if spec.symmetric else "with zero points"
    order = ", act-order" if spec.act_order else ""
    return f"{spec.element} g{spec.group_size} {symmetry}{order} [{spec.n}, {spec.k}] {spec.scale_dtype}"


def _rest_files(checkpoint: Checkpoint) -> Iterable[dict[str, tuple[tuple[int, ...], str]]]:
    """Group the tensors that are copied into files of bounded size, in source order."""
    group: dict[str, tuple[tuple[int, ...], str]] = {}
    size = 0
    source = checkpoint.source
    for name, entry in source.tensors.items():
        if name in source.expert_names:
            continue
        if group and size + entry.nbytes > REST_FILE_BYTES:
            yield group
            group, size = {}, 0
        group[name] = (entry.shape, entry.dtype)
        size += entry.nbytes
    if group:
        yield group


def _layer_tensors(layer: LayerPlan) -> dict[str, tuple[tuple[int, ...], str]]:
    experts = layer.entry.num_experts
    return {
        layer.entry.matrices[role].tensors[part]: ((experts, *spec.shape), spec.dtype)
        for role in STACKED_ROLES
        for part, spec in layer.parts[role].items()
    }


def _file_names(count: int) -> list[str]:
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _digest(checkpoint: Checkpoint, layout_id: str, files: Iterable[FilePlan]) -> str:
    """Names the job: source identity, layout, and every output tensor."""
    job = {
        "source": checkpoint.source.identity(),
        "layout": layout_id,
        "files": [[file.name, {name: [list(s), d] for name, (s, d) in file.tensors.items()}] for file in files],
        "layers": [asdict(file.layer.entry) for file in files if file.layer is not None],
    }
    return hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()
