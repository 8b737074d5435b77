"""The join of oracle, layouts and checkpoint: whether it can be converted for a deployment, to what, and what loads it.

Every command asks here, so that one keeps what another promises. `decide` gives the verdict alone, `answer` everything.
An answer is found by planning: the code that plans a conversion plans every layer from its headers, once for each
candidate layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from moeq.checkpoint.manifest import CopiedLayer
from moeq.checkpoint.source import LocalSource
from moeq.checkpoint.writer import tensor_bytes
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout, layout_class
from moeq.matrix import MatrixSpec
from moeq.model import Checkpoint
from moeq.model.division import UNEVEN_FORMATS, split_intermediate
from moeq.oracle.loaders import Loader, common
from moeq.oracle.ranking import Ranking, rank
from moeq.oracle.records import ConvertTarget, Sizes, Verdict
from moeq.oracle.versions import BUILTIN as OWN_ENGINE
from moeq.pipeline.loss_probe import find_loss
from moeq.pipeline.plan.calibration import fault_kinds
from moeq.pipeline.plan.candidates import LayoutChoice, candidates, confirm_backends, own_target
from moeq.pipeline.plan.expert_names import with_names
from moeq.pipeline.plan.layer_loaders import engine_verdicts, loaders_of_plan
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer
from moeq.pipeline.plan.layer_verdict import (
    first_layer,
    heads_problem,
    is_quantised,
    judge_checkpoint,
    layer_method,
    stored_tensors,
)
from moeq.pipeline.plan.options import Question, Ranks
from moeq.pipeline.plan.suggestions import nearest
from moeq.schemes.base import Scheme
from moeq.schemes.registry import get_format
from moeq.spelling import option


@dataclass(frozen=True)
class LayerGroup:
    """Layers that are encoded alike."""

    layers: tuple[int, ...]  #: numbers of the layers
    verdict: Verdict  #: the engine's verdict on them; its `convert` is what would really be written
    choice: LayoutChoice | None  #: the layout that they get, or None if they are not converted
    error: MoeqError | None = None  #: why they are not converted, or None


@dataclass(frozen=True)
class Answer:
    """Whether a source checkpoint can be converted, to what, and why not."""

    question: Question  #: the question
    #: Groups of the quantised layers, the first layer's group first, and of float layers that the engine does not load.
    parts: tuple[LayerGroup, ...]
    copied: tuple[CopiedLayer, ...] = ()  #: layers that are copied unchanged, with the reason
    error: MoeqError | None = None  #: why nothing is converted, or None

    @property
    def verdict(self) -> Verdict:
        """The engine's verdict on the first quantised layer."""
        return self.parts[0].verdict

    @property
    def choices(self) -> dict[int, LayoutChoice]:
        """Layer number to the layout that it gets, for layers that are converted."""
        return dict(sorted((layer, part.choice) for part in self.parts if part.choice for layer in part.layers))

    @property
    def layouts(self) -> dict[int, str]:
        """Layer number to layout id, for layers that are converted."""
        return {layer: choice.layout for layer, choice in self.choices.items()}

    @property
    def ok(self) -> bool:
        """Whether `convert` converts the checkpoint."""
        return self.error is None

    @property
    def first(self) -> LayoutChoice:
        """The layout that the first converted layer gets."""
        return next(iter(self.choices.values()))

    @property
    def backend(self) -> str:
        """Backend whose kernel reads the result; the layout's id if no backend of the engine does."""
        return self.first.backend

    @property
    def rank_bytes(self) -> int:
        """Bytes of packed experts on the fullest rank, over all converted layers."""
        return sum(choice.rank_bytes for choice in self.choices.values())

    @property
    def loaders(self) -> tuple[Loader, ...]:
        """Loaders that take every layer of the result."""
        return common([choice.loaders for choice in self.choices.values()])

    @property
    def overridden(self) -> tuple[str, ...]:
        """Reasons against the layouts that were overridden by force."""
        return tuple(dict.fromkeys(text for choice in self.choices.values() for text in choice.overridden))

    def refused(self, error: MoeqError) -> Answer:
        """Return this answer as a refusal with that error: no layer is converted."""
        parts = (
            replace(part, choice=None, verdict=replace(part.verdict, convert=None, no_convert=error.message))
            if part.choice
            else part
            for part in self.parts
        )
        return replace(self, parts=tuple(parts), error=error)


def decide(checkpoint: Checkpoint, deployment: Deployment) -> Verdict:
    """Decide which backend runs this checkpoint's experts on that deployment, what `convert` writes, and why.

    Raises MoeqError `usage.already-converted` for a converted checkpoint; `source.no-top-k` if the config does not say
    how many experts a token uses; a refusal that says what fits, if the backend named in the deployment does not.
    """
    checkpoint.require_source()
    found = advised(checkpoint, Question(deployment), explain=True)
    if found.error is not None and deployment.backend != "auto":
        raise found.error
    return found.verdict


