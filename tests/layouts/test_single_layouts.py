"""What single layouts do that no other one does, and what index maps refuse."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from layouts.matrices import block, random_matrix, same
from refusing import refuses

from moeq.layouts import words
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import Problem
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec

NO_BLOCKS = "is not a whole number of blocks of"
NO_4 = "is no multiple of 4"
INT4 = MatrixSpec("w2", 64, 256, "int4", 32, "f16", symmetric=False)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("n c4, k -> k n c4 D", "not a digit: 'D'"),
        ("n c4, k -> k n", "'n c4, k -> k n': the right side must hold every digit of the left side once"),
        ("n c4, k n2 -> k n c", "'n c4, k n2 -> k n c': the right side must hold every digit of the left side once"),
        ("n c4, k -> k n c c", "'n c4, k -> k n c c': the right side must hold every digit of the left side once"),
    ],
)
def test_patterns_that_are_no_permutation(pattern: str, message: str) -> None:
    with pytest.raises(ValueError, match=r"^") as caught:
        Arrangement(pattern)
    assert str(caught.value) == message


def test_sizes_that_a_pattern_does_not_divide() -> None:
    order = Arrangement("n c4, k d2 -> n k d | ~c")
    assert (order.row_multiple, order.column_multiple, order.fields_per_word) == (4, 2, 4)
    assert order.radices(12, 10) == {"n": 3, "c": 4, "k": 5, "d": 2}
    for size, text in (((13, 10), "13 is not a multiple of 4"), ((12, 11), "11 is not a multiple of 2")):
        with pytest.raises(ValueError, match=f"^{text} in '{order.pattern.replace('|', '.')}'$"):
            order.radices(*size)


@pytest.mark.parametrize("symmetric", [True, False])
def test_fp8_activations_and_zero_points(symmetric: bool) -> None:
    layout, spec = get_layout("marlin-wna16-fp8act/1"), replace(INT4, symmetric=symmetric, scale_dtype="bf16")
    matrix = random_matrix(spec)
    packed = layout.pack(matrix)
    assert packed.keys() == {"weight", "scale", *(() if symmetric else ("zero",))}
    assert same(layout.unpack(packed, spec), matrix)


def test_blocks_of_a_cpu_with_their_sums() -> None:
    layout, matrix = get_layout("cpu-amx-int4/1"), random_matrix(INT4)
    packed = layout.pack(matrix)
    assert packed["weight"].shape == (2, 8, 16 * 32 + 128)
    sums = packed["weight"][..., -128:].contiguous().view(torch.int32)
    assert matrix.zeros is not None
    centred = matrix.codes.int() - matrix.zeros.int().repeat_interleave(32, 1)
    assert torch.equal(sums, centred.view(2, 32, 8, 32).sum(3, dtype=torch.int32).transpose(1, 2))
    out = {name: torch.zeros_like(packed[name]) for name in ("scale", "zero")}
    layout.pack_into(matrix, out)
    assert all(torch.equal(one, packed[name]) for name, one in out.items())
    for n, k in (((0, 32), (0, 256)), ((32, 64), (64, 192)), ((0, 64), (224, 256))):
        part = block(matrix, n, k)
        cut = layout.slice_parts(packed, INT4, n=n, k=k)
        assert same(layout.unpack(cut, part.spec), part)
        assert torch.equal(cut["weight"], layout.pack(part)["weight"])
    matrix.zeros[1, 1] = 127
    layout.pack(matrix)
    matrix.zeros[1, 1] = 128
    with refuses("usage.zero-point-range", "cpu-amx-int4/1 stores zero points as int8"):
        layout.pack(matrix)


@pytest.mark.parametrize(
    ("k", "group", "problem"),
    [
        (256, 32, None),
        (384, 384, None),
        (96, 96, None),
        (130, 130, Problem("layout.k-multiple", f"K = 130 {NO_BLOCKS} 128 codes, or 128 {NO_4}", "pad K to 256")),
        (126, 126, Problem("layout.k-multiple", f"K = 126 {NO_BLOCKS} 126 codes, or 126 {NO_4}", "pad K to 128")),
        (384, 192, Problem("layout.group-size", "groups of 192 are not a whole number of blocks of 128 codes",
                           "groups of 32, 64, 128 or a multiple of 128")),
        (252, 126, Problem("layout.group-size", "groups of 126 are not a whole number of blocks of 126 codes",
                           "groups of 32, 64, 128 or a multiple of 128")),
    ],
)  # fmt: skip
def test_groups_that_fill_no_blocks_of_a_cpu(k: int, group: int, problem: Problem | None) -> None:
    found = get_layout("cpu-amx-int4/1").problems(replace(INT4, k=k, group_size=group))
    assert found == ([] if problem is None else [problem])


def test_slices_of_columns_of_a_cpu() -> None:
    layout = get_layout("cpu-amx-int4/1")
    units = [layout.slices(replace(INT4, k=k, group_size=group)).k for k, group in ((256, 32), (256, 256), (128, 128))]
    assert units == [32, 128, None]


def test_humming_looks_at_symmetric_weights_alone() -> None:
    layout, symmetric = get_layout("humming-wna16/1"), random_matrix(replace(INT4, symmetric=True))
    text = "humming-wna16/1: Humming recodes symmetric weights in which code 0 never occurs over all local experts"
    with refuses("usage.survey-needed", f"{text}; calibrate first"):
        layout.pack(symmetric)
    assert (layout.calibrate(symmetric), layout.calibrate(random_matrix(INT4))) == (1.0, None)
    layout.with_calibration(1.0).pack(symmetric)
    layout.pack(random_matrix(INT4))
    symmetric.codes.clamp_(min=1)
    assert layout.calibrate(symmetric) == 0.0


def test_kernels_of_aiter_that_take_gate_and_up() -> None:
    spec = MatrixSpec("w13", 512, 256, "e4m3", 32, "e8m0")
    layout = get_layout("aiter-mxfp8/1")
    assert layout.problems(spec) == []
    assert [one.code for one in layout.problems(replace(spec, gated=False))] == ["layout.gate"]
    (found,) = layout.problems(replace(spec, role="w2", n=384))
    assert (found.code, found.message) == ("layout.n-multiple", "N = 384 is not a multiple of 256 (384 % 256 = 128)")


def test_act_order_needs_the_groups_of_columns() -> None:
    spec = replace(INT4, act_order=True, symmetric=True)
    layout, matrix = get_layout("marlin-act-order/1"), random_matrix(spec)
    with refuses("source.bad-group-index", "w2: act-order without group indices"):
        layout.pack(replace(matrix, group_index=None))
    one = random_matrix(replace(spec, group_size=256))
    packed = layout.pack(replace(one, group_index=None))
    assert packed["permutation"].tolist() == list(range(256))


def test_without_numba_no_loop_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "moeq.layouts.loops.native", None)
    assert (words.have_numba.__wrapped__(), words.have_cached.__wrapped__()) == (False, False)
    monkeypatch.setattr(words, "have_numba", lambda: True)
    monkeypatch.setattr(words, "have_cached", lambda: True)
    monkeypatch.setattr(words, "COMPILED_FROM", 8)
    monkeypatch.setattr(words, "CACHED_FROM", 4)
    assert [(words.use_compiled(size), words.use_cached(size)) for size in (3, 4, 7, 8)] == [
        (False, False), (False, True), (False, True), (True, True),
    ]  # fmt: skip
    asked = [words._compiled(wanted, size) for wanted in (None, True, False) for size in (7, 8)]
    assert asked == [False, True, True, True, False, False]
    with pytest.raises(KeyError):
        words.word_dtype(12)
    dtypes = [words.word_dtype(bits) for bits in (8, 16, 32, 64)]
    assert dtypes == [torch.uint8, torch.int16, torch.int32, torch.int64]
