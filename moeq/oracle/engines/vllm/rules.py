"""Rules about experts classes, as values: class predicates P01 to P13 and class limits L01 to L07.

All rules are evaluated for every candidate. The verdict and `moeq explain` read the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import lcm

from moeq.oracle.engines.vllm.case import DEFAULT_ALL2ALL, Case
from moeq.oracle.engines.vllm.tables import ExpertsClass, Variant
from moeq.oracle.records import Reason

Failure = tuple[str, str | None]
#: Check of an experts class: it takes the case, the class, the class's variant for the case's keys, and the activation
#: key that the class is asked with.
Check = Callable[[Case, ExpertsClass, Variant, str], Iterator[Failure]]


@dataclass(frozen=True)
class Rule:
    """One rule about an experts class."""

    code: str
    title: str
    explain: str  #: sentence for `moeq explain`
    check: Check  #: yields the text and the remedy of every failure


def _rule(code: str, title: str, explain: str) -> Callable[[Check], Rule]:
    """Return a decorator that turns a check into a rule."""
    return lambda check: Rule(code, title, explain, check)


@_rule("P01_DEVICE", "device", "The class needs its platform and architecture, then its packages and switches.")
def _device(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    for package in variant.packages:
        if not case.package(package):
            yield f"package {package} is absent", f"install {package}"
    for name, allowed in variant.env:
        if case.flag(name) not in allowed:
            text = f"{name} is {case.env(name) or 'unset'}, needs {' or '.join(value or 'unset' for value in allowed)}"
            yield text, f"set {name}={allowed[0]}" if allowed[0] is not None else f"unset {name}"


@_rule("P02_NOT_GATED", "non-gated MLP", "Kernels that fuse act(gate) * up cannot run experts without a gate.")
def _not_gated(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    accepted = variant.activations
    if not case.gated and not any(name.endswith("_no_mul") for name in accepted):
        yield f"{case.shape.activation} without a gate half", None


@_rule("P03_ACTIVATION", "activation", "The activation function is fused into the kernel or its helper.")
def _activation(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    accepted = variant.activations
    asked = case.shape.activation
    if not case.shape.gated and not asked.endswith("_no_mul"):
        asked += "_no_mul"
    if asked not in accepted:
        yield f"activation {asked} is not one of {', '.join(accepted)}", None


@_rule(
    "P04_SCHEME",
    "weight and activation types",
    "The pair of weight and activation keys must be one the class lists. The engine's int4 keys do not "
    "carry the real group size.",
)
def _scheme(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    weight = case.method.weight_key
    if not variant.admits(weight, activation):
        group = case.method.group_size
        detail = "" if group is None else f" ({case.method.bits} bits, {'channel' if group < 0 else f'group {group}'})"
        yield f"weights {weight}{detail} with activations {activation} on {case.gpu.name}", None


_FORM_WORDS = {
    "single": "one rank",
    "tp": "tensor parallelism",
    "dp": "data-parallel ranks that share experts",
    "ep": "expert parallelism",
}


@_rule("P05_PARALLEL", "parallel form", "The class must support the parallel form, its all-to-all and load balancing.")
def _parallel(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    accepted, form, d = variant.parallel, case.parallel_form, case.deployment
    if form in accepted:
        if case.sequence_parallel and row.whole_sequences:
            yield "each tensor-parallel rank has its own tokens (sequence parallelism: tp, dp and ep above 1)", "dp 1"
        return
    plain = form.removesuffix("+eplb")
    if plain in accepted:
        text, remedy = "expert load balancing", "no expert load balancing"
    elif plain.startswith("ep:"):
        text, remedy = (
            f"all-to-all {plain[3:]}",
            f"all-to-all {DEFAULT_ALL2ALL}" if f"ep:{DEFAULT_ALL2ALL}" in accepted else "dp 1",
        )
    else:
        text, remedy = _FORM_WORDS[plain], "ep 1" if plain == "ep" else "dp 1" if plain == "dp" else "ep above 1"
    yield f"{text} (tp {d.tp}, ep {d.ep}, dp {d.dp}, {case.all2all or 'no'} all-to-all)", remedy


@_rule("P06_HASH_ROUTING", "hash routing", "Monolithic kernels route themselves and need to know how.")
def _hash_routing(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    if case.shape.hash_routing and not variant.hash_routing:
        yield "experts are chosen by token id, which the kernel's own router cannot do", None


@_rule("P07_DECOMPOSED", "router outside", "Routes that are changed after routing need a modular kernel.")
def _decomposed(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    if case.env("VLLM_MOE_ROUTING_SIMULATION_STRATEGY") and not variant.decomposed:
        yield "the router must stay outside the kernel (VLLM_MOE_ROUTING_SIMULATION_STRATEGY)", "unset it"


@_rule("P08_ROUTING", "routing method", "Kernels with a built-in router know some routing methods only.")
def _routing(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    accepted = variant.routing
    if accepted is not None and case.shape.routing not in accepted:
        yield f"routing {case.shape.routing} is not one of {', '.join(accepted)}", None


@_rule("P09_ROUTER_DTYPE", "router logits dtype", "Built-in routers take fp32 logits for some methods.")
def _router_dtype(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    accepted = variant.fp32_logits
    dtype = case.shape.router_dtype or case.deployment.dtype
    if dtype == "fp32" and accepted is not None and case.shape.routing not in accepted:
        allowed = ", ".join(accepted) or "none"
        yield f"fp32 router logits with routing {case.shape.routing} (only with {allowed})", "bf16 router logits"


@_rule("P10_HIDDEN", "hidden size", "The hidden size must be a multiple that the kernel's tiles need.")
def _hidden(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    multiple = variant.hidden
    if multiple is None or case.shape.hidden_size % multiple:
        yield f"hidden size {case.shape.hidden_size} is not a multiple of {multiple or 'any that was tried'}", None


_FORMAT_REMEDY = {
    "standard": "a standard all-to-all",
    "batched": "expert parallelism with all-to-all deepep_low_latency",
}


@_rule("P11_FORMAT", "activation format", "Some all-to-all kinds deliver activations as [E, max_tokens, K].")
def _format(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    if case.format != row.format:
        yield f"activations are {case.format}, the kernel takes {row.format}", _FORMAT_REMEDY[row.format]


@_rule("P12_BATCH_INVARIANT", "batch invariance", "Results must not depend on the batch where that is asked for.")
def _batch_invariance(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    if case.flag("VLLM_BATCH_INVARIANT") == "1" and not variant.batch_invariant:
        yield "VLLM_BATCH_INVARIANT=1 asks for batch-invariant results", "unset VLLM_BATCH_INVARIANT"


@_rule("P13_LORA", "LoRA", "Adapters on expert weights need a kernel that applies them.")
def _lora(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    if case.deployment.lora and not variant.lora:
        yield "LoRA on experts", "no LoRA on experts"


@_rule(
    "L01_GEMM_TYPE",
    "Humming GEMM type",
    "Humming runs one GEMM type: indexed, grouped (expert parallelism) or grouped_masked (batched "
    "activations, only by VLLM_HUMMING_MOE_GEMM_TYPE).",
)
def _gemm_type(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    if row.gemm_type is not None and row.gemm_type != case.gemm_type:
        remedy = f"set VLLM_HUMMING_MOE_GEMM_TYPE={row.gemm_type}"
        yield f"Humming prefers {case.gemm_type} GEMMs here, this class is {row.gemm_type}", remedy


@_rule(
    "L02_EXPERTS",
    "number of experts",
    "Triton-family kernels pad experts to 32 and need fewer than 1024; TRTLLM bf16 and fp8 take 2048.",
)
def _experts(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    most = variant.max_experts
    count, replicas = case.physical_experts, case.deployment.redundant_experts
    if most is not None and count > most:
        remedy = "fewer redundant experts" if count - replicas <= most else f"at most {most} experts"
        yield f"{count} experts{f' ({replicas} redundant)' if replicas else ''}, at most {most}", remedy


@_rule("L03_INTERMEDIATE", "intermediate size", "The size per rank must be a multiple that the kernel's tiles need.")
def _intermediate(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    multiple = dict(variant.intermediate_by).get(case.shape.activation, variant.intermediate)
    multiple = multiple and lcm(multiple, row.shard_multiple)
    if multiple is None or case.intermediate % multiple:
        text = f"intermediate size per rank {case.intermediate} is not a multiple of {multiple or 'any that was tried'}"
        yield text, nearest_tp(case, lambda size: multiple is not None and size % multiple == 0)


@_rule("L04_DTYPE", "activation dtype", "Some kernels exist for bf16 only.")
def _dtype(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    accepted = variant.dtypes
    if case.deployment.dtype not in accepted:
        yield f"dtype {case.deployment.dtype}, needs {' or '.join(accepted)}", f"dtype {accepted[0]}"


@_rule("L05_TOP_K", "top-k", "Zentorch needs at least two experts per token.")
def _top_k(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    least = variant.min_top_k or 1
    if case.shape.top_k < least:
        yield f"top-k {case.shape.top_k}, needs at least {least}", None


@_rule("L06_BIAS", "expert bias", "The class has no bias input.")
def _bias(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    if case.shape.has_bias and not variant.bias:
        yield "experts have biases", None


@_rule("L07_LIMIT", "activation limit", "Some classes clamp only some gated activations to the limit.")
def _limit(case: Case, row: ExpertsClass, variant: Variant, activation: str) -> Iterator[Failure]:
    accepted, limit = variant.limit, case.shape.swiglu_limit
    if limit is not None and accepted is not None and case.shape.activation not in accepted:
        yield f"does not apply the activation limit {limit} to {case.shape.activation}", None


#: Rules in the engine's order of evaluation. Limits that a class checks itself come before its other rules.
RULES: tuple[Rule, ...] = (
    *(_gemm_type, _device, _not_gated, _activation, _scheme, _parallel, _hash_routing, _decomposed, _routing),
    *(_router_dtype, _hidden, _format, _batch_invariance, _lora, _experts, _intermediate, _dtype, _top_k),
    *(_bias, _limit),
)


def nearest_tp(case: Case, fits: Callable[[int], bool]) -> str | None:
    """Return a remedy, the nearest tensor-parallel size (or expert parallelism) whose shard fits; None without one."""
    if case.brief:
        return None
    total, tp = case.shape.intermediate_size, case.deployment.tp
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if total % size == 0 and fits(total // size)]
    if case.use_ep or not sizes:
        return None
    best = min(sizes, key=lambda size: (abs(size - tp), -size))
    experts = f", or ep {tp} (whole experts, {total} wide)" if tp > 1 and fits(total) else ""
    return f"tp {best} ({total // best} per rank){experts}"


def class_reasons(case: Case, row: ExpertsClass, activation: str) -> tuple[Reason, ...]:
    """Return a reason per failed rule of an experts class, in the order of evaluation.

    A class without variants for the device fails the device rule alone. Other rules look at the class's variant for the
    case's keys, or at its first variant if none knows the keys.
    """
    variants, gpu = row.variants.get(case.device), case.gpu
    if variants is None:
        kind = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else gpu.arch
        wanted = ", ".join(row.variants)
        text = f"{gpu.name} ({gpu.platform}, {kind}) is not one of {wanted or 'any known device'}"
        return (Reason(_device.code, text, f"a device of kind {wanted}" if wanted else None),)
    variant = next((one for one in variants if one.admits(case.method.weight_key, activation)), variants[0])
    found = (Reason(rule.code, *failure) for rule in RULES for failure in rule.check(case, row, variant, activation))
    if case.brief:
        first = next(found, None)
        return (first,) if first else ()
    return tuple(found)
