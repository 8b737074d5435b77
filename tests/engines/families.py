"""Small random models of any family that transformers knows, experts in compressed-tensors int4, as published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from bench_scripts import checkpoint_formats
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 32

#: What makes a model of any family small; every config takes what it knows.
SMALL: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}

#: Family to what it needs beyond that.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "qwen3_moe": {},
    "qwen3_next": {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32}
    | {"linear_value_head_dim": 32, "layer_types": ["linear_attention", "full_attention"]},
    "mixtral": {},
    "olmoe": {},
    "phimoe": {},
    "minimax_m2": {"rotary_dim": 16},
    "glm4_moe": {},
    "deepseek_v2": {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
    | {"v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 32},
    "deepseek_v3": {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32}
    | {"v_head_dim": 32, "num_key_value_heads": 4, "head_dim": 32},
    "dots1": {},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_num_shared_experts": 1, "moe_layer_start_index": 0},
    "hunyuan_v1_moe": {"num_shared_expert": 1, "num_experts_per_tok": 2},
    "flex_olmo": {},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 1, "expert_layer_offset": 0}
    | {"mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    "lfm2_moe": {"num_dense_layers": 0, "layer_types": ["conv", "full_attention"]},
    "afmoe": {"num_dense_layers": 0, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32},
    "exaone_moe": {"sliding_window": 32, "sliding_window_pattern": 2},
    "solar_open": {},
}


def write_family(folder: Path, model_type: str) -> torch.nn.Module:
    """Write a quantised checkpoint of the family, and return the model that it means, in float32.

    Weights of experts are rounded to int4 codes before the model is made, so that both hold the same numbers.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    known = type(AutoConfig.for_model(model_type))
    config = known(**{name: value for name, value in (SMALL | FAMILIES[model_type]).items() if takes(known, name)})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
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
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32).eval()


def takes(config: type, name: str) -> bool:
    """Whether a config class knows a key."""
    return name in getattr(config, "attribute_map", {}) or hasattr(config(), name)


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
