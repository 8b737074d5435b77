"""The one check: can this checkpoint be converted to this layout for this deployment, and what loads the result?

Every command asks here, so that what one promises the next one does. An answer is found by planning: every layer is
planned from its headers, for every layout that comes into question, by the code that plans the conversion.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from moeq.checkpoint.manifest import CopiedLayer
from moeq.deploy.deployment import Deployment
from moeq.deploy.loaders import VLLM_LAYOUTS, VLLM_VERSIONS, Loader, PlannedLayer, common, loaders_of
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout, layout_class
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint
from moeq.oracle.own import ENGINE as OWN_ENGINE
from moeq.oracle.own import report_of_layout
from moeq.oracle.policy import engine_names
from moeq.oracle.records import ConvertTarget, Sizes, Verdict
from moeq.pipeline.plan.decision import first_layer, heads_problem, is_quantised, judge, moe_shape
from moeq.pipeline.plan.layers import LayerPlan, PlanOptions, plan_layer
from moeq.schemes.base import Scheme
from moeq.schemes.registry import get_format


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
        overridden: what speaks against it and was overridden by force.
        sizes: sizes per rank.
    """

    layout: str
    backend: str
    flag: str | None = None
    loaders: tuple[Loader, ...] = ()
    why: str | None = None
    overridden: tuple[str, ...] = ()
    sizes: Sizes | None = None


@dataclass(frozen=True)
class Answer:
    """The answer.

    Attributes:
        ask: the question.
        verdict: the engine's view of the first quantised layer; its `convert` is what really would be written.
        targets: layer to what it becomes, for layers that are converted.
        copied: layers that are copied unchanged, with the reason.
        error: why nothing is converted, or None.
    """

    ask: Ask
    verdict: Verdict
    targets: Mapping[int, Target]
    copied: tuple[CopiedLayer, ...] = ()
    error: MoeqError | None = None

    @property
    def ok(self) -> bool:
        """Whether `convert` does it."""
        return self.error is None

    @property
    def first(self) -> Target:
        """What the first converted layer becomes."""
        return next(iter(self.targets.values()))

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """What loads all of the result."""
        return common([target.loaders for target in self.targets.values()])


def answer(checkpoint: Checkpoint, ask: Ask, *, explain: bool = False) -> Answer:
    """Ask about a source checkpoint. A no is an answer too.

    Args:
        checkpoint: the source.
        ask: what is asked.
        explain: also try what would unlock each backend (see `moeq.oracle.decide.judge`).

    Raises:
        MoeqError: `usage.unknown-layout`, `usage.unknown-engine`, `source.no-top-k`.
    """
    if ask.layout is not None:
        get_layout(ask.layout)
    first = first_layer(checkpoint)
    verdict = judge(checkpoint, ask.deployment, first, explain=explain)
    error = convertible_problem(checkpoint)
    if error is not None:
        return Answer(ask, replace(verdict, convert=None, no_convert=error.message), {}, error=error)
    targets: dict[int, Target] = {}
    copied: list[CopiedLayer] = []
    refused: dict[int, MoeqError] = {}
    for layers in alike(checkpoint).values():
        if not is_quantised(checkpoint, layers[0]):
            copied += [CopiedLayer(layer, "its experts are not quantised") for layer in layers]
            continue
        found = _target(checkpoint, ask, layers, verdict if first in layers else None)
        if isinstance(found, MoeqError):
            refused |= {layer: found for layer in layers}
        else:
            targets |= {layer: found for layer in layers}
    problem = refusal(refused, ask.skip_unfit, someone_fits=bool(targets)) if refused else None
    if problem is not None:
        return Answer(ask, replace(verdict, convert=None, no_convert=problem.message), {}, error=problem)
    copied += [CopiedLayer(layer, error.message) for layer, error in refused.items()]
    done = Answer(ask, verdict, dict(sorted(targets.items())), tuple(sorted(copied, key=lambda row: row.layer)))
    return replace(done, verdict=_as_written(verdict, done.targets.get(first)))


