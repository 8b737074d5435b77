"""Read a rank's experts of a converted layer again, into tensors that kernels read at the same time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import replace
from queue import SimpleQueue
from threading import Event
from typing import TYPE_CHECKING

from moeq.checkpoint.manifest import LayerEntry, StackedRole
from moeq.layouts.base import check_index_parts
from moeq.layouts.parts import torch_dtype
from moeq.layouts.registry import get_layout
from moeq.load.rank_reading import READERS, STAGE_BYTES
from moeq.load.ranks import RankPart
from moeq.load.torch_loader import read_parts

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.model import Checkpoint

    Tensors = dict[StackedRole, dict[str, Tensor]]

#: Upper bound of the bytes of experts that are read and not yet written, unless one expert has more.
SCRATCH_BYTES = 64 << 20


def refill_experts(
    checkpoint: Checkpoint,
    entry: LayerEntry,
    part: RankPart,
    targets: Mapping[StackedRole, Mapping[str, Tensor]],
) -> Iterator[range]:
    """Read the experts of `part` into `targets`, in a few threads, and yield ranges of experts that are written.

    All bytes of an expert are read and checked before a byte is written, so that an error leaves the expert unchanged.
    An error is raised after all experts that were written have been yielded.

    Raises MoeqError `source.bad-data` for indices that are out of range, `source.*` for files that cannot be read.
    """
    import torch

    count = part.rows[1] - part.rows[0]
    device = next(iter(targets["w2"].values())).device
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
    size = max(1, sum(tensor.nbytes for parts in targets.values() for tensor in parts.values()) // max(count, 1))
    step = max(1, min(STAGE_BYTES, SCRATCH_BYTES) // size)
    readers = max(1, min(READERS, SCRATCH_BYTES // (step * size), -(-count // step)))
    free: SimpleQueue[Tensors] = SimpleQueue()
    for _ in range(readers):
        free.put(_buffers(entry, part, min(step, count), pinned=stream is not None))

    failed = Event()

    def refill(start: int) -> range:
        if failed.is_set():
            return range(0)
        stop, buffers = min(start + step, count), free.get()
        cut, read = replace(part, rows=(part.rows[0] + start, part.rows[0] + stop)), {}
        try:
            for role, matrix in part.matrices.items():
                into = {name: one[: stop - start] for name, one in buffers[role].items()}
                read[role] = read_parts(checkpoint, entry, cut, matrix, torch.device("cpu"), into)
                check_index_parts(read[role], matrix.spec, f"layer {entry.layer}: {role}")
            with torch.cuda.stream(stream):  # the caller's stream, on which kernels read the tensors
                for role, parts in read.items():
                    for name, tensor in parts.items():
                        targets[role][name][start:stop].copy_(tensor, non_blocking=True)
                if stream is not None:
                    stream.record_event().synchronize()
        except BaseException:
            failed.set()
            raise
        finally:
            free.put(buffers)
        return range(part.experts[0] + start, part.experts[0] + stop)

    with ThreadPoolExecutor(readers) as pool:
        yield from _results([pool.submit(refill, start) for start in range(0, count, step)])


def _results(futures: list[Future[range]]) -> Iterator[range]:
    """Yield results as they come, and raise the first failure once all futures have ended."""
    error: BaseException | None = None
    for future in as_completed(futures):
        if future.exception() is not None:
            error = error or future.exception()
        elif future.result():
            yield future.result()
    if error is not None:
        raise error


def _buffers(entry: LayerEntry, part: RankPart, count: int, *, pinned: bool) -> Tensors:
    """Allocate tensors for `count` experts in the host's memory, in the stored dtypes."""
    import torch

    layout = get_layout(entry.layout)
    return {
        role: {
            name: torch.empty(count, *one.shape, dtype=torch_dtype(one.dtype), device="cpu", pin_memory=pinned)
            for name, one in layout.tensors(matrix.spec).items()
        }
        for role, matrix in part.matrices.items()
    }
