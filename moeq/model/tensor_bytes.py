"""Tensors as bytes, and matrices compared bit for bit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from moeq.matrix import QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

_own = threading.local()


def one_torch_thread() -> None:
    """Let torch run the operations of this thread by itself: threads per operation would only wait for each other."""
    import torch

    if not getattr(_own, "set", False):
        torch.set_num_threads(1)
        _own.set = True


def same_matrix(left: QuantizedMatrix, right: QuantizedMatrix) -> bool:
    """Whether two logical matrices are equal bit for bit (NaN scales included)."""
    import torch

    def same(a: Tensor | None, b: Tensor | None) -> bool:
        if a is None or b is None:
            return a is b
        if a.shape != b.shape or a.element_size() != b.element_size():
            return False
        return bool(torch.equal(flat_bytes(a), flat_bytes(b)))

    def zeros(matrix: QuantizedMatrix) -> Tensor | None:
        # Formats give them as uint8 or int16, as their range needs; they are numbers either way.
        return None if matrix.zeros is None else matrix.zeros.to(torch.int16)

    parts = ("codes", "scales", "group_index", "global_scale", "bias")
    return same(zeros(left), zeros(right)) and all(same(getattr(left, part), getattr(right, part)) for part in parts)


def flat_bytes(tensor: Tensor) -> Tensor:
    """uint8 `[bytes]` of a tensor in row-major order."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8)


def as_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor in row-major order."""
    return flat_bytes(tensor).numpy().data


def reshaped(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The same bytes in another shape."""
    return flat_bytes(tensor).view(tensor.dtype).view(shape)
