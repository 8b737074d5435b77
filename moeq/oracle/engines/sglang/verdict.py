"""Verdicts on SGLang: every runner is tried by its name, and the one that runs is reported as chosen.

Runners that the server puts in the place of `auto`, and values that its arguments refuse, are those of SGLang 0.5.23,
`arg_groups/moe_hook.py`, `arg_groups/overrides.py` and `arg_groups/model_overrides`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.layouts.registry import LAYOUTS
from moeq.oracle.engines.sglang.decision import FLOAT_RUNNERS, RUNNERS, VERSION, decide_sglang, method_in_force
from moeq.oracle.engines.sglang.floats import parsed
from moeq.oracle.engines.sglang.layer import SglangChoice, SglangLayer, SglangRefusal
from moeq.oracle.records import CandidateReport, ConvertTarget, EngineError, MoeShape, Reason, Sizes, Verdict
from moeq.spelling import option

#: Name of the engine.
NAME = "sglang"
#: Option that requests a runner.
FLAG = "--moe-runner-backend"
#: Declared methods whose integers moeq follows, and methods whose floats it follows.
_READ = ("gptq", "awq", "compressed-tensors")
_READ_FLOATS = ("fp8", "mxfp8", "mxfp4", "w4afp8", "modelopt", "modelopt_fp8", "modelopt_fp4")
#: Values of `--quantization` that quantise a checkpoint again while it loads.
_REQUANTISING = ("nvfp4_online", "quark_mxfp4", "modelopt_fp4", "humming", "petit_nvfp4", "modelopt_mixed")
_UNCHECKED = "not checked: modules beside the experts (attention, shared experts), and whether tp cuts their groups"
_PLACELESS = "the method in force makes unquantised experts, and the checkpoint's packed weights have no place in them"

#: Method -> least compute capability, times 10.
_LEAST = {"fp8": 80, "mxfp8": 100, "mxfp4": 80, "w4afp8": 90, "w8a8_fp8": 89, "modelopt_fp8": 89, "modelopt_fp4": 80}

#: Models whose classes choose FlashInfer's TensorRT-LLM runner for FP8 on SM 10.x.
_TRTLLM = ("qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_5_moe", "deepseek_v3", "llama4")
#: Models whose classes leave the runner alone on SM 10.x.
_PLAIN = ("mixtral", "qwen2_moe", "olmoe", "phimoe", "granitemoe", "glm4_moe", "minimax_m2")
#: Models whose classes choose a runner by rules that moeq does not follow.
_OWN = ("nemotron_h", "minimax_m3", "deepseek_v4", "kimi_k3", "mimo_v2", "bailing_moe_v3", "cohere2_moe", "gpt_oss")

#: Runner -> values of `--quantization` that the server's arguments accept with it; without a value all are accepted.
_ACCEPTED = {
    "flashinfer_cutlass": ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed"),
    "flashinfer_cutedsl": ("modelopt_fp4", "modelopt_mixed", "nvfp4_online"),
    "flashinfer_trtllm": ("modelopt_fp4", "fp8", "mxfp8", "modelopt_fp8", "modelopt_mixed", "compressed-tensors"),
    "flashinfer_trtllm_routed": ("fp8", "mxfp8", "modelopt_fp4", "modelopt_mixed"),
}


def is_sglang(engine: str) -> bool:
    """Tell whether an engine is SGLang. Raise MoeqError `usage.engine-version` for an unknown version."""
    name, _, version = engine.partition("@")
    if name != NAME:
        return False
    if version not in ("", VERSION):
        raise MoeqError("usage.engine-version", f"{NAME} {version} is not known", f"known: {VERSION}")
    return True


def judge_sglang(config: Mapping[str, Any], shape: MoeShape, deployment: Deployment, title: str) -> Verdict:
    """Judge a checkpoint's experts on a deployment with SGLang 0.5.23.

    moeq follows integer weights, FP8, MXFP4, NVFP4 and W4AFP8 on CUDA. Others get an error of kind `NOT_FOLLOWED`.

    Args:
        deployment: target; `backend` is the value of `--moe-runner-backend`.
    """
    unknown = _not_followed(config, shape, deployment)
    runners = FLOAT_RUNNERS if _is_float(config) else RUNNERS
    candidates = () if unknown else _once(_candidate(config, shape, deployment, runner) for runner in runners)
    made, error = (None, unknown) if unknown else _asked(config, shape, deployment)
    selected = None
    if made is not None:
        selected = replace(_report(made), flag=None if deployment.backend == "auto" else deployment.backend)
    sizes = _sizes(shape, deployment)
    layout = selected.layout if selected else None
    target = ConvertTarget(selected.backend, selected.experts, layout, None, sizes) if selected and layout else None
    return Verdict(
        engine=f"{NAME}@{VERSION}",
        scheme=title,
        deployment=deployment,
        shape=shape,
        asked=deployment.backend,
        method=made.name if made else None,
        family=None,
        weight_key=title or None,
        activation_key=None,
        selected=selected,
        error=error,
        gates=(),
        candidates=candidates,
        convert=target,
        no_convert=selected.no_layout if selected and not layout else None,
        runs_as=_runs_as(config, made, deployment.gpu.capability) if made else None,
        sizes=sizes if selected else None,
        notes=(f"launch flags: {launch_flags(deployment)}", _UNCHECKED),
    )


def launch_flags(deployment: Deployment) -> str:
    """Return the options of `python -m sglang.launch_server` for a deployment."""
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(deployment.dtype, deployment.dtype)
    parts = [f"--tp-size {deployment.tp}"] if deployment.tp > 1 else []
    parts += [f"--ep-size {deployment.ep}"] if deployment.ep > 1 else []
    parts += [f"--dtype {dtype}"]
    parts += [f"--quantization {deployment.quantization}"] if deployment.quantization else []
    parts += [f"{FLAG} {deployment.backend}"] if deployment.backend != "auto" else []
    return " ".join(parts)


def _not_followed(config: Mapping[str, Any], shape: MoeShape, deployment: Deployment) -> EngineError | None:
    method, gpu, floats = str(config.get("quant_method", "")).lower(), deployment.gpu, _is_float(config)
    others = f"{option('engine', 'vllm')}, or {option('engine', 'moeq')}"
    if gpu.platform != "cuda" or gpu.capability is None:
        return _unknown(f"what SGLang does on {gpu.name} is not known to moeq: only CUDA is followed", others)
    requantised = floats and deployment.quantization in _REQUANTISING and deployment.quantization != method
    mixed = "MIXED_PRECISION" in str(config.get("quant_algo", config.get("quantization", "")))
    if (not floats and (method not in _READ or not _has_integers(config))) or requantised or mixed:
        read = "integers of GPTQ, AWQ and compressed-tensors, FP8, MXFP4, NVFP4 and W4AFP8 are"
        return _unknown(f"what SGLang makes of {method or 'this checkpoint'} is not known to moeq: {read}", others)
    if shape.has_bias and method not in ("mxfp4", *_READ):
        return _unknown(f"biases of experts in {method} are not followed", others)
    if deployment.dp > 1 or deployment.ep not in (1, deployment.tp):
        text = f"dp {deployment.dp} and ep {deployment.ep} with tp {deployment.tp} are not followed"
        return _unknown(text, "dp 1, and ep 1 or ep equal to tp")
    if deployment.pcp > 1:
        return _unknown(f"pcp {deployment.pcp} is not followed", "pcp 1")
    if deployment.redundant_experts:
        return _unknown(f"{deployment.redundant_experts} redundant experts are not followed", "no redundant experts")
    return _own_default(config, shape, deployment) if floats else None


def _unknown(text: str, hint: str) -> EngineError:
    return EngineError("none", "NOT_FOLLOWED", text, hint)


def _own_default(config: Mapping[str, Any], shape: MoeShape, deployment: Deployment) -> EngineError | None:
    """Return the error if the model's class replaces the automatic runner by rules that are not followed."""
    layer = _layer(shape, deployment, deployment.backend)
    try:
        known = _with_runner(layer, method_in_force(parsed(config), layer), shape.model_type) is not None
    except SglangRefusal:  # `_asked` reports it
        return None
    if known:
        return None
    model = shape.model_type or "this model"
    text = f"which runner SGLang takes for {model} on {deployment.gpu.name} is not known to moeq"
    return _unknown(text, f"{FLAG} with a runner: triton runs on every GPU")


