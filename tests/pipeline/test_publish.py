"""Files beside the weights, digests of all of them, and what is missing before a folder gets its name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from blake3 import blake3
from checkpoint.builder import config, quantization, write
from refusing import refuses

from moeq.checkpoint.manifest import FileDigest, TensorDigest
from moeq.checkpoint.outputs import OutputFolder
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert
from moeq.pipeline.plan.job import Job, JobRequest, open_job
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.plan.units import CHUNK_BYTES
from moeq.pipeline.run.execution import recompute
from moeq.pipeline.state.publish import (
    copy_side_files,
    index_of,
    require_complete,
    require_units,
    sync_files,
    tensors_of,
    write_json,
)

A100 = Deployment(gpu=parse_gpu("A100"))
CODE = {"auto_map": {"AutoModel": "m.C"}}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint that names code, with a quantisation config in its text config too."""
    document = config(**CODE, text_config={"a": [1], "quantization_config": quantization()})
    folder = write(tmp_path / "source", document=document)
    (folder / "m.py").write_text("pass")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text(json.dumps({"b": 1, **CODE}))
    return folder


@pytest.mark.parametrize("no_code", [False, True])
def test_the_config_of_a_conversion(source: Path, tmp_path: Path, no_code: bool) -> None:
    """The source's, without what it says of quantisation, and without names of code where that is left out."""
    out = tmp_path / "out"
    done = convert(source, out, A100, no_code=no_code)
    found = json.loads((out / "config.json").read_text())
    before = config(text_config={"a": [1]})
    del before["quantization_config"]
    (layout,) = set(done.job.answer.layouts.values())
    assert found == {
        **before,
        **({} if no_code else CODE),
        "experts_implementation": "moeq (import moeq.engines.transformers before loading)",
        "quantization_config": {
            "quant_method": "moeq", "manifest": "moeq.json", "layouts": [layout], "original": quantization(),
        },
    }  # fmt: skip
    assert (out / "m.py").exists() == (not no_code)
    side = json.loads((out / "tokenizer_config.json").read_text())
    assert side == ({"b": 1} if no_code else {"b": 1, **CODE})
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index == index_of(done.plan)
    assert index["metadata"] == {"total_size": done.plan.bytes_out}
    assert index["weight_map"] == {tensor: file.name for file in done.plan.files for tensor in file.tensors}
    manifest = json.loads((out / "moeq.json").read_text())
    assert set(manifest["files"]) == {path.name for path in out.iterdir()} - {"moeq.json"}
    for name, digest in manifest["files"].items():
        raw = (out / name).read_bytes()
        assert digest["bytes"] == len(raw)
        form = next((file.form for file in done.plan.files if file.name == name), None)
        assert digest["blake3"] == blake3(form.header if form else raw).hexdigest()


@pytest.fixture(scope="module")
def job(checkpoints: Path) -> Job:
    return open_job(JobRequest(str(checkpoints / "gptq-int4-g32-qwen3moe"), A100, ConvertOptions()))


def test_units_that_are_missing(job: Job) -> None:
    every = [unit.id for unit in job.plan.units]
    require_units(job.plan, set(every), "are gone", "h")
    message = f"2 of {len(every)} units are gone: {every[0]}, {every[2]}"
    with refuses("answer.units-missing", message, "h"):
        require_units(job.plan, {*every} - {every[0], every[2]}, "are gone", "h")


def test_records_that_do_not_fit_are_missing(job: Job) -> None:
    records = recompute(job, job.plan.units, 1, lambda count, label: None)
    require_complete(job.plan, records, "convert")
    first, second, *_ = (unit.id for unit in job.plan.units)
    wrong = {**records, second: records[first]}
    del wrong[first]
    message = f"2 of {len(records)} units are not finished: {first}, {second}"
    with refuses("answer.units-missing", message, "convert without shard does what is left"):
        require_complete(job.plan, wrong, "convert")
    tensors = tensors_of(job.plan, records)
    assert set(tensors) == {name for file in job.plan.files for name in file.tensors}
    without = {unit: record if unit == first else type(record)(unit, 0, {}) for unit, record in records.items()}
    empty = TensorDigest(CHUNK_BYTES, blake3().hexdigest())
    found = tensors_of(job.plan, without)
    assert {name for name, digest in found.items() if digest != empty} == set(records[first].tensors)


def test_weights_are_flushed_file_by_file(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for file in job.plan.files:
        (tmp_path / file.name).touch()
    flushed: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino))
    with OutputFolder(tmp_path) as folder:
        sync_files(folder, job.plan)
        assert flushed == [(tmp_path / file.name).stat().st_ino for file in job.plan.files]
        write_json(folder, "x.json", {"a": 1})
    assert (tmp_path / "x.json").read_text() == '{\n  "a": 1\n}\n'
    assert flushed[-1] == (tmp_path / "x.json").stat().st_ino


def test_side_files_are_copied_except_some(source: Path, tmp_path: Path) -> None:
    job = open_job(JobRequest(str(source), A100, ConvertOptions(no_code=True)))
    (tmp_path / "made").mkdir()
    with OutputFolder(tmp_path / "made") as folder:
        copy_side_files(job.checkpoint.source, job.side_files, folder, leave_out={"tokenizer.json"})
        assert folder.names() == ["tokenizer_config.json"]
        assert json.loads(folder.read_file("tokenizer_config.json")) == {"b": 1}
        copy_side_files(job.checkpoint.source, job.side_files, folder)
        assert folder.names() == ["tokenizer.json", "tokenizer_config.json"]
    assert FileDigest(2, blake3(b"{}").hexdigest()).bytes == (tmp_path / "made" / "tokenizer.json").stat().st_size
