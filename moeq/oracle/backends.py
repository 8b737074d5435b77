"""Rows of `moeq backends`: every backend of an engine with its devices, limits and layouts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from moeq.errors import MoeqError
from moeq.oracle.engines.moeq import builtin_policy
from moeq.oracle.engines.vllm.filters import FILTERS
from moeq.oracle.engines.vllm.policy import Backend, EnginePolicy, Family, load_policy
from moeq.oracle.engines.vllm.tables import ExpertsClass, Variant
from moeq.oracle.records import AS_IT_IS
from moeq.oracle.versions import BUILTIN, choose_engine


def backend_rows(engine: str, family: str | None = None) -> list[dict[str, Any]]:
    """Return one row per backend: family, name, flag, devices, limits and layouts.

    Raises MoeqError `usage.unknown-engine`, `usage.unknown-family`.
    """
    if engine == BUILTIN:
        return _builtin_rows()
    policy = load_policy(choose_engine(engine).policy)
    if family is not None and family not in policy.families:
        known = ", ".join(policy.families)
        raise MoeqError("usage.unknown-family", f"no family is called '{family}'", f"known: {known}")
    wanted = [policy.families[family]] if family else list(policy.families.values())
    return [_row(policy, one, backend) for one in wanted for backend in one.backends.values()]


def _row(policy: EnginePolicy, family: Family, backend: Backend) -> dict[str, Any]:
    classes = [policy.classes[name] for name in backend.classes]
    layouts = list(dict.fromkeys(choice.layout for choice in backend.layouts if not choice.lossy))
    return {
        "family": family.name,
        "title": family.title,
        "backend": backend.name,
        "flag": backend.flag,
        "classes": [row.short for row in classes],
        "devices": list(dict.fromkeys(device for row in classes for device in row.variants)),
        "needs": list(dict.fromkeys(name for row in classes for item in _variants(row) for name in item.packages)),
        "limits": _limits(backend, classes),
        "layouts": layouts,
        "no_layout": AS_IT_IS if backend.as_it_is else backend.no_layout or "moeq has none yet",
    }


def _limits(backend: Backend, classes: Sequence[ExpertsClass]) -> list[str]:
    """List the requirements of a backend besides its device, in words."""
    words = [FILTERS[name].title for name in backend.filters]
    if all(row.format == "batched" for row in classes):
        words.append("batched activations")
    variants = [item for row in classes for item in _variants(row)]
    if variants and not any(item.lora for item in variants):
        words.append("no LoRA")
    words += [f"package {name}" for name in dict.fromkeys(name for item in variants for name in item.packages)]
    words += [f"{name}={allowed[0]}" for name, allowed in dict.fromkeys(pair for item in variants for pair in item.env)]
    limits = {item.max_experts for item in variants}
    known = [limit for limit in limits if limit is not None]
    if known == list(limits) and known:
        words.append(f"at most {max(known)} experts")
    return words


def _variants(row: ExpertsClass) -> list[Variant]:
    return list(dict.fromkeys(item for found in row.variants.values() for item in found))


def _builtin_rows() -> list[dict[str, Any]]:
    policy = builtin_policy()
    return [
        {
            "family": BUILTIN,
            "title": "moeq's built-in kernels",
            "backend": row.backend,
            "flag": row.backend.lower(),
            "classes": ["moeq_kernels.fused_moe"],
            "devices": [term.text for term in policy.devices],
            "needs": ["triton"],
            "limits": [f"{row.format.element}", f"groups {', '.join(map(str, row.format.group_sizes))}"],
            "layouts": [row.format.layout],
            "no_layout": "moeq has none yet",
        }
        for row in policy.kernels
    ]
