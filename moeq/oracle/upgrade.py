"""Changes of a verdict from version to version of an engine: backend, layout, flag, sizes, advisories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moeq.oracle.records import Verdict
from moeq.oracle.versions import version_range


@dataclass(frozen=True)
class VerdictDifference:
    """One fact in which a verdict differs from the verdict of the version before."""

    what: str  #: name of the fact: `backend`, `experts`, `layout`, `flag`, `sizes`, `refusal` or `advisories`
    before: str  #: value in the older version; empty for none
    after: str  #: value in the newer version; empty for none


@dataclass(frozen=True)
class VersionStep:
    """Verdict of one version of a range, and its differences from the version before."""

    engine: str
    verdict: Verdict
    differences: tuple[VerdictDifference, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document."""
        rows = [vars(row) for row in self.differences]
        return {"engine": self.engine, "ok": self.verdict.ok, **_facts(self.verdict), "changes": rows}


def _facts(verdict: Verdict) -> dict[str, str]:
    convert, sizes, chosen = verdict.convert, verdict.sizes, verdict.chosen
    return {
        "backend": chosen.backend if chosen else "",
        "experts": (chosen.experts or "") if chosen else "",
        "layout": convert.layout if convert else "",
        "flag": (convert.flag if convert else None) or "",
        "sizes": f"{sizes.padded_hidden} x {sizes.padded_intermediate}" if sizes and chosen else "",
        "refusal": "" if verdict.ok else verdict.refusal,
        "advisories": ", ".join(advisory.code for advisory in verdict.advisories),
    }


def steps(verdict_of: Callable[[str], Verdict], engines: str) -> list[VersionStep]:
    """Collect the verdicts of every known version of a range such as `vllm@0.26.0..0.33.0`, oldest first.

    Raises MoeqError `usage.engine-version`, `usage.unknown-engine`.
    """
    found: list[VersionStep] = []
    for name in version_range(engines):
        verdict = verdict_of(name)
        found.append(VersionStep(name, verdict, differences(found[-1].verdict, verdict) if found else ()))
    return found


def differences(before: Verdict, after: Verdict) -> tuple[VerdictDifference, ...]:
    """List the facts in which two verdicts differ."""
    old, new = _facts(before), _facts(after)
    return tuple(VerdictDifference(what, old[what], new[what]) for what in new if old[what] != new[what])


def table(found: Sequence[VersionStep]) -> tuple[list[str], list[list[str]]]:
    """Arrange steps as columns and rows for a terminal: one row per version."""
    rows = []
    for step in found:
        facts = _facts(step.verdict)
        changed = ", ".join(row.what for row in step.differences)
        rows.append(
            [step.engine, facts["backend"] or "-", facts["layout"], facts["flag"], facts["advisories"], changed]
        )
    return ["engine", "backend", "offline layout", "flag", "advisories", "changed"], rows
