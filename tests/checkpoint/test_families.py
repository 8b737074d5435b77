"""Families: for every row of the table a small checkpoint in that family's own spelling, and what is read off it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import EXPERTS, HIDDEN, INTERMEDIATE, Stored, Tensors, experts, gptq, quantization, write

import moeq
from moeq.checkpoint.facts import Facts
from moeq.checkpoint.families import FAMILIES, find_family

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


def document_of(row: Row) -> dict[str, Any]:
    values = dict(zip(row.sizes, (EXPERTS, 1, HIDDEN, INTERMEDIATE), strict=True))
    flat = {"num_hidden_layers": 2, "hidden_act": "silu", **values, **row.keys}
    if row.names[0] == "" or "hidden_activation" in row.keys:
        del flat["hidden_act"]
    inner: dict[str, Any] = {"model_type": row.model_type}
    for key, value in flat.items():
        _put(inner, key, value)
    outer: dict[str, Any] = {"architectures": ["X"], "quantization_config": quantization()}
    if not row.nested:
        return {**outer, **inner}
    _put(outer, row.nested, inner)
    return {"model_type": "wrapper", **outer}


def _put(table: dict[str, Any], path: str, value: Any) -> None:
    *scopes, key = path.split(".")
    for scope in scopes:
        table = table.setdefault(scope, {})
    table[key] = value


def tensors_of(row: Row) -> Tensors:
    layer = row.prefix[: row.prefix.index(".1.") + 2]
    tensors = experts(row.prefix, names=row.names, hidden=row.hidden)
    tensors[f"{layer}.{row.router}"] = Stored("BF16", (EXPERTS, HIDDEN))
    if row.bias:
        tensors[f"{layer}.{row.bias}"] = Stored("F32", (EXPERTS,))
    return tensors


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.model_type)
def test_family(row: Row, tmp_path: Path) -> None:
    checkpoint = moeq.open(write(tmp_path, tensors_of(row), document_of(row)))
    info = checkpoint.info
    family = find_family(row.model_type)
    assert family is not None
    assert (info.family, info.family_from_names) == (family.title, False)
    assert (info.num_layers, info.moe_layers, info.dense_layers) == (2, (1,), (0,))
    assert (info.num_experts, info.top_k) == (EXPERTS, 1)
    assert (info.hidden_size, info.expert_input_size, info.intermediate_size) == (HIDDEN, row.hidden, INTERMEDIATE)
    assert (info.shared_experts, info.activation, info.gated) == (row.shared, row.activation, row.names[0] != "")
    rule = info.routing
    assert (rule.scoring, rule.renormalize, rule.scaling_factor) == (row.scoring, row.renormalize, row.scaling)
    assert (rule.num_groups, rule.correction_bias) == (row.groups, bool(row.bias))
    assert checkpoint.expert_prefix(1) == row.prefix
    assert checkpoint.spec(1, "w2").n == row.hidden


def test_every_family_is_exercised() -> None:
    tested = {find_family(row.model_type) for row in ROWS}
    assert {family.title for family in FAMILIES if family not in tested} == set()


def test_model_types_are_unique() -> None:
    types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(types) == len(set(types))


def test_unknown_family_is_read_off_the_names(tmp_path: Path) -> None:
    document = {"model_type": "brand_new", "quantization_config": quantization()}
    info = moeq.open(write(tmp_path, experts("model.layers.1.mlp.experts"), document)).info
    assert info.family_from_names
    assert (info.num_experts, info.hidden_size, info.intermediate_size) == (EXPERTS, HIDDEN, INTERMEDIATE)
    assert (info.num_layers, info.dense_layers) == (2, (0,))


def stacked(prefix: str, gate_up: tuple[str, tuple[int, ...]], down: tuple[str, tuple[int, ...]]) -> Tensors:
    return {f"{prefix}.{name}": Stored("BF16", shape) for name, shape in (gate_up, down)}


E, H, I = EXPERTS, HIDDEN, INTERMEDIATE  # noqa: E741 - the field's names

STACKED = (
    (
        "qwen3_5_moe_text",
        "model.language_model.layers.0.mlp.experts",
        ("gate_up_proj", (E, 2 * I, H)),
        ("down_proj", (E, H, I)),
    ),
    (
        "qwen3_vl_moe_text",
        "model.language_model.layers.0.mlp.experts",
        ("gate_up_proj", (E, H, 2 * I)),
        ("down_proj", (E, I, H)),
    ),
    (
        "llama4_text",
        "language_model.model.layers.0.feed_forward.experts",
        ("gate_up_proj", (E, H, 2 * I)),
        ("down_proj", (E, I, H)),
    ),
    (
        "granitemoe",
        "model.layers.0.block_sparse_moe",
        ("input_linear.weight", (E, 2 * I, H)),
        ("output_linear.weight", (E, H, I)),
    ),
    ("gemma4_text", "model.language_model.layers.0.experts", ("gate_up_proj", (E, 2 * I, H)), ("down_proj", (E, H, I))),
    ("inkling", "model.layers.0.mlp.experts", ("w13_weight", (E, 2 * I, H)), ("w2_weight", (E, H, I))),
    (
        "aria_text",
        "language_model.model.layers.0.mlp.experts",
        ("fc1.weight", (E, H, 2 * I)),
        ("fc2.weight", (E, I, H)),
    ),
)


@pytest.mark.parametrize(("model_type", "prefix", "gate_up", "down"), STACKED, ids=[row[0] for row in STACKED])
def test_unquantised_stacks(model_type: str, prefix: str, gate_up: Any, down: Any, tmp_path: Path) -> None:
    document = {"model_type": model_type, "hidden_size": H, "num_hidden_layers": 1, "num_experts": E}
    info = moeq.open(write(tmp_path, stacked(prefix, gate_up, down), document)).info
    assert (info.num_experts, info.expert_input_size, info.intermediate_size) == (E, H, I)
    assert not info.convertible


def test_dbrx_stacks_experts_along_rows(tmp_path: Path) -> None:
    prefix = "transformer.blocks.0.ffn.experts.mlp"
    tensors = {f"{prefix}.{name}": Stored("BF16", (E * I, H)) for name in ("w1", "v1", "w2")}
    document = {"model_type": "dbrx", "d_model": H, "n_layers": 1, "ffn_config": {"moe_num_experts": E, "moe_top_k": 1}}
    info = moeq.open(write(tmp_path, tensors, document)).info
    assert (info.num_experts, info.gated) == (E, True)


def test_two_stacks_in_one_checkpoint(tmp_path: Path) -> None:
    """Qwen3-Omni has a thinker and a talker; the larger one is the model, the other is copied."""
    tensors = experts("thinker.model.layers.0.mlp.experts") | experts("thinker.model.layers.1.mlp.experts")
    tensors |= experts("talker.model.layers.0.mlp.experts", 3)
    row = next(row for row in ROWS if row.model_type == "qwen3_omni_moe_text")
    checkpoint = moeq.open(write(tmp_path, tensors, document_of(row)))
    assert checkpoint.info.moe_layers == (0, 1)
    assert not any(name.startswith("talker") for name in checkpoint.source.expert_names)
    assert "stack.other" in {warning.code for warning in checkpoint.info.warnings}


def test_both_spellings_are_read_for_every_family(tmp_path: Path) -> None:
    """Tools on transformers 5 write gate_proj where the family says w1, and under another module."""
    row = next(row for row in ROWS if row.model_type == "mixtral")
    tensors = experts("model.layers.1.mlp.experts", make=gptq)
    assert moeq.open(write(tmp_path, tensors, document_of(row))).info.family == "Mixtral"


def test_of_two_spellings_the_one_that_transformers_takes_counts() -> None:
    """transformers 5.20.2, `LongcatFlashConfig`: the alias overwrites `expert_ffn_hidden_size` in any order."""
    family = find_family("longcat_flash")
    assert family is not None
    assert Facts({"expert_ffn_hidden_size": 64, "moe_intermediate_size": 128}).count(family.intermediate_keys) == 128
