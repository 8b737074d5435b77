"""Reading a rank's bytes out of stacked tensors: whole experts in one read, shards run by run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from moeq.errors import MoeqError
from moeq.layouts.arranged import ArrangedLayout, torch_dtype
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    import torch
    from torch import Tensor

    from moeq.checkpoint.header import TensorEntry
    from moeq.checkpoint.source import Source

    Bytes = np.ndarray[Any, Any]
    #: Fills an array with the piece that starts at a place of the tensor that is read, both counted in bytes.
    Read = Callable[[Bytes, int], None]

#: Runs closer than this are read together: the operating system reads whole pages anyway.
PAGE = 4096

#: Threads that read (one moves a quarter of what four do, and eight still a fifth more), and bytes that each reads at
#: a time: enough for a copy engine, little beside a layer.
READERS = 8
STAGE = 4 << 20


@dataclass(frozen=True)
class Window:
    """What a rank takes of one stored matrix: output features per half of w13, and input features.

    Attributes:
        n: `(start, stop)` along N, per half for a gated w13.
        k: `(start, stop)` along K.
    """

    n: tuple[int, int]
    k: tuple[int, int]


@dataclass(frozen=True)
class Span:
    """Bytes of one stored expert that are read at once.

    Attributes:
        start: first byte.
        stop: one past the last.
        chosen: those that are kept, counted from `start` in units of `width`; None for all of them.
        kept: how many bytes are kept.
        width: bytes that stay together, 1 to 8.
    """

    start: int
    stop: int
    chosen: Bytes | None
    kept: int
    width: int = 1


@dataclass(frozen=True)
class PartCut:
    """One part of a shard: its bytes within the stored part, and its shape.

    Attributes:
        shape: shape of the shard's part, one expert.
        spans: what to read, in order; None where only unpacking tells (the whole expert is read and cut in memory).
    """

    shape: tuple[int, ...]
    spans: tuple[Span, ...] | None


@lru_cache(maxsize=64)
def part_cuts(layout_id: str, spec: MatrixSpec, window: Window) -> Mapping[str, PartCut]:
    """Which bytes of every part of a packed expert make up the packing of a shard.

    Asks the layout itself: parts whose bytes spell out their own positions go through `slice_parts`, and what comes
    back is the list of positions.

    Raises:
        MoeqError: `usage.illegal-slice` where the layout allows no such slice.
    """
    import torch

    layout = _sliceable(layout_id)
    tensors = layout.tensors(spec)
    sizes = {
        part: _nbytes(tensor.shape) * torch.empty(0, dtype=torch_dtype(tensor.dtype)).element_size()
        for part, tensor in tensors.items()
    }
    positions: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for digit in range((max(sizes.values()).bit_length() + 7) // 8):
        spelled = {
            part: ((torch.arange(sizes[part]) >> (8 * digit)) & 0xFF)
            .to(torch.uint8)
            .view(torch_dtype(tensor.dtype))
            .view(tensor.shape)
            for part, tensor in tensors.items()
        }
        for part, cut in layout.slice_parts(spelled, spec, n=window.n, k=window.k).items():
            digits = cut.contiguous().view(-1).view(torch.uint8).long() << (8 * digit)
            positions[part] = positions[part] + digits if part in positions else digits
            shapes[part] = tuple(cut.shape)
    return {part: PartCut(shapes[part], _spans(index, sizes[part])) for part, index in positions.items()}


def _nbytes(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _sliceable(layout_id: str) -> ArrangedLayout:
    layout = get_layout(layout_id)
    if not isinstance(layout, ArrangedLayout):
        raise MoeqError("usage.illegal-slice", f"{layout_id} cannot be sliced")
    return layout


def _spans(index: Tensor, size: int) -> tuple[Span, ...] | None:
    """Positions as spans; None where they do not ascend: the shard is not a selection of the stored bytes."""
    import numpy as np

    positions = index.numpy()
    steps = np.diff(positions)
    if len(positions) == 0 or int(positions[-1]) >= size or bool((steps <= 0).any()):
        return None
    borders = [0, *(np.flatnonzero(steps > PAGE) + 1).tolist(), len(positions)]
    spans = []
    for first, last in pairwise(borders):
        start, stop = int(positions[first]), int(positions[last - 1]) + 1
        if stop - start == last - first:
            spans.append(Span(start, stop, None, last - first))
        else:
            chosen, width = _units(positions[first:last] - start)
            spans.append(Span(start, stop, chosen, last - first, width))
    return tuple(spans)


def _units(chosen: Bytes) -> tuple[Bytes, int]:
    """Positions of bytes as positions of the largest units that they are whole runs of."""
    for width in (8, 4, 2):
        if len(chosen) % width == 0:
            units = chosen.reshape(-1, width)
            if not (units[:, 0] % width).any() and (units[:, -1] - units[:, 0] == width - 1).all():
                return units[:, 0] // width, width
    return chosen, 1


def read_experts(
    source: Source, name: str, rows: tuple[int, int], device: torch.device | None = None, into: Tensor | None = None
) -> Tensor:
    """`tensor[rows]` of a stacked tensor, whole experts in one pass over the file.

    Args:
        device: None for the CPU. Another device is filled through a few small pinned buffers, so that no whole
            tensor lies in memory in between.
        into: filled and returned instead of a new tensor, where it is contiguous and of the stored dtype and shape.
    """
    import torch

    entry = source.entry(name)
    size = (entry.end - entry.start) // entry.shape[0]
    found = _target(entry, (rows[1] - rows[0], *entry.shape[1:]), device, into)
    out, offset = found.view(-1).view(torch.uint8), entry.start + rows[0] * size

    def reader(fd: int) -> Read:
        return lambda target, start: source.read_into(fd, target.data, offset + start, entry.file)

    _fill(source, entry.file, out, STAGE, reader)
    return found


def read_shards(
    source: Source,
    name: str,
    rows: tuple[int, int],
    cut: PartCut,
    device: torch.device | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """The shard of `tensor[rows]` that `cut.spans` select, reading nothing else (but for the rest of a page).

    `device` and `into` as in `read_experts`.
    """
    import torch

    entry, spans = source.entry(name), cut.spans
    assert spans is not None  # callers cut in memory where there are none
    size = (entry.end - entry.start) // entry.shape[0]
    kept = sum(span.kept for span in spans)
    found = _target(entry, (rows[1] - rows[0], *cut.shape), device, into)

    def reader(fd: int) -> Read:
        scratch = bytearray(max(span.stop - span.start for span in spans))

        def read(target: Bytes, start: int) -> None:
            for row, one in enumerate(target.reshape(-1, kept), start=rows[0] + start // kept):
                _read_row(source, fd, one, entry.start + row * size, spans, scratch, entry.file)

        return read

    _fill(source, entry.file, found.view(-1).view(torch.uint8), kept * max(1, STAGE // kept), reader)
    return found


def _target(entry: TensorEntry, shape: tuple[int, ...], device: torch.device | None, into: Tensor | None) -> Tensor:
    """`into` where it fits, or else a new tensor."""
    import torch

    dtype = torch_dtype(_stored(entry.dtype))
    if into is None or into.dtype != dtype or tuple(into.shape) != shape or not into.is_contiguous():
        return torch.empty(shape, dtype=dtype, device=device)
    return into


def _fill(
    source: Source, file: str, out: Tensor, stage: int, reader: Callable[[int], Read], staged: bool | None = None
) -> None:
    """Bytes `[n]` from a file, in pieces of `stage`, by a few threads: some read while others copy.

    Each opens the file for itself: the operating system reads ahead by what it sees of one opening.

    Args:
        reader: from an opened file to what reads the piece that starts at a place in `out`.
        staged: read into a buffer and copy from there; None: where `out` is not in the memory of the host.
    """
    import torch

    # One stream for all threads, the caller's: memory that it has just freed may still be in use there.
    stream = torch.cuda.current_stream(out.device) if out.device.type == "cuda" else None
    staged = out.device.type != "cpu" if staged is None else staged
    starts = range(0, len(out), stage)

    def carry(mine: range) -> None:
        buffer = torch.empty(min(stage, len(out)), dtype=torch.uint8, pin_memory=stream is not None) if staged else None
        with torch.cuda.stream(stream), _opened(source, file) as fd:
            read = reader(fd)
            for start in mine:
                piece = out[start : start + stage]
                target = piece if buffer is None else buffer[: len(piece)]
                read(target.numpy(), start)
                if buffer is not None:
                    piece.copy_(target, non_blocking=True)
                if stream is not None:
                    stream.record_event().synchronize()

    shares = [starts[number::READERS] for number in range(min(READERS, len(starts)))]
    if len(shares) < 2:
        carry(starts)
        return
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(carry, shares))


def _read_row(
    source: Source, fd: int, out: Bytes, offset: int, spans: tuple[Span, ...], scratch: bytearray, file: str
) -> None:
    import numpy as np

    done = 0
    for span in spans:
        target = out[done : done + span.kept]
        if span.chosen is None:
            source.read_into(fd, target.data, offset + span.start, file)
        else:
            window = memoryview(scratch)[: span.stop - span.start]
            source.read_into(fd, window, offset + span.start, file)
            unit = np.dtype(f"u{span.width}")
            # Nothing is out of bounds; "raise" would go through a buffer.
            np.take(np.frombuffer(window, dtype=unit), span.chosen, out=target.view(unit), mode="clip")
        done += span.kept


@contextmanager
def _opened(source: Source, file: str) -> Iterator[int]:
    fd = source.open(file)
    try:
        yield fd
    finally:
        os.close(fd)


def _stored(dtype: str) -> str:
    """Exponent bytes are bytes, as everywhere in moeq."""
    return "U8" if dtype == "F8_E8M0" else dtype
