"""Runners that SGLang 0.5.23 puts in the place of `--moe-runner-backend auto`, and values that its arguments refuse.

Source: SGLang 0.5.23, `arg_groups/moe_hook.py`, `arg_groups/overrides.py` and `arg_groups/model_overrides`.
"""

from __future__ import annotations

from dataclasses import replace

from moeq.oracle.engines.sglang.layer import Refused, SglangLayer
from moeq.spelling import option

#: Least compute capability of a method, times 10.
LEAST = {"fp8": 80, "mxfp8": 100, "mxfp4": 80, "w4afp8": 90, "w8a8_fp8": 89, "modelopt_fp8": 89, "modelopt_fp4": 80}

#: Models whose classes choose FlashInfer's TensorRT-LLM runner for FP8 on SM 10.x.
_TRTLLM = ("qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_5_moe", "deepseek_v3", "llama4")
#: Models whose classes leave the runner alone on SM 10.x.
_PLAIN = ("mixtral", "qwen2_moe", "olmoe", "phimoe", "granitemoe", "glm4_moe", "minimax_m2")
#: Models whose classes choose a runner by rules that are not followed.
_OWN = ("nemotron_h", "minimax_m3", "deepseek_v4", "kimi_k3", "mimo_v2", "bailing_moe_v3", "cohere2_moe", "gpt_oss")

#: Runner -> named methods that the arguments accept it with; without `--quantization` all are accepted.
_ACCEPTED = {
    "flashinfer_cutlass": ("modelopt_fp4", "modelopt_fp8", "modelopt_mixed"),
    "flashinfer_cutedsl": ("modelopt_fp4", "modelopt_mixed", "nvfp4_online"),
    "flashinfer_trtllm": ("modelopt_fp4", "fp8", "mxfp8", "modelopt_fp8", "modelopt_mixed", "compressed-tensors"),
    "flashinfer_trtllm_routed": ("fp8", "mxfp8", "modelopt_fp4", "modelopt_mixed"),
}


def with_runner(layer: SglangLayer, name: str, model_type: str) -> SglangLayer | None:
    """Return the layer with the runner that the server decides on; None if it is not known here.

    Raises Refused if the server's arguments refuse the runner.
    """
    asked = layer.quantization
    accepted = _ACCEPTED.get(layer.runner)
    if accepted is not None and asked is not None and asked not in accepted:
        text = f"--moe-runner-backend {layer.runner} does not go with {option('quantization', asked)}"
        raise Refused("config", "AssertionError", text, f"no {option('quantization')}")
    if layer.runner == "cutlass" and asked in ("fp8", "mxfp8") and layer.ep:
        raise Refused("config", "AssertionError", "the cutlass runner takes no expert parallelism", "ep 1")
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
