"""Gates G0 to G11: checks of the engine before and after backend selection.

Each gate is a value with a check. All are evaluated and reported, passed or not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from moeq.oracle.engines.vllm.case import Case
from moeq.oracle.engines.vllm.configs.floats import NVFP4_GROUP
from moeq.oracle.engines.vllm.configs.online import is_online
from moeq.oracle.engines.vllm.entry_points import in_force
from moeq.oracle.engines.vllm.rules import class_reasons, nearest_tp
from moeq.oracle.engines.vllm.sizes import shrunk_group, sizes_for, transported_hidden
from moeq.oracle.records import CandidateReport, Gate, Sizes
from moeq.spelling import option


@dataclass(frozen=True)
class GateFailure:
    """Failure of a gate."""

    error: str
    text: str
    remedy: str | None = None
    kind: str = "CONFIG"


@dataclass(frozen=True)
class Stage:
    """Input of a gate: the case, the entry point, the selected backend if any, and the declared method."""

    case: Case
    entry: str
    selected: CandidateReport | None
    declared: str = ""


@dataclass(frozen=True)
class GateRule:
    """One gate: code, stage of the engine's start, sentence for `moeq explain`, and check."""

    code: str
    stage: str
    explain: str
    check: Callable[[Stage], Iterator[GateFailure]]


def _is_refused(stage: Stage, *, elsewhere: bool) -> bool:
    """Tell whether this device refuses the method's name.

    `elsewhere`: count only names that another device accepts; otherwise only names that no device accepts.
    """
    case, declared, asked = stage.case, stage.declared, stage.case.deployment.quantization
    named = (declared or asked is not None) and case.device
    if not named or in_force(case.policy, case.device, declared, asked) is not None:
        return False
    return elsewhere == any(in_force(case.policy, device, declared, asked) for device in case.policy.names)


def _method(stage: Stage) -> Iterator[GateFailure]:
    asked = stage.case.deployment.quantization
    if _is_refused(stage, elsewhere=False):
        text = f"the checkpoint's method {stage.declared or 'none'} does not match the quantization argument {asked}"
        yield GateFailure("ValueError", text, f"drop {option('quantization')}" if asked else None)


def _platform(stage: Stage) -> Iterator[GateFailure]:
    case = stage.case
    if _is_refused(stage, elsewhere=True):
        name = case.deployment.quantization or stage.entry
        yield GateFailure("ValueError", f"{name} quantization is not supported on {case.gpu.platform}")


def _limits(stage: Stage) -> dict[str, Any]:
    """Return the least capability and the dtypes of the method that the engine uses; empty if it has no limits."""
    case = stage.case
    if stage.entry == "":
        return {}
    name = in_force(case.policy, case.device, stage.declared, case.deployment.quantization)
    if not stage.declared and is_online(case.policy, name):
        name = "online"
    found: dict[str, Any] = dict(case.policy.limits.get(name or stage.entry, {}))
    return found


def _capability(stage: Stage) -> Iterator[GateFailure]:
    gpu, least = stage.case.gpu, _limits(stage).get("capability")
    if least is None or gpu.platform != "cuda" or gpu.capability is None:
        return
    have = gpu.capability[0] * 10 + gpu.capability[1]
    if have < least:
        text = f"{stage.entry} needs compute capability {least / 10:.1f}, {gpu.name} has {have / 10:.1f}"
        yield GateFailure("ValueError", text, f"a GPU of capability {least / 10:.1f} or newer")


def _dtype(stage: Stage) -> Iterator[GateFailure]:
    case = stage.case
    allowed = _limits(stage).get("dtypes")
    dtype = case.deployment.dtype
    if allowed is not None and dtype not in allowed:
        yield GateFailure(
            "ValueError", f"{dtype} is not supported for {stage.entry}, only {', '.join(allowed)}", "dtype bf16"
        )
    capability = case.gpu.capability
    if dtype == "bf16" and case.gpu.platform == "cuda" and capability is not None and capability < (8, 0):
        text = f"bf16 needs compute capability 8.0, {case.gpu.name} has {capability[0]}.{capability[1]}"
        yield GateFailure("ValueError", text, "dtype fp16")


