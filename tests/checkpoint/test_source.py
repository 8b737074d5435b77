"""A checkpoint in a folder: what is found there, what its bytes are, and what is said where it is something else."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.builder import Stored, write_file
from refusing import refuses

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import LocalSource, tensor_of

GGUF = "moeq reads safetensors checkpoints; look for the GPTQ, AWQ or compressed-tensors one"


def made(folder: Path, config: object = None, **tensors: Stored) -> LocalSource:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "x"} if config is None else config))
    write_file(folder / "model.safetensors", tensors or {"t": Stored("I32", (3, 2), bytes(range(24)))})
    return LocalSource(folder, "it")


def test_what_a_folder_holds(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "quant_config.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "inner").mkdir()
    source = made(tmp_path)
    assert source.side_files() == ("config.json", "quant_config.json", "tokenizer.json")
    assert (source.has_side_file("tokenizer.json"), source.has_side_file("model.safetensors")) == (True, False)
    assert (source.side_configs, source.roots, source.index) == ({"quant_config.json": {}}, (tmp_path,), None)
    assert [(file.name, file.size) for file in source.files] == [
        ("model.safetensors", (tmp_path / "model.safetensors").stat().st_size)
    ]
    assert (source.size_of("tokenizer.json"), source.read_file("tokenizer.json", 2)) == (2, b"{}")
    with refuses("source.no-such-tensor", r"it has no tensor 'n\xf6'"):
        source.entry("n\xf6")
    source.require_unchanged()
    (tmp_path / "tokenizer.json").write_text("{ }")
    text = "it changed while it was being read: tokenizer.json is not the file that was read first"
    with refuses("source.changed", text, "run it again once nothing else writes to it"):
        source.require_unchanged()


def test_tensors_and_their_rows(tmp_path: Path) -> None:
    source = made(tmp_path)
    entry, whole = source.entry("t"), torch.frombuffer(bytearray(range(24)), dtype=torch.int32).view(3, 2)
    assert torch.equal(source.read("t"), whole)
    assert torch.equal(source.read_rows(entry, 1, 3), whole[1:3])
    assert torch.equal(source.read_row(entry, 2), whole[2])
    assert source.peek(entry) == bytes(range(24))
    empty = tensor_of(bytearray(), "BF16", (0, 4), "t")
    assert (empty.shape, empty.dtype) == ((0, 4), torch.bfloat16)
    with refuses("source.unsupported-dtype", "tensor t: torch has no type for F4"):
        tensor_of(bytearray(1), "F4", (2,), "t")


def test_tensors_that_are_read_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read, calls = made(tmp_path), os.preadv, list[int]()
    source.reread = True
    entry = source.entry("t")

    def preadv(fd: int, views: list[memoryview], at: int) -> int:
        calls.append(at)
        count = read(fd, views, at)
        views[0][0] ^= len(calls) > 3
        return count

    monkeypatch.setattr(os, "preadv", preadv)
    assert source.peek(entry) == bytes(range(24))
    assert calls == [entry.start] * 2
    text = f"model.safetensors: two reads of bytes {entry.start:,} to {entry.end:,} differ"
    with refuses("source.reads-differ", text):
        source.peek(entry)


def test_the_identity_is_that_of_config_files_and_places(tmp_path: Path) -> None:
    source = made(tmp_path / "a")
    same = made(tmp_path / "b")
    assert source.identity() == same.identity() == source.identity()
    assert len(source.identity()) == 64
    others = [
        made(tmp_path / "c", {"model_type": "y"}),
        made(tmp_path / "d", t=Stored("F32", (3, 2))),
        made(tmp_path / "e", t=Stored("I32", (2, 3))),
        made(tmp_path / "f", u=Stored("I32", (3, 2))),
    ]
    moved = made(tmp_path / "g")
    moved.revision = "abc"
    renamed = made(tmp_path / "h")
    renamed.tensors = {"t": TensorEntry(*renamed.tensors["t"][:3], "other", *renamed.tensors["t"][4:])}
    assert len({one.identity() for one in (source, moved, renamed, *others)}) == 7


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with refuses("source.missing", "it: no such folder", None):
        LocalSource(tmp_path / "absent", "it")
    hint = "name the folder of a Hugging Face checkpoint"
    with refuses("source.no-config", "it has no config.json", hint):
        LocalSource(tmp_path, "it")
    (tmp_path / "m.GGUF").touch()
    with refuses("source.unsupported-format", "it holds GGUF files and no config.json", GGUF):
        LocalSource(tmp_path, "it")
    with refuses("source.unsupported-format", "it: is a GGUF file", GGUF):
        LocalSource(tmp_path / "m.GGUF", "it")
    (tmp_path / "file").touch()
    hint = f"name the folder that holds it: {tmp_path}"
    with refuses("source.missing", "it: is a file, expected a checkpoint folder", hint):
        LocalSource(tmp_path / "file", "it")
    with refuses("source.unreadable", "it: embedded null byte"):
        LocalSource(Path("a\0b"), "it")


@pytest.mark.parametrize(("count", "more"), [(5, ""), (7, " and 2 more")])
def test_weight_files_that_are_missing(count: int, more: str, tmp_path: Path) -> None:
    made(tmp_path)
    names = [f"{number}.safetensors" for number in range(count)]
    index: dict[str, Any] = {"weight_map": {"t": "model.safetensors", **{name: name for name in names}}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    text = (
        f"{count} of {count + 1} weight files named by model.safetensors.index.json are missing: "
        f"{', '.join(names[:5])}{more}"
    )
    with refuses("source.missing-shard", text, "finish the download: hf download <repo> --local-dir <folder>"):
        LocalSource(tmp_path, "it")


def test_params_json_is_the_config_of_mistrals_files(tmp_path: Path) -> None:
    made(tmp_path)
    (tmp_path / "params.json").write_text('{"dim": 1}')
    assert LocalSource(tmp_path, "it").config == {"model_type": "x"}
    (tmp_path / "config.json").unlink()
    assert LocalSource(tmp_path, "it").config == {"dim": 1}
