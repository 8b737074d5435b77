"""The result of one question to an engine: the config as it was read, the selection and every gate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from moeq.oracle.engines.vllm.case import Case
from moeq.oracle.engines.vllm.configs.question import PREFIX
from moeq.oracle.engines.vllm.entry_points import declared_kind
from moeq.oracle.engines.vllm.gates import Stage
from moeq.oracle.engines.vllm.select import Selection
from moeq.oracle.records import CandidateReport, Gate

_ACTIVATION_BITS = {"kMxfp8": 8, "kFp8": 8, "kInt8": 8, "kMxfp4": 4, "kNvfp4": 4, "kMxfp6": 6}
#: Classes that run weight-only whatever the activation key says.
_WEIGHT_ONLY = ("Marlin", "Emulation")
#: Classes whose call of `fused_experts_cpu` names another precision of activations than their keys do.
_CPU_ACTIVATION_BITS = {"CPUExpertsInt4": 8, "CPUExpertsFp8": 16}  # INT4_W4A8, FP8_W8A16


@dataclass(frozen=True)
class Outcome:
    """Everything about one deployment up to kernel creation.

    Attributes:
        case: the question; its method is a stand-in where the config was refused.
        entry: entry point.
        selection: what selection gives.
        gates: all gates.
        refused: the config was refused before selection.
        config: the quantisation config, for conditions that look at per-module rules.
        prefix: module path of the experts.
    """

    case: Case
    entry: str
    selection: Selection
    gates: tuple[Gate, ...]
    refused: bool = False
    config: Mapping[str, Any] = field(default_factory=dict)
    prefix: str = PREFIX

    def stage(self, row: CandidateReport | None) -> Stage:
        """What the gates look at if that backend were the selected one."""
        return Stage(
            self.case, self.entry, row, declared_kind(self.config, self.case.shape, self.case.policy, self.case.device)
        )

    @property
    def runs(self) -> str | None:
        """Backend and class that really run, or None: the fact that counterfactuals compare."""
        chosen = self.selection.selected
        return f"{chosen.backend}/{chosen.experts}" if chosen and all(gate.passed for gate in self.gates) else None


def runs_as(case: Case, chosen: CandidateReport) -> str:
    """Precision that really runs, such as `W4A16`: several kernels ignore the activation type they were asked for."""
    key = chosen.activation_key or "none"
    bits = next((bits for prefix, bits in _ACTIVATION_BITS.items() if key.startswith(prefix)), 16)
    if any(word in (chosen.experts or "") for word in _WEIGHT_ONLY) or case.method.config == "experts_int8":
        bits = 16
    bits = _CPU_ACTIVATION_BITS.get(chosen.experts or "", bits)
    return f"W{case.method.bits or _key_bits(case.method.weight_key)}A{bits}"


def declared_activation_bits(case: Case) -> int:
    """Bits of activations as the checkpoint declares them."""
    key = case.method.activation_key or "none"
    return next((bits for prefix, bits in _ACTIVATION_BITS.items() if key.startswith(prefix)), 16)


def _key_bits(key: str) -> int:
    return next((bits for prefix, bits in _ACTIVATION_BITS.items() if key.startswith(prefix)), 16)
