"""`moeq selftest`: damage converted experts in memory in every known way; the check has to report each."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

import moeq
from moeq.cli import options
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport

if TYPE_CHECKING:
    from collections.abc import Callable

    from moeq.check.results import SelftestReport


def command(
    ctx: typer.Context,
    dst: Annotated[
        str | None,
        typer.Argument(metavar="[DST]", help="Output of `moeq convert` (default: small checkpoints of every format)."),
    ] = None,
    source: Annotated[
        str | None, typer.Option("--source", help="Checkpoint that was converted (default: the one in the manifest).")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random places to damage.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cuda, or cpu (Triton's interpreter).")] = "auto",
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> int:
    """Test run-check itself on deliberate damage, which is done in memory: no file of DST is touched."""
    from moeq.check.run_check import prepare_device
    from moeq.check.selftest import selftest
    from moeq.report.check_text import render_selftest

    out: Output = ctx.obj
    prepare_device(device)
    with ProgressReport(out, "selftest", unit="step", quiet=quiet or json) as progress:
        if dst is not None:
            reports = [selftest(dst, source, seed=seed, device=device)]
        else:
            reports = every_format(seed, device, progress.update)
    ok = all(report.ok for report in reports)
    document = {"formats": [report.to_json() for report in reports]}
    return out.answer(document, lambda console: render_selftest(console, reports), ok=ok)


def every_format(seed: int, device: str, advance: Callable[[int, int, str], None]) -> list[SelftestReport]:
    """Run the self-test on a small checkpoint of every format, in a temporary folder."""
    from moeq.check.selftest import selftest
    from moeq.check.synthetic import RECIPES

    reports = []
    deployment = moeq.Deployment(gpu=moeq.gpu("H100"))
    with TemporaryDirectory(prefix="moeq-selftest-") as folder:
        for index, recipe in enumerate(RECIPES):
            advance(index, len(RECIPES), recipe.name)
            source, dst = Path(folder) / recipe.name, Path(folder) / f"{recipe.name}-converted"
            recipe.write(source, seed)
            moeq.convert(source, dst, deployment, layout=recipe.layout, force_layout=True)
            reports.append(selftest(dst, source, seed=seed, device=device))
    return reports
