"""Sources of packed experts inside an engine, whose default device and dtype are those of its model."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from load.deployments import convert
from safetensors.torch import load_file, save_file

import moeq
from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.deploy.deployment import Deployment
from moeq.engines.experts_source import ConvertedExpertsSource, PackingExpertsSource, open_experts
from moeq.errors import MoeqError
from moeq.layouts.parts import torch_dtype
from moeq.load.ranks import Rank, RankPart, plan_rank
from moeq.pipeline.in_memory import RankPacker
from moeq.pipeline.plan.layer_plan import plan_layer
from moeq.pipeline.plan.options import Ranks

SOURCES = (
    "gptq-int4-g32-qwen3moe",
    "ct-w8a8-qwen3moe",
    "mxfp4-gptoss",
    "modelopt-nvfp4-qwen3moe",
    "ct-mxfp8-qwen3moe",
    "ct-fp8-block-qwen3moe",
)


def packed(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of the first packed layer, on the CPU."""
    source = PackingExpertsSource(moeq.open(folder), logging.getLogger("test"))
    source.decide(Deployment(gpu=moeq.gpu("A100")), "all")
    entry = source.entry(next(iter(source.answer.layouts)))
    assert entry is not None
    part = plan_rank(entry, Rank(0, 1))
    shard = plan_layer(source.checkpoint, entry.layer, source.answer.layouts[entry.layer], Ranks()).shards[0]
    experts = part.experts[1] - part.experts[0]
    tensors = {
        f"{role}_{name}": torch.zeros(experts, *spec.shape, dtype=torch_dtype(spec.dtype), device="cpu")
        for role in STACKED_ROLES
        for name, spec in shard.parts[role].items()
    }
    source.fill(entry, part, Rank(0, 1), tensors)
    source.activation_scales(entry)
    return tensors


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("name", SOURCES)
def test_the_engines_default_device_and_dtype_change_nothing(name: str, checkpoints: Path) -> None:
    """No tensor that packing makes by itself may land on the device of the model: `meta` would have no values."""
    wanted = packed(checkpoints / name)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            found = packed(checkpoints / name)
    finally:
        torch.set_default_dtype(before)
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(found[key].view(torch.uint8), tensor.view(torch.uint8)), key


def test_layouts_are_decided_once_for_a_deployment(checkpoints: Path) -> None:
    source = PackingExpertsSource(moeq.open(checkpoints / SOURCES[0]), logging.getLogger("test"))
    with pytest.raises(AssertionError):
        _ = source.answer
    source.decide(Deployment(gpu=moeq.gpu("A100")), "all")
    first = source.answer
    source.decide(Deployment(gpu=moeq.gpu("A100")), "sample")
    assert source.answer is first
    assert source.prove == "all"
    source.decide(Deployment(gpu=moeq.gpu("H100")), "sample")
    assert source.answer is not first
    assert source.prove == "sample"
    assert source.backend == source.answer.backend
    assert not source.is_filling
    layers = source.answer.layouts
    assert source.entry(max(layers) + 1) is None
    assert source.names == moeq.open(checkpoints / SOURCES[0]).source.expert_names


