"""Experts whose headers contradict each other, two stacks of one layer, and the bytes of matrices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from layouts.matrices import random_matrix
from refusing import refuses

import moeq
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.names import LayerExperts, index_experts
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec
from moeq.model.converted import _wanted_tensors
from moeq.model.describe import split_stacks
from moeq.model.expert_kinds import ExpertKind, Experts
from moeq.model.tensor_bytes import same_matrix
from moeq.schemes.format import Described

PREFIX = "model.layers.0.mlp.experts"


def layers_of(tensors: dict[str, tuple[int, ...]], dtype: str = "U8") -> list[LayerExperts]:
    return index_experts({name: TensorEntry(name, dtype, shape, "f", 0, 1) for name, shape in tensors.items()})


def experts(tensors: dict[str, tuple[int, ...]], declared: int | None = None, dtype: str = "BF16") -> Experts:
    (layer,) = layers_of({f"{PREFIX}.{name}": shape for name, shape in tensors.items()}, dtype)
    return Experts(layer, None, None, declared)


def test_numbers_of_experts() -> None:
    stack = {"gate_up_proj": (4, 8, 16), "down_proj": (4, 16, 8)}
    assert experts(stack).num_experts == 4
    assert experts(stack | {"down_proj_input_scale": (1,)}).num_experts == 4
    text = f"{PREFIX}: stacked tensors disagree about the number of experts: [3, 4]"
    with refuses("source.inconsistent", text):
        experts(stack | {"down_proj": (3, 16, 8)})
    with refuses("source.inconsistent", f"{PREFIX}: stacked tensors disagree about the number of experts: []"):
        experts({"down_proj": (1, 1, 1)})
    flat = {"mlp.w1": (32, 16), "mlp.v1": (32, 16), "mlp.w2": (32, 16)}
    found = experts(flat, 4)
    assert (found.num_experts, found.flat) == (4, True)
    for declared, rows in ((None, "[32, 32, 32]"), (5, "[32, 32, 32]")):
        with refuses("source.inconsistent", f"{PREFIX}: rows {rows} do not split into {declared} experts"):
            experts(flat, declared)
    with refuses("source.inconsistent", f"{PREFIX}: rows [32, 32, 64] do not split into 4 experts"):
        experts(flat | {"mlp.w2": (64, 16)}, 4)
    single = {f"{number}.{name}.weight": (8, 16) for number in (0, 2, 5) for name in ("w1", "w2", "w3")}
    with pytest.raises(MoeqError) as caught:
        experts(single)
    text = f"{PREFIX}: experts 0 .. 5 are named, 3 of them have no tensors: 1, 3, 4"
    assert (caught.value.code, caught.value.message) == ("source.incomplete-experts", text)


def test_sets_of_experts_are_runs_of_one_size() -> None:
    def sized(*sizes: int) -> Experts:
        return experts({f"{number}.{name}.weight": (16, size) if name == "w2" else (size, 16)
                        for number, size in enumerate(sizes) for name in ("w1", "w2", "w3")})  # fmt: skip

    assert sized(8, 8, 8, 4, 4).sets == (range(3), range(3, 5))
    assert sized(8, 4, 4, 4, 2).sets == (range(1), range(1, 4), range(4, 5))
    assert sized(8, 8, 8).sets == (range(3),)
    assert sized(8, 4, 8, 4).sets == (range(4),)  # they alternate
    assert sized(8, 8, 8, 4, 4).set_text == "experts 0-2 have 8 intermediate features, 3-4 have 4"


def test_experts_that_are_not_there() -> None:
    found = experts({f"{number}.{name}.weight": (8, 16) for number in (0, 1) for name in ("w1", "w3")})
    for expert in (-1, 2):
        with refuses("usage.no-such-expert", f"layer 0 has experts 0 .. 1, there is no {expert}"):
            found.kind(expert)
    assert found.kind(1) is found.kind(0)
    with refuses("source.incomplete-experts", "these experts have no down projection"):
        found.kind(0).projection("down")
    assert found.kind(0).projection("w13") == found.kind(0).projection("up")


def test_gate_and_up_that_cannot_share_a_matrix() -> None:
    gate = MatrixSpec("gate", 8, 64, "int4", 32, "f16")
    scheme: Any = None
    for up, fits in ((replace(gate, role="up"), True), (replace(gate, role="up", group_size=64), False)):
        kind = ExpertKind({"gate": Described(scheme, gate), "up": Described(scheme, up)}, None)
        assert kind.spec("gate") == gate
        if fits:
            assert kind.spec("w13") == replace(gate, role="w13", n=16)
            assert kind.problems() == []
            continue
        (problem,) = kind.problems()
        assert problem.startswith("gate and up projections: differ and cannot be fused: gate MatrixSpec(")


def test_stacks_of_a_decoder_and_of_what_follows_it() -> None:
    def named(*prefixes: str) -> list[LayerExperts]:
        return layers_of({f"{prefix}.experts.0.w1.weight": (1,) for prefix in prefixes})

    decoder = [f"model.layers.{number}.mlp" for number in (1, 0, 2)]
    found = split_stacks(named(*decoder, "mtp.layers.0.mlp", "mtp.layers.1.mlp", "draft.layers.0.mlp"), 2)
    assert {number: layer.layer for number, layer in found.main.items()} == {0: 0, 1: 1}
    assert [(number, layer.stack) for number, layer in found.mtp.items()] == [
        (2, "model.layers"), (3, "mtp.layers"), (4, "mtp.layers"),
    ]  # fmt: skip
    assert [layer.stack for layer in found.other] == ["draft.layers"]
    assert list(split_stacks(named(*decoder), None).main) == [0, 1, 2]
    assert list(split_stacks(named("mtp.layers.0.mlp", "mtp.layers.1.mlp", "model.layers.0.mlp"), None).mtp) == [1, 2]
    assert split_stacks([], 3).main == {}
    text = "layer 0 has two sets of experts: model.layers.0.mlp.experts and model.layers.0.other.experts"
    with refuses("source.bad-names", text):
        split_stacks(named("model.layers.0.mlp", "model.layers.0.other"), None)


def test_matrices_are_the_same_bit_for_bit() -> None:
    spec = MatrixSpec("w2", 8, 64, "int4", 32, "f16", symmetric=False, bias_dtype="f32")
    one = random_matrix(spec)
    assert one.zeros is not None
    assert same_matrix(one, replace(one, zeros=one.zeros.to(torch.uint8)))
    nan = replace(one, scales=torch.full_like(one.scales, float("nan")))
    assert same_matrix(nan, nan)
    for change in (
        {"codes": one.codes ^ 1}, {"codes": one.codes[:4]}, {"scales": one.scales.float()}, {"bias": None},
        {"zeros": None}, {"zeros": one.zeros + 1}, {"codes": one.codes.view(4, 128)},
        {"group_index": torch.zeros(64, dtype=torch.int32)},
    ):  # fmt: skip
        assert not same_matrix(one, replace(one, **change)), change
        assert not same_matrix(replace(one, **change), one), change


def test_sizes_that_no_layout_has(converted) -> None:
    checkpoint = moeq.open(converted["ct-w8a8-qwen3moe"])
    entry = checkpoint.manifest.layers[0]
    matrix = entry.matrices["w2"]
    assert _wanted_tensors(entry, matrix).keys() == matrix.tensors.keys()
    impossible = replace(matrix, spec=replace(matrix.spec, group_size=0))
    with pytest.raises(MoeqError, match="sizes are impossible: ZeroDivisionError: ") as caught:
        _wanted_tensors(entry, impossible)
    assert caught.value.code == "source.bad-manifest"
    with pytest.raises(MoeqError, match="cannot be what was written"):
        _wanted_tensors(replace(entry, layout="none/1"), matrix)


def test_parts_of_no_format_and_no_config() -> None:
    found = experts({f"{number}.{name}.strange": (8, 16) for number in (0, 1) for name in ("w1", "w2", "w3")})
    with pytest.raises(MoeqError, match="strange") as caught:
        found.kind(0)
    assert caught.value.code.startswith("source.")
