"""`moeq doctor`: a summary to paste into an issue."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeq.cli import options
from moeq.cli.fits import converted_deployment, fit_document, fit_lines
from moeq.cli.inspect import asked_deployment
from moeq.cli.out import Output
from moeq.deploy.detect import environment
from moeq.errors import MoeqError
from moeq.pipeline.plan.options import Question
from moeq.report.text import human_bytes, line

if TYPE_CHECKING:
    from rich.console import Console

    from moeq.pipeline.plan.decide import Answer


@options.with_deployment()
def command(
    ctx: typer.Context,
    given: Any,
    src: Annotated[
        str | None, typer.Argument(metavar="[SRC]", help="Checkpoint folder, or Hub repository org/name.")
    ] = None,
    revision: options.RevisionOption = None,
    json: options.JsonOption = False,
) -> int:
    """Show environment, checkpoint, verdict, engine flags, known defects, memory per rank, and what to do next."""
    out: Output = ctx.obj
    document: dict[str, Any] = {"environment": environment(), "checkpoint": None, "deployment": None, "fit": None}
    found, problem = (None, None) if src is None else _asked(src, revision, given, document)
    if problem is not None:
        document["problem"] = {"code": problem.code, "message": problem.message, "hint": problem.hint}
    unfit = document["fit"] is not None and not document["fit"]["runs"]
    code = out.answer(document, lambda console: render(console, document), ok=problem is None and not unfit)
    return code if problem is None or found is not None or unfit else problem.exit_code


def _asked(
    src: str, revision: str | None, given: options.GivenDeployment, document: dict[str, Any]
) -> tuple[Answer | None, MoeqError | None]:
    """Describe a checkpoint in `document`; return the answer about it, and the error that other commands raise."""
    from moeq.model import open as open_checkpoint
    from moeq.model.converted import ConvertedCheckpoint
    from moeq.pipeline.plan.commands import next_of_converted
    from moeq.pipeline.plan.decide import advised
    from moeq.report.advice import advice
    from moeq.transcode.advise import advise

    try:
        checkpoint = open_checkpoint(src, revision=revision)
    except MoeqError as error:
        return None, error
    info = checkpoint.info
    document["checkpoint"] = {
        "name": info.name,
        "revision": info.revision,
        "kind": checkpoint.kind,
        "identity": checkpoint.source.identity(),
        "architecture": info.architecture,
        "model_type": info.model_type,
        "layers": info.num_layers,
        "experts": info.num_experts,
        "top_k": info.top_k,
        "hidden_size": info.hidden_size,
        "intermediate_size": info.intermediate_size,
        "schemes": [use.title for use in info.schemes],
        "bytes": info.expert_bytes + info.other_bytes,
        "odd": [f"{warning.code}: {warning.message}" for warning in info.warnings],
    }
    if isinstance(checkpoint, ConvertedCheckpoint):
        document["checkpoint"]["next"] = next_of_converted(shlex.quote(src), checkpoint)
        document["fit"] = fit_document(checkpoint, converted_deployment(checkpoint, given))
        return None, None
    deployment = asked_deployment(given)
    if deployment is None:
        return None, None
    found = advised(checkpoint, Question(deployment))
    unusable = (fault for layer in info.moe_layers for fault in checkpoint.scale_faults(layer) if fault.is_stored)
    document["checkpoint"]["odd"] += [f"data.activation-scale: {fault.text}" for fault in unusable]
    facts = document["deployment"] = advice(src, checkpoint, found)
    transcoding = None if found.verdict.ok else advise(checkpoint, deployment, src)
    facts["transcode"] = None if transcoding is None else transcoding.to_json()
    if transcoding is not None:
        facts["lines"].append(("transcode", transcoding.text))
    return found, found.error


def render(console: Console, document: dict[str, Any]) -> None:
    """Print the summary."""
    console.print("moeq doctor", style="bold")
    for label, text in document["environment"].items():
        line(console, label, str(text))
    checkpoint, deployment = document["checkpoint"], document["deployment"]
    if checkpoint is not None:
        line(console, "checkpoint", f"{checkpoint['name']} ({checkpoint['kind']}), {human_bytes(checkpoint['bytes'])}")
        line(console, "model", f"{checkpoint['architecture']} ({checkpoint['model_type']})")
        sizes = f"{checkpoint['layers']} layers, {checkpoint['experts']} experts, top {checkpoint['top_k'] or '?'}"
        widths = f"hidden {checkpoint['hidden_size']}, intermediate {checkpoint['intermediate_size']}"
        line(console, "sizes", f"{sizes}, {widths}")
        line(console, "schemes", ", ".join(checkpoint["schemes"]))
        line(console, "identity", checkpoint["identity"])
        for text in checkpoint["odd"]:
            line(console, "odd", text, "yellow")
    for label, text in (deployment or {}).get("lines", ()):
        line(console, label, text)
    for label, text in fit_lines(document["fit"]) if document["fit"] else ():
        line(console, label, text)
    problem = document.get("problem")
    if problem is not None:
        line(console, "problem", f"{problem['message']} ({problem['code']})", "red")
        if problem["hint"]:
            line(console, "next", problem["hint"])
    elif checkpoint is None:
        line(console, "next", "moeq doctor SRC --gpu NAME --tp N adds a checkpoint, the verdict and what to do")
    elif deployment is None and checkpoint["kind"] == "source":
        line(console, "next", "no GPU here and none named: --gpu NAME adds the verdict")
    elif document["fit"] is None and deployment is None:
        line(console, "next", checkpoint["next"])
