"""What tests of transcode share: sources, results, and the values that the sources mean."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from moeq.model import open as open_checkpoint
from moeq.model.quantized_modules import quantized_modules, read_module
from moeq.schemes.dequantize import dequantize
from moeq.transcode.transcode import transcode

Tensors = dict[str, torch.Tensor]

INTEGERS = (
    "gptq-int4-g32-qwen3moe",
    "gptq-int8-g64-qwen3moe",
    "gptq-int4-g128-mixtral",
    "awq-int4-g32-qwen3moe",
    "ct-int4-g128-qwen3moe",
    "ct-int4-asym-g32-mixtral",
    "ct-w8a8-qwen3moe",
)
FP8 = ("ct-fp8-tensor-qwen3moe", "ct-fp8-channel-qwen3moe", "ct-fp8-block-qwen3moe", "modelopt-fp8-qwen3moe")
#: Those that ModelOpt's FP8 holds in a form whose experts engines load: `transcode` refuses the others.
FP8_OF_MODELOPT = ("ct-fp8-tensor-qwen3moe", "modelopt-fp8-qwen3moe")
MXFP8 = "ct-mxfp8-qwen3moe"
NVFP4 = ("ct-nvfp4-qwen3moe", "ct-nvfp4a16-qwen3moe")
MIXTRAL = ("gptq-int4-g128-mixtral", "ct-int4-asym-g32-mixtral")


def tensors_of(folder: Path) -> Tensors:
    """All tensors of a checkpoint."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def result(source: Path, out: Path, to: str, **options: Any) -> tuple[dict[str, Any], Tensors]:
    """Transcode; the written config and all tensors."""
    assert transcode(source, out, to, **options).written
    return json.loads((out / "config.json").read_text()), tensors_of(out)


def source_values(source: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Every quantised module of a source and its values, by moeq's own reader."""
    ckpt = open_checkpoint(source)
    for layer in ckpt.info.moe_layers:
        for expert in range(ckpt.num_experts(layer)):
            for projection in ("gate", "up", "down"):
                module = f"{ckpt.expert_prefix(layer)}.{expert}.{projection}_proj"
                yield module, dequantize(ckpt.matrix(layer, expert, projection))
    rest = [entry for name, entry in ckpt.source.tensors.items() if name not in ckpt.source.expert_names]
    for found in quantized_modules(rest, ckpt.declaration):
        yield found.name, dequantize(read_module(ckpt.source, found))


def with_names_of_mixtral(name: str) -> str:
    """A module's or tensor's name as Mixtral's class calls it."""
    name = name.replace(".mlp.", ".block_sparse_moe.")
    for long, short in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        name = re.sub(rf"(\.experts\.\d+)\.{long}\b", rf"\1.{short}", name)
    return name


def parts_of(tensors: Tensors, module: str) -> Tensors:
    """A module's tensors by part; experts may have Mixtral's names."""
    for name in (module, with_names_of_mixtral(module)):
        found = {key[len(name) + 1 :]: value for key, value in tensors.items() if key.startswith(f"{name}.")}
        if found:
            return found
    raise AssertionError(f"{module} was not written")


def assert_equal(read: torch.Tensor, expected: torch.Tensor, module: str) -> None:
    assert read.shape == expected.shape, module
    assert torch.equal(read.float(), expected), module
