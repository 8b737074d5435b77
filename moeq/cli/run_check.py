"""`moeq run-check`: run fused kernels on converted weights and compare with the reference."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeq.api.engine_backends import run_engine_check
from moeq.cli import options
from moeq.cli.files import require_writable, write_text
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport
from moeq.deploy.deployment import Deployment
from moeq.deploy.detect import environment
from moeq.errors import ExitCode, MoeqError
from moeq.report import html as page
from moeq.report import junit as xml
from moeq.report.backend_matrix import backend_matrix
from moeq.report.html import Provenance
from moeq.report.text import human_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from moeq.check.results import CheckReport
    from moeq.check.run_check import CheckOptions
    from moeq.check.tile_picture import TilePicture
    from moeq.check.workload import Workload
    from moeq.report.backend_matrix import BackendMatrix


def command(
    ctx: typer.Context,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Output of `moeq convert`.")],
    source: Annotated[
        str | None, typer.Option("--source", help="Checkpoint that was converted (default: the one in the manifest).")
    ] = None,
    revision: options.RevisionOption = None,
    layers: Annotated[str | None, typer.Option("--layers", help="Layers, as 0,3,5-7 (default: all on a GPU).")] = None,
    experts: Annotated[
        str | None, typer.Option("--experts", help="Experts, as 0,3,5-7 (default: all on a GPU).")
    ] = None,
    tokens: Annotated[str | None, typer.Option("--tokens", help="Token counts, one run each, as 1,7,33.")] = None,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the random tokens.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cuda, or cpu (Triton's interpreter).")] = "auto",
    digests: Annotated[
        bool, typer.Option("--digests/--no-digests", help="Recompute the logical digest of every expert first.")
    ] = True,
    kernels: Annotated[
        bool, typer.Option("--kernels/--digests-only", help="Run kernels, or check digests alone (no GPU, no triton).")
    ] = True,
    fp8_activations: Annotated[
        bool,
        typer.Option("--fp8-activations", help="Also bound the cost of e4m3 activations, which FP8 weights run with."),
    ] = False,
    jobs: Annotated[
        int | None,
        typer.Option("--jobs", "-j", min=1, help="Layers at a time on a CPU (default: by the amount of work)."),
    ] = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine", help="moeq, or vllm: the backend that vLLM selects for the source, where it is installed."
        ),
    ] = "moeq",
    all_backends: Annotated[
        bool, typer.Option("--all-backends", help="With --engine vllm: every eligible backend.")
    ] = False,
    html: options.HtmlOption = None,
    junit: Annotated[Path | None, typer.Option("--junit", help="Also write JUnit XML for CI.")] = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> int:
    """Run fused kernels on converted weights, and compare with a float32 reference on the source's weights."""
    layer_ids, expert_ids, counts = numbers("layers", layers), numbers("experts", experts), numbers("tokens", tokens)
    for path in (html, junit):
        if path is not None:
            require_writable(path)
    from moeq.check.run_check import CheckOptions, prepare_device, run_check
    from moeq.report.check_text import render

    out: Output = ctx.obj
    chosen = CheckOptions(
        layers=layer_ids,
        experts=expert_ids,
        tokens=counts,
        seed=seed,
        device=device,
        digests=digests,
        kernels=kernels,
        jobs=jobs,
        activation_dtype="fp8" if fp8_activations else "",
    )
    if engine != "moeq" or all_backends:
        return _in_engine(out, (dst, source, revision), chosen, engine, every=all_backends)
    if kernels:
        prepare_device(device)
    with ProgressReport(out, "run-check", unit="step", quiet=quiet or json) as progress:
        report = run_check(
            dst,
            source,
            revision=revision,
            options=chosen,
            progress=progress.update,
            announce=None if quiet or json else lambda found: _announce(out, found),
        )
    unwritten = _write_files(report, dst, html, junit, " ".join(sys.argv[1:]))
    document = {**report.to_json(), "reports_not_written": [error.message for error in unwritten]}
    code = out.answer(document, lambda console: render(console, report), ok=report.ok and not unwritten)
    for error in unwritten:
        out.warning(f"{error.message}; the result above is still valid")
    if not report.ok:
        out.annotate("error", "run-check failed", "\n".join(complaints(report)))
    return ExitCode.ENVIRONMENT if report.ok and unwritten else code


