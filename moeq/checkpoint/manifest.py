"""`moeq.json`: what a converted checkpoint is, where it came from, and the digests that prove it. Imports no torch.

A loader reads this file first and refuses the checkpoint on any mismatch. The file is written last, so its presence
marks a conversion as finished.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn

from blake3 import blake3

from moeq.checkpoint.files import missing_folder, read_regular, refuse_unfinished
from moeq.checkpoint.jsonfile import MAX_CONFIG_BYTES, parse_object
from moeq.checkpoint.paths import safe_names
from moeq.checkpoint.source import CONFIG_NAME
from moeq.errors import MoeqError
from moeq.matrix import ELEMENT_BITS, SCALE_BITS, MatrixSpec
from moeq.typed import brief, read_as

MANIFEST_NAME = "moeq.json"
MANIFEST_SCHEMA = "moeq.manifest/2"
#: Schema without `files`, whose digests cover only what was packed.
_OLD_SCHEMA = "moeq.manifest/1"

#: Limit on the size of `moeq.json`; the digests of every expert of the largest published models take 20 MB.
MAX_MANIFEST_BYTES = 256 << 20

#: Upper bound of an axis; no array could have a larger one.
_MAX_AXIS = 1 << 40

Projection = Literal["gate", "up", "down"]
StackedRole = Literal["w13", "w2"]
STACKED_ROLES: tuple[StackedRole, ...] = ("w13", "w2")


def stacked_role(projection: str) -> StackedRole:
    """Return the stacked matrix that holds a projection, which may be `gate_up`."""
    return "w2" if projection == "down" else "w13"


@dataclass(frozen=True)
class MatrixEntry:
    """One stacked matrix (`w13` or `w2`) of one layer."""

    spec: MatrixSpec  #: the logical matrix of one expert, before padding
    padded_n: int  #: output features as stored, with padding (`w13`: gate and up together)
    padded_k: int  #: input features as stored, with padding
    tensors: Mapping[str, str]  #: part (`weight`, `scale`, `zero`, `bias`) to the name of the stacked tensor `[E, ...]`
    padded_group: int | None = None  #: group size as stored, where a single group was padded to several; else None

    @property
    def padded_spec(self) -> MatrixSpec:
        """Spec with the padded sizes, which the layout packed."""
        padded = self.spec.with_sizes(n=self.padded_n, k=self.padded_k)
        return padded if self.padded_group is None else dataclasses.replace(padded, group_size=self.padded_group)


@dataclass(frozen=True)
class RankEntry:
    """Share of one rank in a layer that is written rank by rank."""

    rank: int  #: rank within tensor parallelism, or within expert parallelism
    #: `(start, stop)` of its experts; the leading axis of its tensors has `stop - start` entries.
    experts: tuple[int, int]
    #: `(start, stop)` of its intermediate features: rows of gate and of up, columns of w2.
    intermediate: tuple[int, int]
    matrices: Mapping[StackedRole, MatrixEntry]  #: the rank's `w13` and `w2`, with the sizes of its shard


@dataclass(frozen=True)
class Sharding:
    """Way in which several ranks get their parts of a layer."""

    axis: Literal["tp", "ep"] | None = None  #: what the deployment cuts: `tp`, `ep`, or None for a single rank
    #: `unsharded`, one packing that a loader reads whole or slices, or `ranks`, one packing per rank.
    written: Literal["unsharded", "ranks"] = "unsharded"
    why: str = ""  #: the reason in one sentence, with the slices that are legal


@dataclass(frozen=True)
class LayerEntry:
    """The experts of one MoE layer."""

    layer: int
    prefix: str  #: module path of the experts, such as `model.layers.0.mlp.experts`
    num_experts: int  #: routed experts, the leading axis of every stacked tensor
    layout: str
    #: `w13` and `w2` of the whole layer; their tensors are in `ranks` where the layer is written rank by rank.
    matrices: Mapping[StackedRole, MatrixEntry]
    #: Projection to one logical digest per expert (see `moeq.digest`).
    digests: Mapping[Projection, tuple[str, ...]] = field(default_factory=dict)
    sharding: Sharding = field(default_factory=Sharding)  #: how ranks get their part
    ranks: tuple[RankEntry, ...] = ()  #: one entry per rank where the layer is written rank by rank; else empty
    losses: int = 0  #: numbers that packing changed with the user's permission; `digests` then cover the stored numbers
    #: Group size of the source, where its groups were cut into smaller ones that repeat the scale
    #: (`moeq.model.regroup`); `matrices` have the smaller groups, `digests` cover the source's groups.
    source_group: int | None = None

    def source_spec(self, role: StackedRole) -> MatrixSpec:
        """Return the spec of a matrix with the source's group size."""
        spec = self.matrices[role].spec
        return spec if self.source_group is None else dataclasses.replace(spec, group_size=self.source_group)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Projections of an expert, in order."""
        return ("gate", "up", "down") if self.matrices["w13"].spec.gated else ("up", "down")

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all stacked tensors of the layer."""
        homes = [rank.matrices for rank in self.ranks] or [self.matrices]
        return tuple(name for home in homes for matrix in home.values() for name in matrix.tensors.values())


