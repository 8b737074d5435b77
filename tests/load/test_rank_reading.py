"""Bytes of a file are read in pieces: into memory that the host cannot reach, and to compare a tensor with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from load.stand_in import OnGpu, Stream
from safetensors.torch import load_file

import moeq
from moeq.checkpoint.source import LocalSource
from moeq.load import rank_reading
from moeq.load.rank_reading import Span, _by_pieces, _spans, _units, equals_stored


def test_memory_of_a_device_is_filled_from_a_buffer(checkpoints: Path) -> None:
    """A meta tensor stands for it: it has no bytes that a read could write."""
    pieces: list[tuple[int, int]] = []

    def reader(fd: int):  # type: ignore[no-untyped-def]
        return lambda target, start: pieces.append((start, len(target)))

    source = LocalSource(checkpoints / "gptq-int4-g32-qwen3moe", "")
    _by_pieces(source, "model.safetensors", torch.empty(10, dtype=torch.uint8, device="meta"), 4, reader)
    assert sorted(pieces) == [(0, 4), (4, 4), (8, 2)]


def test_a_tensor_is_compared_with_a_stored_one(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq.load.rank_reading.STAGE_BYTES", 1000)
    folder, name = checkpoints / "ct-int4-g128-qwen3moe", "lm_head.weight"
    source, tensor = moeq.open(folder).source, load_file(folder / "model.safetensors")[name]
    assert equals_stored(source, name, tensor)
    assert not equals_stored(source, name, tensor.T)
    assert equals_stored(source, name, tensor.view(1, *tensor.shape)) is False, "the same bytes in another shape"
    assert not equals_stored(source, name, torch.cat([tensor.view(torch.uint8)] * 2, 1).view(torch.float32)), (
        "more bytes"
    )
    tensor[-1, -1] += 1
    assert not equals_stored(source, name, tensor)


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_chosen_bytes_are_copied_in_the_largest_units(width: int) -> None:
    whole = np.array([1, 3, 4, 9])
    chosen = (whole[:, None] * width + np.arange(width)).reshape(-1)
    units, found = _units(chosen)
    assert (units.tolist(), found) == (whole.tolist(), width)


@pytest.mark.parametrize("chosen", [[1, 2, 5, 6], [0, 1, 2, 4], [0, 2, 3, 5], [0, 1, 2]])
def test_bytes_that_are_no_units_are_copied_one_by_one(chosen: list[int]) -> None:
    units, width = _units(np.array(chosen))
    assert (units.tolist(), width) == (chosen, 1)


def test_spans_end_at_gaps_of_more_than_a_page() -> None:
    page = rank_reading.PAGE
    near, far = _spans(torch.tensor([0, page]), 9999), _spans(torch.tensor([0, page + 1]), 9999)
    assert near is not None
    (one,) = near
    assert (one.start, one.stop, one.kept) == (0, page + 1, 2)
    assert far == (Span(0, 1, None, 1), Span(page + 1, page + 2, None, 1))
    assert _spans(torch.tensor([3, 4, 5]), 6) == (Span(3, 6, None, 3),)


@pytest.mark.parametrize("index", [[], [0, 0], [1, 0], [0, 6]])
def test_positions_that_select_no_stored_bytes(index: list[int]) -> None:
    assert _spans(torch.tensor(index, dtype=torch.int64), 6) is None


def test_a_buffer_of_a_gpu_is_read_again_after_its_copy(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_reading, "READERS", 1)
    stream = Stream(monkeypatch)
    out = torch.zeros(10, dtype=torch.uint8)

    def reader(fd: int):  # type: ignore[no-untyped-def]
        def read(target: np.ndarray, start: int) -> None:
            stream.told.append("read")
            target[:] = np.arange(start, start + len(target)) + 1

        return read

    source = LocalSource(checkpoints / "gptq-int4-g32-qwen3moe", "")
    _by_pieces(source, "model.safetensors", out.as_subclass(OnGpu), 4, reader)
    assert out.tolist() == list(range(1, 11))
    assert stream.told == ["entered", *["read", "waited"] * 3]
    assert stream.pinned == {True}
    stream.told.clear()
    _by_pieces(source, "model.safetensors", out, 4, reader)
    assert stream.told == ["no stream", *["read"] * 3]
