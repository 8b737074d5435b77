"""vLLM's tables, taken out of vLLM by executing it: `python -m moeq.oracle.extract vllm==X --site DIR`.

Two kinds of tables. *Classes*: for every experts class and device, which pairs of keys, activations, routing methods,
parallel forms, dtypes and sizes it says yes to; a baseline that it accepts is varied one factor at a time. *Selection*:
for every family, device and requested backend, which candidates are tried in which order and how the search ends,
found by running the selection function on classes that refuse everything and write down that they were asked.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import inspect
import itertools
import json
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moeq.errors import MoeqError
from moeq.oracle.engines.vllm import inside, sandbox

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
_RICH: dict[str, dict[str, Any]] = {
    "cuda": {"flags": {"quark": True, "hpc": True, "b12x": True}, "env": {"VLLM_USE_FLASHINFER_MOE_INT4": "1"}},
    "rocm": {"flags": {"aiter": True, "quark": True, "flydsl": True}, "env": {"VLLM_ROCM_USE_AITER": "1"}},
    "xpu": {"flags": {"quark": True, "triton_kernels": True}, "env": {}},
    "cpu": {"flags": {}, "env": {}},
}
# Switches, with the values worth trying. None is unset.
_SWITCHES: dict[str, dict[str, tuple[str | None, ...]]] = {
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
_PACKAGE_FACTORS = {"rocm": ("aiter",)}
# Switches of selection and kernels that no class looks at.
_NOT_FOR_CLASSES = (
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


# ------------------------------------------------------------------------------------------------ names


def literal(module: str, name: str) -> tuple[str, ...]:
    """The values of a `Literal` type of the package."""
    from typing import get_args

    return tuple(get_args(getattr(importlib.import_module(module), name)))


def quant_keys() -> dict[str, Any]:
    """Every key that selection can be asked with, by name; `none` is 16-bit."""
    from vllm.scalar_type import scalar_types

    keys: Any = importlib.import_module("vllm.model_executor.layers.quantization.utils.quant_utils")
    shape = keys.GroupShape
    named = {
        name: value for name, value in vars(keys).items() if name.startswith("k") and isinstance(value, keys.QuantKey)
    }
    for rows, columns in ((64, 64), (32, 32), (96, 96), (1, 32), (1, 128)):
        key = keys.create_fp8_quant_key(static=True, group_shape=shape(rows, columns))
        named[f"kFp8Static{rows}x{columns}Sym"] = key
    import torch

    scales = {
        "": keys.ScaleDesc(torch.float16, True, shape(1, 128)),
        "Channel": keys.ScaleDesc(torch.float16, True, shape.PER_CHANNEL),
    }
    signed = {2: "uint2b2", 3: "uint3b4", 5: "uint5b16", 6: "uint6b32", 7: "uint7b64"}
    for (scope, scale), bits in itertools.product(scales.items(), signed):
        if hasattr(scalar_types, signed[bits]):
            named[f"kUint{bits}Static{scope}"] = keys.QuantKey(
                getattr(scalar_types, signed[bits]), scale, symmetric=True
            )
        if hasattr(scalar_types, f"uint{bits}"):
            asym = keys.QuantKey(getattr(scalar_types, f"uint{bits}"), scale, symmetric=False)
            named[f"kUint{bits}Static{scope}Asym"] = asym
    grouped = keys.ScaleDesc(torch.float16, True, shape(1, -1))
    named["kInt8StaticAsym"] = keys.QuantKey(scalar_types.uint8, grouped, symmetric=False)
    named["kFp8Dynamic32Sym"] = keys.create_fp8_quant_key(static=False, group_shape=shape(1, 32))
    return {"none": None, **named}


def experts_classes() -> dict[str, Any]:
    """Every concrete experts class that a family names, by name (`W4A8:` before one whose name is there twice)."""
    found: dict[str, Any] = {}
    for name in inside.FAMILIES:
        module = inside.family(name)
        if module is None:
            continue
        enums: list[Any] = [
            v for n, v in vars(module).items() if n.lower().endswith("moebackend") and isinstance(v, type)
        ]
        lookups = [v for n, v in vars(module).items() if n.endswith("backend_to_kernel_cls")]
        for enum, lookup in itertools.product(enums, lookups):
            for backend in list(enum):
                with contextlib.suppress(Exception):  # a backend of another family, or without a class
                    classes = lookup(backend)
                    for cls in classes if isinstance(classes, list) else [classes]:
                        if cls is not None:
                            found[class_name(cls)] = cls
    with contextlib.suppress(ImportError):
        lora: Any = importlib.import_module(f"{inside._MOE}.experts.trtllm_lora_moe")
        found.update({n: v for n, v in vars(lora).items() if n.endswith("LoRAExperts")})
    return found


def class_name(cls: Any) -> str:
    """Name of an experts class in the data file."""
    return f"W4A8:{cls.__name__}" if cls.__module__.endswith("cpu_int4_moe") else cls.__name__


# ------------------------------------------------------------------------------------------------ classes


_layers: dict[str, Any] = {}


def layer_of(question: Mapping[str, Any]) -> Any:
    """The layer's config of a question, which becomes the current config too: made once in a world."""
    dtype = inside.set_config(question)
    key = repr(sorted(question.items(), key=lambda item: item[0]))
    if key not in _layers:
        moe = _layers[key] = inside.moe_config(question, dtype)
        if question.get("decomposed") and hasattr(moe, "require_decomposed_backend"):
            moe.require_decomposed_backend = True
    return copy.copy(_layers[key])  # selection may write into it


