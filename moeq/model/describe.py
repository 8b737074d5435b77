"""Describe a checkpoint from headers and config as `CheckpointInfo`. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from moeq.checkpoint.facts import (
    ACTIVATION,
    EXPERT_INPUT,
    GROUPS,
    GROUPS_KEPT,
    HIDDEN,
    RENORMALIZE,
    SCALING,
    SCORING,
    SHARED_EXPERTS,
    SHARED_SIZES,
    TOP_K,
    Facts,
)
from moeq.checkpoint.families import ModelFamily
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import LayerExperts
from moeq.checkpoint.source import Source
from moeq.checkpoint.warning import CheckpointWarning
from moeq.errors import MoeqError
from moeq.foreign import plain
from moeq.matrix import MatrixSpec
from moeq.model.expert_kinds import ExpertKind, Experts
from moeq.model.info import CheckpointInfo, ModuleUse, RoutingInfo, SchemeUse
from moeq.model.lint import (
    check_complete,
    check_counts,
    check_sizes,
    lint_activation_scales,
    lint_declaration,
    lint_layers,
    lint_mixing,
    lint_schemes,
    lint_sets,
    lint_tensors,
)
from moeq.model.modules import module_uses
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration
from moeq.schemes.registry import get_format


@dataclass(frozen=True)
class Stacks:
    """Layers with routed experts."""

    main: Mapping[int, LayerExperts]  #: layers of the decoder, by number
    mtp: Mapping[int, LayerExperts]  #: layers of multi-token prediction, by number
    other: tuple[LayerExperts, ...] = ()  #: layers of further stacks (a second model in the same checkpoint)


def split_stacks(layers: Iterable[LayerExperts], num_layers: int | None) -> Stacks:
    """Separate the decoder's layers from those of multi-token prediction and of further stacks.

    Raises MoeqError `source.bad-names` if one layer has two sets of experts.
    """
    by_stack: dict[str, list[LayerExperts]] = {}
    for layer in layers:
        if layer.parts:
            by_stack.setdefault(layer.stack, []).append(layer)
    ranked = sorted(by_stack, key=lambda stack: ("mtp" not in stack.split("."), len(by_stack[stack])), reverse=True)
    main: dict[int, LayerExperts] = {}
    mtp: dict[int, LayerExperts] = {}
    for layer in by_stack[ranked[0]] if ranked else []:
        beyond = num_layers is not None and layer.layer >= num_layers
        place = mtp if beyond else main
        if layer.layer in place:
            detail = f"layer {layer.layer} has two sets of experts: {place[layer.layer].prefix} and {layer.prefix}"
            raise MoeqError("source.bad-names", detail)
        place[layer.layer] = layer
    others: list[LayerExperts] = []
    for stack in ranked[1:]:
        for layer in by_stack[stack]:
            # MTP stacks number their layers from 0; here they continue after the decoder's.
            if "mtp" in stack.split("."):
                mtp[max([num_layers or 0, *(number + 1 for number in (*main, *mtp))])] = layer
            else:
                others.append(layer)
    return Stacks(dict(sorted(main.items())), dict(sorted(mtp.items())), tuple(others))


@dataclass(frozen=True)
class Model:
    """Input of `describe`: everything that a description is made from."""

    source: Source
    facts: Facts
    family: ModelFamily | None
    stacks: Stacks
    experts: Mapping[int, Experts]
    declaration: Declaration | None


def describe(model: Model) -> CheckpointInfo:
    """Describe a checkpoint. Raises MoeqError `source.inconsistent` if tensors and config contradict each other."""
    facts, source, family = model.facts, model.source, model.family or ModelFamily("unknown", ())
    main = {number: model.experts[number] for number in model.stacks.main}
    check_counts(facts, main.values())
    check_complete(main.values())
    first = next(iter(main.values())).kind(0)
    down, up = sizes(first, family, facts)
    num_layers = facts.layers() or max(main) + 1
    expert_tensors = [entry for layer in model.stacks.main.values() for entry in layer.tensors()]
    expert_bytes = sum(entry.nbytes for entry in expert_tensors)
    rest = [entry for entry in source.tensors.values() if entry.name not in source.expert_names]
    schemes = scheme_uses(model)
    shared = facts.count(SHARED_EXPERTS) or int(bool(facts.count(SHARED_SIZES)))
    return CheckpointInfo(
        name=source.name,
        revision=source.revision,
        architecture=_architecture(source.config),
        model_type=model_type(facts),
        family=family.title,
        family_from_names=model.family is None,
        num_layers=num_layers,
        moe_layers=tuple(main),
        dense_layers=tuple(sorted(set(range(num_layers)) - set(main))),
        mtp_layers=tuple(model.stacks.mtp),
        num_experts=max(item.num_experts for item in main.values()),
        experts_per_layer=tuple(item.num_experts for item in main.values()),
        top_k=facts.agreed(TOP_K),
        hidden_size=facts.count(HIDDEN) or down.n,
        expert_input_size=up.k,
        intermediate_size=down.k,
        shared_experts=shared,
        shared_intermediate_size=facts.count(SHARED_SIZES) or (shared * down.k or None),
        activation=_activation(facts, family),
        gated=first.gated,
        routing=routing(facts, family, source.tensors),
        quant_method=model.declaration.method if model.declaration else None,
        quant_origin=model.declaration.origin if model.declaration else None,
        schemes=schemes,
        expert_bytes=expert_bytes,
        other_bytes=sum(entry.nbytes for entry in rest),
        num_tensors=len(source.tensors),
        num_files=len(source.files),
        dtype=_dtype(facts),
        modules=tuple(_modules(model, rest, expert_bytes)),
        refusals=_refusals(model, schemes),
        warnings=tuple(_warnings(model, schemes, rest, up, down)),
    )


def sizes(kind: ExpertKind, family: ModelFamily, facts: Facts) -> tuple[MatrixSpec, MatrixSpec]:
    """Return the specs `(down, up)` of one expert.

    The sizes come from the config for formats that moeq does not read.
    """
    down, up = kind.spec("w2"), kind.spec("up")
    if kind.scheme.format == "foreign":
        hidden, inner = facts.count(HIDDEN) or 0, facts.count(family.intermediate_keys) or 0
        return down.with_sizes(n=hidden, k=inner), up.with_sizes(n=inner, k=facts.count(EXPERT_INPUT) or hidden)
    return down, up


def _modules(model: Model, rest: list[TensorEntry], expert_bytes: int) -> list[ModuleUse]:
    total = quantized = 0
    for number in model.stacks.main:
        for group in model.experts[number].kinds():
            for described in group.kind.projections.values():
                total += len(group.experts)
                quantized += len(group.experts) if described.scheme.format != "unquantized" else 0
    return module_uses(rest, ModuleUse("experts", quantized, total - quantized, expert_bytes))


def _warnings(
    model: Model, schemes: Iterable[SchemeUse], rest: list[TensorEntry], up: MatrixSpec, down: MatrixSpec
) -> Iterator[CheckpointWarning]:
    facts = model.facts
    main = [model.experts[number] for number in model.stacks.main]
    mtp = {number: model.experts[number] for number in model.stacks.mtp}
    yield from model.source.warnings
    yield from check_sizes(facts, model.family, up, down)
    yield from lint_declaration(model.source.name, model.declaration, main)
    yield from lint_schemes(use.scheme for use in schemes)
    yield from lint_sets(main)
    yield from lint_mixing(main)
    yield from lint_activation_scales([*main, *mtp.values()])
    yield from lint_tensors(rest)
    yield from lint_layers(facts, facts.layers() or 0, model.stacks.main, mtp)
    if model.stacks.other:
        prefixes = sorted({layer.stack for layer in model.stacks.other})
        yield CheckpointWarning(
            "stack.other", f"further stacks with experts are copied unchanged: {', '.join(prefixes[:4])}"
        )


def _dtype(facts: Facts) -> str | None:
    """Return the name of the dtype of unquantised tensors; configs of multimodal models may have a table instead."""
    return next((plain(value) for _, value in facts.find(("dtype", "torch_dtype")) if isinstance(value, str)), None)


def model_type(facts: Facts) -> str:
    """Return the `model_type` of the language model."""
    return facts.text(("model_type",)) or "unknown"


#: Activation's name in transformers -> its name in engines and kernels, where they differ (vLLM's `_STR_ALIASES`).
_SAME_ACTIVATION = {"gelu_pytorch_tanh": "gelu_tanh"}


def _activation(facts: Facts, family: ModelFamily) -> str:
    """Return the activation's name: the family's own if its code ignores the config, else the config's."""
    found = family.activation or facts.text(ACTIVATION) or "silu"
    return _SAME_ACTIVATION.get(found, found)


