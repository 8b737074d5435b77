"""Files of a restored folder: written, or compared with what is there, byte by byte."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3
from refusing import refuses

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.manifest import FileDigest
from moeq.checkpoint.outputs import OutputFolder
from moeq.prove.restore_outputs import HeldFiles, NewFiles

DATA: Any = SimpleNamespace(
    headers={"a": SimpleNamespace(size=10), "b": SimpleNamespace(size=4)}, raw_headers={"a": b"head", "b": b"HEAD"}
)
CHANGED = "moeq verify lists every difference; convert the source again"
ANOTHER = "name another folder, or move this one away"


@pytest.fixture(name="folder")
def _folder(tmp_path: Path) -> Iterator[OutputFolder]:
    (tmp_path / "back").mkdir()
    before = len(os.listdir("/proc/self/fd"))
    with OutputFolder(tmp_path / "back") as folder:
        yield folder
    assert len(os.listdir("/proc/self/fd")) == before, "every file is closed"


def fill(folder: OutputFolder, new: NewFiles | HeldFiles) -> None:
    with new.weights(DATA) as files:
        assert sorted(files) == ["a", "b"]
        files["a"].write(memoryview(b"tail"), 6)
        files["a"].write(memoryview(b"--"), 4)
        for file in files.values():
            file.sync()


def test_files_are_written_and_are_then_what_they_are_compared_with(folder: OutputFolder, tmp_path: Path) -> None:
    new, held = NewFiles(folder), HeldFiles(folder)
    fill(folder, new)
    assert {name: folder.read_file(name) for name in folder.names()} == {"a": b"head--tail", "b": b"HEAD"}
    fill(folder, held)
    (tmp_path / "source").write_bytes(b"copy")
    digest = FileDigest(4, blake3(b"copy").hexdigest())
    with closing_fd(os.open(tmp_path / "source", os.O_RDONLY)) as fd:
        new.put_copy("copy", fd, digest)
        held.put_copy("copy", fd, digest)
        for wrong in (None, FileDigest(4, "0" * 64)):
            with refuses("source.digest-mismatch", "copy is not the file that was converted", CHANGED):
                new.put_copy("copy", fd, wrong)
            with refuses(*differs(folder, "copy is not the source's"), ANOTHER):
                held.put_copy("copy", fd, wrong)
    new.put_text("text", b"{}")
    held.put_text("text", b"{}")
    held.require_names(("a", "b", "copy", "text"))
    with refuses(*differs(folder, "text is not the source's"), ANOTHER):
        held.put_text("text", b"{ }")
    with refuses(*differs(folder, r"it holds b"), ANOTHER):
        held.require_names(("a", "copy", "text"))
    with refuses(*differs(folder, r"it lacks \xe4"), ANOTHER):
        held.require_names(("a", "b", "copy", "text", "\xe4", "\xf6"))


def differs(folder: OutputFolder, how: str) -> tuple[str, str]:
    text = f"{folder.path} exists and is not an output of moeq restore for this conversion: {how}"
    return "usage.destination-exists", text


@pytest.mark.parametrize(
    ("content", "how"),
    [
        (b"head--tail!", "a has another size"),
        (b"Head--tail", "a is not the source's from byte 0 on"),
        (b"head--taiL", "a is not the source's from byte 6 on"),
        (b"head.-tail", "a is not the source's from byte 4 on"),
    ],
)
def test_weights_that_differ(content: bytes, how: str, folder: OutputFolder) -> None:
    folder.write_file("a", content)
    folder.write_file("b", b"HEAD")
    with refuses(*differs(folder, how), ANOTHER):
        fill(folder, HeldFiles(folder))


def test_bytes_beyond_the_end_differ(folder: OutputFolder) -> None:
    fill(folder, NewFiles(folder))
    with HeldFiles(folder).weights(DATA) as files, refuses(*differs(folder, "b is not the source's from byte 3 on")):
        files["b"].write(memoryview(b"D\0"), 3)
