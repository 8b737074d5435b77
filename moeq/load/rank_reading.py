"""Read a rank's bytes out of stacked tensors: whole experts in one pass, shards of experts span by span."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.disk import closing_fd
from moeq.layouts.parts import torch_dtype
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor

    from moeq.checkpoint.header import TensorEntry
    from moeq.checkpoint.source import Source

    Bytes = np.ndarray[Any, Any]
    #: Function that fills a byte array with the piece of the tensor that starts at a byte offset.
    Read = Callable[[Bytes, int], None]

#: Largest gap in bytes over which spans are joined: the operating system reads whole pages anyway.
PAGE = 4096

#: Number of threads that read: four are four times as fast as one, eight a fifth faster than four.
READERS = 8

#: Bytes that a thread reads at a time: enough for a copy engine, little compared with a layer.
STAGE_BYTES = 4 << 20


@dataclass(frozen=True)
class Window:
    """Part of one stored matrix that a rank reads: output features per half of w13, and input features."""

    n: tuple[int, int]  #: `(start, stop)` along N, per half for a gated w13
    k: tuple[int, int]  #: `(start, stop)` along K


@dataclass(frozen=True)
class Span:
    """Bytes of one stored expert that are read at once."""

    start: int  #: first byte
    stop: int  #: one past the last byte
    chosen: Bytes | None  #: positions of the units that are kept, counted from `start`; None for all
    kept: int  #: number of bytes that are kept
    width: int = 1  #: bytes per unit, 1 to 8


@dataclass(frozen=True)
class PartCut:
    """Part of a shard: its bytes within the stored part, and its shape."""

    shape: tuple[int, ...]  #: shape of the shard's part of one expert
    #: Spans to read, in order; None if the shard is no selection of bytes, so that the whole expert is read and cut in
    #: memory.
    spans: tuple[Span, ...] | None


@lru_cache(maxsize=64)
def part_cuts(layout_id: str, spec: MatrixSpec, window: Window) -> Mapping[str, PartCut]:
    """Find the bytes of every part of a packed expert that make up the packing of a shard, by part.

    The layout's own `slice_parts` cuts stand-in parts, each byte of which spells its position. The result lists the
    positions of the shard's bytes.

    Raises MoeqError `usage.illegal-slice` if the layout allows no such slice.
    """
    import torch

    layout = get_layout(layout_id)
    tensors = layout.tensors(spec)
    sizes = {part: prod(tensor.shape) * torch_dtype(tensor.dtype).itemsize for part, tensor in tensors.items()}
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


def _spans(index: Tensor, size: int) -> tuple[Span, ...] | None:
    """Group positions into spans; None if they do not ascend, so that the shard is no selection of the stored bytes."""
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
    """Convert positions of bytes to positions of the largest units that they consist of; also return a unit's bytes."""
    for width in (8, 4, 2):
        if len(chosen) % width == 0:
            units = chosen.reshape(-1, width)
            if not (units[:, 0] % width).any() and (units[:, -1] - units[:, 0] == width - 1).all():
                return units[:, 0] // width, width
    return chosen, 1


def read_experts(
    source: Source, name: str, rows: tuple[int, int], device: torch.device | None = None, into: Tensor | None = None
) -> Tensor:
    """Read `tensor[rows]` of a stacked tensor, whole experts in one pass over the file.

    Args:
        rows: `(start, stop)` of the experts.
        device: None for the CPU. Another device is filled through a few small pinned buffers, so that host memory never
            holds a whole tensor.
        into: tensor that is filled and returned, if it is contiguous and of the stored dtype and shape.
    """
    import torch

    entry = source.entry(name)
    size = (entry.end - entry.start) // entry.shape[0]
    found = _target(entry, (rows[1] - rows[0], *entry.shape[1:]), device, into)
    out, offset = found.view(-1).view(torch.uint8), entry.start + rows[0] * size

    def reader(fd: int) -> Read:
        return lambda target, start: source.read_into(fd, target.data, offset + start, entry.file)

    _by_pieces(source, entry.file, out, STAGE_BYTES, reader)
    return found


