"""Reports of `run-check` and `selftest` for a terminal: what was checked, how far results differ, and the verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from moeq.report.heat import LIMITS, HeatMap, heat_map
from moeq.report.text import counted, line
from moeq.spelling import option

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.check.engine_check import BackendResult
    from moeq.check.results import CheckReport, ProjectionResult, SabotageResult, Sample, SelftestReport


#: Upper bound of lines of one kind, before "and N more".
MAX_LINES = 20

#: Shades of the heat map, from no error up to the bound; errors beyond it have a mark of their own.
_SHADES = " .:-=+*#"
_BEYOND = "X"
_LEVEL_STYLES = ("dim", "dim", "", "", "yellow", "yellow", "yellow", "yellow")


def render(console: Console, report: CheckReport) -> None:
    """Print what was checked, what came out, and the verdict as the last line."""
    console.print(Text.assemble((report.destination, "bold"), f" against {report.source or 'its own logical values'}"))
    line(console, "what", f"{report.scheme}, layout {report.layout}, for {report.backend}")
    for note in report.notes:
        line(console, "note", note)
    _digests(console, report)
    line(console, "kernels", f"{report.device}, {report.dtype} activations, seed {report.seed}")
    for layer in report.layers:
        line(console, "sample", _sample(layer.sample))
    unchecked = report.layers_in_checkpoint - len(report.layers)
    if unchecked and report.layers:
        line(
            console,
            "",
            f"{unchecked} of {report.layers_in_checkpoint} layers were not run ({option('layers')} chooses)",
        )
    if report.layers:
        console.print(_table(report, console.width))
        _heat(console, report)
        _timings(console, report)
        for index, text in enumerate(report.derivation):
            line(console, "" if index else "tolerance", text)
    _failures(console, report)
    _verdict(console, report)


def _digests(console: Console, report: CheckReport) -> None:
    if not report.digests_checked:
        line(console, "digests", f"not checked ({option('digests', False)})")
        return
    mismatches = report.digest_mismatches
    equal = report.digests_checked - len(mismatches)
    line(console, "digests", f"{equal} of {report.digests_checked} projections hold the values recorded in moeq.json")
    for mismatch in mismatches[:MAX_LINES]:
        line(console, "", Text(mismatch.text, style="red"))
    if len(mismatches) > MAX_LINES:
        line(console, "", f"and {len(mismatches) - MAX_LINES} more")


def _sample(sample: Sample) -> str:
    scope = "all" if sample.complete else "sampled"
    experts = ", ".join(map(str, sample.experts[:12])) + (" ..." if len(sample.experts) > 12 else "")
    runs = "; ".join(run.title for run in sample.runs)
    return f"layer {sample.layer}: {scope} experts {experts}; top {sample.top_k}; {runs}"


#: Title, rank and text of each column; on a narrow terminal the columns of the highest rank are left out first.
_COLUMNS: tuple[tuple[str, int, Callable[[ProjectionResult], str]], ...] = (
    ("max error", 0, lambda one: f"{one.max_abs:.2e}"),
    ("mean error", 5, lambda one: f"{one.mean_abs:.2e}"),
    ("relative", 4, lambda one: f"{one.relative:.2e}"),
    ("16-bit torch", 3, lambda one: f"{one.baseline:.2e}"),
    ("tolerance", 1, lambda one: f"{one.tolerance:.2e}"),
    ("error / bound", 0, lambda one: f"{one.exceedance:.3g}"),
    ("worst expert", 2, lambda one: str(one.worst.expert)),
)
_FIXED = ("layer", "product", "FAILED")
_GAP = 2


def _table(report: CheckReport, width: int) -> Table:
    """Draw the results as a table; columns are left out where the terminal is narrow, but numbers are never cut."""
    shown = list(_COLUMNS)
    while sum(len(name) + _GAP for name in (*_FIXED, *(name for name, _, _ in shown))) > width + _GAP:
        last = max(shown, key=lambda column: column[1])
        if last[1] == 0:
            break
        shown.remove(last)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    table.add_column("layer", justify="right", no_wrap=True)
    table.add_column("product", no_wrap=True)
    for title, _, _ in shown:
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    for result in report.results:
        verdict = Text("ok", "green") if result.passed else Text("FAILED", "red")
        table.add_row(str(result.layer), result.name, *(value(result) for _, _, value in shown), verdict)
    return table


def _heat(console: Console, report: CheckReport) -> None:
    """Print the layer x expert map of the product with the largest error over its bound."""
    chart = heat_map(report)
    if chart is None:
        return
    line(console, "heat", f"{chart.projection}: error / bound, layers down, experts across; X is beyond the bound")
    for row, layer in enumerate(chart.layers):
        cells = [_cell(chart, row, column) for column in range(len(chart.experts))]
        line(console, "", Text.assemble(f"{layer:>4} |", *cells, "|"))
    scale = ", ".join(f"'{shade}' {limit:.2g}" for shade, limit in zip(_SHADES[1:], LIMITS, strict=False))
    line(console, "", f"      from {scale}")


def _cell(chart: HeatMap, row: int, column: int) -> tuple[str, str]:
    level = chart.level(row, column)
    if level is None:
        return (" ", "")
    if level >= len(_SHADES):
        return (_BEYOND, "bold red")
    return (_SHADES[level], _LEVEL_STYLES[level])


def _timings(console: Console, report: CheckReport) -> None:
    rows = [timing for layer in report.layers for timing in layer.timings]
    if not rows:
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title in ("layer", "run", "median µs", "GB/s", "TFLOP/s", "of the floor"):
        table.add_column(title, justify="left" if title == "run" else "right")
    for row in rows[:MAX_LINES]:
        floor = "" if row.floor_microseconds is None else f"{100 * row.floor_microseconds / row.microseconds:.0f} %"
        table.add_row(
            str(row.layer), row.run, f"{row.microseconds:.1f}", f"{row.gigabytes_per_second:.0f}",
            f"{row.teraflops:.1f}", floor,
        )  # fmt: skip
    console.print(table)


def _failures(console: Console, report: CheckReport) -> None:
    lines = [text for result in report.results for text in result.complaints]
    for text in lines[:MAX_LINES]:
        line(console, "wrong", Text(text, style="red"))
    if len(lines) > MAX_LINES:
        line(console, "", f"and {len(lines) - MAX_LINES} more")
    for layer in report.layers:
        for text in layer.unequal_runs:
            line(console, "wrong", Text(text, "red"))


def _verdict(console: Console, report: CheckReport) -> None:
    passed = sum(result.passed for result in report.results)
    repeated = sum(layer.repeated for layer in report.layers)
    equal = repeated - sum(len(layer.unequal) for layer in report.layers)
    repeats = f"{equal} of {repeated} repeated runs equal bit for bit"
    counts = f"{passed} of {len(report.results)} products within tolerance, {repeats}"
    if not report.results:
        counts = "digests only, no kernel was run"
    verdict = Text("ok", "green") if report.ok else Text("FAILED", "red")
    console.print(Text.assemble(verdict, f"  {counts}, {report.seconds:.1f} s"))


def render_backends(console: Console, rows: Sequence[BackendResult]) -> None:
    """Print the table of backends."""
    from moeq.check.engine_check import FACTOR

    tokens = list(dict.fromkeys(count for row in rows for count in row.microseconds or ()))
    table = Table()
    for name in ("layer", "backend", "experts", "answer", "error", "allowed", *(f"{count} tokens" for count in tokens)):
        table.add_column(name, overflow="fold")
    for row in rows:
        name = f"{row.backend} (selected)" if row.selected else row.backend
        answer = "refused" if row.refused else "WRONG" if row.wrong else "right" if row.allowed else "not judged"
        figures = [f"{one:.2e}" if one is not None else "-" for one in (row.error, row.allowed)]
        times = [f"{row.microseconds[count]:.0f} us" if row.microseconds else "-" for count in tokens]
        table.add_row(str(row.layer), name, row.experts or "-", answer, *figures, *times)
    console.print(table)
    for row in rows:
        if row.refused:
            console.print(f"  layer {row.layer}  {row.backend}: {row.refused}", markup=False, soft_wrap=True)
        elif row.wrong and row.expert is not None:
            expert, quotient = row.expert
            console.print(f"  layer {row.layer}  {row.backend}: expert {expert} has {quotient:.3g} x its allowed error")
    console.print(
        f"  errors are relative to the layer in float32 on dequantised weights; {FACTOR:.0f} x torch's error is allowed"
    )


def render_selftest(console: Console, reports: Sequence[SelftestReport]) -> None:
    """Print a table per converted checkpoint, and the counts as the last line."""
    for report in reports:
        _render_one(console, report)
    damages = [result for report in reports for result in report.results]
    of_data = [one for one in damages if one.data]
    by_digest = sum(one.digest is not None for one in of_data)
    by_kernel = sum(one.numeric is not None for one in of_data)
    refused = sum(one.caught for one in damages if not one.data)
    alarms = sum(len(report.false_alarms) for report in reports)
    counts = (
        f"{len(of_data)} damages: {by_digest} caught by digest, {by_kernel} by the kernels' numbers alone; "
        f"{refused} of {len(damages) - len(of_data)} swapped calls refused; {counted(alarms, 'false alarm')}"
    )
    verdict = Text("ok", "green") if all(report.ok for report in reports) else Text("FAILED", "red")
    console.print(Text.assemble(verdict, f"  {counts}"))


def _render_one(console: Console, report: SelftestReport) -> None:
    name = PurePath(report.destination).name
    console.print(Text.assemble((name, "bold"), f"  {report.scheme}, layout {report.layout}, {report.device}"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    for title in ("damage", "where", "what", "digest", "numbers alone"):
        table.add_column(title, overflow="fold")
    for result in report.results:
        table.add_row(result.sabotage, result.place, result.damage, _digest(result), _numeric(result))
    console.print(table)
    for alarm in report.false_alarms:
        console.print(Text(f"  false alarm: {alarm}", "red"))


def _digest(result: SabotageResult) -> Text:
    if not result.data:
        return Text("")
    return Text("caught", "green") if result.digest else Text("missed", "red")


def _numeric(result: SabotageResult) -> Text:
    if result.numeric is None:
        if not result.data:
            return Text("accepted", "red")
        return Text(f"below the bound ({result.exceedance:.2g} of it)", "yellow")
    return Text(result.numeric, "green")