@dataclass(frozen=True)
class CopiedLayer:
    """A layer whose experts were copied unchanged."""

    layer: int
    reason: str


@dataclass(frozen=True)
class RestoreEntry:
    """Data that `moeq restore` needs beside the weights (see `moeq.pipeline.state.restore_data`)."""

    file: str  #: file that holds the source's headers and configs, and tensors that cannot be rebuilt from the weights
    files: tuple[str, ...] = ()  #: the source's weight files, in order
    kept: tuple[str, ...] = ()  #: source tensors kept verbatim
    missing: tuple[str, ...] = ()  #: names of source files that were not kept (pickles, files of no index)
    copied: tuple[str, ...] = ()  #: files beside the weights that were copied unchanged
    stripped: tuple[str, ...] = ()  #: JSON files that were copied without their references to code
    no_code: bool = False  #: whether all code was left out of the conversion


@dataclass(frozen=True)
class TensorDigest:
    """Digests of the bytes of a tensor."""

    piece: int  #: bytes that are hashed at once: one expert of a stack, else a fixed size; the last may be shorter
    blake3: str  #: hex BLAKE3 over the BLAKE3 digests (32 bytes each) of all pieces in order


@dataclass(frozen=True)
class FileDigest:
    """Digests of a file."""

    bytes: int
    blake3: str  #: hex BLAKE3 of the whole file, or of a weight file's first bytes up to its data
    tensors: Mapping[str, TensorDigest] = field(default_factory=dict)  #: digests of every tensor of a weight file


@dataclass(frozen=True)
class SourceEntry:
    """Source of a converted checkpoint."""

    name: str  #: path or repository as the user named it
    revision: str | None  #: commit, for a Hub source
    files: Mapping[str, int]  #: file name to size in bytes
    identity: str  #: digest of the source's config and tensor places; changes when the source does


@dataclass(frozen=True)
class JobEntry:
    """Conversion that made the folder; the same command compares it to see that there is nothing left to do."""

    plan: str  #: digest of the plan: source headers, options, layouts and output tensors
    sample: str  #: digest of sampled blocks of a local source's weights; empty for a commit of a repository
    options: Mapping[str, Any]  #: options of the conversion (`moeq.pipeline.plan.options.ConvertOptions`)


