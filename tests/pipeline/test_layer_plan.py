"""The layers of a plan: what is refused because a stack holds one kind of matrix, and how a matrix is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import Tensors, config, ct, ct_config, experts, gptq, quantization, router, write
from refusing import refuses

import moeq
from moeq.checkpoint.writer import tensor_bytes
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.matrix import MatrixSpec
from moeq.pipeline.loss_probe import _loss, find_loss
from moeq.pipeline.plan.decide import _rank_bytes, _regrouped, _sizes
from moeq.pipeline.plan.layer_plan import _written_specs, describe, plan_layer
from moeq.pipeline.plan.options import ConvertOptions, Question, Ranks

A100 = Deployment(gpu=parse_gpu("A100"))


def test_experts_that_cannot_be_stacked(tmp_path: Path) -> None:
    """Both are named, and how many have the second encoding."""
    table = ct_config()["quantization_config"]
    (group,) = table["config_groups"].values()
    wide = {**group, "targets": [r"re:.*experts\.[12]\..*"], "weights": {**group["weights"], "num_bits": 8}}
    table = {**table, "config_groups": {"group_0": group, "group_1": wide}}
    four = {name: one for name, one in experts(count=3, make=ct(4)).items() if ".0." in name.partition("experts")[2]}
    eight = {
        name: one for name, one in experts(count=3, make=ct(8)).items() if ".0." not in name.partition("experts")[2]
    }
    document = config(quantization_config=table, num_experts=3)
    made = moeq.open(write(tmp_path, {**router(count=3), **four, **eight}, document))
    message = (
        "layer 0 cannot be stacked: w13 of expert 0 is int4 g64 symmetric [64, 64] bf16, of expert 1 int8 g64 "
        "symmetric [64, 64] bf16 (2 of 3 experts)"
    )
    hint = "re-quantise the layer with one scheme for all its experts"
    with refuses("usage.mixed-experts", message, hint):
        plan_layer(made, 0, "marlin-wna16/1", Ranks(), ConvertOptions())


def test_two_group_sizes_are_not_made_one(tmp_path: Path) -> None:
    def make(n: int, k: int) -> Tensors:
        return gptq(n, k, group=16 if n == 32 else 32)

    groups = {"-:x": {}, r"+:.*(gate|up)_proj": {"group_size": 16}}
    document = config(quantization_config=quantization(dynamic=groups))
    made = moeq.open(write(tmp_path, {**router(), **experts(make=make)}, document))
    assert [made.spec(0, role).group_size for role in ("w13", "w2")] == [16, 32]
    specs, group = _written_specs(made, 0, ConvertOptions(regroup=None))
    assert (specs["w13"].group_size, specs["w2"].group_size, group) == (16, 32, None)
    specs, group = _written_specs(made, 0, ConvertOptions(regroup=32))
    assert (specs["w13"].group_size, group) == (16, None)
    message = "layer 0 cannot be regrouped: w13 has groups of 16, w2 of 32"
    with refuses("usage.regroup", message, "leave out regroup"):
        _written_specs(made, 0, ConvertOptions(regroup=8))


def test_smaller_groups_are_written(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden": 64, "intermediate": 64}
    made = moeq.open(write(tmp_path, {**router(), **experts(**sizes)}, config(moe_intermediate_size=64)))
    specs, group = _written_specs(made, 0, ConvertOptions(regroup=16))
    assert ({spec.group_size for spec in specs.values()}, group) == ({16}, 32)


def test_floats_in_one_phrase() -> None:
    assert describe(MatrixSpec("w2", 64, 32, "bf16", 32, "f32")) == "not quantised [64, 32] bf16"


@pytest.mark.parametrize(
    ("name", "layout", "lossy", "told"),
    [
        ("ct-fp8-tensor-qwen3moe", "flashinfer-cutlass-fp8-tensor/1", False, True),
        ("ct-fp8-tensor-qwen3moe", "flashinfer-cutlass-fp8-tensor/1", True, False),
        ("gptq-int4-g32-qwen3moe", "marlin-wna16/1", False, False),
    ],
)
def test_a_loss_is_told_before_it_happens(
    checkpoints: Path, name: str, layout: str, lossy: bool, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be lost, or losses are allowed, no weight is read."""
    made = moeq.open(checkpoints / name)
    options = ConvertOptions(allow_lossy=lossy)
    found = _loss(made, plan_layer(made, 0, layout, Ranks(), options))
    assert (found is not None) == told
    if found is not None:
        assert found.code == "answer.lossy"
        assert found.message.startswith("layer 0 expert 0: ")
    both = find_loss(made, Question(A100, options), {0: layout, 1: layout})
    assert str(both) == str(found)

    def unread(*given: Any) -> None:
        raise AssertionError("no weight is to be read")

    monkeypatch.setattr(type(made), "matrix", unread)
    if not told:
        assert _loss(made, plan_layer(made, 0, layout, Ranks(), options)) is None


def test_what_else_is_wrong_is_told_where_it_happens(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = moeq.open(checkpoints / "ct-fp8-tensor-qwen3moe")
    plan = plan_layer(made, 0, "flashinfer-cutlass-fp8-tensor/1", Ranks(), ConvertOptions())

    def broken(*given: Any) -> None:
        raise moeq.MoeqError("source.bad-data", "x")

    monkeypatch.setattr(type(made), "matrix", broken)
    assert _loss(made, plan) is None


def test_layouts_that_are_calibrated_are_not_tried(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their factor depends on all experts, of which only the first is read."""
    made = moeq.open(checkpoints / "ct-nvfp4-qwen3moe")
    plan = plan_layer(made, 0, "marlin-nvfp4/1", Ranks(), ConvertOptions())
    assert type(plan.layout).lossy is not None
    assert plan.layout.calibration_scope is not None
    monkeypatch.setattr(type(made), "matrix", None)
    assert _loss(made, plan) is None


@pytest.mark.parametrize(
    ("layout", "tp", "ep", "written", "share", "sizes"),
    [
        ("mxfp4-identity/1", 1, 1, "unsharded", 1, (256, 128, 4)),
        ("mxfp4-identity/1", 2, 1, "unsharded", 2, (256, 64, 4)),
        ("mxfp4-identity/1", 1, 4, "unsharded", 4, (256, 128, 1)),
    ],
)
def test_bytes_of_a_rank(
    checkpoints: Path, layout: str, tp: int, ep: int, written: str, share: int, sizes: tuple[int, int, int]
) -> None:
    """Ranks of expert parallelism share the experts, others their intermediate features."""
    made = moeq.open(checkpoints / "mxfp4-gptoss")
    ranks = Ranks(tp, ep)
    plan = plan_layer(made, 0, layout, ranks)
    assert plan.entry.sharding is not None
    assert plan.entry.sharding.written == written
    (whole,) = plan.shards
    nbytes = sum(tensor_bytes(*row) for row in whole.tensors().values())
    assert _rank_bytes(plan, ranks) == nbytes // share
    found = _sizes(plan, ranks)
    assert (found.hidden, found.intermediate, found.local_experts) == sizes


def test_the_scheme_of_smaller_groups(checkpoints: Path) -> None:
    made = moeq.open(checkpoints / "gptq-int4-g128-mixtral").scheme_of(0)
    assert _regrouped(made, None) is None
    assert _regrouped(made, 128) is None
    found = _regrouped(made, 32)
    assert found is not None
    assert found.weight.scale.group_shape == (1, 32)
    assert found.group_size == 32
