"""Stored scales of activations that are of no use are said by every command that writes or plans a folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from moeq.cli.app import run


@pytest.fixture(scope="module")
def spoilt(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with one scale of activations that is zero."""
    source = tmp_path_factory.mktemp("spoilt") / "source"
    shutil.copytree(checkpoints / "modelopt-nvfp4-qwen3moe", source)
    path = next(source.glob("*.safetensors"))
    tensors = load_file(path)
    name = next(name for name in sorted(tensors) if ".experts." in name and name.endswith("input_scale"))
    save_file(tensors | {name: torch.zeros_like(tensors[name])}, path, {"format": "pt"})
    return source


def test_the_warning_is_given_once_by_each_command(spoilt: Path, tmp_path: Path, capsys) -> None:
    out, shards = str(tmp_path / "out"), str(tmp_path / "shards")
    where = ["--gpu", "A100", "--backend", "marlin"]
    for argv, warns in (
        (["plan", str(spoilt), *where], True),
        (["convert", str(spoilt), out, *where, "--quiet"], True),
        (["convert", str(spoilt), shards, *where, "--shard", "0/2", "--quiet"], None),
        (["convert", str(spoilt), shards, *where, "--shard", "1/2", "--quiet"], None),
        (["finalize", shards, "--quiet"], True),
    ):
        capsys.readouterr()
        assert run(argv) == 0, argv
        said = " ".join(capsys.readouterr().err.split())
        if warns is not None:
            assert said.count("this layout is weight-only and unharmed") == 1, argv
