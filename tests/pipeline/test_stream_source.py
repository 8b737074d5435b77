"""Conversions from a repository whose files come one by one: the real Hub client against a server on loopback.

The client reads its settings when it is imported, so conversions run in processes of their own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench_scripts import make_checkpoint as generator
from checkpoint.hub_server import SHA, Hub, serving

from moeq.errors import ExitCode
from moeq.model import open as open_checkpoint
from moeq.prove.restore import restore

REPO = "org/model"
KEPT = "model.layers.5.mlp.experts.3.down_proj.g_idx"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten layers in a dozen files, so that layers begin in one file and end in the next."""
    folder = tmp_path_factory.mktemp("sources") / "model"
    size = generator.Size(layers=10, experts=8, vocab=1024, shard_bytes=520_000)
    generator.write_checkpoint(folder, generator.MODELS["tiny"], "gptq", size, seed=7)
    assert len(list(folder.glob("*.safetensors"))) > 10
    (folder / "tokenizer.json").write_text("{}")
    keep_something(folder)
    return folder


def keep_something(folder: Path) -> None:
    """A group index that means nothing, as the matrix has one group, but has to come back with `restore`."""
    entry = open_checkpoint(folder).source.entry(KEPT)
    with (folder / entry.file).open("r+b") as file:
        file.seek(entry.end - 4)
        file.write((7).to_bytes(4, "little"))


@pytest.fixture(scope="module")
def hub(source: Path) -> Iterator[Hub]:
    with serving() as running:
        running.add(REPO, source)
        yield running


@pytest.fixture(scope="module")
def whole(hub: Hub, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What a conversion of the downloaded repository writes."""
    out = tmp_path_factory.mktemp("whole")
    ran = run(hub, out, REPO, out / "out", "--gpu", "A100")
    assert ran.returncode == 0, ran.stderr
    return content(out / "out")


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def start(hub: Hub, home: Path, *words: object, name: str = "convert") -> subprocess.Popen[str]:
    """A conversion in a process with a Hub cache of its own."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
    settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hf"), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-c", "from moeq.cli.app import main; main()", name, *map(str, words)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**inherited, **settings}
    )


def run(hub: Hub, home: Path, *words: object, name: str = "convert") -> subprocess.CompletedProcess[str]:
    process = start(hub, home, *words, name=name)
    out, err = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def fetched(hub: Hub, since: int) -> Counter[str]:
    """Weight files of which bodies were asked for, other than by the ranges of headers."""
    asked = [(Path(path).name, wanted) for method, path, wanted in hub.requests[since:] if method == "GET"]
    return Counter(
        name
        for name, wanted in asked
        if name.endswith(".safetensors") and not (wanted and re.match(r"bytes=0-\d", wanted))
    )


def on_disk(partial: Path) -> int:
    """Bytes of source files that are held just now, half-fetched ones included; without the client's small notes."""
    total = 0
    for folder, _, names in os.walk(partial):  # files come and go meanwhile
        if "moeq-work.source" in folder:
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    size = os.stat(os.path.join(folder, name)).st_size
                    total += size if size > 8192 else 0
    return total


@pytest.mark.slow
def test_files_come_in_turn_and_go_again(hub, source, whole, tmp_path) -> None:
    since = len(hub.requests)
    out = tmp_path / "out"
    process = start(hub, tmp_path, REPO, out, "--gpu", "A100", "--stream-source", "--json", "--workers", 1)
    seen = []
    while process.poll() is None:
        seen.append(on_disk(tmp_path / "out.moeq-partial"))
        time.sleep(0.002)
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    files = {path.name: path.stat().st_size for path in source.glob("*.safetensors")}
    assert json.loads(stdout)["written"] is True
    planned = json.loads(run(hub, tmp_path, REPO, "--gpu", "A100", "--json", name="plan").stdout)["stream_source"]
    assert planned["files"] == len(files)
    assert planned["fetched_bytes"] == sum(files.values())
    assert 0 < planned["peak_bytes"] <= 3 * max(files.values())
    assert 0 < max(seen) <= planned["peak_bytes"]
    assert content(out) == whole
    ranged = Counter({file_of_kept(source): 1})
    assert fetched(hub, since) == Counter(files.keys()) + ranged, "every file once, and the range of what is kept"
    assert all(f"/{SHA}/" in path for _, path, _ in hub.requests[since:] if path.endswith(".safetensors"))
    cached = [path for path in (tmp_path / "hf").rglob("*") if path.is_file() and path.stat().st_size > 100_000]
    assert not cached, "the client's cache does not hold the weights either"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "out"]


def file_of_kept(source: Path) -> str:
    return open_checkpoint(source).source.entry(KEPT).file


@pytest.mark.slow
def test_the_way_back_needs_no_repository(whole, source, tmp_path) -> None:
    for name, data in whole.items():
        (tmp_path / "out" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "out" / name).write_bytes(data)
    assert restore(tmp_path / "out", tmp_path / "back").kept == 1
    assert content(tmp_path / "back") == content(source)


@pytest.mark.slow
def test_killed_it_fetches_only_what_is_left(hub, source, whole, tmp_path) -> None:
    words = (REPO, tmp_path / "out", "--gpu", "A100", "--stream-source", "--workers", 1)
    process = start(hub, tmp_path, *words)
    journal = tmp_path / "out.moeq-partial" / "moeq-journal.jsonl"
    deadline = time.monotonic() + 60
    while lines(journal) < 12 and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "out").exists()
    since = len(hub.requests)
    ran = run(hub, tmp_path, *words)
    assert ran.returncode == 0, ran.stderr
    after = fetched(hub, since)
    files = sorted(path.name for path in source.glob("*.safetensors"))
    assert set(after) < set(files), "files of finished units are not fetched again"
    assert files[-1] in after
    assert files[1] not in after
    assert content(tmp_path / "out") == whole


def lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


@pytest.mark.slow
def test_shards_fetch_their_own_part(hub, source, whole, tmp_path) -> None:
    words = ("--gpu", "A100", "--stream-source")
    parts = []
    for index in (1, 0):
        since = len(hub.requests)
        ran = run(hub, tmp_path / f"machine-{index}", REPO, tmp_path / "out", *words, "--shard", f"{index}/2")
        assert ran.returncode == 0, ran.stderr
        parts.append(set(fetched(hub, since)))
    files = {path.name for path in source.glob("*.safetensors")}
    assert set().union(*parts) == files
    assert sum(map(len, parts)) <= len(files) + 2, "only files at the cut are fetched by both"
    since = len(hub.requests)
    ran = run(hub, tmp_path / "machine-0", tmp_path / "out", name="finalize")
    assert ran.returncode == 0, ran.stderr
    assert set(fetched(hub, since)) == {file_of_kept(source)}, "finalize reads headers, and the range of what is kept"
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_what_is_on_disk_cannot_be_streamed(hub, source, tmp_path) -> None:
    ran = run(hub, tmp_path, source, tmp_path / "out", "--gpu", "A100", "--stream-source", "--json")
    assert ran.returncode == ExitCode.USAGE
    assert json.loads(ran.stdout)["error"]["code"] == "usage.stream-source"
    assert not (tmp_path / "out.moeq-partial").exists()
