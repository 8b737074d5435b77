"""`moeq parity`: compare packed bytes with what the engine's own code makes of the same experts."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.prove.parity import Parity


def command(
    ctx: typer.Context,
    checkpoint: Annotated[
        str, typer.Argument(metavar="DST", help="Output of `moeq convert`, or a source to pack for the comparison.")
    ],
    site: Annotated[
        Path | None, typer.Option("--site", help="Folder that holds vllm/ (default: the installed package).")
    ] = None,
    layout: Annotated[
        str | None, typer.Option("--layout", help="For a source: layout id (default: the first that fits).")
    ] = None,
    tp: Annotated[int, typer.Option("--tp", min=1, help="For a source: tensor-parallel size.")] = 1,
    experts: Annotated[int, typer.Option("--experts", min=1, help="Experts per layer, spread over the layer.")] = 2,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> int:
    """Run vLLM's own CPU-runnable packing on sampled experts. Exit 0: bit-equal, 1: different, 3: no vLLM here."""
    from moeq.prove.parity import parity

    out: Output = ctx.obj
    with ProgressReport(out, "parity", unit="step", quiet=quiet or json) as progress:
        found = parity(checkpoint, site=site, layout=layout, tp=tp, sample=experts, progress=progress.update)
    return out.answer(found.to_json(), lambda console: render(console, found), ok=found.equal)


def render(console: Console, found: Parity) -> None:
    """Print the answer for people."""
    from rich.text import Text

    state = "bit-equal" if found.equal else "different"
    console.print(Text.assemble((state, "bold"), f": {found.checkpoint} and {found.engine}"))
    console.print(f"  layout    {', '.join(found.layout)}")
    same = sum(not part.differing for part in found.parts)
    console.print(f"  parts     {same} of {len(found.parts)} equal")
    for part in found.parts:
        if part.differing:
            rank = "" if part.rank is None else f" rank {part.rank}"
            experts = ", ".join(map(str, part.differing))
            where = f"layer {part.layer}{rank} {part.role} {part.part}, experts {experts}"
            console.print(f"  {where}: {part.verdict}")
    for note in found.notes:
        console.print(f"  note      {note}")
