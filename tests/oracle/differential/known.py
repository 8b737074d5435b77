"""Differences that are known and stay, by version: the look of the difference -> why."""

from __future__ import annotations

_NAMED = "XPU: the method's name is refused first; which dtypes its config class has is not looked at."
_WIDER = "Mended since: this method passes no activation to the round-up. It was found by these cases."
_XPU = "The harness has no XPU: the weights of this method cannot be made there."

_NO_GROUP = "Per-channel scales without a group size: two refusals."

DIFFERENCES: dict[str, dict[str, str]] = {
    "0.27.1": {
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq AssertionError BARE_ASSERTION": _NO_GROUP,
    },
    "0.28.0": {
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq AssertionError BARE_ASSERTION": _NO_GROUP,
    },
    "0.29.0": {
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq AssertionError BARE_ASSERTION": _NO_GROUP,
        "ct-wna16 | engine TypeError OTHER | '<=' not supported between instances of 'NoneType' and 'int'"
        " | moeq NotImplementedError NO_BACKEND": _NO_GROUP,
    },
    "0.30.0": {
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
