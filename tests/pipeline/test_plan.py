"""Plans: units that cover every byte once, whoever executes them, and the document that names the job."""

from __future__ import annotations

import gc
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.checkpoint.outputs import OutputFolder
from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.plan.units import CopyUnit, PackUnit
from moeq.pipeline.run.workers import FREEZING, Executor, frozen_heap
from moeq.pipeline.state.folder import WorkFolder
from moeq.pipeline.state.publish import finish
from moeq.pipeline.state.records import UnitRecord, is_intact
from moeq.pipeline.state.stamps import job_stamp

A100 = parse_gpu("A100")
NAME = "gptq-int4-g32-qwen3moe"

#: Checkpoint, deployment, and the units of one layer.
CASES = [
    (NAME, Deployment(gpu=A100), ["layer-0/w13", "layer-0/w2"]),
    (NAME, Deployment(gpu=A100, tp=4, engine="moeq"), ["layer-0/w13", "layer-0/w2"]),
    ("gptq-int4-g128-mixtral", Deployment(gpu=A100), ["layer-0/w13", "layer-0/w2"]),
]


def job_of(checkpoints: Path, name: str, deployment: Deployment, layout: str | None = None) -> Job:
    return open_job(JobRequest(str(checkpoints / name), deployment, ConvertOptions(layout, force_layout=True)))


def tiles(spans: list[tuple[int, int]], start: int, stop: int) -> bool:
    """Whether spans cover a range, each byte once."""
    for one, two in sorted(spans):
        if one != start:
            return False
        start = two
    return start == stop


@pytest.mark.parametrize(("name", "deployment", "first"), CASES)
def test_units_write_every_byte_once_and_read_every_tensor(name, deployment, first, checkpoints) -> None:
    job = job_of(checkpoints, name, deployment)
    plan, source = job.plan, job.checkpoint.source
    for file in plan.files:
        units = [unit for unit in plan.units if unit.file == file.name]
        assert tiles([span for unit in units for span in unit.outputs], len(file.form.header), file.form.size)
        assert tiles(
            [(p.start, p.stop) for unit in units for p in plan.pieces(unit)], len(file.form.header), file.form.size
        )
    for file in source.files:
        spans = [span for unit in plan.units for span in unit.inputs.get(file.name, ())]
        first_byte = min(entry.start for entry in source.tensors.values() if entry.file == file.name)
        assert tiles(spans, first_byte, file.size)
    assert len({unit.id for unit in plan.units}) == len(plan.units)
    assert [unit.id for unit in plan.units if isinstance(unit, PackUnit) and unit.layer == 0] == first
    assert sum(unit.bytes_out for unit in plan.units) == plan.bytes_out


def test_ranks_of_tensor_parallelism_share_a_unit(checkpoints) -> None:
    """They are cut from the same experts, which are read once for all."""
    job = job_of(checkpoints, NAME, Deployment(gpu=A100, tp=4, engine="moeq"))
    (w13,) = [unit for unit in job.plan.units if unit.id == "layer-0/w13"]
    assert isinstance(w13, PackUnit)
    assert w13.ranks == (0, 1, 2, 3)
    assert w13.padding_bytes > 0, "32 features per rank are padded to 64"
    padding = job.plan.layer_of(w13).shards[0].padding
    both = [unit.padding_bytes for unit in job.plan.units if isinstance(unit, PackUnit) and unit.layer == 0]
    assert sum(both) == 4 * 4 * padding.extra_bytes


def test_ranks_of_expert_parallelism_have_units_of_their_own(checkpoints) -> None:
    """Where each rank has a packing of its own; else the experts of all are one packing."""
    ids = [f"layer-0/{role}/rank-{rank}" for role in ("w13", "w2") for rank in (0, 1)]
    job = job_of(checkpoints, NAME, Deployment(gpu=A100, ep=2), "marlin-wna16-int8act/1")
    assert [unit.id for unit in job.plan.units if unit.id.startswith("layer-0/")] == ids
    rank = job.plan.unit("layer-0/w2/rank-1")
    assert isinstance(rank, PackUnit)
    assert (rank.experts.start, rank.experts.stop, rank.ranks) == (2, 4, (1,))
    whole = job_of(checkpoints, NAME, Deployment(gpu=A100, ep=2))
    assert [unit.id for unit in whole.plan.units if unit.id.startswith("layer-0/")] == ["layer-0/w13", "layer-0/w2"]


