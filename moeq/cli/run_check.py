"""`moeq run-check`: run fused kernels on converted weights and compare with the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.errors import ExitCode, MoeqError

if TYPE_CHECKING:
    from collections.abc import Sequence


def command(
    ctx: typer.Context,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Output of `moeq convert`.")],
    source: Annotated[
        str | None, typer.Option("--source", help="The checkpoint it came from [the one its manifest names].")
    ] = None,
    revision: options.RevisionOption = None,
    layers: Annotated[str | None, typer.Option("--layers", help="Layers, as 0,3,5-7 [all on a GPU].")] = None,
    experts: Annotated[str | None, typer.Option("--experts", help="Experts, as 0,3,5-7 [all on a GPU].")] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="Token counts, one run each, as 1,7,33.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random tokens.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cuda, or cpu (Triton's interpreter).")] = "auto",
    digests: Annotated[
        bool, typer.Option("--digests/--no-digests", help="Recompute the logical digest of every expert first.")
    ] = True,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Run fused kernels on converted weights against a float32 reference on the source's."""
    chosen = {
        name: numbers(name, text) for name, text in (("layers", layers), ("experts", experts), ("tokens", tokens))
    }
    from moeq.check.run_check import CheckOptions, run_check
    from moeq.cli.progress import ProgressReport
    from moeq.report.check_text import render

    out: Output = ctx.obj
    with ProgressReport(out, "run-check", unit="step", quiet=quiet or json) as progress:
        report = run_check(
            dst,
            source,
            revision=revision,
            options=CheckOptions(**chosen, seed=seed, device=device, digests=digests),
            progress=progress.update,
        )
    out.answer(report.to_json(), lambda console: render(console, report), ok=report.ok)
    if not report.ok:
        raise typer.Exit(ExitCode.NO)


def numbers(option: str, text: str | None) -> Sequence[int] | None:
    """`0,3,5-7` as `[0, 3, 5, 6, 7]`. Raises MoeqError `usage.numbers`."""
    if text is None:
        return None
    chosen: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise MoeqError("usage.numbers", f"--{option} {text}: '{word}' is not a number or a range", "as in 0,3,5-7")
        if dash and int(last) - int(first) > 1_000_000:
            raise MoeqError("usage.numbers", f"--{option} {text}: '{word}' names more than a million")
        chosen += range(int(first), int(last or first) + 1)
    if not chosen:
        raise MoeqError("usage.numbers", f"--{option} {text} names nothing", "as in 0,3,5-7")
    return chosen
