"""Hostile checkpoints: files, names and indices.

Each input ends in one clear line, or is read and described. The numbers in the names are those of the project's list
of inputs seen in practice; 1, 2, 54, 55 and 56 need a server (`test_hub.py`), 57 and 58 concern writing.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import (
    EXPERTS,
    Stored,
    config,
    experts,
    halved,
    quantization,
    write,
    write_sharded,
)
from checkpoint.refusals import check, refused, warned

import moeq
from moeq.errors import MoeqError


def test_case_26_duplicates_across_shards(tmp_path: Path) -> None:
    first, second = halved()
    stale = {next(iter(first)): Stored("I8", (3,))}
    folder = write_sharded(tmp_path, {"a.safetensors": first, "b.safetensors": {**second, **stale}})
    checkpoint = warned(folder, "index.duplicates", next(iter(stale)))
    assert checkpoint.source.tensors[next(iter(stale))].file == "a.safetensors"


def test_case_27_index_and_shards_disagree(tmp_path: Path) -> None:
    first, second = halved()
    shards = {"a.safetensors": first, "b.safetensors": second}
    folder = write_sharded(tmp_path, shards)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["ghost.weight"] = "a.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(folder, "source.index-mismatch", "ghost.weight", "a.safetensors")
    folder = write_sharded(
        tmp_path / "b", {"a.safetensors": first, "b.safetensors": {**second, "x": Stored("U8", (1,))}}
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["x"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "x" not in warned(folder, "index.unlisted").source.tensors


def test_case_28_stale_or_missing_total_size(tmp_path: Path) -> None:
    first, second = halved()
    shards = {"a.safetensors": first, "b.safetensors": second}
    warned(write_sharded(tmp_path / "a", shards, metadata={"total_size": 1.5e3}), "index.total-size", "1,500")
    for metadata in ({}, None, [], {"total_size": "x"}, {"total_size": 1e400}):
        assert moeq.open(write_sharded(tmp_path / "b", shards, metadata=metadata)).info.num_experts == EXPERTS


def test_case_29_second_copies_in_folders(tmp_path: Path) -> None:
    folder = write(tmp_path)
    write(folder / "original")
    assert moeq.open(folder).info.num_files == 1


def test_case_30_single_file_and_index(tmp_path: Path) -> None:
    first, second = halved()
    folder = write_sharded(tmp_path, {"a.safetensors": first, "b.safetensors": second})
    write(folder)
    assert moeq.open(folder).info.num_files == 2
    warned(folder, "files.not-in-index", "model.safetensors")
    (folder / "model.fp16.safetensors.index.json").write_text("{}")
    warned(folder, "files.several-indices")


def test_case_31_pickles_only(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    error = refused(folder, "source.no-weights", "pytorch_model.bin")
    assert "refuses pickles" in (error.hint or "")


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "/etc/x.safetensors",
        "a/../../x.safetensors",
        "C:\\x.safetensors",
        "c:x.safetensors",
        "",
        ".",
        "a//b.safetensors",
        "x.safetensors\x00",
        "x\n.safetensors",
        "weights.bin",
        None,
        5,
        [],
        {"a": 1},
    ],
)
def test_case_45_file_names_in_the_index(tmp_path: Path, file: Any) -> None:
    folder = write(tmp_path)
    (tmp_path.parent / "secret.safetensors").write_bytes(b"secret")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a.weight": file}}))
    refused(folder, "source.unsafe-path", "a.weight")


@pytest.mark.parametrize("weight_map", [None, [], {}, "x", 5])
def test_case_45_index_without_a_map(tmp_path: Path, weight_map: Any) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(folder, "source.bad-index", "weight_map")


@pytest.mark.timeout(20)
def test_case_45_pipes_devices_and_links(tmp_path: Path) -> None:
    folder = write(tmp_path)
    path = folder / "model.safetensors"
    path.unlink()
    os.mkfifo(path)
    refused(folder, "source.not-a-file", "model.safetensors")
    path.unlink()
    path.symlink_to("/dev/zero")
    refused(folder, "source.not-a-file", "model.safetensors")
    path.unlink()
    path.symlink_to(folder / "gone")
    refused(folder, "source.missing-file", "symbolic link")
    path.unlink()
    path.symlink_to(path)
    refused(folder, "source.unreadable", "model.safetensors")
    path.unlink()
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    refused(folder, "source.not-a-file", "config.json")


def test_case_45_links_into_a_cache_are_followed(tmp_path: Path) -> None:
    """Snapshots of the Hub's cache are links into a folder of blobs."""
    real = write(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in real.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert moeq.open(snapshot).info.num_experts == EXPERTS


def test_cases_46_to_49_bad_headers(tmp_path: Path) -> None:
    """The whole table is in `test_header.py`; here, that opening a checkpoint goes through it."""
    folder = write(tmp_path)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    for wrong in (b"I33", b"i32"):
        path.write_bytes(data.replace(b"I32", wrong, 1))
        refused(folder, "source.bad-header", "model.safetensors", wrong.decode())


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\0b", "a\u202eb", "", "x" * 5000, "a\nb", "a\x7fb"])
def test_case_50_tensor_names_that_attack_terminals(tmp_path: Path, name: str) -> None:
    refused(write(tmp_path, {**experts(), name: Stored("U8", (1,))}), "source.bad-header", "name")


def test_case_50_config_texts_that_attack_terminals(tmp_path: Path) -> None:
    """Free text from the config is shown, but never acts on the terminal; text that decides anything is refused."""
    table = quantization(meta={"quantizer": ["gptqmodel:7\x1b[2J"]})
    document = config(architectures=["Qwen3\x1b]0;pwned\x07"], quantization_config=table)
    info = moeq.open(write(tmp_path / "a", None, document)).info
    assert info.architecture == "Qwen3\\x1b]0;pwned\\x07"
    assert info.schemes[0].scheme.writer == "gptqmodel:7\\x1b[2J"
    refused(write(tmp_path / "b", None, config(model_type="a\x1b[2J")), "source.bad-config", "model_type")
    refused(
        write(tmp_path / "c", None, config(quantization_config=quantization(checkpoint_format="a\nb"))),
        "source.bad-config",
    )


@pytest.mark.parametrize("number", ["007", "-1", "\u0661", "\u00b2", "1234567"])
def test_case_51_expert_numbers(tmp_path: Path, number: str) -> None:
    tensors = experts()
    tensors[f"model.layers.0.mlp.experts.{number}.gate_proj.qweight"] = Stored("I32", (1, 1))
    refused(write(tmp_path, tensors), "source.bad-names", "expert number")


def test_case_51_gaps_in_expert_numbers(tmp_path: Path) -> None:
    tensors = {name.replace("experts.1.", "experts.5."): stored for name, stored in experts().items()}
    refused(write(tmp_path, tensors, config(num_experts=None)), "source.incomplete-experts", "1, 2, 3, 4")
    far = {name.replace("experts.1.", "experts.999999."): stored for name, stored in experts().items()}
    refused(write(tmp_path, far, config(num_experts=None)), "source.incomplete-experts", "999,998 of them")


def test_case_53_error_pages_saved_as_weights(tmp_path: Path) -> None:
    folder = write(tmp_path)
    (folder / "model.safetensors").write_bytes(b"<html><head><title>502 Bad Gateway</title></head></html>")
    refused(folder, "source.not-safetensors", "HTML")
    (folder / "model.safetensors").write_bytes(b'{"error":"Entry not found"}')
    refused(folder, "source.not-safetensors", "JSON")


def test_case_57_source_changes_while_it_is_read(tmp_path: Path) -> None:
    folder = write(tmp_path)
    checkpoint = moeq.open(folder)
    os.truncate(folder / "model.safetensors", 5000)
    with pytest.raises(MoeqError) as caught:
        checkpoint.matrix(0, 1, "w2")
    check(caught.value, "source.changed", "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(MoeqError) as caught:
        checkpoint.matrix(0, 1, "w2")
    check(caught.value, "source.missing-file", "model.safetensors")


def test_case_62_a_small_file_that_claims_petabytes(tmp_path: Path) -> None:
    folder = write(tmp_path)
    header = {"a": {"dtype": "U8", "shape": [10**15], "data_offsets": [0, 10**15]}}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw)
    refused(folder, "source.truncated", "1,000,000,000,0")


@pytest.mark.parametrize("path", ["no-such-folder", "no/such/folder/at/all", "a\0b", "x" * 5000])
def test_missing_paths(path: str) -> None:
    with pytest.raises(MoeqError) as caught:
        moeq.open(path)
    assert caught.value.code in ("source.missing", "source.unreadable")


def test_paths_that_are_not_checkpoints(tmp_path: Path) -> None:
    refused(tmp_path, "source.no-config")
    file = write(tmp_path / "a") / "model.safetensors"
    assert str(file.parent) in (refused(file, "source.missing", "is a file").hint or "")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "config.json").write_text("{}")
    refused(tmp_path / "b", "source.no-weights")
    with pytest.raises(MoeqError) as caught:
        moeq.open(tmp_path, revision="main")
    assert caught.value.code == "usage.revision-of-path"


