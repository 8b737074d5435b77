"""What vLLM decides around selection: the method that a declared config leads to, its least capability and dtypes, and
the sizes that a backend rounds up to."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from typing import Any

from vllm_tables import inside
from vllm_tables.classes import Domain
from vllm_tables.questions import BASE

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
