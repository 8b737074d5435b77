"""Random deployments and quantisation configs: everything follows from the seed.

A world is a device with optional packages and variables; a case is one layer, deployment and checkpoint config on it.
Both are plain dicts, since the engine's side reads them in another Python.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

Row = dict[str, Any]

_CUDA = ((7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
_GFX = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201", "gfx1250")
DEVICES: tuple[Row, ...] = (
    *({"kind": "cuda", "cap": list(capability)} for capability in _CUDA),
    *({"kind": "rocm", "gcn": gcn} for gcn in _GFX),
    {"kind": "xpu"},
    {"kind": "cpu", "arch": "x86", "amx": True},
    {"kind": "cpu", "arch": "x86", "amx": False},
    {"kind": "cpu", "arch": "x86", "amx": False, "zen": True},
    {"kind": "cpu", "arch": "arm", "amx": False},
    {"kind": "cpu", "arch": "power", "amx": False},
)

# hidden, intermediate, experts, top-k, activation, routing, model type: layers of published models
MODELS = (
    (2048, 768, 128, 8, "silu", "RenormalizeNaive", "qwen3_moe"),
    (4096, 1536, 128, 8, "silu", "RenormalizeNaive", "qwen3_moe"),
    (2048, 512, 512, 10, "silu", "RenormalizeNaive", "qwen3_next"),
    (4096, 14336, 8, 2, "silu", "RenormalizeNaive", "mixtral"),
    (2048, 1408, 64, 6, "silu", "Default", "deepseek_v2"),
    (7168, 2048, 256, 8, "silu", "DeepSeekV3", "deepseek_v3"),
    (7168, 2048, 384, 8, "silu", "DeepSeekV3", "kimi_k2"),
    (4096, 1408, 128, 8, "silu", "DeepSeekV3", "glm4_moe"),
    (3072, 1536, 256, 8, "silu", "MiniMax2", "minimax_m2"),
    (4096, 6400, 16, 2, "silu", "Custom", "phimoe"),
    (5120, 8192, 16, 1, "silu", "Llama4", "llama4"),
    (2688, 1856, 128, 6, "relu2_no_mul", "DeepSeekV3", "nemotron_h"),
    (4096, 2048, 256, 6, "silu", "DeepseekV4", "other"),
    (2048, 1024, 64, 8, "silu", "Default", "olmoe"),
    (1536, 512, 40, 8, "silu", "Renormalize", "granitemoe"),
    (2560, 1280, 64, 6, "silu", "Default", "ernie4_5_moe"),
    (2880, 2880, 32, 4, "swigluoai", "Renormalize", "other"),
    (7168, 3072, 384, 8, "situ", "DeepSeekV3", "kimi_k3"),
    (2048, 768, 128, 8, "gelu_tanh", "Renormalize", "gemma4"),
)
ACTIVATIONS = [
    "silu",
    "gelu",
    "gelu_tanh",
    "relu2",
    "swigluoai",
    "swigluoai_uninterleave",
    "situ",
    "swiglustep",
    "silu_no_mul",
    "gelu_no_mul",
    "gelu_tanh_no_mul",
    "relu2_no_mul",
]
ROUTINGS = [
    "Default",
    "Renormalize",
    "RenormalizeNaive",
    "DeepSeekV3",
    "Llama4",
    "TopK",
    "SigmoidRenorm",
    "MiniMax2",
    "Sigmoid",
    "Unspecified",
    "DeepseekV4",
    "Custom",
    "Simulated",
]
OVERRIDES = [
    "triton",
    "batched_triton",
    "deep_gemm",
    "deep_gemm_mega_moe",
    "cutlass",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "flashinfer_cutedsl",
    "flashinfer_moe_ep_cutedsl",
    "flashinfer_b12x",
    "b12x",
    "flashinfer_moe_ep_mega_deep_gemm",
    "marlin",
    "humming",
    "triton_unfused",
    "aiter",
    "aiter_mega_moe",
    "aiter_triton_mxfp4_bf16",
    "aiter_triton_mxfp4_mxfp4",
    "flydsl",
    "hpc",
    "emulation",
    "rdna3",
]
COMMON_OVERRIDES = (
    "triton",
    "marlin",
    "humming",
    "flashinfer_trtllm",
    "flashinfer_cutlass",
    "emulation",
    "aiter",
    "cutlass",
)
ALL2ALL = [
    "allgather_reducescatter",
    "deepep_high_throughput",
    "deepep_low_latency",
    "deepep_v2",
    "mori_high_throughput",
    "mori_low_latency",
    "moonep",
    "nixl_ep",
    "flashinfer_nvlink_two_sided",
    "flashinfer_nvlink_one_sided",
]

_VARIABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "cuda": {
        "VLLM_BATCH_INVARIANT": ("1", "0"),
        "VLLM_USE_FLASHINFER_MOE_INT4": ("1",),
        "VLLM_HUMMING_MOE_GEMM_TYPE": ("indexed", "grouped", "grouped_contiguous", "grouped_masked", "auto"),
        "VLLM_MARLIN_INPUT_DTYPE": ("int8", "fp8"),
        "VLLM_USE_DEEP_GEMM": ("0", "1"),
        "VLLM_MOE_USE_DEEP_GEMM": ("0", "1"),
        "VLLM_B12X_MOE_FP4_FORCE_A16": ("1",),
    },
    "rocm": {
        "VLLM_BATCH_INVARIANT": ("1",),
        "VLLM_ROCM_USE_AITER": ("1", "1", "1", "0"),
        "VLLM_ROCM_USE_AITER_MOE": ("0", "1"),
    },
    "xpu": {"VLLM_BATCH_INVARIANT": ("1",), "VLLM_USE_DEEP_GEMM": ("0",)},
    "cpu": {"VLLM_CPU_INT4_W4A8": ("0", "1"), "VLLM_BATCH_INVARIANT": ("1",)},
}
_PACKAGES = {
    "cuda": ("flashinfer", "triton_kernels", "deep_gemm", "humming", "quark", "hpc", "b12x"),
    "rocm": ("aiter", "aiter", "triton_kernels", "quark", "flydsl"),
    "xpu": ("triton_kernels", "quark"),
    "cpu": (),
}
_SHIPPED = ("flashinfer", "triton_kernels", "deep_gemm", "humming")


def worlds(rng: Random, device: Row, extra: int) -> Iterator[Row]:
    """The default world of a device, and some with other packages and variables."""
    yield {**device, "flags": {}, "env": {}, "plain": True}
    kind = device["kind"]
    for _ in range(extra):
        flags: dict[str, bool] = {}
        for name in _PACKAGES[kind]:
            if rng.random() < 0.35:
                chance = name == "triton_kernels" and kind != "cuda"
                flags[name] = rng.random() < 0.5 if chance else not (name in _SHIPPED and kind == "cuda")
        env = {name: rng.choice(values) for name, values in _VARIABLES[kind].items() if rng.random() < 0.25}
        if kind == "rocm" and flags.get("aiter") and rng.random() < 0.8:
            env["VLLM_ROCM_USE_AITER"] = "1"
        yield {**device, "flags": flags, "env": env, "plain": False}


def _layer(rng: Random) -> Row:
    hidden, inter, experts, topk, act, routing, model = rng.choice(MODELS)
    roll = rng.random()
    if roll < 0.2:
        step = rng.choice((8, 16, 32, 64, 96, 128, 160, 256))
        inter = step * rng.randint(1, max(1, 3072 // step))
    if 0.15 < roll < 0.3:
        step = rng.choice((16, 32, 64, 128, 256, 512))
        hidden = step * rng.randint(max(1, 512 // step), 6144 // step)
    if rng.random() < 0.06:
        experts = rng.choice((992, 993, 1000, 1024, 2048, 2056, 4096, 4, 60, 7))
    if rng.random() < 0.12:
        act = rng.choice(ACTIVATIONS)
    if rng.random() < 0.12:
        routing = rng.choice(ROUTINGS)
    return {
        "hidden": hidden,
        "inter": inter,
        "experts": experts,
        "topk": 1 if rng.random() < 0.05 else topk,
        "act": act,
        "routing": routing,
        "model_type": model,
        "router_fp32": rng.random() < 0.12,
        "hash_routing": rng.random() < 0.02,
        "bias": rng.random() < (0.5 if act.startswith("swigluoai") else 0.05),
        "swiglu_limit": rng.choice((7.0, 10.0)) if rng.random() < 0.06 else None,
    }


def _deployment(rng: Random, world: Row) -> Row:
    old = world["kind"] == "cuda" and world["cap"][0] < 8
    usual, other = ("fp16", "bf16") if old else ("bf16", "fp16")
    roll = rng.random()
    override = rng.choice(COMMON_OVERRIDES) if roll < 0.18 else rng.choice(OVERRIDES) if roll < 0.28 else "auto"
    return {
        "tp": rng.choice((1, 1, 1, 2, 4, 8)), "dp": rng.choice((1, 1, 1, 1, 2, 4, 8)), "ep": rng.random() < 0.4,
        "a2a": rng.choice(ALL2ALL) if rng.random() < 0.5 else "allgather_reducescatter", "eplb": rng.random() < 0.08,
        "lora": rng.random() < 0.1, "dtype": usual if rng.random() < 0.9 else other, "override": override,
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------ configs

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


def case(rng: Random, number: int, world: Row) -> Row:
    """One case on a world."""
    family = rng.choices(list(FAMILIES), [weight for _, weight in FAMILIES.values()])[0]
    row: Row = {
        "id": number,
        "family": family,
        "prefix": "model.layers.0.mlp.experts",
        **_layer(rng),
        **_deployment(rng, world),
    }
    row["entry"], row["qcfg"], row["user_quant"] = FAMILIES[family][0](rng)
    if family == "gpt-oss":
        row["model_type"] = "gpt_oss"
        if rng.random() < 0.85:
            row.update(hidden=2880, inter=2880, experts=rng.choice((32, 128)), topk=4, act="swigluoai", bias=True)
            row.update(routing="Renormalize", swiglu_limit=None)
    return row


def jobs(seed: int | str, per_world: int, extra_worlds: int) -> Iterator[tuple[Row, list[Row]]]:
    """`(world, cases)` of every device's default world and its extra ones."""
    number = 0
    for index, device in enumerate(DEVICES):
        rng = Random(f"{seed}/{index}")
        for world in worlds(rng, device, extra_worlds):
            cases = [case(rng, number + offset, world) for offset in range(per_world)]
            number += per_world
            yield world, cases