def test_filling_begins_with_the_first_layer_alone(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = PackingExpertsSource(moeq.open(checkpoints / SOURCES[0]), logging.getLogger("test"))
    source.decide(Deployment(gpu=moeq.gpu("A100")), "sample")
    assert not source.begins_filling, "no layer was asked for"
    entries = [source.entry(layer) for layer in source.answer.layouts]
    assert len(entries) > 1
    monkeypatch.setattr(RankPacker, "pack", lambda *given: None)
    for number, entry in enumerate(entries):
        assert entry is not None
        assert (source.begins_filling, source.is_filling) == (number == 0, number > 0)
        source.fill(entry, [], Rank(0, 1), {})
    assert not source.begins_filling
    assert not source.is_filling


def test_a_folder_is_opened_as_what_it_is(checkpoints: Path, tmp_path: Path) -> None:
    log, source = logging.getLogger("test"), checkpoints / SOURCES[0]
    folder = convert(source, tmp_path / "out")
    opened = open_experts(str(folder), None, log, converted=True)
    assert isinstance(opened, ConvertedExpertsSource)
    assert isinstance(open_experts(str(source), None, log, converted=False), PackingExpertsSource)
    with pytest.raises(MoeqError) as refused:
        open_experts(str(source), None, log, converted=True)
    assert refused.value.code == "usage.not-converted"
    opened.require_arch("sm80")
    with pytest.raises(MoeqError, match="this GPU is sm90"):
        opened.require_arch("sm90")
    assert not opened.is_filling
    assert opened.backend == "MARLIN"
    assert opened.names == moeq.open(folder).source.expert_names
    last = max(moeq.open(folder).info.moe_layers)
    found = opened.entry(last)
    assert found is not None
    assert found.layer == last
    assert opened.entry(last + 1) is None
    assert not opened.begins_filling


def test_only_the_experts_of_a_rank_are_packed_while_they_load(checkpoints: Path) -> None:
    source = PackingExpertsSource(moeq.open(checkpoints / SOURCES[0]), logging.getLogger("test"))
    source.decide(Deployment(gpu=moeq.gpu("A100"), tp=2, ep=2), "sample")
    entry = source.entry(next(iter(source.answer.layouts)))
    assert entry is not None
    own = plan_rank(entry, Rank(0, 1, 1, 2))
    source.check_parts(entry, [own], Rank(0, 1, 1, 2))
    for parts in ([own, own], [plan_rank(entry, Rank(0, 1, 0, 2))], []):
        with pytest.raises(MoeqError, match="holds no replicas of other ranks") as refused:
            source.check_parts(entry, parts, Rank(0, 1, 1, 2))
        assert refused.value.code == "usage.eplb"


@pytest.mark.parametrize(
    ("fields", "rank", "number"),
    [
        ({"tp": 2, "ep": 2}, Rank(0, 1, 1, 2), 1),
        ({"tp": 2}, Rank(1, 2), 1),
        ({"tp": 2}, Rank(0, 2), 0),
        ({}, Rank(0, 1), 0),
    ],
)
def test_a_rank_is_packed_by_its_number(
    fields: dict[str, int], rank: Rank, number: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """With expert parallelism it is the number among the experts' ranks; only the first rank says how long it took."""
    source = PackingExpertsSource(moeq.open(checkpoints / SOURCES[0]), logging.getLogger("test"))
    source.decide(Deployment(gpu=moeq.gpu("A100"), **fields), "sample")
    made: list[int] = []

    class Noted(RankPacker):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(given[3])

        def pack(self, *given: Any) -> None:
            """Leave the tensors: another test packs."""

    monkeypatch.setattr("moeq.engines.experts_source.RankPacker", Noted)
    entries = [source.entry(layer) for layer in source.answer.layouts]
    with caplog.at_level(logging.INFO, "test"):
        for entry in entries:
            assert entry is not None
            source.fill(entry, [], rank, {})
    assert made == [number]
    assert ("packing the experts of" in caplog.text) is (number == 0)


def test_replicas_are_filled_one_part_after_the_other(checkpoints: Path, tmp_path: Path) -> None:
    folder = convert(checkpoints / SOURCES[0], tmp_path / "out")
    opened = open_experts(str(folder), None, logging.getLogger("test"), converted=True)
    entry = opened.entry(0)
    assert entry is not None
    whole = plan_rank(entry, Rank(0, 1))
    parts = [plan_rank(entry, Rank(0, 1, number, 2)) for number in (1, 0)]
    stored = {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}

    def filled(asked: list[RankPart]) -> dict[str, torch.Tensor]:
        tensors = {
            f"{role}_{name}": torch.zeros_like(stored[key])
            for role in STACKED_ROLES for name, key in whole.matrices[role].stored.tensors.items()
        }  # fmt: skip
        opened.fill(entry, asked, Rank(0, 1), tensors)
        return tensors

    together, swapped = filled([whole]), filled(parts)
    for name, tensor in together.items():
        assert torch.count_nonzero(tensor.view(torch.uint8))
        half = len(tensor) // 2
        turned = torch.cat([tensor[half:], tensor[:half]]).view(torch.uint8)
        assert torch.equal(swapped[name].view(torch.uint8), turned), name


def test_a_source_that_is_never_packed_is_refused_when_it_is_opened(checkpoints: Path, tmp_path: Path) -> None:
    """Experts without quantisation: there is nothing to repack."""
    name = "ct-fp8-tensor-qwen3moe"
    tensors = {
        name: tensor.bfloat16() if ".experts." in name else tensor
        for name, tensor in load_file(checkpoints / name / "model.safetensors").items()
        if ".experts." not in name or name.endswith("proj.weight")
    }
    config = json.loads((checkpoints / name / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(MoeqError, match="the experts are not quantised") as refused:
        open_experts(str(tmp_path), None, logging.getLogger("test"), converted=False)
    assert refused.value.code == "answer.nothing-to-convert"


def test_what_convert_refuses_is_refused_before_anything_is_packed(checkpoints: Path) -> None:
    source = PackingExpertsSource(moeq.open(checkpoints / SOURCES[0]), logging.getLogger("test"))
    with pytest.raises(MoeqError) as refused:
        source.decide(Deployment(gpu=moeq.gpu("A100"), tp=3), "sample")
    assert refused.value.code.startswith(("answer.", "usage."))
    with pytest.raises(AssertionError):
        _ = source.answer


def test_names_are_those_of_the_layers_that_are_packed(checkpoints: Path) -> None:
    source = PackingExpertsSource(moeq.open(checkpoints / SOURCES[0]), logging.getLogger("test"))
    source.decide(Deployment(gpu=moeq.gpu("A100")), "sample")
    source.require_arch("sm90")
    answer: Any = SimpleNamespace(question=source.answer.question, layouts={1: source.answer.layouts[1]})
    source._answer = answer
    every = source.checkpoint.source.expert_names
    assert source.names == {name for name in every if name.startswith("model.layers.1.")}
    assert source.entry(0) is None
    assert source.entry(1) is not None