def _sizes(stage: Stage) -> Iterator[GateFailure]:
    case = stage.case
    total, tp = case.shape.intermediate_size, case.moe_tp
    if (case.all2all or "").startswith("mori") and not _aiter(case):
        yield GateFailure(
            "AssertionError", f"all-to-all {case.all2all} needs AITER's experts", "set VLLM_ROCM_USE_AITER=1"
        )
    if total % tp:
        text = f"intermediate size {total} does not divide by tp {tp} (remainder {total % tp})"
        yield GateFailure("AssertionError", text, nearest_tp(case, lambda size: True))
    d, experts = case.deployment, case.physical_experts
    if d.ep > 1 and d.ep != case.ranks:
        sizes = [("tp", d.tp), ("dp", d.dp), *([("pcp", d.pcp)] if d.pcp > 1 else [])]
        names, counts = (" x ".join(str(part) for part in parts) for parts in zip(*sizes, strict=True))
        text = f"expert parallelism takes every rank: ep is {names} = {counts} = {case.ranks}, not {d.ep}"
        yield GateFailure("ValueError", text, f"ep {case.ranks}, or tp {d.ep}")
    if d.ep > experts:
        text = f"ep {d.ep} is more than {experts} experts: {d.ep - experts} of {d.ep} ranks would hold none"
        remedy = f"ep {experts}, or eplb with {d.ep - experts} more redundant experts"
        yield GateFailure("ValueError", text, remedy)


def _aiter(case: Case) -> bool:
    """Tell whether AITER's fused experts are enabled: experts have a gate, and device, package and variables fit."""
    classes = case.policy.classes
    row = classes.get("AiterUnquantizedExperts") or classes.get("AiterExperts")  # one class for all keys before 0.33
    if row is None or not case.gated:
        return False
    return all(reason.code != "P01_DEVICE" for reason in class_reasons(replace(case, brief=False), row, "none"))


#: Methods that support expert load balancing, with the backends that support it; None for all backends.
_EPLB: dict[str, tuple[str, ...] | None] = {
    "UnquantizedFusedMoEMethod": None,
    "Fp8MoEMethod": None,
    "ModelOptNvFp4FusedMoE": None,
    "Mxfp4MoEMethod": None,
    "CompressedTensorsW4A8Mxfp4MoEMethod": None,
    "QuarkOCP_MX_MoEMethod": None,
    "CompressedTensorsW8A8Fp8MoEMethod": None,
    "CompressedTensorsWNA16MoEMethod": ("TRITON",),
    "CompressedTensorsW4A4Nvfp4MoEMethod": (
        "FLASHINFER_TRTLLM",
        "FLASHINFER_CUTEDSL",
        "FLASHINFER_CUTEDSL_BATCHED",
        "FLASHINFER_MOE_EP_CUTEDSL",
    ),
    "CompressedTensorsW4A4Mxfp4MoEMethod": ("FLASHINFER_MOE_EP_CUTEDSL", "FLASHINFER_MOE_EP_DEEP_GEMM"),
    "QuarkW8A8Mxfp8MoEMethod": None,
}

#: Methods that supported expert load balancing on every backend before vLLM 0.27.
_EPLB_BEFORE_0_27 = ("CompressedTensorsWNA16MoEMethod", "CompressedTensorsWNA16RDNA3MoEMethod")


def _eplb(stage: Stage) -> Iterator[GateFailure]:
    case = stage.case
    if not case.deployment.eplb or not case.method.name:
        return
    name, backend = case.method.name, stage.selected.backend if stage.selected else None
    backends = _EPLB.get(name, ())
    supported_before = not case.policy.since("0.27.0") and name in _EPLB_BEFORE_0_27
    supported = "Online" in name or backends is None or backend in backends or supported_before
    if not supported:
        text = f"EPLB: {name} does not support it{f' for {backend}' if backends else ''}"
        yield GateFailure("NotImplementedError", text, "no expert load balancing", "EPLB")


