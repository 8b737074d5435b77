"""Units of a plan: chunks that are copied, and the order in which their digests make a layer's entry."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import moeq
from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import LayerEntry
from moeq.checkpoint.names import FUSED
from moeq.checkpoint.writer import file_form
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.model.shards import Range
from moeq.pipeline.plan import commands, conversion_plan, units
from moeq.pipeline.plan.conversion_plan import bounded_files, file_names, make_plan
from moeq.pipeline.plan.job import OpenedJob
from moeq.pipeline.plan.units import CopiedTensor, CopyUnit, PackUnit, Unit
from moeq.pipeline.run.work_shards import LAUNCHERS, _number
from moeq.pipeline.state.publish import layer_entry
from moeq.schemes.format import PartSig


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


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], ()),
        ([(3, 3)], ()),
        ([(5, 9), (0, 2)], ((0, 2), (5, 9))),
        ([(2, 4), (0, 2)], ((0, 4),)),
        ([(0, 2), (3, 4)], ((0, 2), (3, 4))),
        ([(0, 9), (2, 4), (8, 10)], ((0, 10),)),
        ([(0, 2), (2, 2), (4, 4)], ((0, 2),)),
    ],
)
def test_neighbouring_spans_are_one(spans: list[tuple[int, int]], expected: tuple[tuple[int, int], ...]) -> None:
    assert units.joined(spans) == expected


@pytest.mark.parametrize(("name", "stacked"), [("gptq-int4-g32-qwen3moe", False), ("mxfp4-gptoss", True)])
def test_what_units_read_and_write(checkpoints: Path, name: str, stacked: bool) -> None:
    """Down projections for w2, all others for w13; ranks of expert parallelism read their own experts alone."""
    made = moeq.open(checkpoints / name)
    layout = "mxfp4-identity/1" if stacked else "marlin-wna16/1"
    whole = make_plan(made, {0: layout, 1: layout})
    experts = made.experts(1)
    for role in ("w13", "w2"):
        (unit,) = (unit for unit in whole.units if unit.id == f"layer-1/{role}")
        assert isinstance(unit, PackUnit)
        entries = [
            entry
            for (projection, _), found in experts.layer.parts.items()
            for entry in found.values()
            if (projection == "down") == (role == "w2")
        ]
        assert unit.inputs == {entries[0].file: units.joined([(entry.start, entry.end) for entry in entries])}
        assert (unit.layer, unit.role, unit.experts, unit.shards, unit.ranks) == (1, role, Range(0, 4), (0,), (0,))
        form = whole.file(unit.file).form
        tensors = whole.layer_of(unit).shards[0].matrices[role].tensors.values()
        assert unit.outputs == units.joined([form.ranges[tensor] for tensor in tensors])
        assert [(piece.tensor, piece.stop - piece.start) for piece in whole.pieces(unit)] == [
            (tensor, (form.ranges[tensor][1] - form.ranges[tensor][0]) // 4) for _ in range(4) for tensor in tensors
        ]
        assert all(piece.whole == piece.stop - piece.start for piece in whole.pieces(unit))
        some = units._stored_spans(experts, Range(1, 3), role)
        assert sum(stop - start for spans in some.values() for start, stop in spans) * 2 == unit.bytes_in
    down = experts.layer.parts["down", "blocks" if stacked else "qweight"]
    (part, entry) = ("blocks", down[FUSED]) if stacked else ("qweight", down[2])
    size = entry.nbytes // (4 if stacked else 1)
    start = entry.start + (2 * size if stacked else 0)
    assert units.place_of(entry, part, experts, 2) == (start, start + size)
    assert units.signature_of(entry, part, fused=stacked) == PartSig(entry.dtype, entry.shape[stacked:])
    if stacked:
        shape = entry._replace(shape=(3,))
        assert units.place_of(shape, "weight_shape", experts, 2) == (entry.start, entry.end)
        assert units.signature_of(shape, "weight_shape", fused=True).shape == (3,)


def entry_of(name: str, file: str, start: int, size: int) -> TensorEntry:
    return TensorEntry(name, "U8", (size,), file, start, start + size)


def test_copies_are_numbered_by_their_source(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit has tensors of one file, up to a size; a larger tensor is alone."""
    monkeypatch.setattr(units, "COPY_UNIT_BYTES", 100)
    entries = [entry_of("a", "x", 0, 60), entry_of("b", "x", 60, 40), entry_of("c", "x", 100, 1)]
    entries += [entry_of("d", "y", 8, 300), entry_of("e", "y", 400, 2), entry_of("f", "x", 200, 5)]
    form = file_form({entry.name: (entry.shape, "U8") for entry in entries}, {})
    counts = {"y": 4}
    found = list(units.copy_units({entry.name: entry for entry in entries}, "out", form, counts))
    assert [(unit.id, [one.name for one in unit.tensors]) for unit in found] == [
        ("copy/x/0", ["a", "b"]), ("copy/x/1", ["c"]), ("copy/y/5", ["d"]), ("copy/y/6", ["e"]), ("copy/x/2", ["f"]),
    ]  # fmt: skip
    assert counts == {"x": 2, "y": 6}
    first = found[0]
    assert (first.file, first.source_file, first.kind, first.what, first.padding_bytes) == (
        "out",
        "x",
        "copies",
        "copy",
        0,
    )
    assert first.inputs == {"x": ((0, 100),)}
    start = form.ranges["a"][0]
    assert first.outputs == ((start, start + 100),)
    assert [(one.source, one.output - start, one.size) for one in first.tensors] == [(0, 0, 60), (60, 60, 40)]
    pieces = list(first.pieces(form, None))
    assert [(piece.tensor, piece.start - start, piece.stop - start) for piece in pieces] == [
        ("a", 0, 60),
        ("b", 60, 100),
    ]


def test_digests_are_of_pieces_of_two_mebibytes() -> None:
    """`docs/reference/converted-checkpoint.md` says so: other programs compute the same digests."""
    assert units.CHUNK_BYTES == 2 * 1024 * 1024
