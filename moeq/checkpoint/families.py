"""Model families as data: what `config.json` and tensor names do not say by themselves.

Values come from the families' own modelling code (transformers 5.23, vLLM 0.33). Explicit config keys take precedence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

#: Form of the experts in the unquantised checkpoint: one module per projection and expert, or stacked parameters with
#: gate and up rows as two halves, with interleaved gate and up rows, or transposed.
Stacking = Literal["per-expert", "halves", "interleaved", "transposed"]

_W123 = ("w1", "w3", "w2")


@dataclass(frozen=True)
class ModelFamily:
    """One model family."""

    title: str  #: name for people
    model_types: tuple[str, ...]  #: values of `model_type` in the config, or in its text config where that is nested
    experts: str = "mlp.experts"  #: path of the experts module under a layer
    #: Names of the gate, up and down modules; the gate's is empty if experts have no gate.
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    #: Form of the experts in the family's own checkpoints. Quantised exports of any family may be per-expert.
    stacking: Stacking = "per-expert"
    layers: tuple[str, ...] = ("model.layers",)  #: paths of the decoder layers in published checkpoints
    router: str = "mlp.gate"  #: router module under a layer
    scoring: str = "softmax"  #: how router logits become scores, where the config does not say
    renormalize: bool = True  #: whether the chosen scores are divided by their sum, where the config does not say
    scaling: float = 1.0  #: routed scaling factor, where the config does not say
    group_score: Literal["max", "top2"] = "max"  #: how a group of experts is ranked, where there are groups
    #: Config keys of the expert intermediate size, searched in order.
    intermediate_keys: tuple[str, ...] = ("moe_intermediate_size",)
    #: Value that the model's code uses in place of the config's, or None to trust the config.
    activation: str | None = None

    @property
    def interleaved(self) -> bool:
        """Whether rows of stacked gate and up tensors are interleaved."""
        return self.stacking == "interleaved"

    @property
    def transposed(self) -> bool:
        """Whether stacked parameters that are not quantised are transposed; those of gpt-oss are interleaved, too."""
        return self.stacking == "transposed" or "gpt_oss" in self.model_types


#: Names of Mixtral's modules, which other families took over.
_BLOCK_SPARSE: dict[str, Any] = {
    "experts": "block_sparse_moe.experts",
    "projections": _W123,
    "router": "block_sparse_moe.gate",
}
_DENSE_SIZE = ("intermediate_size",)
_VISION_LAYERS = ("model.language_model.layers", "model.layers")
_KIMI_LAYERS = ("language_model.model.layers", "model.layers")

FAMILIES: tuple[ModelFamily, ...] = (
    ModelFamily("Mixtral", ("mixtral",), **_BLOCK_SPARSE, intermediate_keys=_DENSE_SIZE),
    ModelFamily("Qwen2-MoE", ("qwen2_moe",), renormalize=False),
    ModelFamily("Qwen3-MoE", ("qwen3_moe",)),
    ModelFamily("Qwen3-Next", ("qwen3_next",)),
    ModelFamily(
        "Qwen3.5-MoE",
        ("qwen3_5_moe", "qwen3_5_moe_text", "qwen3_6_moe", "qwen3_6_moe_text", "qwen3_8_moe", "qwen3_8_moe_text"),
        stacking="halves",
        layers=_VISION_LAYERS,
    ),
    ModelFamily("Qwen4-Exp", ("qwen4_exp", "qwen4_exp_text"), stacking="halves", layers=_VISION_LAYERS),
    ModelFamily("Qwen3-VL-MoE", ("qwen3_vl_moe", "qwen3_vl_moe_text"), stacking="transposed", layers=_VISION_LAYERS),
    ModelFamily(
        "Qwen3-Omni-MoE",
        ("qwen3_omni_moe", "qwen3_omni_moe_text", "qwen3_omni_moe_thinker"),
        layers=("thinker.model.layers", "talker.model.layers"),
    ),
    ModelFamily("DeepSeek-V2", ("deepseek_v2",), renormalize=False),
    ModelFamily("DeepSeek-V3", ("deepseek_v3",), scoring="sigmoid", scaling=2.5, group_score="top2"),
    ModelFamily("DeepSeek-V3.2", ("deepseek_v32",), scoring="sigmoid", scaling=2.5, group_score="top2"),
    ModelFamily(
        "DeepSeek-V4",
        ("deepseek_v4", "deepseek_v41", "deepseek_ref"),
        experts="ffn.experts",
        projections=_W123,
        layers=("layers",),
        router="ffn.gate",
        scoring="sqrtsoftplus",
        scaling=1.5,
    ),
    ModelFamily("Kimi-K2", ("kimi_k2",), scoring="sigmoid", scaling=2.827, group_score="top2"),
    ModelFamily("Kimi-K2.5", ("kimi_k25",), scoring="sigmoid", scaling=2.827, group_score="top2", layers=_KIMI_LAYERS),
    ModelFamily(
        "Kimi-Linear / K3",
        ("kimi_linear", "kimi_k3"),
        **_BLOCK_SPARSE,
        layers=("model.layers", "language_model.model.layers"),
        scoring="sigmoid",
    ),
    ModelFamily("GLM-4.5", ("glm4_moe", "glm4_moe_lite"), scoring="sigmoid", group_score="top2"),
    ModelFamily(
        "GLM-4.5V", ("glm4v_moe", "glm4v_moe_text"), scoring="sigmoid", group_score="top2", layers=_VISION_LAYERS
    ),
    ModelFamily(
        "GLM-5",
        ("glm_moe_dsa", "glm5_next"),
        scoring="sigmoid",
        group_score="top2",
        layers=("model.layers", *_VISION_LAYERS),
    ),
    ModelFamily(
        "MiniMax-M1",
        ("minimax", "minimax_text_01", "minimax_m1"),
        **_BLOCK_SPARSE,
        intermediate_keys=_DENSE_SIZE,
    ),
    ModelFamily("MiniMax-M2", ("minimax_m2",), **_BLOCK_SPARSE, scoring="sigmoid", intermediate_keys=_DENSE_SIZE),
    ModelFamily(
        "MiniMax-M3",
        ("minimax_m3", "minimax_m3_vl", "minimax_m3_text"),
        **_BLOCK_SPARSE,
        layers=_KIMI_LAYERS,
        scoring="sigmoid",
        scaling=2.0,
        intermediate_keys=("moe_intermediate_size", "intermediate_size"),
        activation="swigluoai",
    ),
    ModelFamily(
        "gpt-oss",
        ("gpt_oss",),
        stacking="interleaved",
        router="mlp.router",
        scoring="topk-softmax",
        intermediate_keys=_DENSE_SIZE,
        activation="swigluoai",
    ),
    ModelFamily(
        "Llama-4",
        ("llama4", "llama4_text"),
        experts="feed_forward.experts",
        stacking="transposed",
        layers=("language_model.model.layers", "model.layers"),
        router="feed_forward.router",
        scoring="topk-sigmoid",
        renormalize=False,
        intermediate_keys=_DENSE_SIZE,
    ),
    ModelFamily(
        "Phi-3.5-MoE",
        ("phimoe",),
        **_BLOCK_SPARSE,
        scoring="sparsemixer",
        renormalize=False,
        intermediate_keys=_DENSE_SIZE,
    ),
    ModelFamily(
        "DBRX",
        ("dbrx",),
        experts="ffn.experts",
        projections=("w1", "v1", "w2"),
        layers=("transformer.blocks",),
        router="ffn.router.layer",
        intermediate_keys=("ffn_config.ffn_hidden_size",),
    ),
    ModelFamily(
        "Jamba",
        ("jamba",),
        experts="feed_forward.experts",
        router="feed_forward.router",
        renormalize=False,
        intermediate_keys=_DENSE_SIZE,
    ),
    ModelFamily("OLMoE", ("olmoe", "flex_olmo"), renormalize=False, intermediate_keys=_DENSE_SIZE),
    ModelFamily(
        "Granite-MoE",
        ("granitemoe", "granitemoehybrid", "granitemoeshared"),
        experts="block_sparse_moe",
        projections=("input_linear", "input_linear", "output_linear"),
        stacking="halves",
        router="block_sparse_moe.router.layer",
        scoring="topk-softmax",
        intermediate_keys=_DENSE_SIZE,
    ),
    ModelFamily("Hunyuan-A13B", ("hunyuan_v1_moe",), router="mlp.gate.wg"),
    ModelFamily("Hunyuan 3", ("hy_v3", "hy_v4"), router="mlp.router.gate", scoring="sigmoid", scaling=2.826),
    ModelFamily("ERNIE-4.5", ("ernie4_5_moe", "ernie4_5_vl_moe", "ernie4_5_moe_vl")),
    ModelFamily(
        "Step-3",
        ("step3_text", "step3p5", "step3p7", "step3_vl"),
        experts="moe",
        router="moe.gate",
        stacking="halves",
        scoring="sigmoid",
        scaling=3.0,
    ),
    ModelFamily("Step-5", ("step5",), experts="moe", router="moe.gate", stacking="halves", scoring="sigmoid"),
    ModelFamily(
        "Nemotron-3",
        ("nemotron_h", "nemotron_h_moe"),
        experts="mixer.experts",
        projections=("", "up_proj", "down_proj"),
        layers=("backbone.layers", "model.layers"),
        router="mixer.gate",
        scoring="sigmoid",
        scaling=2.5,
        activation="relu2",
    ),
    ModelFamily("Bailing / Ling", ("bailing_moe",)),
    ModelFamily(
        "Bailing / Ling 2",
        ("bailing_moe_v2", "bailing_moe_linear", "bailing_hybrid", "bailing_moe_v2_5"),
        scoring="sigmoid",
        scaling=2.5,
        group_score="top2",
    ),
    ModelFamily("dots", ("dots1", "dots3", "dots3_note"), scoring="sigmoid", group_score="top2"),
    ModelFamily(
        "LongCat-Flash",
        ("longcat_flash",),
        router="mlp.router.classifier",
        renormalize=False,
        scaling=6.0,
        intermediate_keys=("moe_intermediate_size", "expert_ffn_hidden_size"),  # transformers takes the first of both
    ),
    ModelFamily(
        "Mistral Large 3 / Small 4",
        ("mistral4", "mistral3", "mistral_large_3"),
        experts="experts",
        projections=_W123,
        layers=("layers", *_VISION_LAYERS),
        router="gate",
    ),
    ModelFamily("MiMo-V2", ("mimo_v2", "mimo_v2_flash"), scoring="sigmoid"),
    ModelFamily(
        "Gemma-4",
        ("gemma4", "gemma4_text"),
        experts="experts",
        stacking="halves",
        layers=_VISION_LAYERS,
        router="router.proj",
    ),
    ModelFamily(
        "Inkling",
        ("inkling", "inkling_model", "inkling_mm_model"),
        projections=("w13", "w13", "w2"),
        stacking="interleaved",
        layers=("model.layers", "model.llm.layers"),
        scoring="sigmoid",
    ),
    ModelFamily(
        "LFM2-MoE",
        ("lfm2_moe",),
        experts="feed_forward.experts",
        projections=_W123,
        router="feed_forward.gate",
        scoring="sigmoid",
    ),
    ModelFamily("AFMoE / Trinity", ("afmoe",), router="mlp.router.gate", scoring="sigmoid"),
    ModelFamily("Laguna", ("laguna",), scoring="sigmoid"),
    ModelFamily("Solar-Open", ("solar_open",), scoring="sigmoid"),
    ModelFamily("EXAONE-MoE", ("exaone_moe",), scoring="sigmoid"),
    ModelFamily("A.X-K1", ("axk1", "ax_k1"), scoring="sigmoid"),
    ModelFamily("Flint", ("flint",), scoring="sigmoid"),
    ModelFamily("Beam", ("beam",), scoring="sigmoid"),
    ModelFamily("Mellum", ("mellum",)),
    ModelFamily("Arctic", ("arctic",), **_BLOCK_SPARSE, intermediate_keys=_DENSE_SIZE),
    ModelFamily(
        "Grok",
        ("grok-1", "grok_1", "grok1", "grok_2"),
        **_BLOCK_SPARSE,
        intermediate_keys=("moe_intermediate_size", "intermediate_size"),
        activation="gelu",
    ),
    ModelFamily(
        "Aria",
        ("aria", "aria_text"),
        projections=("fc1", "fc1", "fc2"),
        stacking="transposed",
        layers=("language_model.model.layers", "model.language_model.layers"),
        router="mlp.router",
        scoring="topk-softmax",
    ),
)

_BY_TYPE = {model_type: family for family in FAMILIES for model_type in family.model_types}


def find_family(model_type: str) -> ModelFamily | None:
    """Return the family of a `model_type`, or None."""
    return _BY_TYPE.get(model_type.lower())
