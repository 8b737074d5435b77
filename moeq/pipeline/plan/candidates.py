"""Candidate layouts of a layer on a deployment, and which backends really work there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.layouts.registry import layout_class
from moeq.model import Checkpoint
from moeq.oracle.engines.moeq import report_of_layout
from moeq.oracle.engines.sglang.verdict import is_sglang
from moeq.oracle.loaders import Loader
from moeq.oracle.records import AS_IT_IS, CandidateReport, ConvertTarget, Reason, Sizes, Verdict
from moeq.oracle.versions import BUILTIN as OWN_ENGINE
from moeq.pipeline.plan.layer_plan import PlanOptions
from moeq.pipeline.plan.layer_verdict import heads_problem, judge_checkpoint, moe_shape
from moeq.schemes.base import Scheme


@dataclass(frozen=True)
class Ask:
    """What is asked about a checkpoint.

    Attributes:
        deployment: where it is to run.
        layout: a layout asked for by id, or None for what fits best.
        force_layout: write it although the engine would not run it here.
        skip_unfit: copy layers that cannot be converted instead of refusing.
        allow_lossy: allow layouts that change stored numbers.
        regroup: weights per scale to write instead of the source's.
    """

    deployment: Deployment
    layout: str | None = None
    force_layout: bool = False
    skip_unfit: bool = False
    allow_lossy: bool = False
    regroup: int | None = None

    @property
    def options(self) -> PlanOptions:
        """What the plan depends on."""
        # Expert parallelism takes the ranks of tensor parallelism for itself: experts are whole then.
        tp = 1 if self.deployment.ep > 1 else self.deployment.tp
        return PlanOptions(tp, self.deployment.ep, self.skip_unfit, self.allow_lossy, self.regroup)


@dataclass(frozen=True)
class Target:
    """What one scheme of a checkpoint becomes.

    Attributes:
        layout: layout id.
        backend: backend whose kernel reads it; the layout's id where the engine has none for it.
        flag: what to start the engine with, or None.
        loaders: what loads it.
        why: why it is not the engine's own choice, or None.
        rounding: what is rounded where stored values do not fit, which takes `--allow-lossy`; None where all fit.
        overridden: what speaks against it and was overridden by force.
        sizes: sizes per rank.
        rank_bytes: bytes of a layer's experts on the fullest rank.
    """

    layout: str
    backend: str
    flag: str | None = None
    loaders: tuple[Loader, ...] = ()
    why: str | None = None
    overridden: tuple[str, ...] = ()
    sizes: Sizes | None = None
    rank_bytes: int = 0
    rounding: str | None = None


def candidates(
    checkpoint: Checkpoint, ask: Ask, layer: int, scheme: Scheme | None, verdict: Verdict
) -> Iterator[Target]:
    """Candidate layouts, the engine's own choice first. Raises MoeqError where there is none."""
    heads = heads_problem(checkpoint, ask.deployment)
    if ask.layout is not None:
        yield _asked_layout(checkpoint, ask, layer, scheme, verdict)
        return
    if heads is not None:
        raise MoeqError("usage.tp", heads)
    forced = ask.deployment.backend != "auto"
    if verdict.convert is not None:
        yield _named(verdict.convert)
    elif forced and not verdict.ok:
        unknown = verdict.error is not None and verdict.error.kind == "OVERRIDE_UNKNOWN"
        raise MoeqError("usage.unknown-backend" if unknown else "answer.backend-unsupported", verdict.refusal)
    elif forced or not verdict.ok:
        raise MoeqError("answer.no-backend", verdict.refusal)
    native = next((row for row in verdict.candidates if row.native and _is_chosen(row, verdict)), None)
    rows = [] if forced or native else [row for row in verdict.candidates if row.supported and row.layout and row.flag]
    seen = {verdict.convert.layout} if verdict.convert else set()
    for row in rows:
        if row.layout in seen:
            continue
        named = _forced(checkpoint, ask.deployment, layer, scheme, str(row.flag))
        if named.convert is not None and named.convert.layout not in seen:
            seen.add(named.convert.layout)
            flag = named.convert.flag or _flag(named, str(row.flag))
            yield replace(_named(named.convert), flag=flag)
    as_it_is = next((row for row in verdict.candidates if row.as_it_is and _is_chosen(row, verdict)), None)
    if not seen and as_it_is is not None:
        raise MoeqError(
            "answer.nothing-to-convert",
            f"{ask.deployment.engine} runs {as_it_is.backend} here: {AS_IT_IS}",
            "serve it as it is; --backend asks for another kernel",
        )
    if not seen:
        raise MoeqError("answer.no-backend", verdict.refusal or f"nothing to convert to: {verdict.no_convert}")


def _is_chosen(row: CandidateReport, verdict: Verdict) -> bool:
    return verdict.chosen is not None and row.backend == verdict.chosen.backend


def _named(target: ConvertTarget) -> Target:
    return Target(target.layout, target.backend, target.flag, why=target.why, sizes=target.sizes)


