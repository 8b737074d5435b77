"""Backend selection: the engine's order of trial from its tables, and every candidate judged by every rule."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from moeq.layouts.readers import Only
from moeq.oracle.devices import device_term
from moeq.oracle.engines.vllm.case import DEFAULT_ALL2ALL, Case
from moeq.oracle.engines.vllm.filters import filter_reasons
from moeq.oracle.engines.vllm.policy import Backend, Family
from moeq.oracle.engines.vllm.rules import RULES, class_reasons
from moeq.oracle.engines.vllm.tables import Attempt, Search, SearchTable, parse_search
from moeq.oracle.records import AS_IT_IS, CandidateReport, EngineError, Reason
from moeq.spelling import option, together

#: Rule code -> its place in the engine's order of evaluation.
_ORDER = {rule.code: index for index, rule in enumerate(RULES)}
#: Codes of the reasons why the automatic order passes over a backend, which its name may still select.
ORDER_CODES = ("F10_ACTIVATION_KEY", "F11_NOT_LISTED", "F12_LIMIT")
#: Search on a device for which the family has no table, and the result for a name that the engine does not know.
_NO_SEARCH = Search((), ("NotImplementedError", "NO_BACKEND"))
_UNKNOWN = Search((), ("ValueError", "OVERRIDE_UNKNOWN"))


@dataclass(frozen=True)
class Selection:
    """Result of the engine's selection function: one backend or an error, with reports on all candidates."""

    selected: CandidateReport | None
    error: EngineError | None
    candidates: tuple[CandidateReport, ...]
    notes: tuple[str, ...] = ()
    reported: str | None = None  #: backend in the engine's log, if another one runs; else None


# ------------------------------------------------------------------------------------------------ the order of trial


def factor_value(case: Case, factor: str) -> str:
    """Return a case's value of a factor in the spelling of the tables; empty for the usual value."""
    shape, method = case.shape, case.method
    if factor.startswith("VLLM_"):
        return case.flag(factor) or ""
    values = {
        "keys": f"{method.weight_key}|{method.activation_key or 'none'}",
        "form": _search_form(case),
        "activation": shape.activation,
        "routing": shape.routing,
        "lora": "1" if case.deployment.lora else "",
        "limit": "1" if shape.swiglu_limit is not None else "",
        "bias": "1" if shape.has_bias else "",
        "hash": "1" if shape.hash_routing else "",
        "fp32": "1" if shape.router_dtype == "fp32" else "",
        "dtype": "" if case.deployment.dtype == "bf16" else case.deployment.dtype,
        "ragged": "1" if case.intermediate % 128 else "",
        "cutlass": "1" if method.vllm_cutlass else "",
        "model": shape.model_type,
        "aiter": "" if case.package("aiter") else "0",
    }
    return values[factor]


def _search_form(case: Case) -> str:
    """Return the parallel form that decides the order of trial.

    The order does not count context-parallel ranks as data-parallel ones, except the order for LoRA.
    """
    form, deployment = case.parallel_form, case.deployment
    return form if deployment.dp > 1 or deployment.lora else form.replace(f"ep:{DEFAULT_ALL2ALL}", "ep")


def search_of(case: Case, family: Family, asked: str) -> Search:
    """Look up the search for a case and a requested backend; `auto` requests none.

    With LoRA, unquantised experts are chosen before the engine looks at a request (vLLM 0.26.0 to 0.33.0).
    """
    if family.name == "unquantized" and case.deployment.lora:
        asked = "auto"
    tables = family.searches.get(case.device)
    if tables is None:
        return _NO_SEARCH
    table = tables.get(asked)
    if table is None:  # this version lacks the name: take the result of another unknown name, or of `auto`
        table = next((table for table in tables.values() if table.usual == _UNKNOWN), tables["auto"])
    words = (_word(case, table, factor) for factor in table.factors)
    return parse_search(table.search(tuple(word for word in words if word)))


def _word(case: Case, table: SearchTable, factor: str) -> str | None:
    value = factor_value(case, factor)
    word = table.word(factor, value)
    if word is None and factor == "form" and value.endswith("+eplb"):
        return table.word(factor, value.removesuffix("+eplb"))
    return word


