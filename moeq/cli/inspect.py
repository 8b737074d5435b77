"""`moeq inspect`: what a checkpoint holds, which backend would run it, and what `convert` would make of it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.files import require_writable, write_text
from moeq.cli.fits import converted_deployment, fit_document, fit_lines
from moeq.cli.out import Output
from moeq.cli.progress import ProgressReport
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.plan.options import Question
from moeq.report.backend_matrix import TP_SIZES

if TYPE_CHECKING:
    from moeq.checkpoint.warning import CheckpointWarning
    from moeq.model import Checkpoint
    from moeq.pipeline.plan.decide import Answer, LayerGroup


@options.with_deployment()
def command(
    ctx: typer.Context,
    src: Annotated[str, typer.Argument(metavar="SRC", help="Checkpoint folder, or Hub repository org/name.")],
    given: Any,
    revision: options.RevisionOption = None,
    scan: Annotated[
        bool, typer.Option("--scan", help="Also read every expert's scales, zero points and group indices.")
    ] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Every fact and every reason.")] = False,
    html: options.HtmlOption = None,
    json: options.JsonOption = False,
) -> int:
    """Say what a checkpoint holds, how it is quantised, and which backend would run it. Reads little but headers.

    With deployment options, the exit code is that of a refusal of `convert`; 0 where there is nothing to convert.
    """
    from moeq.model import open as open_checkpoint
    from moeq.pipeline.plan.decide import degrees, rank_backends
    from moeq.report.inspect_text import Inspection, render

    out: Output = ctx.obj
    if html is not None:
        require_writable(html)
    checkpoint = open_checkpoint(src, revision=revision)
    fit = _fit(checkpoint, given)
    deployment = asked_deployment(given)
    if html is not None:
        write_text(html, _page(checkpoint, deployment))
    findings = scan_experts(out, checkpoint) if scan else None
    found, no_verdict = decided(checkpoint, deployment)
    sizes = () if checkpoint.kind == "converted" else degrees(checkpoint, deployment)
    ranking = rank_backends(checkpoint, found, found.parts[0]) if found is not None else None
    document: dict[str, Any] = {
        **checkpoint.info.to_json(),
        "kind": checkpoint.kind,
        "conversion": _conversion(checkpoint),
        "shards": [asdict(degree) for degree in sizes],
        "scan": None if findings is None else [asdict(warning) for warning in findings],
        "verdict": None if found is None else verdict_document(found, found.parts[0]),
        "no_verdict": no_verdict,
        "converts": None if found is None else found.ok,
        "loads_in": None if found is None else [loader.title for loader in found.loaders],
        "ranking": None if ranking is None else ranking.to_json(),
        "fit": fit,
    }
    inspection = Inspection(
        checkpoint, found, no_verdict, sizes, findings or (), fit_lines(fit) if fit else (), ranking
    )
    code = _exit_code(given, found, fit)
    out.answer(document, lambda console: render(console, inspection, verbose=verbose), ok=code == ExitCode.OK)
    return code


def _exit_code(given: options.GivenDeployment, found: Answer | None, fit: dict[str, Any] | None) -> ExitCode:
    """Return the exit code of a refusal for the deployment asked about; 0 where the source is served as it is."""
    if fit is not None:
        return ExitCode.OK if fit["runs"] else ExitCode.NO
    error = None if found is None or given.empty else found.error
    return ExitCode.OK if error is None or error.code == "answer.nothing-to-convert" else error.exit_code


def _fit(checkpoint: Checkpoint, given: options.GivenDeployment) -> dict[str, Any] | None:
    """Return whether a converted checkpoint runs on the deployment that is asked about; None if none is."""
    from moeq.model.converted import ConvertedCheckpoint

    if not isinstance(checkpoint, ConvertedCheckpoint):
        return None
    return fit_document(checkpoint, converted_deployment(checkpoint, given))


def _page(checkpoint: Checkpoint, deployment: Deployment | None) -> str:
    """Render backends by GPU: the one that was asked about, then common ones."""
    from moeq.report.oracle_page import DEVICES, render

    checkpoint.require_source()
    base = deployment or Deployment(gpu=parse_gpu(DEVICES[0]))
    gpus = {gpu.name: gpu for gpu in (*([] if deployment is None else [base.gpu]), *map(parse_gpu, DEVICES))}
    return render(checkpoint, base, list(gpus.values()), TP_SIZES)


def scan_experts(out: Output, checkpoint: Checkpoint) -> list[CheckpointWarning]:
    """Read the data of the experts and return what it shows beyond the headers."""
    from moeq.model.scan import scan

    if checkpoint.kind == "converted":
        raise MoeqError("usage.scan", "--scan reads source checkpoints", "moeq verify DST re-proves a converted one")
    with ProgressReport(out, "scan", unit="layer", quiet=out.json_mode) as progress:
        return scan(checkpoint, lambda done, total: progress.update(done, total, ""))


def asked_deployment(given: options.GivenDeployment) -> Deployment | None:
    """Return the deployment that the options describe, or None without a GPU: inspecting needs none."""
    try:
        return given.make()
    except MoeqError as error:
        if error.code != "usage.no-gpu":
            raise
        return None


def decided(checkpoint: Checkpoint, deployment: Deployment | None) -> tuple[Answer | None, str | None]:
    """Return the answer, or why there is none. A forced backend that does not fit is an error here too."""
    from moeq.pipeline.plan.decide import advised, without_loss

    if checkpoint.kind == "converted":
        return None, "already converted"
    if deployment is None:
        return None, "no GPU here and none named: --gpu NAME asks the oracle"
    found = advised(checkpoint, Question(deployment), explain=True)
    if found.error is not None and deployment.backend != "auto":
        raise found.error
    return without_loss(checkpoint, found), None


def verdict_document(found: Answer, part: LayerGroup) -> dict[str, Any]:
    """Return a verdict, with what is known beyond the engine's rules: what works, what would load it."""
    return {
        **part.verdict.to_json(),
        "nearest": found.error.hint if found.error else None,
        "loads_in": [loader.title for loader in part.choice.loaders] if part.choice else [],
    }


def _conversion(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Describe a converted folder."""
    from moeq.model.converted import ConvertedCheckpoint

    if not isinstance(checkpoint, ConvertedCheckpoint):
        return None
    manifest = checkpoint.manifest
    return {
        "moeq_version": manifest.moeq_version,
        "source": {"name": manifest.source.name, "revision": manifest.source.revision},
        "identity": manifest.source.identity,
        "backend": manifest.backend,
        "layouts": list(dict.fromkeys(layer.layout for layer in manifest.layers)),
        "deployment": manifest.deployment,
        "sharding": [{"layer": layer.layer, **asdict(layer.sharding)} for layer in manifest.layers],
        "copied": [asdict(row) for row in manifest.copied],
        "loads_in": list(manifest.loads_in),
    }
