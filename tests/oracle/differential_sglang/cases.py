"""Random layers, deployments and integer checkpoints for SGLang on CUDA: everything follows from the seed."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

Row = dict[str, Any]

#: Cases of a sample.
COUNT = 3000
_CUDA = ([7, 5], [8, 0], [8, 6], [8, 9], [9, 0], [10, 0], [10, 3], [12, 0])
_RUNNERS = ("auto",) * 8 + ("triton", "triton", "marlin", "cutlass", "flashinfer_trtllm", "triton_kernel", "deep_gemm")
# hidden, intermediate, experts, top-k: layers of published models
_MODELS = (
    (2048, 768, 128, 8), (4096, 1536, 128, 8), (2048, 512, 512, 10), (4096, 14336, 8, 2), (2048, 1408, 64, 6),
    (7168, 2048, 256, 8), (4096, 6400, 16, 2), (1536, 512, 40, 8), (2880, 2880, 32, 4),
)  # fmt: skip
_BY_HAND = (None,) * 10


def _gptq(rng: Random) -> tuple[Row, str | None]:
    config: Row = {
        "quant_method": "gptq", "bits": rng.choice((4,) * 6 + (8, 8, 3, 2)), "sym": rng.random() < 0.9,
        "group_size": rng.choice((128,) * 4 + (64, 32, -1, 16, 256)), "desc_act": rng.random() < 0.15,
    }  # fmt: skip
    if rng.random() < 0.05:
        config.pop(rng.choice(("bits", "sym", "desc_act", "group_size")))
    return config, rng.choice((*_BY_HAND, "gptq", "gptq_marlin", "moe_wna16", "moe_wna16", "awq"))


def _awq(rng: Random) -> tuple[Row, str | None]:
    short = rng.random() < 0.1
    config: Row = {
        "quant_method": "awq", "w_bit" if short else "bits": rng.choice((4,) * 8 + (8,)),
        "q_group_size" if short else "group_size": rng.choice((128,) * 4 + (64, 32, -1, 16)),
        "zero_point": rng.random() < 0.85, "version": "gemm",
    }  # fmt: skip
    if rng.random() < 0.1:
        config["modules_to_not_convert"] = [rng.choice(("mlp.experts", "self_attn", "layers.1."))]
    return config, rng.choice((*_BY_HAND, "awq", "awq_marlin", "moe_wna16", "moe_wna16", "gptq"))


def _ct(rng: Random) -> tuple[Row, str | None]:
    strategy = rng.choice(("group",) * 5 + ("channel", "tensor"))
    weights: Row = {
        "num_bits": rng.choice((4,) * 6 + (8, 8, 3)), "type": "int", "symmetric": rng.random() < 0.8,
        "strategy": strategy, "dynamic": False,
    }  # fmt: skip
    if strategy == "group":
        weights["group_size"] = rng.choice((128,) * 3 + (64, 32, 32, 16))
        order = rng.choice((None,) * 8 + ("static", "group"))
        weights |= {"actorder": order} if order else {}
    inputs: Row | None = None
    if rng.random() < 0.2:
        weights |= {"num_bits": 8, "strategy": "channel", "symmetric": True}
        weights.pop("group_size", None)
        weights.pop("actorder", None)
        inputs = {"num_bits": 8, "type": "int", "symmetric": rng.random() < 0.9, "strategy": "token", "dynamic": True}
    fmt = "int-quantized" if inputs or rng.random() < 0.05 else "pack-quantized"
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore = rng.choice(([],) * 8 + (["re:.*mlp.experts.*"], ["lm_head"]))
    config = {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "ignore": ignore,
        "config_groups": {"group_0": group},
    }
    return config, rng.choice((*_BY_HAND, *_BY_HAND, "compressed-tensors", "w8a8_int8", "gptq"))


_CONFIGS: tuple[Callable[[Random], tuple[Row, str | None]], ...] = (_gptq, _gptq, _awq, _ct, _ct)


def cases(seed: str, count: int = COUNT) -> list[Row]:
    """The seed's cases, device by device."""
    rng = Random(seed)
    found = []
    for _ in range(count):
        hidden, inter, experts, topk = rng.choice(_MODELS)
        if rng.random() < 0.2:
            inter = rng.choice((16, 32, 64, 96, 128, 160)) * rng.randint(4, 16)
        if rng.random() < 0.1:
            hidden = rng.choice((32, 64, 128)) * rng.randint(4, 40)
        config, user = rng.choice(_CONFIGS)(rng)
        tp = rng.choice((1, 1, 1, 2, 4, 8))
        found.append({
            "capability": rng.choice(_CUDA), "hidden": hidden, "inter": inter, "experts": experts, "topk": topk,
            "act": rng.choice(("silu",) * 8 + ("gelu",)), "dtype": rng.choice(("bf16", "bf16", "fp16")), "tp": tp,
            "ep": rng.random() < 0.3, "runner": rng.choice(_RUNNERS), "quantization": user, "config": config,
        })  # fmt: skip
    return sorted(found, key=lambda case: case["capability"])
