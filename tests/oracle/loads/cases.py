"""Random small checkpoints: everything follows from the seed and a case's number.

A case is a plain dict: `config` (config.json), `side` (other JSON files), `tensors` (name to dtype, shape, values) and
`deployment`. About half of them contradict themselves in one way, which `twist` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from oracle.loads.formats import FAMILIES, Encoding, Part, Row

EXPERTS, LAYERS = 4, 2
#: A tensor's place: layer, expert, projection (`gate`, `up`, `down`), part.
Place = tuple[int, int, str, str]


@dataclass(frozen=True)
class Model:
    """A model class, as far as names and sizes go.

    Attributes:
        config: its config.json, beside sizes.
        experts: path of the experts below a layer.
        leaves: names of gate, up and down.
        router: path of the router below a layer.
        count_key: config key that counts experts.
        inter_key: config key of the intermediate size.
        stem: what stands above `layers`.
    """

    config: Row
    experts: str = "mlp.experts"
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate"
    count_key: str = "num_experts"
    inter_key: str = "moe_intermediate_size"
    stem: str = "model"


_COMMON: Row = {
    "num_hidden_layers": LAYERS, "vocab_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32,
    "num_experts_per_tok": 2, "hidden_act": "silu", "torch_dtype": "bfloat16", "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_DEEPSEEK: Row = {
    "q_lora_rank": None, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 1.0, "moe_layer_freq": 1,
}  # fmt: skip
_GLM: Row = {
    "first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "attention_bias": False, "use_qk_norm": False,
}  # fmt: skip
_QWEN: Row = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}

MODELS: dict[str, Model] = {
    "qwen3_moe": Model({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_QWEN}),
    "mixtral": Model(
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        "block_sparse_moe.experts",
        ("w1", "w3", "w2"),
        "block_sparse_moe.gate",
        "num_local_experts",
        "intermediate_size",
    ),
    "olmoe": Model(
        {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "norm_topk_prob": False},
        inter_key="intermediate_size",
    ),
    "deepseek_v3": Model(
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_DEEPSEEK},
        count_key="n_routed_experts",
    ),
    "glm4_moe": Model(
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **_GLM}, count_key="n_routed_experts"
    ),
}
GPT_OSS = Model(
    {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
    },
    leaves=("gate_up_proj", "gate_up_proj", "down_proj"),
    router="mlp.router",
    count_key="num_local_experts",
    inter_key="intermediate_size",
)  # fmt: skip


@dataclass
class Draft:
    """A checkpoint while it is made: twists change it.

    Attributes:
        rng: what decides.
        model: its class.
        encoding: how the config says that experts are encoded.
        config: quantisation config, or None.
        hidden: hidden size.
        inter: intermediate size.
        experts: parts of single experts.
        stacked: parts of all experts, of gpt-oss: layer, leaf and part.
        names: expert's module names, once twisted: `(path of the experts, names of gate, up, down, form)`.
        stem: what stands above `layers`.
        count: experts that config.json names.
        side: files beside config.json.
    """

    rng: Random
    model: Model
    encoding: Encoding
    config: Row | None
    hidden: int
    inter: int
    experts: dict[Place, Part] = field(default_factory=dict)
    stacked: dict[tuple[int, str, str], Part] = field(default_factory=dict)
    form: str = "single"
    stem: str = ""
    count: int = EXPERTS
    side: dict[str, Row] = field(default_factory=dict)

    def sizes(self, projection: str) -> tuple[int, int]:
        """N and K of a projection."""
        return (self.hidden, self.inter) if projection == "down" else (self.inter, self.hidden)

    def encode(self, encoding: Encoding, layer: int, expert: int, projection: str) -> None:
        """Store a matrix in that encoding, in place of what is there."""
        for place in [place for place in self.experts if place[:3] == (layer, expert, projection)]:
            del self.experts[place]
        for part, row in encoding.parts(*self.sizes(projection)).items():
            self.experts[layer, expert, projection, part] = row

    def every(self) -> list[tuple[int, int, str]]:
        """Every matrix there is."""
        return list(dict.fromkeys(place[:3] for place in self.experts))

    def scope(self) -> Callable[[tuple[int, int, str]], bool]:
        """A random part of all matrices."""
        layer, expert = self.rng.randrange(LAYERS), self.rng.randrange(EXPERTS)
        projection = self.rng.choice(("gate", "up", "down"))
        tests: tuple[Callable[[tuple[int, int, str]], bool], ...] = (
            lambda at: True,
            lambda at: at[0] == layer,
            lambda at: at[1] == expert,
            lambda at: at[:2] == (layer, expert),
            lambda at: at[2] == projection,
            lambda at: at == (layer, expert, projection),
        )
        return self.rng.choice(tests)

    def routers(self) -> list[str]:
        """Module names of the routers, which no exporter quantises."""
        return [f"model.layers.{layer}.{self.model.router}" for layer in range(LAYERS)]

    def module(self, layer: int, expert: int | str, projection: str) -> str:
        """Module name of a matrix, as config entries spell it."""
        leaf = self.model.leaves[("gate", "up", "down").index(projection)]
        return f"model.layers.{layer}.{self.model.experts}.{expert}.{leaf}"


# ------------------------------------------------------------------------------------------------ contradictions


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
        add_exclusions(other.config, other, draft.routers(), draft.rng)
    if own is not None and draft.rng.random() < 0.5:
        draft.config = own
        numbers = {"bits": (4, 8), "group_size": (32, 64, 128, -1), "activation_scheme": ("static", "dynamic")}
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
            draft.experts[(*at, "bias")] = ("BF16", (draft.sizes(at[2])[0],), "scale")


def _count(draft: Draft) -> None:
    if draft.rng.random() < 0.5:
        draft.count += draft.rng.choice((1, -1, 4))
        return
    gone = draft.rng.randrange(EXPERTS)
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
        entries = [f"model.layers.{layer}.{draft.model.experts}" for layer in layers]
    if draft.rng.random() < 0.3:
        entries = [entry.replace("model.layers.0", "*").replace("model.layers.1", "*") for entry in entries]
    add_exclusions(draft.config, draft.encoding, entries, draft.rng)
    if plain:
        for at in draft.every():
            if inside(at):
                draft.encode(FAMILIES["plain"][0](Random(1)), *at)


def add_exclusions(config: Row, encoding: Encoding, entries: list[str], rng: Random) -> None:
    """Write module names into a config's list of exclusions."""
    assert encoding.skip is not None
    key, spelling = encoding.skip
    if key == "dynamic":  # the engine sees which modules are quantised, and here there are none but experts
        patterns = [*map(_regex, entries), r".*\.gate$"]
        config[key] = {**config.get(key, {}), **{spelling.format(pattern): {} for pattern in patterns}}
    elif key == "extra_config":
        config[key] = {**config.get(key, {}), **{entry: {"bits": 16, "data_type": "float"} for entry in entries}}
    else:
        where = config.get("quantization", config)
        regex = key == "ignore" and rng.random() < 0.5
        where[key] = [*where.get(key, ()), *(f"re:{_regex(entry)}" if regex else entry for entry in entries)]


