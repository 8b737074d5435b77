"""The oracle's verdict for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from moeq.oracle.loaders import loads_in
from moeq.report.text import hanging, line

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.deploy.deployment import Deployment
    from moeq.oracle.records import CandidateReport
    from moeq.pipeline.plan.decide import Answer, LayerGroup


def render_answer(console: Console, answer: Answer, *, verbose: bool = False) -> None:
    """Print the engine's choice, what `convert` writes, what loads it, and why not the others."""
    render_part(console, answer, answer.parts[0], verbose=verbose)
    if answer.error is not None and answer.error.hint:
        line(console, "nearest", answer.error.hint)


def render_part(console: Console, answer: Answer, part: LayerGroup, *, verbose: bool = False) -> None:
    """Print the answer for layers that are encoded alike."""
    verdict = part.verdict
    where = deployment_text(verdict.deployment)
    if verdict.chosen:
        runs = f", runs as {verdict.runs_as}" if verdict.runs_as else ""
        text = Text.assemble((verdict.chosen.backend, "bold green"), f" ({verdict.chosen.experts}{runs})")
    else:
        text = Text.assemble(("no backend", "bold red"), f": {verdict.refusal}")
    line(console, "verdict", Text.assemble(f"{verdict.engine} on {where} → ", text))
    if part.choice is not None:
        line(console, "convert", f"writes {part.choice.layout} for {part.choice.backend}")
        if part.choice.why:
            line(console, "", part.choice.why)
        if part.choice.rounding:
            line(console, "", rounding_text(part.choice.rounding))
        line(console, "loads in", loads_in(part.choice.loaders))
    else:
        error = part.error or answer.error
        line(console, "convert", f"no: {error.message}" if error else "its layers are copied unchanged", "red")
    for advisory in verdict.advisories:
        line(console, "advisory", f"{advisory.code}: {advisory.symptom}", "yellow")
    others = [one for one in verdict.candidates if verdict.chosen is None or one.backend != verdict.chosen.backend]
    width = max((len(one.backend) for one in others), default=0)
    for one in others:
        row = Text(f"  {one.backend:<{width}}  {_reasons(one, verbose)}", style="dim")
        hanging(console, row, width + 4)


def rounding_text(rounding: str) -> str:
    """Say when `convert` will stop, as far as headers tell."""
    return f"only with --allow-lossy if there are any: {rounding}"


def deployment_text(deployment: Deployment) -> str:
    """Describe a deployment, as in `H100, TP 2, EP 8, batched, bf16`."""
    sizes = [
        f"{label} {size}"
        for label, size in (("TP", deployment.tp), ("EP", deployment.ep), ("DP", deployment.dp))
        if size != 1 or label == "TP"
    ]
    switches = [name for name in ("batched", "lora", "eplb") if getattr(deployment, name)]
    return ", ".join([deployment.gpu.name, *sizes, *switches, deployment.dtype])


def _reasons(candidate: CandidateReport, verbose: bool) -> str:
    if candidate.supported:
        nothing = "" if candidate.layout else f" (nothing to convert to: {candidate.no_layout})"
        return f"works too: --backend {candidate.flag}{nothing}"
    shown = candidate.reasons if verbose else candidate.reasons[:1]
    text = "; ".join(reason.text for reason in shown)
    if len(candidate.reasons) > len(shown):
        text += f" (+{len(candidate.reasons) - len(shown)} more)"
    return f"{text} → {candidate.unlock}" if candidate.unlock else text
