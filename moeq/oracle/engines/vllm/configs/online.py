"""Reader of `--quantization` on a checkpoint without a quantisation config: experts are quantised while they load.

Source: `get_quant_config` and `quantization/online`, vLLM 0.26.0 to 0.33.0.
"""

from __future__ import annotations

from moeq.oracle.engines.vllm.case import Method
from moeq.oracle.engines.vllm.configs.floats import read_gpt_oss, read_mxfp4
from moeq.oracle.engines.vllm.configs.question import ConfigQuestion, refuse
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.spelling import option

#: Value of `--quantization` that quantises bf16 weights -> first version whose `OnlineQuantizationConfig` reads it.
ONLINE = {
    **dict.fromkeys(("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8"), "0.26.0"),
    **dict.fromkeys(("int8_per_channel_weight_only", "nvfp4_per_token"), "0.26.0"),
    "mxfp4": "0.28.0",
    "fp8": "0.31.0",
}
#: Method -> file beside the weights that the engine searches for the config if config.json has none.
_FILES = {
    **dict.fromkeys(("gptq", "auto_gptq", "gptq_marlin", "moe_wna16"), "quantize_config.json"),
    **dict.fromkeys(("awq", "auto_awq", "awq_marlin"), "quant_config.json"),
    **dict.fromkeys(("modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed"), "hf_quant_config.json"),
    "inc": "quantization_config.json",
}


def is_online(policy: EnginePolicy, name: str | None) -> bool:
    """Tell whether a value of `--quantization` means online quantisation of bf16 weights in the policy's version."""
    return name in ONLINE and policy.since(ONLINE[name])


def read_online(question: ConfigQuestion) -> Method:
    """Return the method that quantises experts of bf16 while they load; a config may declare `experts_int8`, too.

    Raises ConfigRefusal if the name needs a config that the checkpoint does not have.
    """
    case, since = question.probe, question.policy.since
    name = case.deployment.quantization or str(question.config.get("quant_method", ""))
    per_token = case.flag("VLLM_BATCH_INVARIANT") == "1" and since("0.33.0")
    table: dict[str, Method] = {
        "fp8_per_tensor": Method(
            "Fp8PerTensorOnlineMoEMethod", "fp8", "online", "kFp8StaticTensorSym",
            "kFp8DynamicTokenSym" if per_token else "kFp8DynamicTensorSym", 8, -1, vllm_cutlass=False,
        ),
        "fp8_per_block": Method(
            "Fp8PerBlockOnlineMoEMethod", "fp8", "online", "kFp8Static128BlockSym", "kFp8Dynamic128Sym", 8, 128,
            vllm_cutlass=False, block=(128, 128),
        ),
        "fp8_per_channel": Method(
            "Fp8PtpcOnlineMoEMethod", "fp8", "online", "kFp8StaticChannelSym", "kFp8DynamicTokenSym", 8, -1,
        ),
        "mxfp8": Method("Mxfp8OnlineMoEMethod", "mxfp8", "online", "kMxfp8Static", "kMxfp8Dynamic", 8, 32),
    }  # fmt: skip
    int8 = Method(
        "Int8OnlineMoEMethod", "int8", "experts_int8", "kInt8StaticChannelSym", "kInt8DynamicTokenSym", 8, -1,
        notes=("selected with W8A8 keys, runs W8A16",),
    )  # fmt: skip
    table.update({"fp8": table["fp8_per_tensor"], "experts_int8": int8, "int8_per_channel_weight_only": int8})
    if name == "nvfp4_per_token":
        return _nvfp4(question)
    if name == "mxfp4" and since("0.28.0"):
        return Method("Mxfp4OnlineMoEMethod", "mxfp4", "online", "kMxfp4Static", "kMxfp4Dynamic", 4, 32)
    if name in ("mxfp4", "gpt_oss_mxfp4"):  # the method of quantised checkpoints, which cannot load bf16 weights
        return (read_gpt_oss if name == "gpt_oss_mxfp4" else read_mxfp4)(question)
    if name in table:
        return table[name]
    known = f"for bf16 weights: {', '.join(ONLINE)}"
    if name in _FILES:
        refuse(f"{option('quantization', name)} needs a quantization_config, or {_FILES[name]} in the folder", known)
    error = "ValueError" if name == "deepseek_v4_fp8" else "TypeError"
    refuse(f"{option('quantization', name)} needs a quantization_config", known, error=error)


def _nvfp4(question: ConfigQuestion) -> Method:
    """Return the method for NVFP4 with one activation scale per token, which only SM 10.x runs."""
    gpu = question.probe.gpu
    if gpu.capability is None or gpu.platform != "cuda" or gpu.capability[0] != 10:
        refuse(f"nvfp4_per_token needs a GPU of compute capability 10.x, this is {gpu.name}")
    key = "kNvfp4DynamicToken" if question.policy.since("0.31.0") else "kNvfp4Dynamic"
    return Method("Nvfp4OnlineMoEMethod", "nvfp4", "online", "kNvfp4Static", key, 4, 16)
