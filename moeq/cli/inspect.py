"""`moeq inspect`: what a checkpoint holds, and which backend would run it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.errors import MoeqError

if TYPE_CHECKING:
    from moeq.deploy.deployment import Deployment
    from moeq.model import Checkpoint
    from moeq.oracle.records import Verdict


def command(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or Hub repository org/name.")],
    revision: options.RevisionOption = None,
    gpu: options.GpuOption = None,
    tp: options.TpOption = None,
    ep: options.EpOption = None,
    batched: options.BatchedOption = None,
    lora: options.LoraOption = None,
    dtype: options.DtypeOption = None,
    backend: options.BackendOption = None,
    engine: options.EngineOption = None,
    deploy: options.DeployOption = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every fact and every reason.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Say what a checkpoint holds, how it is quantised, and which backend would run it. Reads headers only."""
    import moeq
    from moeq.report.inspect_text import render

    out: Output = ctx.obj
    checkpoint = moeq.open(src, revision=revision)
    deployment = asked_deployment(
        deploy, gpu=gpu, tp=tp, ep=ep, batched=batched, lora=lora, dtype=dtype, backend=backend, engine=engine
    )
    verdict, no_verdict = decided(checkpoint, deployment)
    document: dict[str, Any] = {
        **checkpoint.info.to_json(),
        "kind": checkpoint.kind,
        "verdict": verdict.to_json() if verdict else None,
        "no_verdict": no_verdict,
    }
    out.answer(document, lambda console: render(console, checkpoint, verdict, no_verdict, verbose=verbose))


def asked_deployment(file: Path | None, **given: Any) -> Deployment | None:
    """The deployment the options describe, or None where no GPU is named and none is here: inspecting needs none."""
    try:
        return options.deployment(file, **given)
    except MoeqError as error:
        if error.code != "usage.no-gpu":
            raise
        return None


def decided(checkpoint: Checkpoint, deployment: Deployment | None) -> tuple[Verdict | None, str | None]:
    """The verdict, or why there is none."""
    from moeq.pipeline.decide import decide

    if checkpoint.kind == "converted":
        return None, "already converted: `moeq run-check` proves it"
    if deployment is None:
        return None, "no GPU here and none named: --gpu NAME asks the oracle"
    try:
        return decide(checkpoint, deployment), None
    except MoeqError as error:
        if deployment.backend != "auto":
            raise  # a backend was asked for that does not fit: that is the answer to this command too
        return None, error.message
