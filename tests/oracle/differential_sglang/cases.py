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


def _fp8(rng: Random) -> tuple[Row, str | None]:
    config: Row = {
        "quant_method": rng.choice(("fp8",) * 8 + ("mxfp8",)),
        "activation_scheme": rng.choice(("dynamic", "dynamic", "static")),
    }
    if rng.random() < 0.6:
        config["activation_scheme"] = rng.choice(("dynamic",) * 12 + ("static",))
        config["weight_block_size"] = rng.choice(([128, 128],) * 8 + ([64, 64], [1, 32], [128]))
    if rng.random() < 0.08:
        names = ("model.layers.1.mlp.experts", "lm_head", "layers.1.mlp.experts", "experts", "model.layers.1.mlp.gate")
        config[rng.choice(("ignored_layers", "modules_to_not_convert"))] = [rng.choice(names)]
    if rng.random() < 0.04:
        del config["activation_scheme"]
    return config, rng.choice((*_BY_HAND, "fp8", "w8a8_fp8", "gptq"))


def _mxfp4(rng: Random) -> tuple[Row, str | None]:
    skipped = {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]} if rng.random() < 0.5 else {}
    return {"quant_method": "mxfp4", **skipped}, rng.choice((*_BY_HAND, "mxfp4", "fp8"))


def _w4afp8(rng: Random) -> tuple[Row, str | None]:
    return {"quant_method": "w4afp8", "activation_scheme": "dynamic"}, rng.choice((*_BY_HAND, "w4afp8"))


def _floats(bits: int, strategy: str, group: int | None = None, **more: Any) -> Row:
    sizes = {"group_size": group} if group else {}
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "dynamic": False,
        **more,
        **sizes,
    }


def _ct_floats(rng: Random, weights: Row, inputs: Row | None, fmt: str) -> Row:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    ignore = rng.choice(([],) * 8 + (["re:.*mlp.experts.*"], ["lm_head"]))
    return {"quant_method": "compressed-tensors", "format": fmt, "ignore": ignore, "config_groups": {"group_0": group}}


def _ct_fp8(rng: Random) -> tuple[Row, str | None]:
    strategy = rng.choice(("channel", "tensor", "block"))
    weights, inputs = _floats(8, strategy), _floats(8, "token", dynamic=True)
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        inputs = _floats(8, "group", 128, dynamic=True)
    elif strategy == "tensor" and rng.random() < 0.7:
        inputs = _floats(8, "tensor", dynamic=rng.random() < 0.3)
    return _ct_floats(rng, weights, inputs, "float-quantized"), rng.choice(
        (*_BY_HAND, "w8a8_fp8", "compressed-tensors")
    )


def _ct_nvfp4(rng: Random) -> tuple[Row, str | None]:
    inputs = rng.choice((_floats(4, "tensor_group", 16, dynamic="local"),) * 2 + (None,))
    return _ct_floats(rng, _floats(4, "tensor_group", 16), inputs, "nvfp4-pack-quantized"), None


def _modelopt(rng: Random) -> tuple[Row, str | None]:
    skipped = rng.choice((["lm_head"], ["lm_head"], ["model.layers.1.mlp.experts*"], ["*self_attn*"]))
    config = {
        "quant_method": rng.choice(("modelopt",) * 4 + ("modelopt_fp4", "modelopt_fp8")),
        "quant_algo": rng.choice(("FP8", "FP8", "NVFP4", "NVFP4", "NVFP4", "W4A16_NVFP4", "MXFP8")), "group_size": 16,
        "kv_cache_quant_algo": rng.choice((None, "FP8")), rng.choice(("exclude_modules", "ignore")): skipped,
    }  # fmt: skip
    return config, rng.choice((*_BY_HAND, "modelopt_fp8", "modelopt"))


#: Families of floats: they have runners of their own and a recorded sample of their own.
_FLOAT_CONFIGS: tuple[Callable[[Random], tuple[Row, str | None]], ...] = (
    *(_fp8, _fp8, _fp8, _mxfp4, _w4afp8, _ct_fp8, _ct_fp8, _ct_nvfp4, _modelopt, _modelopt),
)
_FLOAT_RUNNERS = (
    *("auto",) * 6,
    *("triton", "triton_kernel", "marlin", "cutlass", "deep_gemm", "flashinfer_trtllm", "flashinfer_trtllm_routed"),
    *("flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_mxfp4"),
)
_CONFIGS: tuple[Callable[[Random], tuple[Row, str | None]], ...] = (_gptq, _gptq, _awq, _ct, _ct)


def cases(seed: str, count: int = COUNT, *, floats: bool = False) -> list[Row]:
    """Yield the seed's cases device by device, either those of integer formats or those of floats."""
    rng = Random(seed)
    configs, runners = (_FLOAT_CONFIGS, _FLOAT_RUNNERS) if floats else (_CONFIGS, _RUNNERS)
    found = []
    for _ in range(count):
        hidden, inter, experts, topk = rng.choice(_MODELS)
        if rng.random() < 0.2:
            inter = rng.choice((16, 32, 64, 96, 128, 160)) * rng.randint(4, 16)
        if rng.random() < 0.1:
            hidden = rng.choice((32, 64, 128)) * rng.randint(4, 40)
        config, user = rng.choice(configs)(rng)
        tp = rng.choice((1, 1, 1, 2, 4, 8))
        found.append({
            "capability": rng.choice(_CUDA), "hidden": hidden, "inter": inter, "experts": experts, "topk": topk,
            "act": rng.choice(("silu",) * 8 + ("gelu",)), "dtype": rng.choice(("bf16", "bf16", "fp16")), "tp": tp,
            "ep": rng.random() < 0.3, "runner": rng.choice(runners), "quantization": user, "config": config,
        })  # fmt: skip
    return sorted(found, key=lambda case: case["capability"])
