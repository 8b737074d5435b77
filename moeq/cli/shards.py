"""Options that say where and in which shards a conversion runs, and what a shard reports."""

from __future__ import annotations

import os
import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.errors import MoeqError

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.pipeline.convert import Conversion
    from moeq.pipeline.run.work_shards import WorkShard

WHERE = "Where it runs"

ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Do shard I of N (from 0) only, for `moeq finalize`; auto takes Slurm's, Kubernetes', ... variables.",
        rich_help_panel=WHERE,
    ),
]
ExecutorOption = Annotated[
    str, typer.Option("--executor", help="local, or ray: a cluster whose nodes see DST.", rich_help_panel=WHERE)
]
RayAddressOption = Annotated[
    str | None,
    typer.Option(
        "--ray-address",
        metavar="HOST:PORT",
        help="Address of the Ray cluster (default: the one found, else a local one).",
        rich_help_panel=WHERE,
    ),
]
StreamOption = Annotated[
    bool,
    typer.Option(
        "--stream-source", help="Download one source file at a time and delete it after use.", rich_help_panel=WHERE
    ),
]


def parse(shard: str | None, *, push: str | None) -> WorkShard | None:
    """Parse the shard that `--shard` names, if it is given.

    Raises MoeqError `usage.shard`, `usage.shard-launcher`, `usage.push-shard`.
    """
    if shard is None:
        return None
    from moeq.pipeline.run.work_shards import parse_shard

    if push is not None:
        raise MoeqError(
            "usage.push-shard",
            f"--push with --shard {shard}: a shard is not a whole conversion",
            "moeq push DST ORG/NAME after moeq finalize DST",
        )
    return parse_shard(shard, os.environ)


def document(conversion: Conversion) -> dict[str, Any] | None:
    """Return JSON about a shard; None if the command was not limited to a shard."""
    run = conversion.shard
    if run is None:
        return None
    return {
        "index": run.shard.index,
        "count": run.shard.count,
        "units": run.units,
        "bytes_out": run.bytes_out,
        "done": run.done,
    }


def is_done(conversion: Conversion) -> bool:
    """Return whether a shard was done."""
    return conversion.shard is not None and conversion.shard.done


def title(conversion: Conversion) -> str:
    """Return `shard 3/8 (17 of 122 units) of `, or nothing."""
    run = conversion.shard
    return "" if run is None else f"shard {run.shard} ({run.units} of {len(conversion.plan.units)} units) of "


def render_next(console: Console, conversion: Conversion) -> None:
    """Print what comes after a shard."""
    if is_done(conversion):
        from moeq.report.text import line

        line(console, "next", f"when all shards are done: moeq finalize {shlex.quote(str(conversion.destination))}")
