"""Contradictions: one way each in which a checkpoint disagrees with its config, or with itself."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from oracle.loads.draft import Draft, add_exclusions, as_regex, drop_exclusions
from oracle.loads.formats import FAMILIES, Encoding, Part, Row
from oracle.loads.models import DEEPSEEK_V4, EXPERTS, LAYERS, MODELS


def _some_part(draft: Draft, needed: str = "") -> str | None:
    parts = sorted({place[3] for place in draft.experts if needed in place[3]})
    return draft.rng.choice(parts) if parts else None


def _drop(draft: Draft) -> None:
    part, inside = _some_part(draft), draft.scope()
    draft.experts = {at: row for at, row in draft.experts.items() if at[3] != part or not inside(at[:3])}


_DTYPES = {
    "F32": ("BF16", "F16", "F8_E8M0"), "BF16": ("F32", "F16"), "F16": ("BF16", "F32"), "U8": ("I8", "F8_E8M0", "I32"),
    "F8_E4M3": ("U8", "I8", "BF16"), "I8": ("U8", "F8_E4M3"), "I32": ("U8", "I64"), "I64": ("I32",),
}  # fmt: skip


def _change(draft: Draft, change: Callable[[str, str, tuple[int, ...], Any], Part]) -> None:
    part, inside = _some_part(draft), draft.scope()
    for at, (dtype, shape, values) in draft.experts.items():
        if at[3] == part and inside(at[:3]):
            draft.experts[at] = change(at[2], dtype, shape, values)


def _retype(draft: Draft) -> None:
    pick = draft.rng.random()

    def change(_: str, dtype: str, shape: tuple[int, ...], values: Any) -> Part:
        others = _DTYPES.get(dtype, (dtype,))
        return others[int(pick * len(others))], shape, "codes" if dtype in ("I32", "U8") else values

    _change(draft, change)


def _reshape(draft: Draft) -> None:
    how = draft.rng.choice(("transposed", "flat", "unit", "half", "double", "cut"))

    def change(_: str, dtype: str, shape: tuple[int, ...], values: Any) -> Part:
        values = values if values in ("codes", "scale") else "scale" if dtype != "I32" else "codes"
        last = shape[-1] if shape else 1
        made = {
            "transposed": shape[::-1],
            "flat": (last,),
            "unit": (*shape, 1),
            "half": (*shape[:-1], max(last // 2, 1)),
            "double": (*shape[:-1], last * 2),
            "cut": (max(shape[0] - 8, 1), *shape[1:]) if shape else (1,),
        }
        return dtype, made[how], values

    _change(draft, change)


_OTHER_NAMES = {
    "weight_scale": ("weight_scale_inv", "scale", "scales"), "weight_scale_inv": ("weight_scale", "scale"),
    "weight_packed": ("weight", "qweight"), "weight": ("weight_packed", "qweight"), "scales": ("weight_scale",),
    "weight_scale_2": ("weight_global_scale",), "weight_global_scale": ("weight_scale_2",),
    "input_scale": ("input_global_scale", "act_scale"), "input_global_scale": ("input_scale",),
}  # fmt: skip


def _rename(draft: Draft) -> None:
    part, inside = _some_part(draft), draft.scope()
    other = draft.rng.choice(_OTHER_NAMES.get(part or "", ("weight_scale",)))
    for at in [at for at in draft.experts if at[3] == part and inside(at[:3])]:
        draft.experts[(*at[:3], other)] = draft.experts.pop(at)


def _another(draft: Draft) -> Encoding:
    """An encoding of another family, or a second draw of the same one."""
    roll = draft.rng.random()
    name = draft.rng.choice([name for name in FAMILIES if name != "gpt-oss"])
    return FAMILIES["plain" if roll < 0.4 else name][0](draft.rng)


def _mixed(draft: Draft) -> None:
    """Some matrices are encoded otherwise."""
    other, inside = _another(draft), draft.scope()
    for at in draft.every():
        if inside(at):
            draft.encode(other, *at)


def _wrong_config(draft: Draft) -> None:
    """Replace the config by another tool's, or by the same tool's with other numbers."""
    name, own = draft.rng.choice([name for name in FAMILIES if name != "gpt-oss"]), draft.config
    other = FAMILIES[name][0](draft.rng)
    draft.config = other.config
    if other.config is not None and other.skip is not None:
        add_exclusions(other.config, other, draft.plain_modules(), draft.rng)
    if own is not None and draft.rng.random() < 0.5:
        draft.config = own
        numbers: dict[str, tuple[Any, ...]] = {
            "bits": (4, 8),
            "group_size": (32, 64, 128, -1),
            "activation_scheme": ("static", "dynamic"),
        }
        numbers |= {"quant_algo": ("FP8", "NVFP4", "MXFP8", "W4A16_NVFP4"), "sym": (True, False)}
        numbers |= {"zero_point": (True, False), "weight_block_size": ([64, 64], [128, 128])}
        known = [key for key in numbers if key in draft.config]
        if known:
            key = draft.rng.choice(known)
            draft.config[key] = draft.rng.choice(numbers[key])


def _side_file(draft: Draft) -> None:
    """Only a side file says how experts are quantised."""
    if draft.config is None:
        return
    name = "quantize_config" if draft.rng.random() < 0.6 else "hf_quant_config"
    body = {key: value for key, value in draft.config.items() if key != "quant_method"}
    draft.side[name] = dict(draft.config) if name == "quantize_config" else {"quantization": body}
    draft.config = None


def _bias(draft: Draft) -> None:
    inside = draft.scope()
    for at in draft.every():
        if inside(at):
            draft.experts[(*at, "bias")] = ("BF16", (draft.sizes(at[2], at[1])[0],), "scale")


def _count(draft: Draft) -> None:
    if draft.rng.random() < 0.5:
        draft.count += draft.rng.choice((1, -1, 4))
        return
    gone = draft.rng.randrange(draft.total)
    layer = draft.rng.choice((None, 0, 1))
    draft.experts = {at: row for at, row in draft.experts.items() if at[1] != gone or layer not in (None, at[0])}


def _excluded(draft: Draft) -> None:
    """The config excludes some experts; they are stored as float numbers, or quantised all the same."""
    if draft.config is None or draft.encoding.skip is None:
        return
    inside, plain = draft.scope(), draft.rng.random() < 0.6
    modules = [draft.module(*at) for at in draft.every() if inside(at)]
    entries = modules
    if draft.rng.random() < 0.5:  # the fused module, as people write it
        layers = sorted({at[0] for at in draft.every() if inside(at)})
        entries = [f"{draft.model.above}layers.{layer}.{draft.model.experts}" for layer in layers]
    if draft.rng.random() < 0.3:
        stem = f"{draft.model.above}layers"
        entries = [entry.replace(f"{stem}.0", "*").replace(f"{stem}.1", "*") for entry in entries]
    add_exclusions(draft.config, draft.encoding, entries, draft.rng)
    if plain:
        for at in draft.every():
            if inside(at):
                draft.encode(FAMILIES["plain"][0](Random(1)), *at)


def _dynamic(draft: Draft) -> None:
    """A rule of GPTQModel, or a second group of compressed-tensors, for one layer or some experts."""
    config = draft.config
    if config is None:
        return
    layer, fits = draft.rng.randrange(LAYERS), draft.rng.random() < 0.6
    whole = rf"model\.layers\.{layer}\.{as_regex(draft.model.experts)}"
    pattern = whole + draft.rng.choice((".*", r"\.\d+\..*", rf"\.\d+\.{draft.model.leaves[2]}"))
    if config.get("quant_method") == "gptq":
        other = FAMILIES["gptq"][0](draft.rng)
        assert other.config is not None
        changed = {key: other.config[key] for key in ("bits", "group_size", "sym", "desc_act")}
        config["dynamic"] = {f"+:{pattern}": changed}
    elif config.get("quant_method") == "compressed-tensors" and "group_0" in config["config_groups"]:
        other = FAMILIES[draft.rng.choice(("ct-int", "ct-int8", "ct-fp8", "ct-nvfp4", "ct-mx"))][0](draft.rng)
        assert other.config is not None
        second = other.config["config_groups"].get("group_0")
        if second is None:
            return
        second = {**second, "targets": [f"re:{pattern}"], "format": other.config["format"]}
        first = {**config["config_groups"]["group_0"], "format": config["format"]}
        groups = [second, first] if draft.rng.random() < 0.7 else [first, second]
        config["config_groups"] = {f"group_{number}": group for number, group in enumerate(groups)}
        config["format"] = "mixed-precision"
    else:
        return
    for at in draft.every():
        if fits and at[0] == layer and (at[2] == "down" or not pattern.endswith(draft.model.leaves[2])):
            draft.encode(other, *at)


def _names(draft: Draft) -> None:
    """Names of another family, another wrapper, or another form of a layer."""
    roll = draft.rng.random()
    if roll < 0.3:
        draft.stem = draft.rng.choice(("model.language_model", "language_model.model", "", "model.model"))
    elif roll < 0.6:
        draft.form = draft.rng.choice(("listed", "stacked", "stacked"))
    else:
        other = MODELS[draft.rng.choice(sorted(MODELS))]
        draft.form = f"{other.experts}|{','.join(other.leaves)}"


def _sizes(draft: Draft) -> None:
    """config.json names other sizes than the tensors have."""
    rng, inter, roll = draft.rng, draft.inter, draft.rng.random()
    if roll < 0.3 and draft.model.linears:
        draft.declared[rng.choice(("num_attention_heads", "num_key_value_heads"))] = rng.choice((2, 4, 16))
    elif roll < 0.8:
        # Where a config has both keys, transformers' class of DeepSeek-V4 takes the other one.
        key = draft.model.inter_key
        key = rng.choice((key, "intermediate_size")) if draft.model is DEEPSEEK_V4 else key
        draft.declared[key] = rng.choice((inter * 2, inter // 2, inter + 64, inter + 128, inter - 32))
    else:
        draft.declared["hidden_size"] = rng.choice((draft.hidden * 2, draft.hidden - 64))


def _shared(draft: Draft) -> None:
    """config.json names another size of shared experts than the tensors have."""
    key = draft.model.shared_key
    draft.declared[key] = draft.rng.choice((1, 2, 3)) if key == "n_shared_experts" else draft.rng.choice((64, 128, 256))


def _rules(draft: Draft) -> None:
    """Rules of GPTQModel of every kind: signs, overlaps, shards, single experts, whole layers, fused names."""
    rng, config = draft.rng, draft.config
    assert config is not None
    chosen = rng.choice(sorted(at for at in draft.linears if at[0] >= 0) or [(0, draft.model.router)])
    path, experts, layer = as_regex(draft.linear(*chosen)), as_regex(draft.model.experts), chosen[0]
    patterns = (
        path, path.replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj"), r".*self_attn.*", r".*mlp.*",
        rf".*\.{layer}\..*", rf".*{experts}.*", rf".*{experts}\.1\..*", rf".*{experts}\.\d+\.{draft.model.leaves[2]}",
        r".*shared_expert.*", r".*(gate|router).*", rf"model\.layers\.{layer}\..*",
    )  # fmt: skip
    own = {key: config[key] for key in ("bits", "group_size", "sym")}
    bodies: tuple[Row, ...] = ({}, own, {**own, "bits": 8}, {"bits": 4}, {"group_size": 64}, {"sym": False})
    rules = {}
    for _ in range(rng.randint(1, 3)):
        sign = rng.choice(("+:", "+:", "-:", ""))
        rules[sign + rng.choice(patterns)] = {} if sign == "-:" else dict(rng.choice(bodies))
    config["dynamic"] = rules


def _router(draft: Draft) -> None:
    """Routers are encoded as experts are, or the config means them to be, or both."""
    how = draft.rng.choice(("meant", "encoded", "both") if draft.total % 8 == 0 else ("meant",))
    draft.router = how != "meant"
    if how != "encoded" and draft.config is not None and draft.encoding.skip is not None:
        drop_exclusions(draft.config, draft.encoding, draft.routers())


def _modules(draft: Draft) -> None:
    """Linear modules that are no experts' are listed otherwise than they are stored, or spelled otherwise."""
    rng, config = draft.rng, draft.config
    chosen = rng.choice(sorted(draft.linears))
    kind = chosen[1].rpartition(".")[0] or chosen[1]
    tests: tuple[Callable[[tuple[int, str]], bool], ...] = (
        lambda at: at == chosen,
        lambda at: at[1] == chosen[1],
        lambda at: at[1].startswith(kind),
        lambda at: at[0] == chosen[0] and at[1].startswith(kind),
    )
    inside = rng.choice(tests)
    touched = [at for at in draft.linears if inside(at) and draft.linear_size(*at)[1] % draft.encoding.unit == 0]
    how = rng.choice(("stored", "listed", "dropped", "both", "spelled", "spelled"))
    if how in ("stored", "both"):
        for at in touched:
            draft.linears[at] = None if draft.linears[at] else draft.encoding
    if config is None or draft.encoding.skip is None or how == "stored":
        return
    plain = [draft.linear(*at) for at in touched if draft.linears[at] is None]
    if how == "dropped":
        drop_exclusions(config, draft.encoding, plain)
    elif how == "spelled":  # as people shorten them: a part of the path, the leaf, wildcards, the engine's fused name
        drop_exclusions(config, draft.encoding, plain)
        short = (kind, f"{kind}.*", f"*{kind}*", chosen[1].rpartition(".")[2], f"*.{chosen[1]}", draft.linear(*chosen))
        fused = draft.linear(*chosen).replace("q_proj", "qkv_proj").replace("gate_proj", "gate_up_proj")
        add_exclusions(config, draft.encoding, [rng.choice((*short, fused, f"re:.*{kind}.*"))], rng)
    else:
        add_exclusions(config, draft.encoding, [draft.linear(*at) for at in touched], rng)


