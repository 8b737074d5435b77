"""Placeholders for tensors: launches are planned with them once, and bound to addresses in every call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

#: Buffers begin at multiples of so many bytes (the copy engine needs 16).
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class Area:
    """A strided tensor inside a root: an argument of the call, a tensor of the weights, or the workspace.

    Attributes:
        root: name of what it lies in.
        dtype, shape, strides: as of a tensor, strides in elements.
        offset: bytes from the root's beginning.
    """

    root: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0

    @classmethod
    def of(cls, root: str, dtype: torch.dtype, *shape: int, offset: int = 0) -> Area:
        """A contiguous one."""
        return cls(root, dtype, shape, contiguous(shape), offset)

    @classmethod
    def like(cls, root: str, tensor: Tensor) -> Area:
        """That of a whole tensor."""
        return cls(root, tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def view(self, *shape: int) -> Area:
        """Other axes of contiguous elements; one size may be -1."""
        known = math.prod(size for size in shape if size >= 0)
        shape = tuple(self.numel() // known if size < 0 else size for size in shape)
        return replace(self, shape=shape, strides=contiguous(shape))

    def cast(self, dtype: torch.dtype) -> Area:
        """The same bytes as elements of another size; contiguous."""
        last = self.shape[-1] * self.itemsize // dtype.itemsize
        shape = (*self.shape[:-1], last)
        return replace(self, dtype=dtype, shape=shape, strides=contiguous(shape))

    def part(self, axis: int, start: int, size: int, step: int = 1) -> Area:
        """`size` entries of an axis."""
        shape, strides = list(self.shape), list(self.strides)
        offset = self.offset + start * strides[axis] * self.itemsize
        shape[axis], strides[axis] = size, strides[axis] * step
        return replace(self, shape=tuple(shape), strides=tuple(strides), offset=offset)

    def bind(self, roots: Mapping[str, Tensor]) -> Tensor:
        """The tensor itself, once there is memory."""
        root = roots[self.root]
        if root.dtype != self.dtype:
            root = root.view(-1).view(self.dtype)
        return torch.as_strided(root, self.shape, self.strides, root.storage_offset() + self.offset // self.itemsize)


@dataclass(frozen=True, slots=True)
class Box:
    """What the copy engine moves at a time: a block of an area, into shared memory of a layout of Gluon's."""

    area: Area
    block: tuple[int, ...]
    layout: Any

    def bind(self, roots: Mapping[str, Tensor]) -> Any:
        """Triton's descriptor, once there is memory."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor.from_tensor(self.area.bind(roots), list(self.block), self.layout)


class Arena:
    """Hands out parts of the workspace, one behind the other."""

    def __init__(self) -> None:
        self.used = 0

    def take(self, dtype: torch.dtype, *shape: int) -> Area:
        """Room for a contiguous tensor."""
        area = Area.of("workspace", dtype, *shape, offset=self.used)
        self.used += -(-area.numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return area


def contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of contiguous elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(1, size))
    return tuple(reversed(strides))
