"""Backend selection: the engine's order, its override map, and every candidate judged by every rule."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from moeq.layouts.registry import LAYOUTS
from moeq.oracle.case import Case
from moeq.oracle.policy import Backend, Family, device_term
from moeq.oracle.records import CandidateReport, EngineError, Reason
from moeq.oracle.rules import RULES, class_reasons, filter_reasons

_ORDER = {rule.code: index for index, rule in enumerate(RULES)}


@dataclass(frozen=True)
class Selection:
    """What the engine's selection function gives: one backend or an error, and the whole field behind it."""

    selected: CandidateReport | None
    error: EngineError | None
    candidates: tuple[CandidateReport, ...]
    notes: tuple[str, ...] = ()
    reported: str | None = None


def select(case: Case) -> Selection:
    """Run the engine's selection for a case. Never raises for a deployment: a refusal is part of the answer."""
    family = case.policy.families[case.method.family]
    asked = case.deployment.backend if _honours(case, family) else "auto"
    candidates = judge_all(case, family)
    if asked != "auto":
        selection = _forced(case, family, asked, candidates)
    elif case.deployment.lora and family.option("lora_first"):
        selection = _lora_shortcut(case, family, candidates)
    elif family.option("hard_wired"):
        selection = _hard_wired(case, family, candidates)
    else:
        selection = _automatic(case, family, candidates)
    return replace(selection, candidates=_as_selected(candidates, selection.selected))


def _as_selected(
    candidates: tuple[CandidateReport, ...], chosen: CandidateReport | None
) -> tuple[CandidateReport, ...]:
    """A forced backend may run another class than automatic selection would: show the one that runs."""
    if chosen is None:
        return candidates
    return tuple(chosen if row.backend == chosen.backend and not row.supported else row for row in candidates)


def _honours(case: Case, family: Family) -> bool:
    honoured = family.option("honoured_overrides")
    ignored = family.option("ignored_overrides", ())
    asked = case.deployment.backend
    return asked not in ignored and (honoured is None or asked in honoured)


# ------------------------------------------------------------------------------------------------ order


def backend_order(case: Case, family: Family) -> tuple[str, ...]:
    """Backends in the order the engine tries them on this deployment."""
    rows = list(family.order.get(case.gpu.platform, family.order["default"]))
    for move in family.moves:
        if move["backend"] in rows and _applies(move, case):
            _move(rows, move)
    extra = family.option("routing_extra")
    if extra and (case.gpu.platform, case.shape.routing) == (extra["platform"], extra["routing"]):
        rows.append(extra["backend"])
    for switch in family.option("env_switches", ()):
        _switch(rows, switch, case)
    if not case.method.vllm_cutlass:
        rows = [name for name in rows if name != "VLLM_CUTLASS"]
    return tuple(rows)


def _applies(move: dict[str, Any], case: Case) -> bool:
    return (
        device_term(move["when"]).admits(case.gpu)
        and fnmatchcase(case.method.weight_key, move.get("weights", "*"))
        and move.get("ep", case.use_ep) == case.use_ep
        and move.get("dp", case.deployment.dp > 1) == (case.deployment.dp > 1)
        and move.get("activation", case.shape.activation) == case.shape.activation
        and move.get("all2all", case.all2all) == case.all2all
    )


def _move(rows: list[str], move: dict[str, Any]) -> None:
    name = move["backend"]
    rows.remove(name)
    if "before" in move:
        at = rows.index(move["before"])
    elif "after" in move:
        at = rows.index(move["after"]) + 1
    else:
        at = 0 if move.get("first") else len(rows)
    rows.insert(at, name)


def _switch(rows: list[str], switch: dict[str, Any], case: Case) -> None:
    """An environment variable that forces backends to the front, or removes them."""
    values = [case.env(name) for name in switch["env"] if case.env(name) is not None]
    named = [name for name in switch["backends"] if name in rows]
    if not values or not named:
        return
    for name in named:
        rows.remove(name)
    if all(value != "0" for value in values):
        rows[:0] = named


# ------------------------------------------------------------------------------------------------ judging


def activation_of(case: Case, family: Family, backend: Backend) -> str:
    """Activation key under which a backend's classes are asked."""
    requested = case.method.activation_key or "none"
    if not family.name.startswith("mxfp4"):
        return requested
    return requested if backend.activation_key == "any" else backend.activation_key or "none"