@dataclass(frozen=True)
class Manifest:
    """The whole of `moeq.json`."""

    moeq_version: str
    source: SourceEntry
    model: Mapping[str, Any]  #: output of `moeq inspect --json` for the source
    backend: str
    deployment: Mapping[str, Any]  #: deployment that the checkpoint was converted for
    layers: tuple[LayerEntry, ...]
    digest: str  #: definition of the digests (`moeq.digest.DIGEST_NAME`)
    advisories: tuple[str, ...] = ()  #: codes of engine defects that touch this deployment
    copied: tuple[CopiedLayer, ...] = ()  #: layers whose experts were copied unchanged, with the reason
    #: Data that leads back to the source; None in manifests of versions that did not keep it.
    restore: RestoreEntry | None = None
    #: Every other file of the folder, by name; None in manifests of versions that did not record them.
    files: Mapping[str, FileDigest] | None = None
    intact: bool = True  #: whether the seal, a digest of everything else, is right; not written to the file
    #: Loaders that its writer knew to load the checkpoint (`vLLM 0.33.0 ...`); empty if there was none.
    loads_in: tuple[str, ...] = ()
    job: JobEntry | None = None  #: conversion that was asked for; None in manifests of versions that did not record it

    def layer(self, layer: int) -> LayerEntry:
        """Return the entry of a layer. Raises MoeqError `usage.no-such-layer`."""
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        known = ", ".join(str(entry.layer) for entry in self.layers)
        raise MoeqError("usage.no-such-layer", f"layer {layer} has no converted experts", f"MoE layers: {known}")

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document."""
        document = {"schema": _OLD_SCHEMA if self.files is None else MANIFEST_SCHEMA, **dataclasses.asdict(self)}
        del document["intact"]
        return document if self.files is None else {**document, "seal": seal(document)}


def seal(document: Mapping[str, Any]) -> str:
    """Return the hex BLAKE3 of a manifest without its seal, as JSON with sorted keys and no spaces."""
    rest = {name: value for name, value in document.items() if name != "seal"}
    return blake3(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def read_manifest(folder: Path) -> Manifest:
    """Read `moeq.json` of a converted checkpoint.

    Raises MoeqError `source.missing` where there is no folder, `usage.not-converted` for a source checkpoint,
    `source.no-manifest` where the folder has no manifest, `source.bad-manifest` where the manifest is not valid.
    """
    path = folder / MANIFEST_NAME
    if not os.path.lexists(path):
        raise _no_manifest(folder)
    return parse_manifest(read_regular(path, str(path), MAX_MANIFEST_BYTES), path)


def not_converted(name: str) -> MoeqError:
    """Return the error for a source checkpoint where a conversion is needed."""
    return MoeqError(
        "usage.not-converted",
        f"{name} is a source checkpoint, not an output of `moeq convert`",
        f"convert it first: moeq convert {shlex.quote(name)} DST --gpu NAME",
    )


def _no_manifest(folder: Path) -> MoeqError:
    """Return the error for a folder without a manifest: missing, a source checkpoint, or neither."""
    if not os.path.lexists(folder):
        return missing_folder(folder, str(folder))
    refuse_unfinished(folder, str(folder))
    config = folder / CONFIG_NAME
    if os.path.lexists(config):
        raw = read_regular(config, str(config), MAX_CONFIG_BYTES)
        if not re.search(rb'"quant_method"\s*:\s*"moeq"', raw):
            return not_converted(str(folder))
    return MoeqError(
        "source.no-manifest",
        f"{folder} has no {MANIFEST_NAME}: it is not a finished output of `moeq convert`",
        "convert it first: moeq convert SRC DST",
    )


def parse_manifest(raw: bytes, path: Path) -> Manifest:
    """Parse and check the bytes of a manifest. Raises MoeqError `source.bad-manifest`."""
    document = parse_object(raw, str(path), "source.bad-manifest")
    schema = document.get("schema")
    if schema not in (MANIFEST_SCHEMA, _OLD_SCHEMA):
        raise MoeqError(
            "source.bad-manifest",
            f"{path} has schema {brief(schema)}, this version of moeq reads {MANIFEST_SCHEMA!r}",
            "convert the source again with this version",
        )
    intact = schema == _OLD_SCHEMA or document.get("seal") == seal(document)
    manifest = read_as(Manifest, {**document, "intact": intact}, str(path))
    if (manifest.files is None) != (schema == _OLD_SCHEMA):
        _refuse(path, "files", f"does not belong to schema {schema}")
    _check(manifest, path)
    return manifest


def _check(manifest: Manifest, path: Path) -> None:
    """Check that the entries of a manifest agree with each other. Raises MoeqError `source.bad-manifest`."""
    layers = [entry.layer for entry in manifest.layers]
    if not layers:
        _refuse(path, "layers", "is empty")
    _distinct(path, "layers: layer", layers)
    _distinct(path, "copied: layer", [*layers, *(row.layer for row in manifest.copied)])
    restore = manifest.restore
    if restore is not None:
        safe_names((restore.file, *restore.files, *restore.missing), str(path))
        safe_names((*restore.copied, *restore.stripped), str(path))
    safe_names(manifest.files or (), str(path))
    _distinct(path, "layers: tensor", [name for entry in manifest.layers for name in entry.tensors])
    for index, entry in enumerate(manifest.layers):
        place = f"layers[{index}]"
        _size(path, f"{place}.num_experts", entry.num_experts)
        numbers = [rank.rank for rank in entry.ranks]
        if sorted(numbers) != list(range(len(numbers))):
            _refuse(path, f"{place}.ranks", f"are not numbered 0 to {len(numbers) - 1}")
        _check_source_group(path, f"{place}.source_group", entry)
        for where, matrices in [(place, entry.matrices), *((f"{place}.ranks", rank.matrices) for rank in entry.ranks)]:
            for role in STACKED_ROLES:
                if role not in matrices:
                    _refuse(path, f"{where}.matrices", f"lacks {role}")
                _check_matrix(path, f"{where}.matrices.{role}", matrices[role], role)


def _check_source_group(path: Path, place: str, entry: LayerEntry) -> None:
    """Refuse a source's group size that is not a multiple of the written group size."""
    if entry.source_group is None:
        return
    _size(path, place, entry.source_group)
    for role, matrix in entry.matrices.items():
        if matrix.spec.group_size < 1 or entry.source_group % matrix.spec.group_size:
            _refuse(path, place, f"is {entry.source_group}, which the groups of {role} do not divide")


