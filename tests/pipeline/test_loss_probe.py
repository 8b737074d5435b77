"""A loss is told of a repository as of a folder, from the bytes of one expert.

The Hub's client reads its settings when it is imported, so commands run in processes of their own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.hub_server import Hub, serving

import moeq
from moeq.errors import ExitCode, MoeqError

LOSSY = "ct-fp8-tensor-qwen3moe"

COMMANDS = """
import contextlib, io, json, sys
from moeq.cli.app import run
for argv in json.loads(sys.argv[1]):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = run([*argv, "--gpu", "H100", "--json"])
    document = json.loads(said.getvalue())
    print(json.dumps([int(code), document.get("error") or document["verdict"]["no_convert"]]), flush=True)
"""


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as running:
        yield running


def run_script(hub: Hub, home: Path, script: str, argument: str) -> list[Any]:
    """Run a script in a process with an empty cache; return the JSON values that it prints, one a line."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1"}
    argv = [sys.executable, "-c", script, argument]
    ran = subprocess.run(argv, capture_output=True, text=True, env={**inherited, **settings}, check=False)
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def requested(hub: Hub, repo: str) -> list[str | None]:
    """Return the ranges of weights that were asked for, None for whole files."""
    return [span for verb, path, span in hub.requests if verb == "GET" and repo in path and ".safetensors" in path]


@pytest.mark.slow
def test_every_command_tells_the_loss_of_a_repository(hub: Hub, checkpoints: Path, tmp_path: Path) -> None:
    repo = hub.add("org/lossy", checkpoints / LOSSY)
    out = str(tmp_path / "out")
    commands = ["plan", repo], ["inspect", repo], ["convert", repo, out, "--dry-run"], ["convert", repo, out]
    answers = run_script(hub, tmp_path, COMMANDS, json.dumps(commands))
    with pytest.raises(MoeqError) as local:
        moeq.plan(checkpoints / LOSSY, gpu="H100")
    for (code, error), (command, *_) in zip(answers, commands, strict=True):
        message = error if isinstance(error, str) else error["message"]
        assert code == ExitCode.NO, command
        assert local.value.message in message
    assert None not in requested(hub, repo), "no file is downloaded"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_layout_that_rounds_nothing_reads_no_weights(hub: Hub, checkpoints: Path, tmp_path: Path) -> None:
    repo = hub.add("org/exact", checkpoints / "gptq-int4-g32-qwen3moe")
    [(code, _)] = run_script(hub, tmp_path, COMMANDS, json.dumps([["inspect", repo]]))
    assert code == ExitCode.OK
    assert len(requested(hub, repo)) == 1, "the header"


SAMPLE = """
import json, sys
import moeq
from moeq.checkpoint import hub
checkpoint = moeq.open(sys.argv[1])
with checkpoint.source.sampled():
    first = checkpoint.dequantize(0, 1, "up")
with checkpoint.source.sampled():
    with checkpoint.source.sampled():
        again = checkpoint.dequantize(0, 1, "up")
    once_more = checkpoint.dequantize(0, 1, "up")
hub.MAX_SAMPLE = first.numel() // 2
try:
    with checkpoint.source.sampled():
        checkpoint.dequantize(0, 1, "up")
    code = None
except moeq.MoeqError as error:
    code = error.code
print(json.dumps([float(first.double().sum()), bool((first == again).all() and (again == once_more).all()), code]))
"""


@pytest.mark.slow
def test_a_sample_is_read_once_and_bounded(hub: Hub, checkpoints: Path, tmp_path: Path) -> None:
    repo = hub.add("org/sampled", checkpoints / LOSSY)
    total, same, code = run_script(hub, tmp_path, SAMPLE, repo)[0]
    assert total == float(moeq.open(checkpoints / LOSSY).dequantize(0, 1, "up").double().sum())
    assert (same, code) == (True, "source.too-large")
    spans = requested(hub, repo)[1:]
    scales, codes = spans[:2], spans[2]
    assert [spans.count(span) for span in (*scales, codes)] == [3, 3, 2], "once a context, and the last one stops"
    assert None not in spans


def test_a_dry_run_of_a_folder_tells_a_loss(checkpoints: Path, tmp_path: Path) -> None:
    where = moeq.Deployment(gpu=moeq.gpu("H100"))
    with pytest.raises(MoeqError) as caught:
        moeq.convert(checkpoints / LOSSY, tmp_path / "out", where, dry_run=True)
    assert caught.value.code == "answer.lossy"
    done = moeq.convert(checkpoints / LOSSY, tmp_path / "out", where, dry_run=True, allow_lossy=True)
    assert done.manifest is None
    assert list(tmp_path.iterdir()) == []
