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
from moeq.matrix import MatrixSpec

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
    """

    spec: MatrixSpec
    padded_n: int
    padded_k: int
    tensors: Mapping[str, str]

    @property
    def padded_spec(self) -> MatrixSpec:
        """The spec that the layout packed."""
        return self.spec.with_sizes(n=self.padded_n, k=self.padded_k)


@dataclass(frozen=True)
class LayerEntry:
    """The experts of one MoE layer.

    Attributes:
        layer: index in the model.
        prefix: module path of the experts, such as `model.layers.0.mlp.experts`.
        num_experts: routed experts, the leading axis of every stacked tensor.
        layout: layout id.
        matrices: `w13` and `w2`.
        digests: projection to one logical digest per expert (see `moeq.digest`).
    """

    layer: int
    prefix: str
    num_experts: int
    layout: str
    matrices: Mapping[StackedRole, MatrixEntry]
    digests: Mapping[Projection, tuple[str, ...]] = field(default_factory=dict)


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
    """

    moeq_version: str
    source: SourceEntry
    model: Mapping[str, Any]
    backend: str
    deployment: Mapping[str, Any]
    layers: tuple[LayerEntry, ...]
    digest: str
    advisories: tuple[str, ...] = ()

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
    )


def _parse_layer(entry: dict[str, Any]) -> LayerEntry:
    return LayerEntry(
        layer=int(entry["layer"]),
        prefix=str(entry["prefix"]),
        num_experts=int(entry["num_experts"]),
        layout=str(entry["layout"]),
        matrices={role: _parse_matrix(entry["matrices"][role]) for role in STACKED_ROLES},
        digests={cast(Projection, name): tuple(values) for name, values in entry["digests"].items()},
    )


def _parse_matrix(entry: dict[str, Any]) -> MatrixEntry:
    return MatrixEntry(
        spec=MatrixSpec(**entry["spec"]),
        padded_n=int(entry["padded_n"]),
        padded_k=int(entry["padded_k"]),
        tensors=dict(entry["tensors"]),
    )
