"""The model classes that are built to be asked: their architectures, and configs that make them small."""

from __future__ import annotations

from typing import Any

#: What makes a model of any family small; every config takes what it knows. Sizes are distinct, so that a tensor's
#: shape says which way round it is.
SMALL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "vocab_size": 64,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "shared_expert_intermediate_size": 64,
    "pad_token_id": 0,
}
_MLA = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 32, "v_head_dim": 32}
_MLA |= {"num_key_value_heads": 4}

_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32}
_LONGCAT = {"mla_scale_q_lora": True, "mla_scale_kv_lora": True, "zero_expert_type": None, "zero_expert_num": 0}

#: `model_type` to its architecture and what its config needs beyond that. `None`: the config's own sizes, which have to
#: fit each other.
MODELS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "mixtral": ("MixtralForCausalLM", {}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "qwen3_next": ("Qwen3NextForCausalLM", {}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", _MLA),
    "deepseek_v3": ("DeepseekV3ForCausalLM", _MLA),
    "deepseek_v32": ("DeepseekV32ForCausalLM", None),
    "glm4_moe": ("Glm4MoeForCausalLM", {"head_dim": 64}),
    "glm4_moe_lite": ("Glm4MoeLiteForCausalLM", {**_MLA, "first_k_dense_replace": 0}),
    "glm_moe_dsa": ("GlmMoeDsaForCausalLM", None),
    "minimax_m2": ("MiniMaxM2ForCausalLM", {"rotary_dim": 32, "scoring_func": "sigmoid"}),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "llama4_text": ("Llama4ForCausalLM", {}),
    "phimoe": ("PhiMoEForCausalLM", {}),
    "jamba": ("JambaForCausalLM", {}),
    "olmoe": ("OlmoeForCausalLM", {}),
    "flex_olmo": ("FlexOlmoForCausalLM", {}),
    "granitemoe": ("GraniteMoeForCausalLM", {}),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", {}),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", None),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", {"moe_intermediate_size": 64, "use_mixed_mlp_moe": False}),
    "hy_v3": ("HYV3ForCausalLM", {"first_k_dense_replace": 0, "expert_hidden_dim": 64, "route_norm": True}),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", {}),
    "dots1": ("Dots1ForCausalLM", {}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", {"num_dense_layers": 0, "layer_types": ["conv", "full_attention"]}),
    "afmoe": ("AfmoeForCausalLM", {"score_func": "sigmoid", "num_dense_layers": 0, "route_norm": True, **_SLIDING}),
    "solar_open": ("SolarOpenForCausalLM", {}),
    "exaone_moe": ("ExaoneMoEForCausalLM", None),
    "kimi_linear": ("KimiLinearForCausalLM", None),
    "longcat_flash": ("LongcatFlashForCausalLM", {**_MLA, **_LONGCAT}),
    "mimo_v2_flash": ("MiMoV2FlashForCausalLM", None),
    "laguna": ("LagunaForCausalLM", None),
    "mellum": ("MellumForCausalLM", None),
    "axk1": ("AXK1ForCausalLM", _MLA),
    "aria_text": ("AriaTextForCausalLM", {}),
    "nemotron_h": ("NemotronHForCausalLM", None),
    # Language models within models of images.
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", {"norm_topk_prob": True}),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", {}),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", {"head_dim": 64, "use_qk_norm": False}),
    "llama4": ("Llama4ForConditionalGeneration", {}),
    "kimi_k25": ("KimiK25ForConditionalGeneration", {}),
    "gemma4": ("Gemma4ForConditionalGeneration", None),
    "gemma4_text": ("Gemma4ForCausalLM", None),
    "ernie4_5_moe_vl": ("Ernie4_5_VLMoeForConditionalGeneration", None),
}

_GEMMA4 = {
    **{key: SMALL[key] for key in ("hidden_size", "intermediate_size", "moe_intermediate_size", "num_hidden_layers")},
    **{key: SMALL[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim", "num_experts")},
    "vocab_size": 64, "top_k_experts": 2, "enable_moe_block": True, "hidden_size_per_layer_input": 0,
    "layer_types": ["sliding_attention", "full_attention"], "global_head_dim": 64, "num_kv_shared_layers": 0,
}  # fmt: skip
#: config.json of models whose config classes cannot be made small: Gemma-4's layers have sizes of their own, and
#: ERNIE-4.5-VL's class in transformers has other fields than the published code that vLLM's class reads.
DOCUMENTS: dict[str, dict[str, Any]] = {
    "gemma4": {"text_config": _GEMMA4, "vision_config": {"num_hidden_layers": 1}, "audio_config": None},
    "gemma4_text": _GEMMA4,
    "ernie4_5_moe_vl": {
        **{key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")},
        **{key: SMALL[key] for key in ("num_key_value_heads", "head_dim", "moe_k", "vocab_size")},
        "moe_num_experts": [4, 4], "moe_intermediate_size": [64, 64], "moe_layer_start_index": [0, 0],
        "moe_layer_end_index": [1, 1], "im_patch_id": 1, "pixel_hidden_size": 32, "spatial_conv_size": 2,
        "temporal_conv_size": 2, "hidden_act": "silu", "rms_norm_eps": 1e-6, "vision_config": {},
        "tie_word_embeddings": False,
    },
}  # fmt: skip
#: Modules of models that hold no experts, and want a device or more of a config than is written above.
LEFT_OUT = {
    "kimi_k25": ("MoonViT3dPretrainedModel", "KimiK25MultiModalProjector"),
    "ernie45_vl": ("Ernie4_5_VisionTransformer", "VariableResolutionResamplerModel"),
}