def _in_engine(
    out: Output, paths: tuple[str, str | None, str | None], chosen: CheckOptions, engine: str, *, every: bool
) -> ExitCode:
    """Run the engine's backends instead of moeq's kernels."""
    from moeq.report.check_text import render_backends

    dst, source, revision = paths
    report = run_engine_check(dst, source, engine=engine, all_backends=every, revision=revision, options=chosen)
    return out.answer(report.to_json(), lambda console: render_backends(console, report.backends), ok=report.ok)


def _announce(out: Output, found: Workload) -> None:
    """Say how long a check on a CPU will take if that is long, and which check is short."""
    from moeq.check.workload import ANNOUNCED_SECONDS

    if found.seconds > ANNOUNCED_SECONDS:
        short = f"{found.smallest} takes about {human_seconds(found.smallest_seconds)}"
        out.note(f"run-check: about {human_seconds(found.seconds)} in Triton's interpreter (an estimate); {short}")


def complaints(report: CheckReport) -> list[str]:
    """List what is wrong, the digests first."""
    mismatches = [row.text for row in report.digest_mismatches]
    return mismatches + [text for result in report.results for text in result.complaints]


def _write_files(report: CheckReport, dst: str, html: Path | None, junit: Path | None, command: str) -> list[MoeqError]:
    """Write the reports that go into files; returns what could not be written, so that no result is lost."""
    renderers: list[tuple[Path | None, Callable[[], str]]] = [
        (html, lambda: page.render(report, *_illustrations(dst), provenance=_provenance(dst, command))),
        (junit, lambda: xml.render(report)),
    ]
    unwritten = []
    for path, render in renderers:
        if path is not None:
            try:
                write_text(path, render())
            except MoeqError as error:
                unwritten.append(error)
    return unwritten


def _provenance(dst: str, command: str) -> Provenance:
    """Say when, by what and from what a report was made."""
    from moeq.checkpoint.manifest import read_manifest

    manifest = read_manifest(Path(dst))
    facts = environment()
    return Provenance(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        command=f"moeq {command}",
        versions=f"moeq {facts['moeq']}; {facts['packages']}",
        source=f"{manifest.source.name}, identity {manifest.source.identity}",
        experts={entry.layer: entry.num_experts for entry in manifest.layers},
    )


def _illustrations(dst: str) -> tuple[BackendMatrix | None, TilePicture | None]:
    """Return what a page shows besides the results: the oracle's answers at other sizes, and the layout's tile."""
    from moeq.check.tile_picture import tile_picture
    from moeq.checkpoint.manifest import read_manifest
    from moeq.model import open as open_checkpoint

    converted, manifest = open_checkpoint(dst), read_manifest(Path(dst))
    entry = manifest.layers[0]
    try:
        matrix = backend_matrix(converted, Deployment.from_json(manifest.deployment))
    except MoeqError:
        matrix = None  # only an illustration: a deployment that the oracle no longer knows must not fail a check
    return matrix, tile_picture(entry.layout, entry.matrices["w2"].spec)


def numbers(option: str, text: str | None) -> Sequence[int] | None:
    """Parse `0,3,5-7` to `[0, 3, 5, 6, 7]`. Raises MoeqError `usage.numbers`."""
    if text is None:
        return None
    chosen: list[int] = []
    for word in text.split(","):
        first, dash, last = word.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise MoeqError("usage.numbers", f"--{option} {text}: '{word}' is not a number or a range", "as in 0,3,5-7")
        if dash and int(last) - int(first) > 1_000_000:
            raise MoeqError("usage.numbers", f"--{option} {text}: '{word}' names more than a million numbers")
        chosen += range(int(first), int(last or first) + 1)
    if not chosen:
        raise MoeqError("usage.numbers", f"--{option} {text} names nothing", "as in 0,3,5-7")
    return chosen
