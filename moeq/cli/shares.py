"""Options that say where and in which shares a conversion runs, and what a share reports."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.errors import MoeqError

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.pipeline.convert import Conversion
    from moeq.pipeline.run.shares import Share

WHERE = "Where it runs"

ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard",
        metavar="I/N",
        help="Do share I of N (from 0) only, for `moeq finalize`; auto takes Slurm's, Kubernetes', ... variables.",
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


def parse(shard: str | None, *, push: str | None) -> Share | None:
    """Parse the share that `--shard` names, if it is given.

    Raises:
        MoeqError: `usage.shard`, `usage.shard-launcher`, `usage.push-share`.
    """
    if shard is None:
        return None
    from moeq.pipeline.run.shares import parse_share

    if push is not None:
        raise MoeqError(
            "usage.push-share",
            f"--push with --shard {shard}: a share is not a whole conversion",
            "moeq push DST ORG/NAME after moeq finalize DST",
        )
    return parse_share(shard, os.environ)


def document(conversion: Conversion) -> dict[str, Any] | None:
    """Return JSON about a share; None where everything was to be done."""
    run = conversion.share
    if run is None:
        return None
    return {
        "index": run.share.index,
        "count": run.share.count,
        "units": run.units,
        "bytes_out": run.bytes_out,
        "done": run.done,
    }


def ran(conversion: Conversion) -> bool:
    """Return whether a share was done."""
    return conversion.share is not None and conversion.share.done


def of(conversion: Conversion) -> str:
    """Return `share 3/8 (17 of 122 units) of `, or nothing."""
    run = conversion.share
    return "" if run is None else f"share {run.share} ({run.units} of {len(conversion.plan.units)} units) of "


def render_next(console: Console, conversion: Conversion) -> None:
    """Print what comes after a share."""
    if ran(conversion):
        console.print(f"  next      when all shares are done: moeq finalize {conversion.destination}")
