"""Verdicts on vLLM: the report of an outcome, with counterfactuals, advisories and the layout that `convert` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.vllm.advisories import advisories_for
from moeq.oracle.engines.vllm.case import Case
from moeq.oracle.engines.vllm.counterfactuals import Admits, nearest_yes, sensitivity
from moeq.oracle.engines.vllm.gates import run_gates
from moeq.oracle.engines.vllm.outcome import Outcome, derive_dp, resolve, runs_as
from moeq.oracle.engines.vllm.parameters import with_tensors
from moeq.oracle.engines.vllm.policy import EnginePolicy, load_policy
from moeq.oracle.engines.vllm.select import alternatives, select
from moeq.oracle.engines.vllm.sizes import sizes_for, transient_bytes, transported_hidden
from moeq.oracle.engines.vllm.unlocks import Trial, running, with_unlocks
from moeq.oracle.records import CandidateReport, ConvertTarget, MoeShape, StoredTensor, Verdict
from moeq.oracle.versions import choose_engine

_MARLIN = ("MARLIN", "BATCHED_MARLIN")
#: Kinds of errors about a requested backend, whose hint names the backends that work.
_OVERRIDES = ("OVERRIDE_UNKNOWN", "OVERRIDE_UNSUPPORTED")


def judge_vllm(
    config: Mapping[str, Any],
    shape: MoeShape,
    deployment: Deployment,
    title: str,
    *,
    prefix: str,
    explain: bool,
    admits: Admits,
    tensors: Sequence[StoredTensor],
) -> Verdict:
    """Judge a checked `quantization_config` by the tables of one version of vLLM (see `moeq.oracle.judge.judge`)."""
    choice = choose_engine(deployment.engine)
    policy = load_policy(choice.policy)
    notes = list(choice.notes)
    deployment = derive_dp(deployment, notes)
    decided = resolve(policy, config, shape, deployment, prefix=prefix)
    if choice.other is not None:
        other = resolve(load_policy(choice.other), config, shape, deployment, prefix=prefix)
        notes.append(_version_note(decided, other))
    outcome = with_tensors(decided, tensors) if tensors else decided
    verdict = verdict_of(outcome, title, tuple(notes))
    if not explain:
        return verdict
    again = _Trials(policy, config, shape, prefix, tensors)
    mattered = sensitivity(decided, lambda other: again(config, shape, other))
    trial = Trial(outcome, again, admits)
    works = None if verdict.ok else nearest_yes(outcome, again, admits)
    error = verdict.error
    if error is not None and error.kind in _OVERRIDES:
        error = replace(error, hint=alternatives(outcome.case, running(trial)))
    return replace(
        verdict, error=error, mattered=mattered, candidates=with_unlocks(trial), works=works.text if works else None
    )


class _Trials:
    """Decisions on changed questions; each decision is made once and kept."""

    def __init__(
        self, policy: EnginePolicy, config: Mapping[str, Any], shape: MoeShape, prefix: str,
        tensors: Sequence[StoredTensor],
    ) -> None:  # fmt: skip
        self._policy, self._config, self._shape, self._prefix = policy, config, shape, prefix
        self._tensors = tensors
        # Keys hold the id of a config. The config is kept beside its answer, so that no other object gets this id.
        self._known: dict[tuple[int, MoeShape, Deployment], tuple[Mapping[str, Any], Outcome]] = {}

    def __call__(self, config: Mapping[str, Any], shape: MoeShape, deployment: Deployment) -> Outcome:
        """Decide a changed question; the file's tensors are checked only if the checkpoint is unchanged."""
        key = (id(config), shape, deployment)
        if key not in self._known:
            outcome = resolve(self._policy, config, shape, deployment, prefix=self._prefix, brief=True)
            if self._tensors and config is self._config and shape == self._shape and outcome.runs is not None:
                outcome = with_tensors(outcome, self._tensors)
            self._known[key] = (config, outcome)
        return self._known[key][1]


def _version_note(outcome: Outcome, other: Outcome) -> str:
    """Return a note that compares a decision with the other known version's (see `EngineChoice.other`)."""
    name = other.case.policy.name
    if outcome.runs == other.runs:
        return f"{name} decides the same"
    return f"{name} decides otherwise: {other.runs or 'it refuses'}"


