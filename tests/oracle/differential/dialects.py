"""Random configs in the dialects that exporters write: tables per module, lists, several groups, models of their own.

`configs.py` draws one kind of weights for the whole model; here modules differ, so that look-ups by name decide.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from random import Random
from typing import Any

from oracle.differential import configs
from oracle.differential.configs import Config, Row

#: Module paths of experts: plain models, other containers, and language models inside multimodal ones.
PREFIXES = (
    *("model.layers.0.mlp.experts",) * 5,
    "model.layers.3.block_sparse_moe.experts",
    "model.layers.12.feed_forward.experts",
    "language_model.model.layers.0.mlp.experts",
    "language_model.model.layers.2.mlp.experts",
    "model.language_model.layers.0.mlp.experts",
    "backbone.layers.1.mixer.experts",
)


def _names(rng: Random, prefix: str) -> str:
    """One spelling under which an exporter may name a layer's experts, or another module."""
    parent, layer = prefix.rpartition(".")[0], prefix.partition(".layers.")[0]
    swapped = prefix.replace("language_model.model.", "model.language_model.")
    return rng.choice(
        (
            *(
                prefix,
                f"{prefix}.0.gate_proj",
                f"{prefix}.0.down_proj",
                f"{prefix}.5.up_proj",
                f"{prefix}.gate_up_proj",
            ),
            *(parent, f"{parent}.gate", f"{parent}.gate_proj", f"{parent}.shared_expert.up_proj"),
            *(swapped, f"{swapped}.0.gate_proj", f"{layer}.layers.0.self_attn.q_proj", "lm_head", f"{layer}.layers"),
            *("model.layers.1.mlp.experts", prefix.rpartition(".experts")[0] + ".experts.1"),
        )
    )


# ------------------------------------------------------------------------------------------------ ModelOpt


_ALGORITHMS = (
    *("FP8", "NVFP4", "W4A16_NVFP4", "MXFP8", "FP8_PB_WO", "FP8_BLOCK_SCALES") * 3,
    *("FP8_PER_CHANNEL_PER_TOKEN", "nvfp4", "W4A8_AWQ", "INT4_AWQ", "W4A8_NVFP4_FP8", ""),
)


def _modelopt_row(rng: Random) -> Row:
    row: Row = {"quant_algo": rng.choice(_ALGORITHMS)}
    if rng.random() < 0.6:
        fp8 = row["quant_algo"].startswith("FP8_")
        row["group_size"] = rng.choice((128, 128, 128, 64)) if fp8 else 16
    return row


def _modelopt_mixed(rng: Random, prefix: str) -> Config:
    table = {_names(rng, prefix): _modelopt_row(rng) for _ in range(rng.randint(1, 3))}
    if rng.random() < 0.4:
        table[f"{prefix}.0.gate_proj"] = _modelopt_row(rng)
    if rng.random() < 0.03:
        table = {}
    facts: Row = {
        "quant_algo": rng.choice(("MIXED_PRECISION",) * 5 + ("mixed_precision",)), "kv_cache_quant_algo": "FP8",
        "quantized_layers": table,
    }  # fmt: skip
    excluded = [rng.choice(("lm_head", "*self_attn*", "*mlp.gate", "*mlp.experts*", prefix, f"{prefix}*"))]
    nested = rng.random() < 0.4
    facts[rng.choice(("exclude_modules", "exclude_modules" if nested else "ignore"))] = excluded
    if nested and rng.random() < 0.5:
        facts["group_size"] = 16
    method = rng.choice(("modelopt",) * 4 + ("modelopt_mixed", "modelopt_fp4"))
    config: Row = {"quant_method": method, "quantization": facts} if nested else {"quant_method": method, **facts}
    if rng.random() < 0.5:
        config["producer"] = {"name": "modelopt", "version": "0.39.0"}
    return "modelopt_mixed", config, rng.choice((None,) * 8 + ("modelopt_mixed", "modelopt_fp4", "modelopt"))


