"""Write small checkpoints with random weights, one in each kind of format, for a self-test without a checkpoint.

Their writers follow the formats' own definitions without moeq's schemes, so that reading is tested as well.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 4, 2, 128, 64

#: Function that makes the tensors of one projection `[N, K]` under a prefix.
MakeProjection = Callable[[str, int, int, torch.Generator], dict[str, Tensor]]

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Recipe:
    """Description of one small checkpoint."""

    name: str  #: folder name
    layout: str  #: id of the layout to which the checkpoint is converted
    quantization: dict[str, Any]  #: `quantization_config` of its config
    #: Function that makes one projection of one expert; None for gpt-oss, which stacks its experts.
    projection: MakeProjection | None

    def write(self, folder: Path, seed: int = 0) -> None:
        """Write `config.json` and `model.safetensors` into a new folder."""
        from safetensors.torch import save_file

        generator = torch.Generator().manual_seed(seed)
        folder.mkdir(parents=True)
        family = _QWEN if self.projection else _GPT_OSS
        config = {**family, **_SIZES, "quantization_config": self.quantization}
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        tensors = _stacked(generator) if self.projection is None else _each(self.projection, generator)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, str(folder / "model.safetensors"))


_SIZES = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 1,
    "num_local_experts": EXPERTS,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "torch_dtype": "bfloat16",
}
_QWEN = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "moe_intermediate_size": INTERMEDIATE,
    "intermediate_size": 2 * INTERMEDIATE,
    "norm_topk_prob": True,
}
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "intermediate_size": INTERMEDIATE,
    "swiglu_limit": 7.0,
}


def _each(projection: MakeProjection, generator: torch.Generator) -> dict[str, Tensor]:
    tensors = {"model.layers.0.mlp.gate.weight": _normal((EXPERTS, HIDDEN), generator).to(torch.bfloat16)}
    for expert in range(EXPERTS):
        prefix = f"model.layers.0.mlp.experts.{expert}."
        for name in ("gate_proj.", "up_proj."):
            tensors |= projection(prefix + name, INTERMEDIATE, HIDDEN, generator)
        tensors |= projection(prefix + "down_proj.", HIDDEN, INTERMEDIATE, generator)
    return tensors


def _normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def _integers(high: int, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(high, shape, generator=generator)


def _words(fields: Tensor, bits: int, axis: int) -> Tensor:
    """Pack `32 / bits` consecutive fields along an axis into int32 words, the first in the lowest bits."""
    per = 32 // bits
    parts = fields.to(torch.int64).reshape(*fields.shape[:axis], -1, per, *fields.shape[axis + 1 :])
    shifts = (torch.arange(per) * bits).view([per if d == axis + 1 else 1 for d in range(parts.dim())])
    return (parts << shifts).sum(dim=axis + 1).to(torch.int32)  # keeps the lowest 32 bits


def _scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return 0.004 + 0.012 * torch.rand(shape, generator=generator)


def _gptq(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> MakeProjection:
    def write(prefix: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
        groups, high = k // group, 1 << bits
        codes = _integers(high, (k, n), generator)
        # The first GPTQ format stores zero points minus one.
        zeros = torch.full((groups, n), high // 2 - 1) if symmetric else _integers(high - 1, (groups, n), generator)
        index = torch.arange(k) // group
        if act_order:
            # Gate and up of an expert read the same input, so they share its order.
            expert = prefix.removesuffix(".").rpartition(".")[0]
            shared = torch.Generator().manual_seed(zlib.crc32(f"{expert} {k}".encode()))
            index = index[torch.randperm(k, generator=shared)]
        return {
            f"{prefix}qweight": _words(codes, bits, 0),
            f"{prefix}qzeros": _words(zeros, bits, 1),
            f"{prefix}scales": _scales((groups, n), generator).half(),
            f"{prefix}g_idx": index.to(torch.int32),
        }

    return write


def _awq(prefix: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    def pack(fields: Tensor) -> Tensor:
        return _words(fields.reshape(fields.shape[0], -1, 8)[:, :, list(_AWQ_ORDER)].flatten(1), 4, 1)

    groups = k // 32
    return {
        f"{prefix}qweight": pack(_integers(16, (k, n), generator)),
        f"{prefix}qzeros": pack(_integers(16, (groups, n), generator)),
        f"{prefix}scales": _scales((groups, n), generator).half(),
    }


def _w8a8(prefix: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        f"{prefix}weight": (_integers(255, (n, k), generator) - 127).to(torch.int8),
        f"{prefix}weight_scale": (_scales((n, 1), generator) / 16).to(torch.bfloat16),
    }


def _nvfp4(prefix: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    scales = 0.5 + _integers(24, (n, k // 16), generator) / 4  # numbers of e4m3
    return {
        f"{prefix}weight": _integers(256, (n, k // 2), generator).to(torch.uint8),
        f"{prefix}weight_scale": scales.to(torch.float8_e4m3fn),
        # Gate and up of an expert share one number, as in ModelOpt's checkpoints.
        f"{prefix}weight_scale_2": torch.tensor(0.004 if n == INTERMEDIATE else 0.003),
        f"{prefix}input_scale": torch.tensor(0.01),
    }


def _e4m3(n: int, k: int, generator: torch.Generator) -> Tensor:
    codes = _integers(126, (n, k), generator) + 128 * _integers(2, (n, k), generator)
    return codes.to(torch.uint8).view(torch.float8_e4m3fn)


def _bf16_scales(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw float32 scales that bfloat16 can hold, since Marlin stores bfloat16."""
    return (_scales(shape, generator) / 64).to(torch.bfloat16).float()