def advised(checkpoint: Checkpoint, question: Question, *, explain: bool = False, brief: bool = False) -> Answer:
    """Return what `answer` returns; the hint of a refusal names the nearest changes that work.

    A change with which the first expert would lose numbers does not count. The static activation scales of a local
    source are read.
    """
    if isinstance(checkpoint.source, LocalSource):  # a remote source would need tens of thousands of requests
        checkpoint.read_activation_scales()
    found = answer(checkpoint, question, explain=explain, brief=brief)
    error = found.error
    if error is None:
        return found
    works = _nearest_changes(checkpoint, question)
    unread = error.code in ("usage.layout-gpu", "usage.layout-unread")
    force = f"; {option('force_layout', True)} writes it anyway" if unread else ""
    return replace(found, error=MoeqError(error.code, error.message, f"{works}{force}" if works else error.hint))


def without_loss(checkpoint: Checkpoint, found: Answer) -> Answer:
    """Return the answer, refused if the first expert would lose numbers; the hint names changes that keep them."""
    with checkpoint.source.sampled():
        loss = find_loss(checkpoint, found.question, found.layouts) if found.ok else None
        if loss is None:
            return found
        hints = filter(None, (_nearest_changes(checkpoint, found.question), loss.hint))
    return found.refused(MoeqError(loss.code, loss.message, "; ".join(hints)))


def _nearest_changes(checkpoint: Checkpoint, question: Question) -> str | None:
    """Say which of the nearest changes work; None if none of them does."""

    def backend_for(other: Question) -> str | None:
        changed = answer(checkpoint, other, brief=True, loaders=False)
        return changed.backend if changed.ok and find_loss(checkpoint, other, changed.layouts) is None else None

    if convertible_problem(checkpoint) is not None:
        return None
    with checkpoint.source.sampled():
        texts = [change.text for change in nearest(checkpoint, question, backend_for)]
    return f"{', or '.join(texts)} works" if texts else None


def answer(
    checkpoint: Checkpoint, question: Question, *, explain: bool = False, brief: bool = False, loaders: bool = True
) -> Answer:
    """Answer whether a source checkpoint can be converted as asked. A refusal is returned in the answer, not raised.

    Args:
        explain: also try what would make each backend work (see `moeq.oracle.judge.judge`).
        brief: only yes or no matters: skip backends that the engine would not choose.
        loaders: also find which loaders take the result.

    Raises MoeqError `usage.unknown-layout`, `usage.unknown-engine`, `source.no-top-k`.
    """
    options = question.options
    if options.layout is not None:
        get_layout(options.layout)
    first = first_layer(checkpoint)
    error = convertible_problem(checkpoint)
    groups = sorted(
        group_alike_layers(checkpoint, question.deployment).values(), key=lambda layers: first not in layers
    )
    copied: list[CopiedLayer] = []
    parts: list[LayerGroup] = []
    for layers in groups:
        if not is_quantised(checkpoint, layers[0]) and layers is not groups[0]:
            copied += [CopiedLayer(layer, "its experts are not quantised") for layer in layers]
            verdict = judge_checkpoint(checkpoint, question.deployment, layers[0], explain=explain)
            if not verdict.ok:  # the source does not load, its conversion may
                parts.append(LayerGroup(tuple(layers), verdict, None))
            continue
        written = _regrouped(checkpoint.scheme_of(layers[0]), options.regroup)
        verdict = judge_checkpoint(checkpoint, question.deployment, layers[0], scheme=written, explain=explain)
        found = error or _choice(checkpoint, question, layers[0], written, verdict, loaders=loaders)
        verdict = verdict if brief else confirm_backends(checkpoint, verdict, layers[0], written)
        parts.append(_part(layers, with_names(checkpoint, verdict, layers[0]), found))
    refused = {layer: part.error for part in parts for layer in part.layers if part.error}
    if refused:
        some_fit = len(refused) < sum(len(part.layers) for part in parts)
        problem = refusal(dict(sorted(refused.items())), options.skip_unfit, some_fit=some_fit)
        if problem is not None:
            return Answer(question, tuple(parts)).refused(problem)
        copied += [CopiedLayer(layer, error.message) for layer, error in refused.items()]
    return Answer(question, tuple(parts), tuple(sorted(copied, key=lambda row: row.layer)))


