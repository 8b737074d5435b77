"""Conversions done in shards by several processes: the same bytes as by one, or a refusal that says what is wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bench_scripts import make_checkpoint as generator

import moeq
from moeq.checkpoint.outputs import OutputFolder
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import Conversion, convert
from moeq.pipeline.events import Checking, Event, Finished, Started, UnitFinished
from moeq.pipeline.finalize import _remedy, finalize, refuse_contradictions
from moeq.pipeline.plan.job import JobRequest, open_job
from moeq.pipeline.run.work_shards import WorkShard
from moeq.pipeline.state.journal import Journal, Journals, read_journals

A100 = Deployment(gpu=parse_gpu("A100"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers, so that seven shards have something to do."""
    folder = tmp_path_factory.mktemp("sources") / "model"
    generator.write_checkpoint(folder, generator.MODELS["tiny"], "gptq", generator.Size(layers=6, experts=None), seed=3)
    return folder


@pytest.fixture(scope="module")
def whole(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """What one process writes."""
    out = tmp_path_factory.mktemp("whole") / "out"
    convert(source, out, A100)
    return content(out)


def shard(source: Path, out: Path, index: int, count: int, deployment: Deployment = A100, **more: Any) -> Conversion:
    return convert(source, out, deployment, shard=WorkShard(index, count), **more)


def partial(out: Path) -> Path:
    return out.with_name(out.name + ".moeq-partial")


def refused(out: Path, **options: Any) -> MoeqError:
    with pytest.raises(MoeqError) as caught:
        finalize(out, **options)
    return caught.value


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_shards_in_any_order_give_the_bytes_of_one_process(count, source, whole, tmp_path) -> None:
    order = list(range(count))
    random.Random(count).shuffle(order)
    again = order[0]
    units = 0
    for index in order:
        conversion = shard(source, tmp_path / "out", index, count)
        assert conversion.manifest is None
        assert conversion.shard is not None
        units += conversion.shard.units
    assert units == len(conversion.plan.units)
    before = content(partial(tmp_path / "out"))
    repeated = shard(source, tmp_path / "out", again, count)
    assert repeated.shard is not None
    assert repeated.resumed_units == repeated.shard.units, "a shard recognises its own work"
    assert content(partial(tmp_path / "out")) == before
    assert not (tmp_path / "out").exists(), "a shard never publishes"
    finalize(tmp_path / "out")
    assert content(tmp_path / "out") == whole
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mxfp4-gptoss", "gptq-int4-g128-mixtral"])
@pytest.mark.parametrize("deployment", [Deployment(gpu=parse_gpu("H100"), ep=2)], ids=["expert-parallel"])
def test_ranks_written_one_by_one_in_shards(name, deployment, checkpoints, tmp_path) -> None:
    convert(checkpoints / name, tmp_path / "one", deployment)
    for index in (1, 0):
        shard(checkpoints / name, tmp_path / "two", index, 2, deployment)
    finalize(tmp_path / "two")
    assert content(tmp_path / "two") == content(tmp_path / "one")


def command(*words: object) -> list[str]:
    return [sys.executable, "-c", "from moeq.cli.app import main; main()", *map(str, words)]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, **more}


def together(commands: Sequence[Sequence[str]], **more: str) -> list[int]:
    running = [subprocess.Popen(words, stderr=subprocess.DEVNULL, env=environment(**more)) for words in commands]
    return [process.wait(120) for process in running]


@pytest.mark.slow
def test_processes_at_the_same_time(source, whole, tmp_path) -> None:
    """Three at once that begin the folder, its files and their headers in a race."""
    out = tmp_path / "out"
    words = [command("convert", source, out, "--gpu", "A100", "--shard", f"{n}/3", "--workers", 1) for n in range(3)]
    assert together(words) == [0, 0, 0]
    journals = {path.name for path in partial(out).glob("moeq-journal*")}
    assert journals == {f"moeq-journal.{index}-of-3.jsonl" for index in range(3)}
    finalize(out)
    assert content(out) == whole


@pytest.mark.slow
def test_the_same_shard_twice_at_once_is_refused_or_harmless(source, whole, tmp_path) -> None:
    out = tmp_path / "out"
    words = command("convert", source, out, "--gpu", "A100", "--shard", "0/2", "--workers", 1)
    codes = together([words, words])
    assert 0 in codes
    assert set(codes) <= {0, int(ExitCode.USAGE)}
    shard(source, out, 1, 2)
    finalize(out)
    assert content(out) == whole