def _fp8_block(prefix: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    blocks = (-(-n // 128), -(-k // 128))
    return {
        f"{prefix}weight": _e4m3(n, k, generator),
        f"{prefix}weight_scale_inv": _bf16_scales(blocks, generator),
    }


def _fp8_channel(prefix: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {f"{prefix}weight": _e4m3(n, k, generator), f"{prefix}weight_scale": _bf16_scales((n, 1), generator)}


def _mxfp8(prefix: str, n: int, k: int, generator: torch.Generator) -> dict[str, Tensor]:
    exponents = (113 + _integers(5, (n, k // 32), generator)).to(torch.uint8)
    return {f"{prefix}weight": _e4m3(n, k, generator), f"{prefix}weight_scale": exponents}


def _stacked(generator: torch.Generator) -> dict[str, Tensor]:
    prefix = "model.layers.0.mlp."
    tensors = {
        f"{prefix}router.weight": _normal((EXPERTS, HIDDEN), generator).to(torch.bfloat16),
        f"{prefix}router.bias": _normal((EXPERTS,), generator).to(torch.bfloat16),
    }
    for name, n, k in (("gate_up", 2 * INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
        base = f"{prefix}experts.{name}_proj_"
        tensors[f"{base}blocks"] = _integers(256, (EXPERTS, n, k // 32, 16), generator).to(torch.uint8)
        tensors[f"{base}scales"] = (118 + _integers(5, (EXPERTS, n, k // 32), generator)).to(torch.uint8)
        tensors[f"{base}bias"] = _normal((EXPERTS, n), generator).to(torch.bfloat16)
    return tensors


def _gptq_config(bits: int, *, symmetric: bool = True, act_order: bool = False) -> dict[str, Any]:
    sizes = {"bits": bits, "group_size": 32, "sym": symmetric, "desc_act": act_order}
    return {"quant_method": "gptq", "checkpoint_format": "gptq", **sizes}


def _channelwise_config(kind: str) -> dict[str, Any]:
    """Make compressed-tensors' config of 8-bit `int` or `float` weights, with scales per channel and per token."""
    codes = {"num_bits": 8, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**codes, "strategy": "channel", "dynamic": False},
        "input_activations": {**codes, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "config_groups": {"group_0": group},
        "ignore": ["model.layers.0.mlp.gate", "lm_head"],
    }


_FP8_BLOCK_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
_NVFP4_CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"]}
_MXFP8_CONFIG = {"quant_method": "modelopt", "quant_algo": "MXFP8", "group_size": 32, "exclude_modules": ["lm_head"]}

#: One checkpoint in each kind of format that the kernels read.
RECIPES: tuple[Recipe, ...] = (
    Recipe("gptq-int4", "marlin-wna16/1", _gptq_config(4), _gptq(4, 32)),
    Recipe("gptq-int4-asym", "marlin-wna16/1", _gptq_config(4, symmetric=False), _gptq(4, 32, symmetric=False)),
    Recipe(
        "gptq-int4-actorder",
        "marlin-act-order/1",
        _gptq_config(4, act_order=True),
        _gptq(4, 32, act_order=True),
    ),
    Recipe("gptq-int8", "triton-wna16/1", _gptq_config(8), _gptq(8, 32)),
    Recipe(
        "awq-int4",
        "triton-wna16/1",
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        _awq,
    ),
    Recipe("w8a8-int8", "int8-w8a8/1", _channelwise_config("int"), _w8a8),
    Recipe("mxfp4", "marlin-mxfp4-interleaved/1", {"quant_method": "mxfp4"}, None),
    Recipe("nvfp4", "marlin-nvfp4/1", _NVFP4_CONFIG, _nvfp4),
    Recipe("fp8-block", "marlin-fp8/1", _FP8_BLOCK_CONFIG, _fp8_block),
    Recipe("fp8-channel", "marlin-fp8/1", _channelwise_config("float"), _fp8_channel),
    Recipe("mxfp8", "marlin-mxfp8/1", _MXFP8_CONFIG, _mxfp8),
)
