"""Rows of the decision vectors as questions to the oracle, and what to compare.

A row says: this checkpoint config, on that platform, ends so in vLLM 0.33.0. Rows of the kinds `hf:` and `oracle:` were
executed; the others were read from source and describe one gate each, partly in words.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from moeq.deploy.deployment import Deployment, Gpu
from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.entry_points import canonical
from moeq.oracle.engines.vllm.outcome import Outcome, resolve, resolve_method
from moeq.oracle.engines.vllm.policy import load_policy
from moeq.oracle.records import MoeShape

OWN_FILE = Path(__file__).parents[1] / "data" / "oracle" / "oracle_vectors.json"
POLICY = load_policy("vllm@0.33.0")


def load() -> dict[str, Any]:
    """The vectors file: the project's copy, or the one that MOEQ_TEST_ORACLE_VECTORS names."""
    return json.loads(Path(os.environ.get("MOEQ_TEST_ORACLE_VECTORS", OWN_FILE)).read_text(encoding="utf-8"))


_CPU_ARCHS = {("x86", True): "x86-amx", ("x86", False): "x86", ("arm", False): "arm64", ("power", False): "ppc64le"}


def gpu_of(name: str, platform: dict[str, Any]) -> Gpu:
    """The device of a platform entry."""
    kind = platform["kind"]
    if kind == "cuda":
        capability = tuple(platform["cap"])
        return Gpu(name, "cuda", f"sm{capability[0]}{capability[1]}", capability)
    if kind == "rocm":
        return Gpu(name, "rocm", platform["gcn"])
    if kind == "xpu":
        return Gpu(name, "xpu", "xpu")
    zen = platform.get("flags", {}).get("zen")
    return Gpu(
        name,
        "cpu",
        "x86-zen" if zen else _CPU_ARCHS.get((platform["arch"], bool(platform.get("amx"))), platform["arch"]),
    )


def deployment_of(row: dict[str, Any], platforms: dict[str, Any]) -> Deployment:
    """The deployment of a row."""
    platform = platforms[row["platform"]]
    packages = {key: value for key, value in platform.get("flags", {}).items() if key != "zen"}
    tp, dp = row.get("tp", 1), row.get("dp", 1)
    asked = row["entry"].removeprefix("hf:")
    declared = str((row["quant_config"] or {}).get("quant_method", asked))
    online = row["entry"].startswith("hf:") and canonical(declared) not in (asked, asked.partition("oss_")[2])
    return Deployment(
        gpu=gpu_of(row["platform"], platform),
        tp=tp,
        ep=tp * dp if row.get("ep") else 1,
        dp=dp,
        all2all=row.get("all2all"),
        batched=bool(row.get("batched")),
        lora=bool(row["lora"]),
        eplb=bool(row.get("eplb")),
        dtype=row.get("in_dtype") or "bf16",
        backend=row["override"],
        env=tuple(sorted(platform.get("env", {}).items())),
        packages=tuple(sorted(packages.items())),
        quantization=asked if online else None,
    )


def shape_of(row: dict[str, Any]) -> MoeShape:
    """The layer of a row."""
    return MoeShape(
        hidden_size=row.get("hidden", 2048),
        intermediate_size=row.get("intermediate", 768),
        num_experts=row.get("num_experts", 128),
        top_k=row.get("topk", 8),
        activation=row["activation"],
        gated=not row["activation"].endswith("_no_mul"),
        has_bias=bool(row["bias"]),
        routing=row.get("routing", "Renormalize"),
        router_dtype=row.get("router_logits_dtype"),
        model_type="gpt_oss" if row["entry"] == "hf:gpt_oss_mxfp4" else "other",
    )


def _direct(row: dict[str, Any]) -> Method:
    """The keys of a direct oracle call, from the row's fields or, where it has none, its words."""
    family = (
        row["entry"].removeprefix("oracle:").replace("unquant", "unquantized").replace("unquantizedized", "unquantized")
    )
    weight, activation = row.get("weight_key"), row.get("activation_key")
    if family == "nvfp4":
        weight = weight or "kNvfp4Static"
        activation = activation or (None if "A16" in row["scheme"] else "kNvfp4Dynamic")
    if family == "mxfp8":
        weight, activation = weight or "kMxfp8Static", activation or "kMxfp8Dynamic"
    allowed = family != "fp8" or "cutlass allowed" in row["scheme"]
    return Method("", family, "none", weight or "none", activation, vllm_cutlass=allowed)


def outcome_of(row: dict[str, Any], platforms: dict[str, Any]) -> Outcome:
    """Put a row to the oracle."""
    deployment, shape = deployment_of(row, platforms), shape_of(row)
    if row["entry"].startswith("oracle:"):
        return resolve_method(Case(POLICY, deployment, shape, _direct(row)), "")
    config = dict(row["quant_config"] or {})
    config.setdefault("quant_method", row["entry"].removeprefix("hf:"))
    return resolve(POLICY, config, shape, deployment)


#: Stages after selection whose failure a row may expect instead of the selection.
LATER = ("KERNEL_CREATION", "CONVERSION", "CREATE_WEIGHTS", "EPLB")


def compare(row: dict[str, Any], outcome: Outcome) -> list[str]:
    """Differences between what a row expects and what the oracle says; empty where they agree."""
    expected, selection = row["expected"], outcome.selection
    if expected.get("kind") in LATER:
        failed = [(gate.error, gate.kind) for gate in outcome.gates if not gate.passed]
        wanted = (expected["error"], expected["kind"])
        return [] if wanted in failed else [f"expected {wanted} at a gate, gates say {failed}"]
    if "error" in expected:
        found = (selection.error.error, selection.error.kind) if selection.error else None
        wanted = (expected["error"], expected.get("kind"))
        differs = [] if found == wanted else [f"expected {wanted}, got {found or selection.selected}"]
        code = expected.get("reason_code")
        if selection.error and code and re.match(r"P\d\d_", code) and selection.error.code != code:
            differs.append(f"expected reason {code}, got {selection.error.code}")
        return differs
    return _compare_choice(row, outcome)


def _compare_choice(row: dict[str, Any], outcome: Outcome) -> list[str]:
    expected, selection = row["expected"], outcome.selection
    silent_none = expected.get("backend") == "NONE" or not any(expected.get(key) for key in ("backend", "method"))
    if silent_none:
        silent = selection.error is not None and selection.error.kind == "SILENT_NONE"
        return [] if silent else [f"expected no backend, got {selection.selected or selection.error}"]
    if selection.selected is None:
        return [f"expected {expected['backend']}, got {selection.error}"]
    found: dict[str, Any] = {
        "method": outcome.case.method.name or None,
        "backend": selection.reported or selection.selected.backend,
        "experts_cls": selection.selected.experts,
    }
    if "rounded_hidden_intermediate" in expected:
        from moeq.oracle.engines.vllm.sizes import sizes_for

        sizes = sizes_for(outcome.case, selection.selected)
        found["rounded_hidden_intermediate"] = [sizes.padded_hidden, sizes.padded_intermediate]
    differs = [
        f"{key}: expected {expected[key]}, got {value}"
        for key, value in found.items()
        if expected.get(key) is not None and expected[key] != value
    ]
    if expected.get("post_check") == "validated ok" and not all(gate.passed for gate in outcome.gates):
        differs.append("expected the kernel to be made")
    if row["other_gates"] and all(gate.passed for gate in outcome.gates):
        differs.append(f"expected a failing gate: {row['other_gates']}")
    return differs
