"""Which loaders can load a planned layer: gathers the facts that they check."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from moeq.checkpoint.families import find_family
from moeq.deploy.deployment import Deployment
from moeq.deploy.loaders import (
    SGLANG_MODELS,
    VLLM_LAYOUTS,
    VLLM_VERSIONS,
    Loader,
    PlannedLayer,
    loaders_of,
    sglang_reads,
)
from moeq.layouts.registry import layout_class
from moeq.model import Checkpoint
from moeq.oracle.builtin import report_of_layout
from moeq.oracle.versions import engine_names
from moeq.pipeline.plan.candidates import Ask
from moeq.pipeline.plan.decision import heads_problem, judge_checkpoint, moe_shape
from moeq.pipeline.plan.layers import LayerPlan
from moeq.schemes.base import Scheme


def loaders_of_plan(checkpoint: Checkpoint, ask: Ask, plan: LayerPlan, scheme: Scheme | None) -> Iterator[Loader]:
    """What loads a planned layer."""
    layer, layout, deployment = plan.entry.layer, plan.entry.layout, ask.deployment
    return loaders_of(
        PlannedLayer(
            layout=layout,
            w13_order=layout_class(layout).w13_order,
            model_type=str(checkpoint.source.config.get("model_type", "")),
            activation=checkpoint.info.activation,
            dtype=deployment.dtype,
            platform=deployment.gpu.platform,
            tp=ask.options.tp,
            by_rank=bool(plan.entry.ranks),
            own_kernel=_own_kernel(checkpoint, deployment, layer, scheme, layout),
            vllm=tuple(_vllm_versions(checkpoint, deployment, layer, scheme, layout)),
            family=not checkpoint.info.family_from_names,
            heads=_heads(checkpoint, deployment),
            sglang=_sglang(checkpoint, deployment, layer),
            dispatched=deployment.batched or deployment.all2all is not None or deployment.eplb,
        )
    )


def _heads(checkpoint: Checkpoint, deployment: Deployment) -> bool:
    """Whether engines can spread the attention over the tensor-parallel ranks."""
    return heads_problem(checkpoint, replace(deployment, engine=f"vllm@{VLLM_VERSIONS[0]}")) is None


def _sglang(checkpoint: Checkpoint, deployment: Deployment, layer: int) -> bool:
    """Whether SGLang's class of the model takes its experts as the plug-in expects, on these ranks.

    Its ranks of expert parallelism are those of tensor parallelism (`moe_tp_size` is `tp_size / ep_size`), and its
    classes know the tensors that are no experts by the family's own names.
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
    divided = deployment.tp in (1, ranks) and deployment.ep in (1, ranks)
    return divided and _heads(checkpoint, replace(deployment, tp=ranks))


def _own_kernel(checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None, layout: str) -> bool:
    """Whether one of moeq's own kernels reads the layout on this GPU."""
    found = report_of_layout(scheme or checkpoint.scheme_of(layer), moe_shape(checkpoint, layer), deployment, layout)
    return found is not None and found.supported


def _vllm_versions(
    checkpoint: Checkpoint, deployment: Deployment, layer: int, scheme: Scheme | None, layout: str
) -> Iterator[str]:
    """Versions of vLLM whose backend of the layout runs on this deployment, and reads that layout there.

    A version whose rules are not known is taken to run what the newest one does; act-order is Marlin's everywhere.
    """
    if layout not in VLLM_LAYOUTS:
        return
    backend, versions, _ = VLLM_LAYOUTS[layout]
    known = set(engine_names())
    for version in versions:
        engine = f"vllm@{version}" if f"vllm@{version}" in known else f"vllm@{VLLM_VERSIONS[0]}"
        if layout == "marlin-act-order/1" and engine != f"vllm@{version}":
            if deployment.gpu.platform == "cuda":
                yield version
            continue
        where = replace(deployment, engine=engine, backend=backend)
        verdict = judge_checkpoint(checkpoint, where, layer, scheme=scheme, explain=False)
        if verdict.ok and verdict.selected and layout in (verdict.selected.layout, verdict.selected.lossy_layout):
            yield version
