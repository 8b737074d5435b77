"""Records of the public interface as one line and as a small table with the report's look."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files
from typing import Any

from moeq.check.results import CheckReport
from moeq.foreign import in_html, plain
from moeq.model import Checkpoint
from moeq.oracle.loaders import loads_in
from moeq.oracle.records import Verdict
from moeq.pipeline.convert import Conversion
from moeq.pipeline.plan.conversion_plan import Plan
from moeq.pipeline.plan.job import Job
from moeq.report.text import counted, human_bytes, human_seconds
from moeq.report.verdict_text import answer_text, reasons_text

#: A phrase that says what a record is, and labelled lines about it.
Summary = tuple[str, list[tuple[str, str]]]


def one_line(record: Any) -> str:
    """Return a record's `repr`: `<Verdict H100, TP 1, bf16: vLLM 0.33.0 runs HUMMING (W4A16)>`."""
    return f"<{type(record).__name__} {plain(_summary(record)[0])}>"


def table(record: Any) -> str:
    """Return a record as HTML: its phrase, and a row for every fact. Texts of checkpoints are escaped."""
    phrase, rows = _summary(record)
    style = files("moeq.report").joinpath("templates/notebook.css").read_text(encoding="utf-8")
    cells = "".join(f"<tr><th>{in_html(label)}</th><td>{in_html(text)}</td></tr>" for label, text in rows)
    return f'<div class="moeq"><style>{style}</style><p>{in_html(phrase)}</p><table>{cells}</table></div>'


def _summary(record: Any) -> Summary:
    return next(make(record) for kind, make in _SUMMARIES.items() if isinstance(record, kind))


def _checkpoint(checkpoint: Checkpoint) -> Summary:
    info = checkpoint.info
    schemes = ", ".join(dict.fromkeys(use.title for use in info.schemes))
    rows = [
        ("model", f"{info.architecture} ({info.family})"),
        ("experts", f"{counted(len(info.moe_layers), 'layer')}, {info.num_experts} per layer, top {info.top_k or '?'}"),
        ("sizes", f"hidden {info.hidden_size}, expert intermediate {info.intermediate_size}"),
        ("scheme", schemes),
        ("bytes", f"experts {human_bytes(info.expert_bytes)}, the rest {human_bytes(info.other_bytes)}"),
        *(("warning", warning.message) for warning in info.warnings),
    ]
    return f"{info.name}: {checkpoint.kind}, {info.family}, {schemes}", rows


def _verdict(verdict: Verdict) -> Summary:
    target = verdict.convert
    writes = (
        f"writes {target.layout} for {target.backend}" if target else f"no: {verdict.no_convert or verdict.refusal}"
    )
    others = [row for row in verdict.candidates if verdict.chosen is None or row.backend != verdict.chosen.backend]
    rows = [("scheme", verdict.scheme), ("convert", writes)]
    rows += [("advisory", f"{row.code}: {row.symptom}") for row in verdict.advisories]
    rows += [(row.backend, reasons_text(row)) for row in others]
    return answer_text(verdict).plain, rows


def _plan(plan: Plan) -> Summary:
    layouts = ", ".join(dict.fromkeys(layer.entry.layout for layer in plan.layers))
    rows = [
        ("layout", layouts),
        ("experts", f"{human_bytes(plan.expert_bytes_in)} → {human_bytes(plan.expert_bytes_out)}"),
        ("the rest", f"{human_bytes(plan.rest_bytes)}, copied unchanged"),
        ("padding", human_bytes(plan.padding_bytes)),
        ("digest", plan.digest),
        *(("copied", f"layer {row.layer}: {row.reason}") for row in plan.copied),
    ]
    units, written = counted(len(plan.units), "unit"), counted(len(plan.files), "file")
    return f"{units} that write {human_bytes(plan.bytes_out)} in {written}, {layouts}", rows


def _job(job: Job) -> Summary:
    phrase, rows = _plan(job.plan)
    return f"{job.checkpoint.source.name}: {phrase}", [("backend", job.answer.backend), *rows]


def _conversion(conversion: Conversion) -> Summary:
    _, rows = _plan(conversion.plan)
    verb = "would write" if conversion.manifest is None else "wrote"
    if conversion.already_done:
        verb = "already done,"
    size = f"{counted(len(conversion.plan.files), 'file')}, {human_bytes(conversion.plan.bytes_out)}"
    facts = [("backend", conversion.backend), ("loads in", loads_in(conversion.loaders))]
    losses = sum(entry.losses for entry in conversion.manifest.layers) if conversion.manifest else 0
    facts += [("lossy", f"{losses:,} stored numbers were changed, as was allowed")] if losses else []
    return f"{verb} {conversion.destination}: {size}", [*facts, *rows]


def _check(report: CheckReport) -> Summary:
    passed = sum(result.passed for result in report.results)
    wrong = len(report.digest_mismatches)
    complaints: Iterable[str] = (text for result in report.results for text in result.complaints)
    rows = [
        ("layout", f"{report.layout}, for {report.backend}"),
        ("kernels", f"{report.device}, {report.dtype} activations, seed {report.seed}"),
        ("digests", f"{report.digests_checked - wrong} of {report.digests_checked} as recorded"),
        ("layers", f"{len(report.layers)} of {report.layers_in_checkpoint} run"),
        ("time", human_seconds(report.seconds)),
        *(("wrong", mismatch.text) for mismatch in report.digest_mismatches),
        *(("wrong", text) for text in complaints),
    ]
    verdict, products = "ok" if report.ok else "FAILED", f"{passed} of {len(report.results)} products within tolerance"
    return f"{verdict} {report.destination}: {products if report.results else 'digests alone'}", rows


_SUMMARIES: Mapping[type[Any], Callable[[Any], Summary]] = {
    Checkpoint: _checkpoint,
    Verdict: _verdict,
    Plan: _plan,
    Job: _job,
    Conversion: _conversion,
    CheckReport: _check,
}