#: Method -> required divisor of hidden size and intermediate size per rank, and the error if there is a remainder.
_MULTIPLES = {
    "ModelOptMxFp8FusedMoE": (32, "ValueError"),
    "Mxfp8OnlineMoEMethod": (32, "ValueError"),
    "INCMxfp8MoEMethod": (32, "ValueError"),
    "QuarkW8A8Mxfp8MoEMethod": (32, "ValueError"),
    "CompressedTensorsW4A8Fp8MoEMethod": (256, "AssertionError"),
}
#: Methods that halve the group size until it divides the sizes per rank.
_HALVED = ("MoeWNA16Method", "QuarkW4A16Int4MoEMethod")


def _create(stage: Stage) -> Iterator[GateFailure]:
    if not stage.case.method.name:
        return
    for check in (_groups, _multiples, _blocks, _packed):
        yield from check(stage.case)
    if stage.case.method.name == "Mxfp4OnlineMoEMethod" and stage.selected is not None:
        sizes = sizes_for(stage.case, stage.selected)
        if sizes.padded_hidden % 32 or sizes.padded_intermediate % 32:
            text = f"sizes {sizes.padded_hidden} and {sizes.padded_intermediate} per rank are no multiples of 32"
            yield GateFailure("ValueError", text, nearest_tp(stage.case, lambda size: size % 32 == 0))


def _groups(case: Case) -> Iterator[GateFailure]:
    method = case.method
    group, hidden, inner = method.group_size, transported_hidden(case), case.intermediate
    divides_by_group = method.name in ("MoeWNA16Method", "AutoAWQMoEMethod", "HummingMoEMethod")
    if divides_by_group and group is not None and group < 0:
        yield GateFailure(
            "RuntimeError", f"group_size {group} gives a negative number of groups", "requantise with a group size"
        )
    elif divides_by_group and group == 0:
        yield GateFailure("ZeroDivisionError", "group_size 0 gives no number of groups", "requantise with a group size")
    elif method.name in _HALVED and group is not None:
        shrunk = shrunk_group(hidden, inner, group)
        if shrunk < 32 and shrunk != group:
            text = f"group size {group} is halved to {shrunk} to divide {hidden} and {inner} per rank, below 32"
            yield GateFailure(
                "AssertionError", text, nearest_tp(case, lambda size: shrunk_group(hidden, size, group) >= 32)
            )
    if method.name.startswith("CompressedTensorsWNA16") and group is not None and group > 0:
        for what, size in (("hidden size", hidden), ("intermediate size per rank", inner)):
            if size % group:
                remedy = nearest_tp(case, lambda size: size % group == 0)
                yield GateFailure("ValueError", f"{what} {size} is not a multiple of group size {group}", remedy)


def _multiples(case: Case) -> Iterator[GateFailure]:
    multiple, error = _MULTIPLES.get(case.method.name, (1, ""))
    sizes = (("hidden size", transported_hidden(case)), ("intermediate size per rank", case.intermediate))
    for what, size in sizes:
        if size % multiple:
            remedy = nearest_tp(case, lambda size: size % multiple == 0) if size == case.intermediate else None
            yield GateFailure(error, f"{what} {size} is not a multiple of {multiple}", remedy)


def _blocks(case: Case) -> Iterator[GateFailure]:
    """Check that a shard divides into whole FP8 blocks."""
    if case.method.block is None or case.method.config == "online":
        return
    (rows, columns), inner = case.method.block, case.method.padded_intermediate or case.intermediate
    if inner % rows or (case.deployment.tp > 1 and inner % columns):
        text = f"intermediate size per rank {inner} does not divide into blocks of {rows} x {columns}"
        yield GateFailure("ValueError", text, nearest_tp(case, lambda size: size % rows == 0 and size % columns == 0))


def _packed(case: Case) -> Iterator[GateFailure]:
    method, hidden, inner = case.method, transported_hidden(case), case.intermediate
    if method.name == "CompressedTensorsWNA16MoEMethod" and method.zero_points and (2 * inner % 8 or hidden % 8):
        yield GateFailure("ValueError", f"zero points need 2 x {inner} and {hidden} to be multiples of 8")
    if method.checks_input and case.env("VLLM_MARLIN_INPUT_DTYPE") in ("int8", "fp8") and method.bits == 4:
        text = "VLLM_MARLIN_INPUT_DTYPE with 4-bit GPTQ trips an inverted check"
        yield GateFailure("AssertionError", text, "unset VLLM_MARLIN_INPUT_DTYPE")


