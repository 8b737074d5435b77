"""New weights of experts in a running SGLang, by the engine's own updater on one rank."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.test_reload import faulty
from engines.test_sglang_models import GROUPS, engine  # noqa: F401 - a fixture
from engines.trainer_examples import printed_digests
from load.deployments import convert
from sglang.srt.runtime_context import get_parallel
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from update.updates import Experts

import moeq
from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.engines.sglang import config as sglang_config
from moeq.engines.sglang.config import MoeqMoEMethod
from moeq.load import refill

slime_sync = import_module("slime_sync")  # from the folder that `trainer_examples` has put on the path

#: Checkpoint to its layout.
CASES = {
    "ct-int4-g128-qwen3moe": "marlin-wna16/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "mxfp4-gptoss": "marlin-mxfp4-interleaved/1",
}
Tensors = dict[str, torch.Tensor]


class Server(slime_sync.Server):
    """A model of the engine, filled and set up, with the updater that its scheduler calls."""

    def __init__(self, folder: Path, store: Path, **options: Any) -> None:
        super().__init__(folder, store, **options)
        layers = (one for one in self.model.modules() if isinstance(getattr(one, "quant_method", None), MoeqMoEMethod))
        self.experts = list(layers)

    def bytes(self, layer: int) -> Tensors:
        return {name: one.data.view(torch.uint8) for name, one in self.experts[layer].named_parameters()}


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("updates")
    return {name: convert(checkpoints / name, out / name, layout) for name, layout in CASES.items()}


@pytest.fixture
def served(
    request: pytest.FixtureRequest,
    converted: dict[str, Path],
    checkpoints: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[str, Server]]:
    """A server of the conversion, or of the source itself, which is packed while it is loaded (`NAME direct`)."""
    made = sglang_config.make_deployment
    monkeypatch.setattr(sglang_config, "make_deployment", lambda options: made({**options, "gpu": "A100"}))
    name, _, direct = request.param.partition(" ")
    options = {"quantization": "moeq"} if direct else {}
    with get_parallel().override(**{f"{group}_rank": 0 for group in GROUPS}):
        yield name, Server(checkpoints / name if direct else converted[name], tmp_path, **options)


def swapped(source: Experts) -> Tensors:
    """Experts of each layer under the names of the other one's, and a norm of ones."""
    given: Tensors = {}
    for layer in (0, 1):
        names = [name for name in source.tensors if f"layers.{layer}.mlp.experts" in name]
        others = [tensor for name, tensor in source.tensors.items() if f"layers.{1 - layer}.mlp.experts" in name]
        given |= dict(zip(names, others, strict=True))
    return {**given, "model.norm.weight": torch.ones_like(source.tensors["model.norm.weight"])}


def by_tensor(server: Server, given: Tensors, where: Path) -> tuple[bool, str]:
    return server.updater.update_weights_from_tensor(list(given.items()))


def by_bucket(server: Server, given: Tensors, where: Path) -> tuple[bool, str]:
    bucket = FlattenedTensorBucket(named_tensors=list(given.items()))
    flat = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    return server.updater.update_weights_from_tensor(flat, load_format="flattened_bucket")


def by_broadcast(server: Server, given: Tensors, where: Path) -> tuple[bool, str]:
    server.updater.begin_weight_update()
    outcome = server.updater.load_weights_from_distributed(list(given.items()))
    server.updater.end_weight_update(run_post_load=True)
    return outcome


def by_disk(server: Server, given: Tensors, where: Path) -> tuple[bool, str]:
    return server.updater.update_weights_from_disk(str(where), "auto")


def by_converted_disk(server: Server, given: Tensors, where: Path) -> tuple[bool, str]:
    layout = server.experts[0].quant_method.entry.layout
    return server.updater.update_weights_from_disk(str(convert(where, where.with_name("new"), layout)), "auto")


WAYS = {one.__name__: one for one in (by_tensor, by_bucket, by_broadcast, by_disk, by_converted_disk)}


@pytest.mark.cover
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("served", [*CASES, *(f"{name} direct" for name in CASES)], indirect=True)
def test_experts_are_the_new_checkpoints(served, way, checkpoints: Path, tmp_path: Path) -> None:
    name, server = served
    source = Experts.read(checkpoints / name)
    given = swapped(source)
    source.tensors |= {key: tensor.clone() for key, tensor in given.items()}
    new = source.save(tmp_path / "source")
    before = {layer: {key: one.clone() for key, one in server.bytes(layer).items()} for layer in (0, 1)}
    addresses = [one.data_ptr() for layer in (0, 1) for one in server.bytes(layer).values()]

    done, said = WAYS[way](server, given, new)
    assert done, said
    wanted = convert(new, tmp_path / "wanted", server.experts[0].quant_method.entry.layout)
    for layer in (0, 1):
        found, read = server.bytes(layer), moeq.load_tensors(wanted, layer)
        for role in ("w13", "w2"):
            for part, tensor in getattr(read, role).items():
                assert torch.equal(found[f"{role}_{part}"], tensor.view(torch.uint8)), (layer, role, part)
        assert any(not torch.equal(found[key], one) for key, one in before[layer].items())
    assert addresses == [one.data_ptr() for layer in (0, 1) for one in server.bytes(layer).values()]
    assert bool((server.model.model.norm.weight == 1).all())


