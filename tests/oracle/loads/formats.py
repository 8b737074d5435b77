"""Random encodings of experts, as exporters write them: a config, and the stored parts of a matrix.

A part is a row of dtype, shape and values: `codes`, `scale`, `groups` (GPTQ's `g_idx`), `sorted` (that of act-order),
`zeros`, or a list of numbers. `[N, K]` is the logical matrix: N output features, K input features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

Row = dict[str, Any]
Part = tuple[str, tuple[int, ...], Any]
Parts = dict[str, Part]
MakeParts = Callable[[int, int], Parts]


@dataclass(frozen=True)
class Encoding:
    """One way in which a tool stores experts.

    Attributes:
        config: `quantization_config`, or None for float weights.
        parts: gets N and K of a matrix, and returns its stored parts.
        quantization: what a user may name with `--quantization`.
        skip: config key of the modules that are not quantised, and how it spells one; None if there is none.
        stacked: layout of the whole layer if experts are not stored one by one: `gpt-oss`, or None.
        unit: number that divides K.
        extra: what only this family has.
    """

    config: Row | None
    parts: MakeParts
    quantization: tuple[str | None, ...] = (None,)
    skip: tuple[str, str] | None = None
    stacked: str | None = None
    unit: int = 1
    extra: Row = field(default_factory=dict)


def words(k: int, bits: int) -> int:
    """Return the int32 words that hold `k` codes."""
    return -(-k * bits // 32)


def gptq(rng: Random) -> Encoding:
    """GPTQ as GPTQModel and AutoGPTQ write it."""
    bits, group = rng.choice((4, 4, 4, 8)), rng.choice((32, 32, 64, 128, -1))
    order, sym = rng.random() < 0.15, rng.random() < 0.85
    index = "sorted" if order else rng.choice(("groups", "groups", "groups", "zeros", None))
    scale = rng.choice(("F16", "F16", "BF16"))
    config: Row = {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": order, "sym": sym}
    if rng.random() < 0.3:
        config["checkpoint_format"] = rng.choice(("gptq", "gptq", "gptq_v2"))

    def parts(n: int, k: int) -> Parts:
        size = k if group < 0 else group
        groups = max(k // size, 1)
        found: Parts = {
            "qweight": ("I32", (words(k, bits), n), "codes"),
            "qzeros": ("I32", (groups, words(n, bits)), "codes"),
            "scales": (scale, (groups, n), "scale"),
        }
        if index:
            found["g_idx"] = ("I32", (k,), [index, size])
        return found

    asked = (None, None, None, "gptq", "gptq_marlin", "moe_wna16", "marlin")
    return Encoding(config, parts, asked, ("dynamic", "-:{}"), unit=max(group, 1))


def awq(rng: Random) -> Encoding:
    """AWQ as AutoAWQ writes it."""
    group, zero = rng.choice((32, 64, 128, 128)), rng.random() < 0.85
    config: Row = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": zero, "version": "gemm"}

    def parts(n: int, k: int) -> Parts:
        found: Parts = {
            "qweight": ("I32", (k, n // 8), "codes"),
            "scales": ("F16", (k // group, n), "scale"),
        }
        if zero or rng.random() < 2:
            found["qzeros"] = ("I32", (k // group, n // 8), "codes")
        return found

    asked = (None, None, None, "awq", "awq_marlin", "moe_wna16")
    return Encoding(config, parts, asked, ("modules_to_not_convert", "{}"), unit=group)


# ------------------------------------------------------------------------------------------------ compressed-tensors


def args(bits: int, kind: str, strategy: str, group: int | None = None, **more: Any) -> Row:
    """Return compressed-tensors' arguments of a tensor."""
    row: Row = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": strategy, "dynamic": False, **more}
    return {**row, "group_size": group} if group else row


def compressed(rng: Random, weights: Row, inputs: Row | None, form: str) -> Row:
    """Return a config of one group, as llm-compressor writes it."""
    group: Row = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    if rng.random() < 0.5:
        group["format"] = form
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "quantization_status": "compressed", "config_groups": {"group_0": group},
    }  # fmt: skip


