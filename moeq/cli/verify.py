"""`moeq verify`: prove that a conversion still means what was converted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.errors import ExitCode

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.prove.verify import Verification

#: Mismatches printed for people; `--json` has all of them.
_SHOWN = 50


def command(
    ctx: typer.Context,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Output of `moeq convert`.")],
    source: Annotated[
        str | None, typer.Option("--source", help="Also compare with the checkpoint it came from.")
    ] = None,
    revision: options.RevisionOption = None,
    workers: options.WorkersOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> None:
    """Recompute the digest of every expert; with --source compare everything else too. Exit 1: something differs."""
    from moeq.cli.progress import ProgressReport
    from moeq.prove.verify import verify

    out: Output = ctx.obj
    with ProgressReport(out, "verify", unit="step", quiet=quiet or json) as progress:
        found = verify(dst, source, revision=revision, workers=workers, progress=progress.update)
    out.answer(found.to_json(), lambda console: render(console, found), ok=found.ok)
    if not found.ok:
        raise typer.Exit(ExitCode.NO)


def render(console: Console, found: Verification) -> None:
    """The answer for people."""
    from rich.text import Text

    verdict = "the values that were converted" if found.ok else f"{len(found.mismatches)} mismatches"
    console.print(Text.assemble(("verified" if found.ok else "DIFFERENT", "bold"), f": {verdict}"))
    console.print(f"  experts   {found.units} projections recomputed from the packed tensors")
    if found.source is not None:
        console.print(f"  source    {found.source_units} projections recomputed from {found.source}")
        console.print(f"  the rest  {found.tensors} tensors and {found.files} files compared with the source")
    if found.losses:
        console.print(f"  lossy     {found.losses} stored numbers were changed by the conversion, as was allowed")
    for mismatch in found.mismatches[:_SHOWN]:
        console.print(f"  {mismatch.text}")
    if len(found.mismatches) > _SHOWN:
        console.print(f"  ... and {len(found.mismatches) - _SHOWN} more: --json lists them")
