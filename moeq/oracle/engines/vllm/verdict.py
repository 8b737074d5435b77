"""One engine's verdict: config, method, selection, gates, and what convert can write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.oracle.engines.vllm.advisories import advisories_for
from moeq.oracle.engines.vllm.case import Case, Method
from moeq.oracle.engines.vllm.configs.floats import check_activation_request
from moeq.oracle.engines.vllm.configs.question import (
    PREFIX,
    ConfigRefusal,
    Question,
    built_in_kernel,
    check_layer,
    check_selected,
)
from moeq.oracle.engines.vllm.entry_points import OUTSIDE, READERS, entry_of
from moeq.oracle.engines.vllm.experts_classes import Variant
from moeq.oracle.engines.vllm.gates import run_gates
from moeq.oracle.engines.vllm.outcome import Outcome, runs_as
from moeq.oracle.engines.vllm.policy import EnginePolicy
from moeq.oracle.engines.vllm.select import Selection, candidate_reports, select
from moeq.oracle.engines.vllm.sizes import sizes_for, transient_bytes, transported_hidden
from moeq.oracle.records import CandidateReport, ConvertTarget, EngineError, MoeShape, Reason, Verdict

#: Family whose backends are listed where the engine refuses a config before choosing any.
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
_MARLIN = ("MARLIN", "BATCHED_MARLIN")
_OPEN = Method("", "wna16", "none", "none")


def derive_dp(deployment: Deployment, notes: list[str] | None = None) -> Deployment:
    """Fill in what the engine derives: expert parallelism takes every rank, so `dp` follows from `ep` and `tp`."""
    if deployment.ep > 1 and deployment.dp == 1 and deployment.ep % deployment.tp == 0:
        dp = deployment.ep // deployment.tp
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
        policy: the engine.
        config: the checkpoint's `quantization_config`.
        shape: the layer.
        deployment: where it is to run.
        prefix: module path of the layer's experts, which per-module rules are matched against.
        brief: only yes or no matters (see `Case`).
    """
    device = policy.device(deployment.gpu) or ""
    entry = entry_of(policy, device, config, shape, deployment.quantization)
    probe = Case(policy, deployment, shape, replace(_OPEN, family=_FAMILY_OF_ENTRY.get(entry, "wna16")), brief)
    try:
        check_layer(probe)
        method = _read(entry, Question(config, probe, prefix))
    except ConfigRefusal as refusal:
        outcome = _refused(probe, entry, refusal, config)
    else:
        outcome = resolve_method(replace(probe, method=method), entry, config)
    return replace(outcome, prefix=prefix)


def resolve_method(case: Case, entry: str, config: Mapping[str, Any] | None = None) -> Outcome:
    """Selection and gates for a method that is already known."""
    selection = select(case)
    if selection.selected is not None:
        try:
            check_selected(case, selection.selected.backend)
        except ConfigRefusal as refusal:
            error = EngineError(refusal.error, refusal.kind, refusal.text, refusal.hint, refusal.code)
            selection = replace(selection, selected=None, error=error)
    return _gated(Outcome(case, entry, selection, (), config=config or {}))


def _gated(outcome: Outcome) -> Outcome:
    return replace(outcome, gates=run_gates(outcome.stage(outcome.selection.selected)))


def _read(entry: str, question: Question) -> Method:
    reader = READERS["online" if entry and not question.config else entry] if entry in READERS else None
    if reader is None:
        what = (
            "runs without a selection function"
            if entry in OUTSIDE
            else "is not a quantisation method this oracle knows"
        )
        raise ConfigRefusal(
            "ValueError", "CONFIG", f"quant_method '{entry}' {what}", f"known: {', '.join(filter(None, READERS))}", "G0"
        )
    method = built_in_kernel(question.probe, reader(question))
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


# ------------------------------------------------------------------------------------------------ convert


def convert_target(outcome: Outcome) -> tuple[ConvertTarget | None, str | None]:
    """What convert writes, or why nothing: the engine's choice, else the next supported backend that allows it.

    A backend allows it where its bytes can be made offline, the engine gets it through every gate, and its kernel
    drops nothing that the checkpoint has: moeq does not write what would silently give wrong outputs. No other backend
    is taken in place of a native one (`CandidateReport.native`).
    """
    case, selected = outcome.case, outcome.selection.selected
    forced = case.deployment.backend != "auto"
    rows = [selected] if selected is not None else []
    if not forced and not (selected is not None and selected.native):
        rows += [row for row in outcome.selection.candidates if row.supported and row != selected]
    against: list[str] = []
    for row in rows:
        reason = _unwritable(outcome, row)
        if reason is None:
            return _target(case, row, selected, against[0] if against else None), None
        against.append(f"{row.backend}: {reason}")
    return None, "; ".join(against) or None


