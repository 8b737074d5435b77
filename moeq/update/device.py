"""Write experts into tensors on a GPU by the gather kernel: no copy of the packed expert, no wait for the device.

Work is queued on the current stream, so that later kernels of that stream, captured graphs included, read the new
weights. Other streams have to wait for an event of this one, as for any tensor that is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import StackedRole
from moeq.layouts.arranged import torch_dtype
from moeq.layouts.marlin.wna16 import MarlinActOrder
from moeq.matrix import QuantizedMatrix
from moeq.update.layers import WritableLayer
from moeq.update.placing import placement_of

if TYPE_CHECKING:
    from torch import Tensor

    from moeq_kernels.index_maps import Placement


def obstacle(layer: WritableLayer, role: StackedRole) -> str | None:
    """Say why the gather kernel cannot write a layer, so that experts are packed on the CPU; None if it can."""
    layout, spec = layer.layout, layer.padded(role)
    if not layout.is_index_map():
        return f"{layout.id} is more than an index map"
    if layout.calibration_scope is not None:
        return layout.calibration_scope
    if isinstance(layout, MarlinActOrder):
        return "act-order sorts the columns of every expert"
    if layout.lossy is not None and not layout.rearranges:
        return f"values may not fit, which takes a look at them: {layout.lossy}"
    if any(placement is None for placement in placements(layer, role).values()):
        return f"tiles of {layout.id} hold gate and up rows together"
    stored = layout.tensors(spec)
    for name, tensor in layer.tensors[role].items():
        if tensor.dtype != torch_dtype(stored[name].dtype):
            return f"{role}_{name} is {tensor.dtype}, the layout stores {stored[name].dtype}"
    return None


def placements(layer: WritableLayer, role: StackedRole) -> dict[str, Placement | None]:
    """Return the words of every part of a stacked matrix that the gather kernel writes."""
    layout, spec = layer.layout, layer.padded(role)
    found = {}
    for name, part in layout.parts(spec).items():
        shape = layout.element_shape(part, spec)
        found[name] = placement_of(part, shape, (0, shape[0]), (0, shape[1]))
    return found


def place_matrix(layer: WritableLayer, role: StackedRole, rows: Sequence[int], matrix: QuantizedMatrix) -> None:
    """Queue the writes of a rank's matrix, which lies on the device of the tensors, into some rows of them."""
    from moeq_kernels.placement import place

    layout, padded = layer.layout, layer.padding.pad(matrix)
    targets = layer.tensors[role]
    for name, placement in placements(layer, role).items():
        assert placement is not None
        elements = layout.encode(name, padded)
        for row in rows:
            place(elements, targets[name][row], placement, _shape(elements))
    extra = layout.extra_tensors(padded.spec)
    for row in rows:
        layout.fill_extra(padded, {name: targets[name][row] for name in extra})


def places_all(layer: WritableLayer, role: StackedRole) -> bool:
    """Return whether the experts of a rank can be quantised and written together, one launch for each part.

    Their rows then follow each other as those of one tall matrix: nothing is padded, cut, or common to an expert.
    """
    spec, weight = layer.specs[role], layer.scheme.weight
    shared_rows = weight.scale.group_shape[0]
    height = spec.n // (2 if role == "w13" and spec.gated else 1)
    return (
        obstacle(layer, role) is None
        and layer.padded(role) == layer.written[role]
        and spec.bias_dtype is None
        and weight.scale2 is None
        and shared_rows > 0
        and height % shared_rows == 0
        and not layer.layout.extra_tensors(layer.padded(role))
        and list(layer.experts) == sorted(set(layer.experts))
    )


def place_all(layer: WritableLayer, role: StackedRole, tall: QuantizedMatrix) -> None:
    """Queue the writes of all experts of a rank, given as one matrix `[experts * N, K]`."""
    from moeq_kernels.placement import place

    for name, placement in placements(layer, role).items():
        assert placement is not None
        rows = layer.layout.encode(name, tall)
        elements = rows.view(len(layer.experts), -1, rows.shape[1])
        place(elements, layer.tensors[role][name], placement, _shape(elements[0]))


def _shape(elements: Tensor) -> tuple[int, int]:
    return elements.shape[0], elements.shape[1]
