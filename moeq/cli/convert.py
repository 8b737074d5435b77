"""`moeq convert`: repack the experts of a checkpoint for a deployment."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options, shares
from moeq.cli.out import Output
from moeq.cli.plan import render_needs
from moeq.cli.push import BaseModelOption, PublicOption, open_push, push_conversion
from moeq.cli.push import document as pushed_document
from moeq.cli.push import render as render_pushed

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.pipeline.convert import Conversion
    from moeq.pipeline.plan_document import Needs
    from moeq.pipeline.push import Pushed


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
    layout: options.LayoutOption = None,
    skip_unfit: options.SkipUnfitOption = False,
    allow_lossy: options.AllowLossyOption = False,
    revision: options.RevisionOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier conversion at DST.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help="Do what `moeq plan -o FILE` said, or refuse.")
    ] = None,
    workers: options.WorkersOption = None,
    max_memory: options.MaxMemoryOption = None,
    shard: shares.ShardOption = None,
    executor: shares.ExecutorOption = "local",
    ray_address: shares.RayAddressOption = None,
    stream_source: shares.StreamOption = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="ORG/NAME", help="Upload the result to this repository of the Hub.")
    ] = None,
    public: PublicOption = False,
    base_model: BaseModelOption = None,
    events: options.EventsOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> None:
    """Repack expert weights into a backend's kernel layout, offline, on a CPU."""
    from moeq.cli.conversion_report import ConversionReport
    from moeq.pipeline.convert import convert
    from moeq.pipeline.plan_document import read_plan_digest
    from moeq.pipeline.run.resources import parse_size

    out: Output = ctx.obj
    with ConversionReport(out, "convert", quiet=quiet or json, log=events) as report:
        deployment = options.deployment(
            deploy, gpu=gpu, tp=tp, ep=ep, batched=batched, lora=lora, dtype=dtype, backend=backend, engine=engine
        )
        share = shares.parse(shard, push=push)
        target = open_push(push, base_model, public=public) if push is not None and not dry_run else None
        conversion = convert(
            src,
            dst,
            deployment,
            layout=layout,
            skip_unfit=skip_unfit,
            allow_lossy=allow_lossy,
            revision=revision,
            force=force,
            dry_run=dry_run,
            workers=workers,
            max_memory=None if max_memory is None else parse_size(max_memory),
            plan_digest=None if plan is None else read_plan_digest(plan),
            share=share,
            executor=executor,
            ray_address=ray_address,
            stream_source=stream_source,
            progress=report,
        )
        report.summarise(conversion)
        pushed = None
        if target is not None:
            pushed = push_conversion(out, dst, target, base_model, quiet=quiet or json)
            report.tell("pushed", **pushed_document(pushed))
    needs = _needs(conversion) if dry_run else None
    answer = {
        **document(conversion),
        "plan": _plan(conversion, needs),
        "push": None if pushed is None else pushed_document(pushed),
    }
    out.answer(answer, lambda console: render(console, conversion, pushed, needs))


def _needs(conversion: Conversion) -> Needs | None:
    """What a conversion that was only planned would need."""
    from moeq.pipeline.plan_document import needs_of

    if conversion.job is None or conversion.memory is None:
        return None
    return needs_of(conversion.job, conversion.memory)


def _plan(conversion: Conversion, needs: Needs | None) -> dict[str, Any] | None:
    from moeq.pipeline.plan_document import plan_document

    return None if conversion.job is None or needs is None else plan_document(conversion.job, needs)


