"""The nearest alternatives where the answer is no; each is tried before it is suggested."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.oracle.records import Verdict
from moeq.oracle.versions import BUILTIN as OWN_ENGINE
from moeq.pipeline.plan.candidates import Ask
from moeq.pipeline.plan.decide import Answer, answer, convertible_problem
from moeq.pipeline.plan.layer_verdict import first_layer, judge_checkpoint

#: Devices that are tried when nothing else helps.
_DEVICES = ("H100", "A100", "B200", "MI300X", "CPU")

#: Suggestions that are made at most.
MOST = 3


@dataclass(frozen=True)
class Suggestion:
    """One change that works.

    Attributes:
        text: the options that make it, as a user would type them, and what they mean.
        ask: the question with that change; its answer is yes.
    """

    text: str
    ask: Ask


def nearest(checkpoint: Checkpoint, ask: Ask) -> tuple[Suggestion, ...]:
    """The nearest changes whose answer is yes, at most one of a kind."""
    if convertible_problem(checkpoint) is not None:
        return ()
    works = (next(_working(checkpoint, kind), None) for kind in _kinds(checkpoint, ask))
    found = tuple(islice((change for change in works if change is not None), MOST))
    return found or tuple(islice(_working(checkpoint, _plainest(ask)), 1))


def _working(checkpoint: Checkpoint, changes: Iterator[Suggestion]) -> Iterator[Suggestion]:
    """Those whose answer is yes."""
    for change in changes:
        found = answer(checkpoint, change.ask, brief=True)
        if found.ok:
            yield replace(change, text=change.text.replace("{backend}", found.first.backend))


def decide(checkpoint: Checkpoint, deployment: Deployment) -> Verdict:
    """Which backend runs this checkpoint's experts on that deployment, what `convert` writes, and why.

    Raises:
        MoeqError: `usage.converted` for a converted checkpoint, `source.no-top-k` where the config does not say how
            many experts a token uses; for a backend asked for by name that does not fit, why not and what does.
    """
    if checkpoint.kind == "converted":
        raise MoeqError("usage.converted", f"{checkpoint.source.name} is already converted", "ask about its source")
    found = advised(checkpoint, Ask(deployment), explain=True)
    if found.error is not None and deployment.backend != "auto":
        raise found.error
    return found.verdict


def advised(checkpoint: Checkpoint, ask: Ask, *, explain: bool = False, brief: bool = False) -> Answer:
    """`answer`, with what works as the hint of its error."""
    found = answer(checkpoint, ask, explain=explain, brief=brief)
    return found if found.error is None else replace(found, error=_with_hint(checkpoint, ask, found.error))


def _with_hint(checkpoint: Checkpoint, ask: Ask, error: MoeqError) -> MoeqError:
    """The error with what works as its hint; with its own where nothing was found."""
    works = ", or ".join(suggestion.text for suggestion in nearest(checkpoint, ask))
    force = "; --force-layout writes it anyway" if error.code in ("usage.layout-gpu", "usage.layout-unread") else ""
    hint = f"{works} works{force}" if works else error.hint
    return MoeqError(error.code, error.message, hint)


def _kinds(checkpoint: Checkpoint, ask: Ask) -> Iterator[Iterator[Suggestion]]:
    """Kinds of changes, the least first: how it is asked for, how it is started, what is written, where it runs."""
    yield _unforced(ask)
    yield _parallel(checkpoint, ask)
    yield _regrouped(checkpoint, ask)
    yield _switches(ask)
    yield _skipping(ask)
    yield _engines(ask)
    yield _backends(checkpoint, ask)
    yield _devices(ask)


def _with(ask: Ask, text: str, **fields: object) -> Suggestion:
    return Suggestion(text, replace(ask, deployment=replace(ask.deployment, **fields)))  # type: ignore[arg-type]


def _unforced(ask: Ask) -> Iterator[Suggestion]:
    if ask.layout is not None:
        options = "--layout and --force-layout" if ask.force_layout else "--layout"
        yield Suggestion(f"leaving out {options}", replace(ask, layout=None, force_layout=False))
    if ask.deployment.backend != "auto":
        yield _with(ask, "--backend auto ({backend})", backend="auto")
        if ask.layout is not None:
            both = replace(ask, layout=None, force_layout=False, deployment=replace(ask.deployment, backend="auto"))
            yield Suggestion("leaving out --layout with --backend auto", both)


def _parallel(checkpoint: Checkpoint, ask: Ask) -> Iterator[Suggestion]:
    """Other sizes, the nearest first; expert parallelism, which leaves experts whole, after them."""
    tp, ep = ask.deployment.tp, ask.deployment.ep
    if ep > 1:
        experts = checkpoint.num_experts(first_layer(checkpoint))
        fewer = [size for size in range(min(ep, experts), 1, -1) if size % tp == 0 and size != ep]
        for size in fewer[:8]:
            yield _with(ask, f"--ep {size}", ep=size, dp=1)
        yield _with(ask, "--ep 1", ep=1, dp=1)
        return
    sizes = sorted((size for size in range(1, 2 * tp + 1) if size != tp), key=lambda size: (abs(size - tp), size))
    for size in [*sizes[:24], 1]:
        yield _with(ask, f"--tp {size}", tp=size)
    if tp > 1:
        yield _with(ask, f"--ep {tp} (whole experts on every rank)", ep=tp)


def _regrouped(checkpoint: Checkpoint, ask: Ask) -> Iterator[Suggestion]:
    group = checkpoint.scheme_of(first_layer(checkpoint)).group_size
    if ask.deployment.tp == 1 or ask.deployment.ep > 1:
        return
    for size in (64, 32, 16):
        if size < group:
            text = f"--regroup {size} (the same values, groups of {group} cut into groups of {size})"
            yield Suggestion(text, replace(ask, regroup=size))


def _switches(ask: Ask) -> Iterator[Suggestion]:
    deployment = ask.deployment
    other = "fp16" if deployment.dtype == "bf16" else "bf16"
    yield _with(ask, f"--dtype {other}", dtype=other)
    if deployment.lora:
        yield _with(ask, "--no-lora", lora=False)
    if deployment.eplb:
        yield _with(ask, "--no-eplb", eplb=False)
    if deployment.batched:
        yield _with(ask, "--standard", batched=False)
    if ask.regroup is not None:
        yield Suggestion("leaving out --regroup", replace(ask, regroup=None))


def _skipping(ask: Ask) -> Iterator[Suggestion]:
    if not ask.skip_unfit:
        yield Suggestion("--skip-unfit (copies the layers that do not fit)", replace(ask, skip_unfit=True))


def _engines(ask: Ask) -> Iterator[Suggestion]:
    if ask.deployment.engine != OWN_ENGINE:
        yield _with(ask, f"--engine {OWN_ENGINE} (moeq's own kernels)", engine=OWN_ENGINE)


def _backends(checkpoint: Checkpoint, ask: Ask) -> Iterator[Suggestion]:
    """Backends that only their name reaches."""
    if ask.deployment.backend == "auto" and ask.layout is None:
        for row in judge_checkpoint(checkpoint, ask.deployment, explain=False).candidates:
            if row.flag and row.layout:
                yield _with(ask, f"--backend {row.flag}", backend=row.flag)


def _devices(ask: Ask) -> Iterator[Suggestion]:
    for name in _DEVICES:
        if name != ask.deployment.gpu.name:
            yield _with(ask, f"--gpu {shlex.quote(name)}", gpu=parse_gpu(name))


def _plainest(ask: Ask) -> Iterator[Suggestion]:
    """One rank and nothing asked for: where a single change does not help."""
    plain = replace(ask, layout=None, force_layout=False, regroup=None)
    given = {
        "--layout": ask.layout is not None,
        "--force-layout": ask.force_layout,
        "--regroup": ask.regroup is not None,
    }
    options = " and ".join(name for name, asked in given.items() if asked)
    leaving = f"leaving out {options} and with " if options else ""
    fields = {"tp": 1, "ep": 1, "dp": 1, "backend": "auto", "lora": False, "batched": False}
    own = ask.deployment
    engines, names = dict.fromkeys((own.engine, OWN_ENGINE)), dict.fromkeys((own.gpu.name, *_DEVICES))
    for engine, name, dtype in product(engines, names, dict.fromkeys((own.dtype, "bf16", "fp16"))):
        gpu = own.gpu if name == own.gpu.name else parse_gpu(name)
        cast = f" --dtype {dtype}" if dtype != own.dtype else ""
        text = f"{leaving}--tp 1 --ep 1 --backend auto --gpu {shlex.quote(name)} --engine {engine}{cast}"
        yield _with(plain, text, gpu=gpu, engine=engine, dtype=dtype, **fields)
