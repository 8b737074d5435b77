"""Experts for hybrid engines (ktransformers, SGLang's expert pack): killed and resumed, and within a memory limit."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transcode.test_floats import deepseek_v4

from moeq.errors import MoeqError
from moeq.transcode.transcode import transcode

RUN = "from moeq.cli.app import main; main()"


def content(folder: Path) -> dict[str, bytes]:
    """All files except the report, which names the source."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "moeq-transcode.json"}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["kt-amx-int4", "kt-amx-int8", "expert-pack"])
def test_killed_and_again(target: str, checkpoints: Path, tmp_path: Path) -> None:
    source, words = checkpoints / "gptq-int4-g32-qwen3moe", ["--numa", "1", "--allow-lossy"]
    if target == "expert-pack":
        source, words = tmp_path / "source", []
        deepseek_v4(source)
    out = tmp_path / "out"
    command = [sys.executable, "-c", RUN, "transcode", source, out, "--to", target, *words]
    command += ["--workers", "1", "--max-memory", "2GiB", "--quiet"]
    process = subprocess.Popen(list(map(str, command)))
    journal = tmp_path / "out.moeq-partial" / "moeq-journal.jsonl"
    deadline = time.monotonic() + 120
    while process.poll() is None and not (journal.is_file() and journal.read_bytes().count(b"\n") > 1):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    killed = process.wait() == -signal.SIGKILL
    assert out.exists() != killed
    assert subprocess.run(list(map(str, command)), check=False).returncode == 0
    numa = {} if target == "expert-pack" else {"numa": 1, "allow_lossy": True}
    transcode(source, tmp_path / "whole", target, **numa)  # type: ignore[arg-type]
    assert content(out) == content(tmp_path / "whole")


def test_a_limit_too_low_is_refused_before_any_work(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    with pytest.raises(MoeqError) as caught:
        transcode(source, tmp_path / "out", "kt-amx-int8", numa=1, allow_lossy=True, max_memory=2**20)
    assert caught.value.code == "resources.memory"
    assert not (tmp_path / "out").exists()
