"""`moeq.json`: what a converted checkpoint is, where it came from, and the digests that prove it. No torch.

A loader reads this file first and refuses on any mismatch; its presence also marks a conversion as finished, since
it is written last.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from moeq.errors import MoeqError
from moeq.matrix import ELEMENT_BITS, MatrixSpec

MANIFEST_NAME = "moeq.json"
MANIFEST_SCHEMA = "moeq.manifest/1"

Projection = Literal["gate", "up", "down"]
StackedRole = Literal["w13", "w2"]
STACKED_ROLES: tuple[StackedRole, ...] = ("w13", "w2")


@dataclass(frozen=True)
class MatrixEntry:
    """One stacked matrix (`w13` or `w2`) of one layer.

    Attributes:
        spec: the logical matrix of one expert, before padding.
        padded_n: output features as stored (`w13`: both halves).
        padded_k: input features as stored.
        tensors: part (`weight`, `scale`, `zero`, `bias`) to the name of the stacked tensor `[E, ...]`.
        padded_group: group size as stored, where a single group was padded to several; else None.
    """

    spec: MatrixSpec
    padded_n: int
    padded_k: int
    tensors: Mapping[str, str]
    padded_group: int | None = None

    @property
    def padded_spec(self) -> MatrixSpec:
        """The spec that the layout packed."""
        padded = self.spec.with_sizes(n=self.padded_n, k=self.padded_k)
        return padded if self.padded_group is None else dataclasses.replace(padded, group_size=self.padded_group)


@dataclass(frozen=True)
class RankEntry:
    """What one rank holds of a layer that is written rank by rank.

    Attributes:
        rank: rank within tensor parallelism, or within expert parallelism.
        experts: `(start, stop)` of its experts; the leading axis of its tensors has `stop - start` entries.
        intermediate: `(start, stop)` of its intermediate features: rows of gate and of up, columns of w2.
        matrices: its `w13` and `w2`, sizes those of the shard.
    """

    rank: int
    experts: tuple[int, int]
    intermediate: tuple[int, int]
    matrices: Mapping[StackedRole, MatrixEntry]


@dataclass(frozen=True)
class Sharding:
    """How a layer serves several ranks.

    Attributes:
        axis: what the deployment cuts: `tp`, `ep`, or None for a single rank.
        written: `unsharded`: one packing that a loader reads whole or slices; `ranks`: one packing per rank.
        why: one sentence on why, with the slices that are legal.
    """

    axis: Literal["tp", "ep"] | None = None
    written: Literal["unsharded", "ranks"] = "unsharded"
    why: str = ""


@dataclass(frozen=True)
class LayerEntry:
    """The experts of one MoE layer.

    Attributes:
        layer: index in the model.
        prefix: module path of the experts, such as `model.layers.0.mlp.experts`.
        num_experts: routed experts, the leading axis of every stacked tensor.
        layout: layout id.
        matrices: `w13` and `w2`; where the layer is written rank by rank their tensors are those of `ranks` instead.
        digests: projection to one logical digest per expert (see `moeq.digest`).
        sharding: how ranks get their part.
        ranks: one entry per rank where the layer is written rank by rank; else empty.
        losses: stored numbers that packing changed, allowed explicitly; the digests are then of what is stored.
    """

    layer: int
    prefix: str
    num_experts: int
    layout: str
    matrices: Mapping[StackedRole, MatrixEntry]
    digests: Mapping[Projection, tuple[str, ...]] = field(default_factory=dict)
    sharding: Sharding = field(default_factory=Sharding)
    ranks: tuple[RankEntry, ...] = ()
    losses: int = 0

    @property
    def tensors(self) -> tuple[str, ...]:
        """Names of all stacked tensors of the layer."""
        homes = [rank.matrices for rank in self.ranks] or [self.matrices]
        return tuple(name for home in homes for matrix in home.values() for name in matrix.tensors.values())


@dataclass(frozen=True)
class CopiedLayer:
    """A layer whose experts were copied unchanged.

    Attributes:
        layer: index in the model.
        reason: why they were not converted.
    """

    layer: int
    reason: str


@dataclass(frozen=True)
class RestoreEntry:
    """What `moeq restore` needs beside the weights (see `moeq.pipeline.state.restore_data`).

    Attributes:
        file: file that holds the source's headers and configs, and tensors that cannot be rebuilt from the weights.
        files: the source's weight files, in order.
        kept: source tensors kept verbatim.
        missing: what of the source folder was not kept (pickles, files of no index), by name.
    """

    file: str
    files: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class SourceEntry:
    """Where a converted checkpoint came from.

    Attributes:
        name: path or repository as the user named it.
        revision: commit, for a Hub source.
        files: file name to size in bytes.
        identity: digest of the source's config and tensor places; changes when the source does.
    """

    name: str
    revision: str | None
    files: Mapping[str, int]
    identity: str


@dataclass(frozen=True)
class Manifest:
    """The whole of `moeq.json`.

    Attributes:
        moeq_version: version that wrote it.
        source: where the weights came from.
        model: what `moeq inspect --json` says of the source.
        backend: backend whose kernel reads the layout.
        deployment: what it was converted for.
        layers: every layer with experts.
        digest: definition of the digests (`moeq.digest.DIGEST_NAME`).
        advisories: codes of engine defects that touch this deployment.
        copied: layers whose experts were copied unchanged, with the reason.
        restore: what leads back to the source; None in manifests of versions that did not keep it.
    """

    moeq_version: str
    source: SourceEntry
    model: Mapping[str, Any]
    backend: str
    deployment: Mapping[str, Any]
    layers: tuple[LayerEntry, ...]
    digest: str
    advisories: tuple[str, ...] = ()
    copied: tuple[CopiedLayer, ...] = ()
    restore: RestoreEntry | None = None

    def layer(self, layer: int) -> LayerEntry:
        """Entry of that layer. Raises MoeqError `usage.no-such-layer`."""
        for entry in self.layers:
            if entry.layer == layer:
                return entry
        known = ", ".join(str(entry.layer) for entry in self.layers)
        raise MoeqError("usage.no-such-layer", f"layer {layer} has no converted experts", f"MoE layers: {known}")

    def to_json(self) -> dict[str, Any]:
        """The JSON document."""
        return {"schema": MANIFEST_SCHEMA, **dataclasses.asdict(self)}


def read_manifest(folder: Path) -> Manifest:
    """Read `moeq.json` of a converted checkpoint.

    Raises:
        MoeqError: `source.no-manifest` where there is none, `source.bad-manifest` where it cannot be understood.
    """
    path = folder / MANIFEST_NAME
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MoeqError(
            "source.no-manifest",
            f"{folder} has no {MANIFEST_NAME}: it is not a finished output of `moeq convert`",
            "convert it first: moeq convert SRC DST",
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise MoeqError("source.bad-manifest", f"{path} is not readable JSON: {error}") from None
    if not isinstance(document, dict) or document.get("schema") != MANIFEST_SCHEMA:
        found = document.get("schema") if isinstance(document, dict) else type(document).__name__
        raise MoeqError(
            "source.bad-manifest",
            f"{path} has schema {found!r}, this version of moeq reads {MANIFEST_SCHEMA!r}",
            "convert the source again with this version",
        )
    try:
        return _parse(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise MoeqError("source.bad-manifest", f"{path} is damaged: {type(error).__name__}: {error}") from None


def _parse(document: dict[str, Any]) -> Manifest:
    source = document["source"]
    return Manifest(
        moeq_version=str(document["moeq_version"]),
        source=SourceEntry(source["name"], source["revision"], dict(source["files"]), source["identity"]),
        model=dict(document["model"]),
        backend=str(document["backend"]),
        deployment=dict(document["deployment"]),
        layers=tuple(_parse_layer(entry) for entry in document["layers"]),
        digest=str(document["digest"]),
        advisories=tuple(document.get("advisories", ())),
        copied=tuple(CopiedLayer(int(row["layer"]), str(row["reason"])) for row in document.get("copied", ())),
        restore=_parse_restore(document.get("restore")),
    )


def _parse_restore(entry: dict[str, Any] | None) -> RestoreEntry | None:
    if entry is None:
        return None
    lists = {name: tuple(map(str, entry[name])) for name in ("files", "kept", "missing")}
    return RestoreEntry(str(entry["file"]), **lists)


def _parse_layer(entry: dict[str, Any]) -> LayerEntry:
    return LayerEntry(
        layer=int(entry["layer"]),
        prefix=str(entry["prefix"]),
        num_experts=_count(entry["num_experts"], "num_experts"),
        layout=str(entry["layout"]),
        matrices={role: _parse_matrix(entry["matrices"][role], role) for role in STACKED_ROLES},
        digests={cast(Projection, name): tuple(values) for name, values in entry["digests"].items()},
        sharding=Sharding(**entry.get("sharding", {})),
        ranks=tuple(_parse_rank(rank) for rank in entry.get("ranks", ())),
        losses=int(entry.get("losses", 0)),
    )


def _parse_rank(entry: dict[str, Any]) -> RankEntry:
    (first, last), (start, stop) = entry["experts"], entry["intermediate"]
    return RankEntry(
        rank=int(entry["rank"]),
        experts=(int(first), int(last)),
        intermediate=(int(start), int(stop)),
        matrices={role: _parse_matrix(entry["matrices"][role], role) for role in STACKED_ROLES},
    )


def _parse_matrix(entry: dict[str, Any], role: StackedRole) -> MatrixEntry:
    group = entry.get("padded_group")
    return MatrixEntry(
        spec=_parse_spec(entry["spec"], role),
        padded_n=_count(entry["padded_n"], "padded_n"),
        padded_k=_count(entry["padded_k"], "padded_k"),
        tensors={str(part): str(name) for part, name in entry["tensors"].items()},
        padded_group=None if group is None else _count(group, "padded_group"),
    )


def _parse_spec(entry: dict[str, Any], role: StackedRole) -> MatrixSpec:
    """A spec whose every field has its type; sizes and layout are checked against tensors later."""
    spec = MatrixSpec(**entry)
    for name in ("n", "k", "group_size"):
        _count(getattr(spec, name), name)
    if spec.all_groups is not None:
        _count(spec.all_groups, "all_groups")
    for name in ("symmetric", "act_order", "gated"):
        if not isinstance(getattr(spec, name), bool):
            raise ValueError(f"{name} is {getattr(spec, name)!r}, expected true or false")
    if spec.role != role or spec.element not in ELEMENT_BITS:
        raise ValueError(f"{role} is described as {spec.role!r} of {spec.element!r}")
    if not isinstance(spec.scale_dtype, str) or not isinstance(spec.bias_dtype, str | None):
        raise ValueError(f"scale_dtype {spec.scale_dtype!r} or bias_dtype {spec.bias_dtype!r} is not a name")
    return spec


def _count(value: Any, name: str) -> int:
    """A size of at least 1 that an array could have."""
    if type(value) is not int or not 0 < value < 1 << 40:
        raise ValueError(f"{name} is {value!r}, expected a size")
    return value