def activation_of(case: Case, attempt: Attempt) -> str:
    """Return the activation key that a candidate is asked with."""
    return attempt.activation or case.method.activation_key or "none"


# ------------------------------------------------------------------------------------------------ judging


def candidate_report(case: Case, backend: Backend, attempts: Iterable[Attempt]) -> CandidateReport:
    """Judge one backend: report its first class that fits, else the closest one with every failed rule."""
    filtered = filter_reasons(case, backend)
    if case.brief and filtered:
        attempts = itertools.islice(attempts, 1)  # the class does not matter any more
    best: tuple[int, int] = (-1, 0)
    experts, reasons, key = "", filtered, "none"
    for attempt in attempts:
        activation = activation_of(case, attempt)
        found = class_reasons(case, case.policy.classes[attempt.experts], activation)
        # The class that fails latest is the one that the engine would report; a class that fits ends the search.
        score = (min((_ORDER[reason.code] for reason in found), default=len(_ORDER)), -len(found))
        if score > best:
            best, experts, reasons, key = score, attempt.experts, filtered + found, activation
        if not found:
            break
    layout, lossy = (None, None) if case.brief else layout_of(case, backend)
    return CandidateReport(
        backend=backend.name,
        experts=experts.rpartition(":")[2],
        layout=layout,
        lossy_layout=lossy,
        no_layout=_no_layout(backend, layout, lossy),
        supported=not reasons,
        reasons=reasons,
        flag=backend.flag,
        monolithic=case.policy.classes[experts].monolithic,
        activation_key=None if key == "none" else key,
        native=backend.native,
        as_it_is=backend.as_it_is,
    )


def layout_of(case: Case, backend: Backend) -> tuple[str | None, str | None]:
    """Return the id of the layout that the backend's kernel reads in this case, as (lossless, lossy).

    A layout is lossy if making it changes numbers. At least one of the two ids is None, both where moeq has no layout.
    """
    if not any(_holds(case, only) for only in backend.unread):
        for row in backend.layouts:
            if _holds(case, row.only) and (row.since is None or case.policy.since(row.since)):
                return (None, row.layout) if row.lossy else (row.layout, None)
    return None, None


def _holds(case: Case, only: Only) -> bool:
    """Return whether a case meets all conditions."""
    name, _, value = (only.env or "").partition("=")
    return (
        (only.devices is None or any(device_term(text).admits(case.gpu) for text in only.devices))
        and only.activation in (None, case.shape.activation)
        and only.dtype in (None, case.deployment.dtype)
        and (only.env is None or case.env(name) == value)
        and (only.configs is None or case.method.config in only.configs)
        and (only.max_tp is None or case.moe_tp <= only.max_tp)
        and (only.weights is None or case.method.weight_key in only.weights)
        and only.activations in (None, case.method.activation_key or "none")
    )


def _no_layout(backend: Backend, layout: str | None, lossy: str | None) -> str | None:
    if layout is not None:
        return None
    why = AS_IT_IS if backend.as_it_is else backend.no_layout or "moeq has no offline layout for it"
    options = together([option("layout", lossy), option("allow_lossy", True)])
    return f"{why}; {options} writes that" if lossy else why


def on_device(case: Case, backend: Backend) -> bool:
    """Tell whether some class of the backend exists for this device."""
    return any(case.device in case.policy.classes[name].variants for name in backend.classes)


def _by_backend(attempts: Iterable[Attempt]) -> dict[str, list[Attempt]]:
    found: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        found.setdefault(attempt.backend, []).append(attempt)
    return found


def candidate_reports(case: Case, family: Family) -> tuple[CandidateReport, ...]:
    """Judge every backend of the family, in the automatic order; backends outside this order come last."""
    search = search_of(case, family, "auto")
    tried = _by_backend((*search.attempts, *([_with_class_key(case, search.unchecked)] if search.unchecked else [])))
    reports = [candidate_report(case, family.backends[name], attempts) for name, attempts in tried.items()]
    table, flags = family.searches.get(case.device, {}).get("auto"), family.flags(case.device)
    usual = {attempt.backend for attempt in table.usual.attempts} if table else set()
    for name, backend in family.backends.items():
        # Backends of other devices cannot be selected; only a full report lists them.
        if name in tried or (case.brief and not on_device(case, backend)):
            continue
        report = candidate_report(
            case, backend, (Attempt(name, experts, backend.activation_key) for experts in backend.classes)
        )
        reports.append(_not_tried(case, family, report, usual=name in usual, has_flag=report.flag in flags))
    return tuple(reports)


