"""Checkpoints put together from the examples: other layers, damaged bytes, odd leftovers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]


def rewritten(
    source: Path, folder: Path, change: Callable[[Tensors], Tensors], quantization: dict[str, Any] | None = None
) -> Path:
    """A copy of a single-file checkpoint with other tensors and a changed quantisation config."""
    shutil.copytree(source, folder)
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(quantization or {})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def with_layer_of(other: Path, layer: int, experts: tuple[int, ...] = (0, 1, 2, 3)) -> Callable[[Tensors], Tensors]:
    """Replace the experts of a layer by those of another checkpoint of the same model."""

    def change(tensors: Tensors) -> Tensors:
        prefixes = tuple(f"model.layers.{layer}.mlp.experts.{expert}." for expert in experts)
        theirs = {name: t for name, t in load_file(other / "model.safetensors").items() if name.startswith(prefixes)}
        assert theirs
        return {name: t for name, t in tensors.items() if not name.startswith(prefixes)} | theirs

    return change


def with_plain_layer(layer: int) -> Callable[[Tensors], Tensors]:
    """Replace the experts of a layer by 16-bit ones."""

    def change(tensors: Tensors) -> Tensors:
        prefix = f"model.layers.{layer}.mlp.experts."
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
        generator = torch.Generator().manual_seed(3)
        for expert in range(4):
            for name, shape in {"gate_proj": (128, 256), "up_proj": (128, 256), "down_proj": (256, 128)}.items():
                weight = torch.randn(shape, generator=generator).to(torch.bfloat16)
                kept[f"{prefix}{expert}.{name}.weight"] = weight
        return kept

    return change


def flip(path: Path, position: int) -> None:
    """Invert one byte of a file; negative positions count from the end."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def content(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