def judge(case: Case, family: Family, backend: Backend, *, forced: bool = False) -> CandidateReport:
    """One backend, with every failed rule of the class that came closest."""
    activation = activation_of(case, family, backend)
    before = filter_reasons(case, backend)
    names = (backend.forced_classes if forced else ()) or backend.classes
    if case.deployment.lora and backend.lora_classes:
        names = backend.lora_classes
    best: tuple[int, int] = (-1, 0)
    experts, reasons = names[0], before
    for name in names:
        found = class_reasons(case, case.policy.classes[name], activation)
        # The class that fails latest is the one the engine would talk about; a class that fits ends the search.
        score = (min((_ORDER[reason.code] for reason in found), default=len(_ORDER)), -len(found))
        if score > best:
            best, experts, reasons = score, name, before + found
        if not found:
            break
    layout = layout_of(case, backend)
    return CandidateReport(
        backend=backend.name,
        experts=experts.rpartition(":")[2],
        layout=layout if layout in LAYOUTS else None,
        no_layout=_no_layout(backend, layout),
        supported=not reasons,
        reasons=reasons,
        flag=backend.flag,
        monolithic=case.policy.classes[experts].monolithic,
    )


def layout_of(case: Case, backend: Backend) -> str | None:
    """Id of the layout this backend's kernel reads in this case, or None: the first choice whose conditions hold."""
    for row in backend.layouts:
        if (
            (row.when is None or row.when.admits(case.gpu))
            and row.activation in (None, case.shape.activation)
            and row.dtype in (None, case.deployment.dtype)
            and (row.env is None or case.env(row.env[0]) == row.env[1])
            and (row.configs is None or case.method.config in row.configs)
            and (row.max_tp is None or case.moe_tp <= row.max_tp)
        ):
            return row.layout
    return backend.layout


def _no_layout(backend: Backend, layout: str | None) -> str | None:
    if layout is None:
        return backend.no_layout or "moeq has no offline layout for it"
    return None if layout in LAYOUTS else f"layout {layout} is not in this version of moeq"


def on_device(case: Case, backend: Backend) -> bool:
    """Whether some class of the backend exists for this device: no change but another device helps the rest."""
    classes = case.policy.classes
    return any(term.admits(case.gpu) for name in backend.classes for term in classes[name].devices)


def judge_all(case: Case, family: Family) -> tuple[CandidateReport, ...]:
    """Every backend of the family, those of the automatic order first."""
    order = backend_order(case, family)
    rest = [name for name in family.backends if name not in order]
    if case.brief:  # backends of other devices cannot be selected; only a full report lists them
        kept = {name for name, row in family.backends.items() if on_device(case, row)} | {family.option("hard_wired")}
        order = tuple(name for name in order if name in kept)
        rest = [name for name in rest if name in kept]
    reports = [judge(case, family, family.backends[name]) for name in order]
    reports += [_never_automatic(case, family, judge(case, family, family.backends[name])) for name in rest]
    if family.option("activation_filter"):
        wanted = _wanted_activation(case, family, reports)
        reports = [_filter_activation(family, report, wanted) for report in reports]
    if family.option("limit_filter") and case.shape.swiglu_limit is not None:
        reports = [_filter_limit(case, report) for report in reports]
    return tuple(reports)


def _never_automatic(case: Case, family: Family, report: CandidateReport) -> CandidateReport:
    """A backend outside the platform's order is never tried by itself, whatever its classes say."""
    honoured = family.option("honoured_overrides")
    looked_at = report.flag is not None and (honoured is None or report.flag in honoured)
    flag = f"{case.policy.backend_flag} {report.flag}" if looked_at else None
    how = f"only {flag} reaches it" if flag else "nothing reaches it"
    reason = Reason("F11_NOT_LISTED", f"not in the order for {case.gpu.platform}: {how}", flag)
    return replace(report, supported=False, reasons=(*report.reasons, reason))


def _wanted_activation(case: Case, family: Family, reports: Iterable[CandidateReport]) -> str:
    """The requested activation where some backend has it, else 16-bit (the engine's fallback)."""
    requested = case.method.activation_key or "none"
    hits = (r for r in reports if r.supported and family.backends[r.backend].activation_key in (requested, "any"))
    return requested if requested != "none" and next(hits, None) else "none"


def _filter_activation(family: Family, report: CandidateReport, wanted: str) -> CandidateReport:
    key = family.backends[report.backend].activation_key or "none"
    if key in (wanted, "any"):
        return report
    text = f"runs activations as {_plain(key)}, the checkpoint asks for {_plain(wanted)}"
    reason = Reason("F10_ACTIVATION_KEY", text, None)
    return replace(report, supported=False, reasons=(*report.reasons, reason))


