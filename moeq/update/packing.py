"""Pack an expert on the CPU in scratch memory, prove it, and write all of it or, after an error, none of it."""

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

#: Pairs of a tensor to overwrite and the finished tensor that is copied to it.
Copies = Sequence[tuple["Tensor", "Tensor"]]


def pack(
    layer: WritableLayer, layout: Layout, role: StackedRole, matrix: QuantizedMatrix
) -> tuple[dict[str, Tensor], QuantizedMatrix, int]:
    """Return a rank's packed and proven parts, the matrix that they hold, and the number of changed stored numbers.

    Raises MoeqError `bug.round-trip` if a layout that may not change numbers did, and the errors of `Layout.pack`.
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
    """Check that the weights which an update leaves keep their bytes in a layout that rounds.

    Raises MoeqError `usage.shared-tensor` if packing the current values again would give other bytes.
    """
    layout = layer.layout
    is_calibrated = layout.calibration_scope is not None
    if not layout.allow_lossy or (is_calibrated and layout.lossy is None):
        return
    if not layout.rounds_jointly:
        stored = stored_row(layer, role, row)
        padded = layer.padding.pad(old)
        calibration = layout.calibrate(padded) if is_calibrated else None
        repacked = (layout if calibration is None else layout.with_calibration(calibration)).pack(padded)
        if all(_same_bytes(repacked[name], stored[name]) for name in stored):
            return
    raise MoeqError(
        "usage.shared-tensor",
        f"layer {layer.layer} {role}: {layout.id} has rounded the weights that stay, and rounding them "
        f"again would change them: {layout.lossy}",
        f"write all of {role} in one update: projection '{role}' without rows and columns",
    )


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    import torch

    return torch.equal(one.contiguous().view(-1).view(torch.uint8), other.view(-1).view(torch.uint8))


def write_all(copies: Copies, writes: Sequence[Write]) -> None:
    """Copy finished tensors, then queue the writes of the gather kernel. If one fails, take the copies back.

    The gather kernel checks and compiles all writes before the first one: only the loss of the device can stop it
    between two writes.
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
    """Return the layout's calibration of every expert of a stacked matrix, in the order of its rows."""
    calibrations = []
    for row in range(len(layer.experts)):
        calibration = layer.layout.calibrate(layer.padding.pad(read_matrix(layer, role, row)))
        assert calibration is not None  # the caller's matrix has one, and experts are alike
        calibrations.append(calibration)
    return calibrations
