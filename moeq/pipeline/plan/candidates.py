"""Candidate layouts of a layer on a deployment, and the backends that really run there."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.layouts.registry import layout_class
from moeq.model import Checkpoint
from moeq.oracle.engines.moeq import is_fastest, report_of_layout
from moeq.oracle.engines.sglang.verdict import is_sglang
from moeq.oracle.loaders import Loader
from moeq.oracle.records import AS_IT_IS, CandidateReport, ConvertTarget, Reason, Sizes, Verdict
from moeq.oracle.versions import BUILTIN as OWN_ENGINE
from moeq.pipeline.plan.layer_verdict import heads_problem, judge_checkpoint, moe_shape
from moeq.pipeline.plan.options import Question
from moeq.schemes.base import Scheme
from moeq.spelling import option


@dataclass(frozen=True)
class LayoutChoice:
    """The layout that layers of one scheme get, and what loads it."""

    layout: str  #: layout id
    backend: str  #: backend whose kernel reads it; the layout's id if the engine has none for it
    flag: str | None = None  #: option to start the engine with, or None
    loaders: tuple[Loader, ...] = ()  #: loaders that take it
    why: str | None = None  #: why this is not the engine's own choice, or None
    overridden: tuple[str, ...] = ()  #: reasons against it that were overridden by force
    sizes: Sizes | None = None  #: sizes per rank
    rank_bytes: int = 0  #: bytes of a layer's experts on the fullest rank
    #: Which numbers are rounded because the layout cannot hold the stored ones (needs `--allow-lossy`), or None.
    rounding: str | None = None


def candidates(
    checkpoint: Checkpoint, question: Question, layer: int, scheme: Scheme | None, verdict: Verdict
) -> Iterator[LayoutChoice]:
    """Yield candidate layouts: what moeq's kernels read fastest, then the engine's choices in its order.

    Raises MoeqError if there is none.
    """
    heads = heads_problem(checkpoint, question.deployment)
    if question.options.layout is not None:
        yield _asked_layout(checkpoint, question, question.options.layout, layer, scheme, verdict)
        return
    if heads is not None:
        raise MoeqError("usage.tp", heads)
    forced = question.deployment.backend != "auto"
    fastest = _fastest(checkpoint, question.deployment, layer, scheme, verdict) if verdict.ok else None
    if fastest is not None and not forced:
        yield fastest
    if verdict.convert is not None:
        faster = fastest if forced else None
        instead = f"without {option('backend')}, {faster.layout} would be written: {faster.why}" if faster else None
        yield replace(_choice_of(verdict.convert), why=verdict.convert.why or instead)
    elif forced and not verdict.ok:
        unknown = verdict.error is not None and verdict.error.kind == "OVERRIDE_UNKNOWN"
        raise MoeqError("usage.unknown-backend" if unknown else "answer.backend-unsupported", verdict.refusal)
    elif forced or not verdict.ok:
        raise MoeqError("answer.no-backend", verdict.refusal)
    native = next((row for row in verdict.candidates if row.native and _is_chosen(row, verdict)), None)
    others = [row for row in verdict.candidates if row.supported and row.layout and row.flag]
    rows = [] if forced or native else others
    seen = {verdict.convert.layout} if verdict.convert else set()
    seen |= {fastest.layout} if fastest else set()
    for row in rows:
        if row.layout in seen:
            continue
        named = _judge_backend(checkpoint, question.deployment, layer, scheme, str(row.flag))
        if named.convert is not None and named.convert.layout not in seen:
            seen.add(named.convert.layout)
            flag = named.convert.flag or _flag(named, str(row.flag))
            yield replace(_choice_of(named.convert), flag=flag)
    as_it_is = next((row for row in verdict.candidates if row.as_it_is and _is_chosen(row, verdict)), None)
    if not seen and as_it_is is not None:
        raise MoeqError(
            "answer.nothing-to-convert",
            f"{question.deployment.engine} runs {as_it_is.backend} here: {AS_IT_IS}",
            f"serve it as it is; {option('backend')} asks for another kernel",
        )
    if not seen:
        raise MoeqError("answer.no-backend", verdict.refusal or f"nothing to convert to: {verdict.no_convert}")


def _fastest(
    checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None, verdict: Verdict
) -> LayoutChoice | None:
    """Return the layout of moeq's kernels if they are the fastest here, and the engine would choose another layout."""
    if deployment.engine == OWN_ENGINE or deployment.lora:
        return None  # layers with adapters run in moeq's kernels for any GPU, and inside SGLang not at all
    engine_layout = verdict.convert and verdict.convert.layout
    own = own_target(checkpoint, deployment, layer, scheme)
    if own is None or own.layout == engine_layout:
        return None
    if not is_fastest(scheme or checkpoint.scheme_of(layer), deployment, own.layout):
        return None
    why = f"moeq's kernels, which run inside the engine, are the fastest measured on {deployment.gpu.name}"
    chosen = next((row for row in verdict.candidates if _is_chosen(row, verdict)), None)
    if deployment.backend == "auto" and engine_layout and chosen is not None and chosen.flag:
        why += f"; {option('backend', chosen.flag)} writes for the engine's {chosen.backend}, which is slower there"
    return replace(_choice_of(own), why=why)


def own_target(
    checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None = None
) -> ConvertTarget | None:
    """Return the target of a conversion for moeq's own kernels, whatever the engine; None if none of them fits."""
    where = replace(deployment, engine=OWN_ENGINE, backend="auto", quantization=None)
    return judge_checkpoint(checkpoint, where, layer, scheme=scheme, explain=False).convert


