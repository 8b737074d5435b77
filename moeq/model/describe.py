"""Build `CheckpointInfo` from headers and config. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from moeq.checkpoint.facts import (
    ACTIVATION,
    EXPERTS,
    GROUPS,
    GROUPS_KEPT,
    HIDDEN,
    LAYERS,
    RENORMALIZE,
    SCALING,
    SCORING,
    SHARED_EXPERTS,
    SHARED_SIZES,
    TOP_K,
    Facts,
)
from moeq.checkpoint.families import Family
from moeq.checkpoint.info import RoutingInfo
from moeq.checkpoint.names import LayerExperts
from moeq.checkpoint.notice import Notice
from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.model.experts import Experts
from moeq.model.info import CheckpointInfo, SchemeUse
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration
from moeq.schemes.registry import get_format


@dataclass(frozen=True)
class Stacks:
    """The layers with routed experts.

    Attributes:
        main: layers of the decoder, by number.
        mtp: layers of multi-token prediction, by number.
        other: layers of further stacks (a second model in the same checkpoint).
    """

    main: Mapping[int, LayerExperts]
    mtp: Mapping[int, LayerExperts]
    other: tuple[LayerExperts, ...] = ()


def split_stacks(layers: Iterable[LayerExperts], num_layers: int | None) -> Stacks:
    """Tell the decoder from multi-token prediction and from further stacks.

    Raises:
        MoeqError: `source.bad-names` where one layer has two sets of experts.
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
            # Their numbers start at 0 again; MTP modules count on after the decoder.
            if "mtp" in stack.split("."):
                mtp[max([num_layers or 0, *(number + 1 for number in (*main, *mtp))])] = layer
            else:
                others.append(layer)
    return Stacks(dict(sorted(main.items())), dict(sorted(mtp.items())), tuple(others))


@dataclass(frozen=True)
class Model:
    """What describing needs, gathered by `moeq.model.open`."""

    source: Source
    facts: Facts
    family: Family | None
    stacks: Stacks
    experts: Mapping[int, Experts]
    declaration: Declaration | None


def describe(model: Model) -> CheckpointInfo:
    """The whole record. Raises MoeqError `source.inconsistent` where tensors and config contradict each other."""
    facts, source, family = model.facts, model.source, model.family or Family("unknown", ())
    moe_layers = tuple(model.stacks.main)
    first = model.experts[moe_layers[0]].kind(0)
    down, up = first.spec("w2"), first.spec("up")
    declared_layers = facts.count(LAYERS)
    num_layers = declared_layers if declared_layers is not None else max(moe_layers) + 1
    counts = tuple(model.experts[layer].num_experts for layer in moe_layers)
    expert_bytes = sum(entry.nbytes for layer in model.stacks.main.values() for entry in layer.tensors())
    total = sum(entry.nbytes for entry in source.tensors.values())
    schemes = scheme_uses(model)
    warnings = [*source.notices, *_check_sizes(model, counts)]
    return CheckpointInfo(
        name=source.name,
        revision=source.revision,
        architecture=_architecture(source.config),
        model_type=model_type(facts),
        family=family.title,
        family_from_names=model.family is None,
        num_layers=num_layers,
        moe_layers=moe_layers,
        dense_layers=tuple(sorted(set(range(num_layers)) - set(moe_layers))),
        mtp_layers=tuple(model.stacks.mtp),
        num_experts=max(counts),
        experts_per_layer=counts,
        top_k=facts.count(TOP_K),
        hidden_size=facts.count(HIDDEN) or down.n,
        expert_input_size=up.k,
        intermediate_size=down.k,
        shared_experts=facts.count(SHARED_EXPERTS) or int(bool(facts.count(SHARED_SIZES))),
        shared_intermediate_size=facts.count(SHARED_SIZES) or None,
        activation=_activation(facts, family),
        gated=first.gated,
        routing=routing(facts, family),
        quant_method=model.declaration.method if model.declaration else None,
        quant_origin=model.declaration.origin if model.declaration else None,
        schemes=schemes,
        expert_bytes=expert_bytes,
        other_bytes=total - expert_bytes,
        num_tensors=len(source.tensors),
        num_files=len(source.files),
        dtype=facts.text(("dtype", "torch_dtype")),
        modules=(),
        refusals=_refusals(model, schemes),
        warnings=tuple(warnings),
    )


def _activation(facts: Facts, family: Family) -> str:
    """The family's own activation where its code ignores the config key, else what the config says."""
    declared = facts.text(ACTIVATION)
    return declared if declared and family.activation == "silu" else family.activation


def model_type(facts: Facts) -> str:
    """`model_type` of the language model."""
    return facts.text(("model_type",)) or "unknown"


def routing(facts: Facts, family: Family) -> RoutingInfo:
    """Routing rule from the config, the family filling in what it leaves out."""
    renormalize = facts.flag(RENORMALIZE)
    scaling = facts.number(SCALING)
    return RoutingInfo(
        scoring=facts.text(SCORING) or family.scoring,
        renormalize=family.renormalize if renormalize is None else renormalize,
        scaling_factor=family.scaling if scaling is None else scaling,
        num_groups=facts.count(GROUPS) or 1,
        topk_groups=facts.count(GROUPS_KEPT) or 1,
        group_score=family.group_score,
        correction_bias=family.correction_bias,
    )


def scheme_uses(model: Model) -> tuple[SchemeUse, ...]:
    """Schemes of the routed experts, most used first."""
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
            title=scheme.title,
            layers=tuple(layers[scheme]),
            experts=experts[scheme],
            projections=tuple(projections[scheme]),
            refusal=get_format(scheme.format).refusal,
        )
        for scheme in ranked
    )


def _refusals(model: Model, schemes: Iterable[SchemeUse]) -> tuple[str, ...]:
    reasons = [use.refusal for use in schemes if use.refusal]
    if model.declaration and model.declaration.refusal:
        reasons.append(model.declaration.refusal)
    return tuple(dict.fromkeys(reasons))


def _check_sizes(model: Model, counts: tuple[int, ...]) -> list[Notice]:
    """Numbers of experts and sizes against the config."""
    declared = model.facts.count(EXPERTS)
    if declared is not None and declared != max(counts):
        raise MoeqError(
            "source.inconsistent",
            f"the config declares {declared} experts, the tensors of layer {next(iter(model.stacks.main))} have "
            f"{counts[0]}",
            "the checkpoint was pruned without updating config.json, or files are missing",
        )
    return []


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    return str(names[0])[:200] if isinstance(names, list) and names else "unknown"
