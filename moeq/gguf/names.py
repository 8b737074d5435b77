"""llama.cpp's architectures with experts: their tensor names in Hugging Face's spelling, and how their rows moved.

Names of files are those of `gguf.constants` 0.19, Hugging Face names those of the models' published checkpoints. What
llama.cpp's converter (`convert_hf_to_gguf.py`) does to a tensor beside renaming it is a `Change`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

#: Change that a tensor needs beside its name. `rotary`: the interleaved halves of each head's rows are separated.
#: `row`: an axis of length 1 is added in front; `channels`: one is added after the first. `minus-one`: 1 is subtracted,
#: which norms are stored with. `logarithm`: `x` is computed from the stored `-exp(x)`. Value heads are reordered by
#: `values` (rows), `value-heads` (one row per head), `value-tail` (rows after queries and keys), `conv-tail` (that, and
#: an axis added after the first), `value-columns` (columns) and `value-logarithm` (logarithms, one per head).
Change = Literal[
    "rotary",
    "row",
    "channels",
    "minus-one",
    "logarithm",
    "values",
    "value-heads",
    "value-tail",
    "conv-tail",
    "value-columns",
    "value-logarithm",
]

_BLOCK = re.compile(r"blk\.(0|[1-9]\d{0,4})\.(.+?)\.(weight|bias)")

#: Expert tensors of a block: of all experts, or (until April 2024) of one, `ffn_gate.7`.
_EXPERT = re.compile(r"ffn_(gate|up|down|gate_up)(_exps|\.(?:0|[1-9]\d{0,3}))")

#: Mixtral's names of the projections.
_SHORT = {"gate": "w1", "up": "w3", "down": "w2"}

_TOP = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}

_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
}

_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}

_GATED_DELTA = {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}

_LINEAR_ATTENTION = _GATED_DELTA | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
}

_LINEAR_PARAMETERS = {"ssm_a": "linear_attn.A_log", "ssm_dt": "linear_attn.dt_bias"}

_STATE_SPACE = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_x": "mamba.x_proj",
    "ssm_dt": "mamba.dt_proj",
    "ssm_dt_norm": "mamba.dt_layernorm",
    "ssm_b_norm": "mamba.b_layernorm",
    "ssm_c_norm": "mamba.c_layernorm",
    "ssm_out": "mamba.out_proj",
}

_OFFSET_NORMS: dict[str, Change] = dict.fromkeys(
    ("attn_norm", "post_attention_norm", "attn_q_norm", "attn_k_norm", "output_norm"), "minus-one"
)

_LINEAR_CHANGES: Mapping[str, Change] = {
    **_OFFSET_NORMS,
    **dict.fromkeys(("ssm_alpha", "ssm_beta", "ssm_dt"), "value-heads"),
    "attn_gate": "values",
    "attn_qkv": "value-tail",
    "ssm_conv1d": "conv-tail",
    "ssm_out": "value-columns",
    "ssm_a": "value-logarithm",
    "ffn_gate_inp_shexp": "row",
}

_LINEAR_CONFIG = {
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "full_attention_interval": "full_attention_interval",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}

_NEXT = {
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}


def _feed_forward(module: str, router: str, shared: str = "shared_experts") -> dict[str, str]:
    """Return the names of a feed-forward module with experts of its own, shared experts and a dense form."""
    dense = {f"ffn_{name}": f"{module}.{name}_proj" for name in ("gate", "up", "down")}
    expert = {f"ffn_{name}_shexp": f"{module}.{shared}.{name}_proj" for name in ("gate", "up", "down")}
    return dense | expert | {"ffn_gate_inp": f"{module}.{router}"}


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture of llama.cpp."""

    model_type: str  #: `model_type` of its `config.json`
    model_class: str  #: the class under `architectures`
    blocks: Mapping[str, str]  #: names within a block to names within a layer
    top: Mapping[str, str] = field(default_factory=lambda: _TOP)  #: names outside of blocks
    layers: str = "model.layers"  #: path of the layers
    experts: str = "mlp.experts"  #: path of the experts under a layer
    #: Name under a layer of the bias that takes part in choosing experts.
    correction: str = "mlp.gate.e_score_correction_bias"
    changes: Mapping[str, Change] = field(default_factory=dict)  #: names within a block to changes of their tensors
    #: Names within a block that are parameters of a module under a layer, not its weight.
    parameters: Mapping[str, str] = field(default_factory=dict)
    #: Name within a block to (name of the tensor whose rows follow, name of the module that has both tensors' rows).
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    #: Keys of metadata (without the architecture) to keys of `config.json` that only this model has.
    config: Mapping[str, str] = field(default_factory=dict)
    defaults: Mapping[str, object] = field(default_factory=dict)  #: entries of `config.json` that metadata lacks

    def name(self, stored: str) -> tuple[str, Change | None] | None:
        """Return a tensor's Hugging Face name and its change; None if the model has no such tensor."""
        head, _, part = stored.rpartition(".")
        if head in self.top:
            return f"{self.top[head]}.{part}", self.changes.get(head)
        match = _BLOCK.fullmatch(f"{stored}.weight" if stored.endswith((".ssm_a", ".ssm_d")) else stored)
        if match is None:
            return None
        number, inner, part = match.groups()
        layer = f"{self.layers}.{number}"
        expert = _EXPERT.fullmatch(inner)
        if expert is not None:
            projection, which = expert.groups()
            if which == "_exps":
                return f"{layer}.{self.experts}.{projection}_proj.{part}", None
            names = _SHORT if self.experts.startswith("block_sparse_moe.") else {}
            return f"{layer}.{self.experts}{which}.{names.get(projection, f'{projection}_proj')}.{part}", None
        if inner == "exp_probs_b":
            return f"{layer}.{self.correction}", self.changes.get(inner)
        if inner in self.parameters:
            return f"{layer}.{self.parameters[inner]}", self.changes.get(inner)
        if inner not in self.blocks:
            return None
        return f"{layer}.{self.blocks[inner]}.{part}", self.changes.get(inner)


