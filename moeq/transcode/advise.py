"""Transcodings that an engine takes although it refuses the checkpoint: planned from headers, judged as written."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from moeq.deploy.deployment import Deployment
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.activation_scales import has_static_scale
from moeq.oracle.engines.vllm.expert_names import EXPERT, StoredName
from moeq.oracle.judge import judge
from moeq.oracle.records import Verdict
from moeq.oracle.versions import BUILTIN
from moeq.pipeline.plan.calibration import with_scales
from moeq.pipeline.plan.expert_names import known_class, order_of
from moeq.pipeline.plan.layer_verdict import first_layer, heads_problem, judge_checkpoint, moe_shape
from moeq.transcode.naming import NamesOption
from moeq.transcode.planned_result import planned_result
from moeq.transcode.survey import LayerSurvey, Projected, TranscodeRequest
from moeq.transcode.target_formats import ENGINE_TARGETS, TARGETS, kind_of
from moeq.transcode.transcode_plan import TranscodePlan, make_transcode_plan

#: Group sizes that are tried if tensor parallelism may cut groups.
_GROUPS = (64, 32, 16)

#: Spellings in the order in which they are tried.
_NAMES: tuple[NamesOption, ...] = ("source", "per-expert", "mlp", "block-sparse-moe", "stacked")

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

    command: str
    backend: str
    proof: Proof

    @property
    def text(self) -> str:
        """One line for people."""
        return f"{self.command} ({self.backend} takes it; {_PROOFS[self.proof]})"

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return {"command": self.command, "backend": self.backend, "proof": self.proof}


def advise(checkpoint: Checkpoint, deployment: Deployment, src: str | None = None) -> Advice | None:
    """Find a transcoding that an engine takes on a deployment where it refuses the source checkpoint.

    The first exact one, else the first that depends on the data, else floats. None if nothing helps: the engine is
    moeq's own, which reads every format, or what it refuses is not the format.
    """
    if deployment.engine == BUILTIN or heads_problem(checkpoint, deployment) is not None:
        return None
    found: dict[Proof, Advice] = {}
    for request in _requests(src or checkpoint.source.name, checkpoint, deployment):
        for names in _NAMES:
            try:
                plan = make_transcode_plan(checkpoint, replace(request, names=names))
            except MoeqError:
                continue
            proof = _proof(plan)
            verdict = _judged(checkpoint, plan, deployment) if proof and proof not in found else None
            if proof is None or verdict is None or verdict.chosen is None:
                break  # names do not change that
            if _is_loaded(checkpoint, plan, verdict.engine):
                if _runs_whole(checkpoint, plan, deployment):
                    found[proof] = Advice(_command(plan.request, proof), verdict.chosen.backend, proof)
                break
        if "exact" in found:
            break
    return next((found[proof] for proof in _PROOFS if proof in found), None)


def _requests(src: str, checkpoint: Checkpoint, deployment: Deployment) -> Iterator[TranscodeRequest]:
    """Yield transcodings to try.

    First the source's own format, in case only names are in the way; then compressed-tensors, also with finer groups;
    then other formats; at last floats of the deployment's type.
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
    """Return what headers tell about the values; None for what no one should do (integers as FP8 blocks)."""
    kinds = {found for layer in plan.survey.layers for expert in layer.kinds.values() for found in expert.values()}
    kinds |= {module.projected for module in plan.survey.modules}
    if all(_exact(projected, plan) for projected in kinds):
        return "exact"
    integers = any(kind_of(projected.source) == "int" for projected in kinds)
    if plan.target.element is not None:
        return "rounded" if integers else "checked"
    recoded = any(projected.spec.element != projected.source.spec.element for projected in kinds)
    return None if integers and recoded else "checked"


def _exact(projected: Projected, plan: TranscodePlan) -> bool:
    """Return whether the target holds every value, whatever the data are."""
    before, after = projected.source.spec, projected.spec
    if (before.element, before.scale_dtype) != (after.element, after.scale_dtype):
        return False
    if projected.spelling == "gptq":  # version 1 has no zero point of 0 that all its readers agree about
        return before.symmetric or plan.request.to == "gptq_v2"
    if "fp8-block" in projected.spelling:  # scales per channel are scales per block if 128 of them are equal
        return kind_of(projected.source) == "fp8-block"
    return projected.spelling != "ct-nvfp4"  # which stores the reciprocal of the global scale


def _own_format(checkpoint: Checkpoint) -> str | None:
    """Return the target that writes the source's own format; None if there is none."""
    config = checkpoint.quantization_config or {}
    method = str(config.get("quant_method", ""))
    if method == "gptq" and config.get("checkpoint_format") == "gptq_v2":
        return "gptq_v2"
    return method if method in TARGETS else None


def _judged(checkpoint: Checkpoint, plan: TranscodePlan, deployment: Deployment) -> Verdict | None:
    """Judge the first layer as it would be written; None if it is not transcoded."""
    layer = first_layer(checkpoint)
    written = plan.layers_by_number.get(layer)
    if written is None:
        return None
    projection, projected = next(iter(written.kinds[0].items()))
    scheme = plan.described[projected, projection].scheme
    shape, prefix = moe_shape(checkpoint, layer), written.naming.prefix
    verdict = judge(scheme, shape, deployment, config=plan.config, prefix=prefix, explain=False)
    if not has_static_scale(scheme):
        return verdict
    faulty = next((number for number in plan.layers_by_number if checkpoint.scale_faults(number)), layer)
    return with_scales(checkpoint, verdict, faulty)  # scales are carried over, with what is wrong about them


def _is_loaded(checkpoint: Checkpoint, plan: TranscodePlan, engine: str) -> bool:
    """Return whether the engine's model class loads the first layer under the names that it would have."""
    layer = first_layer(checkpoint)
    written, stored = plan.layers_by_number[layer], checkpoint.experts(layer).layer
    known = known_class(checkpoint.info.architecture, engine)
    if known is None:  # its loader may look for what the source has
        return not stored.fused or written.naming.stacked
    return known.problem(written_names(written, f"{stored.stack}.{stored.layer}.")) is None


def _runs_whole(checkpoint: Checkpoint, plan: TranscodePlan, deployment: Deployment) -> bool:
    """Return whether the engine takes everything that would be written, modules that are no experts included."""
    result = planned_result(checkpoint, plan)
    return judge_checkpoint(result, deployment, first_layer(checkpoint), explain=False).ok


def written_names(written: LayerSurvey, layer: str) -> Iterator[StoredName]:
    """Yield names and forms under which a layer is written. `layer`: path of the layer, with a dot at its end."""
    naming = written.naming
    for projection, projected in written.kinds[0].items():
        if not naming.stacked:
            yield StoredName(f"{naming.prefix}.{EXPERT}.{naming.spelled[projection]}".removeprefix(layer))
            continue
        for part in projected.signatures:
            alternate = naming.interleaved and projection == "gate_up"
            known = projected.spec.bits > 8 or "weight" not in projected.signatures
            order = order_of(alternate=alternate, transposed=naming.transposed, known=known)
            yield StoredName(naming.tensor(projection, 0, part).removeprefix(layer), order)
