"""Check a checkpoint's headers and config: contradictions raise, everything else warns. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moeq.checkpoint.facts import EXPERT_INPUT, HIDDEN, MTP, Facts
from moeq.checkpoint.families import ModelFamily
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import StoredName
from moeq.checkpoint.warning import CheckpointWarning
from moeq.errors import MoeqError, listed
from moeq.matrix import MatrixSpec
from moeq.model.activation_scales import missing_scales
from moeq.model.expert_kinds import ExpertKind, Experts
from moeq.model.modules import quantized_routers
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration


def check_counts(facts: Facts, experts: Iterable[Experts]) -> None:
    """Check the number of experts against the config, which may declare several sets that add up to it.

    Raises MoeqError `source.inconsistent` if the config's number is not the largest number found in a layer.
    """
    declared, sets = facts.experts(), facts.expert_sets()
    found = {item.layer.layer: item.num_experts for item in experts}
    if declared is None or max(found.values()) in (declared, sum(sets)):
        return
    layer, count = next(iter(found.items()))
    detail = f"the config declares {declared} experts, the tensors of layer {layer} have {count}"
    hint = "the checkpoint was pruned without updating config.json, or files are missing"
    raise MoeqError("source.inconsistent", detail, hint)


def check_complete(experts: Iterable[Experts]) -> None:
    """Check that all experts of a layer have the same projections, and that all or none are quantised.

    Raises MoeqError `source.incomplete-experts` naming layer, expert and projection.
    """
    gaps: list[str] = []
    mixed_layers = 0
    for item in experts:
        groups = item.kinds()
        present = {projection for group in groups for projection in group.kind.projections}
        if len(groups) > 1:
            gaps += _missing(item, present)
        plain = [group for group in groups if _unquantized(group.kind)]
        if plain and len(plain) < len(groups):
            numbers = sorted(expert for group in plain for expert in group.experts)
            gaps.append(f"layer {item.layer.layer}: experts {listed(numbers)} are not quantised, the others are")
            mixed_layers += 1
        if "down" not in present or not present & {"up", "gate_up"}:
            gaps.append(f"layer {item.layer.layer}: projections {sorted(present)}, expected (gate,) up and down")
    if gaps:
        hint = "the checkpoint is not complete; download it again"
        if mixed_layers == len(gaps):  # quantisers leave out experts that no token of the calibration reached
            hint = "engines take one format for all experts of a layer: quantise again with every expert calibrated"
        raise MoeqError("source.incomplete-experts", listed(gaps, separator="; "), hint)


def _missing(item: Experts, present: set[StoredName]) -> Iterator[str]:
    for group in item.kinds():
        lacking = sorted(present - set(group.kind.projections))
        if lacking:
            yield f"layer {item.layer.layer}: experts {listed(group.experts)} lack {', '.join(lacking)}"


def _unquantized(kind: ExpertKind) -> bool:
    return any(scheme.format == "unquantized" for scheme in kind.schemes)


def lint_sets(experts: Iterable[Experts]) -> Iterator[CheckpointWarning]:
    """Warn of layers with several sets of experts of different sizes."""
    layers = [item for item in experts if len(item.sets) > 1]
    if layers:
        yield CheckpointWarning(
            "experts.several-sets", f"layers {listed(i.layer.layer for i in layers)}: {layers[0].set_text}"
        )


def check_sizes(
    facts: Facts, family: ModelFamily | None, up: MatrixSpec, down: MatrixSpec
) -> Iterator[CheckpointWarning]:
    """Check the sizes of the experts against the config; a difference that does not matter is a warning.

    Raises MoeqError `source.inconsistent` if experts read neither the hidden size nor a declared latent size.
    """
    hidden, latent = facts.count(HIDDEN), facts.count(EXPERT_INPUT)
    if hidden is not None and up.k not in (hidden, latent):
        detail = f"experts read {up.k} features, the config declares hidden_size {hidden}"
        raise MoeqError("source.inconsistent", detail, "config.json belongs to another checkpoint")
    declared = facts.count(family.intermediate_keys) if family else None
    if declared is not None and declared != down.k:
        message = f"experts have {down.k} intermediate features, the config declares {declared}; the tensors count"
        yield CheckpointWarning("config.sizes-differ", message)
    if up.num_groups * up.group_size != up.k or down.num_groups * down.group_size != down.k:
        partial = up if up.num_groups * up.group_size != up.k else down
        message = f"K={partial.k} is not a multiple of group size {partial.group_size}: the last group is partial"
        yield CheckpointWarning("shape.partial-group", message)


def lint_declaration(
    name: str, declaration: Declaration | None, experts: Iterable[Experts]
) -> Iterator[CheckpointWarning]:
    """Warn of contradictions between config and headers."""
    if declaration is None:
        return
    if "awq" in name.lower().rpartition("/")[2] and declaration.method not in ("awq", "auto-round"):
        message = f"the name says AWQ, the config says {declaration.method}; the config counts"
        yield CheckpointWarning("name.says-awq", message)
    excluded, plain = [], []
    for item in experts:
        module = item.layer.module("down", 0)
        excludes = declaration.resolve(module) is None and declaration.default is not None
        if excludes and not _unquantized(item.kind(0)):
            excluded.append(module)
        if not excludes and _unquantized(item.kind(0)):
            plain.append(module)
    if excluded:
        message = f"the config excludes {listed(excluded, 2)} from quantisation, the tensors are quantised; they count"
        yield CheckpointWarning("config.excludes-quantized", message)
    if plain:
        message = f"the config quantises {listed(plain, 2)}, the tensors are not quantised; they count"
        yield CheckpointWarning("config.quantizes-plain", message)


def lint_schemes(schemes: Iterable[Scheme]) -> Iterator[CheckpointWarning]:
    """Warn of properties of schemes that some engines handle wrongly."""
    for scheme in schemes:
        if scheme.act_order and scheme.group_size > 0:
            message = (
                f"act-order with group size {scheme.group_size}: vLLM 0.33 rejects it for MoE, and kernels have to "
                "gather activations by group; a scan tells whether the order is trivial"
            )
            yield CheckpointWarning("scheme.act-order", message)
        if scheme.format == "gptq" and not scheme.weight.symmetric and scheme.zero_point == "stored-minus-one":
            message = "asymmetric GPTQ v1: zero points are stored minus one, which some engines do not undo"
            yield CheckpointWarning("scheme.gptq-v1-zeros", message)
        if scheme.has_bias:
            yield CheckpointWarning("scheme.bias", "experts have biases, which not every backend adds")
        if scheme.weight.scale.dtype == "f32" and scheme.format in ("gptq", "awq", "ct-pack"):
            yield CheckpointWarning(
                "scheme.f32-scales", "scales are float32; kernels take 16-bit ones, so they will be rounded"
            )


def lint_tensors(rest: Iterable[TensorEntry]) -> Iterator[CheckpointWarning]:
    """Warn of quantised routers."""
    routers = quantized_routers(rest)
    if routers:
        message = f"the router is quantised ({listed(routers, 2)}), which engines do not expect"
        yield CheckpointWarning("module.router-quantized", message)


def lint_layers(
    facts: Facts, num_layers: int, moe: Iterable[int], mtp: dict[int, Experts]
) -> Iterator[CheckpointWarning]:
    """Warn of multi-token prediction that is declared but absent, and of layers beyond the declared number."""
    declared = facts.count(MTP)
    if declared and not mtp:
        yield CheckpointWarning(
            "mtp.absent", f"the config declares {declared} multi-token prediction layers, none has experts"
        )
    if mtp and not declared:
        beyond = listed(sorted(mtp))
        message = f"layers {beyond} lie beyond the {num_layers} declared; taken for multi-token prediction"
        yield CheckpointWarning("mtp.undeclared", message)
    layers = list(moe)
    if mtp and layers:
        yield CheckpointWarning(
            "mtp.not-converted", "experts of multi-token prediction are copied unchanged, not converted"
        )


def lint_mixing(experts: Iterable[Experts]) -> Iterator[CheckpointWarning]:
    """Warn of layers whose experts do not all have one scheme."""
    mixed = [item.layer.layer for item in experts if len({s for g in item.kinds() for s in g.kind.schemes}) > 1]
    if mixed:
        yield CheckpointWarning(
            "scheme.mixed-layer", f"layers {listed(mixed)} mix schemes among their experts or projections"
        )


def lint_activation_scales(experts: Iterable[Experts]) -> Iterator[CheckpointWarning]:
    """Warn of experts without the static activation scale that others of their layer have."""
    for item in experts:
        for fault in missing_scales(item):
            yield CheckpointWarning("scales.activation-missing", f"{fault.text} (not calibrated)")
