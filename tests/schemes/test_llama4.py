"""NVFP4 experts of Llama 4, which ModelOpt stores with rows and columns exchanged."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from load.deployments import convert
from safetensors.torch import load_file, save_file
from schemes.llama4 import as_llama4

import moeq
from moeq.errors import MoeqError
from moeq.prove.restore import restore


@pytest.fixture
def plain(checkpoints: Path) -> Path:
    return checkpoints / "modelopt-nvfp4-qwen3moe"


@pytest.fixture
def source(plain: Path, tmp_path: Path) -> Path:
    """The stack of gate and up is square here, so that sizes alone do not tell rows from columns."""
    return as_llama4(plain, tmp_path / "source")


def test_codes_and_scales_are_those_of_single_experts(plain: Path, source: Path) -> None:
    upright, turned = moeq.open(plain), moeq.open(source)
    assert turned.info.family == "Llama-4"
    assert "rows and columns exchanged" in turned.scheme_of(0).packing
    for layer in (0, 1):
        for expert in range(upright.info.num_experts):
            for name in ("gate", "up", "down"):
                mine, wanted = turned.matrix(layer, expert, name), upright.matrix(layer, expert, name)
                assert mine.spec == wanted.spec
                assert torch.equal(mine.codes, wanted.codes)
                assert torch.equal(mine.scales.view(torch.uint8), wanted.scales.view(torch.uint8))


@pytest.mark.parametrize("layout", ["marlin-nvfp4/1", "trtllm-nvfp4/1"])
def test_there_and_back(source: Path, tmp_path: Path, layout: str) -> None:
    folder = convert(source, tmp_path / "out", layout)
    restore(folder, tmp_path / "back")
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_scales_of_neither_form_are_refused(source: Path) -> None:
    tensors = load_file(source / "model.safetensors")
    name = "model.layers.0.feed_forward.experts.gate_up_proj_weight_scale"
    tensors[name] = tensors[name][:, :-1].contiguous()
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(MoeqError, match="weight_scale is"):
        moeq.open(source).scheme_of(0)