def _is_float(config: Mapping[str, Any]) -> bool:
    """Tell whether the experts are FP8, MXFP4, NVFP4 or W4AFP8 in a form that moeq follows."""
    method = str(config.get("quant_method", "")).lower()
    if method != "compressed-tensors":
        return method in _READ_FLOATS
    row = _only_group(config)
    if row is None or "preset" in row or not isinstance(row.get("weights"), Mapping):
        return False
    fp8 = row["weights"].get("type") == "float" and row["weights"].get("num_bits") == 8
    return (fp8 and config.get("format") == "float-quantized") or config.get("format") == "nvfp4-pack-quantized"


def _only_group(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the one config group, or None if there are several or none."""
    groups = config.get("config_groups")
    rows = list(groups.values()) if isinstance(groups, Mapping) else []
    return rows[0] if len(rows) == 1 and isinstance(rows[0], Mapping) else None


def _has_integers(config: Mapping[str, Any]) -> bool:
    if config.get("quant_method") != "compressed-tensors":
        return True
    weights = (_only_group(config) or {}).get("weights")
    return isinstance(weights, Mapping) and weights.get("type") == "int" and "num_bits" in weights


def _layer(shape: MoeShape, deployment: Deployment, runner: str) -> SglangLayer:
    assert deployment.gpu.capability is not None  # `_not_followed` refuses other devices
    return SglangLayer(
        deployment.gpu.capability, shape.hidden_size, shape.intermediate_size, shape.num_experts, deployment.tp,
        deployment.ep > 1, deployment.dtype, shape.activation, runner, deployment.quantization,
    )  # fmt: skip


def _asked(
    config: Mapping[str, Any], shape: MoeShape, deployment: Deployment
) -> tuple[SglangChoice | None, EngineError | None]:
    runners = FLOAT_RUNNERS if _is_float(config) else RUNNERS
    if deployment.backend not in runners:
        text = f"'{deployment.backend}' is no runner that these weights can be asked for with"
        return None, EngineError("ValueError", "OVERRIDE_UNKNOWN", text, f"known: {', '.join(runners)}")
    try:
        made = _decided(config, shape, deployment)
    except SglangRefusal as refused:
        kind = "METHOD" if refused.stage == "name" else "CONFIG"
        return None, EngineError(refused.error, kind, f"sglang: {refused.text}", refused.remedy)
    if not made.runs:
        text = f"{made.method} has no kernel for the runner {deployment.backend} here: the engine stops after loading"
        return None, EngineError("AttributeError", "KERNEL_CALL", text, f"{FLAG} auto")
    if not made.quantised:
        return None, EngineError("none", "SILENT_NONE", f"{made.name}: {_PLACELESS}", _way_out(config, deployment))
    return made, None


def _decided(config: Mapping[str, Any], shape: MoeShape, deployment: Deployment) -> SglangChoice:
    layer = _layer(shape, deployment, deployment.backend)
    if not _is_float(config):
        return decide_sglang(config, layer)
    name = method_in_force(parsed(config), layer)
    major, minor = layer.capability
    if 10 * major + minor < _LEAST.get(name, 0):
        text = f"{name} needs compute capability {_LEAST[name] / 10:.1f}, {deployment.gpu.name} has {major}.{minor}"
        raise SglangRefusal("config", "ValueError", text)
    return decide_sglang(config, _with_runner(layer, name, shape.model_type) or layer)


def _with_runner(layer: SglangLayer, name: str, model_type: str) -> SglangLayer | None:
    """Return the layer with the runner that the server decides on; None if moeq does not know it.

    Raises SglangRefusal if the server's arguments refuse the runner.
    """
    asked = layer.quantization
    accepted = _ACCEPTED.get(layer.runner)
    if accepted is not None and asked is not None and asked not in accepted:
        text = f"--moe-runner-backend {layer.runner} does not go with {option('quantization', asked)}"
        raise SglangRefusal("config", "AssertionError", text, f"no {option('quantization')}")
    if layer.runner == "cutlass" and asked in ("fp8", "mxfp8") and layer.ep:
        raise SglangRefusal("config", "AssertionError", "the cutlass runner takes no expert parallelism", "ep 1")
    if layer.runner != "auto":
        return layer
    major = layer.capability[0]
    if model_type == "gpt_oss" and name == "mxfp4":
        plain = "triton_kernel" if not layer.ep and asked is None else "auto"
        return replace(layer, runner="flashinfer_mxfp4" if major in (10, 12) else plain, dtype="bf16")
    if model_type in _OWN or name == "mxfp8" or (name == "modelopt_fp4" and major > 10):
        return None
    if major == 10 and name in ("fp8", "modelopt_fp8", "modelopt_fp4"):
        if model_type in _TRTLLM and name == "fp8":
            return replace(layer, runner="flashinfer_trtllm")
        return layer if model_type in _PLAIN and name == "fp8" else None
    return layer


def _way_out(config: Mapping[str, Any], deployment: Deployment) -> str | None:
    wna16 = config.get("quant_method") == "awq" and config.get("bits") == 4 and deployment.quantization is None
    return option("quantization", "moe_wna16") if wna16 else None


def _candidate(config: Mapping[str, Any], shape: MoeShape, deployment: Deployment, runner: str) -> CandidateReport:
    made, error = _asked(config, shape, replace(deployment, backend=runner))
    if made is not None:
        return replace(_report(made), flag=runner)
    assert error is not None
    reason = Reason("G4", error.text, error.hint)
    return CandidateReport(
        runner.upper(), None, None, "the engine does not get that far", False, (reason,), flag=runner
    )


def _report(made: SglangChoice) -> CandidateReport:
    layout = made.layout if made.layout in LAYOUTS else None
    none = None if layout else "moeq writes no layout for this runner of SGLang"
    return CandidateReport(
        (made.runner or _WITHOUT_RUNNER.get(made.method, "flashinfer_trtllm")).upper(), made.method, layout, none, True
    )


def _once(rows: Iterable[CandidateReport]) -> tuple[CandidateReport, ...]:
    """Keep one row per backend: the first supported one, else the first. A refused `auto` names no backend."""
    found: dict[str, CandidateReport] = {}
    for row in rows:
        if row.backend not in found or (row.supported and not found[row.backend].supported):
            found[row.backend] = row
    found.pop("AUTO", None)
    return tuple(found.values())


def _sizes(shape: MoeShape, deployment: Deployment) -> Sizes:
    ranks = 1 if deployment.ep > 1 else deployment.tp
    inner = shape.intermediate_size // ranks
    local = -(-shape.num_experts // deployment.ep)
    return Sizes(shape.hidden_size, inner, shape.hidden_size, inner, local)


#: Methods that call a kernel without a runner -> the kernel's library; other such methods call TensorRT-LLM's kernels.
_WITHOUT_RUNNER = dict.fromkeys(("W4AFp8MoEMethod", "Fp8MoEMethod"), "cutlass")
#: Methods and schemes of floats -> bits of weights, and bits of activations (None if the runner decides these).
_FLOAT_BITS: dict[str, tuple[int, int | None]] = {
    "Fp8MoEMethod": (8, 8),
    "W8A8FP8MoEMethod": (8, 8),
    "ModelOptFp8MoEMethod": (8, 8),
    "CompressedTensorsW8A8Fp8MoE": (8, 8),
    "W4AFp8MoEMethod": (4, 8),
    "CompressedTensorsW4A16Nvfp4MoE": (4, 16),
    "CompressedTensorsW4A4Nvfp4MoE": (4, 4),
    "ModelOptNvFp4FusedMoEMethod": (4, None),
    "Mxfp4MoEMethod": (4, None),
}
#: Runner -> bits of activations, where the method leaves them to the runner; 16 for other runners.
_RUNNER_BITS = {"deep_gemm": 8, "flashinfer_trtllm": 4, "flashinfer_trtllm_routed": 4, "flashinfer_cutlass": 4,
                "flashinfer_cutedsl": 4}  # fmt: skip


def _runs_as(config: Mapping[str, Any], made: SglangChoice, capability: tuple[int, int] | None) -> str:
    if made.method in _FLOAT_BITS:
        bits, activations = _FLOAT_BITS[made.method]
        mxfp8 = made.runner == "flashinfer_mxfp4" and capability is not None and capability >= (10, 0)
        return f"W{bits}A{activations or (8 if mxfp8 else _RUNNER_BITS.get(made.runner or '', 16))}"
    groups = (config.get("config_groups") or {}).values()
    bits = next((group["weights"]["num_bits"] for group in groups), None) or config.get("bits", config.get("w_bit"))
    return f"W{bits}A{8 if made.name == 'w8a8_int8' else 16}"
