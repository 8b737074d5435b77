"""Bytes of a file in memory that the host cannot reach go through a buffer."""

from __future__ import annotations

from pathlib import Path

import torch

from moeq.checkpoint.source import LocalSource
from moeq.load.rank_reading import _fill


def test_memory_of_a_device_is_filled_from_a_buffer(checkpoints: Path) -> None:
    """A meta tensor stands for it: it has no bytes that a read could write."""
    pieces: list[tuple[int, int]] = []

    def reader(fd: int):  # type: ignore[no-untyped-def]
        return lambda target, start: pieces.append((start, len(target)))

    source = LocalSource(checkpoints / "gptq-int4-g32-qwen3moe", "")
    _fill(source, "model.safetensors", torch.empty(10, dtype=torch.uint8, device="meta"), 4, reader)
    assert sorted(pieces) == [(0, 4), (4, 4), (8, 2)]
