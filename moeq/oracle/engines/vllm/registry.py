"""Which reader takes a method's config."""

from __future__ import annotations

from moeq.oracle.engines.vllm.compressed import read_compressed_tensors
from moeq.oracle.engines.vllm.floats import (
    read_deepseek_v4,
    read_fp8,
    read_gpt_oss,
    read_modelopt,
    read_mxfp4,
    read_online,
)
from moeq.oracle.engines.vllm.integers import read_awq, read_gptq, read_humming, read_inc, read_moe_wna16
from moeq.oracle.engines.vllm.quark import read_quark
from moeq.oracle.engines.vllm.readers import Reader, unquantized

#: Entry point (the name of the method in force) -> reader. A method without a checkpoint config quantises while
# loading.
READERS: dict[str, Reader] = {
    "": unquantized,
    "gptq": read_gptq,
    "awq": read_awq,
    "moe_wna16": read_moe_wna16,
    "compressed-tensors": read_compressed_tensors,
    "quark": read_quark,
    "inc": read_inc,
    "gpt_oss_mxfp4": read_gpt_oss,
    "mxfp4": read_mxfp4,
    "fp8": read_fp8,
    "deepseek_v4_fp8": read_deepseek_v4,
    "modelopt": read_modelopt,
    "modelopt_fp4": read_modelopt,
    "modelopt_mxfp8": read_modelopt,
    "mxfp8": read_modelopt,
    "humming": read_humming,
    "online": read_online,
    **dict.fromkeys(
        ("experts_int8", "int8_per_channel_weight_only", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel"),
        read_online,
    ),
}

#: Methods outside every selection function.
OUTSIDE = ("torchao", "fbgemm_fp8", "fp_quant", "bitsandbytes", "gguf", "hqq", "eetq")
