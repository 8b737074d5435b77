"""A manifest that lies is refused as such: never an unexpected failure, never wrong numbers."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.prove.verify import verify

VALUES: tuple[Any, ...] = (None, 0, -1, 7, 1 << 40, "", "x", [], {}, [1], True, 1.5)


@pytest.fixture(scope="module")
def out(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("manifest") / "out"
    deployment = Deployment(gpu=parse_gpu("A100"), tp=2)
    convert(checkpoints / "gptq-int8-g64-qwen3moe", folder, deployment, layout="marlin-wna16/1", force_layout=True)
    return folder


def leaves(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in the first layer's entry, and a few digests."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield (*path, key)
            yield from leaves(value, (*path, key))
    elif isinstance(document, list):
        for index, value in enumerate(document[:2]):
            yield (*path, index)
            yield from leaves(value, (*path, index))


def changed(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    document = copy.deepcopy(document)
    place = document
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return document


@pytest.mark.slow
def test_every_field_of_a_layer(out, tmp_path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    document = json.loads((out / "moeq.json").read_text())
    document["layers"] = document["layers"][:1]
    outcomes = {"refused": 0, "harmless": 0}
    for path in leaves(document["layers"][0], ("layers", 0)):
        if path[-1] == "layer":
            continue  # then layer 0 is not there, which is the fault of whoever asks for it
        for value in VALUES:
            (folder / "moeq.json").write_text(json.dumps(changed(document, path, value)))
            code = opened(folder)
            assert code in (None, ExitCode.SOURCE), (path, value, code)
            outcomes["refused" if code else "harmless"] += 1
    assert outcomes["refused"] > outcomes["harmless"], outcomes


def opened(folder: Path) -> ExitCode | None:
    """Open and read one matrix: the exit code of the refusal, or None."""
    try:
        moeq.open(folder).matrix(0, 1, "down")
    except MoeqError as error:
        return error.exit_code
    return None


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("layout",), "nonsense/1", "nonsense/1 cannot be what was written"),
        (("ranks", 1, "intermediate"), [0, 64], "rank 1 holds 0 .. 64 after 64 of 128"),
        (("ranks", 1, "experts"), [0, 2], r"needs I32 \[2"),
        (
            ("ranks", 0, "matrices", "w2", "spec", "group_size"),
            0,
            "group_size is 0, expected a size from 1 to 1,099,511,627,775",
        ),
        (("ranks", 0, "matrices", "w2", "tensors", "weight"), "model.norm.weight", "model.norm.weight is BF16"),
        (("ranks", 0, "matrices", "w2", "padded_k"), 96, "needs I32"),
    ],
)
def test_the_lie_is_named(path, value, message, out, tmp_path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(out, folder)
    document = json.loads((out / "moeq.json").read_text())
    (folder / "moeq.json").write_text(json.dumps(changed(document, ("layers", 0, *path), value)))
    with pytest.raises(MoeqError, match=message) as caught:
        verify(folder)
    assert caught.value.exit_code == ExitCode.SOURCE
