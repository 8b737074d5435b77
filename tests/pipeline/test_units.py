"""Units of a plan: chunks that are copied, and the order in which their digests make a layer's entry."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeq.checkpoint.manifest import LayerEntry
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.model.shards import Range
from moeq.pipeline.plan import commands, conversion_plan, units
from moeq.pipeline.plan.conversion_plan import bounded_files, file_names
from moeq.pipeline.plan.job import OpenedJob
from moeq.pipeline.plan.units import CopiedTensor, CopyUnit, PackUnit, Unit
from moeq.pipeline.run.work_shards import LAUNCHERS, _number
from moeq.pipeline.state.publish import layer_entry


def copied(*tensors: tuple[int, int, int]) -> list[tuple[int, int, tuple[tuple[str, int], ...]]]:
    """Chunks of tensors `a`, `b`, ... of a source place, an output place and a size each."""
    rows = tuple(CopiedTensor("abcdef"[n], source, output, size) for n, (source, output, size) in enumerate(tensors))
    unit: Any = SimpleNamespace(tensors=rows)
    return [(one.source, one.output, one.pieces) for one in CopyUnit.chunks(unit)]


@pytest.mark.parametrize(
    ("tensors", "chunks"),
    [
        ([], []),
        ([(5, 50, 10)], [(5, 50, (("a", 10),))]),
        ([(5, 50, 10), (15, 60, 20)], [(5, 50, (("a", 10), ("b", 20)))]),
        ([(5, 50, 10), (16, 60, 20)], [(5, 50, (("a", 10),)), (16, 60, (("b", 20),))]),  # a gap in the source
        ([(5, 50, 10), (15, 61, 20)], [(5, 50, (("a", 10),)), (15, 61, (("b", 20),))]),  # a gap in the output
        ([(5, 50, 60), (65, 110, 40)], [(5, 50, (("a", 60), ("b", 40)))]),  # a whole chunk
        ([(5, 50, 60), (65, 110, 41)], [(5, 50, (("a", 60),)), (65, 110, (("b", 41),))]),
        ([(5, 50, 250)], [(5, 50, (("a", 100),)), (105, 150, (("a", 100),)), (205, 250, (("a", 50),))]),
        ([(5, 50, 130), (135, 180, 70), (205, 250, 1)],
         [(5, 50, (("a", 100),)), (105, 150, (("a", 30), ("b", 70))), (205, 250, (("c", 1),))]),
    ],
)  # fmt: skip
def test_neighbours_share_chunks_of_bounded_size(tensors: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "CHUNK_BYTES", 100)
    assert copied(*tensors) == chunks


def test_digests_of_a_layer_are_in_the_order_of_its_experts() -> None:
    def unit(role: str, start: int, layer: int = 3) -> PackUnit:
        found = PackUnit.__new__(PackUnit)
        for name, value in {"id": f"{layer}/{role}/{start}", "layer": layer, "role": role,
                            "experts": Range(start, start + 2)}.items():  # fmt: skip
            object.__setattr__(found, name, value)
        return found

    rows = [unit("w2", 2), unit("w13", 2), unit("w2", 0), unit("w13", 0), unit("w13", 0, layer=4)]
    records: Any = {
        one.id: SimpleNamespace(
            digests={name: [f"{name}{n}" for n in (one.experts.start, one.experts.start + 1)]
                     for name in (("down",) if one.role == "w2" else ("gate", "up"))},
            losses=1 + one.experts.start,
        )
        for one in rows
    }  # fmt: skip
    plan: Any = SimpleNamespace(units=rows)
    layer: Any = SimpleNamespace(entry=LayerEntry(3, "x", 4, "marlin-wna16/1", {}))
    found = layer_entry(plan, layer, records)
    assert list(found.digests.items()) == [
        (name, tuple(f"{name}{n}" for n in range(4))) for name in ("gate", "up", "down")
    ]
    assert found.losses == 1 + 1 + 3 + 3


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("007", 7), ("123456789", 123456789), ("1234567890", None), ("", None), ("-1", None), ("1.0", None),
     ("\u0663", None), (" 1", None)],
)  # fmt: skip
def test_numbers_of_launchers_are_short_and_plain(text: str, number: int | None) -> None:
    launcher = LAUNCHERS[0]
    if number is not None:
        assert _number(launcher, launcher.index, {launcher.index: text}) == number
        return
    with pytest.raises(MoeqError, match="is not a number") as caught:
        _number(launcher, launcher.index, {launcher.index: text})
    assert caught.value.code == "usage.shard-launcher"


def test_the_number_of_a_launcher_is_shown_in_part() -> None:
    launcher = LAUNCHERS[0]
    with pytest.raises(MoeqError) as caught:
        _number(launcher, launcher.index, {launcher.index: "x" * 50})
    assert f"='{'x' * 40}' is not a number" in caught.value.message
    with pytest.raises(MoeqError, match=f"{launcher.index} is not set although {launcher.count} is"):
        _number(launcher, launcher.index, {str(launcher.count): "3"})


@pytest.mark.parametrize(
    ("engine", "backend", "quantization", "command"),
    [
        ("vllm@0.33.0", "auto", None, "vllm serve SRC"),
        ("vllm@0.33.0", "marlin", None, "vllm serve SRC --moe-backend marlin"),
        ("vllm@0.33.0", "marlin", "gptq", "vllm serve SRC --quantization gptq --moe-backend marlin"),
        (
            "sglang@0.5.23",
            "marlin",
            None,
            "python -m sglang.launch_server --model-path SRC --moe-runner-backend marlin",
        ),
        ("moeq", "auto", None, None),
    ],
)
def test_serving_a_source_with_the_engines_own_backend(
    engine: str, backend: str, quantization: str | None, command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    deployment = Deployment(gpu=parse_gpu("A100"), engine=engine, backend=backend, quantization=quantization)
    verdict = SimpleNamespace(deployment=deployment, engine=engine)
    answer: Any = SimpleNamespace(verdict=verdict, parts=[SimpleNamespace(verdict=verdict, layers=(0, 1))])
    faults: dict[int, list[str]] = {0: [], 1: []}
    checkpoint: Any = SimpleNamespace(info=SimpleNamespace(dtype="bfloat16"), scale_faults=faults.get)
    only = False
    monkeypatch.setattr(commands, "is_weight_only", lambda verdict: only)
    assert commands.serve_source("SRC", checkpoint, answer) == command
    faults[1] = ["a NaN"]
    assert commands.serve_source("SRC", checkpoint, answer) is None
    only = True
    assert commands.serve_source("SRC", checkpoint, answer) == command


@pytest.mark.parametrize(
    ("sizes", "files"),
    [
        ([], []),
        ([100], [[0]]),
        ([101], [[0]]),
        ([60, 40], [[0, 1]]),
        ([60, 41], [[0], [1]]),
        ([60, 41, 59], [[0], [1, 2]]),
        ([60, 41, 60], [[0], [1], [2]]),
        ([200, 1, 99], [[0], [1, 2]]),
    ],
)
def test_files_of_other_tensors_are_bounded(
    sizes: list[int], files: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is as large as it may be, unless a group of tensors is larger."""
    monkeypatch.setattr(conversion_plan, "REST_FILE_BYTES", 100)
    groups: Any = [{f"{number}": ((size,), "U8")} for number, size in enumerate(sizes)]
    assert [[int(name) for name in file] for file in bounded_files(groups)] == files
    pairs: Any = [{"a": ((30,), "U8"), "b": ((30,), "F16")}, {"c": ((10,), "U8")}]
    assert [list(file) for file in bounded_files(pairs)] == [["a", "b", "c"]]
    monkeypatch.setattr(conversion_plan, "REST_FILE_BYTES", 99)
    assert [list(file) for file in bounded_files(pairs)] == [["a", "b"], ["c"]]


def test_files_are_numbered_as_by_every_tool() -> None:
    assert file_names(2) == ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert file_names(0) == []


def test_a_unit_of_no_kind() -> None:
    unit = Unit("layer-3/x", "f", {"a": ((0, 5), (7, 9)), "b": ((1, 2),)}, ((0, 4), (6, 7)), 1)
    assert (unit.kind, unit.fetch_group, unit.num_digests, unit.what) == ("layer-3/x", "layer-3/x", 0, "pack")
    assert (unit.bytes_in, unit.bytes_out) == (8, 5)
    with pytest.raises(NotImplementedError):
        unit.pieces(None, None)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError):
        OpenedJob(None, None, None).opener  # type: ignore[arg-type]  # noqa: B018


def test_units_of_one_file_are_fetched_together() -> None:
    ranges = Range(2, 5)
    unit = PackUnit("layer-3/w2/rank-1", "f", {}, (), 0, 3, "w2", ranges, (1,), (1,))
    assert (unit.kind, unit.fetch_group, unit.num_digests) == ("layer 3 w2", "f", 3)
