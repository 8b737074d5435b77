"""Random adapters (LoRA) for random checkpoints, in PEFT's files."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch


def write_adapter(source: Path, folder: Path, which: str, rank: int = 8) -> None:
    """Write a random adapter in PEFT's files.

    Args:
        source: checkpoint whose attention is not quantised.
        folder: folder of the adapter, which is created.
        which: `attention`, or `experts` of models that name them as Qwen3-MoE does.
        rank: rank of the adapter.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text())
    shapes: dict[str, tuple[int, int]] = {}
    with safe_open(source / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dictionary
            module = name.rpartition(".")[0]
            if which == "attention" and re.search(r"self_attn\.[qkvo]_proj\.weight$", name):
                shapes[module] = tuple(file.get_slice(name).get_shape())
            elif which == "experts" and re.search(r"mlp\.experts\.\d+\.\w+_proj\.", name):
                sizes = (config["moe_intermediate_size"], config["hidden_size"])
                shapes[module] = sizes[::-1] if module.endswith("down_proj") else sizes
    draw, tensors = torch.Generator().manual_seed(5), dict[str, torch.Tensor]()
    for module, (n, k) in shapes.items():
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(rank, k, generator=draw).bfloat16() / k**0.5
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(n, rank, generator=draw).bfloat16() / 4
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none"}
    about |= {"target_modules": sorted({module.rpartition(".")[2] for module in shapes}), "lora_dropout": 0.0}
    (folder / "adapter_config.json").write_text(json.dumps(about | {"base_model_name_or_path": str(source)}))