def verdict_of(outcome: Outcome, title: str, notes: tuple[str, ...] = ()) -> Verdict:
    """Build the report of an outcome, without counterfactuals."""
    case, chosen = outcome.case, outcome.selection.selected
    sizes = sizes_for(case, chosen) if chosen else None
    target, against = convert_target(outcome)
    return Verdict(
        engine=case.policy.name,
        scheme=title,
        deployment=case.deployment,
        shape=case.shape,
        asked=case.deployment.backend,
        method=case.method.name or None,
        family=None if outcome.refused else case.method.family,
        weight_key=None if outcome.refused else case.method.weight_key,
        activation_key=case.method.activation_key,
        selected=chosen,
        error=outcome.selection.error if chosen is None else None,
        gates=outcome.gates,
        candidates=outcome.selection.candidates,
        convert=target,
        no_convert=against,
        runs_as=runs_as(case, chosen) if chosen else None,
        sizes=sizes,
        transient_bytes=transient_bytes(case, chosen, sizes) if chosen and sizes else None,
        advisories=advisories_for(outcome),
        notes=(*notes, *case.method.notes, *outcome.selection.notes, *_transport_notes(case)),
        reported_backend=outcome.selection.reported,
    )


def _transport_notes(case: Case) -> tuple[str, ...]:
    """Describe the effect of the all-to-all kind on sizes and activations of the experts."""
    found = [f"activations reach the experts in the {case.format} format ({case.all2all})"] if case.uses_all2all else []
    rounded = transported_hidden(case)
    if rounded != case.shape.hidden_size:
        found.append(f"{case.all2all} rounds the hidden size {case.shape.hidden_size} up to {rounded}")
    return tuple(found)


# ------------------------------------------------------------------------------------------------ what convert writes


def convert_target(outcome: Outcome) -> tuple[ConvertTarget | None, str | None]:
    """Return the backend that convert writes for, with its layout; or the reason why it writes nothing.

    A backend is possible if its bytes can be made offline, it passes every gate, and its kernel drops nothing that the
    checkpoint has: moeq never writes bytes that silently give wrong outputs. The engine's choice comes
    first. The next possible backend replaces it unless it was requested or is native (`CandidateReport.native`).
    """
    case, selected = outcome.case, outcome.selection.selected
    forced = case.deployment.backend != "auto"
    rows = [selected] if selected is not None else []
    if not forced and not (selected is not None and selected.native):
        rows += [row for row in outcome.selection.candidates if row.supported and row != selected]
    reasons: list[str] = []
    for row in rows:
        reason = _unwritable(outcome, row)
        if reason is None:
            return _target(case, row, selected, reasons[0] if reasons else None), None
        reasons.append(f"{row.backend}: {reason}")
    return None, "; ".join(reasons) or None


def _unwritable(outcome: Outcome, row: CandidateReport) -> str | None:
    """Return the reason why convert does not write for a backend, or None."""
    case = outcome.case
    if row.layout is None:
        return row.no_layout
    if row is not outcome.selection.selected and not _reached_by_name(case, row):
        return "the engine cannot be asked for it by name"
    if case.method.marlin_assertion and row.backend not in _MARLIN:
        return "the engine stops at per-channel scales and act-order"
    dropped = dropped_by(case, row)
    if dropped:
        return f"its kernel drops {dropped}"
    return next((gate.text for gate in run_gates(outcome.stage(row)) if not gate.passed), None)


def _reached_by_name(case: Case, row: CandidateReport) -> bool:
    """Tell whether requesting the backend by its name selects it."""
    if row.flag is None:
        return False
    forced = select(replace(case, deployment=replace(case.deployment, backend=row.flag), brief=True)).selected
    return forced is not None and forced.backend == row.backend


def dropped_by(case: Case, row: CandidateReport) -> str | None:
    """Return the parts of the checkpoint that the kernel silently drops, in words; None if it drops none."""
    flags = case.policy.class_of(row)
    if flags is None:
        return None
    losses = (
        (case.method.config == "awq" and row.backend in ("XPU", "ZEN_CPU"), "the AWQ word order"),
        (flags.drops_zero_points and case.method.raw_zero_points, "zero points"),
        (flags.drops_bias and case.shape.has_bias, "expert biases"),
        (flags.ignores_lora and case.deployment.lora, "LoRA adapters"),
        (flags.drops_scaling and case.shape.routed_scaling_factor != 1.0, "the routed scaling factor"),
        (flags.drops_scaling and case.shape.swiglu_limit is not None, "the activation limit"),
    )
    return ", ".join(what for lost, what in losses if lost) or None


def _target(case: Case, row: CandidateReport, selected: CandidateReport | None, against: str | None) -> ConvertTarget:
    assert row.layout is not None  # `_unwritable` has checked it
    flag, why = None, None
    if row is not selected:
        flag = f"{case.policy.backend_flag} {row.flag}"
        why = f"{against or 'the engine alone does not start'}; start the engine with {flag}"
    return ConvertTarget(row.backend, row.experts, row.layout, flag, sizes_for(case, row), why)