def _regex(entry: str) -> str:
    return entry.replace(".", r"\.").replace("*", ".*")


def _dynamic(draft: Draft) -> None:
    """A rule of GPTQModel, or a second group of compressed-tensors, for one layer or some experts."""
    config = draft.config
    if config is None:
        return
    layer, fits = draft.rng.randrange(LAYERS), draft.rng.random() < 0.6
    whole = rf"model\.layers\.{layer}\.{_regex(draft.model.experts)}"
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


TWISTS: dict[str, tuple[Callable[[Draft], None], int]] = {
    "drop": (_drop, 5), "retype": (_retype, 5), "reshape": (_reshape, 5), "rename": (_rename, 4), "mixed": (_mixed, 6),
    "wrong-config": (_wrong_config, 5), "side-file": (_side_file, 3), "bias": (_bias, 4), "count": (_count, 3),
    "excluded": (_excluded, 8), "dynamic": (_dynamic, 5), "names": (_names, 6),
}  # fmt: skip


def _twist_gpt_oss(draft: Draft) -> str:
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


# ------------------------------------------------------------------------------------------------ whole checkpoints


def case(seed: int | str, number: int) -> Row:
    """A checkpoint and a deployment."""
    rng = Random(f"{seed}/{number}")
    family = rng.choices(list(FAMILIES), [weight for _, weight in FAMILIES.values()])[0]
    encoding = FAMILIES[family][0](rng)
    model = GPT_OSS if encoding.stacked else MODELS[rng.choice(("qwen3_moe", "qwen3_moe", *MODELS))]
    hidden, inter = rng.choice((256, 256, 384)), rng.choice((128, 128, 256, 384))
    config = None if encoding.config is None else _copy(encoding.config)
    draft = Draft(rng, model, encoding, config, hidden, inter, stem=model.stem)
    _fill(draft)
    twist = "none"
    if rng.random() < 0.6:
        if encoding.stacked:
            twist = f"gpt-oss-{_twist_gpt_oss(draft)}"
        else:
            twist = rng.choices(list(TWISTS), [weight for _, weight in TWISTS.values()])[0]
            TWISTS[twist][0](draft)
    return {
        "id": number, "family": family, "twist": twist, "config": _document(draft), "side": draft.side,
        "tensors": {**_frame(draft), **_tensors(draft)}, "deployment": _deployment(rng, encoding),
    }  # fmt: skip


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(one) for key, one in value.items()}
    return [_copy(one) for one in value] if isinstance(value, list) else value


