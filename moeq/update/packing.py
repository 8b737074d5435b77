"""Pack an expert on the CPU in scratch memory, prove it, and write it so that it is old or new as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import StackedRole
from moeq.errors import MoeqError
from moeq.layouts.layout import Layout
from moeq.matrix import QuantizedMatrix
from moeq.model.tensor_bytes import reshaped, same_matrix
from moeq.update.layers import WritableLayer
from moeq.update.snapshot import read_matrix, stored_row

if TYPE_CHECKING:
    from torch import Tensor

    from moeq_kernels.placement import Write

#: Finished tensors: where each is copied to, and the tensor.
Copies = Sequence[tuple["Tensor", "Tensor"]]


def pack(
    layer: WritableLayer, layout: Layout, role: StackedRole, matrix: QuantizedMatrix
) -> tuple[dict[str, Tensor], QuantizedMatrix, int]:
    """Return a rank's packed parts, proven, the matrix that they hold, and how many stored numbers differ in it.

    Raises MoeqError `bug.round-trip` if packing changed numbers without leave, and the errors of `Layout.pack`.
    """
    padded = layer.padding.pad(matrix)
    shapes = layout.tensors(padded.spec)
    packed = {name: reshaped(tensor, shapes[name].shape) for name, tensor in layout.pack(padded).items()}
    unpacked = layout.unpack(packed, padded.spec)
    if same_matrix(unpacked, padded):
        return packed, matrix, 0
    losses = layout.losses(padded) if layout.allow_lossy else 0
    if not losses:
        raise MoeqError(
            "bug.round-trip",
            f"layer {layer.layer} {role}: the packed bytes do not unpack to the update's values",
            "nothing was written; report this as a bug in moeq",
        )
    return packed, layer.padding.unpad(unpacked), losses


def check_reversible(layer: WritableLayer, role: StackedRole, old: QuantizedMatrix, row: int) -> None:
    """Check that weights which stay keep their bytes, where packing rounds.

    Raises MoeqError `usage.shared-tensor` if packing the current values again would give other bytes.
    """
    import torch

    if not layer.layout.allow_lossy or (layer.layout.calibration_scope is not None and layer.layout.lossy is None):
        return
    layout = layer.layout
    if not layout.rounds_jointly:
        stored = stored_row(layer, role, row)
        padded = layer.padding.pad(old)
        value = layout.calibrate(padded) if layout.calibration_scope is not None else None
        again = (layout if value is None else layout.with_calibration(value)).pack(padded)
        if all(
            torch.equal(again[name].contiguous().view(-1).view(torch.uint8), stored[name].view(-1).view(torch.uint8))
            for name in stored
        ):
            return
    raise MoeqError(
        "usage.shared-tensor",
        f"layer {layer.layer} {role}: {layout.id} has rounded the weights that stay, and rounding them "
        f"again would change them: {layout.lossy}",
        f"write all of {role} in one update: projection '{role}' without rows and columns",
    )


def write_all(copies: Copies, writes: Sequence[Write]) -> None:
    """Copy finished tensors, then queue what the gather kernel writes. If one fails, take the copies back.

    The gather kernel checks and compiles all writes before the first one, so that only a device that is lost ends
    between two of them.
    """
    import torch

    done: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        try:
            for target, tensor in copies:
                done.append((target, target.clone()))
                target.copy_(tensor)
            if writes:
                from moeq_kernels.placement import place_together

                place_together(writes)
        except BaseException:
            for target, before in done:
                target.copy_(before)
            raise


def calibrations_of(layer: WritableLayer, role: StackedRole) -> list[float]:
    """Return what the layout must know of every row of a stacked matrix."""
    found = []
    for row in range(len(layer.experts)):
        value = layer.layout.calibrate(layer.padding.pad(read_matrix(layer, role, row)))
        assert value is not None  # the caller's matrix has one, and experts are alike
        found.append(value)
    return found