def _plain(key: str) -> str:
    return "16-bit" if key == "none" else key


def _filter_limit(case: Case, report: CandidateReport) -> CandidateReport:
    if case.policy.classes[report.experts].clamps:
        return report
    reason = Reason("F12_LIMIT", f"does not apply the activation limit {case.shape.swiglu_limit}", None)
    return replace(report, supported=False, reasons=(*report.reasons, reason))


# ------------------------------------------------------------------------------------------------ outcomes


def _automatic(case: Case, family: Family, candidates: tuple[CandidateReport, ...]) -> Selection:
    chosen = next((row for row in candidates if row.supported), None)
    notes: tuple[str, ...] = ()
    requested = case.method.activation_key
    if chosen and family.option("activation_filter") and requested:
        key = family.backends[chosen.backend].activation_key
        if key not in (requested, "any"):
            notes = (f"no backend has activations {requested} here: falls back to 16-bit activations",)
    if chosen is not None:
        return Selection(chosen, None, candidates, notes)
    return Selection(None, no_backend(case, family, candidates), candidates)


def no_backend(case: Case, family: Family, candidates: Iterable[CandidateReport]) -> EngineError:
    """The engine's "nothing fits", with what the engine leaves out: one reason per candidate."""
    order = backend_order(case, family)
    reasons = "; ".join(f"{row.backend}: {row.reasons[0].text}" for row in candidates if row.backend in order)
    text = f"no backend of {family.title} fits: {reasons}"
    if case.gpu.platform in family.option("none_platforms", ()):
        return EngineError("none", "SILENT_NONE", f"{text} (the engine goes on with no backend at all)")
    return EngineError(family.option("no_backend"), "NO_BACKEND", text)


def _forced(case: Case, family: Family, asked: str, candidates: tuple[CandidateReport, ...]) -> Selection:
    names = family.overrides.get(asked)
    known = ", ".join(sorted(family.overrides))
    works = alternatives(case, family, candidates)
    if names is None:
        text = f"'{asked}' names no backend of {family.title}; known here: {known}"
        return Selection(None, EngineError("ValueError", "OVERRIDE_UNKNOWN", text, works), candidates)
    if case.format == "batched" and asked in family.option("batched_overrides", {}):
        names = (family.option("batched_overrides")[asked],)
    reports = [judge(case, family, family.backends[name], forced=True) for name in names]
    chosen = next((row for row in reports if row.supported), None)
    if chosen is not None:
        return Selection(chosen, None, candidates)
    first = reports[0].reasons[0]
    reasons = "; ".join(f"{row.backend}: {', '.join(r.text for r in row.reasons)}" for row in reports)
    text = f"backend '{asked}' cannot run this: {reasons}"
    return Selection(None, EngineError("ValueError", "OVERRIDE_UNSUPPORTED", text, works, first.code), candidates)


def alternatives(case: Case, family: Family, candidates: Iterable[CandidateReport]) -> str:
    """What works instead of a backend that does not."""
    fits = [f"{row.backend} ({case.policy.backend_flag} {row.flag or 'auto'})" for row in candidates if row.supported]
    return "works here: " + ", ".join(fits) if fits else "no other backend fits either; drop the request to see why"


def _lora_shortcut(case: Case, family: Family, candidates: tuple[CandidateReport, ...]) -> Selection:
    """Unquantised experts with LoRA: one class is tried, the other is taken unchecked."""
    by_name = {row.backend: row for row in candidates}
    first = by_name.get(family.option("lora_first"))
    if first is not None and first.supported:
        return Selection(first, None, candidates)
    report = judge(case, family, family.backends[family.option("lora_else")])
    return Selection(report, None, candidates, ("LoRA takes this backend without asking its predicates",))


def _hard_wired(case: Case, family: Family, candidates: tuple[CandidateReport, ...]) -> Selection:
    """The first supported backend, else a fixed one, unchecked until its kernel is made."""
    fixed = family.option("hard_wired")
    chosen = next((row for row in candidates if row.supported), None)
    notes = ("this method bypasses the engine's oracle: a backend asked for by name is ignored",)
    by_name = {row.backend: row for row in candidates}
    if chosen is None:
        return Selection(by_name[fixed], None, candidates, notes, fixed)
    # It reports the fixed backend whatever runs, except where the order itself is another.
    reported = fixed if fixed in backend_order(case, family) else chosen.backend
    return Selection(chosen, None, candidates, notes, reported)
