"""Queue planned launches on the current stream, for tensors whose sizes the plan knows, and do not wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from moeq_kernels.gpu import gpu_of
from moeq_kernels.launch import Launch, Schedule, run_with_triton

if TYPE_CHECKING:
    from moeq_kernels.cuda import Bound


class QueuedLaunches:
    """Planned launches, bound to each device that runs them.

    Args:
        launches: launches in order.
        roots: names of the tensors that `run` gets, in their order.
    """

    def __init__(self, launches: Sequence[Launch], roots: Sequence[str]) -> None:
        self.launches, self._roots = tuple(launches), ("workspace", *roots)
        self._bound: dict[int, Bound] = {}

    def run(self, *tensors: Tensor) -> None:
        """Launch on the device of the tensors: by the driver on NVIDIA GPUs, by Triton's launcher elsewhere."""
        device = tensors[0].device
        addresses = (0, *(one.data_ptr() for one in tensors))  # there is no workspace
        if device.type != "cuda" or any(one % 16 for one in addresses) or gpu_of(device).backend != "cuda":
            run_with_triton(self.launches, dict(zip(self._roots[1:], tensors, strict=True)))
            return
        index = device.index
        with nullcontext() if torch.cuda.current_device() == index else torch.cuda.device(index):
            if index not in self._bound:
                from moeq_kernels.cuda import Bound

                self._bound[index] = Bound(Schedule(self.launches, 0), self._roots, {}, gpu_of(device), index)
            self._bound[index].run(addresses, (), torch.cuda.current_stream(index).cuda_stream)
