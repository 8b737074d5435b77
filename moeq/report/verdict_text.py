"""The oracle's verdict for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.deploy.deployment import Deployment
    from moeq.oracle.records import CandidateReport, Verdict


def render_summary(console: Console, verdict: Verdict, *, verbose: bool = False) -> None:
    """The engine's choice, what `convert` writes, and why not the others (all reasons with `verbose`)."""
    where = deployment_text(verdict.deployment)
    if verdict.chosen:
        runs = f", runs as {verdict.runs_as}" if verdict.runs_as else ""
        answer = Text.assemble((verdict.chosen.backend, "bold green"), f" ({verdict.chosen.experts}{runs})")
    else:
        answer = Text.assemble(("no backend", "bold red"), f": {verdict.refusal}")
    _line(console, "verdict", Text.assemble(f"{verdict.engine} on {where} → ", answer))
    if verdict.convert:
        _line(console, "convert", Text(f"writes {verdict.convert.layout} for {verdict.convert.backend}"))
        if verdict.convert.why:
            _line(console, "", Text(verdict.convert.why))
    elif verdict.refusal and verdict.chosen:
        _line(console, "convert", Text(verdict.refusal))
    if not verdict.ok and verdict.nearest:
        _line(console, "nearest", Text(verdict.nearest))
    for advisory in verdict.advisories:
        _line(console, "advisory", Text(f"{advisory.code}: {advisory.symptom}", style="yellow"))
    others = [one for one in verdict.candidates if one is not verdict.selected]
    width = max((len(one.backend) for one in others), default=0)
    for one in others:
        console.print(Text(f"  {one.backend:<{width}}  {_reasons(one, verbose)}", style="dim"))


def deployment_text(deployment: Deployment) -> str:
    """`H100, TP 2, EP 8, batched, bf16`."""
    sizes = [
        f"{label} {size}"
        for label, size in (("TP", deployment.tp), ("EP", deployment.ep), ("DP", deployment.dp))
        if size != 1 or label == "TP"
    ]
    switches = [name for name in ("batched", "lora", "eplb") if getattr(deployment, name)]
    return ", ".join([deployment.gpu.name, *sizes, *switches, deployment.dtype])


def _reasons(candidate: CandidateReport, verbose: bool) -> str:
    if candidate.supported:
        return "would work too, comes later in the engine's order"
    shown = candidate.reasons if verbose else candidate.reasons[:1]
    text = "; ".join(reason.text for reason in shown)
    if len(candidate.reasons) > len(shown):
        text += f" (+{len(candidate.reasons) - len(shown)} more)"
    return f"{text} → {candidate.unlock}" if candidate.unlock else text


def _line(console: Console, label: str, text: Text) -> None:
    console.print(Text.assemble((f"  {label:<10} ", "dim"), text))