#: Leaf names of the per-expert bias that takes part in choosing experts.
_CORRECTION_BIASES = ("e_score_correction_bias", "expert_bias", "router_bias")


def routing(facts: Facts, family: ModelFamily, tensors: Iterable[str]) -> RoutingInfo:
    """Read the routing rule from the config; the family gives what the config leaves out."""
    renormalize = facts.flag(RENORMALIZE)
    scaling = facts.number(SCALING)
    return RoutingInfo(
        scoring=facts.text(SCORING) or family.scoring,
        renormalize=family.renormalize if renormalize is None else renormalize,
        scaling_factor=family.scaling if scaling is None else scaling,
        num_groups=facts.count(GROUPS) or 1,
        topk_groups=facts.count(GROUPS_KEPT) or 1,
        group_score=family.group_score,
        correction_bias=any(name.endswith(_CORRECTION_BIASES) for name in tensors),
    )


def scheme_uses(model: Model) -> tuple[SchemeUse, ...]:
    """List the schemes of the routed experts, most used first."""
    layers: dict[Scheme, list[int]] = {}
    experts: dict[Scheme, int] = {}
    projections: dict[Scheme, dict[str, None]] = {}
    for number in model.stacks.main:
        for group in model.experts[number].kinds():
            for projection, described in group.kind.projections.items():
                projections.setdefault(described.scheme, {})[projection] = None
            for scheme in group.kind.schemes:
                experts[scheme] = experts.get(scheme, 0) + len(group.experts)
                used = layers.setdefault(scheme, [])
                if not used or used[-1] != number:
                    used.append(number)
    ranked = sorted(experts, key=lambda scheme: -experts[scheme])
    return tuple(
        SchemeUse(
            scheme=scheme,
            title=get_format(scheme.format).title_of(scheme),
            layers=tuple(layers[scheme]),
            experts=experts[scheme],
            projections=tuple(projections[scheme]),
            refusal=get_format(scheme.format).refusal_of(scheme),
        )
        for scheme in ranked
    )


def _refusals(model: Model, schemes: Iterable[SchemeUse]) -> tuple[str, ...]:
    reasons = [use.refusal for use in schemes if use.refusal]
    if model.declaration and model.declaration.refusal:
        reasons.append(model.declaration.refusal)
    for number in model.stacks.main:
        experts = model.experts[number]
        for group in experts.kinds():
            reasons += group.kind.problems()
        if len(experts.sets) > 1:
            # vLLM 0.26.0 to 0.33.0, `Ernie4_5_VLMoeForCausalLM.load_weights`.
            why = "a stack holds one set and has no numbers in its name, from which vLLM's class tells sets apart"
            reasons.append(f"layers have several sets of experts ({experts.set_text}): {why}")
    return tuple(dict.fromkeys(reasons))


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    return plain(names[0]) if isinstance(names, list) and names else "unknown"
