"""`moeq restore`: rebuild the source's files from a conversion."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport
from moeq.report.text import counted, human_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.prove.restore import Restoration


def command(
    ctx: typer.Context,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Output of `moeq convert`.")],
    out_folder: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to create.")],
    slow: Annotated[
        bool,
        typer.Option(
            "--slow", help="Use the independent reference path: unpack every expert, pack it as its format does."
        ),
    ] = False,
    workers: options.WorkersOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> None:
    """Rebuild the source checkpoint, file by file and byte by byte."""
    from moeq.prove.restore import restore

    out: Output = ctx.obj
    with ProgressReport(out, "restore", quiet=quiet or json) as progress:
        restoration = restore(dst, out_folder, slow=slow, workers=workers, progress=progress.update)
    out.answer(document(restoration), lambda console: render(console, restoration))


def document(restoration: Restoration) -> dict[str, Any]:
    """Return the JSON document."""
    return {
        "destination": str(restoration.destination),
        "files": [{"name": name, "bytes": size} for name, size in restoration.files.items()],
        "rebuilt": restoration.rebuilt,
        "kept": restoration.kept,
        "copied": restoration.copied,
        "missing": list(restoration.missing),
        "existed": restoration.existed,
    }


def render(console: Console, restoration: Restoration) -> None:
    """Print the answer for people."""
    from rich.text import Text

    total = human_bytes(sum(restoration.files.values()))
    verb = "compared" if restoration.existed else "restored"
    head = (f"{verb} {restoration.destination}", "bold")
    console.print(Text.assemble(head, f": {counted(len(restoration.files), 'file')}, {total}"))
    console.print(
        f"  tensors   {restoration.rebuilt} rebuilt from packed experts (digests checked), {restoration.kept} that the "
        f"conversion had kept, {restoration.copied} copied"
    )
    if restoration.existed:
        console.print("  done      the folder held the source already; every byte was compared and nothing written")
    if restoration.missing:
        names = ", ".join(restoration.missing)
        console.print(f"  missing   the conversion did not keep {names}")
