"""Verdicts and rankings of backends for a terminal."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from moeq.oracle.loaders import loads_in
from moeq.oracle.ranking import DECODE, PREFILL, RankedBackend, Ranking
from moeq.report.text import line, print_hanging
from moeq.spelling import option

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.deploy.deployment import Deployment
    from moeq.oracle.records import CandidateReport, Verdict
    from moeq.pipeline.plan.decide import Answer, LayerGroup


def answer_text(verdict: Verdict) -> Text:
    """Say in one line what the engine runs: `H100, TP 1: vLLM 0.33.0 runs MARLIN (W4A16)`."""
    where, engine = deployment_text(verdict.deployment), engine_text(verdict.engine)
    if verdict.chosen is None and not verdict.known:
        return Text.assemble(f"{where}: what {engine} runs is ", ("not known", "bold yellow"), f": {verdict.refusal}")
    if verdict.chosen is None:
        return Text.assemble(f"{where}: {engine} has ", ("no backend", "bold red"), f": {verdict.refusal}")
    runs = f" ({verdict.runs_as})" if verdict.runs_as else ""
    return Text.assemble(f"{where}: {engine} runs ", (verdict.chosen.backend, "bold green"), runs)


def engine_text(engine: str) -> str:
    """Name an engine for people: `vLLM 0.33.0` for `vllm@0.33.0`."""
    name, _, version = engine.partition("@")
    return f"{_ENGINES.get(name, name)} {version}".rstrip()


def render_part(console: Console, answer: Answer, part: LayerGroup, *, verbose: bool) -> None:
    """Print the verdict for layers that are encoded alike, what `convert` writes, and why not the other backends."""
    verdict = part.verdict
    where = deployment_text(verdict.deployment)
    if verdict.chosen:
        runs = f", runs as {verdict.runs_as}" if verdict.runs_as else ""
        text = Text.assemble((verdict.chosen.backend, "bold green"), f" ({verdict.chosen.experts}{runs})")
    else:
        word = ("no backend", "bold red") if verdict.known else ("not known", "bold yellow")
        text = Text.assemble(word, f": {verdict.refusal}")
    line(console, "verdict", Text.assemble(f"{verdict.engine} on {where} → ", text))
    render_conversion(console, answer, part)
    render_candidates(console, verdict, verbose=verbose)


def render_conversion(console: Console, answer: Answer, part: LayerGroup) -> None:
    """Print what `convert` writes, what loads it, and known defects."""
    if part.choice is not None:
        line(console, "convert", f"writes {part.choice.layout} for {part.choice.backend}")
        if part.choice.why:
            line(console, "", part.choice.why)
        if part.choice.rounding:
            line(console, "", rounding_text(part.choice.rounding))
        line(console, "loads in", loads_in(part.choice.loaders))
    else:
        error = part.error or answer.error
        is_same_reason = error is not None and error.message == part.verdict.refusal  # by the verdict, a line above
        refused = "no, for the same reason" if is_same_reason else f"no: {error.message}" if error else None
        line(console, "convert", refused or "its layers are copied unchanged", "red")
    for advisory in part.verdict.advisories:
        line(console, "advisory", f"{advisory.code}: {advisory.symptom}", "yellow")


def render_candidates(console: Console, verdict: Verdict, *, verbose: bool = False, near: bool = False) -> None:
    """Print the backends that were not chosen, with their reasons.

    Args:
        verbose: whether every reason is printed, not only the first.
        near: whether only backends are printed that work on this device, or are one change away; others are counted.
    """
    others = [one for one in verdict.candidates if verdict.chosen is None or one.backend != verdict.chosen.backend]
    elsewhere = [one for one in others if any(str(row.remedy).startswith(_OTHER_DEVICE) for row in one.reasons)]
    far = [one for one in others if not one.supported and one.unlock is None and one not in elsewhere]
    shown = [one for one in others if not near or (one not in elsewhere and one not in far)]
    shared = _shared_reasons(shown)
    rows = [("all of these", "; ".join(shared))] if shared else []
    texts = {one.backend: reasons_text(one, verbose, shared, converted="G12" in verdict.failed_gates) for one in shown}
    rows += [(name, text) for name, text in texts.items() if text]
    bare = [name for name, text in texts.items() if not text]
    rows += [("only that", ", ".join(bare))] if bare else []
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        print_hanging(console, Text(f"  {name:<{width}}  {text}", style="dim"), width + 4)
    counts = [f"{len(elsewhere)} for other devices"] if elsewhere else []
    counts += [f"{len(far)} more than one change away"] if far else []
    if near and counts:
        print_hanging(console, Text(f"  {', '.join(counts)}: -v lists them", style="dim"), 2)


def _shared_reasons(candidates: Sequence[CandidateReport]) -> tuple[str, ...]:
    """Return the reasons that stand against every one of several backends, in order."""
    if len(candidates) < 2 or any(one.supported for one in candidates):
        return ()
    texts = [{reason.text for reason in one.reasons} for one in candidates]
    return tuple(dict.fromkeys(r.text for r in candidates[0].reasons if all(r.text in others for others in texts)))


#: Names of engines for people.
_ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "moeq": "moeq"}

#: Beginning of a remedy that no option on this machine gives.
_OTHER_DEVICE = "a device of kind"


def rounding_text(rounding: str) -> str:
    """Say when `convert` will stop, as far as headers tell."""
    return f"only with {option('allow_lossy', True)} if there are any: {rounding}"


def deployment_text(deployment: Deployment) -> str:
    """Describe a deployment, as in `H100, TP 2, EP 8, batched, bf16`."""
    ranks = {"TP": deployment.tp, "EP": deployment.ep, "DP": deployment.dp, "PCP": deployment.pcp}
    sizes = [f"{label} {size}" for label, size in ranks.items() if size != 1 or label == "TP"]
    switches = [name for name in ("batched", "lora", "eplb") if getattr(deployment, name)]
    return ", ".join([deployment.gpu.name, *sizes, *switches, deployment.dtype])


def reasons_text(
    candidate: CandidateReport, verbose: bool = True, told: Collection[str] = (), *, converted: bool = False
) -> str:
    """Say that a backend works too, or why not (without the reasons in `told`), and what would make it work.

    Where the engine does not load the source's names, it works with what `moeq convert` writes (`converted`).
    """
    if candidate.supported:
        remark = "" if candidate.layout else f" (nothing to convert to: {candidate.no_layout})"
        how = option("backend", candidate.flag) if candidate.flag else f"without {option('backend')}"
        return f"works {'converted' if converted else 'too'}: {how}{remark}"
    reasons = [reason.text for reason in candidate.reasons if reason.text not in told]
    shown = reasons if verbose else reasons[:1]
    text = "; ".join(shown)
    if len(reasons) > len(shown):
        text += f" (+{len(reasons) - len(shown)} more: -v)"
    return f"{text} → {candidate.unlock}".lstrip() if candidate.unlock else text


_PHASES = {"decode": "decoding", "prefill": "prefill"}


def ranking_line(ranking: Ranking) -> str:
    """Return the fastest backend for decoding and for prefill, or why there is no ranking."""
    if ranking.reason:
        return f"no ranking: {ranking.reason}"
    phases = [f"{title} {_leader(ranking.fastest(phase), phase)}" for phase, title in _PHASES.items()]
    return "; ".join(phases)


def _leader(ranks: list[RankedBackend], phase: str) -> str:
    first, *others = ranks
    if not others:
        return f"{first.backend}, the only one that was measured"
    runner_up = others[0]
    times_slower = float(getattr(runner_up, phase))
    tied = "" if times_slower - 1 > max(first.median, runner_up.median) else ", within the error"
    return f"{first.backend}, {times_slower:.2f} x as fast as {runner_up.backend}{tied}"


def render_ranking(console: Console, ranking: Ranking) -> None:
    """Print the ranking, microseconds of a layer by tokens, and what the estimates rest on."""
    from rich.table import Table

    line(console, "fastest", ranking_line(ranking))
    if ranking.ranks:
        title = f"microseconds of one layer on one rank by tokens of a call, {ranking.gpu}, {ranking.format}"
        table = Table(title=title, title_justify="left")
        for column in ("backend", *map(str, (*DECODE, *PREFILL)), "error, median / 90 %", "measured"):
            table.add_column(column, overflow="fold", justify="left" if column == "backend" else "right")
        for row in ranking.ranks:
            times = [f"{us:.0f}" for us in row.microseconds.values()]
            error = f"{row.median:.0%} / {row.p90:.0%}"
            table.add_row(row.backend, *times, error, f"{row.cells} calls, {row.layers} layers")
        console.print(table)
        rule = (
            f"one layer left out at a time: the fastest was named in {ranking.right} of {ranking.compared} calls, "
            f"{ranking.regret:.1%} of time lost on average; communication between ranks is not in it"
        )
        line(console, "validated", rule)
        versions = "; ".join(f"{row.backend} {row.versions or 'version not recorded'}" for row in ranking.ranks)
        line(console, "versions", versions)
    for note in ranking.notes:
        line(console, "note", note)
    if ranking.unmeasured and not ranking.reason:
        line(console, "no times", f"{', '.join(ranking.unmeasured)}: eligible, not measured here, not ranked")