def read_shards(
    source: Source,
    name: str,
    rows: tuple[int, int],
    cut: PartCut,
    device: torch.device | None = None,
    into: Tensor | None = None,
) -> Tensor:
    """Read the shard of `tensor[rows]` that `cut.spans` select, and no other bytes except gaps of up to a page.

    For `device` and `into` see `read_experts`.
    """
    import numpy as np
    import torch

    entry, spans = source.entry(name), cut.spans
    assert spans is not None  # callers cut in memory without spans
    size = (entry.end - entry.start) // entry.shape[0]
    kept = sum(span.kept for span in spans)
    found = _target(entry, (rows[1] - rows[0], *cut.shape), device, into)

    def reader(fd: int) -> Read:
        scratch = bytearray(max(span.stop - span.start for span in spans))

        def read(target: Bytes, start: int) -> None:
            for row, one in enumerate(target.reshape(-1, kept), start=rows[0] + start // kept):
                offset, done = entry.start + row * size, 0
                for span in spans:
                    out = one[done : done + span.kept]
                    window = out.data if span.chosen is None else memoryview(scratch)[: span.stop - span.start]
                    source.read_into(fd, window, offset + span.start, entry.file)
                    if span.chosen is not None:
                        unit = np.dtype(f"u{span.width}")
                        # All positions are in bounds; the mode "raise" would go through a buffer.
                        np.take(np.frombuffer(window, dtype=unit), span.chosen, out=out.view(unit), mode="clip")
                    done += span.kept

        return read

    _by_pieces(source, entry.file, found.view(-1).view(torch.uint8), kept * max(1, STAGE_BYTES // kept), reader)
    return found


def equals_stored(source: Source, name: str, tensor: Tensor) -> bool:
    """Return whether a tensor has the shape and the bytes of the stored tensor `name`."""
    import numpy as np
    import torch

    entry = source.entry(name)
    if tuple(tensor.shape) != entry.shape or tensor.nbytes != entry.end - entry.start:
        return False
    given = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    different: list[int] = []

    def reader(fd: int) -> Read:
        stored = np.empty(min(STAGE_BYTES, len(given)), dtype=np.uint8)

        def compare(piece: Bytes, start: int) -> None:
            window = stored[: len(piece)]
            if not different:
                source.read_into(fd, window.data, entry.start + start, entry.file)
                if not np.array_equal(window, piece):
                    different.append(start)

        return compare

    _by_pieces(source, entry.file, given, STAGE_BYTES, reader)
    return not different


def _target(entry: TensorEntry, shape: tuple[int, ...], device: torch.device | None, into: Tensor | None) -> Tensor:
    """Return `into` if it has the stored dtype and this shape and is contiguous, else a new tensor."""
    import torch

    dtype = torch_dtype("U8" if entry.dtype == "F8_E8M0" else entry.dtype)  # exponents are read as bytes
    if into is None or into.dtype != dtype or tuple(into.shape) != shape or not into.is_contiguous():
        return torch.empty(shape, dtype=dtype, device=device)
    return into


def _by_pieces(
    source: Source, file: str, out: Tensor, stage: int, reader: Callable[[int], Read], staged: bool | None = None
) -> None:
    """Call a reading function for every piece of the bytes `out` `[n]`, in a few threads: some read, others copy.

    Each thread opens the file for itself, since the operating system reads ahead for each opened file.

    Args:
        stage: bytes of a piece.
        reader: function that makes the reading function of an opened file.
        staged: whether to read into a buffer and copy from there; None: if `out` is not in the memory of the host.
    """
    import torch

    # All threads use the caller's stream: memory that it has just freed may still be in use there.
    stream = torch.cuda.current_stream(out.device) if out.device.type == "cuda" else None
    staged = out.device.type != "cpu" if staged is None else staged
    starts = range(0, len(out), stage)

    def read_share(mine: range) -> None:
        buffer = torch.empty(min(stage, len(out)), dtype=torch.uint8, pin_memory=stream is not None) if staged else None
        with torch.cuda.stream(stream), closing_fd(source.open(file)) as fd:
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
        read_share(starts)
        return
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(read_share, shares))
