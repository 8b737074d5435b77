"""The page that GitHub shows for a finished job: what was converted, and how it is known to be right."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from moeq.foreign import in_code, in_markdown
from moeq.report.conversion_facts import conversion_facts
from moeq.report.text import human_bytes, human_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moeq.checkpoint.manifest import Manifest
    from moeq.errors import MoeqError
    from moeq.pipeline.plan.conversion_plan import Plan


def render(destination: str, plan: Plan, manifest: Manifest, seconds: float) -> str:
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
        ("digests", f"{facts.digests} recorded, all of them: `{facts.digest[:16]}`"),
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