def test_a_second_read_is_compared_with_the_first(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").source
    source.reread = True
    entry = min(source.tensors.values(), key=lambda entry: entry.nbytes)
    found = source.read_bytes(entry.file, entry.start, entry.end)
    assert len(found) == entry.nbytes
    preadv, reads = os.preadv, []

    def flipping(fd: int, buffers: list[memoryview], *where: int) -> int:
        done = preadv(fd, buffers, *where)
        reads.append(done)
        if len(reads) == 2:
            buffers[0][0] ^= 1
        return done

    monkeypatch.setattr(os, "preadv", flipping)
    with pytest.raises(MoeqError) as caught:
        source.read_bytes(entry.file, entry.start, entry.end)
    assert caught.value.code == "source.reads-differ"


@pytest.mark.parametrize("left", [0, 1, 100])
def test_a_file_that_becomes_shorter_while_it_is_read(left: int, tmp_path: Path, checkpoints: Path) -> None:
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "source")
    source = moeq.open(tmp_path / "source").source
    last = max(source.tensors.values(), key=lambda entry: entry.end)
    assert len(source.read_bytes(last.file, last.start, last.end)) == last.nbytes
    fd = source.open(last.file)
    try:
        os.truncate(tmp_path / "source" / last.file, last.start + left)
        target = bytearray(last.nbytes)
        with pytest.raises(MoeqError) as caught:
            source.read_into(fd, memoryview(target), last.start, last.file)
        assert caught.value.code == "source.truncated"
        assert f"{last.file}: ended before byte {last.end:,}" in caught.value.message
        source.read_into(fd, memoryview(target)[:left], last.start, last.file)
    finally:
        os.close(fd)
