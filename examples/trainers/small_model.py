"""The model of the examples in this folder: a small converted checkpoint, and the weights that a trainer has for it."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import moeq

sys.path.append(str(Path(__file__).parents[1] / "bench"))
from make_checkpoint import MODELS, Size, write_checkpoint

LAYERS = 2
TINY = MODELS["tiny"]
MODEL = replace(TINY, config=TINY.config | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64})


def converted_checkpoint(folder: Path) -> Path:
    """Write a small Qwen3-MoE with int4 experts, as compressed-tensors stores them, and convert it."""
    write_checkpoint(folder / "source", MODEL, "ct-int4", Size(LAYERS))
    moeq.convert(folder / "source", folder / "converted", gpu="A100", layout="marlin-wna16/1", force_layout=True)
    return folder / "converted"


def trained_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and bf16 weights as a trainer has them after a step: all experts, and the last norm."""
    draw = torch.Generator().manual_seed(0)
    for number in range(LAYERS):
        layer = moeq.writable_layer(folder, number)
        w13, w2 = layer.specs["w13"], layer.specs["w2"]
        shapes = {"gate": (w13.n // 2, w13.k), "up": (w13.n // 2, w13.k), "down": (w2.n, w2.k)}
        for expert in range(layer.num_experts):
            for name, shape in shapes.items():
                weight = torch.randn(shape, generator=draw).bfloat16()
                yield f"model.layers.{number}.mlp.experts.{expert}.{name}_proj.weight", weight
    yield "model.norm.weight", torch.full((w2.n,), 2.0, dtype=torch.bfloat16)


def check(folder: Path, modules: list[Any]) -> None:
    """Compare the experts that a server holds, by their digests, with the trainer's weights in the checkpoint's format.

    Args:
        folder: the converted checkpoint.
        modules: the engine's modules that hold the experts, one for each layer.
    """
    trainer = moeq.Writer([moeq.writable_layer(folder, number) for number in range(LAYERS)])
    for name, weight in trained_weights(folder):
        if "experts" in name:
            _, _, number, _, _, expert, projection, _ = name.split(".")
            trainer.update(int(number), int(expert), projection.removesuffix("_proj"), weight)
    for number, module in enumerate(modules):
        parts = {
            role: {part: getattr(module, f"{role}_{part}").data for part in tensors}
            for role, tensors in trainer.layers[number].tensors.items()
        }
        held = moeq.snapshot(moeq.writable_layer(folder, number, tensors=parts))
        assert held == trainer.digest(number), f"layer {number} does not hold the trainer's weights"
        print(f"layer {number}: trainer and server have digest {held[:16]}")
