"""`moeq plan`: what a conversion would do, unit by unit, and what it needs."""

from __future__ import annotations

from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.report.text import counted, human_bytes, human_seconds, line

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.pipeline.plan.conversion_plan import Plan
    from moeq.pipeline.plan.job import Job
    from moeq.pipeline.plan_document import Needs


#: Disk rate that estimates assume, in bytes per second, as of a cloud's network disk. Local disks are faster.
DISK_RATE = 300 * 2**20


@options.with_deployment()
def command(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or Hub repository org/name.")],
    given: Any,
    choices: Any,
    revision: options.RevisionOption = None,
    workers: options.WorkersOption = None,
    max_memory: options.MaxMemoryOption = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the plan here, as JSON.")
    ] = None,
    json: options.JsonOption = False,
) -> None:
    """Say what `convert` would read, write and need; `convert --plan FILE` carries out exactly that or refuses."""
    from moeq.digest import default_workers
    from moeq.pipeline.convert import plan
    from moeq.pipeline.plan_document import needs_of, plan_document, write_plan
    from moeq.pipeline.run.resources import parse_size, plan_memory

    out: Output = ctx.obj
    ceiling = None if max_memory is None else parse_size(max_memory)
    job = plan(src, given.make(), revision=revision, **asdict(choices))
    memory = plan_memory(job, job.plan.units, workers or default_workers(), ceiling)
    needs = needs_of(job, memory)
    document = plan_document(job, needs)
    if output is not None:
        write_plan(output, document)
    warn_slow(out)
    warn_overridden(out, job)
    warn_of_scales(out, job)
    out.answer(document, lambda console: render(console, job, needs))


def warn_slow(out: Output) -> None:
    """Warn that packing will be slow if numba is not installed."""
    if find_spec("numba") is None:
        out.warning("numba is not installed: packing takes about 20 times as long (pip install numba)")


def warn_overridden(out: Output, job: Job) -> None:
    """Warn about what `--force-layout` overrides."""
    for text in job.answer.overridden:
        out.warning(f"--force-layout overrides: {text}")


def warn_of_scales(out: Output, job: Job) -> None:
    """Warn of activation scales that are missing or unusable."""
    from moeq.pipeline.plan.calibration import conversion_warning

    text = conversion_warning(job.checkpoint, job.answer.layouts)
    if text is not None:
        out.warning(text)


def render(console: Console, job: Job, needs: Needs) -> None:
    """Print the plan for people."""
    from moeq.oracle.loaders import loads_in
    from moeq.report.verdict_text import rounding_text

    layouts = ", ".join(dict.fromkeys(layer.entry.layout for layer in job.plan.layers))
    console.print(job.checkpoint.source.name, style="bold")
    line(console, "backend", f"{job.answer.backend}, layout {layouts}")
    convert = job.answer.verdict.convert
    if convert and convert.rounding:
        line(console, "", rounding_text(convert.rounding))
    line(console, "loads in", loads_in(job.answer.loaders))
    render_needs(console, job.plan, needs)


def render_needs(console: Console, plan: Plan, needs: Needs) -> None:
    """Print units and what they need: totals, then one line per kind."""
    memory = needs.memory
    read = sum(unit.bytes_in for unit in plan.units)
    peak, base, per_worker = (human_bytes(size) for size in (memory.peak, memory.base, memory.per_worker))
    lines = {
        "units": f"{len(plan.units)}, which read {human_bytes(read)} and write {human_bytes(plan.bytes_out)}",
        "padding": human_bytes(plan.padding_bytes),
        "memory": f"{peak}: {base} + {counted(memory.workers, 'worker')} x {per_worker}",
        "disk": f"{human_bytes(needs.disk_bytes)} in {counted(len(plan.files), 'weight file')} and files beside them",
        **_stream_line(needs),
        "time": _time(plan, needs),
        "plan": plan.digest,
    }
    for name, text in lines.items():
        line(console, name, text)
    console.print(
        f"  {'units':<24} {'path':<9} {'count':>6} {'read':>11} {'written':>11} {'padding':>11} {'memory':>11}"
    )
    for kind in needs.kinds:
        sizes = (kind.bytes_in, kind.bytes_out, kind.padding_bytes, kind.memory)
        cells = " ".join(f"{human_bytes(size):>11}" for size in sizes)
        console.print(f"  {kind.title:<24} {kind.way:<9} {kind.count:>6} {cells}")


def _time(plan: Plan, needs: Needs) -> str:
    """Say how long a conversion takes: the longer of the time to pack and the time of a disk of DISK_RATE."""
    moved = sum(unit.bytes_in for unit in plan.units) + plan.bytes_out
    disk = f"{human_seconds(moved / DISK_RATE)} to read and write at {human_bytes(DISK_RATE)}/s"
    workers = counted(needs.memory.workers, "worker")
    return f"the longer of {human_seconds(needs.seconds)} to pack with {workers} and {disk} (estimates)"


def _stream_line(needs: Needs) -> dict[str, str]:
    """Say how much has to be downloaded if the source is a repository."""
    if needs.stream is None:
        return {}
    fetched, peak = human_bytes(needs.stream.fetched_bytes), human_bytes(needs.stream.peak_bytes)
    return {"source": f"{fetched} to download; with --stream-source at most {peak} on disk at once"}