def _not_tried(case: Case, family: Family, report: CandidateReport, *, usual: bool, has_flag: bool) -> CandidateReport:
    """Add the reason why automatic selection passes over a backend."""
    if case.brief:
        reason = Reason("F11_NOT_LISTED", "not in the order")
    elif usual and family.name.startswith("mxfp4") and case.method.activation_key:
        runs, asked = report.activation_key or "16-bit", case.method.activation_key
        reason = Reason("F10_ACTIVATION_KEY", f"runs activations as {runs}, the checkpoint asks for {asked}", None)
    elif usual and case.shape.swiglu_limit is not None:
        reason = Reason("F12_LIMIT", f"does not apply the activation limit {case.shape.swiglu_limit}", None)
    else:
        flag = f"{case.policy.backend_flag} {report.flag}" if has_flag else None
        how = f"only {flag} reaches it" if flag else "nothing reaches it"
        reason = Reason("F11_NOT_LISTED", f"not in the order for {case.gpu.name} here: {how}", flag)
    return replace(report, supported=False, reasons=(*report.reasons, reason))


# ------------------------------------------------------------------------------------------------ outcomes


def select(case: Case) -> Selection:
    """Run the engine's selection for a case. A refusal is part of the result and never raised."""
    family = case.policy.families[case.method.family]
    asked = case.deployment.backend
    named = asked != "auto" and case.method.fixed is None and case.method.built_in is None
    search = search_of(case, family, asked)
    # A request that changes nothing is ignored by the engine.
    ignored = named and search == search_of(case, family, "auto")
    # A brief answer to a request is about that backend alone.
    candidates = () if case.brief and named and not ignored else candidate_reports(case, family)
    if case.method.fixed is not None:
        return _fixed(case, family, candidates)
    if case.method.built_in is not None:
        return _built_in(case, candidates)
    notes: tuple[str, ...] = (f"this method does not look at {case.policy.backend_flag} {asked}",) if ignored else ()
    if asked == "auto" or ignored:
        chosen = next((row for row in candidates if row.supported), None)
        reports = tuple(row for row in candidates if not any(reason.code in ORDER_CODES for reason in row.reasons))
    else:
        tried = _by_backend(search.attempts)
        reports = tuple(candidate_report(case, family.backends[name], attempts) for name, attempts in tried.items())
        chosen = next((row for row in reports if row.supported), None)
    if not case.policy.since("0.27.0") and _unprintable(case, search, chosen):
        text = f"a candidate refuses {case.method.weight_key}, and this version fails to print that key"
        error = EngineError("KeyError", "OTHER", text, "vLLM 0.27 and newer", "P04_SCHEME")
        return Selection(None, error, candidates, notes)
    if chosen is None and search.unchecked is not None:
        chosen = candidate_report(
            case, family.backends[search.unchecked.backend], [_with_class_key(case, search.unchecked)]
        )
        notes += ("this backend is taken without asking its class",)
    if chosen is not None:
        reported = (
            search.unchecked.reported if search.unchecked and chosen.backend == search.unchecked.backend else None
        )
        notes += _fallback(case, family, chosen)
        if case.method.first_class:
            first = Attempt(chosen.backend, family.backends[chosen.backend].classes[0], chosen.activation_key or "none")
            chosen = candidate_report(case, family.backends[chosen.backend], [first])
        return Selection(chosen, None, _with_selected(candidates, chosen), notes, reported)
    error = _error(case, family, search, asked if not ignored else "auto", reports, candidates)
    return Selection(None, error, candidates, notes)


