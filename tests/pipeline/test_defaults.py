"""What is done where nothing is asked for: defaults of the functions and records that users call and make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import Conversion, convert
from moeq.pipeline.events import Started, UnitFinished
from moeq.pipeline.finalize import finalize
from moeq.pipeline.pack.fast.codecs import AsFloat32, Shifted
from moeq.pipeline.pack.fast.orders import HopperOrder, MarlinOrder, OwnOrder, TransposedOrder
from moeq.pipeline.pack.memory import Need
from moeq.pipeline.plan.candidates import LayoutChoice
from moeq.pipeline.plan.decide import advised, answer
from moeq.pipeline.plan.job import JobRequest, open_job
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.pipeline.plan.options import ConvertOptions, Question, Ranks
from moeq.pipeline.push import open_target
from moeq.pipeline.run.resources import Memory, plan_memory
from moeq.pipeline.run.work_shards import grouped
from moeq.pipeline.run.workers import Executor
from moeq.pipeline.state.records import UnitRecord
from moeq.transcode.survey import TranscodeRequest
from moeq.transcode.transcode import check, transcode


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (convert, {
            "backend": "auto", "force": False, "dry_run": False, "executor": "local", "stream_source": False,
            "reread": False,
        }),
        (finalize, {"force": False}),
        (open_target, {"private": True}),
        (transcode, {"force": False, "executor": "local", "stream_source": False, "reread": False}),
        (check, {}),
        (Executor, {"workers": 1, "helpers": 1, "direct": True}),
    ],
)  # fmt: skip
def test_defaults_of_calls(function: Callable[..., Any], expected: dict[str, Any]) -> None:
    """A conversion forces, downloads, publishes and reads twice only what its caller asks for."""
    given = {name: one.default for name, one in signature(function).parameters.items()}
    plain = {name: value for name, value in given.items() if isinstance(value, bool | int | str)}
    assert plain == expected
    rest = [value for name, value in given.items() if name not in expected]
    assert all(value is None or value is Parameter.empty or callable(value) for value in rest)


def test_defaults_of_options() -> None:
    options = ConvertOptions()
    assert {name: value for name, value in asdict(options).items() if value is not None} == {
        "force_layout": False, "skip_unfit": False, "allow_lossy": False, "no_code": False,
    }  # fmt: skip
    assert asdict(TranscodeRequest("s", "t")) == {
        "src": "s", "to": "t", "revision": None, "regroup": None, "names": "source", "allow_lossy": False,
        "sort_act_order": False, "numa": 2,
    }  # fmt: skip
    assert asdict(Ranks()) == {"tp": 1, "ep": 1}
    assert (Ranks.of(4, 1), Ranks.of(4, 2), Ranks.of(4, 4)) == (Ranks(4), Ranks(1, 2), Ranks(1, 4))
    assert Need("copy").total == 0
    assert Need("fast", input=1, output=20, scratch=300, reference=4000).total == 4321


def test_an_answer_explains_nothing_and_leaves_nothing_out_unless_asked(checkpoints: Path) -> None:
    made = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    question = Question(Deployment(gpu=parse_gpu("A100"), backend="flashinfer_trtllm"))
    plain = answer(made, question)
    assert plain.verdict == answer(made, question, explain=False, brief=False).verdict
    assert plain.verdict != answer(made, question, explain=True).verdict
    usual = Question(Deployment(gpu=parse_gpu("A100")))
    found = answer(made, usual)
    assert found.loaders == answer(made, usual, loaders=True).loaders
    assert [loader.name for loader in found.loaders] != []
    cut = Question(Deployment(gpu=parse_gpu("A100"), tp=4))
    assert answer(made, cut).verdict == answer(made, cut, brief=False).verdict != answer(made, cut, brief=True).verdict


def test_defaults_of_records() -> None:
    """A result reports resumed units, losses, calibration and rounding only where they happened."""
    started = Started("d", 1, 2, 3)
    assert (started.resumed_units, started.resumed_bytes) == (0, 0)
    assert UnitFinished("u", "pack", 1, 2, 0.5).resumed is False
    assert (UnitRecord("u", 1, {}).losses, UnitRecord("u", 1, {}).kept) == (0, ())
    conversion = Conversion(Path("out"), None, None)  # type: ignore[arg-type]
    assert (conversion.resumed_units, conversion.already_done, conversion.shard) == (0, False, None)
    choice = LayoutChoice("x/1", "B")
    assert (choice.rank_bytes, choice.overridden, choice.loaders, choice.flag) == (0, (), (), None)
    assert LayerPlan(None, ()).allow_lossy is False  # type: ignore[arg-type]
    memory = Memory(10, 5, 2, None)
    assert (memory.helpers, memory.peak) == (1, 20)
    order = OwnOrder()
    kinds = (order.rows, order.in_place, order.interleaved, order.halves_swapped, order.transposed, order.needs_spare)
    assert kinds == (1, True, False, False, False, False)
    marlin = MarlinOrder(4)
    assert (marlin.in_place, marlin.interleaved, marlin.permuted, marlin.transposed) == (False, False, False, True)
    assert (HopperOrder().interleaved, HopperOrder().transposed, HopperOrder().in_place) == (False, False, False)
    assert TransposedOrder("u1").rows == 0
    assert (AsFloat32("f32").factor, AsFloat32("f32").least, Shifted("f32", "BF16", 3).repeats) == (1.0, None, 1)
    assert signature(advised).parameters["explain"].default is signature(advised).parameters["brief"].default is False
    assert signature(plan_memory).parameters["max_helpers"].default == 2


def test_units_are_dealt_by_their_files_unless_the_source_is_remote(checkpoints: Path) -> None:
    job = open_job(JobRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), Deployment(gpu=parse_gpu("A100"))))
    groups = grouped(job.plan.units)
    assert [{unit.file for unit in group} for group in groups] == [{group[0].file} for group in groups]
    assert len(groups) == len({unit.file for unit in job.plan.units})
    remote = grouped(job.plan.units, remote=True)
    assert len(remote) == len({unit.fetch_group for unit in job.plan.units})
