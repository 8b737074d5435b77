"""`moeq convert`: repack the experts of a checkpoint for a deployment."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options, shards
from moeq.cli.conversion_report import ConversionReport
from moeq.cli.out import Output
from moeq.cli.plan import render_needs, warn_of_scales, warn_overridden, warn_slow
from moeq.cli.push import BaseModelOption, PublicOption, push_conversion
from moeq.cli.push import document as pushed_document
from moeq.cli.push import render as render_pushed
from moeq.errors import listed
from moeq.report.text import counted, human_bytes, line

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.deploy.deployment import Deployment
    from moeq.pipeline.convert import Conversion
    from moeq.pipeline.plan.job import Job
    from moeq.pipeline.plan.options import ConvertOptions
    from moeq.pipeline.plan_document import Needs
    from moeq.pipeline.push import Pushed


@options.with_deployment()
def command(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or Hub repository org/name.")],
    dst: Annotated[Path, typer.Argument(metavar="DST", help="Folder to create.")],
    given: Any,
    choices: Any,
    revision: options.RevisionOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier conversion at DST.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be written; write nothing.")] = False,
    plan: Annotated[
        Path | None,
        typer.Option(
            "--plan",
            metavar="FILE",
            help="Carry out the plan that `moeq plan -o FILE` wrote; refuse if it no longer applies.",
        ),
    ] = None,
    workers: options.WorkersOption = None,
    max_memory: options.MaxMemoryOption = None,
    shard: shards.ShardOption = None,
    executor: shards.ExecutorOption = "local",
    ray_address: shards.RayAddressOption = None,
    stream_source: shards.StreamOption = False,
    reread: options.RereadOption = False,
    push: Annotated[
        str | None, typer.Option("--push", metavar="ORG/NAME", help="Upload the result to this repository of the Hub.")
    ] = None,
    public: PublicOption = False,
    base_model: BaseModelOption = None,
    sign: options.SignOption = None,
    events: options.EventsOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> None:
    """Repack expert weights into a backend's kernel layout, offline, on a CPU."""
    from moeq.pipeline.convert import convert
    from moeq.pipeline.plan_document import needs_of, plan_document
    from moeq.pipeline.run.resources import parse_size
    from moeq.report.publishing import open_push

    out: Output = ctx.obj
    warn_slow(out)
    with ConversionReport(out, "convert", dst, quiet=quiet or json, log=events) as report:
        deployment, chosen, digest = (given.make(), choices, None) if plan is None else _planned(plan, given, choices)
        work_shard = shards.parse(shard, push=push)
        target = open_push(push, base_model, public=public) if push is not None and not dry_run else None
        conversion = convert(
            src,
            dst,
            deployment,
            revision=revision,
            force=force,
            dry_run=dry_run,
            workers=workers,
            max_memory=None if max_memory is None else parse_size(max_memory),
            plan_digest=digest,
            shard=work_shard,
            executor=executor,
            ray_address=ray_address,
            stream_source=stream_source,
            reread=reread,
            sign=sign,
            progress=report,
            **asdict(chosen),
        )
        report.summarise(conversion)
        pushed = None
        if target is not None:
            pushed = push_conversion(out, dst, target, base_model, sign, quiet=quiet or json)
            report.tell("pushed", **pushed_document(pushed))
    planned = needs = None
    if dry_run and not conversion.already_done and conversion.memory is not None:
        needs = needs_of(conversion.job, conversion.memory)
        planned = plan_document(conversion.job, needs)
    warn_overridden(out, conversion.job)
    warn_of_scales(out, conversion.job)
    _warn_of_code(out, conversion.job)
    answer = {
        **document(conversion),
        "plan": planned,
        "push": None if pushed is None else pushed_document(pushed),
    }
    out.answer(answer, lambda console: render(console, conversion, pushed, needs))