def document(conversion: Conversion) -> dict[str, Any]:
    """The JSON document of a conversion."""
    plan, target, manifest = conversion.plan, conversion.verdict.convert, conversion.manifest
    layouts = list(dict.fromkeys(layer.entry.layout for layer in plan.layers))
    return {
        "destination": str(conversion.destination),
        "written": manifest is not None,
        "resumed_units": conversion.resumed_units,
        "shard": shares.document(conversion),
        "backend": conversion.backend,
        "layout": layouts[0],
        "layouts": layouts,
        "engine_flag": target.flag if target and target.layout == layouts[0] else None,
        "files": [{"name": file.name, "bytes": file.data_bytes} for file in plan.files],
        "layers": len(plan.layers),
        "sharding": [{"layer": layer.entry.layer, **asdict(layer.entry.sharding)} for layer in plan.layers],
        "copied": [asdict(row) for row in plan.copied],
        "expert_bytes_in": plan.expert_bytes_in,
        "expert_bytes_out": plan.expert_bytes_out,
        "padding_bytes": plan.padding_bytes,
        "rest_bytes": plan.rest_bytes,
        "losses": sum(entry.losses for entry in manifest.layers) if manifest else None,
        "kept_for_restore": list(manifest.restore.kept) if manifest and manifest.restore else None,
        "plan_digest": plan.digest,
        "advisories": [advisory.code for advisory in conversion.verdict.advisories],
    }


def render(console: Console, conversion: Conversion, pushed: Pushed | None = None, needs: Needs | None = None) -> None:
    """The same for people."""
    from rich.text import Text

    from moeq.report.text import human_bytes

    plan = conversion.plan
    verb = "wrote" if conversion.manifest or shares.ran(conversion) else "would write"
    head = (f"{verb} {shares.of(conversion)}{conversion.destination}", "bold")
    count = f"{'in all ' if conversion.share else ''}{len(plan.files)} files"
    console.print(Text.assemble(head, f": {count}, {human_bytes(plan.bytes_out)}"))
    layouts = ", ".join(dict.fromkeys(layer.entry.layout for layer in plan.layers))
    console.print(f"  backend   {conversion.backend}, layout {layouts}")
    console.print(
        f"  experts   {len(plan.layers)} layers, {human_bytes(plan.expert_bytes_in)} → "
        f"{human_bytes(plan.expert_bytes_out)} (padding {human_bytes(plan.padding_bytes)})"
    )
    for line in sharding_lines(conversion):
        console.print(f"  sharding  {line}")
    console.print(f"  the rest  {human_bytes(plan.rest_bytes)}, copied unchanged")
    for row in plan.copied:
        console.print(f"  copied    layer {row.layer}: {row.reason}")
    if conversion.resumed_units:
        console.print(f"  resumed   {conversion.resumed_units} units were already finished")
    if conversion.manifest is not None:
        _render_proof(console, conversion)
    target = conversion.verdict.convert
    if target and target.flag and target.layout == plan.layers[0].entry.layout:
        console.print(f"  start     vLLM with {target.flag}" + (f" ({target.why})" if target.why else ""))
    shares.render_next(console, conversion)
    if needs is not None:
        render_needs(console, conversion.plan, needs)
    if pushed is not None:
        render_pushed(console, pushed)


def sharding_lines(conversion: Conversion) -> list[str]:
    """What ranks read, where the deployment has several: one line per way of sharding."""
    found: dict[str, None] = {}
    for layer in conversion.plan.layers:
        sharding = layer.entry.sharding
        if sharding.axis is not None:
            found[f"{sharding.written}, {sharding.why}"] = None
    return list(found)


def _render_proof(console: Console, conversion: Conversion) -> None:
    manifest = conversion.manifest
    if manifest is None:
        return
    units = sum(shard.shard.experts.size for layer in conversion.plan.layers for shard in layer.shards) * 2
    losses = sum(entry.losses for entry in manifest.layers)
    if losses:
        console.print(f"  lossy     {losses} stored numbers were changed, as was allowed; the rest is proven equal")
    else:
        console.print(f"  proof     {units} of {units} packed matrices unpacked again and equal to the source")
    kept = len(manifest.restore.kept) if manifest.restore else 0
    if kept:
        console.print(f"  kept      {kept} source tensors verbatim, for `moeq restore`")
