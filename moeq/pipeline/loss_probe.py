"""Say before a conversion starts that it will stop because numbers would change: pack one expert and see."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.regroup import regroup
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer
from moeq.pipeline.plan.options import Question


def find_loss(checkpoint: Checkpoint, question: Question, layouts: Mapping[int, str]) -> MoeqError | None:
    """Return the error with which a conversion would stop at its first expert, worded as by `convert`, or None."""
    found = (
        _loss(checkpoint, plan_layer(checkpoint, layer, layout, question.ranks, question.options))
        for layer, layout in _first_layers(layouts)
    )
    with checkpoint.source.sampled():
        return next(filter(None, found), None)


def _first_layers(layouts: Mapping[int, str]) -> Iterable[tuple[int, str]]:
    """Return the first layer of every layout, as `(layer, layout)`."""
    return {layout: (layer, layout) for layer, layout in reversed([*layouts.items()])}.values()


def _loss(checkpoint: Checkpoint, plan: LayerPlan) -> MoeqError | None:
    """Pack the first expert of a layer for its first shard."""
    layout, entry, shard = plan.layout, plan.entry, plan.shards[0]
    if type(layout).lossy is None or plan.allow_lossy or layout.calibration_scope is not None:
        return None

    for role in STACKED_ROLES:
        try:
            matrix = checkpoint.matrix(entry.layer, 0, role)
            if entry.source_group is not None:
                matrix = regroup(matrix, entry.matrices[role].spec.group_size)
            layout.pack(shard.cut_and_pad(matrix))
        except MoeqError as error:
            if error.code != "answer.lossy":  # whatever else is wrong, `convert` says where it happens
                return None
            return MoeqError(error.code, f"layer {entry.layer} expert 0: {error.message}", error.hint)
    return None