_FAULTS = (0.0, float("inf"), float("nan"), -0.5, None)


def _scales(draft: Draft) -> None:
    """Static activation scales that are missing, or no positive finite numbers."""
    inside, value = draft.scope(), draft.rng.choice(_FAULTS)
    for at in [at for at in draft.experts if at[3].startswith("input_") and inside(at[:3])]:
        dtype, shape, _ = draft.experts.pop(at)
        if value is not None:
            draft.experts[at] = (dtype, shape, [value])


def _overlay(draft: Draft) -> None:
    """A second listed file has other copies of some experts, which the index places in the first file."""
    inside, other = draft.scope(), draft.rng.random() < 0.3
    draft.stale = {place: row for place, row in draft.experts.items() if inside(place[:3])}
    if other:
        weights = [place for place in draft.stale if place[3] == "weight"]
        draft.stale = {place: ("BF16", draft.sizes(place[2], place[1]), "scale") for place in weights}


def _order(draft: Draft) -> None:
    """`g_idx` of every kind that has been seen, beside an honest or a wrong `desc_act`."""
    kind, inside = draft.rng.choice(("zeros", "constant", "reversed", "sorted", "groups")), draft.scope()
    for at, (dtype, shape, values) in draft.experts.items():
        if at[3] in ("g_idx", "weight_g_idx") and inside(at[:3]):
            draft.experts[at] = (dtype, shape, [kind, values[1]])
    if draft.config is not None and "desc_act" in draft.config and draft.rng.random() < 0.3:
        draft.config["desc_act"] = not draft.config["desc_act"]


