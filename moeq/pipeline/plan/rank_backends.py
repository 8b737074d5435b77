"""Ranking of backends for an answer: the engine's eligible ones, and moeq's kernels where they run in the engine."""

from __future__ import annotations

from dataclasses import replace

from moeq.model import Checkpoint
from moeq.oracle.ranking import Ranking, rank
from moeq.oracle.versions import BUILTIN
from moeq.pipeline.plan.decide import Answer, LayerGroup
from moeq.pipeline.plan.layer_verdict import judge_checkpoint


def rank_backends(checkpoint: Checkpoint, answer: Answer, part: LayerGroup) -> Ranking:
    """Rank the backends that layers which are encoded alike can run in, by measured times."""
    deployment, layer = answer.question.deployment, part.layers[0]
    own_layout = None
    if deployment.engine == BUILTIN or any(loader.name in ("vllm", "sglang") for loader in answer.loaders):
        where = replace(deployment, engine=BUILTIN, backend="auto", quantization=None)
        own = judge_checkpoint(checkpoint, where, layer, explain=False).convert
        own_layout = own.layout if own is not None else None
    return rank(part.verdict, checkpoint.scheme_of(layer), own_layout)
