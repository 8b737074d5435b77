"""Small random models of any family that transformers knows, experts in compressed-tensors int4, as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bench_scripts import checkpoint_formats, make_family
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 32


def write_family(folder: Path, model_type: str, **attributes: Any) -> torch.nn.Module:
    """Write a quantised checkpoint of the family, and return the model that it means, in float32.

    `attributes` are those that its model reads and some versions of its config leave out.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = make_family.family_config(model_type)
    for name, value in attributes.items():
        setattr(config, name, value)
    return write_model(folder, AutoModelForCausalLM.from_config(config).float())


def write_model(folder: Path, model: torch.nn.Module) -> torch.nn.Module:
    """Write a model with quantised experts, and return the one that the files mean, in float32.

    Weights of experts are rounded to int4 codes before that is made, so that both hold the same numbers.
    """
    plain = folder.with_name(folder.name + "-plain")
    model.save_pretrained(plain)
    with safe_open(plain / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    packed: dict[str, torch.Tensor] = {}
    for name, weight in tensors.items():
        if ".experts." not in name or weight.dim() != 2:
            packed[name] = weight
            continue
        weight = torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(packed))) / 8
        codes, scale = quantise(weight)
        tensors[name] = ((codes - 8).view(*scale.shape, GROUP) * scale[..., None]).flatten(1)
        module = name.removesuffix(".weight")
        packed |= {
            f"{module}.weight_packed": pack(codes),
            f"{module}.weight_scale": scale.to(torch.bfloat16),
            f"{module}.weight_shape": torch.tensor(weight.shape),
        }
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    folder.mkdir()
    save_file(packed, folder / "model.safetensors", {"format": "pt"})
    document = json.loads((plain / "config.json").read_text())
    document["quantization_config"] = checkpoint_formats.FORMATS["ct-int4"].config
    (folder / "config.json").write_text(json.dumps(document))
    return type(model).from_pretrained(plain, dtype=torch.float32).eval()


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float `[N, K]` to codes 0 to 15 and bf16-valued scales `[N, K // GROUP]`."""
    groups = weight.view(weight.shape[0], -1, GROUP)
    scale = (groups.abs().amax(-1) / 7).to(torch.bfloat16).float()
    codes = (groups / scale[..., None]).round().clamp(-8, 7) + 8
    return codes.flatten(1), scale


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes `[N, K]` to int32 `[N, K // 8]`, the first code in the lowest bits."""
    words = codes.to(torch.int64).view(codes.shape[0], -1, 8) << (4 * torch.arange(8))
    return words.sum(-1).to(torch.int32)
