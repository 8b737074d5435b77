"""What `verify --source` says of each change of a folder: one sentence for one change, and no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks.tampering import contents, safetensors
from pipeline.mixing import Tensors, rewritten

from moeq.checkpoint.manifest import seal
from moeq.checkpoint.source import LocalSource
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert
from moeq.prove.verify import verify

NAME = "gptq-int4-g32-qwen3moe"
WEIGHTS, RESTORE, INDEX = "model-00001-of-00003.safetensors", "moeq-restore.data", "model.safetensors.index.json"

Change = Callable[[Path], object]


@pytest.fixture(scope="module")
def clean(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("against-source") / "out"
    convert(checkpoints / NAME, out, Deployment(gpu=parse_gpu("A100")))
    return out


def replaced(name: str, old: bytes, new: bytes) -> Change:
    """The first occurrence of some bytes is replaced."""

    def change(out: Path) -> None:
        raw = (out / name).read_bytes()
        assert old in raw
        (out / name).write_bytes(raw.replace(old, new, 1))

    return change


def stated(*path: str | int, value: Any = None) -> Change:
    """A field of the manifest has another value, or is missing, and the manifest is sealed again."""

    def change(out: Path) -> None:
        document = json.loads((out / "moeq.json").read_text())
        place = document
        for key in path[:-1]:
            place = place[key]
        assert path[-1] in place if isinstance(path[-1], str) else path[-1] < len(place)
        if value is None:
            del place[path[-1]]
        else:
            place[path[-1]] = value
        (out / "moeq.json").write_text(json.dumps(document | {"seal": seal(document)}))

    return change


def kept(name: str, data: bytes | None) -> Change:
    """The restore data have one entry more or less."""

    def change(out: Path) -> None:
        held = contents(out / RESTORE)
        if data is None:
            del held[name]
        else:
            held[name] = ("U8", [len(data)], data)
        safetensors(held, out / RESTORE)

    return change


def index_of_more(out: Path) -> None:
    document = json.loads((out / INDEX).read_text())
    document["metadata"]["total_size"] += 1
    (out / INDEX).write_text(json.dumps(document))


def packed_byte(out: Path) -> None:
    """A byte of the third expert of layer 1 differs."""
    entry = LocalSource(out, "").tensors["model.layers.1.mlp.experts.w2_weight"]
    raw = bytearray((out / entry.file).read_bytes())
    raw[entry.start + 2 * entry.nbytes // entry.shape[0]] ^= 1
    (out / entry.file).write_bytes(raw)


OTHER_HEADER = f"the header of {RESTORE} does not fit the restore data"
CHANGES: dict[str, tuple[Change, list[str]]] = {
    "header": (
        replaced(WEIGHTS, b'"format":"pt"', b'"format":"np"'),
        [f"the header of {WEIGHTS} is not the one that belongs to these tensors"],
    ),
    "another file": (
        lambda out: (out / "notes.txt").write_text("x"),
        ["notes.txt does not belong here: the source does not give this file"],
    ),
    "a file less": (lambda out: (out / "quantize_config.json").unlink(), ["quantize_config.json is missing"]),
    "index": (index_of_more, [f"{INDEX} is not the index of these tensors"]),
    "restore header": (replaced(RESTORE, b"moeq-restore/1", b"moeq-restore/2"), [OTHER_HEADER]),
    "more restore data": (
        kept("text/other.json", b"{}"),
        [f"text/other.json in {RESTORE} is not part of the restore data", OTHER_HEADER],
    ),
    "less restore data": (
        kept("text/config.json", None),
        ["config.json was to be kept and is missing", OTHER_HEADER],
    ),
    "restore data": (kept("text/config.json", b"{}"), ["config.json is not what the source holds", OTHER_HEADER]),
    "losses": (stated("layers", 0, "losses", value=3), ["moeq.json: losses of layer 0 is not what the source gives"]),
    "source files": (
        stated("source", "files", "model.safetensors", value=1),
        ["moeq.json: source.files is not what the source gives"],
    ),
    "statement about the model": (
        stated("model", "top_k", value=1),
        ["moeq.json: top_k is not what the source gives"],
    ),
    "digest of a projection": (
        stated("layers", 1, "digests", "up", 2, value="0" * 64),
        ["layer 1 expert 2 up of the source is not what was converted"],
    ),
    "no way back": (
        stated("restore"),
        [
            f"{RESTORE} does not belong here: the source does not give this file",
            "moeq.json does not name the restore data",
        ],
    ),
    "digest of a file": (
        stated("files", "config.json", "blake3", value="0" * 64),
        ["moeq.json: the digest of config.json is not that of the file"],
    ),
    "packed byte": (packed_byte, ["layer 1 expert 2 down no longer holds the values that were converted"]),
    "seal": (
        replaced("moeq.json", b'"moeq_version": "', b'"moeq_version": "9.'),
        ["moeq.json was changed after it was written"],
    ),
}


#: Changes that do not hide one another.
TOGETHER = ("header", "another file", "a file less", "index", "restore data", "losses", "source files", "packed byte")


def test_many_changes_are_as_many_sentences(clean: Path, checkpoints: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(clean, tmp_path / "out"))
    expected = []
    for name in (*TOGETHER, "digest of a projection", "statement about the model"):
        change, sentences = CHANGES[name]
        change(out)
        expected += sentences
    assert sorted(found.text for found in verify(out, checkpoints / NAME).mismatches) == sorted(expected)


@pytest.mark.parametrize("name", ["more restore data", "digest of a file", "seal"])
def test_changes_that_show_where_nothing_else_differs(name, clean, checkpoints, tmp_path) -> None:
    out = Path(shutil.copytree(clean, tmp_path / "out"))
    change, expected = CHANGES[name]
    change(out)
    assert [found.text for found in verify(out, checkpoints / NAME).mismatches] == expected


def test_every_version_that_recorded_files_kept_a_way_back(clean: Path, checkpoints: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(clean, tmp_path / "out"))
    change, expected = CHANGES["no way back"]
    change(out)
    assert [found.text for found in verify(out, checkpoints / NAME).mismatches] == expected


def test_a_source_without_one_of_the_layers(clean: Path, checkpoints: Path, tmp_path: Path) -> None:
    def without(tensors: Tensors) -> Tensors:
        return {name: tensor for name, tensor in tensors.items() if "layers.1.mlp.experts" not in name}

    shorter = rewritten(checkpoints / NAME, tmp_path / "shorter", without)
    texts = [found.text for found in verify(clean, shorter).mismatches]
    assert texts[1:] == ["this conversion cannot be derived from the source: the source has no experts in layer 1"]


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "no way back"])
def test_one_change_is_one_sentence(name: str, clean: Path, checkpoints: Path, tmp_path: Path) -> None:
    out = Path(shutil.copytree(clean, tmp_path / "out"))
    change, expected = CHANGES[name]
    change(out)
    assert [found.text for found in verify(out, checkpoints / NAME).mismatches] == expected
