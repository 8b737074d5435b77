"""diff names the first and the worst difference, whatever the packing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable

import pytest
import torch
from checkpoint.builder import ct, ct_config, experts, router, write
from pipeline.mixing import Tensors, rewritten, with_plain_layer
from safetensors.torch import load_file, save_file

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert
from moeq.prove.diff import diff

A100 = Deployment(gpu=parse_gpu("A100"))
DOWN = "model.layers.1.mlp.experts.2.down_proj"


def test_two_conversions_of_one_source_are_equal(checkpoints, tmp_path) -> None:
    source = checkpoints / "ct-int4-asym-g32-mixtral"
    convert(source, tmp_path / "a", A100, layout="triton-wna16/1", force_layout=True)
    convert(source, tmp_path / "b", Deployment(gpu=A100.gpu, tp=4), layout="marlin-wna16/1", force_layout=True)
    for left, right in ((tmp_path / "a", tmp_path / "b"), (source, tmp_path / "a"), (tmp_path / "b", source)):
        found = diff(left, right)
        assert found.equal, found
        assert found.projections == 24


def test_the_first_and_the_worst_place(checkpoints, tmp_path) -> None:
    def change(tensors: Tensors) -> Tensors:
        scales = tensors[f"{DOWN}.weight_scale"].clone()
        scales[7, 0] *= 2
        scales[9, 0] *= 4
        return tensors | {f"{DOWN}.weight_scale": scales}

    source = checkpoints / "ct-w8a8-qwen3moe"
    other = rewritten(source, tmp_path / "other", change)
    (row,) = diff(source, other).differing
    assert row.name == "layer 1 expert 2 down"
    before = moeq.open(source).dequantize(1, 2, "down")
    nonzero = before[[7, 9]] != 0
    assert row.differing == int(nonzero.sum())
    assert (row.first.row, row.first.column) == (7, int(nonzero[0].int().argmax()))
    assert (row.first.left, row.first.right) == (float(before[7][row.first.column]), 2 * row.first.left)
    largest = torch.stack([before[7].abs(), 3 * before[9].abs()]).max()
    assert row.max_abs == pytest.approx(float(largest))
    assert row.worst.row in (7, 9)
    assert abs(row.worst.left - row.worst.right) == pytest.approx(row.max_abs)


def test_a_changed_bias_is_a_difference(checkpoints, tmp_path) -> None:
    source = checkpoints / "mxfp4-gptoss"
    shutil.copytree(source, tmp_path / "other")
    path = tmp_path / "other" / "model-00002-of-00002.safetensors"
    tensors = load_file(path)
    tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][3, 5] += 1  # row 5: up 2
    save_file(tensors, path, {"format": "pt"})
    (row,) = diff(source, tmp_path / "other").differing
    assert (row.name, row.differing, row.first.row, row.first.column) == ("layer 1 expert 3 up", 1, 2, None)
    assert row.first.text.startswith("bias [2]: ")


def test_the_last_column_beside_a_bias_is_none(checkpoints, tmp_path) -> None:
    source = checkpoints / "mxfp4-gptoss"
    name = "model.layers.1.mlp.experts.down_proj_blocks"

    def change(tensors: Tensors) -> Tensors:
        blocks = tensors[name].clone()
        blocks[3, 5, -1, -1] ^= 0x80  # the sign of the last column, of two to a byte
        return tensors | {name: blocks}

    shutil.copytree(source, tmp_path / "other")
    path = tmp_path / "other" / "model-00002-of-00002.safetensors"
    tensors = change(load_file(path))
    save_file(tensors, path, {"format": "pt"})
    (row,) = diff(source, tmp_path / "other").differing
    columns = 32 * tensors[name].shape[2]
    assert (row.name, row.first.row, row.first.column) == ("layer 1 expert 3 down", 5, columns - 1)
    assert row.first.left == -row.first.right != 0


def test_a_difference_from_zero_has_no_relative_size(checkpoints, tmp_path) -> None:
    def zero(tensors: Tensors) -> Tensors:
        return tensors | {f"{DOWN}.weight": torch.zeros_like(tensors[f"{DOWN}.weight"])}

    source = checkpoints / "ct-w8a8-qwen3moe"
    zeros = rewritten(source, tmp_path / "zeros", zero)
    (row,) = diff(zeros, source, experts_only=True).differing
    assert row.relative == float("inf")
    (row,) = diff(source, zeros, experts_only=True).differing
    assert row.relative == 1


def test_other_formats_of_one_model(checkpoints) -> None:
    found = diff(checkpoints / "gptq-int4-g32-qwen3moe", checkpoints / "gptq-int8-g64-qwen3moe")
    assert not found.equal
    assert len(found.differing) == found.projections == 24
    assert 0 < found.worst.relative < 1
    assert found.other, "the attention layers are quantised differently, too"
    alone = diff(
        checkpoints / "gptq-int4-g32-qwen3moe", checkpoints / "gptq-int8-g64-qwen3moe", experts_only=True, workers=1
    )
    assert (alone.tensors, alone.other) == (0, ())
    assert alone.differing == found.differing


def test_plain_experts_are_compared_as_they_are(checkpoints, tmp_path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    plain = rewritten(source, tmp_path / "plain", with_plain_layer(1))
    assert diff(plain, plain).equal
    assert {row.layer for row in diff(source, plain).differing} == {1}


def test_other_shapes_are_said(checkpoints, tmp_path) -> None:
    source = checkpoints / "ct-w8a8-qwen3moe"

    def change(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            if ".experts." in name and "down_proj" in name:
                found[name] = tensor[:, :64] if tensor.shape[1] > 1 else tensor
            else:
                found[name] = tensor[:64] if ".experts." in name else tensor
        return found

    other = rewritten(source, tmp_path / "other", change)
    found = diff(source, other, experts_only=True)
    assert len(found.differing) == 24
    assert found.differing[0].shapes == "[128, 256] and [64, 256]"


def test_a_folder_that_is_no_checkpoint(tmp_path, checkpoints) -> None:
    with pytest.raises(MoeqError) as caught:
        diff(tmp_path, checkpoints / "ct-w8a8-qwen3moe")
    assert caught.value.code.startswith("source.")


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("square", [True, False])
def test_quantised_modules_beside_converted_experts(tmp_path, bits: int, square: bool) -> None:
    """Their headers alone do not say how many bits they have: the converted checkpoint knows the source's config."""
    make, rows = ct(bits), 64 if square else 32
    attention = {f"model.layers.0.self_attn.q_proj.{part}": row for part, row in make(rows, 64).items()}
    source = write(tmp_path / "a", {**router(), **attention, **experts(make=make)}, ct_config(num_bits=bits))
    convert(source, tmp_path / "b", A100, layout="triton-wna16/1", force_layout=True)
    found = diff(source, tmp_path / "b")
    assert found.equal, found
    assert moeq.open(tmp_path / "b").quantization_config == moeq.open(source).quantization_config