def ask(cls: Any, question: Mapping[str, Any], weight: Any, activation: Any) -> bool:
    """Whether a class accepts a question in its own activation format."""
    try:
        moe = layer_of(question)
        return bool(cls.is_supported_config(cls, moe, weight, activation, cls.activation_format())[0])
    except Exception:  # noqa: BLE001  (a class that trips over a question does not support it)
        return False


def any_gemm_type(cls: Any) -> str | None:
    """Humming's classes each want one GEMM type, by a variable: make that the one in force. Its name is a table
    value."""
    if not hasattr(cls, "humming_gemm_type"):
        return None
    module: Any = importlib.import_module(f"{inside._MOE}.experts.fused_humming_moe")
    kind = str(cls.humming_gemm_type().value).lower()
    module.get_humming_moe_gemm_type = lambda *a, **k: kind
    return kind


class Domain:
    """The values that factors can take in this version."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
        from vllm.model_executor.layers.fused_moe.config import RoutingMethodType

        self.keys = quant_keys()
        self.activation_members = {a.value: a for a in MoEActivation}
        self.routing_members = {r.name: r for r in RoutingMethodType}
        self.activations = tuple(self.activation_members)
        self.routings = tuple(self.routing_members)
        self.all2all = literal("vllm.config.parallel", "All2AllBackend")
        self.overrides = literal("vllm.config.kernel", "MoEBackend")
        self.megakernels = tuple(name for name in self.overrides if name.startswith("flashinfer_moe_ep"))
        self.forms = dict(parallel_forms(self.all2all))


def _pairs(cls: Any, domain: Domain) -> Iterator[tuple[str, str]]:
    """Pairs of keys that the class lists, of those that methods ask with; `*` where it does not look at the
    activations."""
    asked = {pair for pairs in _ASKED.values() for pair in pairs} | {(weight, "none") for weight in domain.keys}
    asked |= {(weight, "kFp8Dynamic128Sym") for weight in domain.keys if weight.startswith("kFp8Static")}
    for weight, key in domain.keys.items():
        found = []
        for activation, other in domain.keys.items():
            with contextlib.suppress(Exception):
                if cls._supports_quant_scheme(key, other):
                    found.append((weight, activation))
        yield from [(weight, "*")] if len(found) == len(domain.keys) else (pair for pair in found if pair in asked)


def _listed(cls: Any, weight: Any, activation: Any, domain: Domain) -> tuple[list[str], list[str], list[str]]:
    """Activations, parallel forms and routing methods that the class's own predicates list."""
    acts: list[str] = []
    forms: list[str] = []
    routings: list[str] = []
    for name, member in domain.activation_members.items():
        with contextlib.suppress(Exception):
            if cls._supports_activation(member) and (member.is_gated or cls._supports_no_act_and_mul()):
                acts.append(name)
    for name, form in domain.forms.items():
        with contextlib.suppress(Exception):
            inside.set_config({**BASE, **form})
            if cls._supports_parallel_config(inside.parallel_config({**BASE, **form})):
                forms.append(name)
    for name, member in domain.routing_members.items():
        with contextlib.suppress(Exception):
            if cls._supports_routing_method(member, weight, activation):
                routings.append(name)
    return acts, forms, routings


def _first(wanted: str, listed: list[str]) -> list[str]:
    return sorted(listed, key=lambda name: name != wanted)[:3]


def _baseline(cls: Any, weight: Any, activation: Any, domain: Domain) -> dict[str, Any] | None:
    """A question that the class accepts for a pair of keys."""
    acts, forms, routings = _listed(cls, weight, activation, domain)
    routings = [*_first("Renormalize", routings), *(["DeepseekV4"] if "DeepseekV4" in routings else [])]
    forms = [*_first("single", forms), *[name for name in forms if name in ("ep", "ep:passthrough")]]
    changes: tuple[dict[str, Any], ...] = ({}, {"lora": True}, *({"override": name} for name in domain.megakernels))
    for extra, act, form, routing in itertools.product(changes, _first("silu", acts), forms, routings):
        question = {**BASE, **domain.forms[form], "act": act, "routing": routing, **extra}
        if ask(cls, question, weight, activation):
            return question
    return None


def _multiple(accepts: Callable[[int], bool]) -> int | None:
    """The least power of two (or three times one) whose multiples are all accepted; None where even 512s are not."""
    for step in (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512):
        if all(accepts(step * n) for n in (5, 7, 11, 13)):
            return step
    return None


def _most(accepts: Callable[[int], bool], top: int) -> int | None:
    """The largest accepted value below `top`, or None where there is no limit."""
    if accepts(top):
        return None
    low, high = 1, top
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if accepts(middle) else (low, middle)
    return low


