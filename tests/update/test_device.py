"""Experts written by the gather kernel, in Triton's interpreter: the bytes that the CPU writes."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from update.test_writer import layers_of, pack, same_bytes
from update.updates import Experts

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert
from moeq.update.device import Gather, obstacle
from moeq.update.incoming import _fused, read_layer
from moeq.update.packing import write_all
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.index_maps import Digit, Placement
from moeq_kernels.placement import Write

CASES = {
    "gptq-int4-g32-qwen3moe": "marlin-wna16/1",
    "awq-int4-g32-qwen3moe": "triton-wna16/1",
    "ct-fp8-block-qwen3moe": "xpu-fp8-block/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "mxfp4-gptoss": "marlin-mxfp4-interleaved/1",
    "ct-mxfp4-qwen3moe": "moeq-mxfp4/1",
}


#: Checkpoints whose experts are not quantised together: they have biases, or share a factor.
APART = {"mxfp4-gptoss", "modelopt-nvfp4-qwen3moe"}


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("name", CASES)
def test_the_gather_kernel_writes_what_the_cpu_writes(name, checkpoints, tmp_path) -> None:
    experts = Experts.read(checkpoints / name)
    folder = pack(checkpoints / name, tmp_path / "out", CASES[name])
    layers, wanted = layers_of(folder), layers_of(folder)
    writer, cpu = moeq.Writer(layers.values(), gather=True), moeq.Writer(wanted.values())
    fused = "gate_up" in experts.projections
    first = (
        {name: experts.parts(0, 0, name) for name in ("gate", "up")} if not fused else experts.parts(0, 0, "gate_up")
    )
    for projection, tensors in (("gate_up" if fused else "w13", first), ("down", experts.parts(0, 0, "down"))):
        assert obstacle(layers[0], "w2" if projection == "down" else "w13") is None
        done = writer.update(0, 1, projection, tensors)
        assert done.digest is None
        cpu.update(0, 1, projection, tensors)
    assert same_bytes(layers[0], wanted[0]) == []
    assert writer.digest(0) == cpu.digest(0) == moeq.snapshot(layers[0])


@pytest.mark.parametrize("name", ["mxfp4-gptoss", "awq-int4-g32-qwen3moe"])
def test_the_default_device_of_the_caller_does_not_matter(name, checkpoints, tmp_path) -> None:
    """Engines call with the GPU as torch's default device; "meta" holds no numbers, so one tensor made there tells."""
    layers, wanted = (layers_of(pack(checkpoints / name, tmp_path / one, CASES[name])) for one in "ab")
    spec = layers[0].specs["w2"]
    weight = torch.randn(spec.n, spec.k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moeq.Writer(wanted.values(), gather=False).update(0, 1, "down", weight)
    writer = moeq.Writer(layers.values(), gather=True)
    with torch.device("meta"):
        writer.update(0, 1, "down", weight)
        digests = writer.digest(0), moeq.snapshot(layers[0])
    assert same_bytes(layers[0], wanted[0]) == []
    assert digests == (moeq.snapshot(wanted[0]),) * 2


def test_float_weights_are_quantised_on_the_device(checkpoints, tmp_path) -> None:
    name = "ct-int4-g128-qwen3moe"
    folder = pack(checkpoints / name, tmp_path / "out", "marlin-wna16/1")
    layers, wanted = layers_of(folder), layers_of(folder)
    spec = layers[0].specs["w2"]
    weight = torch.randn(spec.n, spec.k, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    moeq.Writer(layers.values(), gather=True).update(0, 0, "down", weight)
    done = moeq.Writer(wanted.values()).update(0, 0, "down", weight)
    assert same_bytes(layers[0], wanted[0]) == []
    assert 0.05 < done.loss["down"].new_scales < 0.15 < (done.loss["down"].old_scales or 0)


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("name", [*CASES, "ct-int4-g128-qwen3moe", "modelopt-nvfp4-qwen3moe"])
def test_all_experts_of_a_rank_are_written_together(name, checkpoints, tmp_path, monkeypatch) -> None:
    """The bytes that single updates write, whether one launch does it or each expert by itself."""
    folder = pack(checkpoints / name, tmp_path / "out", CASES.get(name, "marlin-wna16/1" if "int4" in name else None))
    made = torch.Generator().manual_seed(0)
    for ranks in ({}, {"ep_rank": 1, "ep_size": 2}):
        for gather in (True, False):
            layers, wanted = ({0: moeq.writable_layer(folder, 0, check_gpu=False, **ranks)} for _ in range(2))
            layer, cpu = layers[0], moeq.Writer(wanted.values(), gather=False)
            writer = moeq.Writer(layers.values(), gather=gather)
            for projection in ("w13", "down"):
                spec = layer.specs["w2" if projection == "down" else "w13"]
                shape = (len(layer.experts), spec.n // (1 if projection == "down" else 2), spec.k)
                names = ["down"] if projection == "down" else ["gate", "up"]
                weights = {one: torch.randn(shape, generator=made).to(torch.bfloat16) for one in names}
                given = weights["down"] if projection == "down" else weights
                done = writer.update_layer(0, projection, given, expected=writer.digest(0))
                assert (done.digest is None) == (gather and name not in APART)
                assert done.rows == tuple(range(len(layer.experts)))
                for row, expert in enumerate(layer.experts):
                    one = {key: tensor[row] for key, tensor in weights.items()}
                    cpu.update(0, expert, projection, one["down"] if projection == "down" else one)
            assert same_bytes(layer, wanted[0]) == []
            assert writer.digest(0) == cpu.digest(0)
            assert Gather(layer, "w2").writes_all_experts_at_once == (name not in APART)


@pytest.mark.parametrize(
    ("source", "layout", "wrong"),
    [
        (
            "ct-int4-g128-qwen3moe",
            "marlin-wna16/1",
            [
                ("down", torch.zeros(3, 256, 128), "float weights [4, 256, 128] are needed, not [3, 256, 128]"),
                ("w2", torch.zeros(4, 128, 256), "float weights [4, 256, 128] are needed, not [4, 128, 256]"),
                ("down", torch.zeros(4, 256, 128, dtype=torch.int32), "float weights [4, 256, 128] are needed"),
                ("w13", torch.zeros(4, 256, 256), "pass the weights of gate and up"),
                ("w13", {"gate": torch.zeros(4, 128, 256), "up": None}, "not NoneType"),
                ("gate", {"up": torch.zeros(4, 128, 256)}, "pass the weights of gate"),
                ("w2", {"w2": torch.zeros(4, 256, 128)}, "pass the weights of down"),
                ("down", torch.full((4, 256, 128), float("nan")), "is nan"),
            ],
        ),
        (
            "mxfp4-gptoss",
            "marlin-mxfp4-interleaved/1",
            [
                ("gate_up", torch.zeros(4, 128, 256), "float weights [4, 256, 256] are needed, not [4, 128, 256]"),
                ("gate_up", {"gate": torch.zeros(4, 128, 256)}, "pass the weights of gate_up"),
            ],
        ),
    ],
    ids=["gate and up", "gate_up"],
)
def test_weights_that_are_not_of_all_experts_are_refused(source, layout, wrong, checkpoints, tmp_path) -> None:
    folder = pack(checkpoints / source, tmp_path / "out", layout)
    layers, before = layers_of(folder), layers_of(folder)
    writer = moeq.Writer(layers.values(), gather=True)
    for projection, weights, words in wrong:
        with pytest.raises(MoeqError, match=re.escape(words)):
            writer.update_layer(0, projection, weights)
    assert same_bytes(layers[0], before[0]) == []


#: Checkpoints whose tensors the gather kernel reads as they are stored, and their layouts.
STORED = {
    "ct-int4-g128-qwen3moe": "marlin-wna16/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "ct-fp8-block-qwen3moe": "xpu-fp8-block/1",
    "ct-mxfp4-qwen3moe": "moeq-mxfp4/1",
}


def all_parts(experts: Experts, layer: int, expert: int) -> dict[str, dict[str, torch.Tensor]]:
    return {name: dict(experts.parts(layer, expert, name)) for name in ("gate", "up", "down")}


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("name", STORED)
def test_stored_tensors_are_placed_without_decoding(name, checkpoints, tmp_path, monkeypatch) -> None:
    experts = Experts.read(checkpoints / name)
    folder = pack(checkpoints / name, tmp_path / "out", STORED[name])
    layers, wanted = layers_of(folder), layers_of(folder)
    writer, cpu = moeq.Writer(layers.values(), gather=True), moeq.Writer(wanted.values())
    new = all_parts(experts, 0, 0)
    done = cpu.update_expert(0, 1, new)
    assert cpu.digest(0) == done.digest
    with monkeypatch.context() as context:
        context.delattr("moeq.update.writer.read_update")
        found = writer.update_expert(0, 1, new)
    assert found.digest is None
    assert (found.rows, found.written_bytes) == (done.rows, done.written_bytes)
    assert same_bytes(layers[0], wanted[0]) == []
    assert writer.digest(0) == done.digest == moeq.snapshot(layers[0])


def damaged(parts: dict[str, torch.Tensor], part: str, number: float) -> dict[str, torch.Tensor]:
    changed = parts[part].clone()
    changed.view(-1)[3 if changed.numel() > 3 else 1] = number
    return parts | {part: changed}


@pytest.mark.parametrize(
    ("name", "part", "number", "code"),
    [
        ("ct-int4-g128-qwen3moe", "weight_scale", float("nan"), "source.bad-data"),
        ("ct-int4-g128-qwen3moe", "weight_scale", float("-inf"), "source.bad-data"),
        ("ct-int4-g128-qwen3moe", "weight_shape", 7, "source.inconsistent"),
        ("ct-mxfp4-qwen3moe", "weight_scale", 255, "source.bad-data"),
        ("ct-mxfp4-qwen3moe", "weight_scale", 250, "usage.scale-range"),
    ],
    ids=str,
)
def test_values_that_are_refused_leave_the_whole_expert_old(name, part, number, code, checkpoints, tmp_path) -> None:
    experts = Experts.read(checkpoints / name)
    folder = pack(checkpoints / name, tmp_path / "out", STORED[name])
    kept = layers_of(folder)[0]
    for projection in ("up", "down"):
        new = all_parts(experts, 1, 2)
        new[projection] = damaged(new[projection], part, number)
        told = []
        for gather in (True, False):
            layers = layers_of(folder)
            writer = moeq.Writer(layers.values(), gather=gather)
            before = writer.digest(0)
            with pytest.raises(MoeqError) as caught:
                writer.update_expert(0, 1, new)
            told.append((caught.value.code, caught.value.message))
            assert same_bytes(layers[0], kept) == []
            assert writer.digest(0) == before
        assert told[0] == told[1]
        assert told[0][0] == code, told


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("name", ["ct-int4-g128-qwen3moe", "gptq-int4-g32-qwen3moe", "ct-mxfp4-qwen3moe"])
def test_float_weights_that_are_refused_leave_the_whole_expert_old(name, gather, checkpoints, tmp_path) -> None:
    folder = pack(checkpoints / name, tmp_path / "out", CASES.get(name, "marlin-wna16/1"))
    layers, kept = layers_of(folder), layers_of(folder)
    w13, w2 = (layers[0].specs[role] for role in ("w13", "w2"))
    made = torch.Generator().manual_seed(0)
    gate, up, down = (
        torch.randn(n, w.k, generator=made).bfloat16() for n, w in ((w13.n // 2, w13), (w13.n // 2, w13), (w2.n, w2))
    )
    writer = moeq.Writer(layers.values(), gather=gather)
    down[3, 5] = float("nan")
    with pytest.raises(MoeqError, match=re.escape("weight [3, 5] is nan")):
        writer.update_expert(0, 1, {"gate": gate, "up": up, "down": down})
    assert same_bytes(layers[0], kept[0]) == []
    down[3, 5] = 0
    writer.update_expert(0, 1, {"gate": gate, "up": up, "down": down})
    assert writer.digest(0) == moeq.snapshot(layers[0]) != moeq.snapshot(kept[0])


def test_zero_points_that_a_layout_cannot_hold_are_refused_by_the_gather_kernel(checkpoints, tmp_path) -> None:
    """GPTQ's first form stores a zero point less one, so that 16 can be said."""
    name = "gptq-int4-g32-qwen3moe"
    new = all_parts(Experts.read(checkpoints / name), 1, 2)
    new["down"]["qzeros"] = torch.full_like(new["down"]["qzeros"], -1)
    told = []
    for gather in (True, False):
        layers = layers_of(pack(checkpoints / name, tmp_path / str(gather), "triton-wna16/1"))
        kept = {part: tensor.clone() for part, tensor in layers[0].tensors["w2"].items()}
        with pytest.raises(MoeqError) as caught:
            moeq.Writer(layers.values(), gather=gather).update_expert(0, 1, new)
        told.append((caught.value.code, caught.value.message))
        assert all(torch.equal(kept[part], tensor) for part, tensor in layers[0].tensors["w2"].items())
    assert told[0] == told[1]


def test_launches_that_cannot_be_planned_take_copies_back() -> None:
    target, packed = torch.zeros(4, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    placement = Placement((Digit(1, 4, 1, False, 1),), ((0, 0),), 32)
    writes = [Write(torch.ones(1, 4, dtype=torch.int32), packed, placement, (1, 4))]
    with pytest.raises(KernelArgumentError):
        write_all([(target, torch.ones_like(target))], writes)
    assert not target.any()


def test_halves_with_padding_behind_each_are_packed_on_the_cpu(checkpoints, tmp_path) -> None:
    """A rank has 64 gate rows and 64 up rows, and scales take multiples of 128 rows of each."""
    deployment = Deployment(gpu=parse_gpu("A100"), tp=2)
    folder = tmp_path / "out"
    convert(checkpoints / "ct-mxfp4-qwen3moe", folder, deployment, layout="triton-kernels-hopper/1", force_layout=True)
    layers, wanted = ({0: moeq.writable_layer(folder, 0, tp_rank=1, tp_size=2)} for _ in range(2))
    spec, made = layers[0].specs["w13"], torch.Generator().manual_seed(0)
    weights = {name: torch.randn(spec.n // 2, spec.k, generator=made).bfloat16() for name in ("gate", "up")}
    for one, gather in ((layers, True), (wanted, False)):
        moeq.Writer(one.values(), gather=gather).update(0, 1, "w13", weights)
    assert same_bytes(layers[0], wanted[0]) == []
    assert "padding between them" in (obstacle(layers[0], "w13") or "")


def test_layouts_that_are_no_index_map_say_why(checkpoints, tmp_path) -> None:
    folder = pack(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", "cpu-amx-int8/1")
    assert "more than an index map" in (obstacle(layers_of(folder)[0], "w13") or "")


def test_rows_of_interleaved_gate_and_up_are_told_apart(checkpoints, tmp_path) -> None:
    layer = layers_of(pack(checkpoints / "mxfp4-gptoss", tmp_path / "out", "marlin-mxfp4-interleaved/1"))[0]
    weight = torch.randn(layer.specs["w13"].n, layer.specs["w13"].k, generator=torch.Generator().manual_seed(0))
    found = _fused(layer, {"weight": weight}, "compressed-tensors")
    for start, name in enumerate(("gate", "up")):
        assert torch.equal(found[name].weight, weight[start::2])  # type: ignore[index, arg-type]


def test_weights_of_fused_gate_and_up_are_put_in_the_rows_of_the_stacked_matrix(checkpoints, tmp_path) -> None:
    layer = layers_of(pack(checkpoints / "mxfp4-gptoss", tmp_path / "out", "marlin-mxfp4-interleaved/1"))[0]
    spec, held = layer.specs["w13"], len(layer.experts)
    weights = torch.arange(held * spec.n * spec.k).reshape(held, spec.n, spec.k).float()
    names, found = read_layer(layer, "gate_up", weights)
    assert names == ["gate", "up"]
    assert torch.equal(found, torch.cat([weights[:, ::2], weights[:, 1::2]], dim=1))
    assert torch.equal(read_layer(replace(layer, interleaved=False), "gate_up", weights)[1], weights)
    with pytest.raises(MoeqError) as caught:
        read_layer(replace(layer, interleaved=None), "gate_up", weights)
    assert caught.value.code == "usage.update-tensors"
