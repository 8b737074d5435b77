"""An output of `moeq convert`, read by its manifest and the inverse of its layouts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from moeq.checkpoint.facts import MAX_COUNT, Facts
from moeq.checkpoint.families import find_family
from moeq.checkpoint.manifest import LayerEntry, Manifest, MatrixEntry, RankEntry, StackedRole
from moeq.checkpoint.names import index_experts
from moeq.checkpoint.source import Source
from moeq.checkpoint.writer import tensor_bytes
from moeq.errors import MoeqError
from moeq.layouts.base import TensorSpec
from moeq.layouts.layout import Layout
from moeq.layouts.padding import PaddingPlan
from moeq.layouts.registry import get_layout
from moeq.matrix import ELEMENT_BITS, MatrixSpec, QuantizedMatrix, Role, projection_spec, split_projections
from moeq.model.checkpoint import Checkpoint, check_role
from moeq.model.declaration import find_declaration
from moeq.model.describe import model_type, split_stacks
from moeq.model.expert_kinds import Experts
from moeq.model.info import CheckpointInfo
from moeq.model.regroup import ungroup
from moeq.model.shards import Range, join_shards, shard_spec
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration
from moeq.typed import brief, read_as

if TYPE_CHECKING:
    from moeq.layouts.padding import PaddingPlan

_STACK: dict[Role, StackedRole] = {"w13": "w13", "gate": "w13", "up": "w13", "w2": "w2", "down": "w2"}


class ConvertedCheckpoint(Checkpoint):
    """Converted checkpoint, which answers the same questions as its source from the packed tensors.

    Layers that were copied unchanged are read as the source reads them, and `declaration` is the source's.

    Attributes:
        manifest: content of its `moeq.json`.

    Raises:
        MoeqError: `source.bad-manifest` if manifest and tensors contradict each other, naming the tensor.
    """

    kind: Literal["source", "converted"] = "converted"

    def __init__(self, source: Source, manifest: Manifest) -> None:
        self.source = source
        self.manifest = manifest
        self._entries = {entry.layer: entry for entry in manifest.layers}
        for entry in manifest.layers:
            _check_tensors(source, entry)
        names = [name for entry in manifest.layers for name in entry.tensors]
        source.expert_names = frozenset(names)
        expert_bytes = sum(source.tensors[name].nbytes for name in names)
        self.declaration = _source_declaration(source)
        self._experts = _copied_experts(source, manifest, self.declaration)
        self._scale_faults = {entry.layer: () for entry in manifest.layers}  # conversion has reported them
        self._unequal_scales = {}
        self._scales_read = True
        self.info = replace(
            _info(manifest),
            name=source.name,
            revision=source.revision,
            expert_bytes=expert_bytes,
            other_bytes=sum(entry.nbytes for entry in source.tensors.values()) - expert_bytes,
            num_tensors=len(source.tensors),
            num_files=len(source.files),
            warnings=tuple(source.warnings),
        )

    def require_source(self) -> None:
        source = shlex.quote(self.manifest.source.name)
        raise MoeqError(
            "usage.already-converted",
            f"{self.source.name} is itself an output of `moeq convert`",
            f"name its source, {source}; or moeq restore {shlex.quote(self.source.name)} DIR brings that back",
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the declaration, whose functions cannot be sent to another process."""
        return {name: value for name, value in vars(self).items() if name != "declaration"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.declaration = _source_declaration(self.source)

    def is_packed(self, layer: int) -> bool:
        return layer in self._entries

    def expert_prefix(self, layer: int) -> str:
        return self._entries[layer].prefix if layer in self._entries else super().expert_prefix(layer)

    def num_experts(self, layer: int) -> int:
        return self._entries[layer].num_experts if layer in self._entries else super().num_experts(layer)

    def scheme_of(self, layer: int, expert: int = 0, role: Role = "w13") -> Scheme:
        if layer not in self._entries:
            return super().scheme_of(layer, expert, role)
        return next(use.scheme for use in self.info.schemes if layer in use.layers)

    def spec(self, layer: int, role: Role, expert: int = 0) -> MatrixSpec:
        if layer not in self._entries:
            return super().spec(layer, role, expert)
        self._check_expert(layer, expert)
        return projection_spec(self._entries[layer].source_spec(_STACK[role]), role)

    def matrix(self, layer: int, expert: int, role: Role) -> QuantizedMatrix:
        """Return one logical matrix: unpack the expert's bytes, cut off the padding and join the ranks' shards."""
        if layer not in self._entries:
            return super().matrix(layer, expert, role)
        check_role(role)
        self._check_expert(layer, expert)
        entry = self._entries[layer]
        stack = _STACK[role]
        if entry.ranks:
            homes = [(rank.experts[0], rank.matrices) for rank in entry.ranks if _holds(rank, expert)]
        else:
            homes = [(0, entry.matrices)]
        shards = [self._unpack(entry, matrices, stack, expert - first) for first, matrices in homes]
        whole = ungroup(join_shards(entry.matrices[stack].spec, shards), entry.source_group)
        if role in ("w13", "w2"):
            return whole
        return dict(split_projections(whole))[role]  # type: ignore[index]

    def _unpack(
        self, entry: LayerEntry, matrices: Mapping[StackedRole, MatrixEntry], role: StackedRole, row: int
    ) -> QuantizedMatrix:
        """Unpack one row of the stacks of a rank (or of the whole), without padding."""
        stored, layout = matrices[role], get_layout(entry.layout)
        parts = {part: self.source.read_row(self.source.entry(name), row) for part, name in stored.tensors.items()}
        return written_padding(layout, matrices).unpad(layout.unpack(parts, stored.padded_spec))

    def experts(self, layer: int) -> Experts:
        if layer in self._entries:
            raise MoeqError(
                "usage.converted-layer", f"layer {layer} is converted: its source tensors are gone", "see moeq restore"
            )
        if layer not in self._experts:
            self.manifest.layer(layer)  # raises, naming the layers there are
        return super().experts(layer)

    def _check_expert(self, layer: int, expert: int) -> None:
        count = self._entries[layer].num_experts
        if not 0 <= expert < count:
            raise MoeqError("usage.no-such-expert", f"layer {layer} has experts 0 to {count - 1}, not {expert}")


def written_padding(layout: Layout, matrices: Mapping[StackedRole, MatrixEntry]) -> PaddingPlan:
    """Return the padding with which a layer's matrices were written."""
    w13, w2 = matrices["w13"], matrices["w2"]
    return PaddingPlan(layout.padding, w13.padded_spec, w2.padded_spec, w13.spec, w2.spec)


def _holds(rank: RankEntry, expert: int) -> bool:
    return rank.experts[0] <= expert < rank.experts[1]


def _source_declaration(source: Source) -> Declaration | None:
    """Read the quantisation config of the source, which `config.json` keeps as `original`, or a side file."""
    ours = source.config.get("quantization_config")
    original = ours.get("original") if isinstance(ours, Mapping) else None
    declaration, _ = find_declaration({**source.config, "quantization_config": original or {}}, source.side_configs)
    return declaration


def _copied_experts(source: Source, manifest: Manifest, declaration: Declaration | None) -> dict[int, Experts]:
    """Describe the experts of layers that were copied, under the quantisation config of the source."""
    if not manifest.copied:
        return {}
    family = find_family(model_type(Facts(source.config)))
    rest = {name: entry for name, entry in source.tensors.items() if name not in source.expert_names}
    copied = {row.layer for row in manifest.copied}
    return {
        layer.layer: Experts(
            layer,
            declaration,
            family is not None and family.interleaved,
            transposed=family is not None and family.transposed,
        )
        for layer in split_stacks(index_experts(rest), None).main.values()
        if layer.layer in copied
    }


def _check_tensors(source: Source, entry: LayerEntry) -> None:
    """Check that every stacked tensor exists, in the shape that its layout gives for the manifest's sizes."""
    homes = [(rank.experts[1] - rank.experts[0], rank.matrices) for rank in entry.ranks]
    for count, matrices in homes or [(entry.num_experts, entry.matrices)]:
        for role, matrix in matrices.items():
            wanted = _wanted_tensors(entry, matrix)
            if set(wanted) != set(matrix.tensors):
                found = f"has parts {sorted(matrix.tensors)}, {entry.layout} needs {sorted(wanted)}"
                raise _damaged(entry, role, found)
            for part, spec in wanted.items():
                _check_tensor(source, entry, matrix, part, ((count, *spec.shape), spec.dtype))
    if entry.ranks:
        _check_ranks(entry)


def _wanted_tensors(entry: LayerEntry, matrix: MatrixEntry) -> Mapping[str, TensorSpec]:
    try:
        return get_layout(entry.layout).tensors(matrix.padded_spec)
    except MoeqError as error:
        raise _damaged(entry, entry.layout, f"cannot be what was written: {error.message}") from None
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _damaged(entry, "sizes", f"are impossible: {type(error).__name__}: {error}") from None


def _check_ranks(entry: LayerEntry) -> None:
    """Check that each rank's matrices have the sizes of its shard, and that the ranks of an expert hold all of it."""
    size = entry.matrices["w2"].spec.k
    for rank in entry.ranks:
        for role, matrix in rank.matrices.items():
            if shard_spec(entry.matrices[role].spec, Range(*rank.intermediate)) != matrix.spec:
                raise _damaged(entry, f"rank {rank.rank}", f"describes {role} as something else than its shard")
        if not 0 <= rank.experts[0] < rank.experts[1] <= entry.num_experts:
            raise _damaged(entry, f"rank {rank.rank}", f"holds experts {rank.experts} of {entry.num_experts:,}")
    # One expert of each interval is enough: the holding ranks change only where some rank's experts begin or end.
    for expert in sorted({0, *(at for rank in entry.ranks for at in rank.experts)} - {entry.num_experts}):
        position = 0
        for rank in entry.ranks:
            if _holds(rank, expert):
                start, stop = rank.intermediate
                if start != position or stop <= start:
                    raise _damaged(entry, f"rank {rank.rank}", f"holds {start} .. {stop} after {position} of {size}")
                position = stop
        if position != size:
            raise _damaged(entry, f"expert {expert}", f"has {position} of {size} intermediate features on its ranks")


def _check_tensor(
    source: Source, entry: LayerEntry, matrix: MatrixEntry, part: str, wanted: tuple[tuple[int, ...], str]
) -> None:
    name, (shape, dtype) = matrix.tensors[part], wanted
    found = source.tensors.get(name)
    if found is None:
        raise _damaged(entry, name, "is missing from the weight files")
    if (found.shape, found.dtype) != (shape, dtype):
        raise _damaged(
            entry,
            name,
            f"is {found.dtype} {list(found.shape)} ({found.nbytes:,} bytes), {entry.layout} needs {dtype} "
            f"{list(shape)} ({tensor_bytes(shape, dtype):,} bytes)",
        )


def _damaged(entry: LayerEntry, what: str, message: str) -> MoeqError:
    return MoeqError("source.bad-manifest", f"layer {entry.layer}: {what[:200]} {message}", "convert the source again")


def _info(manifest: Manifest) -> CheckpointInfo:
    """Read the source's description from the manifest and check it against the manifest's layers."""
    info = read_as(CheckpointInfo, manifest.model, "moeq.json: model")
    counts = dict(zip(info.moe_layers, info.experts_per_layer, strict=False))
    layers = sorted([*(entry.layer for entry in manifest.layers), *(row.layer for row in manifest.copied)])
    if list(info.moe_layers) != layers or len(info.experts_per_layer) != len(layers):
        _refuse(f"moe_layers or experts_per_layer does not fit layers {layers[:20]}")
    for entry in manifest.layers:
        if counts[entry.layer] != entry.num_experts:
            _refuse(f"layer {entry.layer} has {counts[entry.layer]} experts, layers has {entry.num_experts}")
        if not any(entry.layer in use.layers for use in info.schemes):
            _refuse(f"no scheme covers layer {entry.layer}")
    for use in info.schemes:
        if use.scheme.weight.dtype not in ELEMENT_BITS:
            _refuse(f"{brief(use.scheme.weight.dtype)} is not an element type of a scheme")
    sizes = (info.num_layers, info.num_experts, info.hidden_size, info.expert_input_size, info.intermediate_size)
    groups = (info.routing.num_groups, info.routing.topk_groups)
    if not all(0 < size <= MAX_COUNT for size in (*sizes, *groups, 1 if info.top_k is None else info.top_k)):
        _refuse("a size is not between 1 and 16,777,216")
    return info


def _refuse(problem: str) -> NoReturn:
    raise MoeqError("source.bad-manifest", f"moeq.json: model: {problem}", "convert the source again")
