"""The model classes that cases are made for, as far as names and sizes go."""

from __future__ import annotations

from dataclasses import dataclass, field

from oracle.loads.formats import Row

EXPERTS, LAYERS = 4, 2
#: Intermediate size of a layer without experts.
DENSE_INTER = 256


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
        outer: config.json of a model that has more than text, whose `text_config` is the rest.
        head: name of the output head; `lm_head.weight` with the others.
        embedding: module of the embeddings, below `stem`.
        norms: norms of a layer.
        bias: parameter of the router that a layer has beside its weight, below the layer.
        sets: sets of experts in a layer, numbered on in one list.
        linears: rows and columns of the layer's other linear modules: a number, `hidden`, `inter` (of experts) or
            `shared` (of shared experts) or `dense` (of a layer without experts). Empty: they are left out of the
            engine's class.
        inner_norms: sizes of norms between them, a number or `hidden`.
        shared_key: config key of shared experts: of their number, or of their intermediate size.
    """

    config: Row
    experts: str = "mlp.experts"
    leaves: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router: str = "mlp.gate"
    count_key: str = "num_experts"
    inter_key: str = "moe_intermediate_size"
    stem: str = "model"
    outer: Row = field(default_factory=dict)
    head: str = "lm_head.weight"
    embedding: str = "embed_tokens"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    bias: str | None = None
    sets: int = 1
    linears: dict[str, tuple[int | str, int | str]] = field(default_factory=dict)
    inner_norms: dict[str, int | str] = field(default_factory=dict)
    shared_key: str = "n_shared_experts"

    @property
    def above(self) -> str:
        """Prefix of what `stem` holds."""
        return f"{self.stem}." if self.stem else ""


COMMON: Row = {
    "num_hidden_layers": LAYERS, "vocab_size": 64, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 32,
    "num_experts_per_tok": 2, "hidden_act": "silu", "torch_dtype": "bfloat16", "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
}  # fmt: skip
_ATTENTION: dict[str, tuple[int | str, int | str]] = {
    **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (256, "hidden")),
    "self_attn.o_proj": ("hidden", 256),
}  # fmt: skip
_LATENT: dict[str, tuple[int | str, int | str]] = {
    "self_attn.q_a_proj": (128, "hidden"), "self_attn.q_b_proj": (512, 128),
    "self_attn.kv_a_proj_with_mqa": (160, "hidden"), "self_attn.kv_b_proj": (512, 128),
    "self_attn.o_proj": ("hidden", 256),
}  # fmt: skip
_LATENT_NORMS: dict[str, int | str] = {"self_attn.q_a_layernorm": 128, "self_attn.kv_a_layernorm": 128}
_SHARED: dict[str, tuple[int | str, int | str]] = {
    **dict.fromkeys(("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"), ("shared", "hidden")),
    "mlp.shared_experts.down_proj": ("hidden", "shared"),
}  # fmt: skip
#: Modules of a layer without experts.
DENSE: dict[str, tuple[int | str, int | str]] = {
    **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), ("dense", "hidden")), "mlp.down_proj": ("hidden", "dense"),
}  # fmt: skip
_DEEPSEEK: Row = {
    "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32,
    "first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": 1.0, "moe_layer_freq": 1,
}  # fmt: skip
_GLM: Row = {
    "first_k_dense_replace": 0, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.0, "attention_bias": False, "use_qk_norm": False,
}  # fmt: skip
_CORRECTION = "mlp.gate.e_score_correction_bias"
_QWEN: Row = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}

_QWEN_VISION: Row = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 256, "patch_size": 16,
    "deepstack_visual_indexes": [], "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
}  # fmt: skip
_MROPE: Row = {"rope_parameters": {"rope_type": "default", "mrope_section": [8, 4, 4], "rope_theta": 1e6}}

MODELS: dict[str, Model] = {
    "qwen3_moe": Model(
        {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", **_QWEN},
        linears=_ATTENTION,
        inner_norms={"self_attn.q_norm": 32, "self_attn.k_norm": 32},
    ),
    "qwen2_moe": Model(
        {"architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", **_QWEN},
        linears={
            **dict.fromkeys(_ATTENTION, ("hidden", "hidden")),  # the class reads no head_dim
            **{name.replace("shared_experts", "shared_expert"): size for name, size in _SHARED.items()},
            "mlp.shared_expert_gate": (1, "hidden"),
        },
        shared_key="shared_expert_intermediate_size",
    ),
    "mixtral": Model(
        {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral"},
        "block_sparse_moe.experts",
        ("w1", "w3", "w2"),
        "block_sparse_moe.gate",
        "num_local_experts",
        "intermediate_size",
        linears=_ATTENTION,
    ),
    "olmoe": Model(
        {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe", "norm_topk_prob": False},
        inter_key="intermediate_size",
        linears=dict.fromkeys(_ATTENTION, ("hidden", "hidden")),
        inner_norms=dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), "hidden"),
    ),
    "deepseek_v3": Model(
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_DEEPSEEK},
        count_key="n_routed_experts",
        bias=_CORRECTION,
        linears={**_LATENT, **_SHARED},
        inner_norms=_LATENT_NORMS,
    ),
    "glm4_moe": Model(
        {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", **_GLM},
        count_key="n_routed_experts",
        bias=_CORRECTION,
        linears={**_ATTENTION, **_SHARED},
    ),
    "qwen3_vl_moe": Model(
        {"model_type": "qwen3_vl_moe_text", **_QWEN, **_MROPE},
        stem="model.language_model",
        outer={
            "architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
            "vision_config": _QWEN_VISION,
        },
        linears=_ATTENTION,
        inner_norms={"self_attn.q_norm": 32, "self_attn.k_norm": 32},
    ),
    "glm4v_moe": Model(
        {
            "model_type": "glm4v_moe_text", **_GLM,
            "rope_parameters": {**_MROPE["rope_parameters"], "mrope_section": [4, 2, 2]},
        },
        count_key="n_routed_experts",
        stem="model.language_model",
        outer={"architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe", "vision_config": {}},
        bias=_CORRECTION,
        linears={**_ATTENTION, **_SHARED},
    ),
    "kimi_k25": Model(
        {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_DEEPSEEK},
        count_key="n_routed_experts",
        stem="language_model.model",
        outer={"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "vision_config": {}},
        head="language_model.lm_head.weight",
        bias=_CORRECTION,
        linears={**_LATENT, **_SHARED},
        inner_norms=_LATENT_NORMS,
    ),
    "gemma4": Model(
        {
            "model_type": "gemma4_text", "enable_moe_block": True, "top_k_experts": 2, "intermediate_size": 256,
            "layer_types": ["sliding_attention", "full_attention"], "hidden_size_per_layer_input": 0,
            "num_kv_shared_layers": 0, "hidden_activation": "gelu_pytorch_tanh",
        },
        "experts",
        router="router.proj",
        stem="model.language_model",
        outer={
            "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "vision_config": {},
            "audio_config": None,
        },
        norms=(
            "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
            "pre_feedforward_layernorm_2", "post_feedforward_layernorm_1", "post_feedforward_layernorm_2",
        ),
        bias="router.per_expert_scale",
    ),
    "llama4": Model(
        {
            "model_type": "llama4_text", "interleave_moe_layer_step": 1, "intermediate_size_mlp": 256,
            "use_qk_norm": False, "no_rope_layers": [1, 1], "attention_chunk_size": 128, "num_experts_per_tok": 1,
        },
        "feed_forward.experts",
        router="feed_forward.router",
        count_key="num_local_experts",
        inter_key="intermediate_size",
        stem="language_model.model",
        outer={
            "architectures": ["Llama4ForConditionalGeneration"], "model_type": "llama4", "vision_config": {},
        },
        head="language_model.lm_head.weight",
    ),
    "ernie4_5_moe_vl": Model(
        {
            "architectures": ["Ernie4_5_VLMoeForConditionalGeneration"], "model_type": "ernie4_5_moe_vl", "moe_k": 2,
            "moe_layer_start_index": [0, 0], "moe_layer_end_index": [LAYERS - 1, LAYERS - 1], "im_patch_id": 1,
            "pixel_hidden_size": 32, "spatial_conv_size": 2, "temporal_conv_size": 2, "vision_config": {},
        },
        count_key="moe_num_experts",
        bias="mlp.moe_statics.e_score_correction_bias",
        sets=2,
    ),
}  # fmt: skip
DEEPSEEK_V4 = Model(
    {
        "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "num_key_value_heads": 1,
        "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_lora_rank": 64, "o_groups": 2,
        "sliding_window": 32, "index_head_dim": 32, "index_n_heads": 4, "index_topk": 16, "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus", "routed_scaling_factor": 1.5, "swiglu_limit": 10.0, "hc_mult": 4,
        "hc_eps": 1e-6, "hc_sinkhorn_iters": 3, "num_hash_layers": 0, "compress_ratios": [0, 4],
        "mlp_layer_types": ["moe", "moe"], "n_shared_experts": 1, "topk_method": "noaux_tc",
    },
    "ffn.experts",
    ("w1", "w3", "w2"),
    "ffn.gate",
    "n_routed_experts",
    stem="",
    head="head.weight",
    embedding="embed",
    norms=("attn_norm", "ffn_norm"),
    bias="ffn.gate.bias",
)  # fmt: skip
GPT_OSS = Model(
    {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0,
        "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"], "attention_bias": True,
    },
    leaves=("gate_up_proj", "gate_up_proj", "down_proj"),
    router="mlp.router",
    count_key="num_local_experts",
    inter_key="intermediate_size",
    bias="mlp.router.bias",
)  # fmt: skip
