"""The same conversion everywhere: one digest of the whole folder, however the work is done."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attacks.reproduce import SOURCES, WITHOUT_NUMBA, digest_of
from attacks.running import moeq_command

__all__ = ["moeq_command"]


@pytest.mark.slow
@pytest.mark.parametrize("name", SOURCES)
def test_however_it_is_done(name, checkpoints, tmp_path, moeq_command) -> None:
    """Workers, shards in any order, from a copy elsewhere, with torch's packing alone."""
    options = SOURCES[name]
    found = {}
    for workers in (1, 2, 5):
        out = tmp_path / f"workers-{workers}"
        assert moeq_command("convert", checkpoints / name, out, *options, "--workers", workers).code == 0
        found[f"{workers} workers"] = digest_of(out)
    for count in (2, 3):
        out = tmp_path / f"shards-{count}"
        for index in reversed(range(count)):
            assert moeq_command("convert", checkpoints / name, out, *options, "--shard", f"{index}/{count}").code == 0
        assert moeq_command("finalize", out).code == 0
        found[f"{count} shards"] = digest_of(out)
    copy = Path(shutil.copytree(checkpoints / name, tmp_path / "elsewhere" / name, copy_function=shutil.copyfile))
    assert moeq_command("convert", copy, tmp_path / "copy", *options).code == 0
    found["a copy"] = digest_of(tmp_path / "copy")
    argv = [sys.executable, "-c", WITHOUT_NUMBA, "convert", str(copy), str(tmp_path / "plain"), *options, "--quiet"]
    assert subprocess.run(argv, env=dict(os.environ), check=False).returncode == 0
    found["without numba"] = digest_of(tmp_path / "plain")
    assert len(set(found.values())) == 1, found