def _further_layer(draft: Draft) -> None:
    """Experts of a multi-token-prediction layer after the last one, encoded alike or plain."""
    draft.declared["num_nextn_predict_layers"] = draft.rng.choice((1, 1, 0))
    encoding = draft.encoding if draft.rng.random() < 0.5 else FAMILIES["plain"][0](draft.rng)
    for _, expert, projection in [at for at in draft.every() if at[0] == 0]:
        draft.encode(encoding, LAYERS, expert, projection)


def _table(draft: Draft) -> None:
    """One layer's entry of a table by modules says something else."""
    config, rng = draft.config, draft.rng
    layer, fits = rng.randrange(LAYERS), rng.random() < 0.6
    name = f"{draft.model.above}layers.{layer}."
    if config is None:
        return
    method = config.get("quant_method")
    if "quantized_layers" in config:
        other = FAMILIES["modelopt-mixed"][0](rng)
        for entry in config["quantized_layers"]:
            if name in entry:
                config["quantized_layers"][entry] = dict(other.extra["table"])
    elif method == "quark":
        other = FAMILIES["quark"][0](rng)
        assert other.config is not None
        patterns = (f"*layers.{layer}.*", f"{name}{draft.model.experts}", f"{name}{draft.model.experts}.*", "*experts*")
        config["layer_quant_config"] = {rng.choice(patterns): other.config["global_quant_config"]}
    elif method == "auto-round":
        other = FAMILIES["auto-round"][0](rng)
        assert other.config is not None
        rule = {key: other.config[key] for key in ("bits", "group_size", "sym", "data_type")}
        modules = [draft.module(*at) for at in draft.every() if at[0] == layer]
        whole = [f"{name}{draft.model.experts}"]
        entries = rng.choice((modules, whole, [rf".*layers\.{layer}\..*experts.*"]))
        config["extra_config"] = {**config.get("extra_config", {}), **dict.fromkeys(entries, rule)}
    else:
        return
    for at in draft.every():
        if fits and at[0] == layer:
            draft.encode(other, *at)


