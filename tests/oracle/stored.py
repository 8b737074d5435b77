"""Small checkpoint folders of any names, dtypes and shapes: the oracle reads headers, so every value is zero."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INTER, EXPERTS, LAYERS = 256, 128, 4, 2
Parts = dict[str, tuple[torch.dtype, tuple[int, ...]]]
QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": HIDDEN,
    "moe_intermediate_size": INTER, "num_experts": EXPERTS, "num_experts_per_tok": 2, "num_hidden_layers": LAYERS,
    "vocab_size": 64, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip
GPTQ = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": 32,
    "sym": True,
    "desc_act": False,
    "checkpoint_format": "gptq",
}


def gptq(n: int, k: int, bits: int = 4, group: int = 32) -> Parts:
    """Parts of a GPTQ matrix."""
    per = 32 // bits
    return {
        "qweight": (torch.int32, (k // per, n)),
        "qzeros": (torch.int32, (k // group, n // per)),
        "scales": (torch.float16, (k // group, n)),
        "g_idx": (torch.int32, (k,)),
    }


def plain(n: int, k: int) -> Parts:
    """Parts of a bfloat16 matrix."""
    return {"weight": (torch.bfloat16, (n, k))}


def nvfp4(n: int, k: int, *, input_scale: bool = True) -> Parts:
    """Parts of a ModelOpt NVFP4 matrix."""
    parts: Parts = {
        "weight": (torch.uint8, (n, k // 2)),
        "weight_scale": (torch.float8_e4m3fn, (n, k // 16)),
        "weight_scale_2": (torch.float32, ()),
    }
    return {**parts, "input_scale": (torch.float32, ())} if input_scale else parts


def fp8_block(n: int, k: int, scale: str = "weight_scale_inv", dtype: torch.dtype = torch.float32) -> Parts:
    """Parts of an FP8 matrix with one scale per block of 128 x 128."""
    return {"weight": (torch.float8_e4m3fn, (n, k)), scale: (dtype, (-(-n // 128), -(-k // 128)))}


def experts(
    prefix: str,
    make: Callable[[int, str, int, int], Parts],
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    inter: int = INTER,
    count: int = EXPERTS,
) -> dict[str, torch.Tensor]:
    """Tensors of one layer's experts; `make` gets expert, projection, N and K."""
    found = {}
    for expert in range(count):
        for name in names:
            n, k = (HIDDEN, inter) if name == names[2] else (inter, HIDDEN)
            for part, (dtype, shape) in make(expert, name, n, k).items():
                found[f"{prefix}.{expert}.{name}.{part}"] = torch.zeros(shape, dtype=torch.float32).to(dtype)
    return found


def write(folder: Path, config: dict[str, Any], layers: Iterable[dict[str, torch.Tensor]], **side: Any) -> Path:
    """Write a folder; `side` are side files by their name without `.json`."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    for name, content in side.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    tensors = {name: tensor for layer in layers for name, tensor in layer.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
