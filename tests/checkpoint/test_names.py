"""The names grammar: every spelling of expert tensors that families and tools use."""

from __future__ import annotations

import pytest
from checkpoint.builder import Stored
from refusing import refuses

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import FUSED, StoredName, index_experts
from moeq.errors import MoeqError

NAMES = [
    ("model.layers.0.mlp.experts.3.gate_proj.qweight", 0, 3, "gate", "qweight", "model.layers.0.mlp.experts"),
    (
        "model.layers.11.block_sparse_moe.experts.0.w3.scales",
        11,
        0,
        "up",
        "scales",
        "model.layers.11.block_sparse_moe.experts",
    ),
    ("layers.2.ffn.experts.255.w2.scale", 2, 255, "down", "scale", "layers.2.ffn.experts"),
    ("layers.2.experts.7.w1.weight", 2, 7, "gate", "weight", "layers.2.experts"),
    ("model.language_model.layers.5.mlp.experts.1.up_proj.weight_packed", 5, 1, "up", "weight_packed", None),
    ("language_model.model.layers.60.mlp.experts.383.down_proj.weight_shape", 60, 383, "down", "weight_shape", None),
    ("backbone.layers.1.mixer.experts.9.down_proj.weight_scale", 1, 9, "down", "weight_scale", None),
    ("model.layers.4.feed_forward.experts.2.gate_proj.weight", 4, 2, "gate", "weight", None),
    ("mtp.layers.0.mlp.experts.8.up_proj.qweight", 0, 8, "up", "qweight", "mtp.layers.0.mlp.experts"),
    ("mtp.1.ffn.experts.8.w1.weight", 1, 8, "gate", "weight", "mtp.1.ffn.experts"),
    ("model.layers.3.mlp.experts.2.gate_proj.weight.absmax", 3, 2, "gate", "weight.absmax", None),
    ("model.layers.0.mlp.experts.gate_up_proj_blocks", 0, FUSED, "gate_up", "blocks", "model.layers.0.mlp.experts"),
    ("model.layers.0.mlp.experts.down_proj_bias", 0, FUSED, "down", "bias", None),
    ("model.layers.0.mlp.experts.gate_up_proj", 0, FUSED, "gate_up", "weight", None),
    ("model.layers.0.mlp.experts.gate_up_proj_scale_inv", 0, FUSED, "gate_up", "weight_scale_inv", None),
    ("model.layers.0.feed_forward.experts.gate_up_proj_weight_scale", 0, FUSED, "gate_up", "weight_scale", None),
    ("model.language_model.layers.7.experts.gate_up_proj_packed", 7, FUSED, "gate_up", "weight_packed", None),
    ("model.layers.0.mlp.experts.w13_weight", 0, FUSED, "gate_up", "weight", None),
    ("model.layers.0.moe.gate_proj.weight_scale_inv", 0, FUSED, "gate", "weight_scale_inv", "model.layers.0.moe"),
    ("model.layers.0.block_sparse_moe.input_linear.weight", 0, FUSED, "gate_up", "weight", None),
    ("model.layers.0.mlp.switch_mlp.up_proj.scales", 0, FUSED, "up", "scales", "model.layers.0.mlp.switch_mlp"),
    ("transformer.blocks.3.ffn.experts.mlp.v1", 3, FUSED, "up", "weight", "transformer.blocks.3.ffn.experts"),
    (
        "transformer.blocks.3.ffn.experts.mlp.4.w2.weight",
        3,
        4,
        "down",
        "weight",
        "transformer.blocks.3.ffn.experts.mlp",
    ),
]


@pytest.mark.parametrize(("name", "layer", "expert", "projection", "part", "prefix"), NAMES)
def test_expert_tensors(
    name: str, layer: int, expert: int, projection: StoredName, part: str, prefix: str | None
) -> None:
    [found] = index_experts(stacked(name))
    assert (found.layer, list(found.parts)) == (layer, [(projection, part)])
    assert list(found.parts[projection, part]) == [expert]
    assert found.prefix == (prefix or found.prefix)
    assert name.startswith(found.prefix)


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.weight",
        "model.layers.0.mlp.shared_experts.gate_proj.weight",
        "model.layers.0.mlp.shared_expert_gate.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.layers.0.self_attn.q_proj.weight",
        "experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.0.norm.weight",
    ],
)
def test_everything_else(name: str) -> None:
    assert not any(layer.parts for layer in index_experts(stacked(name)))