def test_the_plan_is_the_same_every_time_and_for_everyone(checkpoints) -> None:
    one, two = (job_of(checkpoints, NAME, Deployment(gpu=A100)) for _ in "ab")
    assert one.plan.digest == two.plan.digest
    assert one.plan.units == two.plan.units
    others = [
        job_of(checkpoints, NAME, Deployment(gpu=A100, tp=2)),
        job_of(checkpoints, NAME, Deployment(gpu=A100), "triton-wna16/1"),
        job_of(checkpoints, "gptq-int8-g64-qwen3moe", Deployment(gpu=A100)),
    ]
    assert len({one.plan.digest, *(other.plan.digest for other in others)}) == 4


def _execute(request: JobRequest, digest: str, folder: Path, units: list[str]) -> list[UnitRecord]:
    executor = Executor(open_job(request, expect=digest), OutputFolder(folder))
    return [executor.execute(unit) for unit in units]


@pytest.mark.slow
def test_units_executed_by_other_processes_in_any_order(checkpoints, tmp_path) -> None:
    """Two processes that share nothing but the folder, some units done by both; then finished without executing."""
    request = JobRequest(str(checkpoints / NAME), Deployment(gpu=A100, tp=4, engine="moeq"))
    job = open_job(request)
    convert(checkpoints / NAME, tmp_path / "whole", request.deployment)
    ids = [unit.id for unit in job.plan.units]
    folder = WorkFolder(tmp_path / "out", job_stamp(job))
    with folder, multiprocessing.get_context("spawn").Pool(2) as pool:
        parts = [list(reversed(ids[:3])), ids[2:]]
        results = [pool.apply_async(_execute, (request, job.plan.digest, folder.path, part)) for part in parts]
        first, second = (result.get(120) for result in results)
        records = {record.unit: record for record in (*first, *second)}
        assert first[0] == second[0], "the same unit gives the same record"
        assert all(is_intact(job.plan, job.plan.unit(unit), record, folder.files) for unit, record in records.items())
        missing = dict(records)
        del missing["layer-0/w2"]
        with pytest.raises(MoeqError, match=r"1 of 5 units are not finished: layer-0/w2"):
            finish(job, folder, missing)
        finish(job, folder, records)
    for path in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes(), path.name
    assert moeq.verify(tmp_path / "out", checkpoints / NAME).ok


def test_an_unknown_unit_is_named(checkpoints, tmp_path) -> None:
    job = job_of(checkpoints, NAME, Deployment(gpu=A100))
    with pytest.raises(MoeqError, match="layer-9/w13"):
        Executor(job, OutputFolder(tmp_path)).execute("layer-9/w13")


def test_copies_are_cut_into_bounded_units(checkpoints, monkeypatch) -> None:
    monkeypatch.setattr("moeq.pipeline.plan.units.COPY_UNIT_BYTES", 50_000)
    plan = job_of(checkpoints, NAME, Deployment(gpu=A100)).plan
    copies = [unit for unit in plan.units if isinstance(unit, CopyUnit)]
    assert [unit.id for unit in copies] == [f"copy/model.safetensors/{n}" for n in range(len(copies))]
    assert len(copies) == 3
    assert all(unit.bytes_in == unit.bytes_out for unit in copies)
    assert all(unit.bytes_out <= 50_000 or len(unit.tensors) == 1 for unit in copies)
    names = [tensor.name for unit in copies for tensor in unit.tensors]
    assert len(set(names)) == len(names), "every tensor is in one unit"


