"""Differences that are known and stay, by version: the look of the difference -> why."""

from __future__ import annotations

_LORA = "A class that is taken unasked: what it accepts is written inside the selection function."
_NAMED = "XPU: the method's name is refused first; which dtypes its config class has is not looked at."
_WIDER = "Mended since: this method passes no activation to the round-up. It was found by these cases."
_ORDERED = "Two refusals, the other one first."
_XPU = "The harness has no XPU: the weights of this method cannot be made there."

_NO_GROUP = "Per-channel scales without a group size: two refusals."
_AUTO_ROUND_MX = "AutoRound's MX packing is not asserted."
_GROUPED_ORDER = "Act-order in groups: Marlin takes it here."

DIFFERENCES: dict[str, dict[str, str]] = {
    "0.26.0": {
        "unquantized | engine TRITON TritonExperts | moeq FLASHINFER_TRTLLM TrtLlmBf16LoRAExperts": _LORA,
    },
    "0.27.1": {
        "unquantized | engine TRITON TritonExperts | moeq FLASHINFER_TRTLLM TrtLlmBf16LoRAExperts": _LORA,
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq AssertionError BARE_ASSERTION": _NO_GROUP,
        "ct-wna16 | engine KeyError CONFIG | # | moeq ValueError CONFIG": _ORDERED,
        "ct-wna16 | engine AssertionError BARE_ASSERTION | moeq ValueError CONFIG": _ORDERED,
        "inc | engine MARLIN MarlinExperts | moeq AssertionError CONFIG": _AUTO_ROUND_MX,
        "ct-wna16 | engine MARLIN MarlinExperts | moeq ValueError CONFIG": _GROUPED_ORDER,
    },
    "0.28.0": {
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq AssertionError BARE_ASSERTION": _NO_GROUP,
        "ct-wna16 | engine KeyError CONFIG | # | moeq ValueError CONFIG": _ORDERED,
        "ct-wna16 | engine AssertionError BARE_ASSERTION | moeq ValueError CONFIG": _ORDERED,
        "inc | engine MARLIN MarlinExperts | moeq AssertionError CONFIG": _AUTO_ROUND_MX,
        "ct-wna16 | engine MARLIN MarlinExperts | moeq ValueError CONFIG": _GROUPED_ORDER,
    },
    "0.29.0": {
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq AssertionError BARE_ASSERTION": _NO_GROUP,
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq NotImplementedError NO_BACKEND": _NO_GROUP,
        "ct-wna16 | engine KeyError CONFIG | # | moeq ValueError CONFIG": _ORDERED,
        "ct-wna16 | engine AssertionError BARE_ASSERTION | moeq ValueError CONFIG": _ORDERED,
        "ct-wna16 | engine NotImplementedError NO_BACKEND | No WNA# MoE backend supports the deployment configuration."
        " | moeq ValueError CONFIG": _ORDERED,
        "ct-wna16 | engine ValueError OVERRIDE_UNSUPPORTED | WNA# MoE backend 'HUMMING' does not support the deployment"
        " configuration since k | moeq ValueError CONFIG": _ORDERED,
        "ct-wna16 | engine MARLIN MarlinExperts | moeq ValueError CONFIG": _GROUPED_ORDER,
    },
    "0.30.0": {
        "inc | engine HUMMING HummingIndexedExperts | moeq none SILENT_NONE": "Humming's key of bits per channel.",
        "gptq | stage: weights | ValueError METHOD": "The name is refused; what would follow is not looked at.",
        "gptq | stage: weights | XPU XPUExpertsWNA16": _XPU,
    },
    "0.32.0": {"mxfp8 | stage: dtype | ValueError METHOD": _NAMED},
    "0.33.0": {
        "mxfp8 | stage: dtype | ValueError METHOD": _NAMED,
        "inc | engine ValueError CONFIG | moe_backend='flashinfer_moe_ep_cutedsl' is not supported for AutoRound (INC)"
        " MXF | moeq ValueError OVERRIDE_UNSUPPORTED": "The kind of the refusal.",
        "gpt-oss | stage: sizes | AITER_MXFP4_BF16 AiterMxfp4Experts": _WIDER,
    },
}
