"""Differences that are known and stay, by version: the look of the difference -> why."""

from __future__ import annotations

_LORA = "A class that is taken unasked: what it accepts is written inside the selection function."
_AITER = "gfx1201 with VLLM_ROCM_USE_AITER=1 and without the package: there, the order of trial looks at the package."
_UNKNOWN = "LoRA comes before the name of the backend on CPUs, too."
_SHARD = "The kernel looks at the size per rank in a way that the table's probes do not see."
_NAMED = "XPU: the method's name is refused first; which dtypes its config class has is not looked at."
_ORDERED = "Two refusals, the other one first."
_XPU = "The harness has no XPU: the weights of this method cannot be made there."

DIFFERENCES: dict[str, dict[str, str]] = {
    "0.26.0": {
        "unquantized | engine TRITON TritonExperts | moeq FLASHINFER_TRTLLM TrtLlmBf16LoRAExperts": _LORA,
    },
    "0.28.0": {
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq AssertionError BARE_ASSERTION": "Per-channel scales without a group size: two refusals.",
        "ct-wna16 | engine KeyError CONFIG | # | moeq ValueError CONFIG": _ORDERED,
        "ct-wna16 | engine AssertionError BARE_ASSERTION | moeq ValueError CONFIG": _ORDERED,
        "inc | engine MARLIN MarlinExperts | moeq AssertionError CONFIG": "AutoRound's MX packing is not asserted.",
        "ct-wna16 | engine MARLIN MarlinExperts | moeq ValueError CONFIG": "Act-order in groups: Marlin takes it here.",
        "w4a8 | engine NotImplementedError NO_BACKEND | W#A# Int# MoE is only supported on CPU platforms"
        " | moeq AssertionError SHAPE": _ORDERED,
    },
    "0.30.0": {
        "inc | engine HUMMING HummingIndexedExperts | moeq none SILENT_NONE": "Humming's key of bits per channel.",
        "w4a8 | engine NotImplementedError NO_BACKEND | W#A# Int# MoE is only supported on CPU platforms"
        " | moeq AssertionError SHAPE": _ORDERED,
        "gptq | stage: weights | ValueError METHOD": "The name is refused; what would follow is not looked at.",
        "gptq | stage: weights | XPU XPUExpertsWNA16": _XPU,
    },
    "0.31.0": {
        "w4a8 | engine AssertionError CONFIG | Only group size # supported for W#A# MoE | moeq AssertionError SHAPE": (
            _ORDERED
        ),
    },
    "0.32.0": {
        "w4a8 | engine AssertionError CONFIG | Only group size # supported for W#A# MoE | moeq AssertionError SHAPE": (
            _ORDERED
        ),
    },
    "0.33.0": {
        "fp8 | engine ValueError OVERRIDE_UNSUPPORTED | FP# MoE backend AITER does not support the deployment"
        " configuration since kernel | moeq TRITON TritonExperts": _AITER,
        "fp8 | engine ValueError OVERRIDE_UNSUPPORTED | FP# MoE backend AITER does not support the deployment"
        " configuration since kernel | moeq NotImplementedError NO_BACKEND": _AITER,
        "inc | engine TRITON TritonExperts | moeq ValueError OVERRIDE_UNKNOWN": _UNKNOWN,
        "unquantized | engine TRITON TritonExperts | moeq ValueError OVERRIDE_UNKNOWN": _UNKNOWN,
        "mxfp8 | stage: dtype | ValueError METHOD": _NAMED,
        "ct-mxfp4 | engine ValueError OVERRIDE_UNSUPPORTED | Mxfp# MoE backend 'FLASHINFER_MOE_EP_DEEP_GEMM' does not"
        " support the deployment  | moeq FLASHINFER_MOE_EP_CUTEDSL FlashInferMoeEpExperts": (
            "Without deep_gemm the name of the megakernel still leads to its class of the other backend here."
        ),
        "inc | engine ValueError CONFIG | moe_backend='flashinfer_moe_ep_cutedsl' is not supported for AutoRound (INC)"
        " MXF | moeq ValueError OVERRIDE_UNSUPPORTED": "The kind of the refusal.",
        **dict.fromkeys(
            (
                f"{family} | engine NotImplementedError NO_BACKEND | No Unquantized MoE backend supports the deployment"
                f" configuration. | moeq CPU {experts}"
                for family, experts in (
                    ("unquantized", "PowerCPUUnquantizedExperts"),
                    ("inc", "PowerCPUUnquantizedExperts"),
                    ("nvfp4", "CPUUnquantizedExperts"),
                )
            ),
            _SHARD,
        ),
    },
}
