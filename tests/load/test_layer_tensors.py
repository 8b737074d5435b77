"""`moeq.load_tensors`: the stored tensors of any layout by name, for a rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from load.deployments import convert
from safetensors import safe_open

import moeq
from moeq.checkpoint.manifest import read_manifest
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout

#: One of each kind: zero points, act-order, biases, up rows first, global scales, blocks, signs of zeros, sums.
LAYOUTS = [
    ("gptq-int4-g32-qwen3moe", "humming-wna16/1"),
    ("gptq-int4-g32-actorder-qwen3moe", "marlin-act-order/1"),
    ("ct-int4-asym-g32-mixtral", "triton-wna16/1"),
    ("mxfp4-gptoss", "trtllm-mxfp4/1"),
    ("modelopt-nvfp4-qwen3moe", "trtllm-nvfp4/1"),
    ("modelopt-nvfp4-qwen3moe", "b12x-nvfp4/1"),
    ("ct-nvfp4a16-qwen3moe", "marlin-nvfp4/1"),
    ("ct-fp8-block-qwen3moe", "trtllm-fp8-block/1"),
    ("ct-fp8-channel-qwen3moe", "aiter-fp8-channel-fnuz/1"),
    ("ct-w8a8-qwen3moe", "cpu-amx-int8/1"),
]


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_they_are_the_files(name: str, layout: str, checkpoints: Path, tmp_path: Path) -> None:
    folder = convert(checkpoints / name, tmp_path / "out", layout)
    found = moeq.load_tensors(folder, 1)
    entry = read_manifest(folder).layer(1)
    assert (found.layout, found.experts) == (layout, (0, entry.num_experts))
    assert (found.w13_spec, found.w2_spec) == tuple(entry.matrices[role].padded_spec for role in ("w13", "w2"))
    stored = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            stored |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    for role, parts in (("w13", found.w13), ("w2", found.w2)):
        names = entry.matrices[role].tensors
        assert parts.keys() == names.keys() == get_layout(layout).tensors(entry.matrices[role].padded_spec).keys()
        for part, tensor in parts.items():
            wanted = stored[names[part]]
            assert tensor.dtype == wanted.dtype
            assert torch.equal(tensor.view(torch.uint8), wanted.view(torch.uint8))
    assert (found.activation_scales is not None) == (name == "modelopt-nvfp4-qwen3moe")


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(("name", "layout"), LAYOUTS)
def test_ranks_hold_their_experts(name: str, layout: str, checkpoints: Path, tmp_path: Path) -> None:
    folder = convert(checkpoints / name, tmp_path / "out", layout, ep=2)
    source = moeq.open(checkpoints / name)
    ranks = [moeq.load_tensors(folder, 1, ep_rank=rank, ep_size=2) for rank in (0, 1)]
    assert ranks[0].experts[1] == ranks[1].experts[0]
    for rank in ranks:
        for row, expert in enumerate(range(*rank.experts)):
            parts = {part: tensor[row] for part, tensor in rank.w2.items()}
            matrix = get_layout(layout).unpack(parts, rank.w2_spec)
            wanted = source.matrix(1, expert, "w2")
            assert torch.equal(matrix.codes[: wanted.spec.n, : wanted.spec.k], wanted.codes)


def test_half_of_every_expert(checkpoints: Path, tmp_path: Path) -> None:
    """Gate and up are cut apart."""
    folder = convert(checkpoints / "ct-fp8-channel-qwen3moe", tmp_path / "out", "aiter-fp8-channel/1")
    source = moeq.open(checkpoints / "ct-fp8-channel-qwen3moe")
    for rank in (0, 1):
        found = moeq.load_tensors(folder, 1, tp_rank=rank, tp_size=2)
        own = slice(rank * 32, rank * 32 + 32)
        matrix = get_layout(found.layout).unpack(
            {part: tensor[2] for part, tensor in found.w13.items()}, found.w13_spec
        )
        gate, up = (source.matrix(1, 2, role).codes[own] for role in ("gate", "up"))
        assert torch.equal(matrix.codes, torch.cat([gate, up]))


def test_refusals_are_those_of_load_experts(checkpoints: Path, tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match="is a source checkpoint"):
        moeq.load_tensors(checkpoints / "ct-w8a8-qwen3moe", 1)
    folder = convert(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "out", "trtllm-nvfp4/1")
    with pytest.raises(MoeqError, match=r"up rows come first|no kernel"):
        moeq.load_experts(folder, 1)
    with pytest.raises(MoeqError, match="ranks count from 0"):
        moeq.load_tensors(folder, 1, ep_rank=2, ep_size=2)