def _flag(verdict: Verdict, name: str) -> str | None:
    if verdict.engine == OWN_ENGINE:
        return None
    return f"{'--moe-runner-backend' if is_sglang(verdict.engine) else '--moe-backend'} {name}"


def _forced(
    checkpoint: Checkpoint, deployment: Deployment, layer: int | None, scheme: Scheme | None, flag: str
) -> Verdict:
    return judge_checkpoint(checkpoint, replace(deployment, backend=flag), layer, scheme=scheme, explain=False)


def _asked_layout(checkpoint: Checkpoint, ask: Ask, layer: int, scheme: Scheme | None, verdict: Verdict) -> Target:
    """A layout asked for by id: the engine must have a backend that reads it here, or it takes force.

    Raises:
        MoeqError: `usage.layout-backend` where another backend was asked for too, `usage.layout-gpu` where nothing
            of the engine reads it here.
    """
    assert ask.layout is not None
    deployment, asked = ask.deployment, ask.deployment.backend
    rows = [row for row in verdict.candidates if ask.layout in (row.layout, row.lossy_layout)]
    if deployment.engine == OWN_ENGINE:  # its verdict has one row per backend, whatever the number of its layouts
        own_row = report_of_layout(
            scheme or checkpoint.scheme_of(layer), moe_shape(checkpoint, layer), deployment, ask.layout
        )
        rows = [own_row] if own_row is not None else []
    if asked != "auto":
        own = verdict.convert.layout if verdict.convert else None
        own = own or next((ask.layout for row in rows if row.flag == asked), None)
        if own != ask.layout:
            reads = f"reads {own}" if own else "has no layout of its own here"
            raise MoeqError(
                "usage.layout-backend",
                f"--backend {asked} with --layout {ask.layout}: {asked} {reads}",
                "name one of them: the layout follows from the backend",
            )
    if any(row.lossy_layout == ask.layout for row in rows) and not (ask.allow_lossy or ask.force_layout):
        kind = layout_class(ask.layout)
        raise MoeqError("usage.lossy", f"{ask.layout} changes numbers: {kind.lossy}", kind.how_to_allow())
    against = [heads] if (heads := heads_problem(checkpoint, deployment)) else []
    reasons = []
    for row in rows:
        chosen = verdict.chosen is not None and row.backend == verdict.chosen.backend
        if row.supported and (chosen or deployment.engine == OWN_ENGINE):
            return _with_force(ask, Target(ask.layout, row.backend), against)
        forced = _forced(checkpoint, deployment, layer, scheme, row.flag) if row.flag else None
        if forced is not None and _reads(forced, row, ask.layout):
            flag = (forced.convert and forced.convert.flag) or _flag(forced, str(row.flag))
            return _with_force(ask, Target(ask.layout, row.backend, flag), against)
        texts = [reason.text for reason in row.reasons] or [forced.refusal if forced else "it cannot be asked for"]
        reasons.append(f"{row.backend}: {'; '.join(texts)}")
    where = f"{deployment.gpu.name}"
    nobody = f"no backend of {deployment.engine} reads {ask.layout} for this checkpoint on {where}"
    detail = f": {' | '.join(reasons)}" if reasons else f" (it is for {layout_class(ask.layout).arch})"
    against.append(nobody + detail)
    return _with_force(ask, Target(ask.layout, rows[0].backend if rows else ask.layout), against)


def _reads(verdict: Verdict, row: CandidateReport, layout: str) -> bool:
    """Whether the engine, asked for a backend by name, runs it and its kernel reads a layout."""
    if row.lossy_layout == layout:
        return _is_chosen(row, verdict)
    return verdict.convert is not None and verdict.convert.layout == layout


def _with_force(ask: Ask, target: Target, against: list[str]) -> Target:
    if against and not ask.force_layout:
        raise MoeqError("usage.layout-gpu", "; ".join(against), "--force-layout writes it anyway")
    return replace(target, overridden=tuple(against))


def tried(checkpoint: Checkpoint, verdict: Verdict, layer: int | None = None, scheme: Scheme | None = None) -> Verdict:
    """The verdict in which backends count as working only if asking for them by name makes the engine run them."""
    rows = []
    for row in verdict.candidates:
        if row.supported and not (verdict.chosen and row.backend == verdict.chosen.backend):
            row = _tried(checkpoint, verdict.deployment, row, layer, scheme)
        rows.append(row)
    return replace(verdict, candidates=tuple(rows))


def _tried(
    checkpoint: Checkpoint, deployment: Deployment, row: CandidateReport, layer: int | None, scheme: Scheme | None
) -> CandidateReport:
    if row.flag is None:
        text = "the engine has no option that asks for it"
        return replace(row, supported=False, reasons=(Reason("G4", text),))
    found = _forced(checkpoint, deployment, layer, scheme, row.flag)
    if found.chosen is not None and found.chosen.backend == row.backend:
        return row
    code = next((gate.code for gate in found.gates if not gate.passed), "G4")
    other = f"asking for it by name gives {found.chosen.backend}" if found.chosen else found.refusal
    return replace(row, supported=False, reasons=(Reason(code, other),))
