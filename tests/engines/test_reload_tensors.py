"""Whose tensors a reload takes: those of the layers that it was given, from the folder that was named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.test_reload import NAME, Served, bytes_of, folders, given, stacked
from load.deployments import convert

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.engines import reload as reload_module
from moeq.engines.experts_source import open_experts
from moeq.engines.reload import ExpertReload, divert
from moeq.errors import MoeqError
from moeq.load.ranks import plan_places
from moeq.load.torch_loader import read_parts

assert folders  # a fixture


def reloading(layers: list[Any], folder: Path, tensors: Any, **options: Any) -> list[str]:
    """Names of the tensors that are left for the model class."""
    return [name for name, _ in divert(tensors, ExpertReload(layers, str(folder), **options))]


def refused(layers: list[Any], folder: Path, tensors: Any, **options: Any) -> MoeqError:
    before = bytes_of(layers)
    with pytest.raises(MoeqError) as caught:
        reloading(layers, folder, tensors, **options)
    assert caught.value.code == "usage.reload"
    assert bytes_of(layers) == before
    return caught.value


def test_tensors_of_other_layers_and_modules_are_left_to_the_class(folders) -> None:
    """A rank of a pipeline has some of the layers."""
    second = Served.layers(folders[0])[1:]
    new = bytes_of(Served.layers(folders[1]))
    tensors = {**given(folders), "model.norm.weight": torch.ones(2), "lm_head.weight": torch.ones(2, 2)}
    left = reloading(second, folders[0], tensors.items())
    assert left == [name for name in tensors if not name.startswith("model.layers.1.mlp.experts.")]
    assert bytes_of(second)[1] == new[1]
    reload = ExpertReload(second, str(folders[0]))
    assert reload.take("model.norm.weight", torch.ones(2)) is False
    assert reload.take("model.layers.0.mlp.experts.0.down_proj.weight_scale", torch.ones(2)) is False


def test_one_tensor_a_call_is_kept_until_its_expert_is_whole(folders) -> None:
    layers, new = Served.layers(folders[0]), bytes_of(Served.layers(folders[1]))
    reload = ExpertReload(layers, str(folders[0]))
    with reload.progress:
        assert all(reload.take(name, tensor) is True for name, tensor in given(folders).items())
        reload.finish()
    assert bytes_of(layers) == new
    reload.finish()
    assert bytes_of(layers) == new


def test_stacked_tensors_are_those_of_the_folder_that_was_named(folders) -> None:
    new = bytes_of(Served.layers(folders[1]))
    layers, tensors = Served.layers(folders[0]), dict(stacked(folders[1]))
    left = reloading(layers, folders[1], tensors.items())
    assert bytes_of(layers) == new
    assert left == [name for name in tensors if ".mlp.experts." not in name]
    error = refused(Served.layers(folders[0]), folders[0], tensors.items())
    assert "is not the tensor of" in error.message
    assert str(folders[0]) in error.message
    layers = Served.layers(folders[0])
    reloading(layers, folders[1], dict(stacked(folders[0])).items(), from_path=True)
    assert bytes_of(layers) == new, "what the engine reads there is not compared"


def test_a_name_that_the_folder_does_not_have(folders, tmp_path: Path) -> None:
    layers = Served.layers(folders[0])
    reload = ExpertReload(layers, str(folders[0]))
    with pytest.raises(MoeqError, match="is not the tensor of") as caught:
        reload.folder().take("model.layers.9.mlp.experts.w13_weight", torch.ones(2))
    assert caught.value.code == "usage.reload"


def test_stacked_tensors_of_a_layer_come_together(folders) -> None:
    tensors = dict(stacked(folders[1]))
    missing = "model.layers.1.mlp.experts.w2_scale"
    some = {name: one for name, one in tensors.items() if name != missing}
    error = refused(Served.layers(folders[0]), folders[1], some.items())
    assert error.message == f"a layer's stacked tensors come together, and {missing} is missing"
    layers, new = Served.layers(folders[0]), bytes_of(Served.layers(folders[1]))
    old = bytes_of(layers)
    first = {name: one for name, one in tensors.items() if "layers.1." not in name}
    reloading(layers, folders[1], first.items())
    assert bytes_of(layers) == {0: new[0], 1: old[1]}, "a layer of which nothing came stays as it is"


@pytest.mark.parametrize(("layout", "said"), [("triton-wna16/1", "triton-wna16/1"), (None, "other sizes or groups")])
def test_a_folder_that_is_packed_otherwise(layout, said, folders, checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / (NAME if layout else "gptq-int4-g32-qwen3moe")
    other = convert(source, tmp_path / "other", layout or "marlin-wna16/1")
    error = refused(Served.layers(folders[0]), other, dict(stacked(folders[0])).items(), from_path=True)
    assert f"is packed in {said}, but the served experts are packed in marlin-wna16/1" in error.message
    assert error.message.startswith("layer 0 of ")


def test_a_layer_that_is_new_as_a_whole_is_called_so(folders, monkeypatch) -> None:
    """Also if an update ends before the first expert of the next one."""
    tensors = given(folders)
    name = "model.layers.1.mlp.experts.0.gate_proj.weight_scale"
    bad = {name: torch.full_like(tensors[name], float("nan"))}
    with pytest.raises(MoeqError, match="; new weights are in layer 0, old ones in all other experts; the same"):
        reloading(Served.layers(folders[0]), folders[0], (tensors | bad).items())
    refill = reload_module.refill_experts

    def ends(folder: Any, entry: Any, *more: Any) -> Any:
        if entry.layer == 1:
            raise MoeqError("source.io", "Input/output error")
        return refill(folder, entry, *more)

    monkeypatch.setattr(reload_module, "refill_experts", ends)
    with pytest.raises(MoeqError, match="error; new weights are in layer 0, old ones in all other experts; the same"):
        reloading(Served.layers(folders[0]), folders[1], dict(stacked(folders[1])).items())


def test_scales_that_were_folded_stay(folders) -> None:
    layers = Served.layers(folders[0])
    layers[1].quant_method.folds_scales = True
    for tensors in (given(folders), dict(stacked(folders[1]))):
        error = refused(layers, folders[1], tensors.items())
        assert error.message.startswith("layer 1: beside e4m3 activations")
    reload = ExpertReload(layers, str(folders[0]))
    assert reload.take("model.norm.weight", torch.ones(2)) is False


def test_experts_that_were_moved_are_written_where_they_are(folders) -> None:
    """Rows of load balancing: replicas, in any order."""
    places = (3, 1, 1, 0)
    wanted = bytes_of(Served.layers(folders[1]))

    def layers() -> list[Any]:
        found = Served.layers(folders[0])
        for layer in found:
            method = layer.quant_method
            method.held = lambda layer: places
            parts = plan_places(method.entry, method.rank, places)
            read = [
                {role: read_parts(method.experts.checkpoint, method.entry, part, part.matrices[role])
                 for role in STACKED_ROLES}
                for part in parts
            ]  # fmt: skip
            method.tensors = {
                role: {name: torch.cat([one[role][name] for one in read]) for name in read[0][role]}
                for role in STACKED_ROLES
            }
        return found

    for folder, tensors in ((folders[1], dict(stacked(folders[1]))), (folders[0], given(folders))):
        moved = layers()
        reloading(moved, folder, tensors.items())
        for number, rows in bytes_of(moved).items():
            assert [rows[row] for row in range(4)] == [wanted[number][expert] for expert in places]


def test_which_names_count_as_stacked(folders, checkpoints: Path) -> None:
    layers = Served.layers(folders[0])
    stacked_names = {name for name in dict(stacked(folders[0])) if ".mlp.experts." in name}
    assert ExpertReload(layers, str(folders[0])).stacked == stacked_names
    source = open_experts(str(checkpoints / NAME), None, logging.getLogger("test"), converted=False)
    for layer in layers:  # packed while it was loaded: names that the source has too are the source's
        entry = layer.quant_method.entry
        first = min(entry.tensors)
        layer.quant_method.experts = type("Source", (), {"checkpoint": source.checkpoint, "names": {first}})()
    firsts = {min(layer.quant_method.entry.tensors) for layer in layers}
    assert ExpertReload(layers, str(folders[0])).stacked == stacked_names - firsts
