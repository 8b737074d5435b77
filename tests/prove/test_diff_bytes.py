"""Layers are told apart by bytes: every changed byte counts, wherever it lies."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint.builder import Stored, experts, router, write

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.convert import convert
from moeq.prove import diff_bytes
from moeq.prove.diff import diff
from moeq.prove.diff_bytes import equal_bytes, same_layer

NAMES = ["gptq-int4-g32-qwen3moe", "mxfp4-gptoss", "ct-fp8-block-qwen3moe"]


def flipped(folder: Path, file: str, place: int) -> None:
    with (folder / file).open("r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 1]))


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("name", NAMES)
def test_every_byte_counts(checkpoints: Path, tmp_path: Path, name: str) -> None:
    left, copy = checkpoints / name, tmp_path / "copy"
    shutil.copytree(left, copy)
    a, b = moeq.open(left), moeq.open(copy)
    assert equal_bytes(a.source, b.source, a.source.tensors)
    assert all(same_layer(a, b, layer) for layer in a.info.moe_layers)
    rng = random.Random(7)
    for entry in rng.sample(sorted(a.source.tensors.values()), 20):
        place = rng.randrange(entry.start, entry.end)
        flipped(copy, entry.file, place)
        other = moeq.open(copy)
        assert not equal_bytes(a.source, other.source, a.source.tensors)
        for layer in a.info.moe_layers:
            of_layer = entry.name in {one.name for one in a.experts(layer).layer.tensors()}
            assert same_layer(a, other, layer) is not of_layer
        flipped(copy, entry.file, place)
    assert equal_bytes(a.source, moeq.open(copy).source, a.source.tensors)


@pytest.mark.parametrize("chunk", [1 << 20, 64, 96, 1])
def test_tensors_longer_than_a_chunk(chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_bytes, "_CHUNK", chunk)
    data = random.Random(3).randbytes(256)
    tensors = {name: Stored("U8", (size,), data[:size]) for name, size in (("a", 256), ("b", 64), ("c", 100))}
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        write(folder, {**router(), **experts(), **tensors})
    a, b = (moeq.open(folder) for folder in folders)
    assert equal_bytes(a.source, b.source, ["a", "b", "c"])
    assert equal_bytes(a.source, b.source, ["c", "a"])
    for name in tensors:
        entry = b.source.entry(name)
        for place in (entry.start, entry.start + 63, entry.end - 1):
            flipped(folders[1], entry.file, place)
            other = moeq.open(folders[1]).source
            assert not equal_bytes(a.source, other, ["a", "b", "c"])
            assert equal_bytes(a.source, other, [one for one in tensors if one != name])
            flipped(folders[1], entry.file, place)


def test_conversions(checkpoints: Path, tmp_path: Path) -> None:
    where = Deployment(gpu=parse_gpu("A100"))
    for out in ("one", "two"):
        convert(checkpoints / NAMES[0], tmp_path / out, where)
    a, b = moeq.open(tmp_path / "one"), moeq.open(tmp_path / "two")
    assert same_layer(a, b, 0)
    entry = next(one for one in b.source.tensors.values() if ".1." in one.name and one.name in b.source.expert_names)
    flipped(tmp_path / "two", entry.file, entry.start)
    b = moeq.open(tmp_path / "two")
    assert same_layer(a, b, 0)
    assert not same_layer(a, b, 1)
    assert isinstance(b, ConvertedCheckpoint)
    del b._entries[0]
    assert same_layer(a, b, 0) is False, "one has it packed, the other one copied"
    found = diff(tmp_path / "one", tmp_path / "two")
    assert (found.equal, found.projections, {row.layer for row in found.differing}) == (False, 24, {1})


def test_another_config_may_mean_other_values(checkpoints: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoints / NAMES[0], tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    assert same_layer(moeq.open(checkpoints / NAMES[0]), moeq.open(copy), 0) is False
    assert diff(checkpoints / NAMES[0], copy).equal  # the numbers are compared, and are the same


def test_a_tensor_more_is_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[set[str]] = []
    monkeypatch.setattr(diff_bytes, "equal_bytes", lambda a, b, names: compared.append(names) or True)

    def checkpoint(*names: str) -> Any:
        entries = [SimpleNamespace(name=name) for name in names]
        layer = SimpleNamespace(tensors=lambda: entries)
        source = SimpleNamespace(config={}, side_configs={})
        return SimpleNamespace(kind="source", source=source, experts=lambda number: SimpleNamespace(layer=layer))

    assert same_layer(checkpoint("a", "b"), checkpoint("b", "a"), 0)
    assert compared == [{"a", "b"}]
    assert not same_layer(checkpoint("a", "b"), checkpoint("a", "b", "c"), 0)
    assert not same_layer(checkpoint("a", "b", "c"), checkpoint("a", "b"), 0)
    assert len(compared) == 1
