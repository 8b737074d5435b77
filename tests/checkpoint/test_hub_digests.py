"""Files of a repository against the SHA-256 of its listing, whole and piece by piece."""

from __future__ import annotations

import hashlib
import pickle
from pathlib import Path

import pytest
from refusing import refuses

from moeq.checkpoint.hub_digests import PIECE_BYTES, ListedDigests
from moeq.errors import MoeqError

FILE, OTHER = "model.safetensors", "notes.txt"
DATA = bytes(range(251)) * (5 * PIECE_BYTES // 500)  # two pieces and a half


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / FILE
    file.write_bytes(DATA)
    return file


@pytest.fixture
def listed() -> ListedDigests:
    return ListedDigests("org/name", {FILE: hashlib.sha256(DATA).hexdigest()})


def refused(text: str) -> pytest.RaisesExc[MoeqError]:
    return pytest.raises(MoeqError, match=text, check=lambda error: error.code == "source.digest-mismatch")


def test_only_what_is_listed_is_compared(listed: ListedDigests, path: Path) -> None:
    assert listed.covers(FILE)
    assert not listed.covers(OTHER)
    listed.check(path, FILE)
    listed.check(path.with_name("missing"), OTHER)


def test_a_file_is_hashed_again_once_it_has_changed(listed: ListedDigests, path: Path) -> None:
    listed.check(path, FILE)
    path.write_bytes(b"!" + DATA[1:])
    for _ in range(2):
        with refused(f"org/name: {FILE} is not what the Hub lists") as caught:
            listed.check(path, FILE)
    assert (caught.value.hint or "").startswith(f"remove {path}, and try again")
    with refused(FILE) as caught:  # what the client's cache does not hold is not to be removed
        listed.check(path, FILE, path.parent / "pieces")
    assert (caught.value.hint or "").startswith("try again")


def test_the_header_that_was_read_first_is_the_files(listed: ListedDigests, path: Path) -> None:
    listed.expect_header(FILE, DATA[:100])
    listed.check(path, FILE)
    other = ListedDigests("org/name", {FILE: hashlib.sha256(DATA).hexdigest()})
    other.expect_header(FILE, DATA[:99] + b"!")
    with refused(f"{FILE}, its header"):
        other.check(path, FILE)


def test_ranges_are_compared_with_pieces_of_the_whole_file(listed: ListedDigests, path: Path) -> None:
    pieces = path.parent / "pieces"
    assert listed.pieces_of(FILE, len(DATA), pieces) is None
    for _ in range(2):
        pickle.loads(pickle.dumps(listed)).check(path, FILE, pieces)
    assert [file.name for file in pieces.iterdir()] == [hashlib.sha256(DATA).hexdigest()]
    known = listed.pieces_of(FILE, len(DATA), pieces)
    assert known is not None
    assert len(known) == 3 * 32
    assert listed.pieces_of(FILE, len(DATA) + PIECE_BYTES, pieces) is None
    listed.require_pieces(DATA, 0, known, FILE)
    listed.require_pieces(DATA[PIECE_BYTES:], 1, known, FILE)
    with refused(f"{FILE}, read as a range"):
        listed.require_pieces(DATA[PIECE_BYTES:], 0, known, FILE)
    with refused(f"{FILE}, read as a range"):
        listed.require_pieces(DATA[2 * PIECE_BYTES :] + b"!", 2, known, FILE)


def test_a_file_that_cannot_be_hashed_is_named(listed: ListedDigests, path: Path) -> None:
    (path.parent / "pieces").touch()
    with refuses("source.unreadable", f"{FILE}: File exists"):
        listed.check(path, FILE, path.parent / "pieces")
