"""`moeq finalize`: put together and publish a conversion that several processes did in shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeq.cli import options
from moeq.cli.conversion_report import ConversionReport
from moeq.cli.convert import document, render
from moeq.cli.out import Output
from moeq.cli.plan import warn_of_scales


def command(
    ctx: typer.Context,
    dst: Annotated[Path, typer.Argument(metavar="DST", help="The folder that the shards were to create.")],
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier conversion at DST.")] = False,
    workers: options.WorkersOption = None,
    events: options.EventsOption = None,
    sign: options.SignOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> None:
    """Check that all shards are there and agree, then publish. Options are taken from the shards."""
    from moeq.pipeline.finalize import finalize

    out: Output = ctx.obj
    with ConversionReport(out, "finalize", dst, quiet=quiet or json, log=events) as report:
        conversion = finalize(dst, force=force, sign=sign, workers=workers, progress=report)
        report.summarise(conversion)
    warn_of_scales(out, conversion.job)
    out.answer(document(conversion), lambda console: render(console, conversion))