@pytest.mark.parametrize("layout", ["source", "int8-w8a8/1"])
def test_a_difference_in_the_last_column_is_none_in_a_bias(layout: str, checkpoints, tmp_path) -> None:
    def change(tensors: Tensors) -> Tensors:
        weight = tensors[f"{DOWN}.weight"].clone()
        weight[4, -1] = 1 if int(weight[4, -1]) != 1 else 2
        return tensors | {f"{DOWN}.weight": weight}

    source = checkpoints / "ct-w8a8-qwen3moe"
    other = rewritten(source, tmp_path / "other", change)
    if layout != "source":
        other = convert(other, tmp_path / "out", A100, layout=layout, force_layout=True) and tmp_path / "out"
    (row,) = diff(source, other).differing
    last = moeq.open(source).spec(1, "down").k - 1
    assert (row.first.row, row.first.column, row.worst.column) == (4, last, last)
    assert row.first.text.startswith(f"[4, {last}]: ")


QUERY = "model.layers.0.self_attn.q_proj"


def with_plain_query(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], Tensors]:
    """Replace a quantised module (codes of ones under a scale of one) by floats."""

    def changed(tensors: Tensors) -> Tensors:
        kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(QUERY)}
        weight = torch.full((32, 64), -8.0)  # all nibbles are 0: -8 in pack-quantized
        return kept | {f"{QUERY}.weight": change(weight)}

    return changed


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda weight: weight, None),
        (lambda weight: weight.index_put((torch.tensor([31]), torch.tensor([5])), torch.tensor(-7.5)), "1 of 2,048"),
        (lambda weight: weight + torch.eye(32, 64) * 3, "32 of 2,048 numbers differ, by up to 3"),
        (lambda weight: weight[:, :63], f"{QUERY} is [32, 64] and [32, 63]"),
        (lambda weight: weight[0], f"{QUERY} is [32, 64] and no matrix"),
    ],
)
def test_a_quantised_module_and_its_plain_values(change, line: str | None, tmp_path) -> None:
    attention = {f"{QUERY}.{part}": row for part, row in ct(4)(32, 64).items()}
    source = write(tmp_path / "a", {**router(), **attention, **experts(make=ct(4))}, ct_config())
    other = rewritten(source, tmp_path / "b", with_plain_query(change))
    for left, right in ((source, other), (other, source)):
        found = diff(left, right)
        assert found.tensors == 2
        assert found.equal == (line is None)
        if line is not None and left == source:
            assert line in found.other[0]
            assert len(found.other) == 1