def _modelopt(rng: Random, prefix: str) -> Config:
    """One algorithm, with lists of excluded modules and groups as exports in 2026 write them."""
    algorithm = rng.choice(_ALGORITHMS)
    facts: Row = {"quant_algo": algorithm, "kv_cache_quant_algo": rng.choice((None, "FP8"))}
    if rng.random() < 0.7:
        facts["group_size"] = 16 if "NVFP4" in algorithm else 128
    names = [_names(rng, prefix) + rng.choice(("", "*")) for _ in range(rng.randint(1, 3))]
    facts[rng.choice(("exclude_modules", "ignore"))] = [*names, "lm_head"]
    if rng.random() < 0.3:
        inputs = rng.choice((None, {"dynamic": False, "num_bits": 4, "type": "float"}))
        group = {"input_activations": inputs, "weights": {"num_bits": 4, "type": "float"}, "targets": ["Linear"]}
        facts["config_groups"] = {"group_0": group}
    method = rng.choice(("modelopt", "modelopt", "modelopt_fp4", "modelopt_mxfp8"))
    nested = rng.random() < 0.3
    config: Row = {"quant_method": method, "quantization": facts} if nested else {"quant_method": method, **facts}
    if rng.random() < 0.5:
        config["producer"] = {"name": "modelopt", "version": "0.41.0"}
    return "modelopt", config, rng.choice((None,) * 8 + ("modelopt", "modelopt_fp4"))


# ------------------------------------------------------------------------------------------------ compressed-tensors


_CT_MAKERS = (
    *(configs._ct_wna16, configs._fp8, configs._nvfp4, configs._ct_mxfp4, configs._mxfp8, configs._w4a8, configs._int8),
)


def _ct_group(rng: Random) -> Row:
    """A group, with the format that belongs to it."""
    while True:
        _, config, _ = rng.choice(_CT_MAKERS)(rng)
        if config and config["quant_method"] == "compressed-tensors":
            group: Row = copy.deepcopy(config["config_groups"]["group_0"])
            group["format"] = group.get("format", config["format"])
            return group


_PRESETS = ("W4A16", "W8A16", "W8A8", "FP8", "FP8_DYNAMIC", "NVFP4", "NVFP4A16", "MXFP4", "W4A16_ASYM")


def _ct_target(rng: Random, prefix: str) -> list[str]:
    tail = prefix.rpartition(".")[0].rpartition(".")[2]
    return rng.choice(
        (
            *(["Linear"], ["re:.*experts.*"], [f"re:.*{tail}.*"], ["re:.*self_attn.*"], ["re:.*mlp.*", "lm_head"]),
            *(["re:.*experts.*gate_proj$", "re:.*experts.*up_proj$"], ["re:.*down_proj$"], [f"re:{prefix}.*"]),
            *([f"{prefix}.0.{name}_proj" for name in ("gate", "up", "down")], ["RoutedExperts"], ["FusedMoE"]),
            *(["re:.*self_attn.*", "re:.*experts.*"], ["Attention"], [f"re:^{prefix}\\.\\d+\\.(gate|up|down)_proj$"]),
        )
    )


def _ct_groups(rng: Random, prefix: str) -> Config:
    groups: Row = {}
    for number in range(rng.choice((1, 2, 2, 2, 3))):
        group = _ct_group(rng)
        group["targets"] = _ct_target(rng, prefix)
        if rng.random() < 0.2:
            del group["format"]
        if rng.random() < 0.1:
            group["output_activations"] = None
        groups[f"group_{number}"] = group
    if rng.random() < 0.08:
        groups = {rng.choice(_PRESETS): ["Linear"]}
    formats = [group["format"] for group in groups.values() if isinstance(group, dict) and "format" in group]
    config: Row = {
        "quant_method": "compressed-tensors", "quantization_status": "compressed", "config_groups": groups,
        "format": rng.choice((*formats, "mixed-precision", "mixed-precision")),
        "ignore": [],
    }  # fmt: skip
    if rng.random() < 0.4:
        names = [_names(rng, prefix) for _ in range(rng.randint(1, 3))]
        patterns = ("re:.*mlp.gate$", "re:.*experts.*", "re:.*self_attn.*", "re:.*experts.0.*", "Linear", "lm_head")
        config["ignore"] = [*names, rng.choice(patterns)]
    if rng.random() < 0.03:
        config["sparsity_config"] = rng.choice(({}, {"format": "dense", "sparsity_structure": "0:0"}))
    if rng.random() < 0.05:
        config["kv_cache_scheme"] = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    return "compressed-tensors", config, None


