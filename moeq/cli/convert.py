"""`moeq convert`: repack the experts of a checkpoint for a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.pipeline.convert import Conversion


def command(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or Hub repository org/name.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create.")],
    gpu: options.GpuOption = None,
    tp: options.TpOption = None,
    ep: options.EpOption = None,
    batched: options.BatchedOption = None,
    lora: options.LoraOption = None,
    dtype: options.DtypeOption = None,
    backend: options.BackendOption = None,
    engine: options.EngineOption = None,
    deploy: options.DeployOption = None,
    revision: options.RevisionOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier conversion at DST.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Repack expert weights into a backend's kernel layout, offline, on a CPU."""
    from moeq.cli.progress import ProgressReport
    from moeq.pipeline.convert import convert

    out: Output = ctx.obj
    deployment = options.deployment(
        deploy, gpu=gpu, tp=tp, ep=ep, batched=batched, lora=lora, dtype=dtype, backend=backend, engine=engine
    )
    with ProgressReport(out, "convert", quiet=quiet or json) as report:
        conversion = convert(
            src,
            dst,
            deployment,
            revision=revision,
            force=force,
            dry_run=dry_run,
            progress=lambda event: report.update(event.done, event.total, event.label),
        )
    out.answer(document(conversion), lambda console: render(console, conversion))


def document(conversion: Conversion) -> dict[str, Any]:
    """The JSON document of a conversion."""
    plan, target = conversion.plan, conversion.verdict.convert
    return {
        "destination": str(conversion.destination),
        "written": conversion.manifest is not None,
        "resumed_files": conversion.resumed_files,
        "backend": target.backend if target else None,
        "layout": target.layout if target else None,
        "engine_flag": target.flag if target else None,
        "files": [{"name": file.name, "bytes": file.data_bytes} for file in plan.files],
        "layers": len(plan.layers),
        "expert_bytes_in": plan.expert_bytes_in,
        "expert_bytes_out": plan.expert_bytes_out,
        "padding_bytes": plan.padding_bytes,
        "rest_bytes": plan.rest_bytes,
        "plan_digest": plan.digest,
        "advisories": [advisory.code for advisory in conversion.verdict.advisories],
    }


def render(console: Console, conversion: Conversion) -> None:
    """The same for people."""
    from moeq.report.text import human_bytes

    plan, target = conversion.plan, conversion.verdict.convert
    if target is None:
        return
    units = sum(layer.entry.num_experts for layer in plan.layers) * 2
    verb = "would write" if conversion.manifest is None else "wrote"
    console.print(
        f"[bold]{verb} {conversion.destination}[/]: {len(plan.files)} files, {human_bytes(plan.bytes_out)}", markup=True
    )
    console.print(f"  backend   {target.backend}, layout {target.layout}")
    console.print(
        f"  experts   {len(plan.layers)} layers, {human_bytes(plan.expert_bytes_in)} → "
        f"{human_bytes(plan.expert_bytes_out)} (padding {human_bytes(plan.padding_bytes)})"
    )
    console.print(f"  the rest  {human_bytes(plan.rest_bytes)}, copied unchanged")
    if conversion.resumed_files:
        console.print(f"  resumed   {conversion.resumed_files} files were already finished")
    if conversion.manifest is not None:
        console.print(f"  proof     {units} of {units} packed matrices unpacked from the file and equal to the source")
    if target.flag:
        console.print(f"  start     vLLM with {target.flag}" + (f" ({target.why})" if target.why else ""))
