"""Read a rank's experts of a converted layer again, into tensors that kernels read meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import LayerEntry, StackedRole
from moeq.layouts.arranged import torch_dtype
from moeq.layouts.base import check_index_parts
from moeq.layouts.registry import get_layout
from moeq.load.ranks import RankPart
from moeq.load.torch_loader import read_parts

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.model import Checkpoint

    Tensors = dict[StackedRole, dict[str, Tensor]]

#: Upper bound of the bytes of experts that are read before they are written, unless one expert has more.
GROUP_BYTES = 64 << 20


def refill_experts(
    checkpoint: Checkpoint,
    entry: LayerEntry,
    part: RankPart,
    targets: Mapping[StackedRole, Mapping[str, Tensor]],
) -> Iterator[range]:
    """Write the experts of `part` into its tensors, some at a time, and yield those that are written.

    All bytes of an expert are read and checked before one is written, so that an error leaves it as it was.

    Raises MoeqError `source.bad-data` for indices that are out of range, `source.*` for files that cannot be read.
    """
    import torch

    first, count = part.rows[0], part.rows[1] - part.rows[0]
    device = next(iter(targets["w2"].values())).device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    size = sum(tensor.nbytes for parts in targets.values() for tensor in parts.values()) // max(count, 1)
    step = max(1, min(count, GROUP_BYTES // max(size, 1)))
    # On a GPU one set of buffers is read into while the other is copied.
    buffers = [_buffers(entry, part, step, pinned=stream is not None) for _ in range(1 if stream is None else 2)]
    for number, start in enumerate(range(0, count, step)):
        stop = min(start + step, count)
        cut, read = replace(part, rows=(first + start, first + stop)), {}
        for role, matrix in part.matrices.items():
            into = {name: one[: stop - start] for name, one in buffers[number % len(buffers)][role].items()}
            read[role] = read_parts(checkpoint, entry, cut, matrix, torch.device("cpu"), into)
            check_index_parts(read[role], matrix.spec, f"layer {entry.layer}: {role}")
        if stream is not None:
            stream.synchronize()  # the other buffers are free then
        for role, parts in read.items():
            for name, tensor in parts.items():
                targets[role][name][start:stop].copy_(tensor, non_blocking=True)
        yield range(part.experts[0] + start, part.experts[0] + stop)
    if stream is not None:
        stream.synchronize()


def _buffers(entry: LayerEntry, part: RankPart, count: int, *, pinned: bool) -> Tensors:
    """Allocate tensors of some experts in the host's memory, in the stored dtypes."""
    import torch

    layout = get_layout(entry.layout)
    return {
        role: {
            name: torch.empty(count, *one.shape, dtype=torch_dtype(one.dtype), device="cpu", pin_memory=pinned)
            for name, one in layout.tensors(matrix.spec).items()
        }
        for role, matrix in part.matrices.items()
    }
