"""Bytes of a file are read in pieces: into memory that the host cannot reach, and to compare a tensor with them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import moeq
from moeq.checkpoint.source import LocalSource
from moeq.load.rank_reading import _by_pieces, holds


def test_memory_of_a_device_is_filled_from_a_buffer(checkpoints: Path) -> None:
    """A meta tensor stands for it: it has no bytes that a read could write."""
    pieces: list[tuple[int, int]] = []

    def reader(fd: int):  # type: ignore[no-untyped-def]
        return lambda target, start: pieces.append((start, len(target)))

    source = LocalSource(checkpoints / "gptq-int4-g32-qwen3moe", "")
    _by_pieces(source, "model.safetensors", torch.empty(10, dtype=torch.uint8, device="meta"), 4, reader)
    assert sorted(pieces) == [(0, 4), (4, 4), (8, 2)]


def test_a_tensor_is_compared_with_a_stored_one(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq.load.rank_reading.STAGE", 1000)
    folder, name = checkpoints / "ct-int4-g128-qwen3moe", "lm_head.weight"
    source, tensor = moeq.open(folder).source, load_file(folder / "model.safetensors")[name]
    assert holds(source, name, tensor)
    assert not holds(source, name, tensor.T)
    tensor[-1, -1] += 1
    assert not holds(source, name, tensor)
