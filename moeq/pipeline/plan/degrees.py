"""Which tensor-parallel degrees a checkpoint can be converted for, with the arithmetic of those that it cannot."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.division import UNEVEN_FORMATS, split_intermediate
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.layer_verdict import first_layer, heads_problem
from moeq.pipeline.plan.options import Question

#: Degrees that engines are run with.
DEGREES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class Degree:
    """One tensor-parallel degree.

    Attributes:
        tp: ranks.
        intermediate: intermediate features of the fullest rank, or None if they cannot be divided.
        fits: whether `convert` writes for that many ranks (without a deployment: whether the sizes divide).
        layout: layout that it writes, if a deployment was named.
        why: why it does not fit, or None.
    """

    tp: int
    intermediate: int | None
    fits: bool
    layout: str | None = None
    why: str | None = None


def degrees(
    checkpoint: Checkpoint, deployment: Deployment | None, tps: tuple[int, ...] = DEGREES
) -> tuple[Degree, ...]:
    """Judge every degree; without a deployment by the sizes of experts and attention heads alone."""
    return tuple(_degree(checkpoint, deployment, tp) for tp in tps)


def _degree(checkpoint: Checkpoint, deployment: Deployment | None, tp: int) -> Degree:
    layer = first_layer(checkpoint)
    unit = UNEVEN_FORMATS.get(checkpoint.scheme_of(layer).format)
    why, size = None, None
    try:
        parts = split_intermediate(f"layer {layer}", checkpoint.spec(layer, "w2"), tp, unit)
    except MoeqError as error:
        why = error.message.partition(": ")[2] or error.message
    else:
        size = max(part.size for part in parts)
    if deployment is None:
        # Only the number of ranks matters here.
        why = why or heads_problem(checkpoint, Deployment(parse_gpu("H100"), tp=tp))
        return Degree(tp, size, why is None, None, why)
    found = answer(checkpoint, Question(replace(deployment, tp=tp, ep=1, dp=1)), brief=True)
    if found.error is None:
        return Degree(tp, size, True, found.first.layout)
    return Degree(tp, size, False, None, why or found.error.message)