def _warn_of_code(out: Output, job: Job) -> None:
    """Warn that a conversion copies Python code of its source."""
    if job.side_files.unusable:
        shown = ", ".join(ascii(name) for name in job.side_files.unusable[:5])
        out.warning(f"these files are left out, since not every system allows such names: {shown}")
    code, left_out = job.side_files.code, job.side_files.no_code
    if code and not left_out:
        advice = "engines run it where they are told to; --no-code drops it"
        out.warning(f"the source's code is copied: {listed(code)}; {advice}")


def _planned(path: Path, given: options.GivenDeployment, own: ConvertOptions) -> tuple[Deployment, ConvertOptions, str]:
    """Return deployment, options and digest of a plan's file; options of the command line come first."""
    from moeq.pipeline.plan_document import read_plan

    plan = read_plan(path)
    if plan.request is None:  # written by an older version
        return given.make(), own, plan.digest
    deployment = plan.request.deployment if given.empty else given.make()
    changed = {name: value for name, value in asdict(own).items() if value not in (None, False)}
    return deployment, replace(plan.request.options, **changed), plan.digest


def document(conversion: Conversion) -> dict[str, Any]:
    """Return the JSON document of a conversion."""
    plan, target, manifest = conversion.plan, conversion.verdict.convert, conversion.manifest
    layouts = list(dict.fromkeys(layer.entry.layout for layer in plan.layers))
    return {
        "destination": str(conversion.destination),
        "written": manifest is not None,
        "already_done": conversion.already_done,
        "resumed_units": conversion.resumed_units,
        "shard": shards.document(conversion),
        "backend": conversion.backend,
        "layout": layouts[0],
        "layouts": layouts,
        "loads_in": [loader.title for loader in conversion.loaders],
        "overridden": list(conversion.job.answer.overridden),
        "engine_flag": target.flag if target and target.layout == layouts[0] else None,
        "next": _next(conversion),
        "files": [{"name": file.name, "bytes": file.data_bytes} for file in plan.files],
        "layers": len(plan.layers),
        "sharding": [{"layer": layer.entry.layer, **asdict(layer.entry.sharding)} for layer in plan.layers],
        "copied": [asdict(row) for row in plan.copied],
        "expert_bytes_in": plan.expert_bytes_in,
        "expert_bytes_out": plan.expert_bytes_out,
        "padding_bytes": plan.padding_bytes,
        "rest_bytes": plan.rest_bytes,
        "losses": sum(entry.losses for entry in manifest.layers) if manifest else None,
        "code": list(conversion.job.side_files.code),
        "kept_for_restore": list(manifest.restore.kept) if manifest and manifest.restore else None,
        "plan_digest": plan.digest,
        "advisories": [advisory.code for advisory in conversion.verdict.advisories],
    }


def render(console: Console, conversion: Conversion, pushed: Pushed | None = None, needs: Needs | None = None) -> None:
    """Print a conversion for people."""
    from rich.text import Text

    plan = conversion.plan
    head = (f"{_what_happened(conversion)} {shards.title(conversion)}{conversion.destination}", "bold")
    count = f"{'in all ' if conversion.shard else ''}{counted(len(plan.files), 'file')}"
    console.print(Text.assemble(head, f": {count}, {human_bytes(plan.bytes_out)}"))
    layouts = ", ".join(dict.fromkeys(layer.entry.layout for layer in plan.layers))
    if conversion.already_done:
        line(console, "same", _comparison_text(conversion))
    line(console, "backend", f"{conversion.backend}, layout {layouts}")
    sizes = f"{human_bytes(plan.expert_bytes_in)} → {human_bytes(plan.expert_bytes_out)}"
    line(
        console, "experts", f"{counted(len(plan.layers), 'layer')}, {sizes} (padding {human_bytes(plan.padding_bytes)})"
    )
    for text in regrouping_lines(conversion):
        line(console, "groups", text)
    for text in sharding_lines(conversion):
        line(console, "sharding", text)
    line(console, "the rest", f"{human_bytes(plan.rest_bytes)}, copied unchanged")
    for row in plan.copied:
        line(console, "copied", f"layer {row.layer}: {row.reason}")
    if conversion.resumed_units:
        line(console, "resumed", f"{counted(conversion.resumed_units, 'unit')} had been finished before")
    if conversion.manifest is not None and not conversion.already_done:
        _render_proof(console, conversion)
    _render_loading(console, conversion)
    shards.render_next(console, conversion)
    if needs is not None:
        render_needs(console, conversion.plan, needs)
    if pushed is not None:
        render_pushed(console, pushed)
    following = _next(conversion)
    if following is not None:
        line(console, "next", following)