@pytest.mark.slow
def test_overlapping_cuts_are_harmless(source, whole, tmp_path) -> None:
    """Half the work was cut in two, the other half in seven: what is done is done."""
    shard(source, tmp_path / "out", 0, 2)
    done: set[str] = set()
    for index in range(7):
        found: list[Any] = []
        shard(source, tmp_path / "out", index, 7, progress=found.append)
        done |= {event.unit for event in found if isinstance(event, UnitFinished) and not event.resumed}
    assert done
    assert not done & first_half(source, tmp_path)
    finalize(tmp_path / "out")
    assert content(tmp_path / "out") == whole


def first_half(source: Path, tmp_path: Path) -> set[str]:
    plan = convert(source, tmp_path / "dry", A100, dry_run=True).plan
    return {unit.id for unit in WorkShard(0, 2).select(plan.units, remote=False)}


def test_what_is_told(source, tmp_path) -> None:
    plan = convert(source, tmp_path / "dry", A100, dry_run=True).plan
    for index in range(2):
        told: list[Event] = []
        run = shard(source, tmp_path / "out", index, 2, progress=told.append).shard
        assert run is not None
        assert next(event for event in told if isinstance(event, Started)).units == run.units
        assert isinstance(told[-1], Finished)
        assert told[-1].bytes_out == run.bytes_out
    told = []
    finalize(tmp_path / "out", progress=told.append)
    assert [type(event) for event in told] == [Checking] * len(plan.units) + [Started, Finished]
    assert told[-1].bytes_out == plan.bytes_out


