"""Experts too small to compile loops for: those of the cache are used, the reference path where one is missing.

Runs are processes of their own with a cache of their own, since what a process has looked up it keeps; those that need
no start of their own are forks of one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: Transcodings (JSON) with `words`' bounds of what compiles loops and of what uses those of the cache, each in a fork
#: or all in this process; for each the experts on the reference path, which modules are there, and the cache then.
SCRIPT = """
import json, os, sys
folder, names, compiled, cached, forks, modules = json.loads(sys.argv[1])
for name in modules:
    __import__(name)
from moeq.layouts import words
from moeq.transcode.transcode import transcode
from moeq.transcode.transcoder import Transcoder
words.COMPILED_FROM, words.CACHED_FROM = compiled, cached
slow, found = Transcoder._on_reference_path, []
def counted(self, item):
    found.append(item)
    return slow(self, item)
Transcoder._on_reference_path = counted
def run(source, out, target, missing):
    found.clear()
    path = os.path.join(folder, missing or "")
    if missing:
        os.rename(path, path + ".away")
    transcode(source, out, target, workers=1, allow_lossy=True)
    if missing:
        os.rename(path + ".away", path)
    files = [os.path.relpath(os.path.join(at, name), folder) for at, _, inside in os.walk(folder) for name in inside]
    print(json.dumps([len(found), "numba" in sys.modules, "torch" in sys.modules, sorted(files)]))
    sys.stdout.flush()
for row in names:
    if not forks:
        run(*row)
    elif os.fork() == 0:
        code = 1
        try:
            run(*row)
            code = 0
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(code)
    else:
        assert os.wait()[1] == 0, row
"""
NEVER, ALWAYS, LARGE = 1 << 60, 0, 1 << 18

CASES = [
    ("gptq-int4-g32-qwen3moe", "compressed-tensors"),
    ("gptq-int4-g32-qwen3moe", "bf16"),
    ("ct-mxfp4-qwen3moe", "fp8"),
    ("ct-fp8-channel-qwen3moe", "fp8"),
]

#: Source, destination, target, object file that is away meanwhile.
Job = tuple[str, str, str, str | None]


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_loops_of_the_cache_serve_small_experts(checkpoints: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()

    def job(number: int, out: str, missing: str | None = None) -> Job:
        name, target = CASES[number]
        return str(checkpoints / name), str(tmp_path / f"{number}-{out}"), target, missing

    def run(jobs: list[Job], compiled: int, cached: int, forks: bool, *modules: str) -> list[list[Any]]:
        """Per job: items on the reference path, whether numba and torch were imported, files of the cache."""
        asked = json.dumps([str(cache), jobs, compiled, cached, forks, modules])
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
        ran = subprocess.run([sys.executable, "-c", SCRIPT, asked], env=environment, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return [json.loads(line) for line in ran.stdout.splitlines()]

    every = range(len(CASES))
    # A first run compiles nothing.
    for slow, numba, _, files in run([job(i, "first") for i in every], LARGE, ALWAYS, True, "torch"):
        assert (slow > 0, numba, files) == (True, False, [])
    reference = [content(tmp_path / f"{i}-first") for i in every]
    # Somebody's large checkpoints fill the cache, each with loops of its own.
    own: list[list[str]] = []
    for slow, numba, _, files in run([job(i, "filling") for i in every], ALWAYS, NEVER, False):
        assert (slow, numba) == (0, True)
        own.append([name for name in files if not any(name in others for others in own)])
        assert len(own[-1]) > 1
    objects = content(cache)
    assert [content(tmp_path / f"{i}-filling") for i in every] == reference
    # Now small ones need neither torch nor numba.
    for slow, numba, torch, _ in run([job(i, "second") for i in every], LARGE, ALWAYS, True):
        assert (slow, numba, torch) == (0, False, False)
    assert [content(tmp_path / f"{i}-second") for i in every] == reference
    # One loop is missing: nothing is compiled, and the answer is the same.
    without = [(i, name) for i in every for name in (own[i][0], own[i][-1])]
    for slow, numba, _, files in run(
        [job(i, Path(name).name, name) for i, name in without], LARGE, ALWAYS, True, "torch"
    ):
        assert (slow > 0, numba) == (True, False)
        assert len(files) == len(objects)
    assert all(content(tmp_path / f"{i}-{Path(name).name}") == reference[i] for i, name in without)
    assert content(cache) == objects


@pytest.mark.slow
def test_the_switch_is_the_threads_own(tmp_path: Path) -> None:
    """A thread that may compile does, beside one that may not."""
    script = """
import threading, numpy as np
from moeq.layouts.loops import compare, native
one = np.zeros((4, 8), np.uint8)
found = []
def other():
    found.append(compare.equal_rows(one, one.copy()))
with native.only_cached():
    try:
        compare.equal_rows(one, one.copy())
    except native.NotCachedError as error:
        found.append("compare_loops" in str(error))
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    found.append(compare.equal_rows(one, one.copy()))
print(*found)
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    ran = subprocess.run([sys.executable, "-c", script], env=environment, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "True", "True"]