@pytest.mark.parametrize("served", ["ct-int4-g128-qwen3moe"], indirect=True)
@pytest.mark.parametrize("lasts", [False, True], ids=["one read fails", "both passes fail"])
def test_a_folder_that_breaks_off(served, lasts, checkpoints: Path, tmp_path: Path, monkeypatch) -> None:
    """The engine reads the folder a second time after an error: it says so, and experts are whole in any case."""
    name, server = served
    source = Experts.read(checkpoints / name)
    source.tensors |= {key: tensor.clone() for key, tensor in swapped(source).items()}
    layout = server.experts[0].quant_method.entry.layout
    new = convert(source.save(tmp_path / "source"), tmp_path / "new", layout)
    before = {layer: {key: one.clone() for key, one in server.bytes(layer).items()} for layer in (0, 1)}
    monkeypatch.setattr(refill, "SCRATCH_BYTES", 1)  # one expert at a time

    def is_new(layer: int, row: int) -> bool:
        read = moeq.load_tensors(new, layer)
        wanted = {f"{role}_{part}": one for role in STACKED_ROLES for part, one in getattr(read, role).items()}
        rows = {key: one[row] for key, one in server.bytes(layer).items()}
        found = {torch.equal(rows[key], one[row].view(torch.uint8)) for key, one in wanted.items()}
        assert len(found) == 1, "each expert is old or new as a whole"
        assert found == {True} or all(torch.equal(rows[key], before[layer][key][row]) for key in rows)
        return found == {True}

    with monkeypatch.context() as context:
        for number in (22, 22 + 22) if lasts else (22,):  # the second counts what the first did not fail
            faulty(context, number)
        done, said = server.updater.update_weights_from_disk(str(new), "auto")
    assert not done
    new_ones = [(layer, row) for layer in (0, 1) for row in range(4) if is_new(layer, row)]
    if lasts:
        assert "new weights are in layer 0 and expert 0 of layer 1, old ones in all other experts" in said
        assert new_ones == [(0, row) for row in range(4)] + [(1, 0)]
    else:
        assert "again to its end, and all weights are the new ones" in said
        assert len(new_ones) == 8
    assert server.updater.update_weights_from_disk(str(new), "auto")[0]
    assert all(is_new(layer, row) for layer in (0, 1) for row in range(4))


def test_example_of_slime(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(printed_digests("slime_sync.py", capsys)) == 2


class TestRefusals:
    """They are answers of the engine: an error would end its process."""

    @pytest.fixture
    def server(self, converted: dict[str, Path], tmp_path: Path) -> Iterator[Server]:
        with get_parallel().override(**{f"{name}_rank": 0 for name in GROUPS}):
            yield Server(converted["ct-int4-g128-qwen3moe"], tmp_path)

    def refused(self, server: Server, *given: Any, **named: Any) -> str:
        before = {name: one.clone() for name, one in server.bytes(1).items()}
        done, said = server.updater.update_weights_from_tensor(*given, **named)
        assert not done
        assert all(torch.equal(one, before[name]) for name, one in server.bytes(1).items())
        return said

    def test_experts_that_do_not_fit_and_names_in_kernel_form(self, server: Server) -> None:
        assert "[3, 5]" in self.refused(server, [("model.layers.1.mlp.experts.0.down_proj.weight", torch.ones(3, 5))])
        own = "model.layers.1.mlp.experts.w2_weight"
        kernel = [(own, server.bytes(1)["w2_weight"] ^ 1)]
        assert own in self.refused(server, kernel, load_format="direct")
        assert "does not say how it is packed" in self.refused(server, kernel)

    def test_a_folder_that_is_packed_otherwise(self, server: Server, checkpoints: Path, tmp_path: Path) -> None:
        other = convert(checkpoints / "ct-int4-g128-qwen3moe", tmp_path / "other", "triton-wna16/1")
        done, said = server.updater.update_weights_from_disk(str(other), "auto")
        assert not done
        assert "triton-wna16/1" in said