@pytest.mark.slow
def test_from_python(source, whole, tmp_path, monkeypatch) -> None:
    moeq.convert(source, tmp_path / "out", A100, shard="0/2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    moeq.convert(source, tmp_path / "out", A100, shard="torchrun")
    conversion = moeq.finalize(tmp_path / "out")
    assert Path(conversion.destination) == tmp_path / "out"
    assert conversion.manifest is not None
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_one_process_finishes_what_shards_have_left(source, whole, tmp_path) -> None:
    shard(source, tmp_path / "out", 1, 3)
    conversion = convert(source, tmp_path / "out", A100)
    assert 0 < conversion.resumed_units < len(conversion.plan.units)
    assert content(tmp_path / "out") == whole


@pytest.mark.slow
def test_the_source_keeps_the_name_that_it_was_given(source, tmp_path, monkeypatch) -> None:
    """The shards ran in another folder than finalize, with a path relative to it."""
    monkeypatch.chdir(source.parent)
    convert(Path("model"), tmp_path / "one", A100)
    for index in range(2):
        shard(Path("model"), tmp_path / "two", index, 2)
    monkeypatch.chdir(tmp_path)
    finalize("two")
    assert json.loads((tmp_path / "two" / "moeq.json").read_text())["source"]["name"] == "model"
    assert content(tmp_path / "two") == content(tmp_path / "one")


@pytest.mark.slow
def test_every_machine_may_have_a_copy_of_the_source(source, whole, tmp_path) -> None:
    """With other times; the first journal says which one finalize reads."""
    copy = Path(shutil.copytree(source, tmp_path / "copy", copy_function=shutil.copyfile))
    shard(source, tmp_path / "out", 0, 2)
    shard(copy, tmp_path / "out", 1, 2)
    finalize(tmp_path / "out")
    assert content(tmp_path / "out") == whole


class TestRefused:
    def test_missing_units_by_name_with_the_shards_that_do_them(self, source, tmp_path) -> None:
        shard(source, tmp_path / "out", 0, 7)
        shard(source, tmp_path / "out", 3, 7)
        error = refused(tmp_path / "out")
        assert (error.code, error.exit_code) == ("answer.units-missing", ExitCode.NO)
        plan = convert(source, tmp_path / "dry", A100, dry_run=True).plan
        done = {u.id for index in (0, 3) for u in WorkShard(index, 7).select(plan.units, remote=False)}
        missing = [unit.id for unit in plan.units if unit.id not in done]
        assert error.message.startswith(f"{len(missing)} of {len(plan.units)} units are not finished: {missing[0]}, ")
        for index in range(7):
            assert (f'shard="{index}/7"' in (error.hint or "")) == (index not in (0, 3)), index
        assert "without shard" in (error.hint or "")
        assert not (tmp_path / "out").exists()
        assert read_journals(OutputFolder(partial(tmp_path / "out"))).records.keys() == done, (
            "nothing is lost by asking"
        )

    @pytest.mark.slow
    def test_records_that_contradict_each_other(self, source, tmp_path) -> None:
        for index in range(2):
            shard(source, tmp_path / "out", index, 2)
        first = partial(tmp_path / "out") / "moeq-journal.0-of-2.jsonl"
        there = read_journals(OutputFolder(first.parent))
        record = next(one for one in there.records.values() if one.digests)
        digests = {name: ("0" * 64, *values[1:]) for name, values in record.digests.items()}
        journal = Journal(OutputFolder(first.parent), there.stamps[first.name], "1-of-3")
        journal.add([replace(record, digests=digests)])
        journal.close()
        names = sorted((*there.homes[record.unit], journal.name))
        error = refused(tmp_path / "out")
        assert (error.code, error.exit_code) == ("answer.units-contradict", ExitCode.NO)
        assert f"{record.unit} ({names[0]}, {names[1]})" in error.message

    @pytest.mark.slow
    def test_bytes_that_were_lost(self, source, whole, tmp_path) -> None:
        """The journal has the unit, its file does not: two machines with an incoherent file system, say."""
        for index in range(2):
            shard(source, tmp_path / "out", index, 2)
        plan = convert(source, tmp_path / "dry", A100, dry_run=True).plan
        unit = plan.unit("layer-4/w2")
        with (partial(tmp_path / "out") / unit.file).open("r+b") as file:
            file.seek(unit.outputs[0][1] - 4096)
            file.write(bytes(4096))
        error = refused(tmp_path / "out")
        assert error.code == "answer.units-missing"
        assert error.message.startswith(f"1 of {len(plan.units)} units are not in the files although a journal")
        assert "layer-4/w2" in error.message
        assert 'shard="1/2"' in (error.hint or "")
        assert 'shard="0/2"' not in (error.hint or "")
        shard(source, tmp_path / "out", 1, 2)
        finalize(tmp_path / "out")
        assert content(tmp_path / "out") == whole

    @pytest.mark.cover(every=4)
    @pytest.mark.parametrize(
        ("deployment", "options", "said"),
        [
            (Deployment(gpu=parse_gpu("A100"), tp=2), {}, "deployment.tp 1 there, 2 here"),
            (Deployment(gpu=parse_gpu("A30")), {}, "deployment.gpu.name 'A100' there, 'A30' here"),
            (A100, {"layout": "triton-wna16/1", "force_layout": True}, "layout None there, 'triton-wna16/1' here"),
            (A100, {"skip_unfit": True}, "skip_unfit False there, True here"),
        ],
    )
    def test_shards_with_different_options(self, deployment, options, said, source, tmp_path) -> None:
        shard(source, tmp_path / "out", 0, 2)
        with pytest.raises(MoeqError) as caught:
            shard(source, tmp_path / "out", 1, 2, deployment, **options)
        assert caught.value.code == "usage.other-job"
        assert said in caught.value.message
        assert "moeq-journal.0-of-2.jsonl" in caught.value.message
        assert "1-of-2" not in {path.name for path in partial(tmp_path / "out").iterdir()}

    def test_shards_of_different_sources(self, source, checkpoints, tmp_path) -> None:
        shard(source, tmp_path / "out", 0, 2)
        with pytest.raises(MoeqError) as caught:
            shard(checkpoints / "gptq-int4-g128-mixtral", tmp_path / "out", 1, 2)
        assert caught.value.code == "usage.other-job"
        assert f"source {source} there, {checkpoints / 'gptq-int4-g128-mixtral'} here" in caught.value.message

    def test_shards_with_different_versions(self, source, tmp_path, monkeypatch) -> None:
        shard(source, tmp_path / "out", 0, 2)
        monkeypatch.setattr("moeq.pipeline.state.stamps.__version__", "9.0.0")
        with pytest.raises(MoeqError, match=r"moeq 0\.1\.0 there, 9\.0\.0 here"):
            shard(source, tmp_path / "out", 1, 2)
        assert "moeq 0.1.0 there, 9.0.0 here" in refused(tmp_path / "out").message

    @pytest.mark.slow
    def test_journals_of_two_jobs(self, source, tmp_path) -> None:
        """As they come together when folders are copied into one."""
        shard(source, tmp_path / "out", 0, 2)
        shard(source, tmp_path / "other", 1, 2, Deployment(gpu=parse_gpu("A100"), dtype="fp16"))
        name = "moeq-journal.1-of-2.jsonl"
        shutil.copy(partial(tmp_path / "other") / name, partial(tmp_path / "out") / name)
        error = refused(tmp_path / "out")
        assert error.code == "usage.other-job"
        assert "deployment.dtype 'fp16' there, 'bf16' here" in error.message

    @pytest.mark.slow
    def test_a_source_that_changed_since(self, source, tmp_path) -> None:
        copy = Path(shutil.copytree(source, tmp_path / "source"))
        for index in range(2):
            shard(copy, tmp_path / "out", index, 2)
        weights = next(copy.glob("*.safetensors"))
        with weights.open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\0")
        assert refused(tmp_path / "out").code == "source.changed"

    @pytest.mark.slow
    def test_nothing_there_and_finished_already(self, source, tmp_path) -> None:
        assert refused(tmp_path / "out").code == "usage.nothing-to-finalize"
        convert(source, tmp_path / "out", A100)
        done = finalize(tmp_path / "out")
        assert done.already_done
        assert done.plan.digest == convert(source, tmp_path / "out", A100, shard="0/3").plan.digest

    @pytest.mark.slow
    def test_an_earlier_conversion_is_replaced_only_with_force(self, source, whole, checkpoints, tmp_path) -> None:
        for index in range(2):
            shard(source, tmp_path / "out", index, 2)
        convert(checkpoints / "gptq-int4-g128-mixtral", tmp_path / "other", A100)
        (tmp_path / "other").rename(tmp_path / "out")
        assert refused(tmp_path / "out").code == "usage.destination-exists"
        with pytest.raises(MoeqError) as caught:
            shard(source, tmp_path / "out", 0, 2, force=True)
        assert caught.value.code == "usage.force-shard"
        finalize(tmp_path / "out", force=True)
        assert content(tmp_path / "out") == whole


def test_a_folder_without_shards_is_not_finalized(tmp_path: Path) -> None:
    """Nor is one whose parent is missing, or is a file."""
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "out", tmp_path / "missing" / "out", tmp_path / "file" / "out"):
        error = refused(out)
        assert error.code == "usage.nothing-to-finalize"
        assert error.message == f"{partial(out)} holds no shards of a conversion"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_shards_that_contradict_each_other_are_named() -> None:
    refuse_contradictions(Journals())
    found = Journals(contradictions={"layer-0/w2": ("a", "b"), "layer-1/w13": ("b", "c", "d")})
    with pytest.raises(MoeqError) as caught:
        refuse_contradictions(found)
    assert caught.value.code == "answer.units-contradict"
    assert caught.value.message == (
        "shards contradict each other about 2 units: layer-0/w2 (a, b); layer-1/w13 (b, c, d)"
    )


