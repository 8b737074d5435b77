"""Check a planned transcoding: whether vLLM loads and runs it by moeq's oracle, and transformers finds its names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import takewhile

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.oracle.records import Verdict
from moeq.pipeline.plan.calibration import faults_text
from moeq.pipeline.plan.decide import group_alike_layers
from moeq.pipeline.plan.expert_names import with_names
from moeq.pipeline.plan.layer_verdict import judge_checkpoint, moe_shape
from moeq.pipeline.plan.linear_modules import unfit_modules
from moeq.spelling import option, together
from moeq.transcode.naming import family_naming
from moeq.transcode.planned_result import planned_result
from moeq.transcode.target_formats import ENGINE_TARGETS
from moeq.transcode.transcode_plan import TranscodePlan, make_transcode_plan

#: GPUs, at least one of which has to run the result.
GPUS = ("H100", "B200", "A100", "MI300X")


def warnings(checkpoint: Checkpoint, plan: TranscodePlan) -> tuple[str, ...]:
    """Return warnings: vLLM runs the result on none of the GPUs, or transformers does not find names of the result.

    Raises MoeqError `usage.target` if the engine cannot load the written experts, whatever the GPU.
    """
    if plan.target.experts_only:
        return ()
    known = (fault for layer in plan.survey.layers for fault in checkpoint.scale_faults(layer.layer))
    faults = [fault for fault in known if not fault.is_stored]
    found = [f"{faults_text(faults)}: static activation scales of these layers are left out"] if faults else []
    refused = engine_refusal(checkpoint, plan)
    if refused is not None:
        remedy = _working_target(checkpoint, plan)
        if refused.unloadable:
            text = f"{option('to', plan.target.id)}: engines would not load the result: {refused.text}"
            raise MoeqError("usage.target", text, remedy)
        works = f"; {remedy} works" if remedy else ""
        found.append(f"vLLM runs the result on none of {', '.join(GPUS)}: {refused.text}{works}")
    floats = plan.target.element is not None
    for layer in plan.survey.layers:
        own = family_naming(checkpoint.experts(layer.layer), plan.survey.family, floats=floats)
        if own is not None and own.tensor("down", 0, "weight") != layer.naming.tensor("down", 0, "weight"):
            names = f"{layer.naming.tensor('down', 0, 'weight')}, and transformers looks for "
            found.append(f"experts are called {names}{own.tensor('down', 0, 'weight')}: leave out {option('names')}")
            break
    return tuple(found)


def with_loadable_modules(checkpoint: Checkpoint, plan: TranscodePlan) -> TranscodePlan:
    """Return the plan in which modules beside the experts become floats if vLLM cannot load them in the target format.

    Floats keep every value. The plan is returned unchanged if one of the GPUs runs it, or if floats do not help.
    """
    if plan.target.experts_only or plan.target.element is not None:
        return plan
    layer, verdicts = _refused_layer(checkpoint, plan)
    verdict = next((one for one in verdicts if one.failed_gates == {"G14"}), None)
    if layer is None or verdict is None:
        return plan
    result = planned_result(checkpoint, plan)
    shape = moe_shape(result, result.info.moe_layers[0])
    unfit = unfit_modules(result, verdict.engine, verdict.deployment, shape)
    names = tuple(one.source.name for one in plan.survey.modules if one.written in unfit)
    loadable = make_transcode_plan(checkpoint, plan.request, names)
    return plan if _refused_layer(checkpoint, loadable)[1] else loadable


@dataclass(frozen=True)
class Refusal:
    """Why no GPU's vLLM runs a result."""

    text: str
    unloadable: bool  #: whether the engine cannot load the written experts, whatever its backends


def engine_refusal(checkpoint: Checkpoint, plan: TranscodePlan) -> Refusal | None:
    """Return why vLLM's newest known version runs the result on none of several GPUs; None if one does.

    All linear modules and names are judged, as for a plan. If the config lacks `top_k`, the result is None as well.
    """
    layer, verdicts = _refused_layer(checkpoint, plan)
    if layer is None:
        return None
    source_faults = {gate for where in _deployments() for gate in _faults(_judged(checkpoint, where, layer))}
    unloadable = [verdict for verdict in verdicts if not source_faults.issuperset(_faults(verdict))]
    chosen = (unloadable or verdicts)[0]
    return Refusal(f"layer {layer}: {chosen.refusal}", bool(unloadable))


def _deployments() -> list[Deployment]:
    return [Deployment(parse_gpu(gpu)) for gpu in GPUS]


def _refused_layer(checkpoint: Checkpoint, plan: TranscodePlan) -> tuple[int | None, list[Verdict]]:
    """Return the first layer that vLLM runs on no GPU, and the verdict of each GPU; None if there is none."""
    if checkpoint.info.top_k is None:
        return None, []
    result, places = planned_result(checkpoint, plan), _deployments()
    for layer, *_ in group_alike_layers(result, places[0]).values():
        # One GPU that runs it is enough: the others are not asked.
        judged = (_judged(result, where, layer) for where in places)
        verdicts = list(takewhile(lambda verdict: verdict.known and not verdict.ok, judged))
        if len(verdicts) == len(places):
            return layer, verdicts
    return None, []


def _judged(checkpoint: Checkpoint, where: Deployment, layer: int) -> Verdict:
    return with_names(checkpoint, judge_checkpoint(checkpoint, where, layer, explain=False), layer)


def _faults(verdict: Verdict) -> Iterator[str]:
    """Yield the reasons why the engine cannot load the experts as they are stored."""
    return (gate.text for gate in verdict.gates if gate.code == "G13" and not gate.passed)


def _working_target(checkpoint: Checkpoint, plan: TranscodePlan) -> str | None:
    """Return the first other target whose result vLLM runs, as an option; None if there is none."""
    for name, target in ENGINE_TARGETS.items():
        request = replace(plan.request, to=name, names="source", regroup=None)
        try:
            if name == plan.target.id:
                continue
            layer, _ = _refused_layer(checkpoint, make_transcode_plan(checkpoint, request))
        except MoeqError:
            continue
        if layer is None:
            lossy = [] if target.element is None else [option("allow_lossy", True)]
            return together([option("to", name), *lossy])
    return None
