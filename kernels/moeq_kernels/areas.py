"""Placeholders for tensors: launches are planned with them once, and bound to addresses in every call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

#: Alignment of buffers in bytes; the copy engine (TMA) needs 16.
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Area:
    """Placeholder for a strided tensor inside a root: an argument of the call, a weight tensor, or the workspace."""

    root: str  #: name of the memory that the tensor lies in
    #: Attributes of the tensor; strides count elements.
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0  #: bytes from the beginning of the root

    @classmethod
    def of(cls, root: str, dtype: torch.dtype, *shape: int, offset: int = 0) -> Area:
        """Build a contiguous area."""
        return cls(root, dtype, shape, contiguous(shape), offset)

    @classmethod
    def like(cls, root: str, tensor: Tensor) -> Area:
        """Describe a whole tensor as one area."""
        return cls(root, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.dtype.itemsize

    def numel(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def view(self, *shape: int) -> Area:
        """Reshape a contiguous area; one size may be -1."""
        fixed_size = math.prod(size for size in shape if size >= 0)
        shape = tuple(self.numel() // fixed_size if size < 0 else size for size in shape)
        return replace(self, shape=shape, strides=contiguous(shape))

    def cast(self, dtype: torch.dtype) -> Area:
        """Reinterpret the bytes of a contiguous area as elements of another dtype."""
        last = self.shape[-1] * self.itemsize // dtype.itemsize
        shape = (*self.shape[:-1], last)
        return replace(self, dtype=dtype, shape=shape, strides=contiguous(shape))

    def as_bytes(self) -> Area:
        """Reinterpret 8-bit floats as bytes, which every GPU can load; other areas stay as they are."""
        return self.cast(torch.uint8) if self.dtype.is_floating_point and self.itemsize == 1 else self

    def part(self, axis: int, start: int, size: int, step: int = 1) -> Area:
        """Slice `size` entries of an axis."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[axis] * self.itemsize
        shape[axis], strides[axis] = size, strides[axis] * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def bind(self, roots: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor in the memory that the roots name."""
        root = roots[self.root]
        if root.dtype != self.dtype:
            root = root.view(-1).view(self.dtype)
        return torch.as_strided(root, self.shape, self.strides, root.storage_offset() + self.offset // self.itemsize)


@dataclass(frozen=True, slots=True)
class Box:
    """Block of an area that one copy of the copy engine moves into shared memory with a Gluon layout."""

    area: Area
    block: tuple[int, ...]
    layout: Any

    def bind(self, roots: Mapping[str, Tensor]) -> Any:
        """Return Triton's descriptor of the block in the memory that the roots name."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor.from_tensor(self.area.bind(roots), list(self.block), self.layout)


class Arena:
    """Bump allocator that hands out consecutive parts of the workspace."""

    def __init__(self) -> None:
        self.used = 0

    def take(self, dtype: torch.dtype, *shape: int) -> Area:
        """Allocate a contiguous tensor."""
        area = Area.of("workspace", dtype, *shape, offset=self.used)
        self.used += -(-area.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return area


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides))