def variant(cls: Any, weight: Any, activation: Any, base: dict[str, Any], domain: Domain) -> dict[str, Any]:
    """What a class accepts for one pair of keys, factor by factor."""

    def accepts(**change: Any) -> bool:
        return ask(cls, {**base, **change}, weight, activation)

    acts = [a for a in domain.activations if accepts(act=a)]
    routings = [r for r in domain.routings if accepts(routing=r)]
    row: dict[str, Any] = {
        "activations": acts,
        "routing": routings if len(routings) < len(domain.routings) else None,
        "fp32_logits": [r for r in routings if accepts(routing=r, router_fp32=True)],
        "parallel": [name for name, form in domain.forms.items() if _parallel(cls, base, form, weight, activation)],
        "dtypes": [d for d in ("bf16", "fp16", "fp32") if accepts(dtype=d)],
        "lora": accepts(lora=True),
        "bias": accepts(bias=True),
        "limit": [a for a in acts if accepts(act=a, swiglu_limit=7.0)],
        "hidden": _multiple(lambda n: accepts(hidden=n)),
        "intermediate": _multiple(lambda n: accepts(inter=n * max(1, base["tp"] * base["dp"]))),
        "max_experts": _most(lambda n: accepts(experts=n), 16384),
        "min_top_k": next((k for k in (1, 2, 3, 4) if accepts(topk=k)), None),
    }
    ragged = max(1, base["tp"] * base["dp"])

    def multiple(act: str) -> int | None:
        return _multiple(lambda n: accepts(act=act, inter=n * ragged))

    by = {a: multiple(a) for a in acts if not accepts(act=a, inter=2056 * ragged)}
    row["intermediate_by"] = {a: found for a, found in by.items() if found != row["intermediate"]}
    if row["fp32_logits"] == routings:
        row["fp32_logits"] = None
    if row["limit"] == acts:
        row["limit"] = None
    if cls.is_monolithic():
        row["hash_routing"] = accepts(hash_routing=True)
        row["decomposed"] = accepts(decomposed=True)
    return row


def _parallel(cls: Any, base: dict[str, Any], form: dict[str, Any], weight: Any, activation: Any) -> bool:
    # Sizes grow with the ranks, so that what is asked is the form alone.
    ranks = form["tp"] * form["dp"] if not form["ep"] else 1
    return ask(cls, {**base, **form, "inter": 2048 * ranks}, weight, activation)


def class_rows(domain: Domain) -> Iterator[dict[str, Any]]:
    """Every class's variants on the current device and world."""
    for name, cls in experts_classes().items():
        try:
            if not cls._supports_current_device():
                continue
        except Exception:  # noqa: BLE001
            continue
        gemm_type = any_gemm_type(cls)
        facts = {
            "format": "batched" if cls.activation_format().name == "BatchedExperts" else "standard",
            "monolithic": bool(cls.is_monolithic()),
            "gemm_type": gemm_type,
        }
        variants: dict[str, dict[str, Any]] = {}
        for weight, activation in _pairs(cls, domain):
            keys = domain.keys[weight], domain.keys["none" if activation == "*" else activation]
            base = _baseline(cls, *keys, domain)
            if base is None:
                continue
            made = variant(cls, *keys, base, domain)
            entry = variants.setdefault(json.dumps([made, base]), {**made, "base": base, "pairs": []})
            entry["pairs"].append([weight, activation])
        if variants:
            yield {"class": name, **facts, "variants": list(variants.values())}


def standing(domain: Domain, rows: list[dict[str, Any]]) -> list[list[bool]]:
    """For every class and variant: does its baseline still stand in the current world?"""
    classes = experts_classes()
    found = []
    for row in rows:
        cls = classes[row["class"]]
        any_gemm_type(cls)
        keys = [
            [domain.keys["none" if name == "*" else name] for name in entry["pairs"][0]] for entry in row["variants"]
        ]
        found.append([ask(cls, e["base"], *pair) for e, pair in zip(row["variants"], keys, strict=True)])
    return found


# ------------------------------------------------------------------------------------------------ selection

Factor = dict[str, dict[str, Any]]  # value's name -> what it changes in the question, its world or the call