def _blocks(draft: Draft) -> None:
    """AutoRound's list of blocks, which may leave a layer out."""
    if draft.config is None or "block_name_to_quantize" not in draft.config:
        return
    lists: tuple[Any, ...] = (
        "model.layers.0", ["model.layers"], ["model.layers.1"], "model.layers.0,model.layers.1", None,
        "model.language_model.layers", ["model.visual.blocks", "model.language_model.layers"],
    )  # fmt: skip
    draft.config["block_name_to_quantize"] = chosen = draft.rng.choice(lists)
    for layer in range(LAYERS):
        if draft.rng.random() < 0.5 and f"layers.{layer}" not in str(chosen):
            for at in [at for at in draft.every() if at[0] == layer]:
                draft.encode(FAMILIES["plain"][0](Random(1)), *at)


TWISTS: dict[str, tuple[Callable[[Draft], None], int]] = {
    "drop": (_drop, 5), "retype": (_retype, 5), "reshape": (_reshape, 5), "rename": (_rename, 4), "mixed": (_mixed, 6),
    "wrong-config": (_wrong_config, 5), "side-file": (_side_file, 3), "bias": (_bias, 4), "count": (_count, 3),
    "excluded": (_excluded, 8), "dynamic": (_dynamic, 12), "names": (_names, 6), "sizes": (_sizes, 8),
    "router": (_router, 5), "scales": (_scales, 25), "overlay": (_overlay, 3), "order": (_order, 20),
    "shared": (_shared, 6), "rules": (_rules, 30),
    "further-layer": (_further_layer, 6), "modules": (_modules, 45), "table": (_table, 30), "blocks": (_blocks, 15),
}  # fmt: skip


