"""Facts about a finished conversion, from its manifest alone, for the model card and the job summary."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.report.text import ranges

if TYPE_CHECKING:
    from moeq.checkpoint.manifest import LayerEntry, Manifest


@dataclass(frozen=True)
class ConversionFacts:
    """Facts about a conversion.

    Attributes:
        scheme: how the source encodes its experts.
        layouts: layout ids, most used first.
        deployment: what it was converted for, in a phrase.
        layers: numbers of the converted layers, as ranges.
        experts: routed experts per converted layer (the largest number).
        packed: packed matrices that were unpacked again and compared with the source.
        digests: digests recorded in the manifest, one per expert and projection.
        digest: sha256 over all of them in order: one line that names the logical weights, whatever the layout.
        losses: stored numbers that a lossy layout changed.
        kept: source tensors kept verbatim for `moeq restore`.
        copied: layers that were copied unchanged, as ranges; "none" where all were converted.
    """

    scheme: str
    layouts: tuple[str, ...]
    deployment: str
    layers: str
    experts: int
    packed: int
    digests: int
    digest: str
    losses: int
    kept: int
    copied: str


def conversion_facts(manifest: Manifest) -> ConversionFacts:
    """Read the facts off a manifest."""
    schemes = manifest.model.get("schemes") or ({"title": "unknown"},)
    layouts = [layer.layout for layer in manifest.layers]
    recorded = [
        (layer.layer, projection, digest)
        for layer in manifest.layers
        for projection, digests in sorted(layer.digests.items())
        for digest in digests
    ]
    return ConversionFacts(
        scheme=str(schemes[0]["title"]),
        layouts=tuple(sorted(set(layouts), key=layouts.count, reverse=True)),
        deployment=_deployment(manifest),
        layers=ranges(layer.layer for layer in manifest.layers),
        experts=max((layer.num_experts for layer in manifest.layers), default=0),
        packed=sum(packed_matrices(layer) for layer in manifest.layers),
        digests=len(recorded),
        digest=hashlib.sha256("".join(f"{n} {p} {d}\n" for n, p, d in recorded).encode()).hexdigest(),
        losses=sum(layer.losses for layer in manifest.layers),
        kept=len(manifest.restore.kept) if manifest.restore else 0,
        copied=ranges(row.layer for row in manifest.copied),
    )


def packed_matrices(layer: LayerEntry) -> int:
    """Count the packed matrices: w13 and w2 of every expert, of every rank that holds it."""
    return 2 * (sum(stop - start for start, stop in (rank.experts for rank in layer.ranks)) or layer.num_experts)


def _deployment(manifest: Manifest) -> str:
    asked = manifest.deployment
    gpu = asked.get("gpu") or {}
    parts = [str(gpu.get("name", "any device"))]
    parts += [f"{name.upper()} {asked[name]}" for name in ("tp", "ep") if asked.get(name, 1) != 1]
    return ", ".join([*parts, str(asked.get("dtype", "")), str(asked.get("engine", ""))])
