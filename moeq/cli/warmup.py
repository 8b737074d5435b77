"""`moeq warmup`: compile the kernels of a converted checkpoint before it is served."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.load.warmup import WarmUp


@options.with_deployment()
def command(
    ctx: typer.Context,
    dst: Annotated[str, typer.Argument(metavar="DST", help="Output of `moeq convert`.")],
    given: Any,
    max_tokens: Annotated[
        int,
        typer.Option("--max-tokens", min=1, help="Largest number of tokens per call (an engine's tokens per step)."),
    ] = 16384,
    revision: options.RevisionOption = None,
    json: options.JsonOption = False,
) -> None:
    """Compile every kernel that serving DST needs, in parallel, into the cache on disk. Needs no GPU with --gpu."""
    from moeq.load.ranks import Rank
    from moeq.load.torch_loader import open_converted
    from moeq.load.warmup import kernel_gpu, warm_up

    out: Output = ctx.obj
    deployment = given.make()
    found = warm_up(
        open_converted(dst, revision),
        gpu=kernel_gpu(deployment.gpu) if given.options["gpu"] else None,
        rank=Rank(tp_size=deployment.tp, ep_size=deployment.ep),
        dtype=deployment.dtype,
        max_tokens=max_tokens,
    )
    out.answer(asdict(found), lambda console: render(console, found))


def render(console: Console, found: WarmUp) -> None:
    """The answer for people."""
    for kind in found.kinds:
        console.print(f"{len(kind.layers)} layers: {kind.what}")
    console.print(f"{found.kernels} kernels, {found.compiled} compiled now, {found.seconds:.1f} s")
