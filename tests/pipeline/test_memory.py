"""Memory as a contract: what was planned is never exceeded, whatever the size of the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from bench_scripts import make_checkpoint as generator

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.pipeline.pack.memory import Need, SpareMemory, Way
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.run import resources
from moeq.pipeline.run.resources import Memory, base_bytes, need_of, parse_size, plan_memory, ways_of

H100 = Deployment(gpu=parse_gpu("H100"))
MIB = 2**20

#: A fresh process: only there does the peak say what a conversion needs. Its own peak since it began is asked for
#: (`ru_maxrss` would include the memory of the process that started it).
SCRIPT = """
import json, sys
import moeq
src, dst, layout, workers, ceiling = sys.argv[1:]
done = moeq.convert(src, dst, moeq.Deployment(gpu=moeq.gpu("H100")), layout=layout, force_layout=True,
                    workers=int(workers),
                    max_memory=int(ceiling) or None)
status = open("/proc/self/status").read()
peak = 1024 * int(status.split("VmHWM:")[1].split()[0])
print(json.dumps([peak, done.memory.peak, done.memory.workers]))
"""


def measure(src: Path, dst: Path, layout: str, workers: int, ceiling: int = 0) -> tuple[int, int, int]:
    """Peak memory, planned peak, workers. Loops are compiled in the process, as the first time on a machine."""
    argv = [sys.executable, "-c", SCRIPT, *map(str, (src, dst, layout, workers, ceiling))]
    fresh = {**os.environ, "NUMBA_CACHE_DIR": str(dst.parent / "loops")}
    peak, planned, used = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True, env=fresh).stdout)
    return peak, planned, used


needs_proc = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")


@needs_proc
@pytest.mark.slow
def test_the_ceiling_holds_on_a_checkpoint_several_times_its_size(tmp_path) -> None:
    src, ceiling = tmp_path / "source", 256 * MIB
    size = generator.write_checkpoint(
        src, generator.MODELS["qwen3-30b-a3b"], "gptq", generator.Size(layers=3, experts=128, vocab=512)
    )
    assert size > 3 * ceiling
    peak, planned, workers = measure(src, tmp_path / "out", "marlin-wna16/1", 8, ceiling)
    assert peak <= planned <= ceiling
    assert workers >= 2


@needs_proc
@pytest.mark.parametrize(
    ("model", "kind", "layout", "experts"),
    [
        ("gpt-oss-120b", "mxfp4", "marlin-mxfp4/1", 4),
        ("gpt-oss-120b", "mxfp4", "cpu-amx-mxfp4/1", 4),
    ],
)
@pytest.mark.slow
def test_what_is_planned_is_never_exceeded(model, kind, layout, experts, tmp_path) -> None:
    """A fast path, and the reference path, which takes far more."""
    src = tmp_path / "source"
    generator.write_checkpoint(src, generator.MODELS[model], kind, generator.Size(layers=1, experts=experts, vocab=256))
    peak, planned, _ = measure(src, tmp_path / "out", layout, 2)
    assert planned / 3 < peak <= planned


class TestPlanning:
    @pytest.fixture
    def source(self, tmp_path: Path) -> Path:
        size = generator.Size(layers=1, experts=2, vocab=256)
        generator.write_checkpoint(tmp_path / "s", generator.MODELS["gpt-oss-20b"], "mxfp4", size, sparse=True)
        return tmp_path / "s"

    def test_workers_are_lowered_to_fit(self, source) -> None:
        job = open_job(JobRequest(str(source), H100, ConvertOptions("marlin-mxfp4/1", force_layout=True)))
        free = plan_memory(job, job.plan.units, 4)
        assert free.workers == 4
        ceiling = free.base + 3 * free.per_worker + 1
        fitted = plan_memory(job, job.plan.units, 4, ceiling)
        assert fitted.workers == 3
        assert fitted.peak <= ceiling
        for unit in job.plan.units:
            need = need_of(job, unit)
            assert base_bytes(job.checkpoint, [need]) + need.total <= free.base + free.per_worker

    def test_small_experts_are_read_and_written_by_two_threads_a_worker(self, tmp_path) -> None:
        size = generator.Size(layers=1, experts=2, vocab=256)

        def planned(model: str, ceiling: int | None = None) -> Memory:
            if not (tmp_path / model).exists():
                generator.write_checkpoint(tmp_path / model, generator.MODELS[model], "gptq", size, sparse=True)
            job = open_job(JobRequest(str(tmp_path / model), H100, ConvertOptions("marlin-wna16/1", force_layout=True)))
            return plan_memory(job, job.plan.units, 2, ceiling)

        small = planned("qwen3-30b-a3b")
        assert (small.helpers, planned("mixtral-8x7b").helpers) == (2, 1)
        tight = planned("qwen3-30b-a3b", small.peak - 1)
        assert (tight.helpers, tight.workers) == (1, 2), "workers go first where memory is short"

    @pytest.mark.parametrize(("ceiling", "shown"), [(10**6, "0.954 MiB"), (1, "9.54e-07 MiB"), (10 * MIB, "10 MiB")])
    def test_a_ceiling_is_never_told_as_nothing(self, ceiling, shown, source, tmp_path) -> None:
        with pytest.raises(MoeqError, match=f"more than the {shown} of max_memory"):
            convert(source, tmp_path / "out", H100, layout="marlin-mxfp4/1", force_layout=True, max_memory=ceiling)

    def test_where_not_even_one_fits_the_arithmetic_is_told(self, source, tmp_path) -> None:
        with pytest.raises(
            MoeqError, match=r"MiB for the process \+ .* MiB for one worker .* more than the 100 MiB"
        ) as e:
            convert(source, tmp_path / "out", H100, layout="marlin-mxfp4/1", force_layout=True, max_memory=100 * MIB)
        assert e.value.exit_code == ExitCode.RESOURCES
        assert not (tmp_path / "out.moeq-partial").exists()
        enough = parse_size((e.value.hint or "").split('"')[1])
        asked = {"layout": "marlin-mxfp4/1", "force_layout": True, "max_memory": enough, "dry_run": True}
        planned = convert(source, tmp_path / "out", H100, **asked).memory
        assert planned is not None
        assert planned.workers == 1


class TestArithmetic:
    """Memory of units of the smallest checkpoint, number by number."""

    @pytest.fixture
    def job(self, checkpoints: Path) -> Job:
        where = Deployment(gpu=parse_gpu("A100"))
        return open_job(JobRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), where))

    def test_a_process_and_what_it_loads(self, job: Job) -> None:
        bare = 72 * MIB + 700 * len(job.checkpoint.source.tensors)
        loaded: dict[Way, int] = {"copy": 0, "fast": 160, "reference": 360, "transcode": 200}
        for way, more in loaded.items():
            assert base_bytes(job.checkpoint, [Need(way)]) == bare + more * MIB
        assert base_bytes(job.checkpoint, []) == bare
        assert base_bytes(job.checkpoint, map(Need, loaded)) == bare + 360 * MIB

    def test_buffers_have_the_largest_size_of_any_kind(self, job: Job) -> None:
        needs = [need_of(job, unit) for unit in job.plan.units]
        parts = [max(getattr(need, part) for need in needs) for part in ("input", "output", "scratch", "reference")]
        alone = plan_memory(job, job.plan.units, 1, max_helpers=1)
        assert alone == Memory(base_bytes(job.checkpoint, needs), sum(parts), 1, None, 1)
        assert plan_memory(job, [], 3) == Memory(base_bytes(job.checkpoint, []), 0, 3, None, 1)
        assert ways_of(job) == {unit.id: need.way for unit, need in zip(job.plan.units, needs, strict=True)}

    def test_two_threads_read_for_a_worker_where_both_fit(self, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
        needs = [need_of(job, unit) for unit in job.plan.units]
        buffers = max(need.input for need in needs) + max(need.output for need in needs)
        single = plan_memory(job, job.plan.units, 2, max_helpers=1)
        enough = single.base + 2 * (single.per_worker + buffers)
        double = plan_memory(job, job.plan.units, 2, enough)
        assert double == Memory(single.base, single.per_worker + buffers, 2, enough, 2)
        assert double.peak == enough
        assert plan_memory(job, job.plan.units, 2, enough - 1) == replace(single, ceiling=enough - 1)
        assert plan_memory(job, job.plan.units, 2, usual=enough) == replace(double, ceiling=None, usual=enough)
        monkeypatch.setattr(resources, "SMALL_BUFFERS", buffers)
        assert plan_memory(job, job.plan.units, 2).helpers == 2
        monkeypatch.setattr(resources, "SMALL_BUFFERS", buffers - 1)
        assert plan_memory(job, job.plan.units, 2).helpers == 1

    def test_as_many_workers_run_as_fit_in_a_gigabyte(self, job: Job) -> None:
        usual = plan_memory(job, job.plan.units, 1 << 20)
        assert (1 << 30) - usual.per_worker < usual.peak <= 1 << 30

    def test_one_worker_runs_beyond_the_usual_ceiling_and_not_beyond_one_that_was_asked_for(self, job: Job) -> None:
        single = plan_memory(job, job.plan.units, 1, max_helpers=1)
        assert plan_memory(job, job.plan.units, 4, single.peak).workers == 1
        assert plan_memory(job, job.plan.units, 4, usual=1).workers == 1
        with pytest.raises(MoeqError) as caught:
            plan_memory(job, job.plan.units, 4, single.peak - 1)
        assert caught.value.code == "resources.memory"
        assert caught.value.hint == f'max_memory="{-(-single.peak // MIB)}MiB" is enough for one worker'
        largest = max(job.plan.units, key=lambda unit: need_of(job, unit).total).kind
        assert f" for one worker ({largest} is the largest) = " in caught.value.message


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("8GiB", 8 * 2**30),
        ("8Gi", 8 * 2**30),
        ("8 GB", 8 * 10**9),
        ("8g", 8 * 10**9),
        ("1.5T", 1_500_000_000_000),
        ("500MB", 500_000_000),
        ("64KiB", 65536),
        ("1048576", 1048576),
        ("100B", 100),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "8 apples", "-1G", "0", "1e9", "8GiBB", "0.1"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(MoeqError) as caught:
        parse_size(text)
    assert caught.value.exit_code == ExitCode.USAGE


class TestRoom:
    @pytest.mark.parametrize("ceiling", [1 << 30, None])
    def test_what_threads_and_torch_leave_of_the_ceiling(self, ceiling: int | None) -> None:
        memory = Memory(base=100 << 20, per_worker=50 << 20, workers=2, ceiling=ceiling, usual=1 << 30)
        left = (1 << 30) - (200 << 20) - (200 << 20)
        with memory.spare().take(left, "an expert"):
            pass
        refusal = pytest.raises(MoeqError, match="624 MiB are left") if ceiling else nullcontext()
        with refusal, memory.spare().take(left + 1, "an expert"):
            pass

    def test_what_cannot_fit_is_refused(self) -> None:
        room = SpareMemory(100, strict=True)
        with room.take(100, "an expert"):
            pass
        with pytest.raises(MoeqError, match="an expert holds unusual values") as caught, room.take(101, "an expert"):
            pass
        assert caught.value.exit_code == ExitCode.RESOURCES

    def test_others_wait_until_there_is_room(self) -> None:
        room, order = SpareMemory(100, strict=True), list[str]()
        entered = threading.Event()

        def other() -> None:
            entered.set()
            with room.take(60, "b"):
                order.append("b")

        with room.take(60, "a"):
            thread = threading.Thread(target=other)
            thread.start()
            entered.wait()
            order.append("a")
        thread.join(10)
        assert order == ["a", "b"]

    def test_without_a_ceiling_what_is_too_large_runs_alone(self) -> None:
        with SpareMemory(10).take(1000, "x"):
            pass
        with SpareMemory(None).take(1000, "x"), SpareMemory(None).take(1 << 40, "y"):
            pass
