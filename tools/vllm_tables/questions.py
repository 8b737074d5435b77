"""What the extractor asks vLLM: devices, packages and variables, a question that most classes accept, pairs of keys."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

World = dict[str, Any]

_CUDA = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
_GFX = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201", "gfx1250")
_CPUS: dict[str, World] = {
    "x86-amx": {"arch": "x86", "amx": True},
    "x86": {"arch": "x86"},
    "x86-zen": {"arch": "x86", "zen": True},
    "arm64": {"arch": "arm"},
    "ppc64le": {"arch": "power"},
}
#: Devices in the order of the tables.
DEVICES = (*(f"sm{major}{minor}" for major, minor in _CUDA), *_GFX, "xpu", *_CPUS)
#: Devices by name, in groups that share one import of the package.
GROUPS: tuple[dict[str, World], ...] = (
    {f"sm{major}{minor}": {"kind": "cuda", "cap": [major, minor]} for major, minor in _CUDA},
    {gfx: {"kind": "rocm", "gcn": gfx} for gfx in _GFX if gfx != "gfx1100"},
    {"gfx1100": {"kind": "rocm", "gcn": "gfx1100"}},  # has an operator of its own
    {"xpu": {"kind": "xpu"}},
    *({name: {"kind": "cpu", **_CPUS[name]} for name in names} for names in (("x86-amx", "x86"), ("arm64", "ppc64le"))),
    {"x86-zen": {"kind": "cpu", **_CPUS["x86-zen"]}},
)

# Everything on, so that a class that is missing is missing for the device.
RICH: dict[str, dict[str, Any]] = {
    "cuda": {"flags": {"quark": True, "hpc": True, "b12x": True}, "env": {"VLLM_USE_FLASHINFER_MOE_INT4": "1"}},
    "rocm": {"flags": {"aiter": True, "quark": True, "flydsl": True}, "env": {"VLLM_ROCM_USE_AITER": "1"}},
    "xpu": {"flags": {"quark": True, "triton_kernels": True}, "env": {}},
    "cpu": {"flags": {}, "env": {}},
}
# Switches, with the values worth trying. None is unset.
SWITCHES: dict[str, dict[str, tuple[str | None, ...]]] = {
    "cuda": {
        "VLLM_USE_FLASHINFER_MOE_INT4": (None,),
        "VLLM_USE_DEEP_GEMM": ("0", "1"),
        "VLLM_MOE_USE_DEEP_GEMM": ("0", "1"),
        "VLLM_B12X_MOE_FP4_FORCE_A16": ("1",),
        "VLLM_MARLIN_INPUT_DTYPE": ("int8", "fp8"),
        "VLLM_DEEPEPLL_NVFP4_DISPATCH": ("1",),
    },
    "rocm": {
        "VLLM_ROCM_USE_AITER": (None, "0"),
        "VLLM_ROCM_USE_AITER_MOE": ("0", "1"),
        "VLLM_USE_DEEP_GEMM": ("0", "1"),
        "VLLM_MOE_USE_DEEP_GEMM": ("0", "1"),
    },
    "xpu": {"VLLM_USE_DEEP_GEMM": ("0", "1"), "VLLM_MOE_USE_DEEP_GEMM": ("0", "1")},
    "cpu": {"VLLM_CPU_INT4_W4A8": ("0", "1")},
}
# Optional packages that selection functions themselves look at, beside the classes: tables are made with them there.
PACKAGE_FACTORS = {"rocm": ("aiter",)}
# Switches of selection and kernels that no class looks at.
NOT_FOR_CLASSES = (
    "VLLM_B12X_MOE_FP4_FORCE_A16",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_DEEPEPLL_NVFP4_DISPATCH",
    "VLLM_CPU_INT4_W4A8",
)

#: A question that most classes accept; `topk` 2, since one kernel wants two.
BASE: dict[str, Any] = {
    "hidden": 4096,
    "inter": 2048,
    "experts": 64,
    "topk": 2,
    "act": "silu",
    "routing": "Renormalize",
    "router_fp32": False,
    "hash_routing": False,
    "bias": False,
    "swiglu_limit": None,
    "tp": 1,
    "dp": 1,
    "ep": False,
    "a2a": "allgather_reducescatter",
    "eplb": False,
    "lora": False,
    "dtype": "bf16",
    "override": "auto",
    "model_type": "",
    "prefix": "model.layers.0.mlp.experts",
    "qcfg": None,
    "user_quant": None,
    "entry": "",
}


def parallel_forms(all2all: tuple[str, ...]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Named parallel forms: the names are what `Case.parallel_form` gives."""
    plain = "allgather_reducescatter"
    rows = [("single", 1, 1, False, plain), ("tp", 4, 1, False, plain), ("dp", 1, 4, False, plain)]
    rows += [("ep", 4, 1, True, plain), *((f"ep:{kind}", 1, 4, True, kind) for kind in all2all)]
    for name, tp, dp, ep, kind in rows:
        for eplb in (False, True):
            yield name + ("+eplb" if eplb else ""), {"tp": tp, "dp": dp, "ep": ep, "a2a": kind, "eplb": eplb}


_NVFP4 = tuple(("kNvfp4Static", activation) for activation in ("kNvfp4Dynamic", "none", "kNvfp4DynamicToken"))
_MXFP4 = tuple(
    ("kMxfp4Static", a)
    for a in (
        "none",
        "kMxfp8Dynamic",
        "kMxfp4Dynamic",
        "kFp8StaticTensorSym",
        "kMxfp6E3M2Dynamic",
        "kMxfp6E2M3Dynamic",
        "kFp8DynamicTokenSym",
        "kFp8Dynamic128Sym",
        "kFp8Dynamic32Sym",
    )
)
_FP8 = (
    ("kFp8StaticTensorSym", "kFp8DynamicTensorSym"), ("kFp8StaticTensorSym", "kFp8StaticTensorSym"),
    ("kFp8StaticChannelSym", "kFp8DynamicTokenSym"), ("kFp8Static128BlockSym", "kFp8Dynamic128Sym"),
    ("kFp8Static64x64Sym", "kFp8Dynamic128Sym"), ("kFp8StaticTensorSym", "kFp8DynamicTokenSym"),
)  # fmt: skip
#: The pairs of keys that methods ask each family with, the usual one first.
ASKED: dict[str, tuple[tuple[str, str], ...]] = {
    "wna16": (("kInt4Static", "none"), ("kInt8Static", "none"), ("kInt4StaticAsym", "none"), ("kInt4Static32", "none")),
    "int8": (("kInt8StaticChannelSym", "kInt8DynamicTokenSym"), ("kInt8StaticTensorSym", "kInt8DynamicTensorSym")),
    "mxfp4": _MXFP4,
    "mxfp4-generic": _MXFP4,
    "mxfp4-ct": _MXFP4[:1],
    "mxfp4-inc": _MXFP4[:1],
    "fp8": _FP8,
    "nvfp4": _NVFP4,
    "mxfp8": (("kMxfp8Static", "kMxfp8Dynamic"),),
    "unquantized": (("none", "none"),),
    "w4a8-fp8": (("kInt4Static", "kFp8DynamicTokenSym"),),
    "w4a8-int8": (("kInt4W4A8StaticGroup128Sym", "none"),),
    "humming": (("kInt4Static", "none"),),
}
