"""Which loaders can load a planned layer: gather the facts that loaders check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

from moeq.checkpoint.families import find_family
from moeq.checkpoint.names import FUSED
from moeq.deploy.deployment import Deployment
from moeq.layouts.readers import VLLM_VERSIONS
from moeq.layouts.registry import layout_class
from moeq.model import Checkpoint
from moeq.oracle.engines.moeq import report_of_layout
from moeq.oracle.loaders import (
    SGLANG_JOINED,
    SGLANG_MODELS,
    Loader,
    PlannedLayer,
    loaders_of,
    reads_by_own_config,
    sglang_reads,
)
from moeq.oracle.records import Verdict
from moeq.oracle.versions import choose_engine
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.pipeline.plan.layer_verdict import heads_problem, judge_checkpoint, moe_shape
from moeq.pipeline.plan.linear_modules import linear_problem
from moeq.pipeline.plan.options import Question
from moeq.schemes.base import Scheme
from moeq.schemes.format import ACTIVATION_SCALES

#: Function from a version of vLLM and the backend that it is started with to the verdict on one layer.
EngineVerdicts = Callable[[str, str], Verdict]


def engine_verdicts(
    checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None, known: Verdict
) -> EngineVerdicts:
    """Return a function that judges one layer for an engine and a backend, and caches its verdicts for all layouts.

    `known` is the verdict for the deployment's own engine and backend.
    """
    verdicts = {(known.engine, deployment.backend): known}

    def verdict_of(engine: str, backend: str) -> Verdict:
        if (engine, backend) not in verdicts:
            where = replace(deployment, engine=engine, backend=backend)
            found = judge_checkpoint(checkpoint, where, layer, scheme=scheme, explain=False)
            verdicts[engine, backend] = found
        return verdicts[engine, backend]

    return verdict_of


def loaders_of_plan(
    checkpoint: Checkpoint, question: Question, plan: LayerPlan, scheme: Scheme | None, verdicts: EngineVerdicts
) -> Iterator[Loader]:
    """Yield the loaders that take a planned layer."""
    layer, layout, deployment = plan.entry.layer, plan.entry.layout, question.deployment
    model_type = str(checkpoint.source.config.get("model_type", ""))
    shape = moe_shape(checkpoint, checkpoint.info.moe_layers[0])

    def loads_linears(version: str) -> bool:
        return linear_problem(checkpoint, f"vllm@{version}", deployment, shape) is None

    return loaders_of(
        PlannedLayer(
            layout=layout,
            model_type=model_type,
            architecture=checkpoint.info.architecture,
            activation=checkpoint.info.activation,
            dtype=deployment.dtype,
            platform=deployment.gpu.platform,
            tp=question.ranks.tp,
            by_rank=bool(plan.entry.ranks),
            own_kernel=_own_kernel(checkpoint, deployment, layer, scheme, layout),
            vllm=tuple(_vllm_versions(question, plan, verdicts)),
            others=tuple(version for version in VLLM_VERSIONS if loads_linears(version)),
            family=not checkpoint.info.family_from_names,
            own_config=reads_by_own_config(model_type, (checkpoint.quantization_config or {}).get("quant_method")),
            heads=_heads(checkpoint, deployment),
            sglang=_sglang(checkpoint, deployment, layer),
            dispatched=deployment.batched or deployment.all2all is not None,
            moved=deployment.eplb,
            scales=_scales(checkpoint, layer, scheme or checkpoint.scheme_of(layer), layout),
        )
    )


def _scales(checkpoint: Checkpoint, layer: int, scheme: Scheme, layout: str) -> bool:
    """Return whether every expert has the activation scale that the plug-in hands to the engine's kernel.

    Weight-only kernels need no such scale.
    """
    activation = scheme.activation
    static = scheme.format == "fp8" and activation is not None and not activation.scale.dynamic
    weights_only = all(reader.weights_only for reader in layout_class(layout).vllm_readers())
    if weights_only or not (static or scheme.format == "nvfp4"):
        return True
    experts = checkpoint.experts(layer)
    parts = experts.layer.parts
    stored = next((part for _, part in parts if part in ACTIVATION_SCALES), None)
    held = [parts.get((projection, stored), {}) for projection in {name for name, _ in parts}] if stored else [{}]
    return all(FUSED in found or len(found) == experts.num_experts for found in held)


def _heads(checkpoint: Checkpoint, deployment: Deployment) -> bool:
    """Return whether engines can spread the attention over the tensor-parallel ranks."""
    return heads_problem(checkpoint, replace(deployment, engine=f"vllm@{VLLM_VERSIONS[0]}")) is None


def _sglang(checkpoint: Checkpoint, deployment: Deployment, layer: int) -> bool:
    """Return whether SGLang's class of the model takes its experts as the plug-in expects, on these ranks.

    SGLang uses the ranks of tensor parallelism for expert parallelism too (`moe_tp_size` is `tp_size / ep_size`), and
    its classes know the tensors outside experts by the family's own names.
    """
    info, ranks = checkpoint.info, max(deployment.tp, deployment.ep)
    family = find_family(info.model_type)
    if info.architecture not in SGLANG_MODELS or family is None:
        return False
    others = any(use.quantized for use in info.modules if use.part != "experts")
    linear = checkpoint.scheme_of(layer).format if others else None
    named = checkpoint.expert_prefix(layer).endswith(family.experts)
    if not named or not sglang_reads(checkpoint.quantization_config or {}, linear):
        return False
    attention = any(use.quantized for use in info.modules if use.part == "attention")
    if attention and checkpoint.source.config.get("q_lora_rank") and linear not in SGLANG_JOINED:
        return False
    divided = deployment.tp in (1, ranks) and deployment.ep in (1, ranks)
    return divided and _heads(checkpoint, replace(deployment, tp=ranks))


def _own_kernel(checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None, layout: str) -> bool:
    """Return whether one of moeq's own kernels reads the layout on this GPU."""
    found = report_of_layout(scheme or checkpoint.scheme_of(layer), moe_shape(checkpoint, layer), deployment, layout)
    return found is not None and found.supported


#: Backends whose layouts are not padded although some of the engine's methods round sizes up (MXFP4 to multiples of
#: 64). Their ranks cut one file: where the engine accepts the ranks, these layouts are never written rank by rank.
_PADDED_BY_ENGINE = ("XPU",)


def _vllm_versions(question: Question, plan: LayerPlan, verdicts: EngineVerdicts) -> Iterator[str]:
    """Yield the versions of vLLM in which a backend runs on this deployment and reads the layout.

    A version without a policy of its own is yielded if its neighbours are, among the versions that read the layout.
    """
    layout = plan.entry.layout
    padded = plan.shards[0].padding.w2.k // question.ranks.tp
    readers = layout_class(layout).vllm_readers()
    options = dict.fromkeys(reader.option for reader in readers)
    versions = [version for version in VLLM_VERSIONS if any(version in reader.versions for reader in readers)]

    @cache
    def runs(engine: str) -> bool:
        return any(reads(verdicts(engine, backend)) for backend in options)

    def reads(verdict: Verdict) -> bool:
        selected = verdict.selected if verdict.ok else None
        if selected is None or layout not in (selected.layout, selected.lossy_layout):
            return False
        return (
            selected.backend not in _PADDED_BY_ENGINE
            or verdict.sizes is None
            or verdict.sizes.padded_intermediate == padded
        )

    for version in versions:
        choice = choose_engine(f"vllm@{version}")
        near = [name for name in (choice.policy, choice.other) if name and name.partition("@")[2] in versions]
        if near and all(map(runs, near)):
            yield version
