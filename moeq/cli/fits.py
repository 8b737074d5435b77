"""Whether a converted checkpoint runs on a deployment that was asked about, for `inspect` and `doctor`."""

from __future__ import annotations

import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.pipeline.plan.options import Question, Ranks

if TYPE_CHECKING:
    from moeq.cli.options import GivenDeployment
    from moeq.model.converted import ConvertedCheckpoint


def converted_deployment(checkpoint: ConvertedCheckpoint, given: GivenDeployment) -> Deployment | None:
    """Return the deployment that is asked about, for the GPU of the conversion unless another is named.

    Returns:
        None if no option was given.
    """
    if given.empty:
        return None
    own = Deployment.from_json(checkpoint.manifest.deployment)
    if "gpu" in given.named:
        return given.make()
    return replace(given.make(gpu=own.gpu.arch), gpu=own.gpu)


def converted_problem(checkpoint: ConvertedCheckpoint, deployment: Deployment) -> MoeqError | None:
    """Return why the bytes do not serve a deployment, with the conversion that would; None if they do."""
    from moeq.load.ranks import Rank, plan_rank
    from moeq.load.torch_loader import require_arch, uneven_unit
    from moeq.pipeline.plan.layer_verdict import heads_problem

    ranks = Ranks.of(deployment.tp, deployment.ep)
    try:
        require_arch(checkpoint, deployment.gpu.arch)
        heads = heads_problem(checkpoint, deployment)
        if heads is not None:
            raise MoeqError("usage.tp", heads)
        for entry in checkpoint.manifest.layers:
            for number in range(max(ranks.tp, ranks.ep)):
                rank = Rank(0, 1, number, ranks.ep) if ranks.ep > 1 else Rank(number, ranks.tp)
                plan_rank(entry, rank, uneven_unit(checkpoint, entry.layer))
    except MoeqError as error:
        return MoeqError(error.code, error.message, _conversion(checkpoint, deployment, error))
    return None


def _conversion(checkpoint: ConvertedCheckpoint, deployment: Deployment, error: MoeqError) -> str | None:
    """Return the command that converts the source for a deployment, or the hint of the refusal."""
    from moeq.model import open as open_checkpoint
    from moeq.pipeline.plan.commands import convert_command
    from moeq.pipeline.plan.decide import advised

    source = checkpoint.manifest.source
    try:
        found = advised(open_checkpoint(source.name, revision=source.revision), Question(deployment), brief=True)
    except (MoeqError, OSError):
        flags = [f"--{name} {size}" for name in ("tp", "ep") if (size := getattr(deployment, name)) > 1]
        command = " ".join(["moeq convert SRC DST", f"--gpu {shlex.quote(deployment.gpu.name)}", *flags])
        return f"{command}, if the source {source.name} fits there"
    return convert_command(shlex.quote(source.name), found) if found.ok and found.error is None else error.hint


def fit_document(checkpoint: ConvertedCheckpoint, deployment: Deployment | None) -> dict[str, Any] | None:
    """Return the answer as JSON; None if nothing was asked."""
    from moeq.pipeline.plan.commands import loaders_of_manifest, serve_converted

    if deployment is None:
        return None
    problem = converted_problem(checkpoint, deployment)
    where = f"{deployment.gpu.name}, TP {deployment.tp}" + (f", EP {deployment.ep}" if deployment.ep > 1 else "")
    name = shlex.quote(checkpoint.info.name)
    names = loaders_of_manifest(checkpoint.manifest)
    serve = serve_converted(name, checkpoint.info.dtype, deployment, names) if problem is None else problem.hint
    return {
        "deployment": where,
        "runs": problem is None,
        "code": None if problem is None else problem.code,
        "reason": None if problem is None else problem.message,
        "next": serve,
    }


def fit_lines(fit: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the answer as labels and texts."""
    answer = "runs there" if fit["runs"] else f"does not run there: {fit['reason']} ({fit['code']})"
    return [(fit["deployment"], answer), *([("next", fit["next"])] if fit["next"] else [])]
