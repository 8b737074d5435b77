"""Reloads that end early: each expert is old or new as a whole, the error says which are new, and a retry completes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attacks.injection import READS, ReadFault, ReadInjector
from load.deployments import convert
from update.updates import Experts

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry
from moeq.engines.experts_source import ConvertedExpertsSource
from moeq.engines.reload import ExpertReload, divert
from moeq.errors import MoeqError
from moeq.load import refill
from moeq.load.ranks import Rank, RankPart, plan_rank
from moeq.load.torch_loader import open_converted, read_parts
from moeq.update.layers import RankTensors

NAME = "ct-int4-g128-qwen3moe"
Bytes = dict[int, list[bytes]]


@dataclass
class Served:
    """A layer's tensors as an engine serves them, and the method that a reload asks."""

    experts: ConvertedExpertsSource
    entry: LayerEntry
    rank: Rank
    part: RankPart
    tensors: RankTensors
    folds_scales: bool = False

    @classmethod
    def layers(cls, folder: Path, **rank: int) -> list[Any]:
        source, place = ConvertedExpertsSource(open_converted(folder)), Rank(**rank)
        found = []
        for entry in source.checkpoint.manifest.layers:
            part = plan_rank(entry, place)
            held = {role: read_parts(source.checkpoint, entry, part, part.matrices[role]) for role in STACKED_ROLES}
            found.append(SimpleNamespace(quant_method=cls(source, entry, place, part, held)))
        return found

    def served(self, layer: Any) -> RankTensors:
        return self.tensors

    def held(self, layer: Any) -> None:
        return None

    def check_reload(self, layer: Any) -> None:
        pass


def bytes_of(layers: list[Any]) -> dict[int, Bytes]:
    """Bytes of every part of every expert, by layer and expert."""
    found = {}
    for layer in layers:
        parts = [one for role in STACKED_ROLES for one in layer.quant_method.tensors[role].values()]
        rows = enumerate(range(*layer.quant_method.part.experts))
        found[layer.quant_method.entry.layer] = {
            expert: [one[row].view(torch.uint8).numpy().tobytes() for one in parts] for row, expert in rows
        }
    return found


def new_experts(found: dict[int, Bytes], old: dict[int, Bytes], new: dict[int, Bytes]) -> list[tuple[int, int]]:
    """Layer and expert of those that are new; fails for one that is neither old nor new as a whole."""
    written = []
    for layer, experts in found.items():
        for expert, parts in experts.items():
            assert parts in (old[layer][expert], new[layer][expert]), (layer, expert, "is a mixture")
            if parts == new[layer][expert]:
                written.append((layer, expert))
    return written


def told(message: str, layers: dict[int, Bytes]) -> list[tuple[int, int]]:
    """Layer and expert of those that a message says are new."""

    def numbers(text: str) -> list[int]:
        runs = [[int(one) for one in run.split(" to ")] for run in text.split(", ")]
        return [number for run in runs for number in range(run[0], run[-1] + 1)]

    text = message.partition("new weights are in ")[2].partition(", old ones in all other experts")[0]
    some = re.search(r"experts? ([\d, to]+) of layer (\d+)$", text)
    whole = re.fullmatch(r"layers? ([\d, to]+)", text[: some.start()].removesuffix(" and ") if some else text)
    found = [(layer, expert) for layer in numbers(whole[1]) for expert in layers[layer]] if whole else []
    return found + ([(int(some[2]), expert) for expert in numbers(some[1])] if some else [])


