"""Packing a unit: how many experts at once, which memory they get, what a unit records, and what is a bug."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from refusing import refuses

from moeq.checkpoint.writer import NoOutput
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.layouts import words
from moeq.model.division import Shard
from moeq.model.shards import Range
from moeq.pipeline.pack.experts import BatchResult, ExpertResult, PackedParts, Packer, StoredExperts
from moeq.pipeline.pack.inputs import Buffers, bytes_for
from moeq.pipeline.pack.memory import REFERENCE_BYTES, SpareMemory
from moeq.pipeline.pack.unit_worker import Copier
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.units import CHUNK_BYTES, CopyUnit, PackUnit

NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture(scope="module")
def job(checkpoints: Path) -> Job:
    return open_job(JobRequest(str(checkpoints / NAME), Deployment(gpu=parse_gpu("A100"))))


def unit_of(job: Job, role: str = "w2") -> PackUnit:
    (found,) = (unit for unit in job.plan.units if unit.id == f"layer-0/{role}")
    assert isinstance(found, PackUnit)
    return found


def packer(job: Job, role: str = "w2") -> Packer:
    return Packer(job, unit_of(job, role), {}, NoOutput(), SpareMemory(None))


def test_one_shard_holds_everything(job: Job) -> None:
    (plan,) = job.plan.layer_of(unit_of(job)).shards
    assert plan.shard == Shard(0, Range(0, 4), Range(0, 128))


#: Stored bytes of one down projection: 256 rows and 128 columns, 4 bits, groups of 32.
STORED = [256 * 128 // 2, 4 * 256 // 2, 4 * 256 * 2, 4 * 128]


@pytest.mark.parametrize(("batch", "counts"), [(0, [1] * 4), (1, [1] * 4), (2, [2, 2]), (3, [3, 1]), (9, [4])])
def test_experts_are_packed_together(job: Job, batch: int, counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    monkeypatch.setattr(Packer, "batch_bytes", batch * sum(STORED))
    found = packer(job)
    assert [item.size for item in found.items] == counts
    assert [item.start for item in found.items] == [sum(counts[:number]) for number in range(len(counts))]
    need = Packer.need(job, unit_of(job))
    parts = [16384, 2048]  # weight and scale
    assert sorted(found._slots[0][name][1] for name in found._slots[0]) == sorted(parts)
    assert (need.way, need.reference) == ("fast", 0)
    assert need.input == 2 * bytes_for(counts[0] * STORED)
    assert need.output == 2 * bytes_for(counts[0] * parts)
    assert found._fast_path is not None
    assert need.scratch == bytes_for([found._fast_path.scratch_bytes])
    assert need.total == need.input + need.output + need.scratch


def test_the_reference_path_takes_one_expert_at_a_time(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "COMPILED_FROM", 1 << 60)
    found = packer(job)
    assert [item.size for item in found.items] == [1] * 4
    need = Packer.need(job, unit_of(job, "w13"))
    assert (need.way, need.total) == ("reference", REFERENCE_BYTES * 256 * 256)
    assert found.read(Range(0, 1), Buffers(), 0) is None


def test_names_of_items(job: Job) -> None:
    assert packer(job).label(Range(2, 3)) == "layer 0 w2 expert 2"
    assert packer(job, "w13").label(Range(1, 4)) == "layer 0 w13 experts 1 to 3"


def test_memory_of_packed_parts(job: Job) -> None:
    """Experts share a buffer if each of them begins at a word; otherwise each has its own."""
    one = packer(job)
    one._slots = [{"weight": (4096, 16), "scale": (8192, 6)}]
    found = one._outputs(Range(1, 4), Buffers(), 0)
    assert [(memory.nbytes, place) for memory, place in found.writes] == [(48, 4112), (6, 8198), (6, 8204), (6, 8210)]
    for number in range(3):
        (parts,) = found[number]
        assert {name: data.nbytes for name, data in parts.items()} == {"weight": 16, "scale": 6}
        parts["weight"].fill(number + 1)
        parts["scale"].fill(number + 11)
    whole, *others = (memory for memory, _ in found.writes)
    assert whole.tolist() == [1] * 16 + [2] * 16 + [3] * 16
    assert [set(memory.tolist()) for memory in others] == [{11}, {12}, {13}]
    start = whole.ctypes.data
    addresses = found.addresses(2)
    assert addresses[:, 0].tolist() == [start, start + 16]
    assert addresses[:, 1].tolist() == [memory.ctypes.data for memory in others[:2]]


def test_parts_of_two_shards() -> None:
    first, second = np.zeros(6, np.uint8), np.ones(8, np.uint8)
    found = PackedParts(2, [(0, "a", 3, [first]), (1, "a", 4, [second])], ())[1]
    assert [{name: data.tolist() for name, data in parts.items()} for parts in found] == [
        {"a": [0] * 3}, {"a": [1] * 4},
    ]  # fmt: skip


def test_stored_parts_of_experts() -> None:
    memory = np.arange(64, dtype=np.uint8)
    reads: Any = SimpleNamespace(offsets=np.array([0, 8, 32, 40]), sizes=np.array([3, 2, 4, 1]))
    data = StoredExperts([("down", "a"), ("down", "b")], reads, memory)
    assert {key: part.tolist() for key, part in data[1].items()} == {
        ("down", "a"): [32, 33, 34, 35], ("down", "b"): [40],
    }  # fmt: skip
    assert (data.addresses - memory.ctypes.data).tolist() == [[0, 8], [32, 40]]


def test_what_a_unit_records(job: Job) -> None:
    def expert(number: int, *kept: str) -> ExpertResult:
        return ExpertResult(10, (("down", f"d{number}"),), frozenset(kept), number, (bytes([number]),))

    batches = [BatchResult((expert(1, "b"), expert(2))), BatchResult((expert(3, "a", "b"),))]
    assert [batch.written for batch in batches] == [20, 10]
    assert list(batches[0].hashes) == [b"\1", b"\2"]
    assert packer(job)._findings(batches) == {
        "digests": {"down": ("d1", "d2", "d3")}, "kept": ("a", "b"), "losses": 6,
    }  # fmt: skip
    assert packer(job)._findings([]) == {"digests": {}, "kept": (), "losses": 0}


def test_packing_that_loses_what_it_may_not_is_a_bug(job: Job) -> None:
    one = packer(job)
    lossy: Any = SimpleNamespace(losses=lambda padded: 7)
    exact: Any = SimpleNamespace(losses=lambda padded: 0)
    padded: Any = None
    message = "layer 0 expert 3 w2: the packed bytes do not unpack to the source's values"
    for allowed, layout in ((False, lossy), (False, exact), (True, exact)):
        one._layer = SimpleNamespace(allow_lossy=allowed)  # type: ignore[assignment]
        with refuses("bug.round-trip", message, "nothing was published; report this as a bug in moeq"):
            one._lost(layout, padded, 3)
    assert one._lost(lossy, padded, 3) == 7


def test_a_part_that_does_not_fill_its_slot_is_a_bug(job: Job) -> None:
    one = packer(job)
    name, (_, size) = next(iter(one._slots[0].items()))
    for wrong in (size - 1, size + 1):
        packed = {name: torch.zeros(wrong, dtype=torch.uint8)}
        layout: Any = SimpleNamespace(id="made/1", pack=lambda padded, packed=packed: packed)
        with pytest.raises(ValueError, match=f"made/1 packs {name} into {wrong} bytes, its slot has {size}"):
            one._write(0, layout, 1, SimpleNamespace(spec=None), None, [])  # type: ignore[arg-type]


def test_copies_of_unchanged_tensors(job: Job) -> None:
    unit = next(unit for unit in job.plan.units if isinstance(unit, CopyUnit))
    need = Copier.need(job, unit)
    chunk = bytes_for([CHUNK_BYTES])
    assert (need.way, need.input, need.output, need.scratch, need.reference) == ("copy", 2 * chunk, 2 * chunk, 0, 0)
    copier = Copier(job, unit, {}, NoOutput(), SpareMemory(None))
    assert copier.label(copier.items[0]) == f"copy of {unit.source_file}"
    assert [sum(size for _, size in one.pieces) for one in copier.items] == [one.size for one in copier.items]