class TestDocument:
    @pytest.fixture
    def document(self, checkpoints, tmp_path, capsys) -> dict[str, Any]:
        path = tmp_path / "plan.json"
        assert run(["plan", str(checkpoints / NAME), "--gpu", "A100", "-o", str(path)]) == 0
        text = capsys.readouterr().out
        written: dict[str, Any] = json.loads(path.read_text())
        assert written["digest"] in text
        assert "estimate" in text
        return written

    def test_what_it_says(self, document, checkpoints) -> None:
        plan = job_of(checkpoints, NAME, Deployment(gpu=A100)).plan
        assert document["schema"] == "moeq.plan/1"
        assert document["digest"] == plan.digest
        assert [row["id"] for row in document["units"]] == [unit.id for unit in plan.units]
        row = document["units"][1]
        spans = [span for spans in row["inputs"].values() for span in spans]
        assert row["bytes_in"] == sum(stop - start for start, stop in spans)
        assert row["bytes_out"] == sum(stop - start for start, stop in row["outputs"])
        assert document["totals"]["bytes_out"] == sum(unit["bytes_out"] for unit in document["units"])
        assert document["time"]["estimate"] is True
        assert document["memory"]["peak"] > document["memory"]["base"] > 0

    def test_the_disk_is_what_the_conversion_takes(self, document, checkpoints, tmp_path) -> None:
        convert(checkpoints / NAME, tmp_path / "out", Deployment(gpu=A100))
        taken = sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
        assert document["disk"]["bytes"] == pytest.approx(taken, rel=0.05)

    def test_a_dry_run_holds_the_same(self, document, checkpoints, tmp_path, capsys) -> None:
        source = str(checkpoints / NAME)
        assert run(["convert", source, str(tmp_path / "out"), "--gpu", "A100", "--dry-run", "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert {"schema": "moeq.plan/1", **answer["plan"]} == document
        assert not (tmp_path / "out").exists()

    def test_convert_does_what_was_planned_or_refuses(self, document, checkpoints, tmp_path, capsys) -> None:
        plan, out = str(tmp_path / "plan.json"), str(tmp_path / "out")
        base = ["convert", str(checkpoints / NAME), out, "--plan", plan, "--json"]
        assert run([*base, "--gpu", "A100", "--tp", "2"]) == ExitCode.USAGE
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage.other-plan"
        assert run([*base, "--gpu", "A100"]) == 0
        assert json.loads(capsys.readouterr().out)["plan_digest"] == document["digest"]

    def test_what_is_no_plan_is_refused(self, checkpoints, tmp_path, capsys) -> None:
        (tmp_path / "plan.json").write_text('{"schema": "moeq.convert/1"}')
        argv = ["convert", str(checkpoints / NAME), str(tmp_path / "out"), "--plan", str(tmp_path / "plan.json")]
        assert run([*argv, "--gpu", "A100"]) == ExitCode.USAGE
        assert "is not a plan" in capsys.readouterr().err


def test_what_was_frozen_before_stays_frozen(monkeypatch) -> None:
    """Blocks within each other count what is frozen once: it takes longer the more there is."""
    counted = []
    count = gc.get_freeze_count

    def watched() -> int:
        counted.append(count())
        return counted[-1]

    monkeypatch.setattr(gc, "get_freeze_count", watched)
    gc.unfreeze()
    surrounding = FREEZING.set(False)
    for before in (False, True):
        if before:
            gc.freeze()
        with frozen_heap():
            with frozen_heap():
                assert count() > 0
            assert count() > 0
        assert (count() > 0) == before
    assert len(counted) == 2
    FREEZING.reset(surrounding)


@pytest.mark.parametrize(("tp", "code"), [(3, "usage.tp"), (4, "usage.tp"), (2, None)])
def test_attention_heads_that_ranks_cannot_share(tp: int, code: str | None, checkpoints: Path) -> None:
    """The model has two heads: an engine cannot start with three or four ranks, whatever the experts allow."""
    request = JobRequest(str(checkpoints / NAME), Deployment(gpu=A100, tp=tp), ConvertOptions())
    if code is None:
        open_job(request)
        return
    with pytest.raises(MoeqError, match=f"2 attention heads are not divisible by tp {tp}") as caught:
        open_job(request)
    assert caught.value.code == code