class Asked:
    """Experts classes that write down that they were asked and refuse, except the one whose turn is `accept`."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any, Any]] = []
        self.accept: int | None = None
        for name, cls in experts_classes().items():
            cls.is_supported_config = staticmethod(self._answer(name))

    def _answer(self, name: str) -> Callable[..., tuple[bool, str | None]]:
        def answer(
            cls: Any, moe: Any, weight_key: Any = None, activation_key: Any = None, *rest: Any, **more: Any
        ) -> Any:
            self.log.append((class_name(cls) if isinstance(cls, type) else name, weight_key, activation_key))
            return (len(self.log) - 1 == self.accept), "refused"

        return answer


def _selectors() -> dict[str, Callable[..., Any]]:
    """The selection functions of this version by moeq's name of the family: `(moe, weight, activation, call) ->
    (backend, class)`."""
    found: dict[str, Callable[..., Any]] = {}

    def from_oracle(name: str, module_name: str, function: str) -> None:
        select = getattr(inside.family(module_name), function, None)
        if select is None:
            return
        takes = inspect.signature(select).parameters

        def call(moe: Any, weight: Any, activation: Any, extra: Mapping[str, Any]) -> Any:
            given = {
                "weight_key": weight,
                "activation_key": activation,
                "quant_config": None,
                "may_have_zp": False,
                "may_have_bias": False,
                "allow_tile_padding": True,
                "allow_vllm_cutlass": False,
                **extra,
            }
            return select(moe, **{key: value for key, value in given.items() if key in takes})

        found[name] = call

    from_oracle("wna16", "int_wna16", "select_wna16_moe_backend")
    from_oracle("int8", "int8", "select_int8_moe_backend")
    from_oracle("mxfp4", "mxfp4", "select_mxfp4_moe_backend")
    from_oracle("mxfp4-generic", "mxfp4", "select_deepseek_v4_mxfp4_moe_backend")
    from_oracle("fp8", "fp8", "select_fp8_moe_backend")
    from_oracle("nvfp4", "nvfp4", "select_nvfp4_moe_backend")
    from_oracle("mxfp8", "mxfp8", "select_mxfp8_moe_backend")
    from_oracle("unquantized", "unquantized", "select_unquantized_moe_backend")
    from_oracle("w4a8-fp8", "w4a8", "select_w4a8_moe_backend")
    from_oracle("w4a8-int8", "w4a8_int8", "select_w4a8_int8_moe_backend")
    wna16 = inside.family("int_wna16")
    if hasattr(wna16, "_backend_incompatibility_reason"):  # its rules are readers' business: see filters.py
        wna16._backend_incompatibility_reason = lambda *a, **k: None
    for name, module, cls in (
        (
            "mxfp4-ct",
            "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_mxfp4",
            "CompressedTensorsW4A4Mxfp4MoEMethod",
        ),
        ("mxfp4-inc", "inc.schemes.inc_mxfp4_moe", "INCMxfp4MoEMethod"),
    ):
        with contextlib.suppress(ImportError, AttributeError):
            made = getattr(importlib.import_module(f"vllm.model_executor.layers.quantization.{module}"), cls)
            found[name] = _of_method(made)
    with contextlib.suppress(ImportError, AttributeError):
        humming: Any = importlib.import_module("vllm.model_executor.layers.quantization.humming")
        select = humming.select_humming_moe_experts

        def call(moe: Any, weight: Any, activation: Any, extra: Mapping[str, Any]) -> Any:
            cls = select(config=moe, weight_key=weight, activation_key=activation)
            return ("HUMMING" if cls else None), cls

        found["humming"] = call
    return found


def _of_method(cls: Any) -> Callable[..., Any]:
    """Methods that choose in their constructor, without a selection function."""

    def call(moe: Any, weight: Any, activation: Any, extra: Mapping[str, Any]) -> Any:
        try:
            method = cls(moe)
        except TypeError:
            method = cls(inside.Loose(), moe)
        found, experts = inside.chosen(method), getattr(method, "experts_cls", None)
        return _real_backend(found["backend"], experts), experts

    return call


def _real_backend(reported: str | None, experts: Any) -> str | None:
    """`REAL~REPORTED` where a method reports a backend whose class is not the one that it runs."""
    module = inside.family("mxfp4")
    enum = module.Mxfp4MoeBackend
    if reported is None or reported not in enum.__members__ or experts in module.backend_to_kernel_cls(enum[reported]):
        return reported
    for backend in enum:
        with contextlib.suppress(ValueError):  # a member without classes
            if experts in module.backend_to_kernel_cls(backend):
                return f"{backend.name}~{reported}"
    return reported


_NVFP4 = (("kNvfp4Static", "kNvfp4Dynamic"), ("kNvfp4Static", "none"))
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
_ASKED: dict[str, tuple[tuple[str, str], ...]] = {
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


def factors(family: str, kind: str, domain: Domain) -> dict[str, Factor]:
    """Everything that a family's search may look at."""
    table: dict[str, Factor] = {
        "keys": {f"{w}|{a}": {"keys": (w, a)} for w, a in _ASKED[family][1:]},
        "form": {name: form for name, form in domain.forms.items() if name != "single"},
        "activation": {a: {"act": a} for a in domain.activations if a != "silu"},
        "routing": {r: {"routing": r} for r in domain.routings if r != "Renormalize"},
        "lora": {"1": {"lora": True}},
        "limit": {"1": {"swiglu_limit": 7.0}},
        "bias": {"1": {"bias": True}},
        "hash": {"1": {"hash_routing": True}},
        "fp32": {"1": {"router_fp32": True}},
        "dtype": {"fp16": {"dtype": "fp16"}},
        "ragged": {"1": {"inter": 2112}},  # 128 does not divide it
        "cutlass": {"1": {"call": {"allow_vllm_cutlass": True}}} if family == "fp8" else {},
        "model": {name: {"model_type": name} for name in _special_models()},
    }
    for name in _PACKAGE_FACTORS.get(kind, ()):
        table[name] = {"0": {"flags": {name: False}}}
    for name, tried in {**_SWITCHES[kind], "VLLM_BATCH_INVARIANT": ("1",)}.items():
        values = {value for value in (*tried, _RICH[kind]["env"].get(name)) if value is not None}
        table[name] = {value: {"env": {name: value}} for value in sorted(values)}
    return {name: values for name, values in table.items() if values}


def _special_models() -> tuple[str, ...]:
    module: Any = importlib.import_module("vllm.utils.deep_gemm")
    return tuple(getattr(module, "_DEEPGEMM_BLACKWELL_EXCLUDED_MODEL_TYPES", ()))


class SelectionProbe:
    """One family's selection function on the current device, asked for its order of trial."""

    def __init__(self, family: str, select: Callable[..., Any], asked: Asked, world: World, domain: Domain) -> None:
        self.family, self.select, self.asked, self.world, self.domain = family, select, asked, world, domain
        self.env: dict[str, str] = {}
        self.flags: dict[str, bool] = {}
        sandbox.apply({**world, "env": {}})  # the search before this one may have left its variables
        _layers.clear()
        self.known: dict[str, str] = {}
        self.names: dict[int, str] = {}
        self.refusal = ""

    def _run(self, changes: list[dict[str, Any]], accept: int | None) -> tuple[str, str]:
        question, call, keys, env = dict(BASE), {}, _ASKED[self.family][0], {}
        flags: dict[str, bool] = {}
        for change in changes:
            question.update({k: v for k, v in change.items() if k not in ("call", "keys", "env", "flags")})
            call.update(change.get("call", {}))
            keys = change.get("keys", keys)
            env.update(change.get("env", {}))
            flags.update(change.get("flags", {}))
        if question["ep"] is False:
            question["inter"] = question["inter"] * question["tp"] * question["dp"]
        if (env, flags) != (self.env, self.flags):
            sandbox.apply({**self.world, "env": env, "flags": {**self.world["flags"], **flags}})
            _layers.clear()
            self.env, self.flags = env, flags
        self.asked.log, self.asked.accept, self.keys = [], accept, keys
        named = self.domain.keys
        try:
            moe = layer_of(question)
        except Exception:  # noqa: BLE001  (refused before any selection: not this table's business)
            return "never", "!never"
        try:
            backend, cls = self.select(moe, named[keys[0]], named[keys[1]], call)
        except Exception as error:  # noqa: BLE001  (how the search ends is the answer)
            self.refusal = str(error)
            return "error", f"!{type(error).__name__}:{error_kind(error)}"
        word = getattr(backend, "name", backend)
        if cls is None or word in (None, "NONE", "None"):
            return "none", "!none:SILENT_NONE"
        return "choice", f"{word}/{class_name(cls)}"

    def _key(self, key: Any) -> str:
        if id(key) not in self.names:
            self.names[id(key)] = next(name for name, known in self.domain.keys.items() if known == key)
        return self.names[id(key)]

    def listed(self) -> list[str]:
        """Names that the family's refusal of an unknown backend lists: some are not values of the option."""
        self._run([{"override": "no such backend"}], None)
        return re.findall(r"'([a-z0-9_]+)'", self.refusal.partition("Expected one of")[2])

    def sequence(self, changes: list[dict[str, Any]]) -> str:
        """The candidates in order, and the end: tokens `BACKEND/Class[@activation key]`, then `=choice` or
        `!error:kind`."""
        kind, end = self._run(changes, None)
        log, tokens = list(self.asked.log), []
        if kind == "never":
            return end
        # One class may stand for several backends: which one it is depends on the name that was asked for.
        asked = repr([(name, self._key(activation)) for name, _, activation in log])
        cache = f"{changes[0]['override']} {asked} {end} {self.keys}"
        if cache in self.known:
            return self.known[cache]
        for turn, (_, _, activation) in enumerate(log):
            got, word = self._run(changes, turn)
            if got != "choice":
                word = f"?/{log[turn][0]}"
            if self.family.startswith("mxfp4"):  # elsewhere candidates are asked with the method's own key
                word += f"@{self._key(activation)}"
            tokens.append(word)
        tokens.append(f"={end}" if kind == "choice" else end)
        self.known[cache] = " ".join(tokens)
        return self.known[cache]


def error_kind(error: Exception) -> str:
    """The kind of a search's error, in moeq's words."""
    text = str(error)
    if "Expected one of" in text and "is not supported for" in text:
        return "OVERRIDE_UNKNOWN"
    if isinstance(error, NotImplementedError) or "backends available" in text:
        return "NO_BACKEND"
    if isinstance(error, AssertionError) and not text:
        return "BARE_ASSERTION"
    return "OVERRIDE_UNSUPPORTED" if isinstance(error, ValueError) else "CONFIG"


def table_of(search: SelectionProbe, override: str, all_factors: dict[str, Factor]) -> dict[str, Any] | str:
    """A requested backend's searches: by which factors they differ, and the search for every combination of those."""
    start = {"override": override}
    base = search.sequence([start])
    values = {(f, v): change for f, rows in all_factors.items() for v, change in rows.items()}
    # A name that is refused at once is refused whatever the rest: a few of the factors show it.
    probed = [key for key in values if key in _TWO_FOLD] if base == "!ValueError:OVERRIDE_UNKNOWN" else list(values)
    effects = {key: [_effect(search, base, [start, values[key]])] for key in probed}
    if any(effect for (effect,) in effects.values()):
        effects = {key: effects.get(key) or [_effect(search, base, [start, values[key]])] for key in values}
    elif " " not in base:
        return base
    # What a factor does may depend on another one: try the likely ones beside each other.
    core = [
        key for key, (effect,) in effects.items() if effect or (_core(*key) if override == "auto" else key in _TWO_FOLD)
    ]
    corners = [
        [start, values[key]]
        for key in core
        if key[0] not in ("form", "activation", "routing", "model") or key in _TWO_FOLD
    ]
    at = [base, *(search.sequence(corner) for corner in corners)]
    for key in core:
        effects[key] += [
            _effect(search, before, [*corner, values[key]]) for before, corner in zip(at[1:], corners, strict=True)
        ]
    matter: dict[str, dict[str, list[str]]] = {}  # factor -> representative value -> values of the same effect
    for (factor, value), effect in effects.items():
        if any(effect):
            groups = matter.setdefault(factor, {})
            same = next((rep for rep in groups if effects[factor, rep][: len(effect)] == effect), None)
            groups.setdefault(same or value, []).append(value)
    rows: dict[str, str] = {}
    names = list(matter)
    for picked in itertools.product(*(["", *matter[name]] for name in names)):
        changes = [start, *(values[name, value] for name, value in zip(names, picked, strict=True) if value)]
        words = [f"{name}={value}" for name, value in zip(names, picked, strict=True) if value]
        rows[",".join(words)] = search.sequence(changes)
    alike = {
        name: {v: rep for rep, group in groups.items() for v in group if v != rep} for name, groups in matter.items()
    }
    return {"by": names, "same": {n: g for n, g in alike.items() if g}, "rows": rows}


_TWO_FOLD = {("lora", "1"), ("limit", "1"), ("form", "dp"), ("form", "ep"), ("form", "ep:deepep_low_latency")}


def _core(factor: str, value: str) -> bool:
    """Values whose effect is looked at in combination too."""
    usual = {"activation": ("swigluoai",), "routing": ("DeepseekV4",)}
    return "+eplb" not in value and factor not in ("hash", "fp32", "bias") and value in usual.get(factor, (value,))


def _effect(search: SelectionProbe, before: str, changes: list[dict[str, Any]]) -> str:
    """The search after a change, empty where it is the same or where nothing is selected at all."""
    got = search.sequence(changes)
    return "" if got == before or got == "!never" else got


def selection_rows(world: World, domain: Domain) -> Iterator[dict[str, Any]]:
    """Every family's searches on the current device, by requested backend."""
    asked = Asked()
    for family, select in _selectors().items():
        search = SelectionProbe(family, select, asked, world, domain)
        table = factors(family, world["kind"], domain)
        tables: dict[str, Any] = {}
        for override in dict.fromkeys((*domain.overrides, *search.listed())):
            made = table_of(search, override, table)
            tables[override] = "auto" if override != "auto" and made == tables.get("auto") else made
        yield {"family": family, "tables": tables}


def probe(world: World, domain: Domain) -> Iterator[list[str]]:
    """Some of every table's searches on the current device: where they are the same, so are the tables."""
    asked = Asked()
    for family, select in _selectors().items():
        search = SelectionProbe(family, select, asked, world, domain)
        table = factors(family, world["kind"], domain)
        every = [change for rows in table.values() for change in rows.values()]
        few = [change for name, rows in table.items() for value, change in rows.items() if _probing(name, value)]
        for override in dict.fromkeys((*domain.overrides, *search.listed())):
            start = {"override": override}
            changes = [{}, *(every if override == "auto" else few)]
            yield [search.sequence([start, change]) for change in changes]


def _probing(factor: str, value: str) -> bool:
    return (factor, value) in _TWO_FOLD or factor in ("bias", "dtype", "ragged", "keys", "cutlass")


# ------------------------------------------------------------------------------------------------ names of methods

_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}
_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "NVFP4_AWQ",
    "MXFP8",
    "MIXED_PRECISION",
    "W4A8_NVFP4_FP8",
    "INT4_AWQ",
    "W4A8_AWQ",
)


def declared_kinds() -> dict[str, tuple[dict[str, Any] | None, str]]:
    """What checkpoints declare, as far as it decides the method's name: sample config and model type by kind (see
    `names.py`)."""
    quantization: Any = importlib.import_module("vllm.model_executor.layers.quantization")
    kinds: dict[str, tuple[dict[str, Any] | None, str]] = {"": (None, "")}
    kinds.update({name: ({"quant_method": name}, "") for name in quantization.QUANTIZATION_METHODS})
    kinds.update(
        {
            "gptq": (_GPTQ, ""),
            "gptq-odd": ({**_GPTQ, "bits": 3}, ""),
            "awq": (_AWQ, ""),
            "awq-odd": ({**_AWQ, "bits": 8}, ""),
            "auto-round": ({"quant_method": "auto-round", "bits": 4}, ""),
            "mxfp4:gpt_oss": ({"quant_method": "mxfp4"}, "gpt_oss"),
        }
    )
    for declared in ("modelopt", "modelopt_fp4"):
        for algorithm in _ALGORITHMS:
            kinds[f"{declared}:{algorithm}"] = ({"quant_method": declared, "quant_algo": algorithm}, "")
    return kinds


def method_names() -> dict[str, Any]:
    """For every kind of declared config and every method a user may name: the method in force. What is left out is
    refused."""
    quantization: Any = importlib.import_module("vllm.model_executor.layers.quantization")
    users = [None, *quantization.QUANTIZATION_METHODS]
    table: dict[str, dict[str, str]] = {kind: {} for kind in declared_kinds()}
    for kind, (config, model) in declared_kinds().items():
        for user in users:
            inside.set_config({**BASE, "qcfg": config, "user_quant": user, "model_type": model})
            found, refused = inside.attempt(inside._verify)
            if refused is None and found is not None:
                table[kind][user or ""] = found
    return table


def method_limits() -> dict[str, Any]:
    """Least capability and dtypes of every method's config class."""
    quantization: Any = importlib.import_module("vllm.model_executor.layers.quantization")
    found: dict[str, Any] = {}
    for name in quantization.QUANTIZATION_METHODS:
        with contextlib.suppress(Exception):
            cls = quantization.get_quantization_config(name)
            dtypes = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
            # Some classes ask an instance: it is not looked at.
            static = isinstance(inspect.getattr_static(cls, "get_supported_act_dtypes"), (classmethod, staticmethod))
            known = cls.get_supported_act_dtypes() if static else cls.get_supported_act_dtypes(cls.__new__(cls))
            listed = [dtypes[str(d)] for d in known if str(d) in dtypes]
            found[name] = {"capability": cls.get_min_capability(), "dtypes": sorted(listed)}
    return found


# ------------------------------------------------------------------------------------------------ size round-up


def rounding(domain: Domain) -> dict[str, Any]:
    """Multiples of (hidden, intermediate per rank) that MXFP4 backends round up to, by backend; by activation where
    that matters."""
    module = inside.family("mxfp4")
    function = getattr(module, "mxfp4_round_up_hidden_size_and_intermediate_size", None)
    if function is None:
        return {}
    enum = next(v for n, v in vars(module).items() if n == "Mxfp4MoeBackend")
    parameters = list(inspect.signature(function).parameters)
    found: dict[str, Any] = {}
    for backend in enum:
        by: dict[str, list[int]] = {}
        for name, member in domain.activation_members.items():
            given = {"backend": backend, "hidden_size": 1, "intermediate_size": 1, "activation": member}
            with contextlib.suppress(Exception):
                by[name] = list(function(*[given[p] for p in parameters if p in given]))
        if not by:
            continue
        usual = by.get("swigluoai") or next(iter(by.values()))
        found[backend.name] = {"": usual, **{a: v for a, v in by.items() if v != usual}}
    return found


# ------------------------------------------------------------------------------------------------ one device


def _json_of(work: Callable[[], Any]) -> Any:
    """The result of `work`, run in a fork: what it caches is gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/rows"
        if not inside.in_fork(lambda: [work()], path):
            raise RuntimeError("a fork of the extractor failed")
        return json.loads(Path(path).read_text(encoding="utf-8"))


_searched: dict[str, Any] = {}  # selection tables by their probe: devices of one import that are alike share them


def device_tables(world: World) -> dict[str, Any]:
    """Every table on one device. The package is imported, and `world` its device."""
    kind = world["kind"]
    rich = {**world, **_RICH[kind]}

    def in_world(changed: World, work: Callable[[Domain], Any]) -> Any:
        def run() -> Any:
            sandbox.apply(changed)
            _layers.clear()
            return work(Domain())

        return _json_of(run)

    rows = in_world(rich, lambda domain: list(class_rows(domain)))
    present = {**sandbox.DEFAULT_PACKAGES[kind], **rich["flags"]}
    switched: list[tuple[str, Any, World]] = [
        ("package", name, {**rich, "flags": {**rich["flags"], name: False}}) for name, on in present.items() if on
    ]
    for name, values in {**_SWITCHES[kind], "VLLM_BATCH_INVARIANT": ("1",)}.items():
        for value in values if name not in _NOT_FOR_CLASSES else ():
            env = {key: old for key, old in rich["env"].items() if key != name}
            switched.append(("env", [name, value], {**rich, "env": {**env, name: value} if value else env}))
    for what, name, changed in switched:
        stands = in_world(changed, lambda domain: standing(domain, rows))
        _note_switch(rows, what, name, stands)
    for row in rows:
        for entry in row["variants"]:
            entry.pop("base")
            _finish_env(entry, rich["env"])
    plain = {**rich, "env": {}}
    alike = json.dumps(in_world(plain, lambda domain: list(probe(plain, domain))))
    if alike not in _searched:
        _searched[alike] = in_world(plain, lambda domain: list(selection_rows(plain, domain)))
    return {
        "classes": rows,
        "select": _searched[alike],
        "names": in_world({**world, "env": {}}, lambda domain: method_names()),
        "limits": in_world({**world, "env": {}}, lambda domain: method_limits()),
        "rounding": in_world({**world, "env": {}}, rounding),
        "overrides": in_world(world, lambda domain: domain.overrides),
        "all2all": in_world(world, lambda domain: domain.all2all),
    }


def _note_switch(rows: list[dict[str, Any]], what: str, name: Any, stands: list[list[bool]]) -> None:
    for row, answers in zip(rows, stands, strict=True):
        for entry, stands_still in zip(row["variants"], answers, strict=True):
            if what == "package":
                entry.setdefault("packages", []).extend([] if stands_still else [name])
            elif name[0] == "VLLM_BATCH_INVARIANT":
                entry["batch_invariant"] = stands_still
            else:
                entry.setdefault("env", {}).setdefault(name[0], []).append([name[1], stands_still])


def _finish_env(entry: dict[str, Any], rich: Mapping[str, str]) -> None:
    """Variables that the variant depends on, each with the values that it stands with (None: unset)."""
    found = {}
    for name, answers in entry.pop("env", {}).items():
        if all(stands for _, stands in answers):
            continue
        found[name] = [rich.get(name), *(value for value, stands in answers if stands)]
    entry["env"] = found


# ------------------------------------------------------------------------------------------------ one version

# Fields of a variant that are left out at these values.
_USUAL: dict[str, Any] = {
    "routing": None,
    "fp32_logits": None,
    "limit": None,
    "max_experts": None,
    "intermediate_by": {},
    "packages": [],
    "env": {},
    "bias": True,
    "hidden": 1,
    "intermediate": 1,
    "min_top_k": 1,
    "hash_routing": True,
    "decomposed": True,
    "lora": False,
    "batch_invariant": False,
}


def _variant_row(entry: Mapping[str, Any], forms: list[str]) -> dict[str, Any]:
    row = {name: value for name, value in entry.items() if name not in _USUAL or value != _USUAL[name]}
    listed = set(entry["parallel"])
    refused = [name for name in forms if name not in listed]
    row["parallel"] = {"not": refused} if len(refused) <= len(listed) else {"only": entry["parallel"]}
    row["pairs"] = [f"{weight}|{activation}" for weight, activation in entry["pairs"]]
    return row


def _grouped(by_device: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Devices of the same value together."""
    groups: dict[str, dict[str, Any]] = {}
    for device, value in by_device.items():
        groups.setdefault(json.dumps(value, sort_keys=True), {"devices": [], name: value})["devices"].append(device)
    return list(groups.values())


def _by_override(by_device: Mapping[str, Mapping[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Requested backend -> its tables, each with the devices that it is for."""
    overrides = dict.fromkeys(name for tables in by_device.values() for name in tables)
    found = {}
    for override in overrides:
        tables = {device: rows[override] for device, rows in by_device.items() if override in rows}
        same = {
            device: {name: part for name, part in row.items() if part} if isinstance(row, dict) else row
            for device, row in tables.items()
        }
        found[override] = _grouped(same, "table")
    return found


def merge(version: str, digest: str, found: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The data file of a version: every device's tables, those that are the same once."""
    first = next(iter(found.values()))
    forms = [name for name, _ in parallel_forms(tuple(first["all2all"]))]
    classes: dict[str, dict[str, Any]] = {}
    variants: dict[str, dict[str, Any]] = {}
    families: dict[str, dict[str, Any]] = {}
    for device, tables in found.items():
        for row in tables["classes"]:
            classes.setdefault(row["class"], {key: row[key] for key in ("format", "monolithic", "gemm_type")})
            made = [_variant_row(entry, forms) for entry in row["variants"]]
            variants.setdefault(row["class"], {})[device] = made
        for row in tables["select"]:
            families.setdefault(row["family"], {})[device] = row["tables"]
    return {
        "engine": "vllm",
        "version": version,
        "digest": digest,
        "devices": list(found),
        "overrides": first["overrides"],
        "all2all": first["all2all"],
        "forms": forms,
        "limits": first["limits"],
        "names": _grouped({device: tables["names"] for device, tables in found.items()}, "value"),
        "rounding": _grouped({device: tables["rounding"] for device, tables in found.items()}, "value"),
        "classes": {
            name: {**row, "blocks": _grouped(variants[name], "variants")} for name, row in sorted(classes.items())
        },
        "families": {name: _by_override(by_device) for name, by_device in families.items()},
    }


def extract(version: str, site: str) -> dict[str, Any]:
    """The tables of the version unpacked in `site` (the folder that holds `vllm/`), by executing it on every device.

    Raises:
        MoeqError: `environment.engine` where it cannot be imported on some device.
    """
    sandbox.preload()
    found: dict[str, dict[str, Any]] = {}
    for group in GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/rows"

            def run(group: dict[str, World] = group) -> Iterator[Any]:
                sandbox.install(site, next(iter(group.values())))
                inside.prepare()
                for device, world in group.items():
                    sandbox.change_device(world)
                    yield [device, device_tables(world)]

            if not inside.in_fork(run, path):
                names = ", ".join(group)
                raise MoeqError(
                    "environment.engine", f"vllm in {site} cannot be executed for {names}", "see the traceback above"
                )
            found.update(json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines())
    return merge(version, digest_of(site), {device: found[device] for device in DEVICES})


def digest_of(site: str) -> str:
    """BLAKE2 of the package's Python files, by path."""
    total = hashlib.blake2b(digest_size=16)
    for path in sorted(Path(site, "vllm").rglob("*.py")):
        total.update(str(path.relative_to(site)).encode() + b"\0" + hashlib.blake2b(path.read_bytes()).digest())
    return f"blake2:{total.hexdigest()}"
