"""Find layers that are stored in equal bytes, whose values need no comparison. No torch."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import Source
from moeq.model import Checkpoint
from moeq.model.converted import ConvertedCheckpoint

_CHUNK = 8 * 2**20

#: One tensor in both checkpoints.
_Pair = tuple[TensorEntry, TensorEntry]


def same_layer(a: Checkpoint, b: Checkpoint, layer: int) -> bool:
    """Return whether a layer's experts are stored in the same bytes with the same meaning in both checkpoints.

    Configs, headers and, for a conversion, its manifest determine the meaning of bytes, so all have to be equal.
    """
    if (a.kind, a.source.config, a.source.side_configs) != (b.kind, b.source.config, b.source.side_configs):
        return False
    if isinstance(a, ConvertedCheckpoint) and isinstance(b, ConvertedCheckpoint):
        is_packed = a.is_packed(layer)
        if is_packed != b.is_packed(layer):
            return False
        if is_packed:
            ours, theirs = a.manifest.layer(layer), b.manifest.layer(layer)
            same = replace(ours, digests={}, losses=0) == replace(theirs, digests={}, losses=0)
            return same and equal_bytes(a.source, b.source, ours.tensors)
    names, others = ({entry.name for entry in one.experts(layer).layer.tensors()} for one in (a, b))
    return names == others and equal_bytes(a.source, b.source, names)


def equal_bytes(a: Source, b: Source, names: Collection[str]) -> bool:
    """Return whether tensors have the same types, shapes and bytes in two checkpoints.

    Raises MoeqError `source.*` where they cannot be read.
    """
    pairs = [(a.entry(name), b.entry(name)) for name in names]
    if any((left.dtype, left.shape) != (right.dtype, right.shape) for left, right in pairs):
        return False
    buffers = bytearray(_CHUNK), bytearray(_CHUNK)
    with ExitStack() as stack:
        opened: dict[tuple[bool, str], int] = {}

        def descriptor(source: Source, file: str) -> int:
            key = (source is a, file)
            if key not in opened:
                opened[key] = source.open(file)
                stack.callback(os.close, opened[key])
            return opened[key]

        for (left, right), size in _runs(pairs):
            for offset in range(0, size, _CHUNK):
                count = min(_CHUNK, size - offset)
                for source, entry, buffer in ((a, left, buffers[0]), (b, right, buffers[1])):
                    view = memoryview(buffer)[:count]
                    source.read_into(descriptor(source, entry.file), view, entry.start + offset, entry.file)
                if buffers[0] != buffers[1]:  # bytes beyond `count` are left from an earlier chunk, and equal
                    return False
    return True


def _runs(pairs: Iterable[_Pair]) -> Iterator[tuple[_Pair, int]]:
    """Join pairs that are contiguous in both checkpoints; yield (first pair, size in bytes) of each run."""
    first: _Pair | None = None
    size = 0
    for left, right in sorted(pairs, key=lambda pair: (pair[0].file, pair[0].start)):
        if first is not None and all(
            one.file == start.file and one.start == start.start + size
            for one, start in zip((left, right), first, strict=True)
        ):
            size += left.nbytes
            continue
        if first is not None:
            yield first, size
        first, size = (left, right), left.nbytes
    if first is not None:
        yield first, size
