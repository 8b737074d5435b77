"""Families as their published configs and tensors have them: what `test_families.py` makes a small checkpoint of."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from checkpoint.builder import HIDDEN

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
W123 = ("w1", "w3", "w2")


@dataclass(frozen=True)
class Row:
    """A family as its published configs and tensors have it.

    `keys` are config keys with their published values; sizes are replaced by the small ones of the builder.
    """

    model_type: str
    prefix: str
    names: tuple[str, str, str] = PROJECTIONS
    keys: dict[str, Any] = field(default_factory=dict)
    sizes: tuple[str, str, str, str] = ("num_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
    nested: str = ""
    router: str = "mlp.gate.weight"
    bias: str = ""
    scoring: str = "softmax"
    renormalize: bool = True
    activation: str = "silu"
    shared: int = 0
    groups: int = 1
    scaling: float = 1.0
    hidden: int = HIDDEN


V3 = {"scoring_func": "sigmoid", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
V3_SIZES = ("n_routed_experts", "num_experts_per_tok", "hidden_size", "moe_intermediate_size")
LOCAL_SIZES = ("num_local_experts", "num_experts_per_tok", "hidden_size", "intermediate_size")
V3_BIAS = "mlp.gate.e_score_correction_bias"

ROWS = (
    Row("mixtral", "model.layers.1.block_sparse_moe.experts", W123, sizes=LOCAL_SIZES),
    Row(
        "qwen2_moe",
        "model.layers.1.mlp.experts",
        keys={"shared_expert_intermediate_size": 16},
        renormalize=False,
        shared=1,
    ),
    Row("qwen3_moe", "model.layers.1.mlp.experts", keys={"norm_topk_prob": True}),
    Row("qwen3_next", "model.layers.1.mlp.experts", keys={"shared_expert_intermediate_size": 16}, shared=1),
    Row("qwen3_5_moe_text", "model.language_model.layers.1.mlp.experts", nested="text_config"),
    Row("qwen4_exp_text", "model.language_model.layers.1.mlp.experts", nested="text_config"),
    Row("qwen3_vl_moe_text", "model.language_model.layers.1.mlp.experts", nested="text_config"),
    Row("qwen3_omni_moe_text", "thinker.model.layers.1.mlp.experts", nested="thinker_config.text_config"),
    Row(
        "deepseek_v2",
        "model.layers.1.mlp.experts",
        keys={
            "n_shared_experts": 2,
            "n_group": 8,
            "topk_group": 3,
            "routed_scaling_factor": 16.0,
            "scoring_func": "softmax",
        },
        sizes=V3_SIZES,
        renormalize=False,
        shared=2,
        groups=8,
        scaling=16.0,
    ),
    Row(
        "deepseek_v3",
        "model.layers.1.mlp.experts",
        keys=V3,
        sizes=V3_SIZES,
        bias=V3_BIAS,
        scoring="sigmoid",
        groups=8,
        scaling=2.5,
    ),
    Row(
        "deepseek_v32",
        "model.layers.1.mlp.experts",
        keys=V3,
        sizes=V3_SIZES,
        bias=V3_BIAS,
        scoring="sigmoid",
        groups=8,
        scaling=2.5,
    ),
    Row(
        "deepseek_v4",
        "layers.1.ffn.experts",
        W123,
        keys={"scoring_func": "sqrtsoftplus", "routed_scaling_factor": 2.5, "n_shared_experts": 1},
        sizes=V3_SIZES,
        router="ffn.gate.weight",
        scoring="sqrtsoftplus",
        scaling=2.5,
        shared=1,
    ),
    Row(
        "kimi_k2",
        "model.layers.1.mlp.experts",
        keys={**V3, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
        sizes=V3_SIZES,
        bias=V3_BIAS,
        scoring="sigmoid",
        scaling=2.827,
    ),
    Row(
        "kimi_k25",
        "language_model.model.layers.1.mlp.experts",
        keys={"scoring_func": "sigmoid", "routed_scaling_factor": 2.827, "n_shared_experts": 1},
        sizes=V3_SIZES,
        nested="text_config",
        bias=V3_BIAS,
        scoring="sigmoid",
        scaling=2.827,
        shared=1,
    ),
    Row(
        "kimi_linear",
        "model.layers.1.block_sparse_moe.experts",
        W123,
        keys={"moe_router_activation_func": "sigmoid", "moe_renormalize": True, "routed_expert_hidden_size": 32},
        sizes=("num_experts", "num_experts_per_token", "hidden_size", "moe_intermediate_size"),
        router="block_sparse_moe.gate.weight",
        bias="block_sparse_moe.gate.e_score_correction_bias",
        scoring="sigmoid",
        hidden=32,
    ),
    Row(
        "glm4_moe",
        "model.layers.1.mlp.experts",
        keys={"n_group": 1, "n_shared_experts": 1},
        sizes=V3_SIZES,
        scoring="sigmoid",
        shared=1,
    ),
    Row(
        "glm4v_moe_text",
        "model.language_model.layers.1.mlp.experts",
        sizes=V3_SIZES,
        nested="text_config",
        scoring="sigmoid",
    ),
    Row("glm_moe_dsa", "model.layers.1.mlp.experts", keys=V3, sizes=V3_SIZES, scoring="sigmoid", groups=8, scaling=2.5),
    Row(
        "minimax_m1",
        "model.layers.1.block_sparse_moe.experts",
        W123,
        sizes=LOCAL_SIZES,
        router="block_sparse_moe.gate.weight",
    ),
    Row(
        "minimax_m2",
        "model.layers.1.block_sparse_moe.experts",
        W123,
        keys={"scoring_func": "sigmoid"},
        sizes=LOCAL_SIZES,
        router="block_sparse_moe.gate.weight",
        bias="block_sparse_moe.e_score_correction_bias",
        scoring="sigmoid",
    ),
    Row(
        "minimax_m3_vl",
        "language_model.model.layers.1.block_sparse_moe.experts",
        W123,
        keys={
            "scoring_func": "sigmoid",
            "routed_scaling_factor": 2.0,
            "hidden_act": "silu",
            "shared_intermediate_size": 16,
        },
        sizes=LOCAL_SIZES,
        nested="text_config",
        scoring="sigmoid",
        activation="swigluoai",
        scaling=2.0,
        shared=1,
    ),
    Row(
        "gpt_oss",
        "model.layers.1.mlp.experts",
        sizes=LOCAL_SIZES,
        router="mlp.router.weight",
        scoring="topk-softmax",
        activation="swigluoai",
    ),
    Row(
        "llama4_text",
        "language_model.model.layers.1.feed_forward.experts",
        sizes=LOCAL_SIZES,
        nested="text_config",
        router="feed_forward.router.weight",
        scoring="topk-sigmoid",
        renormalize=False,
    ),
    Row(
        "phimoe",
        "model.layers.1.block_sparse_moe.experts",
        W123,
        sizes=LOCAL_SIZES,
        scoring="sparsemixer",
        renormalize=False,
    ),
    Row(
        "dbrx",
        "transformer.blocks.1.ffn.experts.mlp",
        ("w1", "v1", "w2"),
        sizes=("ffn_config.moe_num_experts", "ffn_config.moe_top_k", "d_model", "ffn_config.ffn_hidden_size"),
        keys={"n_layers": 2},
        router="ffn.router.layer.weight",
    ),
    Row("jamba", "model.layers.1.feed_forward.experts", sizes=("num_experts", *LOCAL_SIZES[1:]), renormalize=False),
    Row(
        "olmoe",
        "model.layers.1.mlp.experts",
        sizes=("num_experts", *LOCAL_SIZES[1:]),
        keys={"norm_topk_prob": False},
        renormalize=False,
    ),
    Row("granitemoe", "model.layers.1.block_sparse_moe.experts", sizes=LOCAL_SIZES, scoring="topk-softmax"),
    Row(
        "hunyuan_v1_moe",
        "model.layers.1.mlp.experts",
        keys={"moe_topk": [1, 1], "num_shared_expert": [1, 1]},
        sizes=("num_experts", "moe_topk", "hidden_size", "moe_intermediate_size"),
        shared=1,
        router="mlp.gate.wg.weight",
    ),
    Row(
        "hy_v3",
        "model.layers.1.mlp.experts",
        keys={"router_scaling_factor": 2.826},
        bias="mlp.expert_bias",
        scoring="sigmoid",
        scaling=2.826,
    ),
    Row(
        "ernie4_5_moe",
        "model.layers.1.mlp.experts",
        sizes=("moe_num_experts", "moe_k", "hidden_size", "moe_intermediate_size"),
        keys={"moe_num_shared_experts": 2},
        bias="mlp.moe_statics.e_score_correction_bias",
        shared=2,
    ),
    Row(
        "step3p5",
        "model.layers.1.moe.experts",
        sizes=("moe_num_experts", "moe_top_k", "hidden_size", "moe_intermediate_size"),
        keys={"share_expert_dim": 16, "moe_router_scaling_factor": 3.0},
        bias="moe.router_bias",
        scoring="sigmoid",
        scaling=3.0,
        shared=1,
    ),
    Row(
        "step5",
        "model.layers.1.moe.experts",
        sizes=("moe_num_experts", "moe_top_k", "hidden_size", "moe_intermediate_size"),
        keys={"share_expert_dim": 16, "moe_router_scaling_factor": 1.0},
        bias="moe.router_bias",
        scoring="sigmoid",
        shared=1,
    ),
    Row(
        "nemotron_h",
        "backbone.layers.1.mixer.experts",
        ("", "up_proj", "down_proj"),
        sizes=V3_SIZES,
        keys={
            "mlp_hidden_act": "relu2",
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 1,
            "num_hidden_layers": None,
            "hybrid_override_pattern": "ME",
        },
        router="mixer.gate.weight",
        scoring="sigmoid",
        activation="relu2",
        scaling=2.5,
        shared=1,
    ),
    Row("bailing_moe", "model.layers.1.mlp.experts", keys={"num_shared_experts": 1}, shared=1),
    Row(
        "bailing_moe_v2",
        "model.layers.1.mlp.experts",
        keys={"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
        bias="mlp.gate.expert_bias",
        scoring="sigmoid",
        groups=8,
        scaling=2.5,
    ),
    Row("dots1", "model.layers.1.mlp.experts", keys=V3, sizes=V3_SIZES, scoring="sigmoid", groups=8, scaling=2.5),
    Row(
        "longcat_flash",
        "model.layers.1.mlp.experts",
        sizes=("n_routed_experts", "moe_topk", "hidden_size", "expert_ffn_hidden_size"),
        keys={"routed_scaling_factor": 6.0, "zero_expert_num": 256},
        bias="mlp.router.e_score_correction_bias",
        renormalize=False,
        scaling=6.0,
    ),
    Row("mistral4", "model.language_model.layers.1.mlp.experts", sizes=V3_SIZES, nested="text_config"),
    Row(
        "mimo_v2_flash",
        "model.layers.1.mlp.experts",
        keys={"routed_scaling_factor": None, "scoring_func": "sigmoid"},
        sizes=V3_SIZES,
        scoring="sigmoid",
    ),
    Row(
        "gemma4_text",
        "model.language_model.layers.1.experts",
        keys={"hidden_activation": "gelu_pytorch_tanh"},
        sizes=("num_experts", "top_k_experts", "hidden_size", "moe_intermediate_size"),
        nested="text_config",
        router="router.proj.weight",
        activation="gelu_tanh",
    ),
    Row("inkling", "model.layers.1.mlp.experts", scoring="sigmoid"),
    Row("lfm2_moe", "model.layers.1.feed_forward.experts", W123, bias="feed_forward.expert_bias", scoring="sigmoid"),
    Row("afmoe", "model.layers.1.mlp.experts", scoring="sigmoid"),
    Row("laguna", "model.layers.1.mlp.experts", scoring="sigmoid"),
    Row("solar_open", "model.layers.1.mlp.experts", scoring="sigmoid"),
    Row("exaone_moe", "model.layers.1.mlp.experts", scoring="sigmoid"),
    Row("axk1", "model.layers.1.mlp.experts", scoring="sigmoid"),
    Row("flint", "model.layers.1.mlp.experts", scoring="sigmoid"),
    Row("beam", "model.layers.1.mlp.experts", scoring="sigmoid"),
    Row("mellum", "model.layers.1.mlp.experts"),
    Row("arctic", "model.layers.1.block_sparse_moe.experts", W123, sizes=LOCAL_SIZES),
    Row(
        "grok-1",
        "model.layers.1.block_sparse_moe.experts",
        ("linear", "linear_v", "linear_1"),
        sizes=LOCAL_SIZES,
        activation="gelu",
    ),
    Row("aria_text", "language_model.model.layers.1.mlp.experts", nested="text_config", scoring="topk-softmax"),
)
