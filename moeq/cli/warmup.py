"""`moeq warmup`: compile the kernels of a converted checkpoint before it is served."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.report.text import counted

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.checkpoint.manifest import Manifest
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
    """Compile every kernel that serving DST needs, in parallel, into the cache on disk. Needs no GPU with --gpu.

    Without --tp, --ep and --dp, the ranks are those that DST was converted for. --dtype has the same default.
    """
    from moeq.load.torch_loader import open_converted
    from moeq.load.warmup import kernel_gpu, warm_up
    from moeq.oracle.engines.vllm.outcome import derive_dp

    out: Output = ctx.obj
    named = given.named
    checkpoint = open_converted(dst, revision)
    deployment = derive_dp(served(given, checkpoint.manifest))
    found = warm_up(
        checkpoint,
        gpu=kernel_gpu(deployment.gpu) if "gpu" in named else None,
        # Ranks that share an expert.
        tp=1 if deployment.ep > 1 else deployment.tp * deployment.dp * deployment.pcp,
        ep=deployment.ep,
        dtype=deployment.dtype,
        max_tokens=max_tokens * deployment.dp,  # engines gather the tokens of all data-parallel ranks
    )
    out.answer(asdict(found), lambda console: render(console, found))


def served(given: options.GivenDeployment, manifest: Manifest) -> Deployment:
    """Return the deployment that was given; ranks and dtype default to those of the conversion."""
    converted, named = Deployment.from_json(manifest.deployment), given.named
    ranks = {"tp", "ep", "dp"}
    missing = set() if named.keys() & ranks else ranks
    if "dtype" not in named:
        missing = missing | {"dtype"}
    try:
        return given.make(**{name: getattr(converted, name) for name in missing})
    except MoeqError as error:
        if error.code != "usage.no-gpu":
            raise
        hint = f"DST was converted for {converted.gpu.name}: --gpu {shlex.quote(converted.gpu.name)}, or name another"
        raise MoeqError(error.code, error.message, hint) from None


def render(console: Console, found: WarmUp) -> None:
    """Print the answer for people."""
    for kind in found.kinds:
        console.print(f"{counted(len(kind.layers), 'layer')}: {kind.what}")
    console.print(f"{counted(found.kernels, 'kernel')}, {found.compiled} compiled now, {found.seconds:.1f} s")
