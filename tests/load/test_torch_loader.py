"""`moeq.load_experts`: the right bytes, no others, and a reason for every refusal."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from load.deployments import LAYOUTS, convert, reference_layer

import moeq
from moeq.checkpoint.manifest import STACKED_ROLES, CopiedLayer
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout
from moeq.load import rank_reading
from moeq.load.packed_sample import load_packed
from moeq.load.rank_reading import Window, part_cuts, read_experts, read_shards
from moeq.load.ranks import Rank, plan_rank
from moeq.load.torch_loader import (
    check_groups,
    expert_map,
    fill_parts,
    open_converted,
    read_parts,
    uneven_unit,
)
from moeq.matrix import MatrixSpec
from moeq_kernels import KernelUnsupportedError, fused_moe, prepare
from moeq_kernels.hopper.w4a8.fold import folded

OAI = {"activation": "swiglu_oai", "limit": 7.0}


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(5, 256, generator=generator).to(torch.bfloat16)
    weights = torch.softmax(torch.randn(5, 2, generator=generator), -1)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(5)])
    return x, weights, ids


def run(experts, name: str, batch, **more) -> torch.Tensor:
    x, weights, ids = batch
    return fused_moe(x, experts, weights, ids, **(OAI if "gptoss" in name else {}), **more).float()


def close(actual: torch.Tensor, expected: torch.Tensor, relative: float) -> bool:
    return bool((actual - expected).norm() <= relative * expected.norm())


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_the_layer_is_that_of_the_source(name, converted, checkpoints, batch) -> None:
    experts = moeq.load_experts(converted[name], 1)
    expected = reference_layer(moeq.open(checkpoints / name), 1, *batch)
    # int8 activations are rounded per token; 16-bit ones to 8 bits of mantissa.
    assert close(run(experts, name, batch), expected, 0.03 if "w8a8" in name else 0.01)


@pytest.mark.parametrize(("name", "activation"), [("mxfp4-gptoss", OAI), ("gptq-int4-g32-qwen3moe", {})])
def test_4_bit_weights_ask_for_e4m3_activations_where_that_is_asked(name, activation, converted) -> None:
    experts = moeq.load_experts(converted[name], 1, activation_dtype="fp8")
    assert (experts.w13.activation_dtype, experts.name) == ("fp8", "layer 1")
    options = {"top_k": 2, "max_tokens": 64, **activation}
    with pytest.raises(KernelUnsupportedError, match=r"fp8 activations beside .* x is on cpu"):  # Hopper alone has them
        prepare(experts, **options)
    assert prepare(experts, activation_dtype="", **options).family == "portable"


def test_scales_of_a_real_quantiser_lie_close_enough_to_be_folded(converted) -> None:
    experts = moeq.load_experts(converted["mxfp4-gptoss"], 1)
    assert not bool((folded(experts).w13.exponent_shift > 4 * 14).any())


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("name", ["gptq-int4-g32-qwen3moe", "awq-int4-g32-qwen3moe", "ct-w8a8-qwen3moe"])
def test_tensor_parallel_ranks_sum_to_the_whole(name, converted, batch) -> None:
    checkpoint = moeq.open(converted[name])
    whole = run(moeq.load_experts(checkpoint, 0), name, batch)
    ranks = [moeq.load_experts(checkpoint, 0, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert all(rank.intermediate_size == 64 and rank.num_experts == 4 for rank in ranks)
    summed = sum(run(rank, name, batch) for rank in ranks)
    # Each rank rounds its output to bf16, and int8 activations get a scale per rank.
    assert close(summed, whole, 0.03 if "w8a8" in name else 0.01)


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("name", ["mxfp4-gptoss", "gptq-int4-g32-qwen3moe"])
@pytest.mark.parametrize("sizes", [(1, 2), (1, 3), (2, 2)])
def test_expert_parallel_ranks_sum_to_the_whole(name, sizes, converted, batch) -> None:
    checkpoint = moeq.open(converted[name])
    tp, ep = sizes if name != "mxfp4-gptoss" else (1, sizes[1])
    whole = run(moeq.load_experts(checkpoint, 0), name, batch)
    summed = torch.zeros_like(whole)
    held = 0
    for ep_rank in range(ep):
        for tp_rank in range(tp):
            where = {"tp_rank": tp_rank, "tp_size": tp, "ep_rank": ep_rank, "ep_size": ep}
            experts = moeq.load_experts(checkpoint, 0, **where)
            held += experts.num_experts
            summed += run(experts, name, batch, expert_map=expert_map(4, ep_rank, ep))
    assert held == 4 * tp
    assert close(summed, whole, 0.01)


def test_a_bias_of_down_is_added_once(checkpoints, tmp_path, batch) -> None:
    folder = convert(checkpoints / "mxfp4-gptoss", tmp_path / "out", tp=2)
    ranks = [moeq.load_experts(folder, 0, tp_rank=rank, tp_size=2) for rank in (0, 1)]
    assert ranks[0].w2.bias.any()
    assert not ranks[1].w2.bias.any()
    expected = reference_layer(moeq.open(checkpoints / "mxfp4-gptoss"), 0, *batch)
    assert close(sum(run(rank, "mxfp4-gptoss", batch) for rank in ranks), expected, 0.01)


def test_a_sliced_rank_equals_one_written_for_it(checkpoints, tmp_path) -> None:
    """The same bytes made in two ways: sliced from one packing, and packed rank by rank."""
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    checkpoint = open_converted(convert(checkpoints / source.source.name, tmp_path / "out"))
    entry = checkpoint.manifest.layer(0)
    layout = get_layout(entry.layout)
    for rank in (0, 1):
        part = plan_rank(entry, Rank(rank, 2))
        for role in STACKED_ROLES:
            found = read_parts(checkpoint, entry, part, part.matrices[role])
            for expert in range(4):
                shard = _shard(source.matrix(0, expert, role), rank)
                for name, tensor in layout.pack(shard).items():
                    assert torch.equal(found[name][expert], tensor), (role, name, expert)


@pytest.mark.parametrize("name", ["gptq-int4-g32-qwen3moe", "mxfp4-gptoss"])
def test_tensors_of_another_dtype_are_filled_with_converted_values(name, converted) -> None:
    checkpoint = open_converted(converted[name])
    entry = checkpoint.manifest.layer(1)
    part = plan_rank(entry, Rank(0, 1))
    for role in STACKED_ROLES:
        stored = read_parts(checkpoint, entry, part, part.matrices[role])
        for dtype in (None, torch.float64):
            filled = {key: torch.full_like(one, 1, dtype=dtype or one.dtype) for key, one in stored.items()}
            fill_parts(checkpoint, entry, part, part.matrices[role], filled)
            for key, tensor in stored.items():
                wanted = tensor if dtype is None else tensor.to(dtype)
                assert torch.equal(filled[key].view(torch.uint8), wanted.view(torch.uint8)), (role, key, dtype)


def _shard(matrix, rank):
    from moeq.model.shards import Range, shard_matrix

    return shard_matrix(matrix, Range(64 * rank, 64 * rank + 64), first=rank == 0)


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_cuts_are_what_slice_parts_gives(name, converted) -> None:
    checkpoint = open_converted(converted[name])
    entry = checkpoint.manifest.layer(0)
    layout = get_layout(entry.layout)
    for role, matrix in entry.matrices.items():
        spec = matrix.padded_spec
        rule = layout.slices(spec)
        half = spec.n // (2 if role == "w13" else 1)
        windows = [Window((start, stop), (0, spec.k)) for start, stop in _ranges(half, rule.n)]
        windows += [Window((0, half), part) for part in _ranges(spec.k, rule.k) if part[1] - part[0] >= rule.k_least]
        for window in windows:
            cuts = part_cuts(entry.layout, spec, window)
            for expert in (0, 3):
                whole = {
                    part: checkpoint.source.read_row(checkpoint.source.entry(tensor), expert)
                    for part, tensor in matrix.tensors.items()
                }
                for part, wanted in layout.slice_parts(whole, spec, n=window.n, k=window.k).items():
                    found = read_shards(checkpoint.source, matrix.tensors[part], (expert, expert + 1), cuts[part])
                    assert torch.equal(found[0].view(torch.uint8), wanted.contiguous().view(torch.uint8)), (role, part)


def _ranges(size: int, unit: int | None) -> list[tuple[int, int]]:
    return [] if unit is None else [(start, start + unit) for start in range(0, size, unit)][:4]


def test_only_the_bytes_of_a_rank_are_read(converted, monkeypatch) -> None:
    checkpoint = moeq.open(converted["gptq-int4-g32-qwen3moe"])
    read: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read.append(preadv(fd, views, at)) or read[-1])
    moeq.load_experts(checkpoint, 0)
    whole, reads = sum(read), len(read)
    assert reads == 4, "one read per stacked tensor"
    read.clear()
    moeq.load_experts(checkpoint, 0, ep_rank=1, ep_size=4)
    assert sum(read) == whole // 4
    read.clear()
    w2 = checkpoint.manifest.layer(0).matrices["w2"]
    moeq.load_experts(checkpoint, 0, tp_rank=1, tp_size=2)
    stored = {name: checkpoint.source.entry(tensor).nbytes for name, tensor in w2.tensors.items()}
    w13 = whole - sum(stored.values())
    # w2's rows of tiles lie together; w13's alternate with the other rank's within pages, all but the ends.
    assert sum(read) <= sum(stored.values()) / 2 + w13


class TestRefusals:
    name = "gptq-int4-g32-qwen3moe"

    def refused(self, *args, **options) -> MoeqError:
        with pytest.raises(MoeqError) as caught:
            moeq.load_experts(*args, **options)
        return caught.value

    def test_a_source(self, checkpoints) -> None:
        error = self.refused(checkpoints / self.name, 0)
        assert error.code == "usage.not-converted"
        assert "moeq convert" in (error.hint or "")

    def test_ranks_that_do_not_exist(self, converted) -> None:
        assert self.refused(converted[self.name], 0, tp_rank=2, tp_size=2).code == "usage.rank"
        assert self.refused(converted[self.name], 0, ep_rank=0, ep_size=5).code == "usage.ep"

    def test_a_degree_that_cuts_groups(self, converted) -> None:
        error = self.refused(converted[self.name], 0, tp_rank=0, tp_size=8)
        assert error.code == "usage.group-cut"
        assert "128 / 8 = 16" in error.message

    def test_a_degree_that_cuts_tiles(self, converted) -> None:
        error = self.refused(converted[self.name], 0, tp_rank=0, tp_size=4)
        assert error.code == "usage.tp"
        assert "--tp 4" in (error.hint or "")

    def test_ranks_written_for_another_degree(self, checkpoints, tmp_path) -> None:
        folder = convert(checkpoints / "mxfp4-gptoss", tmp_path / "out", tp=2)
        error = self.refused(folder, 0)
        assert error.code == "usage.tp"
        assert "written rank by rank for tp 2" in error.message
        assert error.hint == "run it with tp 2, or convert it for 1: moeq convert SRC DST --tp 1"
        assert self.refused(folder, 0, tp_rank=3, tp_size=4).code == "usage.tp"
        both = self.refused(folder, 0, tp_rank=1, tp_size=2, ep_rank=2, ep_size=9)
        assert both.code == "usage.ep"

    def test_experts_written_for_another_degree(self, checkpoints, tmp_path) -> None:
        folder = convert(checkpoints / "modelopt-nvfp4-qwen3moe", tmp_path / "out", "marlin-nvfp4/1", ep=2)
        checkpoint = open_converted(folder)
        entry = checkpoint.manifest.layer(0)
        assert (entry.sharding.axis, len(entry.ranks)) == ("ep", 2)
        with pytest.raises(MoeqError) as caught:
            plan_rank(entry, Rank(ep_rank=2, ep_size=4))
        assert caught.value.code == "usage.ep"
        assert caught.value.hint == "run it with ep 2, or convert it for 4: moeq convert SRC DST --ep 4"
        with pytest.raises(MoeqError) as caught:
            plan_rank(entry, Rank(tp_rank=1, tp_size=3))
        assert caught.value.hint == "run it with ep 2, or convert it for 3: moeq convert SRC DST --tp 3"
        with pytest.raises(MoeqError) as caught:
            plan_rank(entry, Rank(tp_rank=1, tp_size=2, ep_rank=1, ep_size=2))
        assert caught.value.hint == "run it with ep 2, or convert it for 2: moeq convert SRC DST --tp 2"
        part = plan_rank(entry, Rank(ep_rank=1, ep_size=2))
        assert (part.experts, part.rows) == ((1, 2), (0, 1))
        loaded = load_packed(checkpoint, entry, [1, 0], torch.device("cpu"))
        assert [one.local.tolist() for one in loaded] == [[-1, 0], [0, -1]]

    def test_ranks_of_act_order(self, checkpoints, tmp_path) -> None:
        name = "gptq-int4-g32-actorder-qwen3moe"
        folder = convert(checkpoints / name, tmp_path / "out", tp=2)
        error = self.refused(folder, 0, tp_rank=1, tp_size=2)
        assert error.code == "answer.no-kernel"
        assert "--ep" in (error.hint or "")

    def test_groups_that_a_shard_does_not_have(self, converted) -> None:
        entry = open_converted(converted[self.name]).manifest.layer(0)
        part = plan_rank(entry, Rank())
        matrix = part.matrices["w2"]
        own = matrix.spec.k // matrix.spec.group_size

        def check(all_groups: int | None) -> None:
            changed = replace(matrix, spec=replace(matrix.spec, all_groups=all_groups))
            check_groups(entry, replace(part, matrices={**part.matrices, "w2": changed}))

        check(None)
        check(own)
        with pytest.raises(MoeqError, match=f"shard of w2 with act-order keeps all {own + 1} groups") as caught:
            check(own + 1)
        assert caught.value.code == "answer.no-kernel"

    def test_a_layer_that_is_not_there(self, converted) -> None:
        assert self.refused(converted[self.name], 7).code == "usage.no-such-layer"

    def test_a_layer_that_was_copied(self, converted) -> None:
        checkpoint = open_converted(converted[self.name])
        checkpoint.manifest = replace(checkpoint.manifest, copied=(CopiedLayer(7, "its experts are float"),))
        error = self.refused(checkpoint, 7)
        assert error.code == "usage.copied-layer"
        assert error.message == "the experts of layer 7 were copied unchanged: its experts are float"
        moeq.load_experts(checkpoint, 0)

    def test_a_dtype_that_the_kernel_does_not_take(self, converted) -> None:
        error = self.refused(converted["mxfp4-gptoss"], 0, dtype=torch.float16)
        text = "layer 0: activations are float16, and the kernel of marlin-mxfp4-interleaved/1 takes bfloat16"
        assert (error.code, error.message) == ("usage.dtype", text)
        moeq.load_experts(converted[self.name], 0, dtype=torch.float16)

    def test_e4m3_activations_beside_weights_without_a_kernel_for_them(self, converted) -> None:
        error = self.refused(converted["gptq-int8-g64-qwen3moe"], 0, activation_dtype="fp8")
        assert error.code == "answer.no-kernel"
        assert "marlin-mxfp4/1" in (error.hint or "")
        error = self.refused(converted[self.name], 0, activation_dtype="fp4")
        text = "unknown activation_dtype 'fp4'"
        assert (error.code, error.message, error.hint) == ("usage.dtype", text, "known: fp8, or nothing")

    def test_a_layout_without_a_kernel(self, checkpoints, tmp_path) -> None:
        folder = convert(checkpoints / self.name, tmp_path / "out", layout="humming-wna16/1")
        error = self.refused(folder, 0)
        assert error.code == "answer.no-kernel"
        assert "--engine moeq" in (error.hint or "")

    def test_changed_bytes_on_request(self, converted, tmp_path) -> None:
        folder = tmp_path / "changed"
        shutil.copytree(converted[self.name], folder)
        moeq.load_experts(folder, 0, verify=True)
        entry = moeq.open(folder).source.entry("model.layers.0.mlp.experts.w2_weight")
        with (folder / entry.file).open("r+b") as file:
            file.seek(entry.start)
            byte = file.read(1)[0]
            file.seek(entry.start)
            file.write(bytes([byte ^ 1]))
        error = self.refused(folder, 0, verify=True)
        assert (error.code, error.message) == (
            "source.digest-mismatch",
            "layer 0: 1 of 12 digests differ from the manifest: expert 0 down",
        )
        moeq.load_experts(folder, 1, verify=True)

    def test_a_manifest_that_lies_about_sizes(self, converted, tmp_path) -> None:
        folder = tmp_path / "lies"
        shutil.copytree(converted[self.name], folder)
        manifest = json.loads((folder / "moeq.json").read_text())
        manifest["layers"][0]["matrices"]["w2"]["padded_k"] = 256
        (folder / "moeq.json").write_text(json.dumps(manifest))
        assert self.refused(folder, 0).code == "source.bad-manifest"


class TestReading:
    name = "gptq-int4-g32-qwen3moe"

    def tensor(self, converted: dict[str, Path]) -> tuple[Any, str]:
        checkpoint = open_converted(converted[self.name])
        return checkpoint.source, checkpoint.manifest.layer(1).matrices["w13"].tensors["weight"]

    @pytest.mark.parametrize("stage", [1 << 20, 16384, 1000])
    @pytest.mark.parametrize("staged", [False, True])
    def test_piece_by_piece_gives_the_same_bytes(self, stage, staged, converted, monkeypatch) -> None:
        """Straight and by buffers, as to a GPU; pieces that divide the tensor, that do not, and one that holds all."""
        source, name = self.tensor(converted)
        rows = torch.stack([source.read_row(source.entry(name), row) for row in (1, 2)])
        spec = open_converted(converted[self.name]).manifest.layer(1).matrices["w13"].padded_spec
        cut = part_cuts("marlin-wna16/1", spec, Window(n=(64, 128), k=(0, 256)))["weight"]
        shards = read_shards(source, name, (1, 3), cut)
        fill = rank_reading._by_pieces
        monkeypatch.setattr(rank_reading, "STAGE_BYTES", stage)
        monkeypatch.setattr(rank_reading, "_by_pieces", lambda *given: fill(*given, staged=staged))
        assert torch.equal(read_experts(source, name, (1, 3)), rows)
        assert torch.equal(read_shards(source, name, (1, 3), cut), shards)

    def test_tensors_that_fit_are_filled_and_others_replaced(self, converted) -> None:
        source, name = self.tensor(converted)
        wanted = read_experts(source, name, (0, 2))
        fits, wrong = torch.zeros_like(wanted), torch.zeros(wanted.shape, dtype=torch.int64)
        assert read_experts(source, name, (0, 2), into=fits) is fits
        assert torch.equal(fits, wanted)
        assert read_experts(source, name, (0, 2), into=wrong) is not wrong
        assert int(wrong.sum()) == 0

    @pytest.mark.gpu
    def test_on_a_gpu(self, converted) -> None:
        source, name = self.tensor(converted)
        found = read_experts(source, name, (0, 4), torch.device("cuda"))
        assert torch.equal(found.cpu(), read_experts(source, name, (0, 4)))
        shard, wanted = (
            moeq.load_experts(converted[self.name], 1, device=device, tp_rank=1, tp_size=2, check_gpu=False)
            for device in ("cuda", "cpu")
        )
        assert torch.equal(shard.w13.weight.cpu(), wanted.w13.weight)
        assert torch.equal(shard.w2.scale.cpu(), wanted.w2.scale)


def test_an_opened_checkpoint_goes_to_another_process(converted, batch, tmp_path) -> None:
    """vLLM starts its engine with a pickled config, which holds the opened checkpoint; files stay watched there."""
    folder = shutil.copytree(converted["gptq-int4-g32-qwen3moe"], tmp_path / "dst")
    opened = open_converted(str(folder))
    expected = run(moeq.load_experts(opened, 0), "gptq", batch)
    sent = pickle.loads(pickle.dumps(opened))
    assert torch.equal(run(moeq.load_experts(sent, 0), "gptq", batch), expected)
    for file in folder.glob("*.safetensors"):
        file.write_bytes(file.read_bytes())
    with pytest.raises(MoeqError) as refused:
        moeq.load_experts(sent, 0)
    assert refused.value.code == "source.changed"


def test_the_map_of_experts_of_a_rank() -> None:
    assert expert_map(5, 1, 2).tolist() == [-1, -1, -1, 0, 1]
    assert expert_map(5, 0, 2).dtype == torch.int32
    with pytest.raises(MoeqError, match="ep rank 2 of 2"):
        expert_map(5, 2, 2)


def test_parts_of_more_than_64_kib_are_cut(converted) -> None:
    """Positions of bytes are spelled in as many bytes as they need."""
    layout, spec = get_layout("marlin-wna16/1"), MatrixSpec("w2", 256, 1024, "int4", 32, "f16")
    generator = torch.Generator().manual_seed(0)
    whole = {
        name: torch.randint(0, 256, (torch.Size(one.shape).numel() * (4 if name == "weight" else 2),),
                            dtype=torch.uint8, generator=generator)
        for name, one in layout.tensors(spec).items()
    }  # fmt: skip
    window = Window((0, 256), (512, 1024))
    packed = {
        name: raw.view(torch.int32 if name == "weight" else torch.float16).view(layout.tensors(spec)[name].shape)
        for name, raw in whole.items()
    }
    wanted = layout.slice_parts(packed, spec, n=window.n, k=window.k)
    for name, cut in part_cuts("marlin-wna16/1", spec, window).items():
        assert cut.spans is not None
        bytes_of = [
            whole[name][span.start : span.stop]
            if span.chosen is None
            else whole[name][span.start : span.stop].view(-1, span.width)[torch.from_numpy(span.chosen)].flatten()
            for span in cut.spans
        ]
        assert torch.equal(torch.cat(bytes_of), wanted[name].contiguous().view(-1).view(torch.uint8))


def test_a_bias_that_another_rank_adds_is_zero(converted) -> None:
    checkpoint = open_converted(converted["mxfp4-gptoss"])
    entry = checkpoint.manifest.layer(0)
    part = plan_rank(entry, Rank())
    for zero in (False, True):
        found = read_parts(checkpoint, entry, part, replace(part.matrices["w2"], zero_bias=zero))
        assert (bool(found["bias"].any()), bool(found["weight"].any())) == (not zero, True)


def test_parts_that_a_shard_computes_anew_are_cut_in_memory(checkpoints, tmp_path) -> None:
    """Zero points of symmetric weights are the same word everywhere, which tells no position."""
    checkpoint = open_converted(convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", "rdna3-int4/1"))
    entry, layout = checkpoint.manifest.layer(0), get_layout("rdna3-int4/1")
    part = plan_rank(entry, Rank(1, 2, 1, 2))
    assert part.rows == (2, 4)
    for role, matrix in part.matrices.items():
        assert matrix.window is not None
        found = read_parts(checkpoint, entry, part, matrix)
        whole = read_parts(checkpoint, entry, part, replace(matrix, window=None))
        for row in range(2):
            one = {name: tensor[row] for name, tensor in whole.items()}
            cut = layout.slice_parts(one, matrix.stored.padded_spec, n=matrix.window.n, k=matrix.window.k)
            assert cut.keys() == found.keys()
            assert all(torch.equal(found[name][row], tensor) for name, tensor in cut.items()), (role, row)


def test_experts_that_follow_each_other_are_not_copied(converted, monkeypatch) -> None:
    """A copy of a layer would not fit beside it on a full GPU."""
    folder = converted["gptq-int4-g32-qwen3moe"]
    wanted = moeq.load_experts(folder, 0)
    monkeypatch.setattr(torch, "cat", None)
    found = moeq.load_experts(folder, 0)
    assert torch.equal(found.w13.weight, wanted.w13.weight)
    assert torch.equal(found.w2.scale, wanted.w2.scale)


@pytest.mark.parametrize(
    ("name", "unit"), [("mxfp4-gptoss", 32), ("ct-mxfp4-qwen3moe", None), ("gptq-int4-g32-qwen3moe", None)]
)
def test_formats_that_engines_cut_in_uneven_blocks(name: str, unit: int | None, checkpoints) -> None:
    """Ranks of gpt-oss hold whole groups of 32, the last ones fewer; every other format is cut evenly."""
    assert uneven_unit(moeq.open(checkpoints / name), 0) == unit
