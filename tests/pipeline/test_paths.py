"""Fast paths and the reference path through a whole conversion: the same bytes, records and manifest, whoever packs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bench_scripts import make_checkpoint as generator

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.pipeline.pack import memory
from moeq.pipeline.pack.fast import find_fast_path
from moeq.pipeline.plan.job import JobRequest, open_job
from moeq.pipeline.plan.options import ConvertOptions
from moeq.pipeline.run.resources import ways_of

pytest.importorskip("numba")

#: Model, format, layout, tensor-parallel ranks. Experts are large enough for fast paths; ranks are written apart.
CASES = [
    ("qwen3-30b-a3b", "gptq", "marlin-wna16/1", 1),
    ("qwen3-30b-a3b", "gptq", "marlin-wna16/1", 6),
    ("qwen3-30b-a3b", "awq", "marlin-wna16/1", 1),
    ("qwen3-30b-a3b", "w8a8", "int8-w8a8/1", 1),
    ("gpt-oss-20b", "mxfp4", "marlin-mxfp4/1", 1),
]


def deployment(tp: int = 1) -> Deployment:
    return Deployment(gpu=parse_gpu("H100"), tp=tp)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write(folder: Path, model: str, kind: str, experts: int = 2) -> Path:
    generator.write_checkpoint(folder, generator.MODELS[model], kind, generator.Size(1, experts, vocab=64))
    return folder


@pytest.mark.cover(every=5)
@pytest.mark.parametrize(("model", "kind", "layout", "tp"), CASES)
def test_both_ways_write_the_same(model, kind, layout, tp, tmp_path, monkeypatch) -> None:
    source = write(tmp_path / "source", model, kind)
    job = open_job(JobRequest(str(source), deployment(tp), ConvertOptions(layout, force_layout=True)))
    assert set(ways_of(job).values()) == {"fast", "copy"}
    convert(source, tmp_path / "fast", deployment(tp), layout=layout, force_layout=True)
    monkeypatch.setattr(memory, "find_fast_path", lambda *given: None)
    assert set(ways_of(job).values()) == {"reference", "copy"}
    convert(source, tmp_path / "general", deployment(tp), layout=layout, force_layout=True)
    assert content(tmp_path / "fast") == content(tmp_path / "general")
    assert moeq.verify(tmp_path / "fast", source).ok


class Altered:
    """A fast path of which one answer is another."""

    def __init__(self, fast_path: Any, **altered: Any) -> None:
        self._fast_path = fast_path
        self.__dict__.update(altered)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fast_path, name)


@pytest.mark.slow
def test_experts_that_the_fast_path_declines_take_the_reference_path(tmp_path, monkeypatch) -> None:
    source = write(tmp_path / "source", "qwen3-30b-a3b", "gptq", 4)
    convert(source, tmp_path / "fast", deployment())
    declined: list[int] = []

    def find(*given: Any) -> Any:
        fast_path = find_fast_path(*given)
        assert fast_path is not None

        def read(*given: Any) -> Any:
            declined.append(1)
            return fast_path.read(*given) if len(declined) % 2 == 0 else None

        return Altered(fast_path, read=read)

    monkeypatch.setattr(memory, "find_fast_path", find)
    convert(source, tmp_path / "mixed", deployment())
    assert len(declined) == 8
    assert content(tmp_path / "fast") == content(tmp_path / "mixed")


@pytest.mark.slow
def test_a_ceiling_holds_for_declined_experts_too(tmp_path, monkeypatch) -> None:
    """There the reference path would need more than was planned: refused instead, and what was finished is kept."""
    source = write(tmp_path / "source", "gpt-oss-20b", "mxfp4", 2)

    def find(*given: Any) -> Any:
        return Altered(find_fast_path(*given), read=lambda *given: None)

    monkeypatch.setattr(memory, "find_fast_path", find)
    with pytest.raises(MoeqError, match=r"layer 0 w(13|2) expert \d holds unusual values") as caught:
        convert(
            source, tmp_path / "out", deployment(), layout="marlin-mxfp4/1", force_layout=True, max_memory=300 * 2**20
        )
    assert caught.value.exit_code == ExitCode.RESOURCES
    assert not (tmp_path / "out").exists()


def test_packed_bytes_that_do_not_mean_the_source_are_never_written(tmp_path, monkeypatch) -> None:
    source = write(tmp_path / "source", "qwen3-30b-a3b", "gptq")

    def find(*given: Any) -> Any:
        fast_path = find_fast_path(*given)
        assert fast_path is not None

        def pack(read: Any, outputs: Any, scratch: Any) -> None:
            fast_path.pack(read, outputs, scratch)
            weight: np.ndarray[Any, Any] = outputs[0]["weight"]
            weight[len(weight) // 2] ^= 0x10

        return Altered(fast_path, pack=pack)

    monkeypatch.setattr(memory, "find_fast_path", find)
    with pytest.raises(MoeqError, match="do not unpack to the source's values") as caught:
        convert(source, tmp_path / "out", deployment())
    assert caught.value.code == "bug.round-trip"
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