def test_shards_that_are_left_are_named(source: Path) -> None:
    """The error names the missing shards of the division that most journals have."""
    job = open_job(JobRequest(str(source), A100))
    whole = "convert without shard does what is left, and publishes"

    def remedy(*journals: str, missing: Sequence[Any] = job.plan.units) -> str:
        folder: Any = SimpleNamespace(journals=SimpleNamespace(stamps=dict.fromkeys(journals)))
        return _remedy(job, folder, missing)

    assert remedy() == remedy("moeq-journal.jsonl") == whole
    one, two = (f"moeq-journal.{index}-of-2.jsonl" for index in (0, 1))
    assert remedy(one) == f'run again: shard="0/2", shard="1/2"; or {whole}'
    assert remedy(one, two, "moeq-journal.0-of-3.jsonl") == remedy(one)
    mine = WorkShard(1, 2).select(job.plan.units, remote=False)
    assert remedy(one, missing=mine[:1]) == f'run again: shard="1/2"; or {whole}'
    most = [f"moeq-journal.{index}-of-9.jsonl" for index in range(3)]
    shards = [f'shard="{index}/9"' for index in range(9) if WorkShard(index, 9).select(job.plan.units, remote=False)]
    shown = ", ".join(shards[:8]) + (" ..." if len(shards) > 8 else "")
    assert remedy(*most) == f"run again: {shown}; or {whole}"


def test_bytes_that_a_journal_has_and_the_file_has_not(checkpoints: Path, tmp_path: Path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    shard(source, tmp_path / "out", 0, 1)
    job = open_job(JobRequest(str(source), A100))
    unit = next(unit for unit in job.plan.units if unit.id == "layer-1/w2")
    with (partial(tmp_path / "out") / unit.file).open("r+b") as file:
        file.seek(unit.outputs[0][0])
        byte = file.read(1)
        file.seek(unit.outputs[0][0])
        file.write(bytes([byte[0] ^ 1]))
    error = refused(tmp_path / "out")
    assert error.code == "answer.units-missing"
    assert "are not in the files although a journal has them" in error.message
    assert "layer-1/w2" in error.message
    assert error.hint == 'run again: shard="0/1"; or convert without shard does what is left, and publishes'
