"""An opened conversion: what its manifest may say of the files and of the model, and what can be asked of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.model.converted import ConvertedCheckpoint

NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture(scope="module")
def folders(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Conversions for one GPU, and for ranks that share every expert or the experts."""
    home = tmp_path_factory.mktemp("converted")
    for name, sizes in {"whole": {}, "tp": {"tp": 4}, "ep": {"tp": 4, "ep": 2}}.items():
        moeq.convert(checkpoints / NAME, home / name, Deployment(gpu=parse_gpu("A100"), engine="moeq", **sizes))
    return {path.name: path for path in home.iterdir()}


def refused(folder: Path, target: Path, *changes: tuple[tuple[str | int, ...], Any]) -> str:
    """Say why a folder is refused whose manifest has other values."""
    shutil.copytree(folder, target)
    document = json.loads((folder / "moeq.json").read_text())
    for path, value in changes:
        place = document
        for key in path[:-1]:
            place = place[key]
        assert path[-1] in place or isinstance(path[-1], int)
        place[path[-1]] = value(place[path[-1]]) if callable(value) else value
    (target / "moeq.json").write_text(json.dumps(document))
    with pytest.raises(MoeqError) as caught:
        moeq.open(target)
    assert caught.value.code == "source.bad-manifest"
    assert caught.value.hint == "convert the source again"
    return caught.value.message


def without_last(rows: list[Any]) -> list[Any]:
    return rows[:-1]


RANK = ("layers", 0, "ranks", 3)
TENSOR = "model.layers.0.mlp.experts.w2_scale"


@pytest.mark.parametrize(
    ("folder", "path", "value", "message"),
    [
        ("tp", (*RANK, "intermediate"), [32, 64], "layer 0: rank 3 holds 32 .. 64 after 96 of 128"),
        ("tp", (*RANK, "intermediate"), [96, 96], "layer 0: rank 3 describes w13 as something else than its shard"),
        ("tp", ("layers", 0, "ranks"), without_last, "layer 0: expert 0 has 96 of 128 intermediate features"),
        ("tp", (*RANK, "experts"), [-1, 3], "layer 0: rank 3 holds experts (-1, 3) of 4"),
        ("tp", (*RANK, "experts"), [1, 5], "layer 0: rank 3 holds experts (1, 5) of 4"),
        (
            "whole",
            ("layers", 0, "matrices", "w2", "tensors", "scale"),
            "model.absent",
            "layer 0: model.absent is missing from the weight files",
        ),
        (
            "whole",
            ("layers", 0, "matrices", "w2", "tensors"),
            {"scale": TENSOR},
            "layer 0: w2 has parts ['scale'], marlin-wna16/1 needs ['scale', 'weight']",
        ),
        (
            "whole",
            ("layers", 0, "matrices", "w2", "padded_n"),
            512,
            "layer 0: model.layers.0.mlp.experts.w2_weight is I32 [4, 8, 512] (65,536 bytes), marlin-wna16/1 needs I32 "
            "[4, 8, 1024] (131,072 bytes)",
        ),
        ("whole", ("model", "moe_layers"), [0, 2], "moeq.json: model: moe_layers or experts_per_layer does not"),
        ("whole", ("model", "experts_per_layer"), [4], "moeq.json: model: moe_layers or experts_per_layer does not"),
        ("whole", ("model", "experts_per_layer"), [4, 5], "moeq.json: model: layer 1 has 5 experts, layers has 4"),
        ("whole", ("model", "schemes", 0, "layers"), [0], "moeq.json: model: no scheme covers layer 1"),
        (
            "whole",
            ("model", "schemes", 0, "scheme", "weight", "dtype"),
            "int9",
            "moeq.json: model: 'int9' is not an element type of a scheme",
        ),
        *(
            ("whole", ("model", *path), value, "moeq.json: model: a size is not between 1 and 16,777,216")
            for path in (
                ("num_layers",), ("num_experts",), ("hidden_size",), ("expert_input_size",), ("intermediate_size",),
                ("top_k",), ("routing", "num_groups"), ("routing", "topk_groups"),
            )
            for value in (0, (1 << 24) + 1)
        ),
    ],
)  # fmt: skip
def test_what_a_manifest_may_not_say(
    folder: str, path: tuple[str | int, ...], value: Any, message: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    found = refused(folders[folder], tmp_path / "out", (path, value))
    assert found.startswith(message), found


def test_matrices_of_every_kind_of_ranks_are_those_of_the_source(folders: dict[str, Path], checkpoints: Path) -> None:
    source = moeq.open(checkpoints / NAME)
    for folder in folders.values():
        found = moeq.open(folder)
        for expert in (0, 3):
            for role in ("w13", "w2", "gate", "up", "down"):
                ours, theirs = found.matrix(1, expert, role), source.matrix(1, expert, role)
                assert ours.spec == theirs.spec == found.spec(1, role, expert), (folder.name, role)
                assert torch.equal(ours.codes, theirs.codes)
                assert torch.equal(ours.scales, theirs.scales)
        assert (found.num_experts(1), found.is_packed(1), found.is_packed(2)) == (4, True, False)


def test_what_a_conversion_does_not_hold(folders: dict[str, Path]) -> None:
    found = moeq.open(folders["whole"])
    for ask in (lambda: found.matrix(0, 4, "w2"), lambda: found.spec(0, "w2", 4)):
        with pytest.raises(MoeqError, match="layer 0 has experts 0 to 3, not 4") as caught:
            ask()
        assert caught.value.code == "usage.no-such-expert"
    with pytest.raises(MoeqError, match="not -1"):
        found.matrix(0, -1, "w2")
    with pytest.raises(MoeqError, match="an expert has no projection 'w1'"):
        found.matrix(0, 0, "w1")  # type: ignore[arg-type]
    with pytest.raises(MoeqError, match="layer 0 is converted: its source tensors are gone") as caught:
        found.experts(0)
    assert caught.value.code == "usage.converted-layer"
    for ask in (lambda: found.experts(7), lambda: found.matrix(7, 0, "w2"), lambda: found.spec(7, "w2")):
        with pytest.raises(MoeqError, match="layer 7 has no converted experts") as caught:
            ask()
        assert (caught.value.code, caught.value.hint) == ("usage.no-such-layer", "MoE layers: 0, 1")


def test_layers_that_were_copied_are_asked_of_the_source_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first expert's gate and up, and every expert's matrix by its number."""
    asked: list[tuple[Any, ...]] = []
    for name in ("scheme_of", "spec", "matrix", "num_experts", "expert_prefix"):
        monkeypatch.setattr(Checkpoint, name, lambda checkpoint, *given, name=name: asked.append((name, *given)))
    copied = ConvertedCheckpoint.__new__(ConvertedCheckpoint)
    copied._entries = {}
    assert not copied.is_packed(3)
    copied.scheme_of(3)
    copied.spec(3, "w2")
    copied.matrix(3, 5, "w2")
    copied.num_experts(3)
    copied.expert_prefix(3)
    assert asked == [
        ("scheme_of", 3, 0, "w13"), ("spec", 3, "w2", 0), ("matrix", 3, 5, "w2"), ("num_experts", 3),
        ("expert_prefix", 3),
    ]  # fmt: skip
