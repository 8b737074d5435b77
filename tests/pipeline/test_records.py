"""Records of finished units: which unit they can be of, and whether the bytes are still there."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.manifest import FileDigest, TensorDigest
from moeq.checkpoint.outputs import OutputFolder
from moeq.pipeline.plan.units import Piece
from moeq.pipeline.state.records import (
    UnitRecord,
    file_digest,
    is_intact,
    piece_digest,
    read_digest,
    tensor_digests,
)

DATA = bytes(range(100))


@dataclass(frozen=True)
class Written:
    """A unit of a plan, as far as its record is compared with it."""

    id: str = "layer-0/w2"
    file: str = "file"
    bytes_out: int = 60
    num_digests: int = 2


class Plan:
    """A plan whose units write two pieces of one tensor and one of another."""

    def pieces(self, unit: Written) -> list[Piece]:
        return [Piece("a", 0, 10, 30), Piece("a", 10, 30, 30), Piece("b", 30, 60, 30)]


def digest(*pieces: bytes) -> str:
    return blake3(b"".join(blake3(piece).digest() for piece in pieces)).hexdigest()


TENSORS = {"a": TensorDigest(30, digest(DATA[:10], DATA[10:30])), "b": TensorDigest(30, digest(DATA[30:60]))}
RECORD = UnitRecord("layer-0/w2", 60, TENSORS, {"down": ("x", "y")})


@pytest.mark.parametrize(
    ("record", "unit", "fits"),
    [
        ({}, {}, True),
        ({"unit": "layer-1/w2"}, {}, False),
        ({"bytes": 61}, {}, False),
        ({"digests": {}}, {}, False),
        ({"digests": {"gate": ("x", "y"), "up": ("x",)}}, {}, False),
        ({"digests": {"gate": ("x", "y"), "up": ("x", "z")}}, {}, True),
        ({}, {"num_digests": 0}, False),
        ({"digests": {}}, {"num_digests": 0}, True),
    ],
)
def test_a_record_is_of_one_unit(record: dict[str, Any], unit: dict[str, Any], fits: bool) -> None:
    assert replace(RECORD, **record).fits(Written(**unit)) is fits  # type: ignore[arg-type]


@pytest.mark.parametrize("buffer", [None, 7])
def test_bytes_are_found_again(buffer: int | None, tmp_path: Path) -> None:
    memory = None if buffer is None else np.empty(buffer, np.uint8)
    with OutputFolder(tmp_path) as folder:

        def intact(record: UnitRecord = RECORD, **unit: Any) -> bool:
            return is_intact(Plan(), Written(**unit), record, folder, memory)  # type: ignore[arg-type]

        assert not intact(), "there is no such file"
        for data, expected in (
            (DATA, True),
            (DATA[:60], True),
            (DATA[:59], False),
            (b"x" + DATA[1:], False),
            (DATA[:59] + b"x", False),
        ):
            (tmp_path / "file").write_bytes(data)
            assert intact() is expected, data
        (tmp_path / "file").write_bytes(DATA)
        assert not intact(replace(RECORD, bytes=61))
        assert not intact(replace(RECORD, tensors={"a": TENSORS["a"]}))


def test_digests_of_pieces_make_those_of_tensors() -> None:
    pieces = [Piece("a", 0, 10, 30), Piece("b", 30, 60, 30), Piece("a", 10, 30, 30)]
    found = tensor_digests((piece, piece_digest(memoryview(DATA)[piece.start : piece.stop])) for piece in pieces)
    assert found == TENSORS
    assert piece_digest(np.frombuffer(DATA, np.uint8)) == piece_digest(memoryview(DATA)) == blake3(DATA).digest()


def test_whole_files(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    assert file_digest(tmp_path / "file") == FileDigest(100, blake3(DATA).hexdigest())
    with closing_fd(os.open(tmp_path / "file", os.O_RDONLY)) as fd:
        for size in (1, 20, 100):
            assert read_digest(fd, Piece("a", 90, 100, 10), np.empty(size, np.uint8)) == blake3(DATA[90:]).digest()
        with pytest.raises(OSError, match="the file is too short"):
            read_digest(fd, Piece("a", 90, 101, 11), np.empty(100, np.uint8))


def test_records_are_written_as_plain_values() -> None:
    assert RECORD.to_json() == {
        "unit": "layer-0/w2", "bytes": 60, "digests": {"down": ("x", "y")}, "kept": (), "losses": 0, "differences": (),
        "tensors": {name: {"piece": 30, "blake3": one.blake3} for name, one in TENSORS.items()},
    }  # fmt: skip


def test_a_callers_buffer_is_read_into(tmp_path: Path) -> None:
    """One of a whole chunk for every unit would be allocated and freed again and again."""
    memory = np.zeros(100, np.uint8)
    (tmp_path / "file").write_bytes(DATA)
    with OutputFolder(tmp_path) as folder:
        assert is_intact(Plan(), Written(), RECORD, folder, memory)  # type: ignore[arg-type]
    assert memory.any()