def _unprintable(case: Case, search: Search, chosen: CandidateReport | None) -> bool:
    """Tell whether a class before the selected one refuses an integer key, which versions before 0.27 cannot print."""
    if case.method.family != "wna16":
        return False
    for attempt in search.attempts:
        if chosen is not None and (attempt.backend, attempt.experts) == (chosen.backend, chosen.experts):
            return False
        if filter_reasons(case, case.policy.families["wna16"].backends[attempt.backend]):
            continue
        reasons = class_reasons(case, case.policy.classes[attempt.experts], activation_of(case, attempt))
        if reasons and min(reasons, key=lambda reason: _ORDER[reason.code]).code == "P04_SCHEME":
            return True
    return False


def _with_class_key(case: Case, attempt: Attempt) -> Attempt:
    """Return an attempt whose class is not asked, with an activation key that the class has."""
    row, weight = case.policy.classes[attempt.experts], case.method.weight_key
    pairs = [
        pair for variant in row.variants.get(case.device, ()) for pair in sorted(variant.pairs) if pair[0] == weight
    ]
    listed = {key for _, key in pairs}
    if attempt.activation or not listed or listed & {case.method.activation_key or "none", "*"}:
        return attempt
    return replace(attempt, activation=pairs[0][1])


def _with_selected(candidates: tuple[CandidateReport, ...], chosen: CandidateReport) -> tuple[CandidateReport, ...]:
    """Replace the backend's report by the selected one: a request may run another class than the automatic order."""
    return tuple(chosen if row.backend == chosen.backend and not row.supported else row for row in candidates)


def _fallback(case: Case, family: Family, chosen: CandidateReport) -> tuple[str, ...]:
    requested = case.method.activation_key
    if not family.name.startswith("mxfp4") or requested is None or chosen.activation_key is not None:
        return ()
    return (f"no backend has activations {requested} here: falls back to 16-bit activations",)


def _fixed(case: Case, family: Family, candidates: tuple[CandidateReport, ...]) -> Selection:
    """Report a method with a single backend, which needs no selection."""
    assert case.method.fixed is not None
    backend, experts = case.method.fixed
    chosen = candidate_report(case, family.backends[backend], [Attempt(backend, experts)])
    return Selection(chosen, None, _with_selected(candidates, chosen), ("this method has one backend, taken unasked",))


def _built_in(case: Case, candidates: tuple[CandidateReport, ...]) -> Selection:
    """Report a method that runs a kernel of its own: it selects nothing and names no backend."""
    assert case.method.built_in is not None
    backend, experts = case.method.built_in
    text = f"{case.method.name} selects no backend in this version: its {backend} kernel is built in"
    chosen = CandidateReport(backend, experts, None, "this version has the kernel inside the method", True)
    # Only the kernel without a class is named as a backend by the engine.
    error = EngineError("none", "SILENT_NONE", text) if experts is not None else None
    return Selection(chosen, error, candidates, (text,))


def _error(
    case: Case, family: Family, search: Search, asked: str, tried: tuple[CandidateReport, ...],
    candidates: tuple[CandidateReport, ...],
) -> EngineError:  # fmt: skip
    error, kind = search.error or ("NotImplementedError", "NO_BACKEND")
    if asked == "auto":
        reasons = "; ".join(f"{row.backend}: {row.reasons[0].text}" for row in tried)
        text = f"no backend of {family.title} fits: {reasons or f'none is tried on {case.gpu.name}'}"
        if kind == "SILENT_NONE":
            text += " (the engine goes on with no backend at all)"
        return EngineError(error, kind, text)
    works = alternatives(case, candidates)
    if kind == "OVERRIDE_UNKNOWN":
        known = ", ".join(sorted(family.flags(case.device)))
        return EngineError(error, kind, f"'{asked}' names no backend of {family.title}; known here: {known}", works)
    reasons = "; ".join(f"{row.backend}: {', '.join(reason.text for reason in row.reasons)}" for row in tried)
    code = tried[0].reasons[0].code if tried and tried[0].reasons else None
    return EngineError(
        error, kind, f"backend '{asked}' cannot run this: {reasons or 'it is not tried here'}", works, code
    )


def alternatives(case: Case, candidates: Iterable[CandidateReport]) -> str:
    """List the backends that work instead of one that does not."""
    fits = [f"{row.backend} ({case.policy.backend_flag} {row.flag or 'auto'})" for row in candidates if row.supported]
    return "works here: " + ", ".join(fits) if fits else "no other backend fits either; drop the request to see why"