def _is_chosen(row: CandidateReport, verdict: Verdict) -> bool:
    return verdict.chosen is not None and row.backend == verdict.chosen.backend


def _choice_of(target: ConvertTarget) -> LayoutChoice:
    return LayoutChoice(target.layout, target.backend, target.flag, why=target.why, sizes=target.sizes)


def _flag(verdict: Verdict, name: str) -> str | None:
    if verdict.engine == OWN_ENGINE:
        return None
    return f"{'--moe-runner-backend' if is_sglang(verdict.engine) else '--moe-backend'} {name}"


def _judge_backend(
    checkpoint: Checkpoint, deployment: Deployment, layer: int | None, scheme: Scheme | None, flag: str
) -> Verdict:
    return judge_checkpoint(checkpoint, replace(deployment, backend=flag), layer, scheme=scheme, explain=False)


def _asked_layout(
    checkpoint: Checkpoint, question: Question, layout: str, layer: int, scheme: Scheme | None, verdict: Verdict
) -> LayoutChoice:
    """Choose a layout that was asked for by id: a backend of the engine has to read it here, or force is needed.

    Raises MoeqError `usage.layout-backend` if another backend was asked for too, `usage.layout-gpu` if no backend of
    the engine reads it here.
    """
    deployment, options, asked = question.deployment, question.options, question.deployment.backend
    rows = [row for row in verdict.candidates if layout in (row.layout, row.lossy_layout)]
    if deployment.engine == OWN_ENGINE:  # its verdict has one row per backend, whatever the number of its layouts
        own_row = report_of_layout(
            scheme or checkpoint.scheme_of(layer), moe_shape(checkpoint, layer), deployment, layout
        )
        rows = [own_row] if own_row is not None else []
    if asked != "auto":
        own = verdict.convert.layout if verdict.convert else None
        own = own or next((layout for row in rows if row.flag == asked), None)
        if own != layout:
            reads = f"reads {own}" if own else "has no layout of its own here"
            raise MoeqError(
                "usage.layout-backend",
                f"{option('backend', asked)} with {option('layout', layout)}: {asked} {reads}",
                "name one of them: the layout follows from the backend",
            )
    if any(row.lossy_layout == layout for row in rows) and not (options.allow_lossy or options.force_layout):
        kind = layout_class(layout)
        raise MoeqError("answer.lossy", f"{layout} changes numbers: {kind.lossy}", kind.how_to_allow())
    against = [heads] if (heads := heads_problem(checkpoint, deployment)) else []
    reasons = []
    for row in rows:
        if row.supported and (_is_chosen(row, verdict) or deployment.engine == OWN_ENGINE):
            return _with_force(question, LayoutChoice(layout, row.backend), against)
        forced = _judge_backend(checkpoint, deployment, layer, scheme, row.flag) if row.flag else None
        if forced is not None and _reads(forced, row, layout):
            flag = (forced.convert and forced.convert.flag) or _flag(forced, str(row.flag))
            return _with_force(question, LayoutChoice(layout, row.backend, flag), against)
        texts = [reason.text for reason in row.reasons] or [forced.refusal if forced else "no option asks for it"]
        reasons.append(f"{row.backend}: {'; '.join(texts)}")
    nobody = f"no backend of {deployment.engine} reads {layout} for this checkpoint on {deployment.gpu.name}"
    detail = f": {' | '.join(reasons)}" if reasons else f" (it is for {layout_class(layout).arch})"
    against.append(nobody + detail)
    return _with_force(question, LayoutChoice(layout, rows[0].backend if rows else layout), against)


def _reads(verdict: Verdict, row: CandidateReport, layout: str) -> bool:
    """Return whether the engine, asked for a backend by name, runs it and its kernel reads a layout."""
    if row.lossy_layout == layout:
        return _is_chosen(row, verdict)
    return verdict.convert is not None and verdict.convert.layout == layout


def _with_force(question: Question, choice: LayoutChoice, against: list[str]) -> LayoutChoice:
    if against and not question.options.force_layout:
        raise MoeqError("usage.layout-gpu", "; ".join(against), f"{option('force_layout', True)} writes it anyway")
    return replace(choice, overridden=tuple(against))


def confirm_backends(
    checkpoint: Checkpoint, verdict: Verdict, layer: int | None = None, scheme: Scheme | None = None
) -> Verdict:
    """Return the verdict in which a backend works only if asking for it by name makes the engine run it."""
    rows = []
    for row in verdict.candidates:
        if row.supported and not _is_chosen(row, verdict):
            row = _try_backend(checkpoint, verdict.deployment, row, layer, scheme)
        rows.append(row)
    return replace(verdict, candidates=tuple(rows))


def _try_backend(
    checkpoint: Checkpoint, deployment: Deployment, row: CandidateReport, layer: int | None, scheme: Scheme | None
) -> CandidateReport:
    if row.flag is None:
        text = "the engine has no option that asks for it"
        return replace(row, supported=False, reasons=(Reason("G4", text),))
    found = _judge_backend(checkpoint, deployment, layer, scheme, row.flag)
    if found.chosen is not None and found.chosen.backend == row.backend:
        return row
    code = next((gate.code for gate in found.gates if not gate.passed), "G4")
    other = f"asking for it by name gives {found.chosen.backend}" if found.chosen else found.refusal
    return replace(row, supported=False, reasons=(Reason(code, other),))
