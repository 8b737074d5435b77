"""The rules of selection, as values: class predicates P01 to P13, class limits L, and pre-filters F.

All rules are evaluated for every candidate; `explain` and the verdict read the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moeq.oracle.case import Case
from moeq.oracle.policy import Backend, ExpertsClass
from moeq.oracle.records import Reason

Failure = tuple[str, str | None]


@dataclass(frozen=True)
class Rule:
    """One rule about an experts class.

    Attributes:
        code: stable code.
        title: the rule in a few words.
        explain: what it is for, for `moeq explain`.
        check: gives every failure as text and remedy; nothing where the rule holds.
    """

    code: str
    title: str
    explain: str
    check: Callable[[Case, ExpertsClass, str], Iterator[Failure]]


def _device(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    gpu = case.gpu
    if not any(term.admits(gpu) for term in row.devices):
        kind = f"compute capability {gpu.capability[0]}.{gpu.capability[1]}" if gpu.capability else gpu.arch
        wanted = " or ".join(term.text for term in row.devices)
        yield f"{gpu.name} ({gpu.platform}, {kind}) is not {wanted}", f"a device of kind {wanted}"
    for package in row.packages:
        if not case.package(package):
            yield f"package {package} is absent", f"install {package}"
    for name, value in row.env:
        if case.env(name) != value:
            yield f"{name} is {case.env(name) or 'unset'}, needs {value}", f"set {name}={value}"


def _not_gated(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    gated = case.shape.gated and not case.shape.activation.endswith("_no_mul")
    if not gated and not row.no_act_and_mul:
        yield f"{case.shape.activation} without a gate half", None


def _activation(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if case.shape.activation not in row.activations:
        yield f"activation {case.shape.activation} is not one of {', '.join(row.activations)}", None


def _scheme(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    weight = case.method.weight_key
    if not any(pair.admits(weight, activation, case.gpu) for pair in row.pairs):
        group = case.method.group_size
        detail = "" if group is None else f" ({case.method.bits} bits, {'channel' if group < 0 else f'group {group}'})"
        yield f"weights {weight}{detail} with activations {activation} on {case.gpu.name}", None


# name -> (does the deployment break it, text, remedy)
_PARALLEL: dict[str, tuple[Callable[[Case], bool], str, str]] = {
    "no-flashinfer-two-sided": (
        lambda case: case.all2all == "flashinfer_nvlink_two_sided",
        "all-to-all flashinfer_nvlink_two_sided",
        "another all-to-all, such as allgather_reducescatter",
    ),
    "no-flashinfer-one-sided": (
        lambda case: case.all2all == "flashinfer_nvlink_one_sided",
        "all-to-all flashinfer_nvlink_one_sided",
        "another all-to-all, such as allgather_reducescatter",
    ),
    "no-deepep-ht": (
        lambda case: case.all2all == "deepep_high_throughput",
        "all-to-all deepep_high_throughput",
        "another all-to-all, such as allgather_reducescatter",
    ),
    "only-allgather": (
        lambda case: case.all2all not in (None, "allgather_reducescatter"),
        "an all-to-all other than allgather_reducescatter",
        "all-to-all allgather_reducescatter",
    ),
    "no-all2all": (lambda case: case.uses_all2all, "all-to-all kernels (expert parallel with dp above 1)", "dp 1"),
    "no-dp": (lambda case: case.deployment.dp > 1, "data-parallel ranks", "dp 1"),
    "no-ep": (lambda case: case.use_ep, "expert parallelism", "ep 1"),
    "only-ep": (lambda case: not case.use_ep, "no expert parallelism", "ep above 1"),
    "no-eplb": (lambda case: case.deployment.eplb, "expert load balancing", "no expert load balancing"),
    "tp-only": (
        lambda case: case.use_ep or case.deployment.dp > 1 or case.deployment.eplb,
        "anything but plain tensor parallelism",
        "ep 1 and dp 1",
    ),
}


def _parallel(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    deployment = case.deployment
    for name in row.parallel:
        broken, text, remedy = _PARALLEL[name]
        if broken(case):
            sizes = f"tp {deployment.tp}, ep {deployment.ep}, dp {deployment.dp}"
            yield f"{text} ({sizes}, {case.all2all or 'no'} all-to-all)", remedy


def _hash_routing(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if row.monolithic and case.shape.hash_routing and not row.hash_routing:
        yield "experts are chosen by token id, which the kernel's own router cannot do", None


def _decomposed(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if row.monolithic and case.env("VLLM_MOE_ROUTING_SIMULATION_STRATEGY"):
        yield "the router must stay outside the kernel (VLLM_MOE_ROUTING_SIMULATION_STRATEGY)", "unset it"


def _routing(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if row.routing is not None and case.shape.routing not in row.routing:
        yield f"routing {case.shape.routing} is not one of {', '.join(row.routing)}", None


def _router_dtype(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    dtype = case.shape.router_dtype or case.deployment.dtype
    if dtype == "fp32" and row.fp32_logits is not None and case.shape.routing not in row.fp32_logits:
        allowed = ", ".join(row.fp32_logits)
        yield f"fp32 router logits with routing {case.shape.routing} (only with {allowed})", "bf16 router logits"


def _hidden(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if case.shape.hidden_size % row.hidden_multiple:
        yield f"hidden size {case.shape.hidden_size} is not a multiple of {row.hidden_multiple}", None


_FORMAT_REMEDY = {
    "standard": "a standard all-to-all",
    "batched": "expert parallelism with all-to-all deepep_low_latency",
}


def _format(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if case.format != row.format:
        yield f"activations are {case.format}, the kernel takes {row.format}", _FORMAT_REMEDY[row.format]


def _batch_invariance(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if case.env("VLLM_BATCH_INVARIANT") == "1" and not row.batch_invariant:
        yield "VLLM_BATCH_INVARIANT=1 asks for batch-invariant results", "unset VLLM_BATCH_INVARIANT"


def _lora(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if case.deployment.lora and not row.lora:
        yield "LoRA on experts", "no LoRA on experts"


def _gemm_type(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if row.gemm_type is not None and row.gemm_type != case.gemm_type:
        remedy = f"set VLLM_HUMMING_MOE_GEMM_TYPE={row.gemm_type}"
        yield f"Humming prefers {case.gemm_type} GEMMs here, this class is {row.gemm_type}", remedy


def _experts(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    padded = -(-case.shape.num_experts // 32) * 32
    alike = case.gpu.platform in ("cuda", "rocm")
    if alike and row.max_padded_experts is not None and padded > row.max_padded_experts:
        text = f"{case.shape.num_experts} experts pad to {padded}, the kernel needs fewer than 1024"
        yield text, "fewer than 993 experts"
    if row.max_experts is not None and case.shape.num_experts > row.max_experts:
        yield f"{case.shape.num_experts} experts, at most {row.max_experts}", None


def _intermediate(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if case.intermediate % row.intermediate_multiple:
        text = f"intermediate size per rank {case.intermediate} is not a multiple of {row.intermediate_multiple}"
        yield text, nearest_tp(case, lambda size: size % row.intermediate_multiple == 0)


def _dtype(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if row.dtypes is not None and case.deployment.dtype not in row.dtypes:
        yield f"dtype {case.deployment.dtype}, needs {' or '.join(row.dtypes)}", f"dtype {row.dtypes[0]}"


def _top_k(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if case.shape.top_k < row.min_top_k:
        yield f"top-k {case.shape.top_k}, needs at least {row.min_top_k}", None


def _bias(case: Case, row: ExpertsClass, activation: str) -> Iterator[Failure]:
    if row.no_bias and case.shape.has_bias:
        yield "experts have biases", None


#: In the engine's order of evaluation; class-level limits stand where their class looks at them: before the rest.
RULES: tuple[Rule, ...] = (
    Rule(
        "L01_GEMM_TYPE",
        "Humming GEMM type",
        "Humming runs one GEMM type: indexed, grouped (expert parallelism) or "
        "grouped_masked (batched activations, only by VLLM_HUMMING_MOE_GEMM_TYPE).",
        _gemm_type,
    ),
    Rule("P01_DEVICE", "device", "Platform first, then architecture, then optional packages and switches.", _device),
    Rule(
        "P02_NOT_GATED",
        "non-gated MLP",
        "Kernels that fuse act(gate) * up cannot run experts without a gate.",
        _not_gated,
    ),
    Rule(
        "P03_ACTIVATION", "activation", "The activation function is fused into the kernel or its helper.", _activation
    ),
    Rule(
        "P04_SCHEME",
        "weight and activation types",
        "The pair of weight and activation keys must be one the class "
        "lists. The engine's int4 keys do not carry the real group size.",
        _scheme,
    ),
    Rule("P05_PARALLEL", "parallel form", "Expert, data parallelism, all-to-all kind and load balancing.", _parallel),
    Rule(
        "P06_HASH_ROUTING", "hash routing", "Monolithic kernels route themselves and need to know how.", _hash_routing
    ),
    Rule(
        "P07_DECOMPOSED", "router outside", "Routes that are changed after routing need a modular kernel.", _decomposed
    ),
    Rule("P08_ROUTING", "routing method", "Kernels with a built-in router know some routing methods only.", _routing),
    Rule(
        "P09_ROUTER_DTYPE", "router logits dtype", "Built-in routers take fp32 logits for some methods.", _router_dtype
    ),
    Rule("P10_HIDDEN", "hidden size", "A multiple the kernel's tiles need.", _hidden),
    Rule(
        "P11_FORMAT", "activation format", "Some all-to-all kinds deliver activations as [E, max_tokens, K].", _format
    ),
    Rule("P12_BATCH_INVARIANT", "batch invariance", "Results that do not depend on the batch.", _batch_invariance),
    Rule("P13_LORA", "LoRA", "Adapters on expert weights need a kernel that applies them.", _lora),
    Rule(
        "L02_EXPERTS",
        "number of experts",
        "Triton-family kernels pad experts to 32 and need fewer than 1024; TRTLLM bf16 and fp8 take 2048.",
        _experts,
    ),
    Rule("L03_INTERMEDIATE", "intermediate size", "A multiple the kernel's tiles need, per rank.", _intermediate),
    Rule("L04_DTYPE", "activation dtype", "Some kernels exist for bf16 only.", _dtype),
    Rule("L05_TOP_K", "top-k", "Zentorch needs at least two experts per token.", _top_k),
    Rule("L06_BIAS", "expert bias", "The class has no bias input.", _bias),
)


def nearest_tp(case: Case, fits: Callable[[int], bool]) -> str | None:
    """The tensor-parallel size (or expert parallelism) nearest to the asked one whose shard fits."""
    if case.brief:
        return None
    total, tp = case.shape.intermediate_size, case.deployment.tp
    sizes = [size for size in (1, 2, 4, 8, 16, 32) if total % size == 0 and fits(total // size)]
    if case.use_ep or not sizes:
        return None
    best = min(sizes, key=lambda size: (abs(size - tp), -size))
    experts = f", or ep {tp} (whole experts, {total} wide)" if tp > 1 and fits(total) else ""
    return f"tp {best} ({total // best} per rank){experts}"


# ------------------------------------------------------------------------------------------------ pre-filters


@dataclass(frozen=True)
class Filter:
    """A check of the engine on a whole backend, before its classes are looked at."""

    code: str
    title: str
    check: Callable[[Case], Iterator[Failure]]


def _f_zero_point(case: Case) -> Iterator[Failure]:
    if case.method.zero_points:
        yield "the checkpoint's method has zero points", "a symmetric checkpoint"


def _f_bias(case: Case) -> Iterator[Failure]:
    if case.method.bias_possible:
        real = "has" if case.shape.has_bias else "has none, but"
        yield f"expert bias: this checkpoint {real} {case.method.name} assumes it may have one", None


def _f_act_order(case: Case) -> Iterator[Failure]:
    if case.method.act_order:
        yield "columns are reordered by activation order", "a checkpoint without act-order"


def _f_ct_only(case: Case) -> Iterator[Failure]:
    if case.method.config != "ct":
        yield f"config is {case.method.config}, only compressed-tensors is taken", None


def _f_group_only(case: Case) -> Iterator[Failure]:
    if (case.method.group_size or -1) <= 0:
        yield "scales are per channel, only groups are taken", None


def _f_not_awq(case: Case) -> Iterator[Failure]:
    if case.method.config == "awq":
        yield "the AWQ word order is not read", None


def _f_marlin_config(case: Case) -> Iterator[Failure]:
    if case.method.config not in ("awq", "gptq", "ct", "moe_wna16"):
        yield f"config is {case.method.config}, only AWQ, GPTQ and compressed-tensors are converted", None


def _f_not_moe_wna16(case: Case) -> Iterator[Failure]:
    if case.method.config == "moe_wna16":
        yield "weights were loaded in the MoeWNA16 byte layout", None


def _f_marlin_shape(case: Case) -> Iterator[Failure]:
    yield from marlin_shape(case, case.method.group_size, case.method.tile_padding)


def _f_zen_w4a8(case: Case) -> Iterator[Failure]:
    if case.env("VLLM_CPU_INT4_W4A8") == "0":
        yield "VLLM_CPU_INT4_W4A8=0", "unset VLLM_CPU_INT4_W4A8"


def _f_zen_group(case: Case) -> Iterator[Failure]:
    group = case.method.group_size
    if group is None or group <= 0 or group % 4:
        yield f"group size {group or -1} is not a positive multiple of 4", None


def marlin_shape(case: Case, group: int | None, tile_padding: bool = True) -> Iterator[Failure]:
    """Marlin's shape test, each cause on its own (vLLM gives one text for all of them).

    Source: `check_moe_marlin_supports_config` of vLLM 0.33.0; sizes are unpadded and per rank.
    """
    group = group if group is not None else -1
    hidden, inner = case.shape.hidden_size, case.intermediate
    if case.gpu.platform == "rocm":
        yield "Marlin has no ROCm build", "a CUDA device"
    if hidden % 128:
        yield f"hidden size {hidden} is not a multiple of 128 (remainder {hidden % 128})", None
    if group not in (-1, 32, 64, 128):
        yield f"group size {group} is not one of -1, 32, 64, 128", None
    multiple = (group if group > 0 else 1) if tile_padding else max(64, group)
    if inner % multiple:
        text = f"intermediate size per rank {inner} is not a multiple of {multiple} (remainder {inner % multiple})"
        yield text, nearest_tp(case, lambda size: size % multiple == 0)


FILTERS: dict[str, Filter] = {
    "zero-point": Filter("F01_ZERO_POINT", "no zero points", _f_zero_point),
    "bias": Filter("F02_BIAS", "no expert bias", _f_bias),
    "ct-only": Filter("F03_CONFIG", "compressed-tensors only", _f_ct_only),
    "marlin-config": Filter("F03_CONFIG", "AWQ, GPTQ or compressed-tensors", _f_marlin_config),
    "not-awq": Filter("F04_LAYOUT", "not the AWQ layout", _f_not_awq),
    "not-moe-wna16": Filter("F04_LAYOUT", "not the MoeWNA16 layout", _f_not_moe_wna16),
    "act-order": Filter("F05_ACT_ORDER", "no act-order", _f_act_order),
    "group-only": Filter("F06_STRATEGY", "group scales only", _f_group_only),
    "marlin-shape": Filter(
        "F07_MARLIN_SHAPE", "hidden % 128, groups 32/64/128/channel that divide the shard", _f_marlin_shape
    ),
    "zen-w4a8": Filter("F08_SWITCH", "VLLM_CPU_INT4_W4A8 not 0", _f_zen_w4a8),
    "zen-group": Filter("F09_GROUP", "group size multiple of 4", _f_zen_group),
}


def filter_reasons(case: Case, backend: Backend) -> tuple[Reason, ...]:
    """Every failed pre-filter of a backend."""
    found: list[Reason] = []
    for name in backend.filters:
        row = FILTERS[name]
        found.extend(Reason(row.code, text, remedy) for text, remedy in row.check(case))
        if found and case.brief:
            break
    return tuple(found)


def class_reasons(case: Case, row: ExpertsClass, activation: str) -> tuple[Reason, ...]:
    """Every failed rule of an experts class, in the order of evaluation."""
    found = (Reason(rule.code, *failure) for rule in RULES for failure in rule.check(case, row, activation))
    if case.brief:
        first = next(found, None)
        return (first,) if first else ()
    return tuple(found)