def _part(layers: list[int], verdict: Verdict, found: LayoutChoice | MoeqError) -> LayerGroup:
    """Return a group of layers with its choice or error, and a verdict whose `convert` is what is really written."""
    if isinstance(found, MoeqError):
        return LayerGroup(tuple(layers), replace(verdict, convert=None, no_convert=found.message), None, found)
    assert found.sizes is not None  # it was planned
    experts = next((row.experts for row in verdict.candidates if row.backend == found.backend), "")
    convert = ConvertTarget(found.backend, experts, found.layout, found.flag, found.sizes, found.why, found.rounding)
    return LayerGroup(tuple(layers), replace(verdict, convert=convert, no_convert=None), found)


def convertible_problem(checkpoint: Checkpoint) -> MoeqError | None:
    """Return why no layer of a checkpoint is ever converted, whatever the deployment; None if some are."""
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


def group_alike_layers(checkpoint: Checkpoint, deployment: Deployment) -> dict[object, list[int]]:
    """Return lists of layer numbers, by what the layers have in common: one answer is good for a whole group.

    Layers of a group are encoded alike, in tensors of the same names, and the engine's config gives them one method.
    """
    found: dict[object, list[int]] = {}
    for layer in checkpoint.info.moe_layers:
        kinds = checkpoint.experts(layer).kinds()
        schemes = tuple(projection.scheme for group in kinds for projection in group.kind.projections.values())
        specs: tuple[MatrixSpec, ...] = tuple(group.kind.spec(role) for group in kinds for role in ("w13", "w2"))
        tensors, method = stored_tensors(checkpoint, layer), layer_method(checkpoint, deployment, layer)
        count, faults = checkpoint.num_experts(layer), fault_kinds(checkpoint, layer)
        alike = (schemes, specs, count, faults, tensors, method)
        found.setdefault(alike, []).append(layer)
    return found


def refusal(refused: Mapping[int, MoeqError], skip_unfit: bool, *, some_fit: bool) -> MoeqError | None:
    """Return the first layer's error, with how to go on without it if other layers fit; None if it is skipped."""
    if some_fit and skip_unfit:
        return None
    error = next(iter(refused.values()))
    more = f" (and {len(refused) - 1} more layers)" if len(refused) > 1 and some_fit else ""
    name = option("skip_unfit", True)
    skip = f"{name} copies it unchanged" if some_fit else None
    hint = "; ".join(part for part in (error.hint, skip) if part and name not in (error.hint or ""))
    return MoeqError(error.code, error.message + more, hint or error.hint)


def _choice(
    checkpoint: Checkpoint, question: Question, layer: int, written: Scheme | None, verdict: Verdict, *, loaders: bool
) -> LayoutChoice | MoeqError:
    """Choose the best layout for a layer, or return why there is none."""
    scheme = checkpoint.scheme_of(layer)
    reason = get_format(scheme.format).refusal_of(scheme)
    if reason is not None:
        return MoeqError("answer.not-convertible", f"{scheme.title}: {reason}")
    try:
        found = list(candidates(checkpoint, question, layer, written, verdict))
    except MoeqError as error:
        return error
    planned: list[tuple[LayoutChoice, LayerPlan]] = []
    unfit: list[MoeqError] = []
    for candidate in found:
        try:
            plan = plan_layer(checkpoint, layer, candidate.layout, question.ranks, question.options)
        except MoeqError as error:
            unfit.append(error)
        else:
            sizes = candidate.sizes or _sizes(plan, question.ranks)
            rank_bytes = _rank_bytes(plan, question.ranks)
            rounding = None if question.options.allow_lossy else _rounding(plan)
            planned.append((replace(candidate, sizes=sizes, rank_bytes=rank_bytes, rounding=rounding), plan))
    if not planned:
        return unfit[0]
    verdicts, fitting = engine_verdicts(checkpoint, question.deployment, layer, written, verdict), list[LayoutChoice]()
    for choice, plan in planned:
        if loaders or len(planned) > 1:
            found_loaders = tuple(loaders_of_plan(checkpoint, question, plan, written, verdicts))
            choice = replace(choice, loaders=found_loaders)
        fitting.append(choice)
        if _preference(choice, question.deployment) == 0:
            break  # no later layout can be better
    best = min(fitting, key=lambda choice: _preference(choice, question.deployment))  # the first of equals
    if not layout_class(best.layout).is_read() and not question.options.force_layout:
        return MoeqError(
            "usage.layout-unread",
            f"{best.backend} reads {best.layout}, but no plug-in of moeq hands it these bytes and no kernel of moeq "
            "reads them",
            f"{option('force_layout', True)} writes it anyway",
        )
    if best is fitting[0]:
        return replace(best, why="; ".join(filter(None, (best.why, *(error.message for error in unfit[:1])))) or None)
    return replace(best, why="; ".join(filter(None, (_given_up(fitting[: fitting.index(best)]), best.why))))


