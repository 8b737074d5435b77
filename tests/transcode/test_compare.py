"""Comparison of values in compiled loops and in torch: the same report, also of numbers that are not finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeq.layouts import words
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.transcode.compare import Loss, compare


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
