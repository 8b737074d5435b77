"""The document of a plan: what it says of the job, and what a conversion reads of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.plan_document import _stream, needs_of, plan_document, read_plan, write_plan
from moeq.pipeline.run.resources import RATES, plan_memory
from moeq.pipeline.run.streaming import schedule

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