# ------------------------------------------------------------------------------------------------ DeepSeek-V4


def _deepseek_v4(rng: Random, prefix: str) -> Config:
    config = configs._fp8_native(rng)
    config.pop("ignored_layers", None)
    if rng.random() < 0.8:
        config.update(activation_scheme="dynamic", weight_block_size=[128, 128], scale_fmt="ue8m0", fmt="e4m3")
    if rng.random() < 0.2:
        config["moe_quant_algo"] = rng.choice(("NVFP4", "NVFP4", "nvfp4", "MXFP4", None))
    if rng.random() < 0.2:
        config[rng.choice(("ignored_layers", "modules_to_not_convert"))] = [_names(rng, prefix)]
    return "fp8", config, rng.choice((None,) * 6 + ("fp8", "deepseek_v4_fp8"))


# ------------------------------------------------------------------------------------------------ Quark


def _quark_kind(rng: Random) -> Row:
    """Weights and inputs of one Quark scheme, NVFP4's two levels of scales included."""
    roll = rng.random()
    if roll < 0.15:
        fp8: Row = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "symmetric": True}
        levels = [{"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "is_dynamic": False}, fp8]
        inputs: Any = rng.choice((levels, levels, None, [{**levels[0], "is_dynamic": True}, fp8]))
        return {"weight": levels, "input_tensors": inputs, "output_tensors": None, "bias": None}
    if roll < 0.3:
        weight: Row = {
            "dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": rng.choice(([128, 128], [128, 128], [64, 64])),
            "is_dynamic": False, "symmetric": True,
        }  # fmt: skip
        grouped = {"dtype": "fp8_e4m3", "qscheme": "per_group", "group_size": 128, "is_dynamic": True}
        return {
            "weight": weight, "input_tensors": {**grouped, "symmetric": rng.choice((True, None))},
            "output_tensors": None, "bias": None,
        }  # fmt: skip
    while True:
        _, config, _ = rng.choice(
            (configs._quark_int4, configs._quark_mx, configs._fp8, configs._mxfp8, configs._int8)
        )(rng)
        if config and config["quant_method"] == "quark":
            kind: Row = copy.deepcopy(config["global_quant_config"])
            if rng.random() < 0.3:
                kind["weight"] = [kind["weight"]]
                kind["input_tensors"] = kind["input_tensors"] and [kind["input_tensors"]]
            return kind


def _quark_lists(rng: Random, prefix: str) -> Config:
    pack = rng.choice(("reorder", "reorder", "reorder", "order"))
    config: Row = {
        "quant_method": "quark", "export": {"kv_cache_group": [], "pack_method": pack}, "exclude": [],
        "layer_quant_config": {}, "layer_type_quant_config": {}, "global_quant_config": _quark_kind(rng),
    }  # fmt: skip
    if rng.random() < 0.5:
        names = [_names(rng, prefix) for _ in range(rng.randint(1, 4))]
        patterns = ("re:.*experts.*", "re:.*mlp.gate$", "*experts*", "re:model.*", "lm_head", f"{prefix}*")
        config["exclude"] = [*names, rng.choice(patterns)]
    for _ in range(rng.choice((0, 0, 1, 1, 2))):
        pattern = rng.choice(("*experts*", "*self_attn*", "*mlp*", f"*{prefix[6:]}*", f"{prefix}.0.*", f"{prefix}*"))
        config["layer_quant_config"][rng.choice((pattern, _names(rng, prefix)))] = _quark_kind(rng)
    if rng.random() < 0.1:
        name = rng.choice(("Linear", "<class 'torch.nn.modules.linear.Linear'>", "RoutedExperts", "FusedMoE"))
        config["layer_type_quant_config"] = {name: _quark_kind(rng)}
    return "quark", config, None


# ------------------------------------------------------------------------------------------------ AutoRound


def _inc_blocks(rng: Random, prefix: str) -> Config:
    _, config, _ = configs._inc(rng)
    assert config is not None
    if rng.random() < 0.12:
        config.update(bits=8, group_size=[128, 128], data_type=rng.choice(("fp", "fp8")), sym=True)
        config["packing_format"] = "auto_round:fp8"
        if rng.random() < 0.3:
            config["act_bits"] = rng.choice((8, 16))
    elif rng.random() < 0.1:
        kind = rng.choice(("mx_fp", "mx_fp4", "mx_fp4e2m1", "nv_fp", "nv_fp4"))
        config.update(data_type=kind, bits=rng.choice((4, 8)), group_size=32, sym=True)
        config["packing_format"] = "auto_round:llm_compressor"
    rows = (
        *({"bits": 16}, {"bits": 16, "data_type": "float"}, {"bits": 8}, {"bits": 8, "group_size": 128, "sym": True}),
        *({"bits": 4}, {"sym": False}, {"group_size": 32}, {"bits": 16, "group_size": -1, "sym": True}, {}),
    )
    patterns = (
        r".*experts.*",
        r".*\.experts\.\d+\.down_proj",
        r".*self_attn.*",
        r"model\.layers\.0\..*",
        "mlp.experts",
    )
    if rng.random() < 0.7:
        names = [rng.choice((_names(rng, prefix), rng.choice(patterns))) for _ in range(rng.randint(1, 3))]
        config["extra_config"] = {name: rng.choice(rows) for name in names}
    if rng.random() < 0.5:
        stack = prefix.partition("layers.")[0] + "layers"
        known = (stack, "model.layers", "model.language_model.layers", f"{stack}.0", f"{stack},visual.blocks", prefix)
        value: Any = rng.choice(known)
        config[rng.choice(("block_name_to_quantize", "to_quant_block_names"))] = rng.choice((value, value.split(",")))
    if rng.random() < 0.1:
        config["backend"] = rng.choice(("auto", "gptq", "gptq:marlin", "awq", "awq:marlin", "marlin", "exllamav2"))
    if rng.random() < 0.1:
        del config["packing_format"]
    return "inc", config, rng.choice((None,) * 8 + ("inc", "auto-round"))


# ------------------------------------------------------------------------------------------------ lists of modules


def _lists(rng: Random, prefix: str) -> Config:
    """GPTQ's rules, AWQ's and FP8's lists, with names of modules as exporters spell them."""
    entry, config, user = rng.choice((configs._gptq, configs._awq, configs._moe_wna16, configs._fp8))(rng)
    if not config:
        return entry, config, user
    names = [_names(rng, prefix) for _ in range(rng.randint(1, 4))]
    method = config["quant_method"]
    if method == "gptq":
        spelled = (
            ".*experts.*",
            f"{prefix}",
            r"model\.layers\.0\.mlp",
            ".*mlp.gate$",
            ".*language_model.*",
            ".*down_proj",
        )
        signs = ("-:", "-:", "+:", "")
        kinds: tuple[Row, ...] = ({}, {"bits": 8}, {"bits": 8, "group_size": 32}, {"desc_act": True}, {"sym": False})
        rules = {rng.choice(signs) + rng.choice(spelled): dict(rng.choice(kinds)) for _ in range(rng.randint(1, 3))}
        config["dynamic"] = {name: {} if name.startswith("-:") else row for name, row in rules.items()}
        if rng.random() < 0.2:
            config["modules_in_block_to_quantize"] = rng.choice(([names], names))
    elif method in ("awq", "fp8"):
        short = ("gate", "mlp.gate", "experts", "visual", "lm_head", "self_attn", "layers.0.", "shared_expert")
        listed = [*names, rng.choice(short)]
        config["modules_to_not_convert" if method == "awq" or rng.random() < 0.5 else "ignored_layers"] = listed
    return entry, config, user


Dialect = Callable[[Random, str], Config]

#: Families of dialects and how often each is drawn.
DIALECTS: dict[str, tuple[Dialect, int]] = {
    "modelopt-mixed": (_modelopt_mixed, 14),
    "modelopt-lists": (_modelopt, 10),
    "ct-groups": (_ct_groups, 16),
    "deepseek-v4": (_deepseek_v4, 8),
    "quark-lists": (_quark_lists, 14),
    "inc-blocks": (_inc_blocks, 14),
    "lists": (_lists, 14),
}
