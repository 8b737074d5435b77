"""`moeq transcode`: the same values in another checkpoint format that engines load as it is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import completion, options, shards
from moeq.cli.conversion_report import ConversionReport
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport
from moeq.errors import MoeqError
from moeq.report.text import counted, human_bytes, print_rest

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.transcode.transcode import Transcoding

#: Lines printed for people; `--json` has all of them.
_SHOWN = 20


@options.with_transcode_options
def command(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or Hub repository org/name.")],
    dst: Annotated[Path | None, typer.Argument(metavar="DST", help="Folder to create.")] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="FORMAT",
            help="compressed-tensors, gptq, gptq_v2, mxfp4, deepseek-v4, fp8, modelopt, nvfp4, "
            "nvfp4-compressed-tensors, kt-amx-int4, kt-amx-int8, expert-pack, bf16, fp16 or fp32.",
            autocompletion=completion.targets,
        ),
    ] = "",
    choices: Any = None,
    check_only: Annotated[
        bool, typer.Option("--check-only", help="Transcode and compare in memory; write nothing.")
    ] = False,
    revision: options.RevisionOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier transcoding at DST.")] = False,
    shard: Annotated[
        str | None,
        typer.Option("--shard", metavar="I/N", help="Do shard I of N, counted from 0 (default: whatever is left)."),
    ] = None,
    executor: shards.ExecutorOption = "local",
    ray_address: shards.RayAddressOption = None,
    stream_source: shards.StreamOption = False,
    reread: options.RereadOption = False,
    workers: options.WorkersOption = None,
    max_memory: options.MaxMemoryOption = None,
    events: options.EventsOption = None,
    quiet: options.QuietOption = False,
    json: options.JsonOption = False,
) -> int:
    """Write the same values in another checkpoint format, which engines load directly. Exit 0: every value is equal."""
    from moeq.pipeline.run.resources import parse_size
    from moeq.transcode.naming import NAMES
    from moeq.transcode.target_formats import TARGETS
    from moeq.transcode.transcode import check, transcode

    out: Output = ctx.obj
    if not to:
        raise MoeqError("usage.target", "--to is missing", f"--to {', '.join(TARGETS)}")
    if choices["names"] not in NAMES:
        raise MoeqError("usage.names", f"--names {choices['names'][:60]!r} is none of {', '.join(NAMES)}")
    memory = None if max_memory is None else parse_size(max_memory)
    if check_only:
        with ProgressReport(out, "transcode", unit="step", quiet=quiet or json) as progress:
            found = check(
                src,
                to,
                revision=revision,
                workers=workers,
                max_memory=memory,
                advance=progress.update,
                **choices,
            )
    elif dst is None:
        raise MoeqError("usage.command-line", "DST is missing", "--check-only needs no DST")
    else:
        with ConversionReport(out, "transcode", dst, quiet=quiet or json, log=events) as report:
            found = transcode(
                src,
                dst,
                to,
                revision=revision,
                force=force,
                workers=workers,
                max_memory=memory,
                shard=shard,
                executor=executor,
                ray_address=ray_address,
                stream_source=stream_source,
                reread=reread,
                progress=report,
                **choices,
            )
    for text in found.warnings:
        out.warning(text)
    if found.left_out:
        shown = ", ".join(ascii(name) for name in found.left_out[:5])
        out.warning(f"these files are left out, since not every system allows such names: {shown}")
    ok = found.exact or choices["allow_lossy"]
    return out.answer(found.to_json(), lambda console: render(console, found), ok=ok)


def render(console: Console, found: Transcoding) -> None:
    """Print the answer for people."""
    plan = found.plan
    verb = "wrote" if found.written else f"did shard {found.shard} of" if found.shard else "would write"
    verb = "already done," if found.already_done else verb
    where = f" {found.destination}" if found.destination else ""
    size = human_bytes(plan.bytes_out)
    console.print(f"{verb}{where}: {counted(len(plan.files), 'file')}, {size}, {plan.target.title}")
    survey = plan.survey
    console.print(
        f"  content   experts of {counted(len(survey.layers), 'layer')}, "
        f"{counted(len(survey.modules), 'other quantised module')}; {counted(len(survey.copied), 'tensor')} copied"
    )
    if found.resumed_units:
        console.print(f"  resumed   {counted(found.resumed_units, 'unit')} had been finished before")
    for part, count in found.dropped.items():
        console.print(f"  dropped   {counted(count, 'tensor')} called {part}, for which the target has no place")
    for note in found.notes:
        console.print(f"  note      {note}")
    if found.shard is not None:
        console.print("  next      the same command without --shard publishes when all shards are done")
    elif found.exact:
        console.print(f"  proof     exact: {found.projections} of {found.projections} projections equal in every value")
    else:
        changed = {loss.module.removesuffix(".input_global_scale") for loss in found.losses}
        num_equal = found.projections - len(changed)
        console.print(f"  proof     not exact: {num_equal} of {found.projections} projections equal in every value")
    for loss in found.losses[:_SHOWN]:
        console.print(f"    {loss.text}")
    print_rest(console, len(found.losses), _SHOWN, indent=4)
