"""The fast path of an item: what it fills and reports, and what it leaves to the reference path."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeq.checkpoint.names import FUSED, StoredName
from moeq.layouts import words
from moeq.matrix import MatrixSpec
from moeq.model import open as open_checkpoint

pytest.importorskip("numba")

from transcode.test_recoders import written

from moeq.layouts.float_bits import bits_of, numbers_of
from moeq.layouts.loops.native import NotCachedError
from moeq.pipeline.pack.fast.path import FilledMatrix, ProjectionReader, ReadMatrix
from moeq.pipeline.pack.fast.scratch import Region
from moeq.transcode.fast_item import CachedItem, FastItem, build_fast_item
from moeq.transcode.find_fast_item import FastPaths
from moeq.transcode.recode_fields import Matrices, NumberRecoder, Recoder
from moeq.transcode.spellings import SPELLINGS
from moeq.transcode.stored_matrices import StoredBlocks, StoredFloats
from moeq.transcode.survey import TranscodeRequest
from moeq.transcode.transcode_plan import ExpertItem, WrittenProjection, make_transcode_plan

#: Gate and up: 2 rows of 8 float32 numbers each, with a bias.
SPEC = MatrixSpec("w2", 2, 8, "f32", 8, "f32", bias_dtype="f32", gated=False)
AFTER = replace(SPEC, element="bf16", scale_dtype="bf16")
NUMBERS = {name: np.arange(16, dtype=np.float32).reshape(2, 8) + 32 * row for row, name in enumerate(("gate", "up"))}
BIASES = {"gate": np.array([0.5, 0.25], np.float32), "up": np.array([3.0, 4.0], np.float32)}


def readers(bias: bool = True) -> tuple[ProjectionReader[ReadMatrix], ...]:
    names: tuple[StoredName, ...] = ("gate", "up")
    parts = ("gguf_f32", "bias") if bias else ("gguf_f32",)
    return tuple(
        ProjectionReader(name, StoredBlocks("f32", SPEC, parts), ((name, SPEC),), False, Region(0, 0))  # type: ignore[arg-type]
        for name in names
    )


def item(interleaved: bool, bias: bool = True, recoders: tuple[Recoder, ...] | None = None) -> FastItem:
    parts = ("weight", "bias") if bias else ("weight",)
    stored = StoredFloats(replace(AFTER, n=4), parts, transposed=False)
    writer: ProjectionReader[FilledMatrix] = ProjectionReader(
        "gate_up", stored, (("gate", AFTER), ("up", AFTER)), interleaved, Region(0, 0)
    )
    return FastItem(readers(), (writer,), recoders or (NumberRecoder(SPEC, AFTER, "f32"),), None)


def inputs(change: Callable[[np.ndarray], None] = lambda up: None) -> dict[tuple[StoredName, str], np.ndarray]:
    numbers = {name: one.copy() for name, one in NUMBERS.items()}
    change(numbers["up"])
    found: dict[tuple[StoredName, str], np.ndarray] = {}
    for name in ("gate", "up"):
        found[name, "gguf_f32"] = numbers[name].view(np.uint8).reshape(-1)  # type: ignore[index]
        found[name, "bias"] = BIASES[name].view(np.uint8)  # type: ignore[index]
    return found


def outputs(bias: bool = True) -> dict[tuple[StoredName, str], np.ndarray]:
    found: dict[tuple[StoredName, str], np.ndarray] = {("gate_up", "weight"): np.zeros(2 * 4 * 8, np.uint8)}
    return found | ({("gate_up", "bias"): np.zeros(4 * 4, np.uint8)} if bias else {})


SCRATCH = np.zeros(0, np.uint8)


@pytest.mark.parametrize(("interleaved", "order"), [(True, [0, 2, 1, 3]), (False, [0, 1, 2, 3])])
def test_gate_and_up_become_one_matrix(interleaved: bool, order: list[int]) -> None:
    path, made = item(interleaved), outputs()
    assert path.reads == (("gate", "gguf_f32"), ("gate", "bias"), ("up", "gguf_f32"), ("up", "bias"))
    assert path.scratch_bytes == 0
    (change,) = path.transcode(inputs(), made, SCRATCH) or (None,)
    assert change is not None
    assert change.numbers == 0
    rows = np.concatenate([NUMBERS["gate"], NUMBERS["up"]])[order]
    assert np.array_equal(numbers_of(made["gate_up", "weight"].view(np.uint16), "bf16").reshape(4, 8), rows)
    assert made["gate_up", "bias"].view(np.float32).tolist() == [[0.5, 0.25, 3.0, 4.0][place] for place in order]


@pytest.mark.parametrize(("interleaved", "row"), [(True, 1), (False, 2)])
def test_changes_of_both_are_those_of_the_matrix(interleaved: bool, row: int) -> None:
    def inexact(up: np.ndarray) -> None:
        up[0, 5] = 1 + 2**-10

    (change,) = item(interleaved).transcode(inputs(inexact), outputs(), SCRATCH) or (None,)
    assert change is not None
    assert (change.numbers, change.blocks, change.first) == (1, 1, (row, 5))
    assert (change.before, change.after, change.largest) == (1 + 2**-10, 1.0, 2**-10)


def test_what_the_fast_path_leaves_to_the_other() -> None:
    def infinite(up: np.ndarray) -> None:
        up[0, 0] = np.inf

    assert item(True).transcode(inputs(infinite), outputs(), SCRATCH) is None
    no_bias = item(True, bias=False)  # a bias that the target has no place for
    assert no_bias.transcode(inputs(), outputs(bias=False), SCRATCH) is None


def test_the_first_recoder_that_proves_its_result_is_taken() -> None:
    class Failing(NumberRecoder):
        def changes(self, source: Matrices, target: Matrices) -> None:
            asked.append(self)

    asked: list[Recoder] = []
    args = SPEC, AFTER, "f32"
    path = item(False, recoders=(Failing(*args), NumberRecoder(*args), Failing(*args)))
    assert path.transcode(inputs(), outputs(), SCRATCH) is not None
    assert asked == [path.recoders[0]]
    assert item(False, recoders=(Failing(*args),)).transcode(inputs(), outputs(), SCRATCH) is None


def test_a_bias_that_was_written_wrongly_is_noticed() -> None:
    class Written(StoredFloats):
        def finish(self, stored: Any, scratch: Any) -> None:
            stored["bias"][13] ^= 1

    path = item(False)
    stored = Written(replace(AFTER, n=4), ("weight", "bias"), transposed=False)
    wrong = replace(path, writers=(replace(path.writers[0], stored=stored),))
    assert path.transcode(inputs(), outputs(), SCRATCH) is not None
    assert wrong.transcode(inputs(), outputs(), SCRATCH) is None


def test_loops_that_are_not_in_the_cache() -> None:
    class Uncached(NumberRecoder):
        def fill(self, source: Matrices, target: Matrices) -> None:
            raise NotCachedError("a loop")

    found = CachedItem(item(False))
    assert (found.reads, found.scratch_bytes) == (item(False).reads, 0)
    assert found.transcode(inputs(), outputs(), SCRATCH) == item(False).transcode(inputs(), outputs(), SCRATCH)
    assert found.missing is False
    lacking = CachedItem(item(False, recoders=(Uncached(SPEC, AFTER, "f32"),)))
    assert lacking.transcode(inputs(), outputs(), SCRATCH) is None
    assert lacking.missing is True


def projection(before: MatrixSpec, after: MatrixSpec) -> WrittenProjection:
    """A projection of GGUF floats that becomes bfloat16."""
    return written("plain", before, after, stored="f32")


def test_the_fast_path_of_an_item() -> None:
    before, after = replace(SPEC, role="up"), replace(AFTER, role="up")
    one = projection(before, after)
    found = build_fast_item(readers(), {"gate": one, "up": one}, interleaved=False)
    assert found is not None
    assert [(writer.name, writer.holds) for writer in found.writers] == [
        ("gate", (("gate", after),)), ("up", (("up", after),)),
    ]  # fmt: skip
    assert found.recoders == (NumberRecoder(SPEC, AFTER, "f32"),)
    assert found.sorting is None
    stacked = projection(replace(before, role="w13", n=4, gated=True), replace(after, role="w13", n=4, gated=True))
    both = build_fast_item(readers(), {"gate_up": stacked}, interleaved=True)
    assert both is not None
    assert [projection for projection, _ in both.writers[0].holds] == ["gate", "up"]
    assert both.writers[0].interleaved
    # Another number of projections, two ways of recoding, none, and columns in activation order of another projection.
    assert build_fast_item(readers()[:1], {"gate_up": stacked}, interleaved=True) is None
    other = projection(before, replace(after, element="f16"))
    assert build_fast_item(readers(), {"gate": one, "up": other}, interleaved=False) is None
    none = projection(before, replace(after, bias_dtype=None))
    assert build_fast_item(readers(), {"gate": none, "up": none}, interleaved=False) is None
    ordered = projection(replace(before, role="w13", n=4, act_order=True), replace(after, role="w13", n=4))
    assert build_fast_item(readers(), {"gate_up": ordered}, interleaved=True) is None


@pytest.mark.parametrize("dtype", ["bf16", "f32"])
def test_floats_that_are_stored_transposed(dtype: str) -> None:
    """Their values lie in scratch: the width of a bias follows from its bytes."""
    spec = MatrixSpec("w2", 3, 5, dtype, 5, "f32")
    stored = StoredFloats(spec, ("weight", "bias"), transposed=True)
    numbers = np.arange(15, dtype=np.float32).reshape(3, 5)
    bits = bits_of(numbers, dtype)
    assert stored.scratch_bytes == 64
    parts = {"weight": np.ascontiguousarray(bits.T).view(np.uint8).reshape(-1), "bias": np.arange(6, dtype=np.uint8)}
    scratch = np.zeros(64, np.uint8)
    fields = stored.read(parts, scratch)
    assert fields is not None
    assert np.array_equal(fields["values"], bits)
    assert fields["bias"].tolist() == [[0x100], [0x302], [0x504]]
    again = {"weight": np.zeros_like(parts["weight"]), "bias": parts["bias"].copy()}
    stored.blank(again, scratch)["values"][:] = bits
    stored.finish(again, scratch)
    assert np.array_equal(again["weight"], parts["weight"])
    assert SPELLINGS["plain-transposed"].signatures(spec)["weight"].shape == (5, 3)
    plain = StoredFloats(spec, ("weight",), transposed=False)
    assert plain.scratch_bytes == 0
    rows = bits.reshape(-1).view(np.uint8)
    found = plain.read({"weight": rows}, SCRATCH)
    assert found is not None
    assert np.array_equal(found["values"], bits)
    assert np.shares_memory(found["values"], rows)


@pytest.mark.parametrize(
    ("compiled", "cached", "kind"),
    [(0, 0, FastItem), (1 << 60, 0, CachedItem), (1 << 60, 1 << 60, None), (0, 1 << 60, FastItem)],
)
def test_small_items_take_loops_of_the_cache_alone(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, compiled: int, cached: int, kind: type | None
) -> None:
    monkeypatch.setattr(words, "COMPILED_FROM", compiled)
    monkeypatch.setattr(words, "CACHED_FROM", cached)
    made = open_checkpoint(checkpoints / "gptq-int4-g32-qwen3moe")
    plan = make_transcode_plan(made, TranscodeRequest("src", "compressed-tensors"))
    form = plan.files[-1].form
    paths = FastPaths(made, plan, form)
    layer = plan.survey.layers[-1].layer
    found = paths.find(ExpertItem(layer, 1, "w2"))
    assert (found and type(found)) == kind
    assert paths.find(ExpertItem(layer, 2, "w2")) is found, "alike experts share a path"
    assert kind is None or paths.find(ExpertItem(layer, 1, "w13")) is not found
    if isinstance(found, CachedItem):
        found.missing = True
        assert paths.find(ExpertItem(layer, 1, "w2")) is None


def test_places_of_an_item(checkpoints: Path) -> None:
    made = open_checkpoint(checkpoints / "gptq-int4-g32-qwen3moe")
    plan = make_transcode_plan(made, TranscodeRequest("src", "compressed-tensors"))
    paths = FastPaths(made, plan, plan.files[-1].form)
    parts = made.experts(1).layer.parts
    for name, part in (("down", "qweight"), ("gate", "scales")):
        entry = parts[name, part][2]  # type: ignore[index]
        role = "w2" if name == "down" else "w13"
        found = paths.places(ExpertItem(1, 2, role), [(name, part)])  # type: ignore[arg-type,list-item]
        assert found == [(entry.file, entry.start, entry.end)]
    stacked = open_checkpoint(checkpoints / "mxfp4-gptoss")
    other = make_transcode_plan(stacked, TranscodeRequest("src", "compressed-tensors"))
    entry = stacked.experts(1).layer.parts["gate_up", "blocks"][FUSED]
    size = entry.nbytes // 4
    places = FastPaths(stacked, other, other.files[-1].form).places(ExpertItem(1, 3, "w13"), [("up", "blocks")])
    assert places == [(entry.file, entry.start + 3 * size, entry.end)]