def applies(name: str, draft: Draft) -> bool:
    """Tell whether a twist changes a checkpoint of this kind."""
    method = (draft.config or {}).get("quant_method")
    needed: dict[str, bool] = {
        "scales": any(at[3].startswith("input_") for at in draft.experts),
        **dict.fromkeys(("side-file", "names"), draft.model is not DEEPSEEK_V4),
        "order": any(at[3].endswith("g_idx") for at in draft.experts),
        "blocks": method == "auto-round",
        "modules": draft.config is not None and bool(draft.model.linears),
        "table": method in ("quark", "auto-round") or "quantized_layers" in (draft.config or {}),
        "dynamic": method in ("gptq", "compressed-tensors"),
        "rules": method == "gptq",
        "shared": any("shared" in path for path in draft.model.linears),
        "further-layer": draft.model.count_key == "n_routed_experts" and draft.model is not DEEPSEEK_V4,
        **dict.fromkeys(("sizes", "count"), draft.model.sets == 1),
    }
    return needed.get(name, True)


def twist_gpt_oss(draft: Draft) -> str:
    """What can be wrong with stacked tensors of gpt-oss."""
    rng = draft.rng
    how = rng.choice(("drop", "retype", "reshape", "wrong-config", "mixed"))
    at = rng.choice(sorted(draft.stacked))
    dtype, shape, values = draft.stacked[at]
    if how == "drop":
        del draft.stacked[at]
    elif how == "retype":
        draft.stacked[at] = (rng.choice(_DTYPES[dtype]), shape, values)
    elif how == "reshape":
        draft.stacked[at] = (dtype, (*shape[:-1], shape[-1] * 2), values)
    elif how == "wrong-config":
        _wrong_config(draft)
    else:  # a layer of plain weights
        layer = rng.randrange(LAYERS)
        for key in [key for key in draft.stacked if key[0] == layer and key[2] != "_bias"]:
            del draft.stacked[key]
        draft.stacked[layer, "gate_up_proj", ""] = ("BF16", (EXPERTS, draft.hidden, 2 * draft.inter), "scale")
        draft.stacked[layer, "down_proj", ""] = ("BF16", (EXPERTS, draft.inter, draft.hidden), "scale")
    return how
