"""Say before a conversion starts that it will stop because numbers would change: pack one expert and see."""

from __future__ import annotations

from collections.abc import Mapping

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer
from moeq.pipeline.plan.options import Question


def find_loss(checkpoint: Checkpoint, question: Question, layouts: Mapping[int, str]) -> MoeqError | None:
    """Return the error with which a conversion would stop at its first expert, worded as by `convert`, or None."""
    first_layers = {layout: layer for layer, layout in reversed([*layouts.items()])}
    found = (
        _loss(checkpoint, plan_layer(checkpoint, layer, layout, question.ranks, question.options))
        for layout, layer in first_layers.items()
    )
    with checkpoint.source.sampled():
        return next(filter(None, found), None)


def _loss(checkpoint: Checkpoint, plan: LayerPlan) -> MoeqError | None:
    """Pack the first expert of a layer for its first shard."""
    layout, entry, shard = plan.layout, plan.entry, plan.shards[0]
    if type(layout).lossy is None or plan.allow_lossy or layout.calibration_scope is not None:
        return None

    for role in STACKED_ROLES:
        try:
            layout.pack(shard.cut_and_pad(plan.regrouped(checkpoint.matrix(entry.layer, 0, role), role)))
        except MoeqError as error:
            if error.code != "answer.lossy":  # whatever else is wrong, `convert` says where it happens
                return None
            return MoeqError(error.code, f"layer {entry.layer} expert 0: {error.message}", error.hint)
    return None