def _rounding(plan: LayerPlan) -> str | None:
    """Return what the layout rounds if the layer's values do not fit; None if it holds all of them."""
    layout, padding = get_layout(plan.entry.layout), plan.shards[0].padding
    return layout.lossy if any(layout.rounds(spec) for spec in (padding.w13, padding.w2)) else None


def _given_up(passed: list[LayoutChoice]) -> str:
    """Say which backends the engine prefers, and why nothing is written for them."""
    names = " and ".join(f"{target.backend} ({target.layout})" for target in passed)
    loaders = ", ".join(dict.fromkeys(loader.title for target in passed for loader in target.loaders))
    verb = "load" if len(passed) > 1 else "loads"
    return f"the engine prefers {names}, which {verb} in {f'{loaders} only' if loaders else 'nothing yet'}"


def _preference(choice: LayoutChoice, deployment: Deployment) -> int:
    """Return 0 if the named engine loads the layout, 1 if another loader does, 2 if none does: less is better."""
    wanted = "load_experts" if deployment.engine == OWN_ENGINE else deployment.engine.partition("@")[0]
    names = {loader.name for loader in choice.loaders}
    return 0 if wanted in names else 1 if names else 2


def _regrouped(scheme: Scheme, group: int | None) -> Scheme | None:
    """Return the scheme with groups of size `group`; None if groups keep the size that they have."""
    if group is None or group == scheme.group_size:
        return None
    shape = (scheme.weight.scale.group_shape[0], group)
    return replace(scheme, weight=replace(scheme.weight, scale=replace(scheme.weight.scale, group_shape=shape)))


def _sizes(plan: LayerPlan, ranks: Ranks) -> Sizes:
    """Return the sizes of one rank's experts, whether they are packed for that rank or sliced from one packing."""
    shard = max(plan.shards, key=lambda one: one.shard.intermediate.size)
    sharing = 1 if plan.entry.ranks else ranks.tp
    plain, padded = shard.padding.original_w2, shard.padding.w2
    experts = -(-plan.entry.num_experts // ranks.ep)
    return Sizes(plain.n, plain.k // sharing, padded.n, padded.k // sharing, experts)


def _rank_bytes(plan: LayerPlan, ranks: Ranks) -> int:
    """Return bytes of a layer's experts on the fullest rank: its own packing, or its slice of the one packing."""
    sizes = [sum(tensor_bytes(*row) for row in shard.tensors().values()) for shard in plan.shards]
    return max(sizes) if plan.entry.ranks else sizes[0] // (ranks.ep if ranks.ep > 1 else ranks.tp)


def rank_backends(checkpoint: Checkpoint, answer: Answer, part: LayerGroup) -> Ranking:
    """Rank the backends that can run a group of layers, by measured times."""
    deployment, layer = answer.question.deployment, part.layers[0]
    own_layout = None
    if deployment.engine == OWN_ENGINE or any(loader.name in ("vllm", "sglang") for loader in answer.loaders):
        own = own_target(checkpoint, deployment, layer)
        own_layout = own.layout if own is not None else None
    return rank(part.verdict, checkpoint.scheme_of(layer), own_layout)


#: Tensor-parallel degrees that engines usually run with.
DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Degree:
    """One tensor-parallel degree."""

    tp: int  #: ranks
    intermediate: int | None  #: intermediate features of the fullest rank, or None if they cannot be divided
    fits: bool  #: whether `convert` can write for that many ranks; without a deployment: whether sizes can be divided
    layout: str | None = None  #: layout that it writes, if a deployment was named
    why: str | None = None  #: why it does not fit, or None


def degrees(
    checkpoint: Checkpoint, deployment: Deployment | None, tps: tuple[int, ...] = DEGREES
) -> tuple[Degree, ...]:
    """Judge tensor-parallel degrees; without a deployment by the sizes of experts and attention heads alone."""
    return tuple(_degree(checkpoint, deployment, tp) for tp in tps)


def _degree(checkpoint: Checkpoint, deployment: Deployment | None, tp: int) -> Degree:
    layer = first_layer(checkpoint)
    unit = UNEVEN_FORMATS.get(checkpoint.scheme_of(layer).format)
    why, size = None, None
    try:
        parts = split_intermediate(f"layer {layer}", checkpoint.spec(layer, "w2"), tp, unit)
    except MoeqError as error:
        why = error.message.partition(": ")[2] or error.message
    else:
        size = max(part.size for part in parts)
    if deployment is None:
        # The GPU does not matter here, only the number of ranks.
        why = why or heads_problem(checkpoint, Deployment(parse_gpu("H100"), tp=tp))
        return Degree(tp, size, why is None, None, why)
    found = answer(checkpoint, Question(replace(deployment, tp=tp, ep=1, dp=1)), brief=True, loaders=False)
    if found.error is None:
        return Degree(tp, size, True, found.first.layout)
    return Degree(tp, size, False, None, why or found.error.message)