def _unwritable(outcome: Outcome, row: CandidateReport) -> str | None:
    """Why convert does not write for a backend, or None where it does."""
    case = outcome.case
    if row.layout is None:
        return row.no_layout
    if row is not outcome.selection.selected and not _reached_by_name(case, row):
        return "the engine cannot be asked for it by name"
    if case.method.channel_assertion and row.backend not in _MARLIN:
        return "the engine stops at per-channel scales"
    dropped = dropped_by(case, row)
    if dropped:
        return f"its kernel drops {dropped}"
    return next((gate.text for gate in run_gates(outcome.stage(row)) if not gate.passed), None)


def _reached_by_name(case: Case, row: CandidateReport) -> bool:
    """Whether asking the engine for the backend's name really selects it."""
    if row.flag is None:
        return False
    forced = select(replace(case, deployment=replace(case.deployment, backend=row.flag), brief=True)).selected
    return forced is not None and forced.backend == row.backend


def dropped_by(case: Case, row: CandidateReport) -> str | None:
    """What the checkpoint has and the kernel silently leaves out, or None."""
    name = f"W4A8:{row.experts}" if row.backend == "CPU_INT4" else row.experts
    flags = case.policy.classes.get(name or "")
    if flags is None:  # no class: the engine's method runs a kernel of its own
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
    assert row.layout is not None  # the caller looked
    flag, why = None, None
    if row is not selected:
        flag = f"{case.policy.backend_flag} {row.flag}"
        why = f"{against or 'the engine alone does not start'}; start the engine with {flag}"
    return ConvertTarget(row.backend, row.experts, row.layout, flag, sizes_for(case, row), why)


# ------------------------------------------------------------------------------------------------ what mattered


def sensitivity(outcome: Outcome, again: Callable[[Deployment], Outcome]) -> tuple[tuple[str, str], ...]:
    """Environment variables and packages whose other value would change what runs, with their present values."""
    case = outcome.case
    found: list[tuple[str, str]] = []
    rows = candidate_variants(case)
    for package in sorted({name for row in rows for name in row.packages}):
        present = case.package(package)
        if again(with_package(case.deployment, package, not present)).runs != outcome.runs:
            found.append((package, "present" if present else "absent"))
    # What is set counts if unsetting it changes the outcome; what is unset, if some class asks for it.
    others: dict[str, str | None] = {name: allowed[0] for row in rows for name, allowed in row.env}
    others.update({name: None for name, _ in case.deployment.env})
    for name, value in sorted(others.items()):
        if again(with_env(case.deployment, name, value)).runs != outcome.runs:
            found.append((name, case.env(name) or "unset"))
    return tuple(found)


def candidate_variants(case: Case) -> list[Variant]:
    """What the family's classes accept on this device: no switch can help the others."""
    backends = case.policy.families[case.method.family].backends.values()
    names = sorted({name for row in backends for name in row.classes})
    return [item for name in names for item in case.policy.classes[name].variants.get(case.device, ())]


def with_package(deployment: Deployment, name: str, present: bool) -> Deployment:
    """The same deployment with a package there or not."""
    return replace(deployment, packages=tuple(sorted({**dict(deployment.packages), name: present}.items())))


def with_env(deployment: Deployment, name: str, value: str | None) -> Deployment:
    """The same deployment with an environment variable set, or unset where the value is None."""
    env = {key: old for key, old in deployment.env if key != name}
    return replace(deployment, env=tuple(sorted({**env, name: value}.items() if value is not None else env.items())))


# ------------------------------------------------------------------------------------------------ verdict


def verdict_of(outcome: Outcome, title: str, notes: tuple[str, ...] = ()) -> Verdict:
    """The report of an outcome, without counterfactuals."""
    case, chosen = outcome.case, outcome.selection.selected
    sizes = sizes_for(case, chosen) if chosen else None
    target, against = (None, None) if outcome.refused else convert_target(outcome)
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
    """What the all-to-all does to the experts' sizes and activations."""
    found = [f"activations reach the experts in the {case.format} format ({case.all2all})"] if case.uses_all2all else []
    rounded = transported_hidden(case)
    if rounded != case.shape.hidden_size:
        found.append(f"{case.all2all} rounds the hidden size {case.shape.hidden_size} up to {rounded}")
    return tuple(found)
