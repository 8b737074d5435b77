"""What vLLM 0.32.0 lacks between data-parallel ranks on a CPU, as a plug-in of the engine: for `serve_options.py`.

Its all-gather and reduce-scatter of rows that ranks hold unequally many of are there for GPUs only; on a CPU the first
request ends with a NotImplementedError, whoever runs the experts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

#: What a package has that tells the engine of this plug-in.
ENTRY_POINTS = "[vllm.general_plugins]\ncpu_gather = cpu_gather:register\n"


def write_package(folder: Path) -> None:
    """Metadata with the entry point, in a folder for the search path."""
    metadata = folder / "cpu_gather-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-gather\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)


def register() -> None:
    """Register the functions; the engine calls this in each of its processes."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows `[sizes[rank], ...]` of all ranks, `[sum(sizes), ...]`; of every tensor of a list."""
    if isinstance(input_, list):
        return [all_gatherv(self, one, dim, sizes) for one in input_]
    assert dim == 0
    sizes = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros(max(sizes), *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    found = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(found, padded, group=self.cpu_group)
    return torch.cat([one[:size] for one, size in zip(found, sizes, strict=True)])


def reduce_scatterv(self: Any, input_: torch.Tensor, dim: int = 0, sizes: list[int] | None = None) -> torch.Tensor:
    """Sum the rows `[sum(sizes), ...]` of all ranks; return this rank's `[sizes[rank], ...]`."""
    assert dim == 0
    sizes = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.float()
    dist.all_reduce(total, group=self.cpu_group)
    return total.split(sizes)[self.rank_in_group].to(input_.dtype)