_SKIPPED = ("ignore", "{}")
_TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}


def ct_int(rng: Random) -> Encoding:
    """Packed integers: W4A16, W8A16 and W4A8."""
    bits, sym = rng.choice((4, 4, 4, 8)), rng.random() < 0.75
    group = rng.choice((32, 64, 128, 128, None))
    order = rng.choice((None,) * 8 + ("group", "weight")) if group else None
    scale = rng.choice(("BF16", "BF16", "F16", "F32"))
    weights = args(bits, "int", "group" if group else "channel", group, symmetric=sym)
    if order:
        weights["actorder"] = order
    roll = rng.random()
    inputs = {**_TOKEN, "type": "float"} if roll < 0.1 else {**_TOKEN, "type": "int"} if roll < 0.15 else None

    def parts(n: int, k: int) -> Parts:
        groups = k // group if group else 1
        found: Parts = {
            "weight_packed": ("I32", (n, words(k, bits)), "codes"),
            "weight_scale": (scale, (n, groups), "scale"),
            "weight_shape": ("I64", (2,), [n, k]),
        }
        if not sym:
            found["weight_zero_point"] = ("I32", (words(n, bits), groups), "codes")
        if order == "group":
            found["weight_g_idx"] = ("I32", (k,), ["sorted", group])
        return found

    config = compressed(rng, weights, inputs, "pack-quantized")
    if inputs is None and group == 128 and sym and bits == 4 and order is None and rng.random() < 0.2:
        config["config_groups"] = {"W4A16": ["Linear"]}
    return Encoding(config, parts, skip=_SKIPPED, unit=group or 1)


def ct_int8(rng: Random) -> Encoding:
    """W8A8 with int8 activations."""
    scale = rng.choice(("BF16", "F32"))
    strategy = rng.choice(("channel", "channel", "channel", "tensor"))
    inputs = {**_TOKEN, "type": "int"}
    if rng.random() < 0.1:
        inputs = args(8, "int", "tensor")

    def parts(n: int, k: int) -> Parts:
        found: Parts = {"weight": ("I8", (n, k), "codes")}
        found["weight_scale"] = (scale, (n, 1) if strategy == "channel" else (1,), "scale")
        return {**found, "input_scale": ("F32", (1,), [0.5])} if not inputs["dynamic"] else found

    return Encoding(compressed(rng, args(8, "int", strategy), inputs, "int-quantized"), parts, skip=_SKIPPED)


