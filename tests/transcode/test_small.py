"""Experts too small to compile loops for: those of the cache are used, the reference path where one is missing.

Each run is a process of its own with a cache of its own, since what a process has looked up it keeps.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

#: Transcodes words 1 to 3 of the command line, and prints what it used.
SCRIPT = """
import sys
from moeq.layouts import words
from moeq.transcode.transcode import transcode
from moeq.transcode.worker import Transcoder
words.COMPILED_FROM, words.CACHED_FROM = map(int, sys.argv[4:])
slow, found = Transcoder._on_reference_path, []
def counted(self, item):
    found.append(item)
    return slow(self, item)
Transcoder._on_reference_path = counted
transcode(*sys.argv[1:4], workers=1, allow_lossy=True)
print(len(found), "numba" in sys.modules, "torch" in sys.modules)
"""
NEVER, ALWAYS = 1 << 60, 0


def transcoded(source: Path, out: Path, target: str, cache: Path, compiled: int, cached: int) -> tuple[int, bool, bool]:
    """Items on the reference path, and whether numba and torch were imported."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    command = [sys.executable, "-c", SCRIPT, *map(str, (source, out, target, compiled, cached))]
    words = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    return int(words[0]), words[1] == "True", words[2] == "True"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("gptq-int4-g32-qwen3moe", "compressed-tensors"),
        ("gptq-int4-g32-qwen3moe", "bf16"),
        ("ct-mxfp4-qwen3moe", "fp8"),
        ("ct-fp8-channel-qwen3moe", "fp8"),
    ],
)
def test_loops_of_the_cache_serve_small_experts(checkpoints: Path, tmp_path: Path, name: str, target: str) -> None:
    source, cache = checkpoints / name, tmp_path / "cache"
    cache.mkdir()

    def run(out: str, compiled: int, cached: int) -> tuple[int, bool, bool]:
        return transcoded(source, tmp_path / out, target, cache, compiled, cached)

    # A first run compiles nothing.
    slow, numba, torch = run("first", 1 << 18, ALWAYS)
    assert (slow > 0, numba, torch) == (True, False, True)
    assert list(cache.iterdir()) == []
    reference = content(tmp_path / "first")
    # Somebody's large checkpoint fills the cache.
    slow, numba, _ = run("filling", ALWAYS, NEVER)
    assert (slow, numba) == (0, True)
    objects = sorted(cache.iterdir())
    assert objects
    assert content(tmp_path / "filling") == reference
    # Now small ones need neither torch nor numba.
    assert run("second", 1 << 18, ALWAYS) == (0, False, False)
    assert content(tmp_path / "second") == reference
    # One loop is missing: nothing is compiled, and the answer is the same.
    for path in objects[:1] + objects[-1:]:
        path.rename(tmp_path / path.name)
        slow, numba, _ = run(f"without {path.name}", 1 << 18, ALWAYS)
        assert (slow > 0, numba) == (True, False)
        assert content(tmp_path / f"without {path.name}") == reference
        (tmp_path / path.name).rename(path)
    assert sorted(cache.iterdir()) == objects


def test_the_switch_is_the_threads_own(tmp_path: Path) -> None:
    """A thread that may compile does, beside one that may not."""
    script = """
import threading, numpy as np
from moeq.layouts.fast import compare, native
one = np.zeros((4, 8), np.uint8)
found = []
def other():
    found.append(compare.same(one, one.copy()))
with native.only_cached():
    try:
        compare.same(one, one.copy())
    except native.NotCachedError as error:
        found.append("compare_loops" in str(error))
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    found.append(compare.same(one, one.copy()))
print(*found)
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "True", "True"]
