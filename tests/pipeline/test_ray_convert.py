"""Conversions on a real Ray cluster of several nodes: the same bytes as by one process, whatever dies meanwhile."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from bench_scripts import make_checkpoint as generator

pytest.importorskip("ray")

from pipeline.interrupts import default_interrupts
from pipeline.ray_nodes import NODE, Assassin

import moeq
from moeq.checkpoint.outputs import OutputFolder
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import Conversion, convert
from moeq.pipeline.events import Event, UnitFinished, Warned
from moeq.pipeline.state.journal import read_journals
from moeq.transcode.transcode import transcode

A100 = Deployment(gpu=parse_gpu("A100"))
LAYERS = 24


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sources") / "model"
    size = generator.Size(layers=LAYERS, experts=16)
    generator.write_checkpoint(folder, generator.MODELS["tiny"], "gptq", size, seed=5)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(source, out, A100)
    return content(out)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def on_ray(source: Path, out: Path, cluster: Any, progress: Any = None, **more: Any) -> Conversion:
    return convert(source, out, A100, executor="ray", ray_address=cluster.address, progress=progress, **more)


@pytest.mark.slow
def test_a_worker_killed_half_way(cluster, source, whole, tmp_path) -> None:
    """kill -9 of processes that are at a unit, after the first units have come back."""
    assassin, warned, finished = Assassin(), list[Warned](), list[str]()

    def progress(event: Event) -> None:
        if isinstance(event, UnitFinished):
            finished.append(event.unit)
            if len(finished) == 3:
                assassin.start()
        if isinstance(event, Warned):
            warned.append(event)
            assassin.stop()

    on_ray(source, tmp_path / "out", cluster, progress)
    assert assassin.killed
    assert warned, "the death was told"
    assert warned[0].code == "ray-retry"
    assert "is started again (1 of 3)" in warned[0].message
    assert len(finished) == len(set(finished)) == 1 + 2 * LAYERS
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_a_node_lost_half_way(cluster, source, whole, tmp_path) -> None:
    node = cluster.add_node(**NODE)
    finished: list[str] = []

    def progress(event: Event) -> None:
        if isinstance(event, UnitFinished):
            finished.append(event.unit)
            if len(finished) == 4:
                cluster.remove_node(node, allow_graceful=False)

    on_ray(source, tmp_path / "out", cluster, progress)
    assert len(finished) == 1 + 2 * LAYERS
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_interrupted_and_continued_here(cluster, source, whole, tmp_path) -> None:
    """Ctrl-C, which a terminal sends to all processes of the command; threads of this process do the rest."""
    words = ("convert", source, tmp_path / "out", "--gpu", "A100", "--executor", "ray", "--ray-address")
    command = [sys.executable, "-c", "from moeq.cli.app import main; main()", *map(str, words), cluster.address]
    partial = tmp_path / "out.moeq-partial"

    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, start_new_session=True, preexec_fn=default_interrupts
    ) as process:
        deadline = time.monotonic() + 60
        while not (partial.is_dir() and read_journals(OutputFolder(partial)).records) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, said
    assert "Traceback" not in said
    recorded = set(read_journals(OutputFolder(partial)).records)
    assert 0 < len(recorded) < 1 + 2 * LAYERS
    assert {path.name for path in partial.glob("moeq-work*")} == set()
    assert convert(source, tmp_path / "out", A100).resumed_units == len(recorded)
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_an_error_of_a_unit_is_the_error_that_it_is_here(cluster, source, tmp_path) -> None:
    damaged = Path(shutil.copytree(source, tmp_path / "damaged"))
    entry = moeq.open(damaged).source.entry("model.layers.2.mlp.experts.1.down_proj.scales")
    with (damaged / entry.file).open("r+b") as file:
        file.seek(entry.start + 6)
        file.write(b"\xff\x7f")  # a NaN in float16
    errors = []
    for options in ({}, {"executor": "ray", "ray_address": cluster.address}):
        with pytest.raises(MoeqError) as caught:
            convert(damaged, tmp_path / "out", A100, **options)
        errors.append((caught.value.code, caught.value.message, caught.value.hint))
    assert errors[0] == errors[1]
    assert errors[0][0] == "source.bad-data"
    assert "ray" not in errors[1][1].lower()


def moeq_command(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from moeq.cli.app import main; main()", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.slow
def test_the_command(cluster, source, whole, tmp_path) -> None:
    options = ("--gpu", "A100", "--executor", "ray", "--json", "--ray-address")
    ran = moeq_command("convert", source, tmp_path / "out", *options, cluster.address)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["written"] is True
    assert content(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
def test_no_cluster(source, tmp_path) -> None:
    options = ("--gpu", "A100", "--executor", "ray", "--json", "--ray-address", "127.0.0.1:1")
    ran = moeq_command("convert", source, tmp_path / "out", *options)
    assert ran.returncode == ExitCode.ENVIRONMENT
    assert json.loads(ran.stdout)["error"]["code"] == "environment.ray-connect"
    assert "Traceback" not in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_cluster_transcodes_to_the_same_bytes(cluster, source, tmp_path) -> None:
    transcode(source, tmp_path / "here", "compressed-tensors")
    found = transcode(
        source, tmp_path / "there", "compressed-tensors", executor="ray", ray_address=cluster.address, workers=2
    )
    assert found.exact
    assert found.written
    assert content(tmp_path / "there") == content(tmp_path / "here")