def _convert(stage: Stage) -> Iterator[GateFailure]:
    case, selected = stage.case, stage.selected
    if selected is None:
        return
    facts = {
        "config": case.method.config,
        "family": case.method.family,
        "backend": selected.backend,
        "bias": case.shape.has_bias,
        "platform": case.gpu.platform,
    }
    for row in case.policy.no_converter:
        if all(row.get(key, value) == value for key, value in facts.items()):
            text = f"conversion to {selected.backend}: {row['text']}"
            yield GateFailure(row["error"], text, "another backend", "CONVERSION")
    if selected.backend == "CUTLASS_MXFP4_MXFP4":
        yield from _swizzled_scales(case, sizes_for(case, selected))
    if selected.backend == "TRITON":
        yield from _single_group(case)
    if selected.backend == "FLASHINFER_TRTLLM" and case.method.block is not None:
        hidden = sizes_for(case, selected).padded_hidden
        if hidden % 128:
            text = f"conversion to FLASHINFER_TRTLLM: hidden size {hidden} is no multiple of 128, so FP8 blocks are cut"
            yield GateFailure("RuntimeError", text, "another backend", "CONVERSION")
    if case.method.name == "ModelOptNvFp4FusedMoE" and case.method.group_size is not None:
        text = f"NVFP4 has one scale per {NVFP4_GROUP} codes, and group_size is {case.method.group_size}"
        yield GateFailure("RuntimeError", text, f'"group_size": {NVFP4_GROUP}', "CONVERSION")
    marlin = selected.backend in ("MARLIN", "BATCHED_MARLIN")
    if marlin:
        yield from _marlin_input(case)
    if marlin and case.method.group_missing and not case.policy.since("0.30.0"):
        text = f"conversion to {selected.backend}: it compares group_size with 0, and the config names none"
        yield GateFailure("TypeError", text, "group_size -1 in the config, or vLLM 0.30 and newer", "CONVERSION")


#: Weights whose conversion for Marlin refuses 8-bit activations -> the refused values of VLLM_MARLIN_INPUT_DTYPE.
_NO_MARLIN_INPUT = {
    "kFp8": (("int8", "fp8"), "NotImplementedError"),
    "kNvfp4": (("int8", "fp8"), "RuntimeError"),
    "kMxfp4": (("int8",), "RuntimeError"),
}


def _marlin_input(case: Case) -> Iterator[GateFailure]:
    """Check VLLM_MARLIN_INPUT_DTYPE as the conversion of floating-point weights does."""
    asked, weights = case.env("VLLM_MARLIN_INPUT_DTYPE"), case.method.weight_key
    for start, (refused, error) in _NO_MARLIN_INPUT.items():
        if weights.startswith(start) and asked in refused:
            text = f"conversion to Marlin: {weights} weights take no {asked} activations"
            yield GateFailure(error, text, "unset VLLM_MARLIN_INPUT_DTYPE", "CONVERSION")


def _single_group(case: Case) -> Iterator[GateFailure]:
    """Check for zero points of a single group, whose transpose is not contiguous (vLLM 0.29.0 and 0.30.0)."""
    method, since = case.method, case.policy.since
    stored = method.name == "CompressedTensorsWNA16MoEMethod" and method.zero_points
    if not stored or not since("0.29.0") or since("0.31.0"):
        return
    for what, size in (("hidden size", case.shape.hidden_size), ("intermediate size per rank", case.intermediate)):
        if size == method.group_size:
            text = f"conversion to TRITON: {what} {size} is one group, whose zero points this version cannot transpose"
            yield GateFailure("RuntimeError", text, "another backend, or vLLM 0.31", "CONVERSION")


