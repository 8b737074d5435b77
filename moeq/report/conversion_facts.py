"""Facts about a conversion that every report tells, and the page that GitHub shows for a finished job."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import PurePath
from typing import TYPE_CHECKING

from moeq.foreign import in_code, in_markdown
from moeq.report.text import human_bytes, human_seconds, ranges

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moeq.checkpoint.manifest import LayerEntry, Manifest
    from moeq.errors import MoeqError
    from moeq.pipeline.plan.conversion_plan import Plan


@dataclass(frozen=True)
class ConversionFacts:
    """Facts about a conversion."""

    scheme: str  #: how the source encodes its experts
    layouts: tuple[str, ...]
    deployment: str  #: what it was converted for, in a phrase
    layers: str  #: numbers of the converted layers, as ranges
    experts: int  #: routed experts per converted layer (the largest number)
    packed: int  #: packed matrices that were unpacked again and compared with the source
    digests: int  #: digests recorded in the manifest, one per expert and projection
    digest: str  #: sha256 over all of them in order: one line that names the logical weights, whatever the layout
    losses: int  #: stored numbers that a lossy layout changed
    kept: int  #: source tensors kept verbatim for `moeq restore`
    copied: str  #: layers that were copied unchanged, as ranges; "none" where all were converted


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
    deployment = manifest.deployment
    gpu = deployment.get("gpu") or {}
    parts = [str(gpu.get("name", "any device"))]
    parts += [f"{name.upper()} {deployment[name]}" for name in ("tp", "ep") if deployment.get(name, 1) != 1]
    return ", ".join([*parts, str(deployment.get("dtype", "")), str(deployment.get("engine", ""))])


def render_summary(destination: str, plan: Plan, manifest: Manifest, seconds: float) -> str:
    """Write Markdown about a finished conversion, with names only: no folders of the machine that ran it."""
    facts = conversion_facts(manifest)
    # A path is of no use to readers of the page; its last part is.
    source = manifest.source.name if manifest.source.revision else PurePath(manifest.source.name).name
    revision = f", revision {manifest.source.revision}" if manifest.source.revision else ""
    rate = human_bytes(int(plan.bytes_out / max(seconds, 1e-3)))
    rows = [
        ("source", in_markdown(source + revision)),
        ("scheme", in_markdown(facts.scheme)),
        ("layout", in_markdown(f"{', '.join(facts.layouts)} for {manifest.backend}")),
        ("loads in", in_markdown(", ".join(manifest.loads_in) or "nothing yet")),
        ("deployment", in_markdown(facts.deployment)),
        ("layers", f"{facts.layers} ({facts.experts} experts each); copied unchanged: {facts.copied}"),
        (
            "bytes",
            f"experts {human_bytes(plan.expert_bytes_in)} → {human_bytes(plan.expert_bytes_out)}, "
            f"the rest {human_bytes(plan.rest_bytes)}",
        ),
        ("time", f"{human_seconds(seconds)}, {rate}/s written"),
        ("proof", proof(facts.packed, facts.losses)),
        ("digests", f"{facts.digests} recorded; sha256 of all: `{facts.digest[:16]}`"),
        ("plan", f"`{plan.digest[:16]}`"),
    ]
    return "\n".join([f"### moeq convert: {in_markdown(PurePath(destination).name)}", "", *table(rows), "", ""])


def proof(packed: int, losses: int) -> str:
    """Say in one sentence what was compared."""
    if losses:
        return f"{packed} packed matrices unpacked and compared; {losses} stored numbers changed, as was allowed"
    return f"{packed} of {packed} packed matrices unpacked again and equal to the source"


def render_failure(command: str, error: MoeqError) -> str:
    """Write Markdown about a failure."""
    rows = [("code", f"{in_code(error.code)}, exit code {int(error.exit_code)}"), ("what", _sentence(error.message))]
    rows += [("what helps", _sentence(error.hint))] if error.hint else []
    return "\n".join([f"### {command} failed", "", *table(rows), "", ""])


def table(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Write the lines of a Markdown table of two columns, whose cells are Markdown."""
    return ["| | |", "| --- | --- |", *(f"| {name} | {text} |" for name, text in rows)]


def _sentence(text: str) -> str:
    return in_markdown(" ".join(text.splitlines()))
