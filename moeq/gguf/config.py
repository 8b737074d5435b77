"""`config.json` of a GGUF file: its metadata under Hugging Face's keys.

Keys are those of transformers 5.23 (`transformers.integrations.ggml.GGUF_CONFIG_MAPPING`) and, for architectures that
it does not convert, those of the models' own configs. Keys that metadata lacks are left to the model's defaults.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from math import isfinite
from typing import Any

from moeq.errors import MoeqError
from moeq.gguf.names import ARCHITECTURES, GgufArchitecture

_CONFIG = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
}

_SCALING = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}

_TOKENS = {"bos": "bos_token_id", "eos": "eos_token_id", "padding": "pad_token_id"}

#: `LLAMA_EXPERT_GATING_FUNC_TYPE_*` of llama.cpp.
_SCORING = {1: "softmax", 2: "sigmoid"}


def architecture_of(metadata: Mapping[str, Any], where: str) -> tuple[str, GgufArchitecture]:
    """Return the architecture of a file.

    Raises MoeqError `source.bad-header` if the metadata names none; `source.unsupported-format` for one that moeq does
    not know; `answer.not-moe` for a model without experts.
    """
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not name or not name.isprintable() or len(name) > 64:
        raise MoeqError("source.bad-header", f"{where}: general.architecture is {ascii(name)[:80]}, expected a name")
    if not metadata.get(f"{name}.expert_count"):
        detail = f"{where} is a dense {name} model: its metadata has no {name}.expert_count"
        raise MoeqError("answer.not-moe", detail, "moeq is for models with routed experts")
    if name not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise MoeqError("source.unsupported-format", f"{where}: moeq does not know the architecture {name}", known)
    return name, ARCHITECTURES[name]


def config_of(
    metadata: Mapping[str, Any], name: str, architecture: GgufArchitecture, tensors: Iterable[str], where: str
) -> dict[str, Any]:
    """Make `config.json` of a file. Raises MoeqError `source.bad-header` for values of a wrong type."""
    model_type, model_class = architecture.model_type, architecture.model_class
    if name == "deepseek2" and metadata.get("deepseek2.expert_gating_func", 1) == 1:
        model_type, model_class = "deepseek_v2", "DeepseekV2ForCausalLM"
    if name == "granitemoe" and metadata.get("granitemoe.expert_shared_feed_forward_length"):
        model_type, model_class = "granitemoeshared", "GraniteMoeSharedForCausalLM"
    config: dict[str, Any] = {"architectures": [model_class], "model_type": model_type, "dtype": "bfloat16"}
    config |= architecture.defaults
    config |= _numbers(metadata, name, {**_CONFIG, **architecture.config}, where)
    config["num_hidden_layers"] = _layers(metadata, name, where)
    scoring = metadata.get(f"{name}.expert_gating_func")
    if scoring in _SCORING and (name in ("deepseek2", "minimax-m2") or "scoring_func" in config):
        config["scoring_func"] = _SCORING[scoring]
    if name == "deepseek2":
        config |= _latent_heads(config, metadata)
    names = tuple(tensors)
    if name in ("qwen35moe", "qwen3next"):
        config |= _linear_attention(config, metadata, name, where)
    if name == "jamba":
        config |= _state_space(config, metadata, names, where)
    config |= dict(_token_ids(metadata, where))
    vocabulary = metadata.get("tokenizer.ggml.tokens")
    if isinstance(vocabulary, list):
        config["vocab_size"] = len(vocabulary)
    config.setdefault("tie_word_embeddings", "output.weight" not in names)
    kind = metadata.get(f"{name}.rope.scaling.type")
    if kind in ("linear", "yarn"):
        config["rope_scaling"] = {"rope_type": kind, **_numbers(metadata, name, _SCALING, where)}
    return config


def _numbers(metadata: Mapping[str, Any], name: str, keys: Mapping[str, str], where: str) -> dict[str, Any]:
    """Return the values of those of the architecture's keys that metadata has, under their names in the config."""
    found = {}
    for key, target in keys.items():
        value = metadata.get(f"{name}.{key}")
        if value is not None:
            found[target] = _plain(value, f"{where}: {name}.{key}")
    return found


def _plain(value: Any, where: str) -> Any:
    """Return a number, or a list of one per layer if they differ. Raises MoeqError `source.bad-header` otherwise."""
    if isinstance(value, memoryview):
        numbers = value.tolist()
        return numbers[0] if numbers and len(set(numbers)) == 1 else numbers
    if isinstance(value, float):
        # Metadata holds float32; seven digits give back the decimal number that the writer had.
        value = float(f"{value:.7g}")
    if isinstance(value, (int, float)) and isfinite(value):
        return value
    raise MoeqError("source.bad-header", f"{where} is {ascii(value)[:60]}, expected a number")


