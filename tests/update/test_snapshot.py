"""Digests that kernels read out of a layer's tensors, in Triton's interpreter: those of the numbers as unpacked."""

from __future__ import annotations

import pytest
import torch
from blake3 import blake3
from layouts.pairs import CASES, LOSSY_CASES
from update.test_writer import layers_of, pack

from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.layouts.layout import Layout
from moeq.layouts.registry import get_layout
from moeq.update import snapshot

#: Cases whose layouts are index maps of numbers that are decoded one by one.
GATHERED = [
    (name, layout)
    for name, layout in [*CASES, *LOSSY_CASES]
    if getattr(type(get_layout(layout)), "unpack", None) is Layout.unpack
]


@pytest.mark.cover(every=40)
@pytest.mark.parametrize(("name", "layout"), GATHERED, ids=str)
def test_gathered_messages_are_what_the_cpu_hashes(name, layout, checkpoints, tmp_path) -> None:
    layer = layers_of(pack(checkpoints / name, tmp_path / "out", layout))[0]
    assert snapshot.is_gathered(layer)
    wanted = snapshot.read_digests(layer, (), gather=False)
    rows = slice(1, len(layer.experts))
    for role in STACKED_ROLES:
        messages, length = snapshot.messages_of(layer, role, rows)
        for i, projection in enumerate(layer.names(role)):
            for expert, message in zip(layer.experts[rows], messages[:, i], strict=True):
                assert blake3(message[:length].numpy().data).hexdigest() == wanted[expert, projection]
                assert not message[length:].any()


@pytest.mark.slow
def test_a_snapshot_by_kernels_is_that_of_the_cpu(checkpoints, tmp_path, monkeypatch) -> None:
    layer = layers_of(pack(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", "marlin-wna16/1"))[0]
    before = snapshot.read_digests(layer, ())
    layer.tensors["w2"]["weight"][1].view(torch.uint8).view(-1)[5] ^= 1
    known = {key for key in before if key[1] != "down" or key[0] > 2}
    copies: list[int] = []
    whole = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(tensor.numel()) or whole(tensor))
    found = snapshot.read_digests(layer, known, gather=True)
    assert copies == [3 * 32], "one copy back for all digests of a layer"
    assert found == {(expert, "down"): snapshot.read_digests(layer, ())[expert, "down"] for expert in range(3)}
    assert {key for key in found if found[key] != before[key]} == {(1, "down")}


def test_rows_are_read_in_runs_that_fit_the_scratch_memory(checkpoints, tmp_path, monkeypatch) -> None:
    layer = layers_of(pack(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", "marlin-wna16/1"))[0]
    rows = [0, 1, 2, 3, 5, 7]
    assert list(snapshot.runs_of(rows, layer, "w2")) == [slice(0, 4), slice(5, 6), slice(7, 8)]
    own = layer.own("w2")
    monkeypatch.setattr(snapshot, "SCRATCH_BYTES", 3 * own.n * own.k // 2)
    assert list(snapshot.runs_of(rows, layer, "w2")) == [slice(0, 3), slice(3, 4), slice(5, 6), slice(7, 8)]
    monkeypatch.setattr(snapshot, "SCRATCH_BYTES", 1)
    assert [row for run in snapshot.runs_of(rows, layer, "w2") for row in range(run.start, run.stop)] == rows
    assert list(snapshot.runs_of([], layer, "w2")) == []