def test_plain_experts_in_one_tensor_of_two_halves(checkpoints, tmp_path) -> None:
    """transformers 5 stores gate and up of all experts of a Qwen3-MoE as one tensor, gate rows first."""
    single = rewritten(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "single", with_plain_layer(1))
    prefix = "model.layers.1.mlp.experts."

    def stack(swapped: bool) -> Callable[[Tensors], Tensors]:
        def changed(tensors: Tensors) -> Tensors:
            def all_of(name: str) -> torch.Tensor:
                return torch.stack([tensors[f"{prefix}{expert}.{name}_proj.weight"] for expert in range(4)])

            kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
            halves = [all_of("up"), all_of("gate")] if swapped else [all_of("gate"), all_of("up")]
            return kept | {f"{prefix}gate_up_proj": torch.cat(halves, 1), f"{prefix}down_proj": all_of("down")}

        return changed

    fused = rewritten(single, tmp_path / "fused", stack(swapped=False))
    assert diff(single, fused, experts_only=True).equal
    swapped = rewritten(single, tmp_path / "swapped", stack(swapped=True))
    wrong = diff(single, swapped, experts_only=True).differing
    assert {(row.layer, row.projection) for row in wrong} == {(1, "gate"), (1, "up")}
    assert len(wrong) == 8


def test_plain_experts_in_one_transposed_tensor_of_alternating_rows(checkpoints, tmp_path) -> None:
    """The same gpt-oss in bfloat16, which holds every MXFP4 value: `gate_up_proj` [E, K, 2 N], gate and up in turn."""
    quantized, plain = checkpoints / "mxfp4-gptoss", tmp_path / "plain"
    plain.mkdir()
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    stored = [load_file(path) for path in sorted(quantized.glob("*.safetensors"))]
    tensors = {
        name: tensor for file in stored for name, tensor in file.items() if not name.endswith(("_blocks", "_scales"))
    }
    source = moeq.open(quantized)
    for layer in (0, 1):
        prefix = f"model.layers.{layer}.mlp.experts."
        values = {
            name: torch.stack([source.dequantize(layer, expert, name) for expert in range(4)])
            for name in ("gate", "up", "down")
        }
        pairs = torch.stack([values["gate"], values["up"]], 2).flatten(1, 2)
        tensors[f"{prefix}gate_up_proj"] = pairs.transpose(1, 2).bfloat16().contiguous()
        tensors[f"{prefix}down_proj"] = values["down"].transpose(1, 2).bfloat16().contiguous()
    save_file(tensors, plain / "model.safetensors")
    assert diff(quantized, plain, experts_only=True).equal

    tensors["model.layers.1.mlp.experts.gate_up_proj_bias"][3, 4] += 1  # row 4: gate 2
    save_file(tensors, plain / "model.safetensors")
    (row,) = diff(quantized, plain, experts_only=True).differing
    assert (row.name, row.differing, row.first.row, row.first.column) == ("layer 1 expert 3 gate", 1, 2, None)


@pytest.mark.parametrize("chunk", [64, 1000, 1 << 20])
def test_a_large_tensor_is_compared_chunk_by_chunk(chunk: int, checkpoints, tmp_path, monkeypatch) -> None:
    """The same bytes are equal in any chunks, wherever the tensor lies; a change is named by its byte."""
    monkeypatch.setattr("moeq.prove.diff._CHUNK", chunk)
    name = "model.layers.0.input_layernorm.weight"

    def change(tensors: Tensors) -> Tensors:
        norm = tensors[name].clone()
        norm[70] += 1
        return tensors | {name: norm}

    source = checkpoints / "ct-w8a8-qwen3moe"
    same = rewritten(source, tmp_path / "same", lambda tensors: tensors)
    assert diff(source, same).equal
    other = rewritten(source, tmp_path / "other", change)
    (line,) = diff(source, other).other
    assert line.startswith(f"{name} differs at byte 14"), "byte 140 or 141 of numbers of two bytes"


def test_a_tensor_of_one_side(checkpoints, tmp_path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    more = rewritten(source, tmp_path / "more", lambda tensors: tensors | {"model.extra": torch.ones(3)})
    for left, right in ((source, more), (more, source)):
        found = diff(left, right)
        assert (found.differing, found.other) == ((), (f"model.extra is in {more} only",))


def test_a_container_of_experts_with_another_name(checkpoints, tmp_path) -> None:
    """Mixtral's is called `mlp` or `block_sparse_moe`: what else is in it is compared under one name."""
    source = checkpoints / "gptq-int4-g128-mixtral"

    def renamed(tensors: Tensors) -> Tensors:
        return {name.replace(".mlp.", ".block_sparse_moe."): one for name, one in tensors.items()}

    def changed(tensors: Tensors) -> Tensors:
        name = next(name for name in tensors if name.endswith(".mlp.gate.weight"))
        return renamed(tensors | {name: tensors[name] + 1})

    other, damaged = rewritten(source, tmp_path / "other", renamed), rewritten(source, tmp_path / "damaged", changed)
    for left, right in ((source, other), (other, source)):
        found = diff(left, right)
        assert found.equal, found.other
    (line,) = diff(source, damaged).other
    assert ".mlp.gate.weight" in line
