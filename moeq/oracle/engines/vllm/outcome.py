"""One question to vLLM, answered: the config read as its entry point reads it, the selection, and every gate."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.floats import check_activation_request
from moeq.oracle.engines.vllm.configs.online import read_online
from moeq.oracle.engines.vllm.configs.question import (
    PREFIX,
    ConfigQuestion,
    ConfigRefusal,
    built_in_kernel,
    check_layer,
    check_selected,
    moved_experts,
)
from moeq.oracle.engines.vllm.entry_points import OUTSIDE, READERS, declared_kind, entry_of
from moeq.oracle.engines.vllm.gates import Stage, run_gates
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.engines.vllm.select import Selection, candidate_reports, select
from moeq.oracle.records import CandidateReport, EngineError, Gate, MoeShape, Reason

#: Entry point -> family whose backends are listed if the engine refuses the config.
_FAMILY_OF_ENTRY = {
    "gptq": "wna16",
    "awq": "wna16",
    "moe_wna16": "wna16",
    "inc": "wna16",
    "gpt_oss_mxfp4": "mxfp4",
    "mxfp4": "mxfp4-generic",
    "experts_int8": "int8",
    "fp8": "fp8",
    "deepseek_v4_fp8": "mxfp4-generic",
}
#: Placeholder until the config is read.
_OPEN = Method("", "wna16", "none", "none")


@dataclass(frozen=True)
class Outcome:
    """Answer to one question: the selection and the results of all gates."""

    case: Case  #: the question; its method is a placeholder if the config was refused
    entry: str  #: entry point that read the config
    selection: Selection
    gates: tuple[Gate, ...]
    refused: bool = False  #: whether the config was refused before selection
    #: Quantisation config, for advisories about per-module rules.
    config: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = PREFIX  #: module path of the experts
    uncalibrated: tuple[int, ...] = ()  #: experts without a static activation scale that the engine's method reads

    def stage(self, row: CandidateReport | None) -> Stage:
        """Return the input of the gates as if the backend of `row` were selected."""
        return Stage(
            self.case, self.entry, row, declared_kind(self.config, self.case.shape, self.case.policy, self.case.device)
        )

    @property
    def runs(self) -> str | None:
        """Backend and class that really run, `BACKEND/Class`, or None; counterfactuals compare it."""
        chosen = self.selection.selected
        return f"{chosen.backend}/{chosen.experts}" if chosen and all(gate.passed for gate in self.gates) else None


def derive_dp(deployment: Deployment, notes: list[str] | None = None) -> Deployment:
    """Return the deployment with `dp` from `ep` and `tp`: expert parallelism takes every rank in this engine.

    A derived `dp` adds a sentence to `notes`.
    """
    inner = deployment.tp * deployment.pcp
    if deployment.ep > 1 and deployment.dp == 1 and deployment.ep % inner == 0:
        dp = deployment.ep // inner
        if dp > 1 and notes is not None:
            notes.append(f"ep {deployment.ep} with tp {deployment.tp} means dp {dp}: ep is tp x dp in this engine")
        return replace(deployment, dp=dp)
    return deployment


def resolve(
    policy: EnginePolicy,
    config: Mapping[str, Any],
    shape: MoeShape,
    deployment: Deployment,
    *,
    prefix: str = PREFIX,
    brief: bool = False,
) -> Outcome:
    """Run config reading, selection and gates for a checkpoint's quantisation config.

    Args:
        prefix: module path of the layer's experts, which per-module rules are matched against.
        brief: whether only yes or no matters (see `Case`).
    """
    entry, probe = _probe(policy, config, shape, deployment, brief=brief)
    try:
        check_layer(probe)
        method = _read(entry, ConfigQuestion(config, probe, prefix))
    except ConfigRefusal as refusal:
        outcome = _refused(probe, entry, refusal, config)
    else:
        outcome = resolve_method(replace(probe, method=method), entry, config)
    return replace(outcome, prefix=prefix)


def method_of(
    policy: EnginePolicy, config: Mapping[str, Any], shape: MoeShape, deployment: Deployment, prefix: str,
    fused: str | None = None,
) -> Method | str:  # fmt: skip
    """Return the method that a config gives one layer's experts, or another module (see `ConfigQuestion`).

    The result is the text of the refusal where the engine refuses the config.
    """
    entry, probe = _probe(policy, config, shape, deployment)
    try:
        return _read(entry, ConfigQuestion(config, probe, prefix, fused))
    except ConfigRefusal as refusal:
        return refusal.text


def _probe(
    policy: EnginePolicy, config: Mapping[str, Any], shape: MoeShape, deployment: Deployment, *, brief: bool = False
) -> tuple[str, Case]:
    """Return the entry point that reads a config, and the case with a placeholder for its method."""
    entry = entry_of(policy, policy.device(deployment.gpu) or "", config, shape, deployment.quantization)
    return entry, Case(policy, deployment, shape, replace(_OPEN, family=_FAMILY_OF_ENTRY.get(entry, "wna16")), brief)


def resolve_method(case: Case, entry: str, config: Mapping[str, Any] | None = None) -> Outcome:
    """Run selection and gates for a method that is already known."""
    selection = select(case)
    if selection.selected is not None:
        try:
            check_selected(case, selection.selected.backend)
        except ConfigRefusal as refusal:
            error = EngineError(refusal.error, refusal.kind, refusal.text, refusal.hint, refusal.code)
            selection = replace(selection, selected=None, error=error)
    return _gated(Outcome(case, entry, selection, (), config={} if config is None else config))


def _gated(outcome: Outcome) -> Outcome:
    return replace(outcome, gates=run_gates(outcome.stage(outcome.selection.selected)))


def _read(entry: str, question: ConfigQuestion) -> Method:
    reader = READERS.get(entry) if question.config or not entry else read_online
    if reader is None:
        what = (
            "runs without a selection function"
            if entry in OUTSIDE
            else "is not a quantisation method this oracle knows"
        )
        raise ConfigRefusal(
            "ValueError", "CONFIG", f"quant_method '{entry}' {what}", f"known: {', '.join(filter(None, READERS))}", "G0"
        )
    method = built_in_kernel(question.probe, reader(moved_experts(question)))
    check_activation_request(method, question.config)
    return method


def _refused(probe: Case, entry: str, refusal: ConfigRefusal, config: Mapping[str, Any]) -> Outcome:
    reason = Reason(refusal.code or "G0", refusal.text, refusal.hint)
    family = probe.policy.families[probe.method.family]
    listed = [
        replace(row, supported=False, reasons=(reason,), layout=None, no_layout="the engine refuses the config")
        for row in candidate_reports(probe, family)
    ]
    error = EngineError(refusal.error, refusal.kind, refusal.text, refusal.hint, refusal.code)
    selection = Selection(None, error, tuple(listed))
    return _gated(Outcome(probe, entry, selection, (), True, config))


# ------------------------------------------------------------------------------------------------ precision

_ACTIVATION_BITS = {"kMxfp8": 8, "kFp8": 8, "kInt8": 8, "kMxfp4": 4, "kNvfp4": 4, "kMxfp6": 6}
#: Words in names of classes that run 16-bit activations under every activation key.
_WEIGHT_ONLY = ("Marlin", "Int4Emulation", "Mxfp8Emulation")
#: Emulations that round activations to values of 4 bits, whatever activation key they are asked with.
_ROUNDED_TO_4_BITS = ("Nvfp4QuantizationEmulationTritonExperts", "OCP_MXQuantizationEmulationTritonExperts")
#: Families that pass the activation type to Humming; in other families Humming runs 16-bit activations under any key.
_HUMMING_QUANTISES = ("mxfp4", "mxfp4-generic", "w4a8-fp8")
#: Classes whose call of `fused_experts_cpu` names another activation precision than their keys.
_CPU_ACTIVATION_BITS = {"CPUExpertsInt4": 8, "CPUExpertsFp8": 16}  # INT4_W4A8, FP8_W8A16
#: FlashInfer's megakernels, which quantise activations themselves.
_MEGAKERNEL_BITS = {"FLASHINFER_MOE_EP_CUTEDSL": 4, "FLASHINFER_MOE_EP_DEEP_GEMM": 8}


def runs_as(case: Case, chosen: CandidateReport) -> str:
    """Return the precision that really runs, such as `W4A16`; several kernels ignore the requested activation type."""
    experts = chosen.experts or ""
    bits = _key_bits(chosen.activation_key or "none")
    if any(word in experts for word in _WEIGHT_ONLY) or case.method.config == "experts_int8":
        bits = 16
    if "Marlin" in experts and case.env("VLLM_MARLIN_INPUT_DTYPE") in ("int8", "fp8"):
        bits = 8
    if experts in _ROUNDED_TO_4_BITS:  # only Quark's methods pass the checkpoint's activation type on
        bits = declared_activation_bits(case) if case.method.config == "quark" else 4
    if chosen.backend == "HUMMING" and case.method.family not in _HUMMING_QUANTISES:
        bits = _humming_bits(case.env("VLLM_HUMMING_INPUT_QUANT_CONFIG"), case.method.activation_bits or 16)
    bits = _MEGAKERNEL_BITS.get(chosen.backend, _CPU_ACTIVATION_BITS.get(experts, bits))
    return f"W{case.method.bits or _key_bits(case.method.weight_key)}A{bits}"


def _humming_bits(variable: str | None, usual: int) -> int:
    """Return the activation bits of Humming: the usual ones unless the variable holds a JSON object with a `dtype`."""
    try:
        asked = json.loads(variable or "{}")
    except ValueError:  # a file of the serving machine: its content is unknown here
        return usual
    digits = re.search(r"\d+", str(asked.get("dtype", ""))) if isinstance(asked, dict) else None
    return int(digits[0]) if digits else usual


def declared_activation_bits(case: Case) -> int:
    """Return the bits of activations that the checkpoint declares."""
    return _key_bits(case.method.activation_key or "none")


def _key_bits(key: str) -> int:
    return next((bits for prefix, bits in _ACTIVATION_BITS.items() if key.startswith(prefix)), 16)