def _swizzled_scales(case: Case, sizes: Sizes) -> Iterator[GateFailure]:
    """Check that scales need no padding: the engine swizzles them to tiles of 128 x 4 and reshapes to the old size."""
    for what, size in (("hidden size", sizes.padded_hidden), ("intermediate size per rank", sizes.padded_intermediate)):
        if size % 128:
            text = f"conversion to CUTLASS_MXFP4_MXFP4: {what} {size} is no multiple of 128: its scales are padded"
            remedy = nearest_tp(case, lambda size: size % 128 == 0) if size == sizes.padded_intermediate else None
            yield GateFailure("RuntimeError", text, remedy, "CONVERSION")


#: Activation keys that the one-sided all-to-all of FlashInfer can dispatch.
_FLASHINFER_ONE_SIDED = ("kNvfp4Dynamic", "kMxfp8Dynamic", "kFp8Dynamic128Sym", "none")


def _kernel(stage: Stage) -> Iterator[GateFailure]:
    case, selected = stage.case, stage.selected
    if selected is None or case.method.built_in is not None or selected.experts is None:
        return
    activation = selected.activation_key or "none"
    if not selected.supported:
        reasons = class_reasons(case, case.policy.classes[selected.experts], activation)
        text = "; ".join(reason.text for reason in reasons)
        yield GateFailure(
            "ValueError", f"{selected.experts} is taken unchecked and refused: {text}", None, "KERNEL_CREATION"
        )
    if case.all2all == "flashinfer_nvlink_one_sided" and activation not in _FLASHINFER_ONE_SIDED:
        text = f"flashinfer_nvlink_one_sided cannot dispatch activations {activation}"
        yield GateFailure("NotImplementedError", text, "all-to-all allgather_reducescatter", "KERNEL_CREATION")
    one_sided, hidden = case.all2all == "flashinfer_nvlink_one_sided", case.shape.hidden_size
    if one_sided and activation == "kFp8Dynamic128Sym" and hidden % 128:
        text = f"flashinfer_nvlink_one_sided dispatches fp8 blocks of 128, hidden size is {hidden}"
        yield GateFailure("NotImplementedError", text, "all-to-all allgather_reducescatter", "KERNEL_CREATION")
    known = case.policy.classes.get(selected.experts)
    asserted = known.asserted_dtypes if known else None
    if asserted is not None and case.deployment.dtype not in asserted:
        text = f"{selected.experts} asserts dtype {asserted[0]}, this is {case.deployment.dtype}"
        yield GateFailure("AssertionError", text, f"dtype {asserted[0]}", "KERNEL_CREATION")
    if case.shape.router_weight_on_input and case.shape.top_k != 1 and not selected.monolithic:
        text = f"router weights on the input work for top-k 1 only, this is {case.shape.top_k}"
        yield GateFailure("AssertionError", text, None, "KERNEL_CREATION")


def _options(stage: Stage) -> Iterator[GateFailure]:
    case = stage.case
    policy, deployment = case.policy, case.deployment
    kind, replicas = deployment.all2all, deployment.redundant_experts
    if kind is not None and kind not in policy.all2all:
        text = f"{policy.name} has no all-to-all {kind}"
        yield GateFailure("ValueError", text, f"one of {', '.join(policy.all2all)}", "OPTION")
    if deployment.pcp > 1 and deployment.dp > 1 and not policy.since("0.30.0"):
        text = f"{policy.name} has no pcp {deployment.pcp} beside dp {deployment.dp}"
        yield GateFailure("ValueError", text, "dp 1, or pcp 1", "OPTION")
    if deployment.eplb:
        yield from _balancing(case)
    elif replicas:
        text = f"{replicas} redundant experts need expert load balancing, which is off"
        yield GateFailure("ValueError", text, f"{option('eplb', True)}, or no redundant experts", "OPTION")