def ct_fp8(rng: Random) -> Encoding:
    """FP8 with scales of tensors, channels or blocks."""
    strategy = rng.choice(("tensor", "channel", "block"))
    scale = rng.choice(("BF16", "F32"))
    weights, inputs = args(8, "float", strategy), {**_TOKEN, "type": "float"}
    static = strategy == "tensor" and rng.random() < 0.6
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        inputs = args(8, "float", "group", 128, dynamic=True)
    elif strategy == "tensor":
        inputs = args(8, "float", "tensor", dynamic=not static)

    def parts(n: int, k: int) -> Parts:
        shape = {"tensor": (1,), "channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}[strategy]
        found: Parts = {"weight": ("F8_E4M3", (n, k), "codes"), "weight_scale": (scale, shape, "scale")}
        return {**found, "input_scale": (scale, (1,), [0.5])} if static else found

    config = compressed(rng, weights, inputs, "float-quantized")
    presets = {"tensor": "FP8" if static else "", "channel": "FP8_DYNAMIC", "block": "FP8_BLOCK"}
    if presets[strategy] and rng.random() < 0.1:
        config["config_groups"] = {presets[strategy]: ["Linear"]}
    return Encoding(config, parts, skip=_SKIPPED)


def ct_nvfp4(rng: Random) -> Encoding:
    """NVFP4, weights alone or activations too."""
    inputs = rng.choice((None, args(4, "float", "tensor_group", 16, dynamic="local")))

    def parts(n: int, k: int) -> Parts:
        found: Parts = {
            "weight_packed": ("U8", (n, k // 2), "codes"),
            "weight_scale": ("F8_E4M3", (n, k // 16), "scale"),
            "weight_global_scale": ("F32", (1,), [0.5]),
        }
        return {**found, "input_global_scale": ("F32", (1,), [0.5])} if inputs else found

    config = compressed(rng, args(4, "float", "tensor_group", 16), inputs, "nvfp4-pack-quantized")
    if rng.random() < 0.1:
        config["config_groups"] = {"NVFP4" if inputs else "NVFP4A16": ["Linear"]}
    return Encoding(config, parts, skip=_SKIPPED)


def ct_mx(rng: Random) -> Encoding:
    """MXFP4 and MXFP8."""
    wide = rng.random() < 0.3
    weights = args(8 if wide else 4, "float", "group", 32, scale_dtype="torch.uint8")
    inputs = {**weights, "dynamic": True} if wide else rng.choice((None, None, {**_TOKEN, "type": "float"}))

    def parts(n: int, k: int) -> Parts:
        packed: Parts = {"weight": ("F8_E4M3", (n, k), "codes")}
        if not wide:
            packed = {"weight_packed": ("U8", (n, k // 2), "codes")}
        return {**packed, "weight_scale": ("U8", (n, k // 32), "scale")}

    form = "mxfp8-quantized" if wide else "mxfp4-pack-quantized"
    return Encoding(compressed(rng, weights, inputs, form), parts, skip=_SKIPPED)


# ------------------------------------------------------------------------------------------------ other tools' floats


def fp8(rng: Random) -> Encoding:
    """FP8 of DeepSeek's kind: blocks, or one scale a tensor."""
    block, static = rng.random() < 0.65, rng.random() < 0.5
    config: Row = {"quant_method": "fp8", "activation_scheme": "static" if static and not block else "dynamic"}
    scale = rng.choice(("F32", "F32", "BF16"))
    if block:
        config |= {"weight_block_size": [128, 128], "fmt": "e4m3"}
    if rng.random() < 0.2:
        config["scale_fmt"] = "ue8m0"

    def parts(n: int, k: int) -> Parts:
        found: Parts = {"weight": ("F8_E4M3", (n, k), "codes")}
        if block:
            return {**found, "weight_scale_inv": (scale, (-(-n // 128), -(-k // 128)), "scale")}
        found["weight_scale"] = ("F32", rng.choice(((), (1,))), "scale")
        return {**found, "input_scale": ("F32", (), [0.5])} if static else found

    return Encoding(config, parts, skip=("ignored_layers", "{}"))


def modelopt(rng: Random) -> Encoding:
    """ModelOpt's FP8, NVFP4 and MXFP8, for all modules alike or by a table."""
    algorithm = rng.choice(("NVFP4", "NVFP4", "FP8", "W4A16_NVFP4", "MXFP8", "FP8_PB_WO"))
    facts: Row = {"quant_algo": algorithm, "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    if "NVFP4" in algorithm:
        facts["group_size"] = 16
    config: Row = {"quant_method": "modelopt", **facts}
    if rng.random() < 0.3:
        config = {"quant_method": "modelopt", "quantization": facts, "producer": {"name": "modelopt"}}

    def parts(n: int, k: int) -> Parts:
        return _modelopt_parts(algorithm, n, k)

    return Encoding(config, parts, skip=("exclude_modules", "{}"), extra={"algorithm": algorithm})


def _modelopt_parts(algorithm: str, n: int, k: int) -> Parts:
    if "NVFP4" in algorithm:
        found: Parts = {
            "weight": ("U8", (n, k // 2), "codes"),
            "weight_scale": ("F8_E4M3", (n, k // 16), "scale"),
            "weight_scale_2": ("F32", (), [0.5]),
        }
        return {**found, "input_scale": ("F32", (), [0.5])} if algorithm == "NVFP4" else found
    weight: Parts = {"weight": ("F8_E4M3", (n, k), "codes")}
    if algorithm == "MXFP8":
        return {**weight, "weight_scale": ("U8", (n, k // 32), "scale")}
    if algorithm == "FP8_PB_WO":
        return {**weight, "weight_scale": ("F32", (-(-n // 128), 1, -(-k // 128), 1), "scale")}
    return {**weight, "weight_scale": ("F32", (), "scale"), "input_scale": ("F32", (), [0.5])}


def modelopt_mixed(rng: Random) -> Encoding:
    """ModelOpt's table of modules, where experts have one algorithm and the rest another."""
    algorithm = rng.choice(("NVFP4", "NVFP4", "FP8", "W4A16_NVFP4", "MXFP8"))
    entry: Row = {"quant_algo": algorithm, **({"group_size": 16} if "NVFP4" in algorithm else {})}
    config: Row = {
        "quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "exclude_modules": ["lm_head"],
        "kv_cache_quant_algo": None, "quantized_layers": {},
    }  # fmt: skip

    def parts(n: int, k: int) -> Parts:
        return _modelopt_parts(algorithm, n, k)

    extra = {"table": entry, "each": rng.random() < 0.6}
    return Encoding(config, parts, skip=("exclude_modules", "{}"), extra=extra)


def mx(rng: Random) -> Encoding:
    """MXFP4 under its own name, on models other than gpt-oss."""

    def parts(n: int, k: int) -> Parts:
        return {"weight": ("U8", (n, k // 2), "codes"), "weight_scale": ("U8", (n, k // 32), "scale")}

    return Encoding({"quant_method": "mxfp4"}, parts, skip=("modules_to_not_convert", "{}"))


def gpt_oss(rng: Random) -> Encoding:
    """MXFP4 as gpt-oss stores it."""
    skipped = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]

    def parts(n: int, k: int) -> Parts:
        return {
            "_blocks": ("U8", (n, k // 32, 16), "codes"),
            "_scales": ("U8", (n, k // 32), "scale"),
            "_bias": ("BF16", (n,), "scale"),
        }

    return Encoding({"quant_method": "mxfp4", "modules_to_not_convert": skipped}, parts, stacked="gpt-oss")


def quark(rng: Random) -> Encoding:
    """AMD Quark: FP8, int8, int4, MXFP4 and MXFP8."""
    kind = rng.choice(("fp8", "fp8", "channel", "int4", "mxfp4", "mxfp4", "int8"))
    base: Row = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True, "ch_axis": None}
    dynamic = rng.random() < 0.4
    weight, inputs = dict(base), {**base, "is_dynamic": dynamic}
    if kind == "channel":
        weight, inputs = {**base, "qscheme": "per_channel", "ch_axis": 0}, {**base, "qscheme": "per_channel"}
        inputs |= {"ch_axis": 1, "is_dynamic": True}
    elif kind == "int8":
        weight = {**base, "dtype": "int8", "qscheme": "per_channel", "ch_axis": 0}
        inputs = {**weight, "ch_axis": 1, "is_dynamic": True}
    elif kind == "int4":
        weight = {**base, "dtype": "int4", "qscheme": "per_group", "group_size": 128, "ch_axis": -1}
    elif kind == "mxfp4":
        weight = {**base, "dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}
        weight |= {"symmetric": None, "ch_axis": -1}
        inputs = {**weight, "is_dynamic": True}
    config: Row = {
        "quant_method": "quark", "export": {"kv_cache_group": [], "pack_method": "reorder"}, "exclude": ["lm_head"],
        "layer_quant_config": {}, "layer_type_quant_config": {},
        "global_quant_config": {
            "weight": weight, "input_tensors": None if kind == "int4" else inputs, "output_tensors": None, "bias": None,
        },
    }  # fmt: skip

    def parts(n: int, k: int) -> Parts:
        if kind == "mxfp4":
            return {"weight": ("U8", (n, k // 2), "codes"), "weight_scale": ("U8", (n, k // 32), "scale")}
        if kind == "int4":
            return {"weight": ("I32", (k, n // 8), "codes"), "weight_scale": ("BF16", (k // 128, n), "scale")}
        if kind == "int8":
            return {"weight": ("I8", (n, k), "codes"), "weight_scale": ("F32", (n,), "scale")}
        shape = (n,) if kind == "channel" else ()
        found: Parts = {"weight": ("F8_E4M3", (n, k), "codes"), "weight_scale": ("F32", shape, "scale")}
        return {**found, "input_scale": ("F32", (), [0.5])} if kind == "fp8" and not dynamic else found

    return Encoding(config, parts, skip=("exclude", "{}"), unit=128 if kind == "int4" else 1)


def auto_round(rng: Random) -> Encoding:
    """AutoRound, packed as GPTQ or AWQ, or MXFP4 of llm-compressor."""
    other = awq(rng) if rng.random() < 0.3 else gptq(rng)
    assert other.config is not None
    packing = other.config["quant_method"]
    config: Row = {
        "quant_method": "auto-round", "bits": other.config["bits"], "group_size": other.config["group_size"],
        "sym": other.config.get("sym", not other.config.get("zero_point")), "data_type": "int",
        "packing_format": f"auto_round:auto_{packing}", "block_name_to_quantize": "model.layers",
    }  # fmt: skip
    if rng.random() < 0.12:
        config |= {"bits": 4, "group_size": 32, "sym": True, "data_type": "mx_fp"}
        config["packing_format"] = "auto_round:llm_compressor"

        def parts(n: int, k: int) -> Parts:
            return {"weight_packed": ("U8", (n, k // 2), "codes"), "weight_scale": ("U8", (n, k // 32), "scale")}

        return Encoding(config, parts, skip=("extra_config", "{}"))
    return Encoding(config, other.parts, skip=("extra_config", "{}"), unit=other.unit)


def deepseek_v4(rng: Random) -> Encoding:
    """DeepSeek-V4's experts, FP4 or FP8 with power-of-two scales, beside FP8 blocks elsewhere."""
    fp4 = rng.random() < 0.7
    scale = "F8_E8M0" if fp4 or rng.random() < 0.7 else "F32"
    config: Row = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    }  # fmt: skip

    def parts(n: int, k: int) -> Parts:
        if fp4:
            return {"weight": ("I8", (n, k // 2), "codes"), "scale": (scale, (n, k // 32), "scale")}
        return {
            "weight": ("F8_E4M3", (n, k), "codes"),
            "scale": (scale, (-(-n // 128), -(-k // 128)), "scale"),
        }

    kept: Row = {"expert_dtype": "fp4" if fp4 else "fp8"}
    if rng.random() < 0.15:  # not said, or said wrongly
        kept = rng.choice(({}, {"expert_dtype": "fp8" if fp4 else "fp4"}))
    return Encoding(config, parts, extra={"declared": kept})


def plain(rng: Random) -> Encoding:
    """Weights that are not quantised."""
    dtype = rng.choice(("BF16", "BF16", "F16", "F32"))
    return Encoding(None, lambda n, k: {"weight": (dtype, (n, k), "scale")}, (None,) * 8 + ("fp8", "experts_int8"))


#: Family to its encodings, and how often it is drawn.
FAMILIES: dict[str, tuple[Callable[[Random], Encoding], int]] = {
    "gptq": (gptq, 14),
    "awq": (awq, 8),
    "ct-int": (ct_int, 12),
    "ct-int8": (ct_int8, 5),
    "ct-fp8": (ct_fp8, 9),
    "ct-nvfp4": (ct_nvfp4, 7),
    "ct-mx": (ct_mx, 6),
    "fp8": (fp8, 12),
    "modelopt": (modelopt, 10),
    "modelopt-mixed": (modelopt_mixed, 6),
    "mxfp4": (mx, 3),
    "gpt-oss": (gpt_oss, 7),
    "quark": (quark, 8),
    "auto-round": (auto_round, 7),
    "plain": (plain, 6),
    "deepseek-v4": (deepseek_v4, 7),
}
