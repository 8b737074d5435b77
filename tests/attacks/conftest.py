"""What attacks need: a checkpoint, its conversion, the command line in a process of its own, and a watcher of files."""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import signal
import stat
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from moeq.cli.app import run

NAME = "gptq-int4-g32-qwen3moe"
#: Address space beyond what this process has, for a command.
MEMORY = 512 << 20


@dataclass(frozen=True)
class Answer:
    """How a command ended.

    Attributes:
        code: its exit code; 137 where it was killed because it took too long.
        out: stdout.
        err: stderr.
        seconds: how long it took.
        processor: seconds of processor time, which other load on the machine does not change.
    """

    code: int
    out: str
    err: str
    seconds: float
    processor: float

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found

    @property
    def error(self) -> str:
        """The error's code, or an empty text."""
        return str(self.document.get("error", {}).get("code", ""))


def command(*argv: object, seconds: float = 30.0, prepare: Callable[[], object] = lambda: None) -> Answer:
    """Run a command line in a fork of this process, with bounded time and memory.

    Args:
        argv: the words after `moeq`; `--json` is added.
        seconds: when it is killed.
        prepare: called in the fork before.
    """
    torch.set_num_threads(1)  # a pool of threads does not survive a fork
    reading, writing = os.pipe()
    begun = time.monotonic()
    child = os.fork()
    if not child:
        os.close(reading)
        _child([*map(str, argv), "--json"], writing, prepare)
    os.close(writing)
    try:
        found = _collect(reading, begun + seconds)
    finally:
        os.close(reading)
    took = time.monotonic() - begun
    if found is None:
        os.kill(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    processor = usage.ru_utime + usage.ru_stime
    if found is None:
        return Answer(137, "", f"no end after {took:.1f} s", took, processor)
    out, err = json.loads(found) if found else ("", "it died")
    return Answer(os.waitstatus_to_exitcode(status), out, err, took, processor)


def _child(argv: list[str], pipe: int, prepare: Callable[[], object]) -> None:
    code = 99
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            prepare()
            code = run(argv)
        with os.fdopen(pipe, "w") as stream:
            json.dump((out.getvalue(), err.getvalue()), stream)
    except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


def _collect(pipe: int, until: float) -> bytes | None:
    """Everything from a pipe; None where it is not closed in time."""
    import select

    found = b""
    while (left := until - time.monotonic()) > 0:
        if select.select([pipe], [], [], left)[0]:
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return found
            found += chunk
    return None


def tree(*folders: Path) -> dict[str, tuple[object, ...]]:
    """Everything below folders: kind, mode, content or target, and the inode of each."""
    found: dict[str, tuple[object, ...]] = {}
    for folder in folders:
        for path in (folder, *folder.rglob("*")):
            info = path.lstat()
            content: object = None
            if stat.S_ISLNK(info.st_mode):
                content = os.readlink(path)
            elif stat.S_ISREG(info.st_mode):
                content = path.read_bytes()
            found[str(path)] = (stat.S_IFMT(info.st_mode), info.st_ino, content)
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """Every file's bytes, by relative name."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_safetensors(path: Path, tensors: Mapping[str, bytes], metadata: Mapping[str, str] | None = None) -> None:
    """A file of U8 tensors under any names."""
    table: dict[str, object] = {"__metadata__": dict(metadata or {})}
    offset = 0
    for name, data in tensors.items():
        table[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    header = json.dumps(table).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"".join(tensors.values()))


@pytest.fixture(scope="session")
def pristine(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `source`, and `out`, which is its conversion. Not to be changed."""
    home = tmp_path_factory.mktemp("pristine")
    shutil.copytree(checkpoints / NAME, home / "source")
    out = home / "out"
    # In this process, so that every fork has loaded and compiled what it needs: that would be most of a fork's time.
    for argv in (
        ["inspect", home / "source", "--gpu", "a100"],
        ["convert", home / "source", out, "--gpu", "a100", "--workers", "1"],
        ["verify", out, "--source", home / "source"],
        ["restore", out, home / "back"],
        ["run-check", out, "--digests-only"],
        ["transcode", home / "source", home / "recoded", "--to", "compressed-tensors"],
    ):
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            assert run([*map(str, argv), "--json"]) == 0, said.getvalue()
    for name in ("back", "recoded"):
        shutil.rmtree(home / name)
    return home


@dataclass(frozen=True)
class Place:
    """A folder with a checkpoint and its conversion, and files of somebody else's.

    Attributes:
        home: the folder.
        source: the checkpoint.
        out: its conversion; absent where the test did not ask for it.
        victim: a file of somebody else's.
        photos: a folder of somebody else's.
    """

    home: Path
    source: Path
    out: Path
    victim: Path
    photos: Path

    def convert(self, *argv: object, **options: Any) -> Answer:
        return command("convert", self.source, self.out, "--gpu", "a100", *argv, **options)

    @property
    def partial(self) -> Path:
        return self.out.with_name(self.out.name + ".moeq-partial")

    @property
    def old(self) -> Path:
        return self.out.with_name(self.out.name + ".moeq-old")

    def strangers(self) -> dict[str, tuple[object, ...]]:
        """What nothing may touch."""
        return tree(self.victim.parent, self.source)


@pytest.fixture
def place(pristine: Path, tmp_path: Path) -> Place:
    """A source, nothing converted yet."""
    shutil.copytree(pristine / "source", tmp_path / "source")
    theirs = tmp_path / "theirs"
    (theirs / "photos").mkdir(parents=True)
    (theirs / "photos" / "one.jpg").write_bytes(b"a photo")
    (theirs / "victim.txt").write_bytes(b"precious")
    return Place(tmp_path, tmp_path / "source", tmp_path / "out", theirs / "victim.txt", theirs / "photos")


@pytest.fixture
def converted_place(place: Place, pristine: Path) -> Place:
    """A source and its conversion."""
    shutil.copytree(pristine / "out", place.out)
    return place