@pytest.mark.parametrize(
    ("name", "subject", "what"),
    [
        ("model.layers.007.mlp.experts.0.w1.weight", "model.layers.007.mlp.experts", "layer number '007'"),
        ("model.layers.1000000.mlp.experts.0.w1.weight", "model.layers.1000000.mlp.experts", "layer number '1000000'"),
        ("model.layers.0.mlp.experts.007.w1.weight", None, "expert number '007'"),
        ("model.layers.0.mlp.experts.-1.w1.weight", None, "expert number '-1'"),
        ("model.layers.0.mlp.experts.1000000.w1.weight", None, "expert number '1000000'"),
    ],
)
def test_numbers_that_no_writer_produces(name: str, subject: str | None, what: str) -> None:
    with refuses("source.bad-names", f"tensor {subject or name}: {what} is not something a checkpoint writer produces"):
        index_experts(entries(name))


def test_the_largest_numbers() -> None:
    [layer] = index_experts(entries("model.layers.999999.mlp.experts.999999.w1.weight"))
    assert (layer.layer, layer.expert_ids, layer.stack) == (999999, {999999}, "model.layers")


def stacked(name: str) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, "U8", (1, 1, 1), "f", 0, 1)}


def entries(*names: str) -> dict[str, TensorEntry]:
    return {name: TensorEntry(name, "U8", (1,), "f", 0, 1) for name in names}


def test_two_spellings_of_one_projection_are_refused() -> None:
    tensors = entries("model.layers.0.mlp.experts.0.w1.weight", "model.layers.0.mlp.experts.1.gate_proj.weight")
    with pytest.raises(MoeqError, match="second spelling of the gate projection"):
        index_experts(tensors)


def test_units_and_module_names() -> None:
    prefix = "model.layers.2.mlp.experts"
    [layer] = index_experts(entries(f"{prefix}.0.w1.qweight", f"{prefix}.0.w1.scales", f"{prefix}.1.w2.qweight"))
    assert (layer.stack, layer.layer, layer.expert_ids, layer.fused) == ("model.layers", 2, {0, 1}, False)
    assert {part: entry.name for part, entry in layer.unit(0)["gate"].items()} == {
        "qweight": f"{prefix}.0.w1.qweight",
        "scales": f"{prefix}.0.w1.scales",
    }
    assert layer.module("down", 1) == f"{prefix}.1.w2"
    assert len(list(layer.tensors())) == 3


@pytest.mark.parametrize(("spelled", "role"), [("gate_up_projs", "gate_up"), ("down_projs", "down"), ("w3", "up")])
def test_a_list_of_experts_per_projection(spelled: str, role: StoredName) -> None:
    """ModelOpt and Unsloth write the number behind the projection."""
    prefix = "model.layers.1.mlp.experts"
    names = [f"{prefix}.{spelled}.{expert}.{part}" for part in ("weight", "bias") for expert in (0, 1, 2)]
    [layer] = index_experts(entries(*names))
    assert (layer.layer, layer.prefix, layer.expert_ids, layer.fused) == (1, prefix, {0, 1, 2}, False)
    found = {key: {number: entry.name for number, entry in row.items()} for key, row in layer.parts.items()}
    assert found == {(role, "weight"): dict(enumerate(names[:3])), (role, "bias"): dict(enumerate(names[3:]))}
    assert layer.module(role, 2) == f"{prefix}.{spelled}.2"
    [bare] = index_experts(entries(f"{prefix}.{spelled}.0"))
    assert list(bare.parts) == [(role, "weight")]
    for other in (f"{prefix}.0.down_proj.weight", f"{prefix}.down_proj"):
        with pytest.raises(MoeqError, match="a list of experts beside experts that are named in another way"):
            index_experts(entries(other, *names))


def test_stored_sizes() -> None:
    assert Stored("I32", (2, 3)).nbytes == 24