def convertible_problem(checkpoint: Checkpoint) -> MoeqError | None:
    """Why no layer of a checkpoint is ever converted, whatever the deployment; None where some are."""
    info = checkpoint.info
    quantised = [use for use in info.schemes if use.scheme.format != "unquantized"]
    if not quantised:
        return MoeqError(
            "answer.nothing-to-convert",
            f"{info.name}: the experts are not quantised",
            "there is nothing to repack: serve it as it is",
        )
    of_schemes = {use.refusal for use in info.schemes}
    general = [reason for reason in info.refusals if reason not in of_schemes]
    if not general and not all(use.refusal for use in quantised):
        return None
    reasons = dict.fromkeys([*general, *(use.refusal for use in quantised if use.refusal)])
    as_it_is = not general and all(get_format(use.scheme.format).read_as_it_is for use in quantised)
    code = "answer.nothing-to-convert" if as_it_is else "answer.not-convertible"
    return MoeqError(code, f"{info.name}: {'; '.join(reasons)}", "serve it as it is" if as_it_is else None)


def alike(checkpoint: Checkpoint) -> dict[object, list[int]]:
    """Layers that are encoded alike, by what they have in common: one answer is good for all of them."""
    found: dict[object, list[int]] = {}
    for layer in checkpoint.info.moe_layers:
        kinds = checkpoint.experts(layer).kinds()
        schemes = tuple(projection.scheme for group in kinds for projection in group.kind.projections.values())
        specs: tuple[MatrixSpec, ...] = tuple(group.kind.spec(role) for group in kinds for role in ("w13", "w2"))
        found.setdefault((schemes, specs, checkpoint.num_experts(layer)), []).append(layer)
    return found


def refusal(refused: Mapping[int, MoeqError], skip_unfit: bool, *, someone_fits: bool) -> MoeqError | None:
    """The first layer's error; where other layers fit, with how to go on without it. None where it is skipped."""
    if someone_fits and skip_unfit:
        return None
    error = next(iter(refused.values()))
    more = f" (and {len(refused) - 1} more layers)" if len(refused) > 1 and someone_fits else ""
    skip = "--skip-unfit copies it unchanged" if someone_fits else None
    hint = "; ".join(part for part in (error.hint, skip) if part and "--skip-unfit" not in (error.hint or ""))
    return MoeqError(error.code, error.message + more, hint or error.hint)


# ------------------------------------------------------------------------------------------------ one scheme


def _target(checkpoint: Checkpoint, ask: Ask, layers: list[int], known: Verdict | None) -> Target | MoeqError:
    """The best layout for layers that are alike, or why there is none."""
    layer = layers[0]
    scheme = checkpoint.scheme_of(layer)
    reason = get_format(scheme.format).refusal_of(scheme)
    if reason is not None:
        return MoeqError("answer.not-convertible", f"{scheme.title}: {reason}", "--skip-unfit copies such layers unchanged")
    written = _regrouped(scheme, ask.regroup)
    verdict = known
    if verdict is None or written is not None:
        verdict = judge(checkpoint, ask.deployment, layer, scheme=written, explain=False)
    try:
        candidates = list(_candidates(checkpoint, ask, layer, written, verdict))
    except MoeqError as error:
        return error
    fitting: list[Target] = []
    against: list[MoeqError] = []
    for candidate in candidates:
        try:
            plan = plan_layer(checkpoint, layer, candidate.layout, ask.options)
        except MoeqError as error:
            against.append(error)
        else:
            loaders = tuple(_loaders(checkpoint, ask, plan, written))
            fitting.append(replace(candidate, loaders=loaders, sizes=candidate.sizes or _sizes(plan, ask.options)))
    if not fitting:
        return against[0]
    best = min(fitting, key=lambda target: _preference(target, ask.deployment))  # the first of equals
    if best is fitting[0]:
        return replace(best, why="; ".join(filter(None, (best.why, *(error.message for error in against[:1])))) or None)
    passed = [target for target in fitting[: fitting.index(best)]]
    given_up = ", ".join(f"{target.backend} ({target.layout})" for target in passed)
    needs = "is loaded by" if any(target.loaders for target in passed) else "nothing loads"
    text = f"{given_up}: the engine prefers it, and {needs} "
    text += ", ".join(loader.title for loader in passed[0].loaders) + " alone" if passed[0].loaders else "that yet"
    return replace(best, why="; ".join(filter(None, (text, best.why))))


