"""Transcodings that an engine takes although it refuses the checkpoint: planned from headers, judged by the oracle."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.activation_scales import has_static_scale
from moeq.oracle.records import Verdict
from moeq.oracle.versions import BUILTIN
from moeq.pipeline.plan.calibration import with_scales
from moeq.pipeline.plan.expert_names import known_class, with_names
from moeq.pipeline.plan.layer_verdict import first_layer, heads_problem, judge_checkpoint
from moeq.transcode.naming import NamesOption
from moeq.transcode.planned_result import planned_result
from moeq.transcode.survey import RecodedProjection, TranscodeRequest
from moeq.transcode.target_formats import ENGINE_TARGETS, TARGETS, kind_of
from moeq.transcode.transcode_plan import TranscodePlan, make_transcode_plan

#: Group sizes that are tried if tensor parallelism may cut groups.
_GROUPS = (64, 32, 16)

#: Spellings in the order in which they are tried.
_NAMES: tuple[NamesOption, ...] = ("source", "per-expert", "mlp", "block-sparse-moe", "stacked")
#: Gate that fails if the engine's class does not load the experts' names.
_NAMES_GATE = "G12"

#: Fate of the values: all stay; the file is written only if all stay; values that do not fit are rounded.
Proof = Literal["exact", "checked", "rounded"]
_PROOFS: dict[Proof, str] = {
    "exact": "every value stays",
    "checked": "written only if every value fits",
    "rounded": "values that do not fit are rounded once",
}


@dataclass(frozen=True)
class Advice:
    """A transcoding that the engine would take."""

    command: str  #: command line that writes it
    backend: str  #: backend that would run it
    proof: Proof  #: fate of the values

    @property
    def text(self) -> str:
        return f"{self.command} ({self.backend} takes it; {_PROOFS[self.proof]})"

    def to_json(self) -> dict[str, Any]:
        return {"command": self.command, "backend": self.backend, "proof": self.proof}


def advise(checkpoint: Checkpoint, deployment: Deployment, src: str | None = None) -> Advice | None:
    """Find a transcoding that an engine takes on a deployment where it refuses the source checkpoint.

    The first exact transcoding is taken, else the first whose exactness depends on the data, else one with rounding.
    None if nothing helps: the engine is moeq's own, which reads every format, or does not refuse because of the format.
    """
    if deployment.engine == BUILTIN or heads_problem(checkpoint, deployment) is not None:
        return None
    found: dict[Proof, Advice] = {}
    stored = checkpoint.experts(first_layer(checkpoint)).layer
    # The loader of an unknown class may look for stacks, as the source has them.
    stacked = stored.fused and known_class(checkpoint.info.architecture, deployment.engine) is None
    for request in _requests(src or checkpoint.source.name, checkpoint, deployment):
        for names in _NAMES:
            try:
                plan = make_transcode_plan(checkpoint, replace(request, names=names))
            except MoeqError:
                continue
            if stacked and not any(layer.naming.stacked for layer in plan.survey.layers):
                continue
            proof = _proof(plan)
            if proof is None or proof in found:
                break  # other names would not change that
            verdict = _judged(checkpoint, plan, deployment)
            if verdict.ok and verdict.chosen is not None:
                found[proof] = Advice(_command(plan.request, proof), verdict.chosen.backend, proof)
            if verdict.failed_gates != {_NAMES_GATE}:
                break
        if "exact" in found:
            break
    return next((found[proof] for proof in _PROOFS if proof in found), None)


def _requests(src: str, checkpoint: Checkpoint, deployment: Deployment) -> Iterator[TranscodeRequest]:
    """Yield the transcodings to try, in order.

    The source's own format comes first, in case only names are in the way; then compressed-tensors, also with finer
    groups; then other formats; at last floats of the deployment's dtype.
    """
    revision = checkpoint.source.revision
    own = _own_format(checkpoint)
    if own is not None and own != "compressed-tensors":
        yield TranscodeRequest(src, own, revision)
    yield TranscodeRequest(src, "compressed-tensors", revision)
    if deployment.tp > 1 and deployment.ep == 1:
        for group in _GROUPS:
            yield TranscodeRequest(src, "compressed-tensors", revision, regroup=group)
    for name, target in ENGINE_TARGETS.items():
        if target.element is None and name != "compressed-tensors":
            yield TranscodeRequest(src, name, revision)
    yield TranscodeRequest(src, "bf16" if deployment.dtype == "bf16" else "fp16", revision)


def _command(request: TranscodeRequest, proof: Proof) -> str:
    options = [f"--revision {shlex.quote(request.revision)}"] if request.revision else []
    options += [f"--regroup {request.regroup}"] if request.regroup else []
    options += [f"--names {request.names}"] if request.names != "source" else []
    options += ["--allow-lossy"] if proof == "rounded" else []
    return " ".join([f"moeq transcode {shlex.quote(request.src)} DST --to {request.to}", *options])


def _proof(plan: TranscodePlan) -> Proof | None:
    """Return the fate of the values by headers; None for transcodings to advise against (integers as FP8 blocks)."""
    kinds = {found for layer in plan.survey.layers for expert in layer.kinds.values() for found in expert.values()}
    kinds |= {module.projected for module in plan.survey.modules}
    if all(_exact(projected, plan) for projected in kinds):
        return "exact"
    integers = any(kind_of(projected.source) == "int" for projected in kinds)
    if plan.target.element is not None:
        return "rounded" if integers else "checked"
    recoded = any(projected.spec.element != projected.source.spec.element for projected in kinds)
    return None if integers and recoded else "checked"


def _exact(projected: RecodedProjection, plan: TranscodePlan) -> bool:
    """Return whether the target holds every value for any data."""
    before, after = projected.source.spec, projected.spec
    if (before.element, before.scale_dtype) != (after.element, after.scale_dtype):
        return False
    if projected.spelling == "gptq":  # readers of version 1 disagree about zero points of 0
        return before.symmetric or plan.request.to == "gptq_v2"
    if "fp8-block" in projected.spelling:  # scales per channel are scales per block if 128 of them are equal
        return kind_of(projected.source) == "fp8-block"
    return projected.spelling != "ct-nvfp4"  # the reciprocal of the global scale, which it stores, may be rounded


def _own_format(checkpoint: Checkpoint) -> str | None:
    """Return the target that writes the source's own format; None if there is none."""
    config = checkpoint.quantization_config or {}
    method = str(config.get("quant_method", ""))
    if method == "gptq" and config.get("checkpoint_format") == "gptq_v2":
        return "gptq_v2"
    return method if method in TARGETS else None


def _judged(checkpoint: Checkpoint, plan: TranscodePlan, deployment: Deployment) -> Verdict:
    """Return the verdict on the transcoded checkpoint, with the names of its experts and its other modules."""
    result, layer = planned_result(checkpoint, plan), first_layer(checkpoint)
    verdict = with_names(result, judge_checkpoint(result, deployment, layer, explain=False), layer)
    if not has_static_scale(result.scheme_of(layer)):
        return verdict
    faulty = next((number for number in plan.layers_by_number if checkpoint.scale_faults(number)), layer)
    return with_scales(checkpoint, verdict, faulty)  # scales are carried over, and so are their faults