def _next(conversion: Conversion) -> str | None:
    """Return the command that serves a finished conversion; None if it is not finished, or if nothing loads it."""
    from moeq.pipeline.plan.commands import serve_converted

    job = conversion.job
    if conversion.manifest is None:
        return None
    names = [loader.name for loader in conversion.loaders]
    place = shlex.quote(str(conversion.destination))
    return serve_converted(place, job.checkpoint.info.dtype, job.request.deployment, names)


def _what_happened(conversion: Conversion) -> str:
    """Return the words before the folder's name that say what happened to it."""
    if conversion.already_done:
        return "already done,"
    return "wrote" if conversion.manifest or shards.is_done(conversion) else "would write"


def _comparison_text(conversion: Conversion) -> str:
    """Say what was compared with the folder that exists, and which command compares everything."""
    source = conversion.job.checkpoint.source.name
    compare = shlex.join(["moeq", "verify", str(conversion.destination), "--source", source])
    return f"plan, headers and a sample of the weights are those of the folder's source; {compare} compares everything"


def regrouping_lines(conversion: Conversion) -> list[str]:
    """List the groups that were cut into smaller ones: one line per size."""
    rows = [layer.entry for layer in conversion.plan.layers if layer.entry.source_group is not None]
    sizes = dict.fromkeys((row.source_group, row.matrices["w2"].spec.group_size) for row in rows)
    return [f"of {old} written as groups of {new} that repeat the scale: the same values" for old, new in sizes]


def _render_loading(console: Console, conversion: Conversion) -> None:
    """Print what loads the result, and how to start transformers on it."""
    from moeq.oracle.loaders import loads_in

    target, loaders = conversion.verdict.convert, conversion.loaders
    line(console, "loads in", loads_in(loaders))
    if target and target.why:
        line(console, "", target.why)
    names = {loader.name for loader in loaders}
    if "transformers" in names:
        line(console, "start", "transformers after `import moeq.engines.transformers`: without it, loading stops")


def sharding_lines(conversion: Conversion) -> list[str]:
    """Say what each rank reads where the deployment has several: one line per way of sharding."""
    shardings = (layer.entry.sharding for layer in conversion.plan.layers)
    return list(dict.fromkeys(f"{found.written}, {found.why}" for found in shardings if found.axis is not None))


def _render_proof(console: Console, conversion: Conversion) -> None:
    from moeq.layouts.registry import layout_class

    manifest = conversion.manifest
    if manifest is None:
        return
    units = sum(shard.shard.experts.size for layer in conversion.plan.layers for shard in layer.shards) * 2
    losses = sum(entry.losses for entry in manifest.layers)
    if losses:
        lossy = (layout_class(entry.layout) for entry in manifest.layers if entry.losses)
        note = ", and as the engine itself changes them at load" if all(one.lossy_as_engine for one in lossy) else ""
        line(console, "lossy", f"{losses} stored numbers were changed, as was allowed{note}; the rest is proven equal")
    else:
        line(console, "proof", f"{units} of {units} packed matrices unpacked again and equal to the source")
    kept = len(manifest.restore.kept) if manifest.restore else 0
    if kept:
        line(console, "kept", f"{counted(kept, 'source tensor')} verbatim, for `moeq restore`")
