"""Verdicts on SGLang: every runner is tried by its name, and the one that runs is reported as chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.layouts.registry import LAYOUTS
from moeq.oracle.engines.sglang.decision import (
    RUNNERS,
    VERSION,
    Refused,
    SglangChoice,
    SglangLayer,
    decide_sglang,
)
from moeq.oracle.records import CandidateReport, ConvertTarget, EngineError, MoeShape, Reason, Sizes, Verdict

#: Name of the engine.
NAME = "sglang"
#: Option that requests a runner.
FLAG = "--moe-runner-backend"
#: Declared methods that moeq follows.
_READ = ("gptq", "awq", "compressed-tensors")
_PLACELESS = "the method in force makes unquantised experts, and the checkpoint's packed weights have no place in them"


def is_sglang(engine: str) -> bool:
    """Tell whether an engine is SGLang. Raise MoeqError `usage.engine-version` for an unknown version."""
    name, _, version = engine.partition("@")
    if name != NAME:
        return False
    if version not in ("", VERSION):
        raise MoeqError("usage.engine-version", f"{NAME} {version} is not known", f"known: {VERSION}")
    return True


def judge_sglang(config: Mapping[str, Any], shape: MoeShape, deployment: Deployment, title: str = "") -> Verdict:
    """Judge a checkpoint's experts on a deployment with SGLang 0.5.23.

    Only integer weights on CUDA are followed. Others are refused with the kind `NOT_FOLLOWED`.

    Args:
        config: `quantization_config` of the checkpoint.
        shape: layer.
        deployment: target; `backend` is the value of `--moe-runner-backend`.
        title: title of the scheme.
    """
    unknown = _not_followed(config, deployment)
    rows = () if unknown else tuple(_candidate(config, shape, deployment, runner) for runner in RUNNERS)
    made, error = (None, unknown) if unknown else _asked(config, shape, deployment)
    selected = None
    if made is not None:
        selected = replace(_report(made), flag=None if deployment.backend == "auto" else deployment.backend)
    sizes = _sizes(shape, deployment)
    layout = selected.layout if selected else None
    target = ConvertTarget(selected.backend, selected.experts, layout, None, sizes) if selected and layout else None
    return Verdict(
        engine=f"{NAME}@{VERSION}",
        scheme=title,
        deployment=deployment,
        shape=shape,
        asked=deployment.backend,
        method=made.name if made else None,
        family=None,
        weight_key=title or None,
        activation_key=None,
        selected=selected,
        error=error,
        gates=(),
        candidates=_once(rows),
        convert=target,
        no_convert=selected.no_layout if selected and not layout else None,
        runs_as=_runs_as(config, made) if made else None,
        sizes=sizes if selected else None,
        notes=(f"launch flags: {launch_flags(deployment)}",),
    )


def launch_flags(deployment: Deployment) -> str:
    """Return the options of `python -m sglang.launch_server` for a deployment."""
    dtype = {"bf16": "bfloat16", "fp16": "float16"}.get(deployment.dtype, deployment.dtype)
    parts = [f"--tp-size {deployment.tp}"] if deployment.tp > 1 else []
    parts += [f"--ep-size {deployment.ep}"] if deployment.ep > 1 else []
    parts += [f"--dtype {dtype}"]
    parts += [f"--quantization {deployment.quantization}"] if deployment.quantization else []
    parts += [f"{FLAG} {deployment.backend}"] if deployment.backend != "auto" else []
    return " ".join(parts)


def _not_followed(config: Mapping[str, Any], deployment: Deployment) -> EngineError | None:
    method, gpu = str(config.get("quant_method", "")).lower(), deployment.gpu
    if gpu.platform != "cuda" or gpu.capability is None:
        text = f"what SGLang does on {gpu.name} is not known to moeq: only CUDA is followed"
        return EngineError("none", "NOT_FOLLOWED", text, "--engine vllm, or --engine moeq")
    if method not in _READ or not _integers(config):
        read = "integer weights of GPTQ, AWQ and compressed-tensors are"
        text = f"what SGLang makes of {method or 'this checkpoint'} is not known to moeq: {read}"
        return EngineError("none", "NOT_FOLLOWED", text, "--engine vllm, or --engine moeq")
    if deployment.dp > 1 or deployment.ep not in (1, deployment.tp):
        text = f"dp {deployment.dp} and ep {deployment.ep} with tp {deployment.tp} are not followed"
        return EngineError("none", "NOT_FOLLOWED", text, "dp 1, and ep 1 or ep equal to tp")
    return None


def _integers(config: Mapping[str, Any]) -> bool:
    groups = config.get("config_groups") or {}
    rows = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    if config.get("quant_method") != "compressed-tensors":
        return True
    return len(rows) == 1 and isinstance(rows[0], Mapping) and rows[0].get("type") == "int" and "num_bits" in rows[0]


def _layer(shape: MoeShape, deployment: Deployment, runner: str) -> SglangLayer:
    assert deployment.gpu.capability is not None  # `_not_followed` has looked
    return SglangLayer(
        deployment.gpu.capability, shape.hidden_size, shape.intermediate_size, shape.num_experts, deployment.tp,
        deployment.ep > 1, deployment.dtype, shape.activation, runner, deployment.quantization,
    )  # fmt: skip


def _asked(
    config: Mapping[str, Any], shape: MoeShape, deployment: Deployment
) -> tuple[SglangChoice | None, EngineError | None]:
    if deployment.backend not in RUNNERS:
        text = f"'{deployment.backend}' is no runner that integer weights can be asked for with"
        return None, EngineError("ValueError", "OVERRIDE_UNKNOWN", text, f"known: {', '.join(RUNNERS)}")
    try:
        made = decide_sglang(config, _layer(shape, deployment, deployment.backend))
    except Refused as refused:
        kind = "METHOD" if refused.stage == "name" else "CONFIG"
        return None, EngineError(refused.error, kind, f"sglang: {refused.text}", refused.remedy)
    if not made.quantised:
        return None, EngineError("none", "SILENT_NONE", f"{made.name}: {_PLACELESS}", _way_out(config, deployment))
    return made, None


def _way_out(config: Mapping[str, Any], deployment: Deployment) -> str | None:
    wna16 = config.get("quant_method") == "awq" and config.get("bits") == 4 and deployment.quantization is None
    return "--quantization moe_wna16" if wna16 else None


def _candidate(
    config: Mapping[str, Any], shape: MoeShape, deployment: Deployment, runner: str
) -> tuple[str, CandidateReport]:
    made, error = _asked(config, shape, replace(deployment, backend=runner))
    if made is not None:
        return runner, replace(_report(made), flag=runner)
    assert error is not None
    reason = Reason("G4", error.text, error.hint)
    row = CandidateReport(runner.upper(), None, None, "the engine does not get that far", False, (reason,), flag=runner)
    return runner, row


def _report(made: SglangChoice) -> CandidateReport:
    layout = made.layout if made.layout in LAYOUTS else None
    none = None if layout else f"layout {made.layout} is not in this version of moeq"
    return CandidateReport((made.runner or "flashinfer_trtllm").upper(), made.method, layout, none, True)


def _once(rows: tuple[tuple[str, CandidateReport], ...]) -> tuple[CandidateReport, ...]:
    """Keep one row per backend, the automatic choice first."""
    found: dict[str, CandidateReport] = {}
    for _, row in rows:
        if row.backend not in found or (row.supported and not found[row.backend].supported):
            found[row.backend] = row
    found.pop("AUTO", None)
    return tuple(found.values())


def _sizes(shape: MoeShape, deployment: Deployment) -> Sizes:
    ranks = 1 if deployment.ep > 1 else deployment.tp
    inner = shape.intermediate_size // ranks
    local = -(-shape.num_experts // deployment.ep)
    return Sizes(shape.hidden_size, inner, shape.hidden_size, inner, local)


def _runs_as(config: Mapping[str, Any], made: SglangChoice) -> str:
    groups = (config.get("config_groups") or {}).values()
    bits = next((group["weights"]["num_bits"] for group in groups), None) or config.get("bits", config.get("w_bit"))
    return f"W{bits}A{8 if made.name == 'w8a8_int8' else 16}"
