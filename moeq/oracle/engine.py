"""One engine's verdict: config, method, selection, gates, and what convert can write."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.oracle.advisories import advisories_for
from moeq.oracle.case import Case, Method
from moeq.oracle.declare import OUTSIDE, READERS, declared_method, entry_of
from moeq.oracle.gates import Stage, run_gates
from moeq.oracle.methods import PREFIX, ConfigRefusal, Question, check_activation_request
from moeq.oracle.policy import EnginePolicy, ExpertsClass
from moeq.oracle.records import CandidateReport, ConvertTarget, EngineError, Gate, MoeShape, Reason, Verdict
from moeq.oracle.select import Selection, activation_of, judge_all, select
from moeq.oracle.sizes import sizes_for, transient_bytes

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
}
_MARLIN = ("MARLIN", "BATCHED_MARLIN")
_OPEN = Method("", "wna16", "none", "none")


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
        return Stage(self.case, self.entry, row, declared_method(self.config, self.case.shape))

    @property
    def runs(self) -> str | None:
        """Backend and class that really run, or None: the fact that counterfactuals compare."""
        chosen = self.selection.selected
        return f"{chosen.backend}/{chosen.experts}" if chosen and all(gate.passed for gate in self.gates) else None


def settle(deployment: Deployment, notes: list[str] | None = None) -> Deployment:
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
    entry = entry_of(config, shape, deployment.quantization)
    probe = Case(policy, deployment, shape, replace(_OPEN, family=_FAMILY_OF_ENTRY.get(entry, "wna16")), brief)
    try:
        method = _read(entry, Question(config, probe, prefix))
    except ConfigRefusal as refusal:
        outcome = _refused(probe, entry, refusal, config)
    else:
        outcome = resolve_method(replace(probe, method=method), entry, config)
    return replace(outcome, prefix=prefix)


def resolve_method(case: Case, entry: str, config: Mapping[str, Any] | None = None) -> Outcome:
    """Selection and gates for a method that is already known."""
    selection = select(case)
    chosen = selection.selected
    if chosen is not None and case.method.channel_assertion and chosen.backend not in _MARLIN:
        text = f"per-channel scales: {chosen.backend} is selected and a check that only Marlin passes stops the engine"
        error = EngineError("AssertionError", "BARE_ASSERTION", text, "--moe-backend marlin where it is supported")
        selection = replace(selection, selected=None, error=error)
    return _gated(Outcome(case, entry, selection, (), config=config or {}))


def _gated(outcome: Outcome) -> Outcome:
    return replace(outcome, gates=run_gates(outcome.stage(outcome.selection.selected)))


def _read(entry: str, question: Question) -> Method:
    reader = READERS.get(entry)
    if reader is None:
        what = (
            "runs without a selection function"
            if entry in OUTSIDE
            else "is not a quantisation method this oracle knows"
        )
        raise ConfigRefusal(
            "ValueError", "CONFIG", f"quant_method '{entry}' {what}", f"known: {', '.join(filter(None, READERS))}", "G0"
        )
    method = reader(question)
    check_activation_request(method, question.config)
    return method


def _refused(probe: Case, entry: str, refusal: ConfigRefusal, config: Mapping[str, Any]) -> Outcome:
    reason = Reason(refusal.code or "G0", refusal.text, refusal.hint)
    family = probe.policy.families[probe.method.family]
    listed = [
        replace(row, supported=False, reasons=(reason,), layout=None, no_layout="the engine refuses the config")
        for row in judge_all(probe, family)
    ]
    error = EngineError(refusal.error, refusal.kind, refusal.text, refusal.hint, refusal.code)
    selection = Selection(None, error, tuple(listed))
    return _gated(Outcome(probe, entry, selection, (), True, config))


# ------------------------------------------------------------------------------------------------ convert


def convert_target(outcome: Outcome) -> tuple[ConvertTarget | None, str | None]:
    """What convert writes, or why nothing: the engine's choice, else the next supported backend that allows it.

    A backend allows it where its bytes can be made offline, the engine gets it through every gate, and its kernel
    drops nothing that the checkpoint has: moeq does not write what would silently give wrong outputs.
    """
    case, selected = outcome.case, outcome.selection.selected
    forced = case.deployment.backend != "auto"
    rows = [selected] if selected is not None else []
    if not forced:
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
    flags = case.policy.classes[name]
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
    classes = candidate_classes(case)
    for package in sorted({name for row in classes for name in row.packages}):
        present = case.package(package)
        if again(with_package(case.deployment, package, not present)).runs != outcome.runs:
            found.append((package, "present" if present else "absent"))
    # What is set counts if unsetting it changes the outcome; what is unset, if some class asks for it.
    others: dict[str, str | None] = {name: value for row in classes for name, value in row.env}
    others.update({name: None for name, _ in case.deployment.env})
    for name, value in sorted(others.items()):
        if again(with_env(case.deployment, name, value)).runs != outcome.runs:
            found.append((name, case.env(name) or "unset"))
    return tuple(found)


def candidate_classes(case: Case) -> list[ExpertsClass]:
    """Classes of the family that the device itself does not rule out: no switch can help the others."""
    rows = case.policy.families[case.method.family].backends.values()
    names = {name for row in rows for name in (*row.classes, *row.forced_classes)}
    classes = [case.policy.classes[name] for name in sorted(names)]
    return [row for row in classes if any(term.admits(case.gpu) for term in row.devices)]


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
        error=outcome.selection.error,
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
    if case.all2all in case.policy.gates["rounds_hidden"]:
        found.append(f"{case.all2all} may round the hidden size {case.shape.hidden_size} up before weights are created")
    return tuple(found)


_ACTIVATION_BITS = {"kMxfp8": 8, "kFp8": 8, "kInt8": 8, "kMxfp4": 4, "kNvfp4": 4, "kMxfp6": 6}
#: Classes that run weight-only whatever the activation key says.
_WEIGHT_ONLY = ("Marlin", "Emulation")


def runs_as(case: Case, chosen: CandidateReport) -> str:
    """Precision that really runs, such as `W4A16`: several kernels ignore the activation type they were asked for."""
    family = case.policy.families[case.method.family]
    key = activation_of(case, family, family.backends[chosen.backend])
    bits = next((bits for prefix, bits in _ACTIVATION_BITS.items() if key.startswith(prefix)), 16)
    if any(word in chosen.experts for word in _WEIGHT_ONLY) or case.method.config == "experts_int8":
        bits = 16
    return f"W{case.method.bits or _key_bits(case.method.weight_key)}A{bits}"


def declared_activation_bits(case: Case) -> int:
    """Bits of activations as the checkpoint declares them."""
    key = case.method.activation_key or "none"
    return next((bits for prefix, bits in _ACTIVATION_BITS.items() if key.startswith(prefix)), 16)


def _key_bits(key: str) -> int:
    return next((bits for prefix, bits in _ACTIVATION_BITS.items() if key.startswith(prefix)), 16)
