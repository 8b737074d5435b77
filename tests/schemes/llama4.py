"""Llama 4 as ModelOpt quantises it: the experts of a layer in one tensor, rows and columns exchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def as_llama4(source: Path, folder: Path) -> Path:
    """A checkpoint of single experts in NVFP4 as one of Llama 4: `weight` `[E, K / 2, N]`, scales `[E, K / 16, N]`.

    The second-level scales of gate, up and down become one number each for all experts, as ModelOpt writes them.
    """
    shutil.copytree(source, folder)
    written: dict[str, torch.Tensor] = {}
    groups: dict[tuple[str, str, str], dict[int, torch.Tensor]] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        head, found, tail = name.partition(".mlp.experts.")
        if not found:
            written[name.replace(".mlp.gate.", ".feed_forward.router.")] = tensor
            continue
        expert, projection, part = tail.split(".")
        groups.setdefault((head, projection, part), {})[int(expert)] = tensor
    for (head, projection, part), found in groups.items():
        if projection == "up_proj":
            continue
        whole = torch.stack([found[expert] for expert in sorted(found)])
        if projection == "gate_proj":
            up = groups[head, "up_proj", part]
            other = torch.stack([up[expert] for expert in sorted(up)])
            whole = torch.cat([whole, other], dim=1) if whole.dim() == 3 else torch.maximum(whole, other)
        if whole.dim() == 3:
            whole = whole.view(torch.uint8).mT.contiguous().view(whole.dtype)
        stem = "down_proj" if projection == "down_proj" else "gate_up_proj"
        name = f"{head}.feed_forward.experts.{stem}" + ("" if part == "weight" else f"_{part}")
        written[name] = whole if whole.dim() == 3 else whole.max()
    save_file(written, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((source / "config.json").read_text())
    config |= {
        "architectures": ["Llama4ForCausalLM"],
        "model_type": "llama4_text",
        "intermediate_size": config["moe_intermediate_size"],
        "num_local_experts": config.get("num_local_experts", config.get("num_experts")),
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
