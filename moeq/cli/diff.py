"""`moeq diff`: compare two checkpoints by the values of their experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport
from moeq.report.text import print_rest

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.prove.diff import Difference, ProjectionDifference

#: Most differing projections, and most differing tensors, that are printed; `--json` has all of them.
_SHOWN = 20


def command(
    ctx: typer.Context,
    left: Annotated[str, typer.Argument(metavar="A", help="A checkpoint: source or converted, any format.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Another checkpoint.")],
    experts_only: Annotated[
        bool, typer.Option("--experts-only", help="Leave out everything that is not a routed expert.")
    ] = False,
    workers: options.WorkersOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> int:
    """Compare experts by dequantised values, whatever their packing. Exit 0: equal, 1: different."""
    from moeq.prove.diff import diff

    out: Output = ctx.obj
    with ProgressReport(out, "diff", unit="step", quiet=quiet or json) as progress:
        found = diff(left, right, experts_only=experts_only, workers=workers, progress=progress.update)
    return out.answer(found.to_json(), lambda console: render(console, found), ok=found.equal)


def render(console: Console, found: Difference) -> None:
    """Print the answer for people."""
    from rich.text import Text

    num_equal = found.projections - len(found.differing)
    state = "equal" if found.equal else "different"
    console.print(Text.assemble((state, "bold"), f": {found.left} and {found.right}"))
    console.print(f"  experts   {num_equal} of {found.projections} projections have equal values")
    if found.worst is not None:
        console.print(f"  worst     {line(found.worst)}")
    for row in found.differing[:_SHOWN]:
        console.print(f"    {line(row)}")
    print_rest(console, len(found.differing), _SHOWN, indent=4)
    for text in found.missing:
        console.print(f"  {text}")
    if found.tensors:
        console.print(f"  the rest  {found.tensors - len(found.other)} of {found.tensors} tensors are identical")
    for text in found.other[:_SHOWN]:
        console.print(f"    {text}")
    print_rest(console, len(found.other), _SHOWN, indent=4)


def line(row: ProjectionDifference) -> str:
    """Describe one projection in one line, with its first and its worst difference."""
    if row.shapes is not None:
        return f"{row.name}: {row.shapes}"
    first = f"first {row.first.text}" if row.first else ""
    worst = f"worst {row.worst.text} (off by {row.max_abs:g})" if row.worst else ""
    return f"{row.name}: {row.differing:,} of {row.numbers:,} differ, relative {row.relative:.3g}; {first}; {worst}"
