"""Check a planned transcoding: whether vLLM loads the tensors by moeq's oracle, and transformers their names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.oracle.judge import judge
from moeq.oracle.records import StoredTensor, Verdict
from moeq.pipeline.plan.calibration import shown
from moeq.pipeline.plan.layer_verdict import module_of_set, moe_shape
from moeq.spelling import option, together
from moeq.transcode.naming import family_naming
from moeq.transcode.survey import LayerSurvey
from moeq.transcode.transcode_plan import TranscodePlan

#: GPUs of which one has to run the result.
GPUS = ("H100", "B200", "A100", "MI300X")

#: Config key by which DeepSeek-V4 says how its experts are quantised; engines take FP4 where it is missing.
EXPERT_DTYPE = "expert_dtype"
_EXPERT_DTYPES = {"deepseek-fp4": "fp4", "deepseek-fp8": "fp8", "fp8-block": "fp8"}


def warnings(checkpoint: Checkpoint, plan: TranscodePlan) -> tuple[str, ...]:
    """Say what will not load the result: engines on any GPU, transformers because of names.

    Raises:
        MoeqError: `usage.target` if the engine cannot load the written tensors, whatever the GPU.
    """
    if plan.target.experts_only:
        return ()
    known = (fault for layer in plan.survey.layers for fault in checkpoint.scale_faults(layer.layer))
    faults = [fault for fault in known if not fault.is_stored]
    found = [f"{shown(faults)}: static activation scales of these layers are left out"] if faults else []
    refused = engine_refusal(checkpoint, plan)
    if refused is not None and refused.unloadable:
        text = f"{option('to', plan.target.id)}: engines would not load the result: {refused.text}"
        floats = together([option("to", "bf16"), option("allow_lossy", True)])
        others = [option("to", name) for name in ("compressed-tensors",) if name != plan.target.id]
        raise MoeqError("usage.target", text, ", or ".join([*others, floats]))
    if refused is not None:
        found.append(f"vLLM runs the result on none of {', '.join(GPUS)}: {refused.text}")
    for layer in plan.survey.layers if plan.target.element else ():
        own = family_naming(checkpoint.experts(layer.layer), plan.survey.family)
        if own is not None and own.tensor("down", 0, "weight") != layer.naming.tensor("down", 0, "weight"):
            names = f"{layer.naming.tensor('down', 0, 'weight')}, and transformers looks for "
            found.append(f"experts are called {names}{own.tensor('down', 0, 'weight')}: leave out {option('names')}")
            break
    return tuple(found)


@dataclass(frozen=True)
class Refusal:
    """Why no GPU's vLLM runs a result.

    Attributes:
        text: the refusal.
        unloadable: whether the engine cannot load the written tensors, whatever its backends.
    """

    text: str
    unloadable: bool


def expert_dtype(plan: TranscodePlan) -> str | None:
    """Return what a DeepSeek-V4 config has to say of the written experts; None where the format itself says it."""
    spellings = (projected.spelling for layer in plan.survey.layers for projected in layer.kinds[0].values())
    return next((_EXPERT_DTYPES[name] for name in spellings if name in _EXPERT_DTYPES), None)


def with_expert_dtype(config: Mapping[str, Any], plan: TranscodePlan) -> dict[str, Any]:
    """Return a model's config in which DeepSeek-V4's `expert_dtype` describes the written experts."""
    family = plan.survey.family
    if family is None or "deepseek_v4" not in family.model_types:
        return dict(config)
    found = {key: value for key, value in config.items() if key != EXPERT_DTYPE}
    value = expert_dtype(plan)
    return found if value is None else {**found, EXPERT_DTYPE: value}


def engine_refusal(checkpoint: Checkpoint, plan: TranscodePlan) -> Refusal | None:
    """Return why vLLM's newest known version runs the result on none of several GPUs; None if one does.

    None also where the config does not say enough to ask.
    """
    layers = {tuple(row.kinds[0].values()): row for row in plan.survey.layers}.values()
    for layer, experts in [(row, one) for row in layers for one in checkpoint.experts(row.layer).sets]:
        try:
            verdicts = [_judged(checkpoint, plan, layer, experts, gpu) for gpu in GPUS]
        except MoeqError:
            return None
        if any(verdict.ok or not verdict.known for verdict in verdicts):
            continue
        unloadable = [verdict for verdict in verdicts if _is_unloadable(verdict)]
        chosen = (unloadable or verdicts)[0]
        return Refusal(f"layer {layer.layer}: {chosen.refusal}", bool(unloadable))
    return None


def _is_unloadable(verdict: Verdict) -> bool:
    return any(gate.code in ("G13", "G14") and not gate.passed for gate in verdict.gates)


def _judged(checkpoint: Checkpoint, plan: TranscodePlan, layer: LayerSurvey, experts: range, gpu: str) -> Verdict:
    """Judge a set of a layer's experts as it will be written."""
    projection, projected = next(iter(layer.kinds[experts.start].items()))
    shape = replace(moe_shape(checkpoint, layer.layer, experts), expert_dtype=expert_dtype(plan) or "")
    return judge(
        plan.described[projected, projection].scheme,
        shape,
        Deployment(parse_gpu(gpu)),
        config=plan.config,
        prefix=module_of_set(checkpoint.info.architecture, layer.naming.prefix, experts),
        explain=False,
        tensors=() if layer.naming.stacked else tuple(_written_tensors(layer, experts)),
    )


def _written_tensors(layer: LayerSurvey, experts: range) -> list[StoredTensor]:
    """List the headers of a set of a layer's written experts, equal ones once."""
    found: dict[tuple[str, str, str, tuple[int, ...]], list[int]] = {}
    for expert in experts:
        for name, projected in layer.kinds[expert].items():
            for part, signature in projected.signatures.items():
                found.setdefault((name, part, signature.dtype, signature.shape), []).append(expert)
    every = len(experts)
    return [StoredTensor(*key, () if len(having) == every else tuple(having)) for key, having in found.items()]
