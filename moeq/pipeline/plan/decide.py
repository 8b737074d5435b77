"""The one check: can this checkpoint be converted to this layout for this deployment, and what loads the result?

Every command asks here, so that what one promises the next one does. An answer is found by planning: every layer is
planned from its headers, for every layout that comes into question, by the code that plans the conversion.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moeq.checkpoint.manifest import CopiedLayer
from moeq.checkpoint.writer import tensor_bytes
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout, layout_class
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint
from moeq.oracle.loaders import Loader, common
from moeq.oracle.records import ConvertTarget, Sizes, Verdict
from moeq.oracle.versions import BUILTIN as OWN_ENGINE
from moeq.pipeline.plan.candidates import Ask, Target, candidates, tried
from moeq.pipeline.plan.expert_names import with_names
from moeq.pipeline.plan.layer_loaders import loaders_of_plan
from moeq.pipeline.plan.layer_plan import LayerPlan, PlanOptions, plan_layer
from moeq.pipeline.plan.layer_verdict import first_layer, is_quantised, judge_checkpoint
from moeq.schemes.base import Scheme
from moeq.schemes.registry import get_format


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are encoded alike.

    Attributes:
        layers: their numbers.
        verdict: the engine's view of them; its `convert` is what really would be written.
        target: what they become, or None where they are not converted.
        error: why not, or None.
    """

    layers: tuple[int, ...]
    verdict: Verdict
    target: Target | None
    error: MoeqError | None = None


@dataclass(frozen=True)
class Answer:
    """Whether a source checkpoint can be converted, to what, and why not.

    Attributes:
        ask: the question.
        parts: the quantised layers, those of the first one first.
        copied: layers that are copied unchanged, with the reason.
        error: why nothing is converted, or None.
    """

    ask: Ask
    parts: tuple[LayerGroup, ...]
    copied: tuple[CopiedLayer, ...] = ()
    error: MoeqError | None = None

    @property
    def verdict(self) -> Verdict:
        """The engine's view of the first quantised layer."""
        return self.parts[0].verdict

    @property
    def targets(self) -> dict[int, Target]:
        """Layer to what it becomes, for layers that are converted."""
        return dict(sorted((layer, part.target) for part in self.parts if part.target for layer in part.layers))

    @property
    def ok(self) -> bool:
        """Whether `convert` does it."""
        return self.error is None

    @property
    def first(self) -> Target:
        """What the first converted layer becomes."""
        return next(iter(self.targets.values()))

    @property
    def rank_bytes(self) -> int:
        """Bytes of packed experts on the fullest rank, over all converted layers."""
        return sum(target.rank_bytes for target in self.targets.values())

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """What loads all of the result."""
        return common([target.loaders for target in self.targets.values()])


def answer(checkpoint: Checkpoint, ask: Ask, *, explain: bool = False, brief: bool = False) -> Answer:
    """Whether a source checkpoint can be converted as asked. A refusal is returned in the answer, not raised.

    Args:
        checkpoint: the source.
        ask: what is asked.
        explain: also try what would make each backend work (see `moeq.oracle.judge.judge`).
        brief: only yes or no matters: do not try the backends that the engine would not choose.

    Raises:
        MoeqError: `usage.unknown-layout`, `usage.unknown-engine`, `source.no-top-k`.
    """
    if ask.layout is not None:
        get_layout(ask.layout)
    first = first_layer(checkpoint)
    error = convertible_problem(checkpoint)
    groups = sorted(group_alike_layers(checkpoint).values(), key=lambda layers: first not in layers)
    copied: list[CopiedLayer] = []
    parts: list[LayerGroup] = []
    for layers in groups:
        if not is_quantised(checkpoint, layers[0]) and layers is not groups[0]:
            copied += [CopiedLayer(layer, "its experts are not quantised") for layer in layers]
            continue
        written = _regrouped(checkpoint.scheme_of(layers[0]), ask.regroup)
        verdict = judge_checkpoint(checkpoint, ask.deployment, layers[0], scheme=written, explain=explain)
        found = error or _target(checkpoint, ask, layers[0], written, verdict)
        verdict = verdict if brief else tried(checkpoint, verdict, layers[0], written)
        parts.append(_part(layers, with_names(checkpoint, verdict, layers[0]), found))
    refused = {layer: part.error for part in parts for layer in part.layers if part.error}
    if refused:
        someone_fits = len(refused) < sum(len(part.layers) for part in parts)
        problem = refusal(dict(sorted(refused.items())), ask.skip_unfit, someone_fits=someone_fits)
        if problem is not None:
            return Answer(ask, tuple(_withdrawn(part, problem) for part in parts), error=problem)
        copied += [CopiedLayer(layer, error.message) for layer, error in refused.items()]
    return Answer(ask, tuple(parts), tuple(sorted(copied, key=lambda row: row.layer)))


