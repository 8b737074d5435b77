"""Compiled loops over GGUF blocks against torch, and against the gguf package's own numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from gguf_files import random_tensor

from moeq.layouts.loops import blocks
from moeq.schemes.gguf_blocks import CODED, WIDENED


def random_rows(kind: str, n: int, k: int, seed: int) -> np.ndarray:
    raw = random_tensor(np.random.default_rng(seed), kind, (n, k))[2]
    return np.frombuffer(raw, np.uint8).reshape(n, -1)


@pytest.mark.parametrize("kind", blocks.SCALE_BYTES)
@pytest.mark.parametrize(("n", "k"), [(1, 64), (3, 288), (5, 192), (33, 1024)])
def test_codes_and_scales_are_those_of_torch(kind: str, n: int, k: int) -> None:
    coded = (CODED | WIDENED)[kind]
    k -= k % coded.block
    rows = random_rows(kind.removesuffix("_int8"), n, k, seed=n)
    bits = 4 if coded.element in ("int4", "e2m1") else 8
    codes = np.full((n, k * bits // 8), 0xA5, np.uint8)
    scales = np.full((n, k // coded.block * blocks.SCALE_BYTES[kind]), 0xA5, np.uint8)
    blocks.split(kind, rows, codes, scales)
    found, expected = coded.unpack(torch.from_numpy(rows.copy()).reshape(-1, coded.octets))
    numbers = found.numpy().reshape(n, k)
    assert np.array_equal(codes, numbers[:, ::2] | numbers[:, 1::2] << 4 if bits == 4 else numbers)
    assert np.array_equal(scales, expected.view(torch.uint8).numpy().reshape(n, -1))


@pytest.mark.parametrize("kind", blocks.NUMBERS)
@pytest.mark.parametrize("scales", ["usual", "any"])
def test_numbers_are_bit_equal_to_those_of_the_gguf_package(kind: str, scales: str) -> None:
    gguf = pytest.importorskip("gguf")
    rows = random_rows(kind, 31, 1024, seed=7)
    if scales == "any":  # infinities, NaN and subnormal float16 among them
        rows = np.random.default_rng(8).integers(0, 256, rows.shape, np.uint8)
    out = np.empty((31, 1024), np.float32)
    blocks.numbers(kind, rows, out)
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.upper()])
    assert np.array_equal(out, expected, equal_nan=True)
    finite = np.isfinite(expected)
    assert np.array_equal(out.view(np.uint32)[finite], expected.view(np.uint32)[finite])
