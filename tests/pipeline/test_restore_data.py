"""`moeq-restore.data` is untrusted: what it may hold, and how reading it fails."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from moeq.checkpoint.manifest import RestoreEntry
from moeq.checkpoint.source import LocalSource
from moeq.errors import MoeqError
from moeq.pipeline.state import restore_data
from moeq.pipeline.state.restore_data import KeptSource, RestoreData

ENTRY = RestoreEntry("moeq-restore.data", ("model.safetensors",), (), copied=("a.json", "tokenizer.json"))


def header(**tensors: int) -> bytes:
    """The header of a file of bytes, with its length before it."""
    table, start = {}, 0
    for name, size in tensors.items():
        table[name] = {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}
        start += size
    raw = json.dumps(table).encode()
    return len(raw).to_bytes(8, "little") + raw


CONFIG = b'{"model_type": "x"}'
PARTS = {"header/model.safetensors": header(x=3, y=2), "text/config.json": CONFIG, "tensor/x": b"abc"}


def written(folder: Path, **changes: bytes | None) -> Path:
    parts = {name: data for name, data in (PARTS | changes).items() if data is not None}
    path = folder / "moeq-restore.data"
    path.write_bytes(header(**{name: len(data) for name, data in parts.items()}) + b"".join(parts.values()))
    return path


def refused(path: Path, entry: RestoreEntry | None = ENTRY) -> tuple[str, str]:
    with pytest.raises(MoeqError) as caught:
        RestoreData(path, entry)
    return caught.value.code, caught.value.message


def test_a_header_with_bytes_after_it(tmp_path: Path) -> None:
    path = written(tmp_path, **{"header/model.safetensors": PARTS["header/model.safetensors"] + b" "})
    expected = "moeq-restore.data: header of model.safetensors has other bytes after it"
    assert refused(path) == ("source.bad-header", expected)


def test_what_it_holds(tmp_path: Path) -> None:
    found = RestoreData(written(tmp_path), ENTRY)
    assert found.texts == {"config.json": CONFIG}
    assert found.raw_headers == {"model.safetensors": PARTS["header/model.safetensors"]}
    kept = found.headers["model.safetensors"]
    assert (list(kept.tensors), kept.size) == (["x", "y"], len(PARTS["header/model.safetensors"]) + 5)
    assert (found.copied, found.names) == (("a.json", "tokenizer.json"), frozenset(PARTS))
    assert ("tensor/x" in found, "tensor/y" in found) == (True, False)
    assert (found.read("tensor/x"), found.size_of("tensor/x")) == (b"abc", 3)
    whole = found.path.read_bytes()
    assert (found.first_bytes(10), found.first_bytes(1 << 20)) == (whole[:10], whole)
    assert RestoreData(written(tmp_path, **{"text/a.json": b"{}"}), ENTRY).copied == ("tokenizer.json",)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert refused(path, None)[0] == "source.no-keepsake"
    path.unlink()
    code, message = refused(path)
    assert message == f"{path} is missing: the conversion cannot be taken back to its source format"
    path.mkdir()
    assert refused(path)[0] == code == "source.no-keepsake"


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"text/model.safetensors": b""}, "source.bad-manifest", "names a file as weights and as something else"),
        ({"text/../x": b""}, "source.unsafe-path", "'../x'"),
        ({"text/moeq.json": b""}, "source.reserved-name", "'moeq.json'"),
        ({"header/b.safetensors": header(x=1) + b" "}, "source.bad-header", "header of b.safetensors has other bytes"),
        ({"header/b.safetensors": b"abc"}, "source.bad-header", "header of b.safetensors"),
        ({"header/b.safetensors": (2).to_bytes(8, "little") + b"[]"}, "source.bad-header", "header of b.safetensors"),
    ],
)
def test_what_it_may_not_hold(changes: dict[str, bytes], code: str, words: str, tmp_path: Path) -> None:
    found, message = refused(written(tmp_path, **changes))
    assert words in message
    assert found == code


def test_more_than_is_ever_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(map(len, (PARTS["header/model.safetensors"], CONFIG)))
    monkeypatch.setattr(restore_data, "_MAX_KEPT_BYTES", size)
    RestoreData(written(tmp_path), ENTRY)
    monkeypatch.setattr(restore_data, "_MAX_KEPT_BYTES", size - 1)
    code, message = refused(written(tmp_path))
    assert code == "source.too-large"
    last = len(PARTS["header/model.safetensors"])
    assert message.endswith(f"'header/model.safetensors' has {last:,} bytes, more than is ever kept")
    monkeypatch.setattr(restore_data, "_MAX_KEPT_BYTES", size)
    monkeypatch.setattr(restore_data, "MAX_HEADER_BYTES", last - 8)  # the header's length is before it
    RestoreData(written(tmp_path), ENTRY)
    monkeypatch.setattr(restore_data, "MAX_HEADER_BYTES", last - 9)
    assert refused(written(tmp_path)) == (code, message)
    monkeypatch.setattr(restore_data, "MAX_HEADER_BYTES", last)
    monkeypatch.setattr(restore_data, "limit_of", lambda name: len(CONFIG) - 1)
    assert "'text/config.json' has 19 bytes" in refused(written(tmp_path))[1]


def test_reads_that_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = RestoreData(written(tmp_path), ENTRY)
    for name, size in (("tensor/y", 3), ("tensor/x", 4)):
        with pytest.raises(MoeqError, match=rf"moeq-restore\.data lacks '{name}' of {size} bytes") as caught:
            found.open(name, size)
        assert caught.value.code == "source.bad-manifest"
    fd, start = found.open("tensor/x", 3)
    assert os.pread(fd, 3, start) == b"abc"
    os.close(fd)
    before = len(os.listdir("/proc/self/fd"))

    def fail(*arguments: Any) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(restore_data, "read_at", fail)
        with pytest.raises(MoeqError, match=r"^moeq-restore\.data: Input/output error$") as caught:
            found.read("tensor/x")
    assert caught.value.code == "source.unreadable"
    found.path.write_bytes(found.path.read_bytes()[:-1])
    with pytest.raises(MoeqError, match="ends inside 'tensor/x'") as caught:
        found.read("tensor/x")
    assert caught.value.code == "source.truncated"
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def converted(tmp_path: Path) -> LocalSource:
    """A folder in which the tensors of the source have another form."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text("{}")
    (tmp_path / "out" / "model.safetensors").write_bytes(header(z=1) + b"z")
    return LocalSource(tmp_path / "out", "out")


def test_a_source_without_its_data(converted: LocalSource, tmp_path: Path) -> None:
    kept = KeptSource(converted, RestoreData(written(tmp_path), ENTRY), "commit")
    assert (kept.config, kept.revision, kept.side_files()) == ({"model_type": "x"}, "commit", ())
    assert {name: (entry.shape, entry.file) for name, entry in kept.tensors.items()} == {
        "x": ((3,), "model.safetensors"),
        "y": ((2,), "model.safetensors"),
    }
    assert [file.name for file in kept.files] == ["model.safetensors"]
    with pytest.raises(MoeqError, match=r"model\.safetensors: the source's files are not available") as caught:
        kept.path("model.safetensors")
    assert caught.value.code == "bug.no-data"


def test_an_index_that_names_a_file_without_a_header(converted: LocalSource, tmp_path: Path) -> None:
    index = {"text/model.safetensors.index.json": b'{"weight_map": {"x": "b.safetensors"}}'}
    with pytest.raises(MoeqError, match=r"moeq-restore\.data lacks the header of b\.safetensors") as caught:
        KeptSource(converted, RestoreData(written(tmp_path, **index), ENTRY), None)
    assert caught.value.code == "source.bad-manifest"