def _part(layers: list[int], verdict: Verdict, found: Target | MoeqError) -> LayerGroup:
    """What was found, and the verdict with what really is written."""
    if isinstance(found, MoeqError):
        return LayerGroup(tuple(layers), replace(verdict, convert=None, no_convert=found.message), None, found)
    assert found.sizes is not None  # it was planned
    experts = next((row.experts for row in verdict.candidates if row.backend == found.backend), "")
    convert = ConvertTarget(found.backend, experts, found.layout, found.flag, found.sizes, found.why, found.rounding)
    return LayerGroup(tuple(layers), replace(verdict, convert=convert, no_convert=None), found)


def _withdrawn(part: LayerGroup, problem: MoeqError) -> LayerGroup:
    """Layers that fit, in a checkpoint that is refused for others."""
    if part.target is None:
        return part
    return replace(part, target=None, verdict=replace(part.verdict, convert=None, no_convert=problem.message))


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
    return MoeqError("answer.not-convertible", f"{info.name}: {'; '.join(reasons)}")


def group_alike_layers(checkpoint: Checkpoint) -> dict[object, list[int]]:
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


def _target(
    checkpoint: Checkpoint, ask: Ask, layer: int, written: Scheme | None, verdict: Verdict
) -> Target | MoeqError:
    """The best layout for a layer, or why there is none."""
    scheme = checkpoint.scheme_of(layer)
    reason = get_format(scheme.format).refusal_of(scheme)
    if reason is not None:
        return MoeqError("answer.not-convertible", f"{scheme.title}: {reason}")
    try:
        found = list(candidates(checkpoint, ask, layer, written, verdict))
    except MoeqError as error:
        return error
    fitting: list[Target] = []
    against: list[MoeqError] = []
    for candidate in found:
        try:
            plan = plan_layer(checkpoint, layer, candidate.layout, ask.options)
        except MoeqError as error:
            against.append(error)
        else:
            loaders = tuple(loaders_of_plan(checkpoint, ask, plan, written))
            sizes = candidate.sizes or _sizes(plan, ask.options)
            rank_bytes = _rank_bytes(plan, ask.options)
            rounding = None if ask.allow_lossy else _rounding(plan)
            fitting.append(replace(candidate, loaders=loaders, sizes=sizes, rank_bytes=rank_bytes, rounding=rounding))
    if not fitting:
        return against[0]
    best = min(fitting, key=lambda target: _preference(target, ask.deployment))  # the first of equals
    if not layout_class(best.layout).readers and not ask.force_layout:
        return MoeqError(
            "usage.layout-unread",
            f"{best.backend} reads {best.layout}, but no plug-in of moeq hands it these bytes and no kernel of moeq "
            "reads them",
            "--force-layout writes it anyway",
        )
    if best is fitting[0]:
        return replace(best, why="; ".join(filter(None, (best.why, *(error.message for error in against[:1])))) or None)
    return replace(best, why="; ".join(filter(None, (_given_up(fitting[: fitting.index(best)]), best.why))))


def _rounding(plan: LayerPlan) -> str | None:
    """What the layout rounds where the layer's values do not fit, or None where it holds all of them."""
    layout, padding = get_layout(plan.entry.layout), plan.shards[0].padding
    return layout.lossy if any(layout.rounds(spec) for spec in (padding.w13, padding.w2)) else None


def _given_up(passed: list[Target]) -> str:
    """The backend that the engine prefers, and why nothing is written for it."""
    names = " and ".join(f"{target.backend} ({target.layout})" for target in passed)
    loaders = ", ".join(dict.fromkeys(loader.title for target in passed for loader in target.loaders))
    what = f"load in {loaders} only" if loaders else "load in nothing yet"
    return f"the engine prefers {names}, which {what}" if len(passed) > 1 else f"the engine prefers {names}: {what}"


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


def _sizes(plan: LayerPlan, options: PlanOptions) -> Sizes:
    """Sizes of one rank's experts as they are written, or sliced from what is written."""
    shard = max(plan.shards, key=lambda one: one.shard.intermediate.size)
    ranks = 1 if plan.entry.ranks else options.tp
    plain, padded = shard.padding.original_w2, shard.padding.w2
    experts = -(-plan.entry.num_experts // options.ep)
    return Sizes(plain.n, plain.k // ranks, padded.n, padded.k // ranks, experts)


def _rank_bytes(plan: LayerPlan, options: PlanOptions) -> int:
    """Bytes of a layer's experts on the fullest rank: what is written for it, or its part of what serves all."""
    sizes = [sum(tensor_bytes(*row) for row in shard.tensors().values()) for shard in plan.shards]
    return max(sizes) if plan.entry.ranks else sizes[0] // (options.ep if options.ep > 1 else options.tp)
