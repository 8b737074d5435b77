"""Families: for every row of the table a small checkpoint in that family's own spelling, and what is read off it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import EXPERTS, HIDDEN, INTERMEDIATE, Stored, Tensors, experts, gptq, quantization, write
from checkpoint.family_rows import ROWS, Row

import moeq
from moeq.checkpoint.facts import Facts
from moeq.checkpoint.families import FAMILIES, find_family


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
