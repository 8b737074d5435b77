"""Random quantisation configs, by family, as checkpoints declare them: right ones and wrong ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

Row = dict[str, Any]

#: Declared method, the checkpoint's config, and the method that the user names.
Config = tuple[str, Row | None, str | None]


def _gptq(rng: Random) -> Config:
    config: Row = {
        "quant_method": "gptq",
        "bits": rng.choice((4,) * 8 + (8,) * 3 + (3, 2)),
        "group_size": rng.choice((128,) * 5 + (64, 32, 32, -1, 16, 256)),
        "desc_act": rng.random() < 0.08,
        "sym": rng.random() < 0.92,
    }
    if rng.random() < 0.08:
        config["checkpoint_format"] = rng.choice(("gptq", "gptq_v2"))
    if rng.random() < 0.15:
        pattern = rng.choice(
            (
                r".*\.mlp\.experts.*",
                r".*\.experts.*",
                r".*\.layers\.0\..*",
                r".*\.experts\.\d+\.down_proj",
                r".*self_attn.*",
            )
        )
        sign = rng.choice(("-:", "+:", "+:", ""))
        values = rng.choice(
            (
                {"bits": 8},
                {"group_size": 256},
                {"group_size": 32},
                {"group_size": -1},
                {"desc_act": True},
                {"sym": False},
                {"bits": 8, "group_size": 64},
                {"bits": 3},
            )
        )
        config["dynamic"] = {sign + pattern: {} if sign == "-:" else values}
    if rng.random() < 0.04:
        config["modules_in_block_to_quantize"] = [["self_attn.q_proj"]]
    if rng.random() < 0.03:
        config.pop(rng.choice(("sym", "desc_act", "group_size", "bits")))
    return (
        "gptq",
        config,
        rng.choice((None,) * 14 + ("gptq", "gptq_marlin", "auto_gptq", "awq", "inc", "compressed-tensors")),
    )


def _awq(rng: Random) -> Config:
    short = rng.random() < 0.15
    config: Row = {
        "quant_method": "awq",
        "w_bit" if short else "bits": rng.choice((4,) * 12 + (8,)),
        "q_group_size" if short else "group_size": rng.choice((128,) * 5 + (64, 32, -1, 16, 256)),
        "zero_point": rng.random() < 0.85,
        "version": "gemm",
    }
    if rng.random() < 0.1:
        entry = rng.choice(("mlp.experts", "self_attn", "mlp.gate", "experts.3.", "model.layers.0."))
        config["modules_to_not_convert"] = [entry]
    return "awq", config, rng.choice((None,) * 14 + ("awq", "awq_marlin", "auto_awq", "gptq"))


def _moe_wna16(rng: Random) -> Config:
    _, config, _ = rng.choice((_gptq, _gptq, _awq))(rng)
    return "moe_wna16", config, "moe_wna16"


def _args(bits: int, type_: str, strategy: str, group: int | None = None, **more: Any) -> Row:
    row: Row = {"num_bits": bits, "type": type_, "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    return {**row, "group_size": group} if group is not None else row


def _ct(rng: Random, weights: Row, inputs: Row | None, fmt: str) -> Row:
    group: Row = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config: Row = {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "ignore": [],
        "config_groups": {"group_0": group},
    }
    if rng.random() < 0.2:
        group["format"] = fmt
        if rng.random() < 0.2:
            config["format"] = "mixed-precision"
    elif rng.random() < 0.03:
        config["format"] = "mixed-precision"
    roll = rng.random()
    if roll < 0.04:
        config["ignore"] = [rng.choice(("re:.*mlp.experts.*", "re:.*self_attn.*", "lm_head", "re:.*experts.5.*"))]
    elif roll < 0.06:
        names = rng.sample(("gate", "up", "down"), rng.randint(1, 3))
        config["ignore"] = [f"model.layers.0.mlp.experts.0.{name}_proj" for name in names]
    elif roll < 0.08:
        group["targets"] = [rng.choice(("re:.*mlp.experts.*", "re:.*experts.*down_proj", "re:.*self_attn.*"))]
    return config


_TOKEN_FP8 = _args(8, "float", "token", dynamic=True)
_TOKEN_INT8 = _args(8, "int", "token", dynamic=True)


def _ct_wna16(rng: Random) -> Config:
    strategy = rng.choice(("group",) * 6 + ("channel", "channel", "tensor"))
    grouped = strategy == "group"
    group = rng.choice((128,) * 4 + (64, 32, 32, 16, 256)) if grouped else None
    order = rng.choice((None,) * 8 + ("static", "weight", "group")) if grouped else None
    bits = rng.choice((4,) * 7 + (8,) * 3 + (2, 3, 5, 6, 7))
    weights = _args(
        bits, "int", strategy, group, symmetric=rng.random() < 0.75, **({"actorder": order} if order else {})
    )
    fmt = rng.choice(("pack-quantized",) * 14 + ("int-quantized", "naive-quantized"))
    return "compressed-tensors", _ct(rng, weights, None, fmt), None


def _quark_config(weight: Row, inputs: Row | None) -> Row:
    return {
        "quant_method": "quark", "export": {"kv_cache_group": [], "pack_method": "reorder"}, "exclude": [],
        "layer_quant_config": {}, "layer_type_quant_config": {},
        "global_quant_config": {"weight": weight, "input_tensors": inputs, "output_tensors": None, "bias": None},
    }  # fmt: skip


def _int8(rng: Random) -> Config:
    roll = rng.random()
    if roll < 0.2:
        name = "experts_int8" if roll < 0.12 else "int8_per_channel_weight_only"
        return name, None, name
    scopes = ("per_channel", "per_tensor")
    if roll < 0.35:
        weight = {"dtype": "int8", "qscheme": rng.choice(scopes), "symmetric": True, "ch_axis": 0, "is_dynamic": False}
        symmetric, dynamic = rng.random() < 0.8, rng.random() < 0.7
        inputs = {
            "dtype": "int8",
            "qscheme": rng.choice(scopes),
            "symmetric": symmetric,
            "is_dynamic": dynamic,
            "ch_axis": 1,
        }
        return "quark", _quark_config(weight, inputs), None
    weights = _args(8, "int", rng.choice(("channel",) * 5 + ("tensor",)))
    inputs = copy.deepcopy(_TOKEN_INT8)
    if rng.random() < 0.2:
        inputs = _args(8, "int", "tensor", dynamic=rng.random() < 0.5)
    if rng.random() < 0.15:
        inputs["symmetric"] = False
    return "compressed-tensors", _ct(rng, weights, inputs, "int-quantized"), None


def _gpt_oss(rng: Random) -> Config:
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": skipped}
    return "gpt_oss_mxfp4", config, rng.choice((None,) * 10 + ("mxfp4", "gpt_oss_mxfp4"))


def _mxfp4(rng: Random) -> Config:
    return "mxfp4", {"quant_method": "mxfp4"}, None


def _ct_mxfp4(rng: Random) -> Config:
    weights = _args(4, "float", "group", 32, scale_dtype="torch.uint8")
    inputs = rng.choice(
        (None, _args(4, "float", "group", 32, dynamic=True), _TOKEN_FP8, _args(8, "float", "group", 32, dynamic=True))
    )
    return "compressed-tensors", _ct(rng, weights, inputs, "mxfp4-pack-quantized"), None


def _quark_int4(rng: Random) -> Config:
    symmetric = rng.random() < 0.7
    weight: Row = {
        "dtype": "int4" if symmetric else "uint4", "qscheme": rng.choice(("per_group",) * 5 + ("per_channel",)),
        "group_size": rng.choice((128, 128, 64, 32)), "symmetric": symmetric, "ch_axis": -1, "is_dynamic": False,
    }  # fmt: skip
    if weight["qscheme"] == "per_channel":
        weight["group_size"] = None
    config = _quark_config(weight, None)
    if rng.random() < 0.1:
        entries = (
            "*mlp.experts*",
            "re:.*mlp.experts.*",
            "lm_head",
            "*self_attn*",
            "model.layers.0.mlp.experts.0.gate_proj",
        )
        config["exclude"] = [rng.choice(entries)]
    return "quark", config, None


def _quark_mx(rng: Random) -> Config:
    fp4: Row = {
        "dtype": "fp4",
        "qscheme": "per_group",
        "group_size": 32,
        "ch_axis": -1,
        "is_dynamic": False,
        "scale_format": "e8m0",
        "symmetric": None,
        "round_method": "half_even",
        "scale_type": "float",
    }
    fp6 = ("fp6_e3m2", "fp6_e2m3")
    roll, inputs = rng.random(), None
    if roll < 0.45:
        inputs = {**fp4, "is_dynamic": True}
    elif roll < 0.65:
        dynamic = rng.random() < 0.3
        inputs = {
            "dtype": "fp8_e4m3",
            "qscheme": "per_tensor",
            "is_dynamic": dynamic,
            "symmetric": True,
            "ch_axis": None,
        }
    elif roll < 0.75:
        inputs = {**fp4, "dtype": rng.choice(fp6), "is_dynamic": True}
    weight = {**fp4, "dtype": rng.choice(fp6)} if rng.random() < 0.1 else dict(fp4)
    return "quark", _quark_config(weight, inputs), None


def _fp8(rng: Random) -> Config:
    roll = rng.random()
    if roll < 0.5:
        return "fp8", _fp8_native(rng), None
    if roll < 0.8:
        return "compressed-tensors", _fp8_ct(rng), None
    if roll < 0.9:
        algorithm = rng.choice(("FP8", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO"))
        config = {
            "quant_method": "modelopt",
            "quant_algo": algorithm,
            "kv_cache_quant_algo": None,
            "exclude_modules": ["lm_head"],
        }
        return "modelopt", config, None
    if roll < 0.95:
        scope = rng.choice(("per_tensor", "per_channel"))
        weight = {"dtype": "fp8_e4m3", "qscheme": scope, "is_dynamic": False, "symmetric": True, "ch_axis": 0}
        return "quark", _quark_config(weight, {**weight, "is_dynamic": rng.random() < 0.5, "ch_axis": 1}), None
    name = rng.choice(("fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "fp8"))
    return name, None, name


def _fp8_native(rng: Random) -> Row:
    config: Row = {"quant_method": "fp8", "activation_scheme": rng.choice(("dynamic", "dynamic", "static"))}
    if rng.random() < 0.65:
        config["activation_scheme"] = "dynamic"
        config["weight_block_size"] = rng.choice(([128, 128],) * 8 + ([64, 64], [1, 32], [32, 32]))
    if rng.random() < 0.08:
        entry = rng.choice(("model.layers.0.mlp.experts", "lm_head", "model.layers.0.self_attn.q_proj", "experts"))
        config["ignored_layers"] = [entry]
    if rng.random() < 0.1:
        config["scale_fmt"] = "ue8m0"
    return config


def _fp8_ct(rng: Random) -> Row:
    strategy = rng.choice(("channel", "tensor", "block"))
    weights, inputs = _args(8, "float", strategy), copy.deepcopy(_TOKEN_FP8)
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        inputs = _args(8, "float", "group", 128, dynamic=True)
    elif strategy == "tensor" and rng.random() < 0.7:
        inputs = _args(8, "float", "tensor", dynamic=rng.random() < 0.3)
    elif rng.random() < 0.05:
        return _ct(rng, weights, None, "float-quantized")
    return _ct(rng, weights, inputs, "float-quantized")


def _nvfp4(rng: Random) -> Config:
    if rng.random() >= 0.55:
        local = _args(4, "float", "tensor_group", 16, dynamic="local")
        weights = _args(4, "float", "tensor_group", 16)
        return "compressed-tensors", _ct(rng, weights, rng.choice((None, local, local)), "nvfp4-pack-quantized"), None
    algorithm = rng.choice(("NVFP4", "NVFP4", "NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"))
    method = rng.choice(("modelopt", "modelopt", "modelopt_fp4"))
    facts: Row = {
        "quant_algo": algorithm,
        "group_size": 16,
        "kv_cache_quant_algo": "FP8",
        "exclude_modules": ["lm_head"],
    }
    config: Row = (
        {"quant_method": method, "quantization": facts} if rng.random() < 0.3 else {"quant_method": method, **facts}
    )
    if rng.random() < 0.08:
        entry = rng.choice(("*mlp.experts*", "model.layers.0.mlp.experts*", "*self_attn*"))
        config.get("quantization", config)["exclude_modules"] = [entry]
    return "modelopt_fp4", config, rng.choice((None,) * 6 + ("modelopt_fp4",))


def _mxfp8(rng: Random) -> Config:
    roll = rng.random()
    if roll < 0.4:
        facts = {"quant_algo": "MXFP8", "group_size": 32, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
        return "modelopt_mxfp8", {"quant_method": "modelopt", **facts}, None
    if roll < 0.6:
        return "mxfp8", {"quant_method": "mxfp8", "exclude_modules": ["lm_head"]}, None
    if roll < 0.75:
        mx = {
            "dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "is_dynamic": False,
            "scale_format": "e8m0", "symmetric": None,
        }  # fmt: skip
        return "quark", _quark_config(mx, {**mx, "is_dynamic": True}), None
    weights = _args(8, "float", "group", 32, scale_dtype="torch.uint8")
    return (
        "compressed-tensors",
        _ct(rng, weights, _args(8, "float", "group", 32, dynamic=True), "mxfp8-quantized"),
        None,
    )


def _w4a8(rng: Random) -> Config:
    strategy = rng.choice(("group", "group", "group", "channel"))
    weights = _args(4, "int", strategy, rng.choice((128, 128, 128, 64, 32)) if strategy == "group" else None)
    if rng.random() < 0.6:
        return "compressed-tensors", _ct(rng, weights, copy.deepcopy(_TOKEN_FP8), "pack-quantized"), None
    fmt = rng.choice(("pack-quantized", "int-quantized"))
    return "compressed-tensors", _ct(rng, weights, copy.deepcopy(_TOKEN_INT8), fmt), None


def _inc(rng: Random) -> Config:
    config: Row = {
        "quant_method": rng.choice(("auto-round", "auto-round", "inc")),
        "bits": rng.choice((4,) * 6 + (8, 8, 2, 3, 5, 6)),
        "group_size": rng.choice((128, 128, 64, 32, -1)),
        "sym": rng.random() < 0.75,
        "data_type": "int",
        "packing_format": rng.choice(("auto_round:auto_gptq", "auto_round:auto_gptq", "auto_round:auto_awq")),
    }
    if rng.random() < 0.08:
        config.update(data_type="mx_fp", bits=4, group_size=32, packing_format="auto_round:llm_compressor")
    return "inc", config, None


def _unquantized(rng: Random) -> Config:
    return "", None, None


#: Names of `--quantization`, once more where they quantise bf16 weights while loading.
_ONLINE = (
    *("fp8", "fp8_per_tensor", "fp8_per_block", "fp8_per_channel", "mxfp8", "mxfp4", "nvfp4_per_token") * 3,
    *("experts_int8", "int8_per_channel_weight_only", "humming") * 2,
    *("online", "modelopt", "modelopt_fp4", "modelopt_mxfp8", "modelopt_mixed", "gpt_oss_mxfp4", "deepseek_v4_fp8"),
    *("gptq", "auto_gptq", "gptq_marlin", "awq", "auto_awq", "awq_marlin", "moe_wna16", "compressed-tensors"),
    *("quark", "inc", "torchao", "fbgemm_fp8", "fp_quant"),
)


def _online(rng: Random) -> Config:
    name = rng.choice(_ONLINE)
    return name, None, name


def _humming(rng: Random) -> Config:
    integers, floats = (_gptq, _awq, _ct_wna16, _ct_wna16), (_fp8, _fp8, _nvfp4, _mxfp8, _mxfp4, _ct_mxfp4)
    make = rng.choice((*integers, *integers, *floats, _w4a8, _int8, _inc, _quark_int4, _quark_mx, _gpt_oss))
    _, config, _ = make(rng)
    return "humming", config, "humming"


FAMILIES: dict[str, tuple[Callable[[Random], Config], int]] = {
    "gptq": (_gptq, 14),
    "awq": (_awq, 10),
    "moe_wna16": (_moe_wna16, 6),
    "ct-wna16": (_ct_wna16, 14),
    "int8": (_int8, 8),
    "gpt-oss": (_gpt_oss, 12),
    "mxfp4": (_mxfp4, 8),
    "ct-mxfp4": (_ct_mxfp4, 7),
    "quark-int4": (_quark_int4, 5),
    "quark-mx": (_quark_mx, 6),
    "fp8": (_fp8, 14),
    "nvfp4": (_nvfp4, 8),
    "mxfp8": (_mxfp8, 7),
    "w4a8": (_w4a8, 6),
    "inc": (_inc, 6),
    "unquantized": (_unquantized, 8),
}
#: Families of values of `--quantization`; their recorded answers are in files of their own.
OPTION_FAMILIES: dict[str, tuple[Callable[[Random], Config], int]] = {"online": (_online, 8), "humming": (_humming, 8)}
