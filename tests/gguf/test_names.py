"""Names of llama.cpp's architectures in the models' own spelling."""

from __future__ import annotations

import pytest

from moeq.gguf.names import ARCHITECTURES

#: Tensors that are no weights of a model with experts, computed by llama.cpp or of dense models, and gaps.
UNNAMED = {
    "llama": {"rope_freqs", "attn_rot_embd", "ffn_gate", "ffn_down", "ffn_up"},
    "llama4": {"rope_freqs", "attn_rot_embd"},
    "deepseek2": {"rope_freqs", "attn_k_b", "attn_v_b", "attn_rot_embd"},
    "hunyuan-moe": {"rope_freqs"},
    "phimoe": {"rope_factors_long", "rope_factors_short", "attn_qkv"},
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_of_an_architecture_has_a_name(name: str) -> None:
    constants = pytest.importorskip("gguf.constants")
    number = next(key for key, title in constants.MODEL_ARCH_NAMES.items() if title == name)
    stored = [constants.TENSOR_NAMES[kind].format(bid=0, xid=0) for kind in constants.MODEL_TENSORS[number]]
    found = ARCHITECTURES[name]
    unnamed = {one for one in stored if found.name(f"{one}.weight") is None and found.name(one) is None}
    unnamed -= {f"blk.0.{half}" for first, (second, _) in found.joined.items() for half in (first, second)}
    assert {one.removeprefix("blk.0.") for one in unnamed} == UNNAMED.get(name, set())


@pytest.mark.parametrize("name", ["glm4moe", "bailingmoe2"])
def test_multi_token_prediction(name: str) -> None:
    found = ARCHITECTURES[name]
    assert found.name("blk.46.nextn.eh_proj.weight") == ("model.layers.46.eh_proj.weight", None)
    assert found.name("blk.46.nextn.shared_head_norm.weight") == ("model.layers.46.shared_head.norm.weight", None)
    assert found.config["nextn_predict_layers"] == "num_nextn_predict_layers"


@pytest.mark.parametrize(
    ("architecture", "stored", "expected"),
    [
        ("llama", "token_embd.weight", ("model.embed_tokens.weight", None)),
        ("llama", "blk.7.attn_k.bias", ("model.layers.7.self_attn.k_proj.bias", "rotary")),
        ("llama", "blk.7.ffn_gate_exps.weight", ("model.layers.7.block_sparse_moe.experts.gate_proj.weight", None)),
        ("llama", "blk.7.ffn_up.12.weight", ("model.layers.7.block_sparse_moe.experts.12.w3.weight", None)),
        ("qwen3moe", "blk.7.ffn_up.12.weight", ("model.layers.7.mlp.experts.12.up_proj.weight", None)),
        ("jamba", "blk.0.ssm_a", ("model.layers.0.mamba.A_log", "logarithm")),
        ("jamba", "blk.0.ssm_d", ("model.layers.0.mamba.D", None)),
        ("jamba", "output_norm.weight", ("model.final_layernorm.weight", None)),
        ("qwen3next", "output_norm.weight", ("model.norm.weight", "minus-one")),
        ("qwen3next", "blk.1.ssm_dt.bias", ("model.layers.1.linear_attn.dt_bias", None)),
        ("ernie4_5-moe", "blk.1.exp_probs_b.bias", ("model.layers.1.mlp.moe_statics.e_score_correction_bias", "row")),
        ("qwen3moe", "blk.99999.attn_q.weight", ("model.layers.99999.self_attn.q_proj.weight", None)),
        ("qwen3moe", "blk.100000.attn_q.weight", None),
        ("qwen3moe", "blk.01.attn_q.weight", None),
        ("qwen3moe", "blk.1.ffn_up.01.weight", None),
        ("qwen3moe", "blk.1.attn_q.scale", None),
        ("qwen3moe", "blk.1.attn_sinks.weight", None),
        ("qwen3moe", "blk.1.ssm_a", None),
        ("qwen3moe", "output_norm", None),
    ],
)
def test_names(architecture: str, stored: str, expected: tuple[str, str | None] | None) -> None:
    assert ARCHITECTURES[architecture].name(stored) == expected


#: Entries of a config that no metadata tells: what llama.cpp's graphs of these architectures do in any case.
DEFAULTS = {
    "qwen3moe": {"norm_topk_prob": True},
    "qwen3next": {"norm_topk_prob": True},
    "qwen35moe": {"norm_topk_prob": True},
    "glm4moe": {"partial_rotary_factor": 0.5},
    "gpt-oss": {"attention_bias": True, "swiglu_limit": 7.0, "hidden_act": "silu", "tie_word_embeddings": False},
    "minimax-m2": {"use_routing_bias": True, "use_qk_norm": True, "scoring_func": "sigmoid"},
    "phimoe": {"attention_bias": True, "lm_head_bias": True},
}


def test_entries_of_a_config_that_no_metadata_tells() -> None:
    assert {name: one.defaults for name, one in ARCHITECTURES.items() if one.defaults} == DEFAULTS