def _check_matrix(path: Path, place: str, entry: MatrixEntry, role: StackedRole) -> None:
    spec = entry.spec
    for name, size in (("spec.n", spec.n), ("spec.k", spec.k), ("spec.group_size", spec.group_size)):
        _size(path, f"{place}.{name}", size)
    for name, size, least in (("padded_n", entry.padded_n, spec.n), ("padded_k", entry.padded_k, spec.k)):
        _size(path, f"{place}.{name}", size)
        if size < least:
            _refuse(path, f"{place}.{name}", f"is {size}, less than the {least} before padding")
    for name, optional in (("spec.all_groups", spec.all_groups), ("padded_group", entry.padded_group)):
        if optional is not None:
            _size(path, f"{place}.{name}", optional)
    if spec.role != role or spec.element not in ELEMENT_BITS:
        _refuse(path, f"{place}.spec", f"describes {spec.role} of {brief(spec.element)}")
    for name, dtype in (("scale_dtype", spec.scale_dtype), ("bias_dtype", spec.bias_dtype)):
        if dtype not in SCALE_BITS and not (name == "bias_dtype" and dtype is None):
            _refuse(path, f"{place}.spec.{name}", f"is {brief(dtype)}, expected one of {', '.join(SCALE_BITS)}")


def _size(path: Path, place: str, size: int) -> None:
    if not 0 < size < _MAX_AXIS:
        _refuse(path, place, f"is {size}, expected a size from 1 to {_MAX_AXIS - 1:,}")


def _distinct(path: Path, what: str, values: Iterable[object]) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            _refuse(path, f"{what} {brief(value)}", "appears twice")
        seen.add(value)


def _refuse(path: Path, place: str, problem: str) -> NoReturn:
    raise MoeqError("source.bad-manifest", f"{path}: {place} {problem}", "convert the source again")