_ROTARY: Mapping[str, Change] = {"attn_q": "rotary", "attn_k": "rotary"}
_MLP = _ATTENTION | _feed_forward("mlp", "gate")
_SHARED_EXPERT = _feed_forward("mlp", "gate", "shared_expert") | {"ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_LOCAL_EXPERTS = {"expert_count": "num_local_experts"}
_ROUTED_EXPERTS = {
    "expert_count": "n_routed_experts",
    "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_norm": "norm_topk_prob",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}

ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "mixtral",
        "MixtralForCausalLM",
        _ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts",
        changes=_ROTARY,
        config=_LOCAL_EXPERTS,
    ),
    "llama4": GgufArchitecture(
        "llama4_text",
        "Llama4ForCausalLM",
        _ATTENTION | _feed_forward("feed_forward", "router", "shared_expert"),
        experts="feed_forward.experts",
        config=_LOCAL_EXPERTS
        | {
            "interleave_moe_layer_step": "interleave_moe_layer_step",
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
        },
    ),
    "qwen2moe": GgufArchitecture(
        "qwen2_moe",
        "Qwen2MoeForCausalLM",
        _ATTENTION | _SHARED_EXPERT,
        changes={"ffn_gate_inp_shexp": "row"},
        config={"expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    "qwen3moe": GgufArchitecture("qwen3_moe", "Qwen3MoeForCausalLM", _MLP, defaults={"norm_topk_prob": True}),
    "qwen3next": GgufArchitecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        _ATTENTION
        | _SHARED_EXPERT
        | _GATED_DELTA
        | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"},
        changes={**_OFFSET_NORMS, "ssm_a": "logarithm", "ssm_conv1d": "channels", "ffn_gate_inp_shexp": "row"},
        parameters=_LINEAR_PARAMETERS,
        joined={"attn_qkv": ("attn_gate", "linear_attn.in_proj_qkvz")},
        config=_LINEAR_CONFIG,
        defaults={"norm_topk_prob": True},
    ),
    "qwen35moe": GgufArchitecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        _ATTENTION | _SHARED_EXPERT | _LINEAR_ATTENTION,
        changes=_LINEAR_CHANGES,
        parameters=_LINEAR_PARAMETERS,
        config=_LINEAR_CONFIG,
        defaults={"norm_topk_prob": True},
    ),
    "deepseek2": GgufArchitecture(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        _MLP | _LATENT,
        config=_ROUTED_EXPERTS
        | {
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
            "rope.dimension_count": "qk_rope_head_dim",
        },
    ),
    "glm4moe": GgufArchitecture(
        "glm4_moe",
        "Glm4MoeForCausalLM",
        _MLP | _NEXT,
        config=_ROUTED_EXPERTS | {"nextn_predict_layers": "num_nextn_predict_layers"},
        defaults={"partial_rotary_factor": 0.5},
    ),
    "dots1": GgufArchitecture("dots1", "Dots1ForCausalLM", _MLP, config=_ROUTED_EXPERTS),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        "GptOssForCausalLM",
        _ATTENTION | {"ffn_gate_inp": "mlp.router"},
        parameters={"attn_sinks": "self_attn.sinks"},
        config=_LOCAL_EXPERTS | {"expert_feed_forward_length": "intermediate_size"},
        defaults={"attention_bias": True, "swiglu_limit": 7.0, "hidden_act": "silu", "tie_word_embeddings": False},
    ),
    "minimax-m2": GgufArchitecture(
        "minimax_m2",
        "MiniMaxM2ForCausalLM",
        _ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts",
        correction="block_sparse_moe.e_score_correction_bias",
        config=_LOCAL_EXPERTS
        | {"expert_feed_forward_length": "intermediate_size", "rope.dimension_count": "rotary_dim"},
        defaults={"use_routing_bias": True, "use_qk_norm": True, "scoring_func": "sigmoid"},
    ),
    "hunyuan-moe": GgufArchitecture(
        "hunyuan_v1_moe",
        "HunYuanMoEV1ForCausalLM",
        _ATTENTION
        | _feed_forward("mlp", "gate.wg", "shared_mlp")
        | {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        config={"expert_used_count": "moe_topk"},
    ),
    "ernie4_5-moe": GgufArchitecture(
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        _MLP,
        correction="mlp.moe_statics.e_score_correction_bias",
        changes={"exp_probs_b": "row"},
        config={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
    ),
    "granitemoe": GgufArchitecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        _ATTENTION | {"ffn_gate_inp": "block_sparse_moe.router.layer", "ffn_down_shexp": "shared_mlp.output_linear"},
        experts="block_sparse_moe.experts",
        changes=_ROTARY,
        joined={"ffn_gate_shexp": ("ffn_up_shexp", "shared_mlp.input_linear")},
        config=_LOCAL_EXPERTS
        | {
            "expert_shared_feed_forward_length": "shared_intermediate_size",
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "olmoe": GgufArchitecture("olmoe", "OlmoeForCausalLM", _ATTENTION | {"ffn_gate_inp": "mlp.gate"}),
    "phimoe": GgufArchitecture(
        "phimoe",
        "PhiMoEForCausalLM",
        _ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts="block_sparse_moe.experts",
        config=_LOCAL_EXPERTS,
        defaults={"attention_bias": True, "lm_head_bias": True},
    ),
    "jamba": GgufArchitecture(
        "jamba",
        "JambaForCausalLM",
        _ATTENTION | _feed_forward("feed_forward", "router") | {"ffn_norm": "pre_ff_layernorm"} | _STATE_SPACE,
        top=_TOP | {"output_norm": "model.final_layernorm"},
        experts="feed_forward.experts",
        changes={"ssm_a": "logarithm", "ssm_conv1d": "channels"},
        parameters={"ssm_a": "mamba.A_log", "ssm_d": "mamba.D"},
        config={
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
        },
    ),
    "bailingmoe2": GgufArchitecture(
        "bailing_moe_v2",
        "BailingMoeV2ForCausalLM",
        _MLP
        | _NEXT
        | {
            "layer_output_norm": "final_layernorm",
            "attn_qkv": "attention.query_key_value",
            "attn_output": "attention.dense",
            "attn_q_norm": "attention.query_layernorm",
            "attn_k_norm": "attention.key_layernorm",
        },
        top=_TOP | {"token_embd": "model.word_embeddings"},
        correction="mlp.gate.expert_bias",
        config={
            "expert_shared_count": "num_shared_experts",
            "nextn_predict_layers": "num_nextn_predict_layers",
        },
    ),
}