@pytest.fixture(scope="module")
def folders(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A converted checkpoint, and one whose every expert has other weights."""
    out = tmp_path_factory.mktemp("reload")
    source = Experts.read(checkpoints / NAME)
    names = [name for name in source.tensors if "mlp.experts" in name and not name.endswith("weight_shape")]
    source.tensors |= {name: source.tensors[name].flip(0).contiguous() for name in names}
    return (
        convert(checkpoints / NAME, out / "old", "marlin-wna16/1"),
        convert(source.save(out / "source"), out / "new", "marlin-wna16/1"),
    )


def stacked(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    source = open_converted(folder).source
    for name in sorted(source.tensors):
        yield name, source.read(name)


def faulty(monkeypatch: pytest.MonkeyPatch, number: int | None, fault: ReadFault = "EIO") -> ReadInjector:
    """Count the reads of tensors from now on, and let one of them fail."""
    for name in READS:
        monkeypatch.setattr(os, name, getattr(os, name))  # puts it back at the end
    headers: dict[str, int] = {}

    def is_tensor(fd: int, position: int) -> bool:
        path = os.readlink(f"/proc/self/fd/{fd}")
        if path not in headers:
            headers[path] = 8 + int.from_bytes(Path(path).read_bytes()[:8], "little")
        return path.endswith(".safetensors") and position >= headers[path]

    injector = ReadInjector(number, fault, counts=is_tensor)
    injector.install()
    return injector


@pytest.mark.parametrize(
    "rank",
    [
        {"ep_rank": 1, "ep_size": 2},
        pytest.param({"tp_rank": 1, "tp_size": 2}, marks=pytest.mark.slow),
        pytest.param({}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_read_of_a_folder_may_fail(rank, folders, monkeypatch) -> None:
    old, new = (bytes_of(Served.layers(folder, **rank)) for folder in folders)
    monkeypatch.setattr(refill, "SCRATCH_BYTES", 1)  # one expert at a time
    layers = Served.layers(folders[0], **rank)
    tensors = list(stacked(folders[1]))

    def reload() -> None:
        list(divert(tensors, ExpertReload(layers, str(folders[1]), from_path=True)))

    with monkeypatch.context() as context:
        injector = faulty(context, None)
        reload()
    assert bytes_of(layers) == new
    counts, seen = injector.count, set()
    assert counts >= 16
    for number in range(counts):
        layers = Served.layers(folders[0], **rank)
        with monkeypatch.context() as context:
            faulty(context, number, "EIO" if number % 2 else "end")
            with pytest.raises(MoeqError) as caught:
                reload()
        assert caught.value.code.startswith("source."), caught.value
        written = new_experts(bytes_of(layers), old, new)
        assert told(caught.value.message, old) == written, caught.value.message
        assert ("same update again" in caught.value.message) == bool(written)
        seen.add(len(written))
        reload()
        assert bytes_of(layers) == new
    held = sum(len(one) for one in old.values())
    assert {0, 1, held - 1} <= seen or (0 in seen and len(seen) > 3), "ends between two experts, and between two layers"


@pytest.mark.parametrize("number", [1, 6, 14, 27])
def test_a_read_may_fail_while_other_threads_read(number, folders, monkeypatch) -> None:
    old, new = (bytes_of(Served.layers(folder)) for folder in folders)
    layers, tensors = Served.layers(folders[0]), list(stacked(folders[1]))
    monkeypatch.setattr(refill, "STAGE_BYTES", 1)  # one expert for each thread
    with monkeypatch.context() as context:
        faulty(context, number)
        with pytest.raises(MoeqError) as caught:
            list(divert(tensors, ExpertReload(layers, str(folders[1]), from_path=True)))
    written = new_experts(bytes_of(layers), old, new)
    assert told(caught.value.message, old) == written
    assert {layer for layer, _ in written} >= ({0} if number >= 16 else set())
    assert len(written) < 8
    list(divert(tensors, ExpertReload(layers, str(folders[1]), from_path=True)))
    assert bytes_of(layers) == new


def given(folders: tuple[Path, Path]) -> dict[str, torch.Tensor]:
    """The source's tensors of the new experts."""
    tensors = Experts.read(folders[1].parent / "source").tensors
    return {name: tensors[name] for name in sorted(tensors) if "mlp.experts" in name}


@pytest.mark.parametrize("part", ["gate_proj.weight_scale", "up_proj.weight_packed", "down_proj.weight_scale"])
def test_an_expert_that_is_refused_stays_old_as_a_whole(part, folders) -> None:
    old, new = (bytes_of(Served.layers(folder)) for folder in folders)
    layers, tensors = Served.layers(folders[0]), given(folders)
    name = f"model.layers.1.mlp.experts.2.{part}"
    bad = tensors[name][:-1] if "packed" in part else torch.full_like(tensors[name], float("nan"))
    with pytest.raises(MoeqError) as caught:
        list(divert((tensors | {name: bad}).items(), ExpertReload(layers, str(folders[0]))))
    assert caught.value.code in ("usage.update-tensors", "source.bad-data")
    written = new_experts(bytes_of(layers), old, new)
    assert told(caught.value.message, old) == written
    assert (0, 0) in written
    assert (1, 2) not in written
    list(divert(tensors.items(), ExpertReload(layers, str(folders[0]))))
    assert bytes_of(layers) == new


def test_an_iterator_that_fails_leaves_its_layer_old(folders) -> None:
    old, new = (bytes_of(Served.layers(folder)) for folder in folders)
    tensors = list(given(folders).items())
    second = next(i for i, (name, _) in enumerate(tensors) if "layers.1." in name)

    def cut(after: int) -> Iterator[tuple[str, torch.Tensor]]:
        yield from tensors[:after]
        raise OSError(5, "Input/output error")

    for after in (0, 1, second - 1, second, second + 1, len(tensors)):
        layers = Served.layers(folders[0])
        with pytest.raises(OSError, match="Input/output") as caught:
            list(divert(cut(after), ExpertReload(layers, str(folders[0]))))
        written = new_experts(bytes_of(layers), old, new)
        assert {layer for layer, _ in written} == ({0} if after > second else set())
        notes = getattr(caught.value, "__notes__", [])
        assert told(notes[0], old) == written if notes else not written
