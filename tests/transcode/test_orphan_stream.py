"""Repositories in bitsandbytes, HQQ and torchao: streamed from the Hub, transcoded like a folder, also when killed.

The Hub's client reads its settings when it is imported, so transcodings run in processes of their own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint.hub_server import Behaviour, Hub, serving
from orphan_files import WRITERS, vectors
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moeq.transcode.transcode import transcode

#: Repository to library, vector, and target.
CASES = {
    "org/nf4": ("bitsandbytes", "nf4-bfloat16", "bf16"),
    "org/int8": ("bitsandbytes", "int8", "compressed-tensors"),
    "org/hqq4": ("hqq", "4-bit-axis1-g8-bfloat16", "bf16"),
    "org/hqq3": ("hqq", "3-bit-axis1-g8-float16", "fp16"),
    "org/torchao4": ("torchao", "int4tensor-g16-a8", "compressed-tensors"),
    "org/torchao8": ("torchao", "float8-row", "compressed-tensors"),
}
LAYERS = 4

RUN = """
import sys
from moeq.transcode.transcode import transcode
for case in sys.argv[2:]:
    repo, target = case.split(":")
    transcode(repo, sys.argv[1] + "/" + repo.partition("/")[2], target, max_memory=2**30, workers=1, stream_source=True)
"""


def layered(folder: Path) -> Path:
    """Give a model of one layer some more, each in a file of its own."""
    tensors = load_file(folder / "model.safetensors")
    with safe_open(folder / "model.safetensors", "pt") as file:
        metadata = file.metadata()
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for layer in range(LAYERS):
        name = f"model-{layer + 1:05d}-of-{LAYERS:05d}.safetensors"

        def moved(text: str, layer: int = layer) -> str:
            return text.replace("layers.0.", f"layers.{layer}.")

        here = {moved(key): tensor for key, tensor in tensors.items()}
        save_file(here, folder / name, {moved(key): text for key, text in (metadata or {"format": "pt"}).items()})
        weight_map |= dict.fromkeys(here, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": LAYERS}))
    return folder


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("sources")
    return {
        repo: layered(WRITERS[library](home / repo.partition("/")[2], vectors(library)[name]))
        for repo, (library, name, _) in CASES.items()
    }


@pytest.fixture
def hub(sources: dict[str, Path]) -> Iterator[Hub]:
    with serving() as running:
        for repo, folder in sources.items():
            running.add(repo, folder)
        yield running


def start(hub: Hub, home: Path, *repos: str) -> subprocess.Popen[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", RUN, str(home), *(f"{repo}:{CASES[repo][2]}" for repo in repos)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**inherited, **settings})


def weights(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.safetensors*")}


def assert_as_local(repo: str, source: Path, home: Path) -> None:
    local = home / f"local-{repo.partition('/')[2]}"
    transcode(source, local, CASES[repo][2])
    assert weights(local) == weights(home / repo.partition("/")[2])


@pytest.mark.slow
def test_the_same_files_as_from_a_folder(hub: Hub, sources: dict[str, Path], tmp_path: Path) -> None:
    """Also where the first answers end half-way."""
    for repo in ("org/int8", "org/hqq4"):
        hub.behaviours[repo] = Behaviour(cuts_first=2)
    process = start(hub, tmp_path, *CASES)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    for repo, source in sources.items():
        assert_as_local(repo, source, tmp_path)
    assert not list((tmp_path / "hf").rglob("*.safetensors")), "files are fetched in turn and dropped"


@pytest.mark.slow
@pytest.mark.parametrize("repo", ["org/nf4", "org/hqq4"])
def test_killed_and_again(repo: str, hub: Hub, sources: dict[str, Path], tmp_path: Path) -> None:
    journal = tmp_path / f"{repo.partition('/')[2]}.moeq-partial" / "moeq-journal.jsonl"
    process = start(hub, tmp_path, repo)
    deadline = time.monotonic() + 120
    while process.poll() is None and not (journal.is_file() and journal.read_bytes().count(b"\n") > 2):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    process = start(hub, tmp_path, repo)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert_as_local(repo, sources[repo], tmp_path)