def _fill(draft: Draft) -> None:
    """Encode every expert, and complete the config as its exporter would."""
    rng, encoding, model = draft.rng, draft.encoding, draft.model
    if encoding.stacked:
        for layer in range(LAYERS):
            for leaf, projection in (("gate_up_proj", "gate"), ("down_proj", "down")):
                n, k = draft.sizes(projection)
                for part, (dtype, shape, values) in encoding.parts(n * (2 if leaf != "down_proj" else 1), k).items():
                    draft.stacked[layer, leaf, part] = (dtype, (EXPERTS, *shape), values)
        return
    for layer in range(LAYERS):
        for expert in range(EXPERTS):
            for projection in ("gate", "up", "down"):
                draft.encode(encoding, layer, expert, projection)
    if draft.config is None or encoding.skip is None:
        return
    if encoding.skip[0] != "dynamic":
        add_exclusions(draft.config, encoding, draft.routers(), rng)
    if "table" in encoding.extra:
        modules = [draft.module(*at) for at in draft.every()]
        whole = [f"model.layers.{layer}.{model.experts}" for layer in range(LAYERS)]
        draft.config["quantized_layers"] = dict.fromkeys(modules if encoding.extra["each"] else whole)
        for name in draft.config["quantized_layers"]:
            draft.config["quantized_layers"][name] = dict(encoding.extra["table"])


def _document(draft: Draft) -> Row:
    model = draft.model
    found = {**_COMMON, **model.config, "hidden_size": draft.hidden, model.inter_key: draft.inter}
    found.setdefault("intermediate_size", draft.inter)
    found[model.count_key] = draft.count
    return {**found, "quantization_config": draft.config} if draft.config is not None else found


def _frame(draft: Draft) -> dict[str, Part]:
    """Tensors that are no experts'. Attention is left out."""
    stem = f"{draft.stem}." if draft.stem else ""
    hidden, router = draft.hidden, draft.model.router
    found: dict[str, Part] = {
        f"{stem}embed_tokens.weight": ("BF16", (64, hidden), "scale"),
        f"{stem}norm.weight": ("BF16", (hidden,), "scale"),
        "lm_head.weight": ("BF16", (64, hidden), "scale"),
    }
    for layer in range(LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{stem}layers.{layer}.{norm}.weight"] = ("BF16", (hidden,), "scale")
        found[f"{stem}layers.{layer}.{router}.weight"] = ("BF16", (draft.count, hidden), "scale")
        if draft.model is GPT_OSS:
            found[f"{stem}layers.{layer}.{router}.bias"] = ("BF16", (draft.count,), "scale")
        if draft.model.count_key == "n_routed_experts":
            found[f"{stem}layers.{layer}.{router}.e_score_correction_bias"] = ("F32", (draft.count,), "scale")
    return found


def _tensors(draft: Draft) -> dict[str, Part]:
    """Expert tensors under their names."""
    stem = f"{draft.stem}." if draft.stem else ""
    if draft.stacked:
        return {f"{stem}layers.{at[0]}.mlp.experts.{at[1]}{at[2]}": row for at, row in draft.stacked.items()}
    path, leaves = draft.model.experts, draft.model.leaves
    if "|" in draft.form:
        path, _, listed = draft.form.partition("|")
        leaves = tuple(listed.split(","))  # type: ignore[assignment]
    if draft.form == "stacked":
        return _in_stacks(draft, stem, path)
    found = {}
    for (layer, expert, projection, part), row in draft.experts.items():
        leaf = leaves[("gate", "up", "down").index(projection)]
        name = f"{leaf}.{expert}" if draft.form == "listed" else f"{expert}.{leaf}"
        found[f"{stem}layers.{layer}.{path}.{name}.{part}"] = row
    return found


def _in_stacks(draft: Draft, stem: str, path: str) -> dict[str, Part]:
    """One tensor for all experts, gate above up: `gate_up_proj`, with parts as suffixes."""
    transposed = draft.rng.random() < 0.5
    found: dict[str, Part] = {}
    for (layer, _, projection, part), (dtype, shape, values) in draft.experts.items():
        leaf = "down_proj" if projection == "down" else "gate_up_proj"
        if leaf == "gate_up_proj" and len(shape) == 2:
            rows, columns = shape
            turned = part in ("qweight", "qzeros", "scales")
            shape = (rows, 2 * columns) if turned else (2 * rows, columns)
        if part == "weight" and transposed and len(shape) == 2:
            shape = shape[::-1]
        suffix = "" if part in ("weight", "weight_packed") else f"_{part}"
        found[f"{stem}layers.{layer}.{path}.{leaf}{suffix}"] = (dtype, (EXPERTS, *shape), values)
    return found


_GPUS = ("A100", "H100", "H100", "B200")


def _deployment(rng: Random, encoding: Encoding) -> Row:
    gpu, ranks = rng.choice(_GPUS), rng.choice((1, 1, 1, 2, 4))
    backend = rng.choice(("marlin", "triton", "cutlass")) if rng.random() < 0.1 else "auto"
    quantization = rng.choice(encoding.quantization) if rng.random() < 0.5 else None
    return {
        "gpu": gpu, "tp": ranks, "rank": rng.randrange(ranks), "ep": ranks > 1 and rng.random() < 0.4,
        "backend": backend, "quantization": quantization,
    }  # fmt: skip
