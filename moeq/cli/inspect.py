"""`moeq inspect`: what a checkpoint holds, and which backend would run it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.out import Output
from moeq.errors import MoeqError

if TYPE_CHECKING:
    from moeq.checkpoint.warning import CheckpointWarning
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
    scan: Annotated[
        bool, typer.Option("--scan", help="Also read every expert's scales, zero points and group indices.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every fact and every reason.")] = False,
    json: options.JsonOption = False,
) -> None:
    """Say what a checkpoint holds, how it is quantised, and which backend would run it. Reads headers only."""
    from moeq.model import open as open_checkpoint
    from moeq.model.sharding import shard_fits
    from moeq.report.inspect_text import render

    out: Output = ctx.obj
    checkpoint = open_checkpoint(src, revision=revision)
    deployment = asked_deployment(
        deploy, gpu=gpu, tp=tp, ep=ep, batched=batched, lora=lora, dtype=dtype, backend=backend, engine=engine
    )
    verdict, no_verdict = decided(checkpoint, deployment)
    found = scanned(out, checkpoint) if scan else None
    document: dict[str, Any] = {
        **checkpoint.info.to_json(),
        "kind": checkpoint.kind,
        "shards": [asdict(fit) for fit in shard_fits(checkpoint.spec(checkpoint.info.moe_layers[0], "w2"))],
        "scan": None if found is None else [asdict(warning) for warning in found],
        "verdict": verdict.to_json() if verdict else None,
        "no_verdict": no_verdict,
    }
    out.answer(
        document,
        lambda console: render(console, checkpoint, verdict, no_verdict, verbose=verbose, found=found or ()),
    )


def scanned(out: Output, checkpoint: Checkpoint) -> list[CheckpointWarning]:
    """What the data of the experts shows beyond the headers."""
    from moeq.cli.progress import ProgressReport
    from moeq.model.scan import scan

    if checkpoint.kind == "converted":
        raise MoeqError("usage.scan", "--scan reads source checkpoints", "moeq verify DST re-proves a converted one")
    with ProgressReport(out, "scan", unit="layer", quiet=out.json_mode) as progress:
        return scan(checkpoint, lambda done, total: progress.update(done, total, ""))


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
    from moeq.pipeline.plan.decision import decide

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