def _preference(target: Target, deployment: Deployment) -> int:
    """0 where the engine that was named loads it, 1 where something does, 2 where nothing does."""
    wanted = "load_experts" if deployment.engine == OWN_ENGINE else deployment.engine.partition("@")[0]
    names = {loader.name for loader in target.loaders}
    return 0 if wanted in names else 1 if names else 2


def _regrouped(scheme: Scheme, group: int | None) -> Scheme | None:
    """The scheme as it is written with other groups; None where it is written as it is."""
    if group is None or group == scheme.group_size:
        return None
    shape = (scheme.weight.scale.group_shape[0], group)
    return replace(scheme, weight=replace(scheme.weight, scale=replace(scheme.weight.scale, group_shape=shape)))


def _candidates(
    checkpoint: Checkpoint, ask: Ask, layer: int, scheme: Scheme | None, verdict: Verdict
) -> Iterator[Target]:
    """Layouts that come into question, the engine's own choice first. Raises MoeqError where there is none."""
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
    rows = [] if forced else [row for row in verdict.candidates if row.supported and row.layout and row.flag]
    seen = {verdict.convert.layout} if verdict.convert else set()
    for row in rows:
        if row.layout in seen:
            continue
        named = _forced(checkpoint, ask.deployment, layer, scheme, str(row.flag))
        if named.convert is not None and named.convert.layout not in seen:
            seen.add(named.convert.layout)
            flag = named.convert.flag or _flag(named, str(row.flag))
            yield replace(_named(named.convert), flag=flag)
    if not seen:
        raise MoeqError("answer.no-backend", verdict.refusal or f"nothing to convert to: {verdict.no_convert}")


def _named(target: ConvertTarget) -> Target:
    return Target(target.layout, target.backend, target.flag, why=target.why, sizes=target.sizes)


def _flag(verdict: Verdict, name: str) -> str | None:
    return None if verdict.engine == OWN_ENGINE else f"--moe-backend {name}"


def _forced(checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None, flag: str) -> Verdict:
    return judge(checkpoint, replace(deployment, backend=flag), layer, scheme=scheme, explain=False)


def _asked_layout(
    checkpoint: Checkpoint, ask: Ask, layer: int, scheme: Scheme | None, verdict: Verdict
) -> Target:
    """A layout asked for by id: the engine must have a backend that reads it here, or it takes force.

    Raises:
        MoeqError: `usage.layout-backend` where another backend was asked for too, `usage.layout-gpu` where nothing
            of the engine reads it here.
    """
    assert ask.layout is not None
    deployment, asked = ask.deployment, ask.deployment.backend
    rows = [row for row in verdict.candidates if row.layout == ask.layout]
    if deployment.engine == OWN_ENGINE:  # its verdict has one row per backend, whatever the number of its layouts
        own_row = report_of_layout(
            scheme or checkpoint.scheme_of(layer), moe_shape(checkpoint, layer), deployment, ask.layout
        )
        rows = [own_row] if own_row is not None else []
    if asked != "auto":
        own = verdict.convert or next((row for row in rows if row.flag == asked), None)
        if own is None or own.layout != ask.layout:
            reads = f"reads {own.layout}" if own is not None and own.layout else "has no layout of its own here"
            raise MoeqError(
                "usage.layout-backend",
                f"--backend {asked} with --layout {ask.layout}: {asked} {reads}",
                "name one of them: the layout follows from the backend",
            )
    against = [heads] if (heads := heads_problem(checkpoint, deployment)) else []
    reasons = []
    for row in rows:
        chosen = verdict.chosen is not None and row.backend == verdict.chosen.backend
        if row.supported and (chosen or deployment.engine == OWN_ENGINE):
            return _with_force(ask, Target(ask.layout, row.backend), against)
        forced = _forced(checkpoint, deployment, layer, scheme, row.flag) if row.flag else None
        if forced is not None and forced.convert is not None and forced.convert.layout == ask.layout:
            flag = forced.convert.flag or _flag(forced, str(row.flag))
            return _with_force(ask, Target(ask.layout, row.backend, flag), against)
        texts = [reason.text for reason in row.reasons] or [forced.refusal if forced else "it cannot be asked for"]
        reasons.append(f"{row.backend}: {'; '.join(texts)}")
    where = f"{deployment.gpu.name}"
    nobody = f"no backend of {deployment.engine} reads {ask.layout} for this checkpoint on {where}"
    detail = f": {' | '.join(reasons)}" if reasons else f" (it is for {layout_class(ask.layout).arch})"
    against.append(nobody + detail)
    return _with_force(ask, Target(ask.layout, rows[0].backend if rows else ask.layout), against)