def _layers(metadata: Mapping[str, Any], name: str, where: str) -> int:
    """Return the number of decoder layers: blocks without those of multi-token prediction."""
    blocks, extra = metadata.get(f"{name}.block_count"), metadata.get(f"{name}.nextn_predict_layers", 0)
    if type(blocks) is not int or type(extra) is not int or not 0 <= extra < blocks <= 1 << 12:
        detail = f"{where}: {name}.block_count is {ascii(blocks)[:40]}, nextn_predict_layers {ascii(extra)[:40]}"
        raise MoeqError("source.bad-header", detail)
    return blocks - extra


def _latent_heads(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return head sizes of multi-head latent attention, for whole keys and values instead of the latent ones."""
    keys = metadata.get("deepseek2.attention.key_length_mla", config.get("head_dim", 0))
    values = metadata.get("deepseek2.attention.value_length_mla", metadata.get("deepseek2.attention.value_length"))
    rope = config.get("qk_rope_head_dim", 0)
    heads = {"num_key_value_heads": config.get("num_attention_heads"), "head_dim": rope}
    return {**heads, "qk_nope_head_dim": keys - rope, "v_head_dim": values}


def _linear_attention(config: Mapping[str, Any], metadata: Mapping[str, Any], name: str, where: str) -> dict[str, Any]:
    """Return the config's keys about value heads and positions of Qwen3-Next and Qwen3.5."""
    heads, inner = config.get("linear_num_value_heads"), metadata.get(f"{name}.ssm.inner_size")
    if type(heads) is not int or type(inner) is not int or heads <= 0 or inner % heads:
        detail = f"{where}: ssm.inner_size {ascii(inner)[:40]} does not divide into {heads} value heads"
        raise MoeqError("source.bad-header", detail)
    found: dict[str, Any] = {"linear_value_head_dim": inner // heads}
    sections, width = metadata.get(f"{name}.rope.dimension_sections"), metadata.get(f"{name}.rope.dimension_count")
    if type(width) is not int or not config.get("head_dim"):
        return found
    rotary = width / config["head_dim"]
    if name == "qwen3next":
        return found | {"partial_rotary_factor": rotary}
    if isinstance(sections, memoryview):
        found["rope_parameters"] = {
            "rope_theta": config.get("rope_theta"),
            "mrope_section": [section for section in sections.tolist() if section],
            "mrope_interleaved": True,
            "partial_rotary_factor": rotary,
        }
    return found


def _state_space(
    config: Mapping[str, Any], metadata: Mapping[str, Any], tensors: Collection[str], where: str
) -> dict[str, Any]:
    """Return the config's keys about Jamba's state-space layers, and about which layers have attention and experts."""
    inner, hidden = metadata.get("jamba.ssm.inner_size"), config.get("hidden_size")
    if type(inner) is not int or type(hidden) is not int or hidden <= 0 or inner % hidden:
        raise MoeqError("source.bad-header", f"{where}: ssm.inner_size {ascii(inner)[:40]} is no multiple of {hidden}")
    present, layers = frozenset(tensors), config["num_hidden_layers"]
    found: dict[str, Any] = {
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in present),
        "mamba_proj_bias": any(name.endswith(".ssm_in.bias") for name in present),
    }
    if isinstance(heads := config.get("num_key_value_heads"), list):
        found["num_key_value_heads"] = max(heads)
    for key, tensor in (("attn", "attn_q"), ("expert", "ffn_gate_exps")):
        having = [layer for layer in range(layers) if f"blk.{layer}.{tensor}.weight" in present]
        period = having[1] - having[0] if len(having) > 1 else layers
        if not having or having != list(range(having[0], layers, period)):
            raise MoeqError("source.inconsistent", f"{where}: layers {having[:8]} of {layers} have {tensor}")
        found |= {f"{key}_layer_period": period, f"{key}_layer_offset": having[0]}
    return found


def _token_ids(metadata: Mapping[str, Any], where: str) -> Iterator[tuple[str, int]]:
    for name, target in _TOKENS.items():
        value = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if value is None:
            continue
        if type(value) is not int:
            detail = f"{where}: tokenizer.ggml.{name}_token_id is {ascii(value)[:40]}, expected a number"
            raise MoeqError("source.bad-header", detail)
        yield target, value
