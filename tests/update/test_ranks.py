"""Experts written on every rank of a deployment: the bytes that the rank reads of a fresh conversion."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from update.test_writer import same_bytes, sizes_of
from update.updates import Experts, changes, write

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline.convert import convert
from moeq.update.layers import WritableLayer

CASES = [
    ("gptq-int4-g32-qwen3moe", "triton-wna16/1", "tp"),  # one file that ranks cut
    ("gptq-int4-g32-qwen3moe", "marlin-wna16/1", "tp"),
    ("ct-int4-asym-g32-mixtral", "marlin-wna16/1", "tp"),
    ("ct-w8a8-qwen3moe", "int8-w8a8/1", "tp"),
    ("mxfp4-gptoss", "marlin-mxfp4-interleaved/1", "tp"),  # written rank by rank, padded, with biases
    ("ct-mxfp4-qwen3moe", "moeq-mxfp4/1", "tp"),
    ("gptq-int4-g32-qwen3moe", "marlin-wna16/1", "ep"),
]


def ranks_of(folder: Path, axis: str) -> list[list[WritableLayer]]:
    checkpoint = moeq.open(folder)
    return [
        [
            moeq.writable_layer(checkpoint, entry.layer, **{f"{axis}_rank": rank, f"{axis}_size": 2})
            for entry in checkpoint.manifest.layers
        ]
        for rank in range(2)
    ]


@pytest.mark.cover(every=7)
@pytest.mark.parametrize(("name", "layout", "axis"), CASES, ids=str)
def test_every_rank_writes_its_part(name, layout, axis, checkpoints, tmp_path) -> None:
    deployment = Deployment(gpu=parse_gpu("A100"), **{axis: 2})
    experts = Experts.read(checkpoints / name)

    def packed(source: Path, out: Path) -> list[list[WritableLayer]]:
        convert(source, out, deployment, layout=layout, force_layout=True, allow_lossy=True)
        return ranks_of(out, axis)

    served = packed(checkpoints / name, tmp_path / "before")
    writers = [moeq.Writer(layers, deployment) for layers in served]
    sizes = sizes_of(served[0][0])
    for change in changes(experts, sizes, 3, 8):
        spans = {"rows": change.rows, "columns": change.columns}
        done = [writer.update(change.layer, change.expert, *change.target, **spans) for writer in writers]
        assert sum(len(one.rows) for one in done) == (1 if axis == "ep" else 2)
        write(experts, sizes, change)
    fresh = packed(experts.save(tmp_path / "source"), tmp_path / "after")
    for rank, layers in enumerate(served):
        for number, layer in enumerate(layers):
            assert same_bytes(layer, fresh[rank][number]) == []
            assert writers[rank].digest(layer.layer) == moeq.snapshot(layer)


def test_a_writer_for_another_deployment_is_refused(checkpoints, tmp_path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    deployment = Deployment(gpu=parse_gpu("A100"), tp=2)
    convert(source, tmp_path / "out", deployment, layout="triton-wna16/1", force_layout=True)
    layers = ranks_of(tmp_path / "out", "tp")[0]
    with pytest.raises(MoeqError, match="tp 1, the tensors tp 2") as caught:
        moeq.Writer(layers, Deployment(gpu=parse_gpu("A100")))
    assert caught.value.code == "usage.update-target"


@pytest.mark.slow
def test_redundant_experts_are_written_in_every_row(converted, checkpoints) -> None:
    name = "gptq-int4-g32-qwen3moe"
    experts, layer = Experts.read(checkpoints / name), moeq.writable_layer(converted[name], 0)
    twice = {
        role: {part: torch.cat([tensor, tensor[1:2]]) for part, tensor in parts.items()}
        for role, parts in layer.tensors.items()
    }
    redundant = replace(layer, experts=(*layer.experts, 1), tensors=twice)
    done = moeq.Writer([redundant]).update(0, 1, "down", experts.parts(0, 0, "down"))
    assert done.rows == (1, layer.num_experts)
    for tensor in redundant.tensors["w2"].values():
        assert torch.equal(tensor[1], tensor[-1])
        assert torch.equal(tensor[1], tensor[0])


def test_smaller_groups_than_the_source_are_written(checkpoints, tmp_path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    experts, deployment = Experts.read(source), Deployment(gpu=parse_gpu("A100"))

    def packed(folder: Path, out: Path) -> WritableLayer:
        convert(folder, out, deployment, layout="triton-wna16/1", force_layout=True, regroup=16)
        return moeq.writable_layer(out, 0)

    layer = packed(source, tmp_path / "before")
    writer, parts = moeq.Writer([layer]), experts.parts(0, 0, "down")
    writer.update(0, 1, "down", parts)
    half = {"qweight": parts["qweight"][:8], "scales": parts["scales"][:2], "qzeros": parts["qzeros"][:2]}
    writer.update(0, 2, "down", half, columns=(0, 64))
    for name, tensor in parts.items():
        experts.parts(0, 1, "down")[name].copy_(tensor)
    for name, tensor in half.items():
        experts.parts(0, 2, "down")[name][: len(tensor)] = tensor
    fresh = packed(experts.save(tmp_path / "source"), tmp_path / "after")
    assert same_bytes(layer, fresh) == []
    assert writer.digest(0) == moeq.snapshot(layer) == moeq.Writer([fresh]).digest(0)


@pytest.mark.parametrize("gather", [True, False])
def test_an_expert_of_another_rank_is_judged_and_not_written(gather: bool, converted, checkpoints) -> None:
    name = "gptq-int4-g32-qwen3moe"
    experts = Experts.read(checkpoints / name)
    layer = moeq.writable_layer(converted[name], 0, ep_rank=1, ep_size=2)
    before = {role: {part: one.clone() for part, one in parts.items()} for role, parts in layer.tensors.items()}
    writer = moeq.Writer([layer], Deployment(gpu=parse_gpu("A100"), ep=2), gather=gather)
    digest = writer.digest(0)
    parts = experts.parts(0, 3, "down")
    done = writer.update(0, 0, "down", parts)
    assert (done.rows, done.written_bytes, done.digest) == ((), 0, digest)
    with pytest.raises(MoeqError):
        writer.update(0, 0, "down", {**parts, "scales": parts["scales"][1:]})
    for role, held in before.items():
        assert all(torch.equal(layer.tensors[role][part], one) for part, one in held.items())  # type: ignore[index]
