"""Suggestions of the nearest changes if the answer is no; each is tried before it is suggested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from moeq.deploy.gpus import parse_gpu
from moeq.model import Checkpoint
from moeq.oracle.versions import BUILTIN as OWN_ENGINE
from moeq.pipeline.plan.layer_verdict import first_layer, judge_checkpoint
from moeq.pipeline.plan.options import Question
from moeq.spelling import option, together

#: Function that asks a question about the checkpoint: it returns the backend if the answer is yes, otherwise None.
Ask = Callable[[Question], str | None]

#: Devices that are tried if nothing else helps.
_DEVICES = ("H100", "A100", "B200", "MI300X", "CPU")

#: Largest number of suggestions.
MAX_SUGGESTIONS = 3


@dataclass(frozen=True)
class Suggestion:
    """One change that works."""

    text: str  #: options of the change, as a user would type them, and what they mean
    question: Question  #: the question with that change; its answer is yes


def nearest(checkpoint: Checkpoint, question: Question, ask: Ask) -> tuple[Suggestion, ...]:
    """Return the nearest changes whose answer is yes, at most one of each kind."""
    works = (next(_working(ask, kind), None) for kind in _kinds(checkpoint, question))
    found = tuple(islice((change for change in works if change is not None), MAX_SUGGESTIONS))
    return found or tuple(islice(_working(ask, _plainest(question)), 1))


def _working(ask: Ask, changes: Iterator[Suggestion]) -> Iterator[Suggestion]:
    """Yield the changes whose answer is yes, with the backend in their texts."""
    for change in changes:
        backend = ask(change.question)
        if backend is not None:
            yield replace(change, text=change.text.replace("{backend}", backend))


def _kinds(checkpoint: Checkpoint, question: Question) -> Iterator[Iterator[Suggestion]]:
    """Yield kinds of changes, the smallest first: to the request, the engine's start, the written bytes, the device."""
    yield _unforced(question)
    yield _parallel(checkpoint, question)
    yield _regrouped(checkpoint, question)
    yield _switches(question)
    if not question.options.skip_unfit:
        text = f"{option('skip_unfit', True)} (copies the layers that do not fit)"
        yield iter([Suggestion(text, question.with_options(skip_unfit=True))])
    if question.deployment.engine != OWN_ENGINE:
        text = f"{option('engine', OWN_ENGINE)} (moeq's own kernels)"
        yield iter([_with(question, text, engine=OWN_ENGINE)])
    yield _backends(checkpoint, question)
    others = (name for name in _DEVICES if name != question.deployment.gpu.name)
    yield (_with(question, option("gpu", name), gpu=parse_gpu(name)) for name in others)


def _with(question: Question, text: str, **fields: Any) -> Suggestion:
    return Suggestion(text, question.with_deployment(**fields))


def _unforced(question: Question) -> Iterator[Suggestion]:
    if question.options.layout is not None:
        force = f" and {option('force_layout')}" if question.options.force_layout else ""
        yield Suggestion(
            f"leaving out {option('layout')}{force}", question.with_options(layout=None, force_layout=False)
        )
    if question.deployment.backend != "auto":
        yield _with(question, f"{option('backend', 'auto')} ({{backend}})", backend="auto")
        if question.options.layout is not None:
            both = question.with_options(layout=None, force_layout=False).with_deployment(backend="auto")
            yield Suggestion(f"leaving out {option('layout')} with {option('backend', 'auto')}", both)


def _parallel(checkpoint: Checkpoint, question: Question) -> Iterator[Suggestion]:
    """Yield other sizes, the nearest first; then expert parallelism, which keeps experts whole."""
    tp, ep = question.deployment.tp, question.deployment.ep
    if ep > 1:
        experts = checkpoint.num_experts(first_layer(checkpoint))
        fewer = [size for size in range(min(ep, experts), 1, -1) if size % tp == 0 and size != ep]
        for size in fewer[:8]:
            yield _with(question, option("ep", size), ep=size, dp=1)
        yield _with(question, option("ep", 1), ep=1, dp=1)
        return
    sizes = sorted((size for size in range(1, 2 * tp + 1) if size != tp), key=lambda size: (abs(size - tp), size))
    for size in [*sizes[:24], 1]:
        yield _with(question, option("tp", size), tp=size)
    if tp > 1:
        yield _with(question, f"{option('ep', tp)} (whole experts on every rank)", ep=tp)


def _regrouped(checkpoint: Checkpoint, question: Question) -> Iterator[Suggestion]:
    group = checkpoint.scheme_of(first_layer(checkpoint)).group_size
    if question.deployment.tp == 1 or question.deployment.ep > 1:
        return
    for size in (64, 32, 16):
        if size < group:
            text = f"{option('regroup', size)} (the same values, groups of {group} cut into groups of {size})"
            yield Suggestion(text, question.with_options(regroup=size))


def _switches(question: Question) -> Iterator[Suggestion]:
    deployment = question.deployment
    other = "fp16" if deployment.dtype == "bf16" else "bf16"
    yield _with(question, option("dtype", other), dtype=other)
    if deployment.lora:
        yield _with(question, option("lora", False), lora=False)
    if deployment.eplb:
        yield _with(question, option("eplb", False), eplb=False, redundant_experts=0)
    if deployment.batched:
        yield _with(question, option("batched", False), batched=False)
    if question.options.regroup is not None:
        yield Suggestion(f"leaving out {option('regroup')}", question.with_options(regroup=None))


def _backends(checkpoint: Checkpoint, question: Question) -> Iterator[Suggestion]:
    """Yield the backends that an engine takes only by name."""
    if question.deployment.backend == "auto" and question.options.layout is None:
        for row in judge_checkpoint(checkpoint, question.deployment, explain=False).candidates:
            if row.flag and row.layout:
                yield _with(question, option("backend", row.flag), backend=row.flag)


def _plainest(question: Question) -> Iterator[Suggestion]:
    """Yield questions for one rank without any option, which are tried if no single change helps."""
    plain = question.with_options(layout=None, force_layout=False, regroup=None)
    given = {
        option("layout"): question.options.layout is not None,
        option("force_layout"): question.options.force_layout,
        option("regroup"): question.options.regroup is not None,
    }
    options = " and ".join(name for name, asked in given.items() if asked)
    leaving = [f"leaving out {options}"] if options else []
    fields = {"tp": 1, "ep": 1, "dp": 1, "backend": "auto", "lora": False, "batched": False}
    own = question.deployment
    engines, names = dict.fromkeys((own.engine, OWN_ENGINE)), dict.fromkeys((own.gpu.name, *_DEVICES))
    for engine, name, dtype in product(engines, names, dict.fromkeys((own.dtype, "bf16", "fp16"))):
        gpu = own.gpu if name == own.gpu.name else parse_gpu(name)
        asked: dict[str, Any] = {**fields, "gpu": gpu, "engine": engine, "dtype": dtype}
        changed = {field: value for field, value in asked.items() if value != getattr(own, field)}
        with_others = together(option(field, getattr(value, "name", value)) for field, value in changed.items())
        yield _with(plain, " and with ".join([*leaving, *filter(None, [with_others])]), **asked)
