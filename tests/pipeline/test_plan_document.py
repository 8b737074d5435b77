"""The document of a plan: what it says of the job, and what a conversion reads of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import write

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout
from moeq.pipeline.pack.memory import REFERENCE_BYTES
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.plan_document import _beside_bytes, _stream, needs_of, plan_document, read_plan, write_plan
from moeq.pipeline.run.resources import RATES, plan_memory
from moeq.pipeline.run.streaming import schedule
from moeq.transcode.planned_result import _PlannedSource

INT4 = "gptq-int4-g32-qwen3moe"


def planned(source: Path, gpu: str = "A100", **options: Any) -> tuple[Job, dict[str, Any]]:
    deployment = Deployment(gpu=parse_gpu(gpu))
    job = open_job(JobRequest(str(source), deployment, ConvertOptions(force_layout="layout" in options, **options)))
    return job, plan_document(job, needs_of(job, plan_memory(job, job.plan.units, 2, None)))


@pytest.mark.parametrize(
    ("layout", "lossy", "told"),
    [
        ("marlin-wna16-fp8act/1", False, True),
        ("marlin-wna16-fp8act/1", True, False),
        ("marlin-wna16/1", False, False),
    ],
)
def test_what_a_layout_would_round_is_told_unless_it_may(
    layout: str, lossy: bool, told: bool, checkpoints: Path
) -> None:
    job, document = planned(checkpoints / INT4, "L40S", layout=layout, allow_lossy=lossy)
    assert document["rounding"] == (get_layout(layout).lossy if told else None)
    assert document["layouts"] == [layout]
    assert document["overridden"] == list(job.answer.overridden)


def test_totals_are_those_of_files_and_units(checkpoints: Path) -> None:
    job, document = planned(checkpoints / INT4)
    files, units, totals = document["files"], document["units"], document["totals"]
    assert (totals["files"], totals["units"]) == (len(files), len(units)) == (len(job.plan.files), len(job.plan.units))
    assert totals["bytes_in"] == sum(one["bytes_in"] for one in units)
    assert totals["bytes_out"] == job.plan.bytes_out
    assert totals["expert_bytes_out"] + totals["rest_bytes"] <= totals["bytes_out"]
    assert [one["layer"] for one in files if one["layer"] is not None] == [0, 1]
    assert all(one["bytes"] == job.plan.file(one["name"]).form.size for one in files)
    assert document["disk"]["bytes"] > sum(one["bytes"] for one in files)
    assert document["memory"]["peak"] == plan_memory(job, job.plan.units, 2, None).peak
    assert document["time"]["estimate"] is True
    assert sorted(document["time"]["assumed_bytes_per_second_and_worker"].values()) == sorted(map(int, RATES.values()))
    assert document["stream_source"] is None
    assert document["source"]["identity"] == job.checkpoint.source.identity()


def test_a_plan_is_read_back_with_its_request(checkpoints: Path, tmp_path: Path) -> None:
    job, document = planned(checkpoints / INT4)
    path = tmp_path / "plan.json"
    write_plan(path, document)
    found = read_plan(path)
    assert (found.digest, found.request) == (job.plan.digest, job.request)
    older = json.loads(path.read_text())
    del older["request"]
    path.write_text(json.dumps(older))
    assert (read_plan(path).digest, read_plan(path).request) == (job.plan.digest, None)
    for damage in (
        {"schema": "moeq.plan/0"},
        {"digest": 5},
        {"digest": None},
        {"request": []},
        {"request": {"src": 1}},
    ):
        path.write_text(json.dumps({**older, **damage}))
        with pytest.raises(MoeqError) as caught:
            read_plan(path)
        assert caught.value.code == "usage.plan-file"


def test_what_is_fetched_is_counted() -> None:
    units: list[Any] = [frozenset({"a", "b"}), frozenset({"b", "c"})]
    found = schedule(units, lambda unit: unit, {"a": 5, "b": 7, "c": 11})
    assert _stream(found) == {"files": 3, "fetched_bytes": 23, "peak_bytes": 18}


def test_every_entry_of_a_small_plan(tmp_path: Path) -> None:
    """Two experts of one layer: each stack is a unit, and what is copied is another."""
    folder = write(tmp_path / "made")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "old.bin").write_bytes(bytes(1000))
    job, document = planned(folder)
    plan, source = job.plan, job.checkpoint.source
    needs = needs_of(job, plan_memory(job, plan.units, 2, None))
    header = sum(file.size for file in source.files) - sum(entry.nbytes for entry in source.tensors.values())
    sides = (folder / "config.json").stat().st_size + 2
    assert needs.disk_bytes == sum(file.form.size for file in plan.files) + header + sides
    rates = {unit.id: RATES["copy" if "copy" in unit.id else "reference"] for unit in plan.units}
    seconds = sum(unit.bytes_in / rates[unit.id] for unit in plan.units) / needs.memory.workers
    assert needs.seconds == pytest.approx(seconds)
    assert document["time"]["seconds"] == round(seconds, 1)
    assert document["time"]["assumed_bytes_per_second_and_worker"].keys() == {"road", "general", "copy"}
    for role in ("w13", "w2"):
        (row,) = (row for row in document["units"] if row["id"] == f"layer-0/{role}")
        unit = next(unit for unit in plan.units if unit.id == row["id"])
        assert {key: row[key] for key in ("layer", "role", "experts", "ranks", "way")} == {
            "layer": 0, "role": role, "experts": [0, 2], "ranks": [0], "way": "general",
        }  # fmt: skip
        assert row["inputs"] == {name: [list(span) for span in spans] for name, spans in unit.inputs.items()}
        assert row["outputs"] == [list(span) for span in unit.outputs]
        assert (row["file"], row["bytes_in"], row["bytes_out"]) == (unit.file, unit.bytes_in, unit.bytes_out)
        assert row["padding_bytes"] == unit.padding_bytes
    (copies,) = (row for row in document["units"] if row["id"].startswith("copy/"))
    assert copies["way"] == "copy"
    assert "layer" not in copies
    assert [(kind.title, kind.way, kind.count) for kind in needs.kinds] == [
        ("copies", "copy", 1), ("w13 of 1 layer", "reference", 1), ("w2 of 1 layer", "reference", 1),
    ]  # fmt: skip
    for kind, row in zip(needs.kinds, document["units"], strict=True):
        assert (kind.bytes_in, kind.bytes_out, kind.padding_bytes) == (
            row["bytes_in"], row["bytes_out"], row["padding_bytes"],
        )  # fmt: skip
    assert needs.kinds[1].memory == REFERENCE_BYTES * 64 * 64
    assert document["deployment"]["gpu"]["name"] == "A100"
    assert document["request"] == job.request.to_json()
    assert (document["backend"], document["copied"]) == ("TRITON", [])
    assert document["totals"]["padding_bytes"] == plan.padding_bytes
    assert document["totals"]["expert_bytes_in"] == sum(
        entry.nbytes for name, entry in source.tensors.items() if ".experts." in name
    )


def test_kinds_of_units(checkpoints: Path) -> None:
    job, _ = planned(checkpoints / INT4)
    needs = needs_of(job, plan_memory(job, job.plan.units, 2, None))
    titles = {kind.title: kind.count for kind in needs.kinds}
    assert titles["w13 of 2 layers"] == titles["w2 of 2 layers"] == 2
    assert sum(titles.values()) == len(job.plan.units)


def test_headers_and_side_files_stand_beside_the_weights(tmp_path: Path) -> None:
    source = moeq.open(write(tmp_path / "made")).source
    config = (tmp_path / "made" / "config.json").stat().st_size
    length = int.from_bytes((tmp_path / "made" / "model.safetensors").read_bytes()[:8], "little")
    assert _beside_bytes(source) == 8 + length + config
    remote = _PlannedSource("repository", {}, {})
    remote.files, remote.tensors = source.files, source.tensors
    assert _beside_bytes(remote) == 8 + length
