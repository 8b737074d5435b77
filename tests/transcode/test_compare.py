"""Comparison of values in compiled loops and in torch: the same report, also of numbers that are not finite."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moeq.layouts import words
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.transcode.compare import Loss, compare, relative, same_codes


@pytest.mark.parametrize("seed", range(12))
def test_both_ways_say_the_same(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    draw = np.random.default_rng(seed)
    n, k = int(draw.choice([1, 33, 300, 520])), int(draw.choice([32, 96, 200]))
    values = torch.from_numpy(draw.standard_normal((n, k)).astype(np.float32))
    written = values.to([torch.bfloat16, torch.float16, torch.float32][seed % 3], copy=True)
    if seed % 3 == 2:
        written[draw.integers(n), draw.integers(k)] += 1
    if seed % 4 == 3:
        values[draw.integers(n), draw.integers(k)] = [np.nan, np.inf][seed % 2]
        written[draw.integers(n), draw.integers(k)] = torch.nan
    before = QuantizedMatrix(MatrixSpec("down", n, k, "f32", k, "f32"), values, torch.ones(n, 1))
    block = [(1, k), (1, 32), (128, 128), (-1, -1)][int(draw.integers(4))]
    found: list[Loss | None] = []
    for least in (0, 1 << 40):
        monkeypatch.setattr(words, "COMPILED_FROM", least)
        found.append(compare("m", before, written, block))
    assert found[0] is not None
    assert str(found[0]) == str(found[1])


def test_equal_numbers_are_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    values = torch.tensor([[0.0, 1.0], [-0.0, 2.0]])
    before = QuantizedMatrix(MatrixSpec("down", 2, 2, "f32", 2, "f32"), values, torch.ones(2, 1))
    assert compare("m", before, -values.neg().abs() * torch.tensor([1.0, -1.0]), (1, 2)) is None


def fp8_scaled(*scales: int) -> QuantizedMatrix:
    """One row of codes whose groups of 16 have these bytes of E4M3 as scales."""
    spec = MatrixSpec("down", 1, 16 * len(scales), "e2m1", 16, "e4m3")
    codes = (torch.arange(spec.k) % 16).to(torch.uint8).view(1, -1)
    stored = torch.tensor([scales], dtype=torch.uint8).view(torch.float8_e4m3fn)
    return QuantizedMatrix(spec, codes, stored, global_scale=torch.ones(1))


def test_equal_parts_have_equal_bits() -> None:
    """Scales of zero and minus zero differ, and a NaN is itself; the numbers are compared after that."""
    zero, minus, nan = fp8_scaled(0x38, 0x00), fp8_scaled(0x38, 0x80), fp8_scaled(0x38, 0x7F)
    assert [same_codes(one, one) for one in (zero, minus, nan)] == [True] * 3
    assert not same_codes(zero, minus)
    assert compare("m", zero, minus, (1, 16)) is None


@pytest.mark.parametrize(
    "change",
    [
        {"codes": torch.ones(1, 32, dtype=torch.uint8)},
        {"codes": torch.zeros(1, 16, dtype=torch.uint8)},
        {"scales": torch.tensor([[2.0, 1.0]])},
        {"scales": torch.ones(1, 2).half()},
        {"zeros": torch.ones(1, 2, dtype=torch.uint8)},
        {"zeros": None},
        {"group_index": torch.ones(32, dtype=torch.int32)},
        {"group_index": None},
        {"global_scale": torch.full((1,), 2.0)},
        {"spec": MatrixSpec("down", 1, 32, "int8", 16, "f32", symmetric=False)},
    ],
)
def test_every_part_counts(change: dict[str, Any]) -> None:
    spec = MatrixSpec("down", 1, 32, "int4", 16, "f32", symmetric=False, act_order=True)
    before = QuantizedMatrix(
        spec,
        torch.zeros(1, 32, dtype=torch.uint8),
        torch.ones(1, 2),
        torch.zeros(1, 2, dtype=torch.uint8),
        group_index=torch.arange(32, dtype=torch.int32) // 16,
        global_scale=torch.ones(1),
    )
    assert same_codes(before, replace(before))
    assert not same_codes(before, replace(before, **change))
    assert not same_codes(before, torch.zeros(1, 32))


def test_a_row_of_the_report() -> None:
    before = QuantizedMatrix(MatrixSpec("down", 3, 8, "f32", 8, "f32"), torch.full((3, 8), 2.0), torch.ones(3, 1))
    after = torch.full((3, 8), 2.0)
    after[1, 5], after[2, 4] = 2.5, 1.0
    found = compare("m", before, after, (2, 4))
    assert found is not None
    assert (found.numbers, found.of, found.blocks, found.of_blocks, found.block) == (2, 24, 2, 4, (2, 4))
    assert (found.max_abs, found.first, found.before, found.after) == (1.0, (1, 5), 2.0, 2.5)
    assert found.relative == pytest.approx((1.25 / 96) ** 0.5)
    assert Loss.from_json(found.to_json()) == found
    assert (relative(1.0, 0.0), relative(4.0, 1.0)) == (float("inf"), 2.0)
    assert found.text == (
        "m: 2 of 4 blocks (2 x 4), 2 of 24 numbers; largest change 1, relative 0.114; first [1, 5]: 2 became 2.5"
    )


@pytest.mark.parametrize("least", [0, 1 << 40], ids=["compiled", "torch"])
def test_numbers_that_are_not_finite_have_no_part_in_the_norm(least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    monkeypatch.setattr(words, "COMPILED_FROM", least)
    values = torch.tensor([[torch.inf, -torch.inf, torch.nan, 2.0]])
    before = QuantizedMatrix(MatrixSpec("down", 1, 4, "f32", 4, "f32"), values, torch.ones(1, 1))
    after = values.clone()
    after[0, 3] = 3.0
    found = compare("m", before, after, (1, 4))
    assert found is not None
    assert (found.numbers, found.relative, found.first) == (1, 0.5, (0, 3))


def test_scales_are_compared_as_numbers() -> None:
    spec = MatrixSpec("down", 1, 128, "int4", 16, "f32")
    before = QuantizedMatrix(spec, torch.zeros(1, 128, dtype=torch.uint8), torch.zeros(1, 8))
    assert same_codes(before, replace(before, scales=-torch.zeros(1, 8)))
    assert not same_codes(before, replace(before, scales=torch.full((1, 8), torch.nan)))