def _with_force(ask: Ask, target: Target, against: list[str]) -> Target:
    if against and not ask.force_layout:
        raise MoeqError("usage.layout-gpu", "; ".join(against), "--force-layout writes it all the same")
    return replace(target, overridden=tuple(against))


def _loaders(checkpoint: Checkpoint, ask: Ask, plan: LayerPlan, scheme: Scheme | None) -> Iterator[Loader]:
    """What loads a planned layer."""
    layer, layout, deployment = plan.entry.layer, plan.entry.layout, ask.deployment
    return loaders_of(
        PlannedLayer(
            layout=layout,
            w13_order=layout_class(layout).w13_order,
            model_type=str(checkpoint.source.config.get("model_type", "")),
            activation=checkpoint.info.activation,
            dtype=deployment.dtype,
            platform=deployment.gpu.platform,
            tp=ask.options.tp,
            by_rank=bool(plan.entry.ranks),
            own_kernel=_own_kernel(checkpoint, deployment, layer, scheme, layout),
            vllm=tuple(_vllm_versions(checkpoint, deployment, layer, scheme, layout)),
        )
    )


def _own_kernel(
    checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None, layout: str
) -> bool:
    """Whether one of moeq's own kernels reads the layout on this GPU."""
    found = report_of_layout(scheme or checkpoint.scheme_of(layer), moe_shape(checkpoint, layer), deployment, layout)
    return found is not None and found.supported


def _vllm_versions(
    checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None, layout: str
) -> Iterator[str]:
    """Versions of vLLM that run the layout's backend on this deployment.

    A version whose rules are not known is taken to run what the newest one does; act-order is Marlin's everywhere.
    """
    if layout not in VLLM_LAYOUTS or heads_problem(checkpoint, replace(deployment, engine="vllm@" + VLLM_VERSIONS[0])):
        return
    backend, versions, _ = VLLM_LAYOUTS[layout]
    known = set(engine_names())
    for version in versions:
        engine = f"vllm@{version}" if f"vllm@{version}" in known else f"vllm@{VLLM_VERSIONS[0]}"
        if layout == "marlin-act-order/1" and engine != f"vllm@{version}":
            if deployment.gpu.platform == "cuda":
                yield version
            continue
        where = replace(deployment, engine=engine, backend=backend)
        if judge(checkpoint, where, layer, scheme=scheme, explain=False).ok:
            yield version


def _as_written(verdict: Verdict, target: Target | None) -> Verdict:
    """The verdict with what really is written."""
    if target is None or target.sizes is None:
        return replace(verdict, convert=None, no_convert="its first layers are copied unchanged")
    experts = next((row.experts for row in verdict.candidates if row.backend == target.backend), "")
    convert = ConvertTarget(target.backend, experts, target.layout, target.flag, target.sizes, target.why)
    return replace(verdict, convert=convert, no_convert=None)


def _sizes(plan: LayerPlan, options: PlanOptions) -> Sizes:
    """Sizes of one rank's experts as they are written, or sliced from what is written."""
    shard = max(plan.shards, key=lambda one: one.shard.intermediate.size)
    ranks = 1 if plan.entry.ranks else options.tp
    plain, padded = shard.padding.original_w2, shard.padding.w2
    experts = -(-plan.entry.num_experts // options.ep)
    return Sizes(plain.n, plain.k // ranks, padded.n, padded.k // ranks, experts)
