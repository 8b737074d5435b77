"""vLLM's experts classes, asked one by one: which pairs of keys, activations, routing methods, parallel forms, dtypes
and sizes each says yes to, on the current device. A question that it accepts is varied one factor at a time."""

from __future__ import annotations

import contextlib
import copy
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from vllm_tables import inside
from vllm_tables.questions import ASKED, BASE, parallel_forms

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


LAYERS: dict[str, Any] = {}


def layer_of(question: Mapping[str, Any]) -> Any:
    """The layer's config of a question, which becomes the current config too: made once in a world."""
    dtype = inside.set_config(question)
    key = repr(sorted(question.items(), key=lambda item: item[0]))
    if key not in LAYERS:
        moe = LAYERS[key] = inside.moe_config(question, dtype)
        if question.get("decomposed") and hasattr(moe, "require_decomposed_backend"):
            moe.require_decomposed_backend = True
    return copy.copy(LAYERS[key])  # selection may write into it


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
    asked = {pair for pairs in ASKED.values() for pair in pairs} | {(weight, "none") for weight in domain.keys}
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
