"""`run-check`'s report for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.check.records import CheckReport, Sample

#: Mismatches listed before "and N more".
MOST_MISMATCHES = 20


def render(console: Console, report: CheckReport) -> None:
    """What was checked, what came out, and the verdict as the last line."""
    console.print(f"[bold]{report.destination}[/] against {report.source or 'its own logical values'}")
    for note in report.notes:
        console.print(f"  note      {note}")
    _digests(console, report)
    console.print(f"  kernels   {report.device}, {report.dtype} activations, seed {report.seed}")
    for sample in report.samples:
        console.print(f"  sample    {_sample(sample)}")
    unchecked = report.layers_in_checkpoint - len(report.samples)
    if unchecked:
        console.print(
            f"            {unchecked} of {report.layers_in_checkpoint} layers were not run (--layers chooses)"
        )
    if report.results:
        console.print(_table(report))
        console.print(f"  tolerance {report.tolerance_rule}")
    failed = [result for result in report.results if not result.passed]
    for result in failed:
        console.print(
            f"  [red]layer {result.layer} {result.name}[/]: worst expert {result.worst_expert} has relative error "
            f"{result.worst_expert_relative:.2e}, allowed {result.worst_expert_tolerance:.2e}"
        )
    verdict = "[green]ok[/]" if report.ok else "[red]FAILED[/]"
    counts = f"{len(report.results) - len(failed)} of {len(report.results)} products within tolerance"
    console.print(f"{verdict}  {counts}, {report.seconds:.1f} s")


def _digests(console: Console, report: CheckReport) -> None:
    if not report.digests_checked:
        console.print("  digests   not checked (--no-digests)")
        return
    wrong = report.digest_mismatches
    equal = report.digests_checked - len(wrong)
    console.print(f"  digests   {equal} of {report.digests_checked} projections hold the values recorded in moeq.json")
    for mismatch in wrong[:MOST_MISMATCHES]:
        console.print(f"            [red]{mismatch.text}[/]")
    if len(wrong) > MOST_MISMATCHES:
        console.print(f"            and {len(wrong) - MOST_MISMATCHES} more")


def _sample(sample: Sample) -> str:
    scope = "all" if sample.complete else "sampled"
    experts = ", ".join(map(str, sample.experts[:12])) + (" ..." if len(sample.experts) > 12 else "")
    tokens = ", ".join(map(str, sample.tokens))
    return f"layer {sample.layer}: {scope} experts {experts}; top {sample.top_k}; {tokens} tokens"


def _table(report: CheckReport) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("layer", justify="right")
    table.add_column("product")
    for title in ("max error", "mean error", "relative", "16-bit torch", "tolerance", "worst expert"):
        table.add_column(title, justify="right")
    table.add_column("")
    for result in report.results:
        table.add_row(
            str(result.layer),
            result.name,
            f"{result.max_abs:.2e}",
            f"{result.mean_abs:.2e}",
            f"{result.relative:.2e}",
            f"{result.baseline:.2e}",
            f"{result.tolerance:.2e}",
            f"{result.worst_expert} ({result.worst_expert_relative:.2e})",
            "[green]ok[/]" if result.passed else "[red]FAILED[/]",
        )
    return table
