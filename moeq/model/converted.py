"""An output of `moeq convert`, read through its manifest and its layout's inverse."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar

from moeq.checkpoint.manifest import LayerEntry, Manifest, MatrixEntry, StackedRole
from moeq.checkpoint.notice import Notice
from moeq.checkpoint.source import Source
from moeq.checkpoint.writer import tensor_bytes
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix, Role, projection_spec, split_projections
from moeq.model import Checkpoint
from moeq.model.info import CheckpointInfo, ModuleUse, RoutingInfo, SchemeUse
from moeq.schemes.base import QuantKey, ScaleKey, Scheme

_STACK: dict[Role, StackedRole] = {"w13": "w13", "gate": "w13", "up": "w13", "w2": "w2", "down": "w2"}

T = TypeVar("T")


class ConvertedCheckpoint(Checkpoint):
    """A converted checkpoint: the same questions as a source, answered from the packed tensors.

    Attributes:
        manifest: its `moeq.json`.

    Raises:
        MoeqError: `source.bad-manifest` where manifest and tensors contradict each other, naming the tensor.
    """

    kind: Literal["source", "converted"] = "converted"

    def __init__(self, source: Source, manifest: Manifest) -> None:
        self.source = source
        self.manifest = manifest
        self._entries = {entry.layer: entry for entry in manifest.layers}
        for entry in manifest.layers:
            _check_tensors(source, entry)
        names = [n for e in manifest.layers for matrix in e.matrices.values() for n in matrix.tensors.values()]
        source.expert_names = frozenset(names)
        expert_bytes = sum(source.tensors[name].nbytes for name in names)
        self.info = replace(
            _info(manifest),
            name=source.name,
            revision=source.revision,
            expert_bytes=expert_bytes,
            other_bytes=sum(entry.nbytes for entry in source.tensors.values()) - expert_bytes,
            num_tensors=len(source.tensors),
            num_files=len(source.files),
            warnings=tuple(source.notices),
        )

    def expert_prefix(self, layer: int) -> str:
        return self._entry(layer).prefix

    def num_experts(self, layer: int) -> int:
        return self._entry(layer).num_experts

    def scheme_of(self, layer: int, expert: int = 0, role: Role = "w13") -> Scheme:
        self._entry(layer)
        return next(use.scheme for use in self.info.schemes if layer in use.layers)

    def spec(self, layer: int, role: Role, expert: int = 0) -> MatrixSpec:
        self._check_expert(layer, expert)
        return projection_spec(self._entry(layer).matrices[_STACK[role]].spec, role)

    def matrix(self, layer: int, expert: int, role: Role) -> QuantizedMatrix:
        """One logical matrix: the layout's `unpack` of the expert's bytes, with padding cut off."""
        from moeq.layouts.padding import PaddingPlan

        self._check_expert(layer, expert)
        entry = self._entry(layer)
        stored = entry.matrices[_STACK[role]]
        parts = {part: self.source.read_row(self.source.entry(name), expert) for part, name in stored.tensors.items()}
        padded = get_layout(entry.layout).unpack(parts, stored.padded_spec)
        w13, w2 = entry.matrices["w13"], entry.matrices["w2"]
        whole = PaddingPlan(w13.padded_spec, w2.padded_spec, w13.spec, w2.spec).unpad(padded)
        if role in ("w13", "w2"):
            return whole
        return dict(split_projections(whole))[role]  # type: ignore[index]

    def _entry(self, layer: int) -> LayerEntry:
        if layer not in self._entries:
            return self.manifest.layer(layer)  # raises, naming the layers there are
        return self._entries[layer]

    def _check_expert(self, layer: int, expert: int) -> None:
        count = self._entry(layer).num_experts
        if not 0 <= expert < count:
            raise MoeqError("usage.no-such-expert", f"layer {layer} has experts 0 to {count - 1}, not {expert}")


def _check_tensors(source: Source, entry: LayerEntry) -> None:
    """Every stacked tensor is there, in the shape that its layout gives for the manifest's sizes."""
    layout = get_layout(entry.layout)
    for role, matrix in entry.matrices.items():
        wanted = layout.tensors(matrix.padded_spec)
        if set(wanted) != set(matrix.tensors):
            raise _damaged(entry, role, f"has parts {sorted(matrix.tensors)}, {entry.layout} needs {sorted(wanted)}")
        for part, spec in wanted.items():
            _check_tensor(source, entry, matrix, part, ((entry.num_experts, *spec.shape), spec.dtype))


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
    return MoeqError("source.bad-manifest", f"layer {entry.layer}: {what} {message}", "convert the source again")


def _info(manifest: Manifest) -> CheckpointInfo:
    """The source's record, kept in the manifest."""
    document = dict(manifest.model)
    try:
        return _record(
            CheckpointInfo,
            {
                **document,
                "routing": _record(RoutingInfo, document["routing"]),
                "schemes": tuple(
                    _record(SchemeUse, {**use, "scheme": _scheme(use["scheme"])}) for use in document["schemes"]
                ),
                "modules": tuple(_record(ModuleUse, use) for use in document["modules"]),
                "warnings": tuple(_record(Notice, notice) for notice in document["warnings"]),
            },
        )
    except (KeyError, TypeError, ValueError) as error:
        raise MoeqError(
            "source.bad-manifest", f"moeq.json: model: {type(error).__name__}: {error}", "convert the source again"
        ) from None


def _scheme(document: Mapping[str, Any]) -> Scheme:
    keys = {name: _key(document[name]) for name in ("weight", "activation")}
    return _record(Scheme, {**document, **keys})


def _key(document: Mapping[str, Any] | None) -> QuantKey | None:
    if document is None:
        return None
    scales = {
        name: None if document[name] is None else _record(ScaleKey, document[name]) for name in ("scale", "scale2")
    }
    return _record(QuantKey, {**document, **scales})


def _record(kind: type[T], document: Mapping[str, Any]) -> T:
    """A dataclass from JSON; lists become tuples. Raises TypeError for missing fields, ignores derived ones."""
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    values = {name: tuple(v) if isinstance(v, list) else v for name, v in document.items() if name in known}
    return kind(**values)
