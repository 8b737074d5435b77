"""Machine code is run from a folder of this user's own only, whatever others put where it is looked for."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from moeq_kernels.code_cache import given_cache, user_cache

pytest.importorskip("numba")
pytest.importorskip("triton")

#: The loops are right in a process of their own; prints whether numba was imported to compile them.
LOOPS = """
import sys
import numpy as np
from moeq.layouts.loops import compare
assert compare.is_zero(np.zeros((3, 100), np.uint8))
print("compiled" if "numba" in sys.modules else "from the cache")
"""

#: The same, but what would be compiled is not: importing numba is most of what that takes.
LOOKED_UP = """
import numpy as np
from moeq.layouts.loops import compare
from moeq.layouts.loops.native import NotCachedError, only_cached
try:
    with only_cached():
        assert compare.is_zero(np.zeros((3, 100), np.uint8))
    print("from the cache")
except NotCachedError:
    print("compiled")
"""

#: Of a build that nobody has compiled: keep a file of it in FOLDER if that is given, then read it as kernels do.
KERNELS = """
import hashlib, json, os, sys
from pathlib import Path
from moeq_kernels import compiling
from moeq_kernels.gpu import GPUS
wanted = compiling.Specialisation("portable:kernel", (), (), frozenset(), ())
name = Path(compiling._file(wanted, GPUS["H100"])).name
head = {"name": "kernel", "warps": 4, "shared": 0, "boxes": [], "parameters": [8]}
rest = os.environ.get("HEAD", json.dumps(head)).encode() + bytes([10]) + b"machine code"
for folder in sys.argv[1:]:
    Path(folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    Path(folder, name).write_bytes(hashlib.sha256(rest).hexdigest().encode() + bytes([10]) + rest)
found = compiling.stored(wanted, GPUS["H100"])
print("compiled" if found is None else "from the cache")
"""


def run(program: str, *arguments: str | Path, cwd: Path | None = None, **variables: str | Path) -> tuple[str, str]:
    """Answer and warnings of a program in a process of its own."""
    names = ("NUMBA_CACHE_DIR", "MOEQ_KERNEL_CACHE", "XDG_CACHE_HOME")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {name: str(value) for name, value in variables.items()}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the loops."""
    folder = tmp_path_factory.mktemp("loops")
    assert run(LOOPS, NUMBA_CACHE_DIR=folder) == ("compiled", "")
    assert run(LOOPS, NUMBA_CACHE_DIR=folder) == ("from the cache", "")
    assert run(LOOKED_UP, NUMBA_CACHE_DIR=folder) == ("from the cache", "")
    return folder


def plant(compiled: Path, folder: Path, link: Callable[[Path, Path], None]) -> None:
    """Put files of the victim's with machine code where a cache in a folder that all can write is looked for."""
    for path in compiled.rglob("*.o"):
        place = folder / path.relative_to(compiled)
        place.parent.mkdir(parents=True, exist_ok=True)
        link(path, place)
    for place in (folder, *folder.rglob("*")):
        if place.is_dir() and not place.is_symlink():
            place.chmod(0o777)


def is_one_line(warnings: str) -> bool:
    return warnings.count("\n") == 1 and "machine code is not kept but compiled in memory" in warnings


@pytest.mark.slow
@pytest.mark.parametrize(
    ("link", "program"),
    [
        (lambda path, place: place.symlink_to(path), LOOPS),
        (lambda path, place: place.hardlink_to(path), LOOKED_UP),
    ],
)
def test_a_planted_link_to_a_file_of_the_victim_is_not_run(compiled, tmp_path, link, program) -> None:
    folder = tmp_path / "shared"
    plant(compiled, folder, link)
    answer, warnings = run(program, NUMBA_CACHE_DIR=folder)
    assert answer == "compiled"
    assert is_one_line(warnings)


@pytest.mark.slow
def test_a_planted_folder_is_not_followed(compiled, tmp_path) -> None:
    """The last folder is a link to a good one of the victim's, in a folder where all can write."""
    for variable in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        base = tmp_path / variable
        inner = base / "moeq" if variable == "XDG_CACHE_HOME" else base
        inner.mkdir(parents=True)
        for good in {path.parent for path in compiled.rglob("*.o")}:
            name = good.name.removeprefix("moeq-") if variable == "XDG_CACHE_HOME" else good.name
            (inner / name).symlink_to(good)
        answer, warnings = run(LOOKED_UP, **{variable: base})
        assert answer == "compiled"
        assert is_one_line(warnings)


@pytest.mark.slow
def test_no_cache_is_looked_for_beside_a_checkpoint(compiled, tmp_path) -> None:
    shutil.copytree(compiled, tmp_path / "cache")
    answer, warnings = run(LOOKED_UP, cwd=tmp_path, NUMBA_CACHE_DIR="cache")
    assert answer == "compiled"
    assert is_one_line(warnings)
    planted = [Path("cache", *parts) for parts in (("moeq", "kernels"), ("moeq", "gpu"))]
    assert run(KERNELS, *planted, cwd=tmp_path, XDG_CACHE_HOME="cache", HOME=tmp_path / "home") == ("compiled", "")
    answer, warnings = run(KERNELS, "kernels", cwd=tmp_path, MOEQ_KERNEL_CACHE="kernels")
    assert answer == "compiled"
    assert is_one_line(warnings)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become a user without an entry")
def test_a_user_without_a_home() -> None:
    program = KERNELS.replace("found =", "os.setuid(54321); os.environ.pop('HOME', None); found =")
    answer, warnings = run(program, cwd=Path("/"))
    assert answer == "compiled"
    assert is_one_line(warnings)


def test_builds_are_kept_in_a_folder_of_the_users_own(tmp_path) -> None:
    folder = tmp_path / "kernels"
    assert run(KERNELS, folder, MOEQ_KERNEL_CACHE=folder) == ("from the cache", "")


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("head", ["no JSON", "[]", '{"name": "kernel"}', '{"boxes": 3}', "[" * 100_000])
def test_a_build_with_the_right_digest_and_a_wrong_head(tmp_path, head: str) -> None:
    (tmp_path / "head").write_text(head)
    program = f"import os; os.environ['HEAD'] = open({str(tmp_path / 'head')!r}).read()\n{KERNELS}"
    folder = tmp_path / "kernels"
    assert run(program, folder, MOEQ_KERNEL_CACHE=folder) == ("compiled", "")


def piped(folder: Path, file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def linked(folder: Path, file: Path) -> None:
    file.rename(folder.parent / "elsewhere")
    file.symlink_to(folder.parent / "elsewhere")


def hard_linked(folder: Path, file: Path) -> None:
    (folder.parent / "elsewhere").hardlink_to(file)


def writable_file(folder: Path, file: Path) -> None:
    file.chmod(0o666)


def folder_for_the_group(folder: Path, file: Path) -> None:
    folder.chmod(0o770)


def folder_for_all(folder: Path, file: Path) -> None:
    folder.chmod(0o777)


def folder_for_readers(folder: Path, file: Path) -> None:
    folder.chmod(0o755)


def folder_that_is_a_link(folder: Path, file: Path) -> None:
    folder.rename(folder.parent / "elsewhere")
    folder.symlink_to(folder.parent / "elsewhere")


def folder_above_for_all(folder: Path, file: Path) -> None:
    folder.parent.chmod(0o777)


def foreign_file(folder: Path, file: Path) -> None:
    os.chown(file, 12345, -1)


def foreign_folder(folder: Path, file: Path) -> None:
    os.chown(folder, 12345, -1)


def foreign_folder_above(folder: Path, file: Path) -> None:
    os.chown(folder.parent, 12345, -1)


FILES = (piped, linked, hard_linked, writable_file)
FOLDERS = (folder_for_the_group, folder_for_all, folder_for_readers, folder_that_is_a_link, folder_above_for_all)
FOREIGN = (foreign_file, foreign_folder, foreign_folder_above)


@pytest.mark.parametrize("spoil", [*FILES, *FOLDERS, *FOREIGN])
def test_what_others_may_have_made_is_not_read(spoil, tmp_path, monkeypatch, caplog) -> None:
    if spoil in FOREIGN and os.getuid() != 0:
        pytest.skip("only root can give files away")
    folder = tmp_path / "above" / "cache"
    monkeypatch.setenv("MOEQ_KERNEL_CACHE", str(folder))
    first = given_cache("MOEQ_KERNEL_CACHE")
    assert first is not None
    assert first.write("build", b"machine code")
    assert first.read("build") == b"machine code"
    spoil(folder, folder / "build")
    # Another spelling of the same folder: an open folder is kept as it was found.
    monkeypatch.setenv("MOEQ_KERNEL_CACHE", f"{folder.parent}/./cache")
    again = given_cache("MOEQ_KERNEL_CACHE")
    if spoil in FILES or spoil is foreign_file:
        assert again is not None
        assert again.read("build") is None
        assert again.write("build", b"new") is True
        assert again.read("build") == b"new"
    else:
        assert again is None
        assert len(caplog.records) == 1
        assert "cache" in caplog.text or "above" in caplog.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_write_that_does_not_end_leaves_nothing(error, tmp_path, monkeypatch) -> None:
    def fail(*_given: object, **_named: object) -> None:
        raise error

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = user_cache("moeq")
    assert made is not None
    monkeypatch.setattr(os, "rename", fail)
    if error is KeyboardInterrupt:
        with pytest.raises(KeyboardInterrupt):
            made.write("build", b"half")
    else:
        assert made.write("build", b"half") is False
    assert made.names() == []


def test_everything_that_is_made_is_for_its_user_alone(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new" / "cache"))
    before = os.umask(0)
    try:
        made = user_cache("moeq", "inner")
        assert made is not None
        assert made.write("file", b"")
    finally:
        os.umask(before)
    modes = {
        path.name: stat.S_IMODE(path.lstat().st_mode) for path in (tmp_path / "new", *(tmp_path / "new").rglob("*"))
    }
    assert modes == {"new": 0o700, "cache": 0o700, "moeq": 0o700, "inner": 0o700, "file": 0o600}


def test_the_reason_is_said_once_and_on_one_line(tmp_path, monkeypatch, caplog) -> None:
    (tmp_path / "a\nfile").write_text("")
    monkeypatch.setenv("MOEQ_KERNEL_CACHE", str(tmp_path / "a\nfile" / "cache"))
    assert given_cache("MOEQ_KERNEL_CACHE") is None
    assert given_cache("MOEQ_KERNEL_CACHE") is None
    (record,) = caplog.records
    assert "Not a directory" in record.message
    assert json.dumps("a\nfile")[1:-1] in record.message
    assert "\n" not in record.message
