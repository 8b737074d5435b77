"""Experts written by the gather kernel, in Triton's interpreter: the bytes that the CPU writes."""

from __future__ import annotations

import pytest
import torch
from update.test_writer import layers_of, pack, same_bytes
from update.updates import Experts

import moeq
from moeq.update.device import obstacle

CASES = {
    "gptq-int4-g32-qwen3moe": "marlin-wna16/1",
    "awq-int4-g32-qwen3moe": "triton-wna16/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "ct-fp8-block-qwen3moe": "xpu-fp8-block/1",
    "ct-mxfp4-qwen3moe": "moeq-mxfp4/1",
    "mxfp4-gptoss": "marlin-mxfp4-interleaved/1",
}


@pytest.mark.parametrize("name", CASES)
def test_the_gather_kernel_writes_what_the_cpu_writes(name, checkpoints, tmp_path) -> None:
    experts = Experts.read(checkpoints / name)
    folder = pack(checkpoints / name, tmp_path / "out", CASES[name])
    layers, wanted = layers_of(folder), layers_of(folder)
    writer, cpu = moeq.Writer(layers.values(), gather=True), moeq.Writer(wanted.values())
    fused = "gate_up" in experts.projections
    first = (
        {name: experts.parts(0, 0, name) for name in ("gate", "up")} if not fused else experts.parts(0, 0, "gate_up")
    )
    for projection, tensors in (("gate_up" if fused else "w13", first), ("down", experts.parts(0, 0, "down"))):
        assert obstacle(layers[0], "w2" if projection == "down" else "w13") is None
        done = writer.update(0, 1, projection, tensors)
        assert done.digest is None
        cpu.update(0, 1, projection, tensors)
    assert same_bytes(layers[0], wanted[0]) == []
    assert writer.digest(0) == cpu.digest(0) == moeq.snapshot(layers[0])


def test_float_weights_are_quantised_on_the_device(checkpoints, tmp_path) -> None:
    name = "ct-int4-g128-qwen3moe"
    folder = pack(checkpoints / name, tmp_path / "out", "marlin-wna16/1")
    layers, wanted = layers_of(folder), layers_of(folder)
    spec = layers[0].specs["w2"]
    weight = torch.randn(spec.n, spec.k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moeq.Writer(layers.values(), gather=True).update(0, 0, "down", weight)
    done = moeq.Writer(wanted.values()).update(0, 0, "down", weight)
    assert same_bytes(layers[0], wanted[0]) == []
    assert 0.05 < done.loss["down"].new_scales < 0.15 < (done.loss["down"].old_scales or 0)


def test_layouts_that_are_no_index_map_say_why(checkpoints, tmp_path) -> None:
    folder = pack(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", "cpu-amx-int8/1")
    assert "more than an index map" in (obstacle(layers_of(folder)[0], "w13") or "")
