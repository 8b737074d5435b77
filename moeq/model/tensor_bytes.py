"""View tensors as bytes, and compare matrices bit for bit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

_thread = threading.local()


def one_torch_thread() -> None:
    """Let torch run this thread's operations in this thread: more threads would only wait for each other."""
    import torch

    if not getattr(_thread, "is_set", False):
        torch.set_num_threads(1)
        _thread.is_set = True


def same_matrix(left: QuantizedMatrix, right: QuantizedMatrix) -> bool:
    """Return whether two logical matrices are equal bit for bit, NaN scales included."""
    import torch

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        if a.shape != b.shape or a.element_size() != b.element_size():
            return False
        return bool(torch.equal(flat_bytes(a), flat_bytes(b)))

    def zeros(matrix: QuantizedMatrix) -> Tensor | None:
        # Formats give zero points as uint8 or int16, whichever holds their range.
        return None if matrix.zeros is None else matrix.zeros.to(torch.int16)

    parts = ("codes", "scales", "group_index", "global_scale", "bias")
    return same(zeros(left), zeros(right)) and all(same(getattr(left, part), getattr(right, part)) for part in parts)


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order as uint8 `[bytes]`."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order as a buffer."""
    return flat_bytes(tensor).numpy().data


def reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View the bytes of a tensor in another shape."""
    return flat_bytes(tensor).view(tensor.dtype).view(shape)
