"""What tells one source from another, and where scales of activations are read at the end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

import moeq
from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.outputs import OutputFolder
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert
from moeq.pipeline.state import publish, stamps
from moeq.pipeline.state.stamps import source_sample, source_stamps

NAME, STATIC = "gptq-int4-g32-qwen3moe", "modelopt-fp8-qwen3moe"


@pytest.fixture
def folder(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / NAME, tmp_path / "source"))


def test_a_sample_is_of_evenly_spaced_blocks_and_the_last_of_each_file(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = moeq.open(folder).source
    monkeypatch.setattr(stamps, "_SAMPLED_BLOCKS", 5)
    monkeypatch.setattr(stamps, "_SAMPLED_BYTES", 1000)
    whole = b"".join((folder / file.name).read_bytes() for file in source.files)
    step, start, wanted = len(whole) // 5, 0, blake3()
    for file in source.files:
        end = start + file.size
        for at in [at for at in range(0, len(whole), step) if start <= at < end]:
            wanted.update(whole[at : min(at + 1000, end)])
        wanted.update(whole[max(end - 1000, start) : end])
        start = end
    assert source_sample(source) == wanted.hexdigest()


def test_a_sample_and_stamps_tell_sources_apart(folder: Path) -> None:
    name = moeq.open(folder).source.files[-1].name
    before, stamp = source_sample(moeq.open(folder).source), source_stamps(moeq.open(folder).source)
    assert source_sample(moeq.open(folder).source) == before
    state = os.stat(folder / name)
    assert stamp[name] == (state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino)
    raw = bytearray((folder / name).read_bytes())
    raw[-1] ^= 1
    (folder / name).write_bytes(raw)
    os.utime(folder / name, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert source_sample(moeq.open(folder).source) != before
    assert source_stamps(moeq.open(folder).source) != stamp


def test_a_commit_needs_neither() -> None:
    commit: Any = SimpleNamespace(revision="abc")
    assert (source_sample(commit), source_stamps(commit)) == ("", {})


def test_scales_that_were_kept_are_read_from_the_restore_data(checkpoints: Path, tmp_path: Path) -> None:
    """A source on the Hub would be asked for each of them."""
    convert(checkpoints / STATIC, tmp_path / "out", Deployment(gpu=parse_gpu("H100")), allow_lossy=True)
    source = moeq.open(checkpoints / STATIC).source
    found: list[Any] = []
    checkpoint: Any = SimpleNamespace(read_activation_scales=lambda *given: found.append(given))
    with OutputFolder(tmp_path / "out") as files:
        publish._read_kept_scales(checkpoint, files)
        ((find, opened),) = found
        scales = [entry for name, entry in source.tensors.items() if name.endswith("experts.0.up_proj.input_scale")]
        assert scales
        for entry in scales:
            kept = find(entry)
            with closing_fd(opened(kept.file)) as fd:
                assert os.pread(fd, kept.nbytes, kept.start) == source.peek(entry)
        assert find(SimpleNamespace(name="another")) is None


def test_a_conversion_reads_them_before_it_describes_itself(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []

    def reading(_checkpoint: Any, files: OutputFolder) -> None:
        read.append(files.path)
        assert "moeq.json" not in os.listdir(files.path)

    monkeypatch.setattr(publish, "_read_kept_scales", reading)
    convert(checkpoints / NAME, tmp_path / "out", Deployment(gpu=parse_gpu("A100")))
    assert read == [tmp_path / "out.moeq-partial"]
