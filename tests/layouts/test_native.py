"""Compiled loops from the cache: what is loaded without numba, and what is compiled again."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba")

from numba.core.errors import TypingError

from moeq.layouts.loops import compiler, native
from moeq.layouts.loops.native import Loop, Loops
from moeq.layouts.loops.target import Kind

ROOT = Path(__file__).parents[2]

#: In a process of its own, two kinds of a loop: what they say, and whether numba was needed.
PROGRAM = """
import json, sys
import numpy as np
from moeq.layouts.loops import compare
matrix = np.zeros((3, 100), np.uint8)
found = [compare.is_zero(matrix), compare.is_zero(matrix[:, ::1][1:, 3:])]
matrix[1, 70] = 4
found += [compare.is_zero(matrix), compare.is_zero(matrix[1:, 3:]), compare.is_zero(matrix[2:, 3:])]
print(json.dumps([found, "numba" in sys.modules]))
"""

RIGHT = [True, True, False, False, True]


def run(folder: Path) -> bool:
    """Run the loops, which have to be right; whether numba was imported."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found, compiled = json.loads(done.stdout)
    assert found == RIGHT
    return compiled


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the loops."""
    folder = tmp_path_factory.mktemp("loops")
    assert run(folder)
    return folder


def files(folder: Path) -> list[Path]:
    found = sorted(folder.rglob("*.o"))
    assert len(found) == 2
    return found


@pytest.mark.slow
def test_what_is_in_the_cache_runs_without_numba(kept: Path) -> None:
    assert not run(kept)
    assert {path.stat().st_mode & 0o777 for path in files(kept)} == {0o600}


def truncated(folder: Path) -> None:
    for path in files(folder):
        path.write_bytes(path.read_bytes()[:-100])


def emptied(folder: Path) -> None:
    for path in files(folder):
        path.write_bytes(b"")


def flipped(folder: Path) -> None:
    for path in files(folder):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 4
        path.write_bytes(content)


def exchanged(folder: Path) -> None:
    """Good code, of the same loop for other arguments."""
    first, second = (path.read_bytes() for path in files(folder))
    files(folder)[0].write_bytes(second)
    files(folder)[1].write_bytes(first)


def pipes(folder: Path) -> None:
    for path in files(folder):
        path.unlink()
        os.mkfifo(path)


def writeable_by_others(folder: Path) -> None:
    for path in files(folder):
        path.chmod(0o666)


def of_another_user(folder: Path) -> None:
    for path in files(folder):
        os.chown(path, 12345, -1)


# Compiling takes three seconds each: what is slow here is refused by the same lines as its neighbours.
@pytest.mark.cover(every=7)
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(truncated, marks=pytest.mark.slow),
        pytest.param(emptied, marks=pytest.mark.slow),
        flipped,
        exchanged,
        pytest.param(pipes, marks=pytest.mark.slow),
        pytest.param(writeable_by_others, marks=pytest.mark.slow),
        pytest.param(
            of_another_user, marks=pytest.mark.skipif(os.name != "posix" or os.getuid() != 0, reason="only root can")
        ),
    ],
)
def test_what_is_not_to_be_trusted_is_compiled_again_and_replaced(spoil, kept: Path, tmp_path: Path) -> None:
    folder = tmp_path / "loops"
    shutil.copytree(kept, folder)
    spoil(folder)
    assert run(folder)
    assert [path.read_bytes() for path in files(folder)] == [path.read_bytes() for path in files(kept)]
    assert not run(folder)


@pytest.mark.slow
def test_where_nothing_can_be_kept_loops_are_compiled(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    assert run(tmp_path / "file")


def test_constants_that_are_compiled_in_count_as_source() -> None:
    found: dict[Path, bytes] = {}
    native._add_sources("moeq.pipeline.pack.fast.stored_loops", found)
    names = {str(path.relative_to(ROOT / "moeq")) for path in found}
    assert {
        "schemes/awq.py",
        "layouts/loops/vectors.py",
        "layouts/loops/compiler.py",
        "layouts/loops/target.py",
    } <= names
    assert "layouts/loops/marlin_loops.py" not in names


def test_another_source_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "moeq" / "layouts", tmp_path / "moeq" / "layouts")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "moeq/layouts/loops/native.py"))
    digests = set()
    for name in ("compare_loops", "compare_loops", "transpose_loops", "vectors", "marlin_loops"):
        native._source_digest.cache_clear()
        digests.add(native._source_digest("moeq.layouts.loops.compare_loops"))
        with (tmp_path / "moeq/layouts/loops" / f"{name}.py").open("a") as file:
            file.write("# changed\n")
    native._source_digest.cache_clear()
    assert native._source_digest("moeq.layouts.loops.compare_loops") in digests, "nothing here takes loops of Marlin"
    native._source_digest.cache_clear()
    assert len(digests) == 5


def test_copies_of_moeq_share_a_folder_if_their_loops_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(at: Path) -> Path:
        monkeypatch.setattr(native, "__file__", str(at / "native.py"))
        folder = native.code_cache()
        assert folder is not None
        return folder.path

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    native._folder_digest.cache_clear()
    copies = [tmp_path / "one", tmp_path / "other"]
    for copy in copies:
        shutil.copytree(ROOT / "moeq/layouts/loops", copy)
    assert len({opened(at) for at in (ROOT / "moeq/layouts/loops", *copies)}) == 1
    with (copies[1] / "compare_loops.py").open("a") as file:
        file.write("# changed\n")
    native._folder_digest.cache_clear()
    assert opened(copies[1]) != opened(copies[0])


@compiler.loop
def allocates(source, out):  # type: ignore[no-untyped-def]
    doubled = source * 2
    out[0] = doubled[-1]
    return len(doubled) > 2


def test_a_loop_that_needs_numba_at_run_time_runs_and_is_not_kept() -> None:
    row = np.arange(5)
    kind = Kind(row.dtype, 1, "C")
    compiled = compiler.compile_loop(__name__, "allocates", [kind, kind], "moeq_test_allocates")
    assert compiled.code is None
    with pytest.warns(RuntimeWarning, match="allocates needs numba"):
        assert Loop(__name__, "allocates")(row, row) == 1
    assert row[0] == 8


def test_arguments_arrive_as_they_are() -> None:
    numbers = np.arange(-12, 12, dtype=np.int16).reshape(4, 6)
    out = np.zeros(8, np.int64)
    matrices = (numbers, numbers.T, numbers[::-1, ::2], np.asfortranarray(numbers), numbers[:0])
    scalars = (-3, np.uint8(200), np.int32(-5), True, 2**62)
    # Each kind is compiled, which takes half a second: every matrix with one number, every number with one matrix.
    for matrix, scalar in [(numbers, scalar) for scalar in scalars] + [(matrix, -3) for matrix in matrices[1:]]:
        assert Loop(__name__, "describes")(matrix, scalar, out) == matrix.shape[1] - 10
        total = int((matrix.astype(np.int64) * np.arange(1, matrix.shape[0] + 1)[:, None]).sum())
        assert out.tolist()[:4] == [*matrix.shape, int(scalar), total]


@compiler.loop
def describes(matrix, scalar, out):  # type: ignore[no-untyped-def]
    out[0], out[1], out[2], out[3] = matrix.shape[0], matrix.shape[1], scalar, 0
    for n in range(matrix.shape[0]):
        for k in range(matrix.shape[1]):
            out[3] += matrix[n, k] * (n + 1)
    return matrix.shape[1] - 10


def test_nothing_is_written_to_what_must_not_be_written_to() -> None:
    out = np.zeros(8, np.int64)
    out.flags.writeable = False
    with pytest.raises(TypingError):
        Loop(__name__, "describes")(np.zeros((1, 1)), 1, out)


def wrappers() -> list[Path]:
    found = [
        path.with_name(path.name.replace("_loops", "")) for path in (ROOT / "moeq/layouts/loops").glob("*_loops.py")
    ]
    return [*found, ROOT / "moeq/pipeline/pack/fast/formats.py"]


@pytest.mark.parametrize("path", wrappers(), ids=lambda path: path.stem)
def test_loops_that_are_called_are_there(path: Path) -> None:
    module = import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    assert isinstance(module._loops, Loops)
    loops = import_module(module._loops._module)
    called = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "_loops"
    }
    assert called
    assert all(type(getattr(loops, name)) is type(allocates) for name in called)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_leaves_no_half_written_file_and_is_not_swallowed(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folder = native.code_cache()
    assert folder is not None
    rename = os.rename

    def interrupted(*given: Any, **more: Any) -> None:
        if moment == "after":
            rename(*given, **more)
        raise KeyboardInterrupt

    monkeypatch.setattr("moeq_kernels.code_cache.os.rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        folder.write("loop.o", b"code")
    assert folder.names() == (["loop.o"] if moment == "after" else [])


def test_loops_are_available_where_numba_is_or_the_cache_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for held in (False, True):
        monkeypatch.setattr(native, "cached", lambda held=held: held)
        assert native.available() is True
    monkeypatch.setattr(native, "find_spec", lambda name: None)
    assert native.available() is False