def _balancing(case: Case) -> Iterator[GateFailure]:
    """Check that the deployment allows expert load balancing (`ParallelConfig`, `FusedMoE`, vLLM 0.26.0 to 0.33.0)."""
    platforms = ("cuda", "rocm", "xpu") if case.policy.since("0.31.0") else ("cuda", "rocm")
    if case.gpu.platform not in platforms:
        text = f"expert load balancing exists on {', '.join(platforms)}, not on {case.gpu.platform}"
        yield GateFailure("ValueError", text, "no expert load balancing", "OPTION")
    if not case.use_ep:
        text = "expert load balancing needs expert parallelism over more than one rank"
        ranks = f"ep {case.ranks}" if case.ranks > 1 else "ep above 1"
        yield GateFailure("ValueError", text, f"{ranks}, or no expert load balancing", "OPTION")
    elif rest := case.physical_experts % case.deployment.ep:
        more, replicas = case.deployment.ep - rest, case.deployment.redundant_experts
        text = (
            f"load balancing spreads experts evenly: {case.physical_experts} do not divide by ep {case.deployment.ep}"
        )
        yield GateFailure("ValueError", text, f"{replicas + more} redundant experts", "OPTION")


#: Experts classes for x86 CPUs with AMX, with the activation dtypes that their kernels take.
_CPU_KERNELS = {
    "CPUExpertsInt4": ("bf16", "fp16"),
    "CPUExpertsInt8": ("bf16",),
    "CPUExpertsMxfp4": ("bf16",),
    "CPUExpertsFp8": ("bf16",),
}


def _first_call(stage: Stage) -> Iterator[GateFailure]:
    """Check what CPU kernels refuse only when they are called, as the kernels of vLLM 0.32.0 do."""
    case = stage.case
    experts = stage.selected.experts or "" if stage.selected and case.gpu.platform == "cpu" else ""
    if experts.endswith("TritonExperts"):
        text = "the experts run in Triton, which vLLM's build for CPUs replaces with an empty module"
        yield GateFailure("AttributeError", text, "a GPU", "KERNEL_CALL")
    dtypes = _CPU_KERNELS.get(experts)
    if dtypes is None:
        return
    if case.deployment.ep > 1:
        text = "the kernel takes no map of experts: a token for an expert of another rank stops it or ends the process"
        yield GateFailure("RuntimeError", text, "no expert parallelism", "KERNEL_CALL")
    if case.deployment.dtype not in dtypes:
        text = f"the kernel ends the process with {case.deployment.dtype} activations (c10::Error)"
        yield GateFailure("SystemExit", text, f"dtype {dtypes[0]}", "KERNEL_CALL")


GATES: tuple[GateRule, ...] = (
    GateRule("G0", "method detection", "The checkpoint's method has to match the one that the user names.", _method),
    GateRule("G1", "platform list", "Builds of the engine for some platforms leave methods out.", _platform),
    GateRule("G2", "minimum capability", "Every method has a least CUDA compute capability.", _capability),
    GateRule("G3", "activation dtype", "The method and the device have to accept the dtype.", _dtype),
    GateRule("G5", "sizes per rank", "Sizes are divided by the ranks, then rounded up by the backend's rule.", _sizes),
    GateRule("G6", "load balancing", "Methods, not backends, support expert load balancing.", _eplb),
    GateRule("G7", "create weights", "Parameters are allocated: groups have to divide the sizes.", _create),
    GateRule("G8", "conversion", "Load-time conversion has to know the config class.", _convert),
    GateRule("G9", "kernel creation", "Prepare and experts objects are made and checked against each other.", _kernel),
    GateRule("G10", "options", "This version of the engine has to know the values of its options.", _options),
    GateRule("G11", "first call", "Some kernels refuse a deployment only when they are called.", _first_call),
)  # fmt: skip


def run_gates(stage: Stage) -> tuple[Gate, ...]:
    """Return the results of all gates, or those up to the first failure in a brief case.

    G4, the selection itself, is the verdict and has no result here.
    """
    found = []
    for rule in GATES:
        failures = list(rule.check(stage))
        if not failures:
            sizes = sizes_for(stage.case, stage.selected).text if rule.code == "G5" and stage.selected else "passed"
            found.append(Gate(rule.code, rule.stage, True, sizes))
        found.extend(Gate(rule.code, rule.stage, False, f.text, f.error, f.kind, f.remedy) for f in failures)
        if failures and stage.case.brief:
            break
    return tuple(found)
