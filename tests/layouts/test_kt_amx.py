"""Compiled loops of ktransformers' experts: the bytes of the library's own C++, and those of torch at every block."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from schemes.test_kt_amx import VECTORS, format_of, packed, spec_of, values

from moeq.layouts.loops import floats, kt_amx
from moeq.schemes.kt_amx import quantized, weight_part


def tiles_of(numbers: torch.Tensor, bits: int, groups: int) -> tuple[np.ndarray, np.ndarray]:
    """Tiles and scales by the loops, which also turn them back."""
    n, k = numbers.shape
    form = format_of(bits)
    blocks = bits, form.row_block, form.column_block
    codes, scales = np.full((n, k * bits // 8), 0xA5, np.uint8), np.empty((n, groups), np.float32)
    kt_amx.quantize(numbers.numpy().copy(), bits, codes, scales)
    tiles, again = np.empty(codes.size // 4, np.uint32), np.empty_like(codes)
    kt_amx.tile(codes.view(np.uint32), *blocks, tiles)
    kt_amx.untile(tiles, *blocks, again.view(np.uint32))
    assert np.array_equal(again, codes)
    return tiles, scales


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: f"int{vector['bits']}-{vector['n']}x{vector['k']}")
def test_bytes_of_the_library(vector: dict[str, Any]) -> None:
    bits = vector["bits"]
    tiles, scales = tiles_of(values(vector["n"], vector["k"]), bits, 1)
    assert hashlib.sha256(tiles.tobytes()).hexdigest() == vector["weight"]
    stored = scales / np.float32(format_of(bits).step)
    assert hashlib.sha256(stored.tobytes()).hexdigest() == vector["scale"]


@pytest.mark.parametrize(("n", "k"), [(32, 128), (160, 3584 + 256), (64, 2 * 3584 + 128)])
@pytest.mark.parametrize("bits", [4, 8])
def test_numbers_of_every_size_as_torch_has_them(bits: int, n: int, k: int) -> None:
    """Rows of zeros, of numbers too small for an inverse, of ties and of the largest magnitudes among them."""
    rng = np.random.default_rng(n)
    numbers = (rng.standard_normal((n, k)) * np.exp(20 * rng.standard_normal((n, 1)))).astype(np.float32)
    numbers[0], numbers[1], numbers[2, 1::2], numbers[3] = 0, 1e-38, -numbers[2, ::2], rng.integers(-127, 128, k)
    numbers[4, 5] = 3.3e38
    matrix = quantized(torch.from_numpy(numbers), spec_of("up", n, k, bits, k))
    tiles, scales = tiles_of(torch.from_numpy(numbers), bits, 1)
    assert np.array_equal(tiles.view(np.int8), packed(matrix, 1)[weight_part(0)].numpy())
    assert np.array_equal(scales, matrix.scales.numpy())


def test_numbers_that_are_not_finite_have_no_scale() -> None:
    numbers = torch.ones(32, 128)
    numbers[3, 7], numbers[5, 9], numbers[6, 1] = float("inf"), float("nan"), torch.finfo(torch.float32).max
    _, scales = tiles_of(numbers, 8, 1)
    assert np.flatnonzero(np.isnan(scales)).tolist() == [3, 5, 6]  # the last one is infinite in bfloat16


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("element", "group"), [("int4", 32), ("int4", 24), ("int8", 48), ("e2m1", 32), ("e4m3", 64)])
def test_codes_become_what_their_numbers_become(element: str, group: int, bits: int, nodes: int) -> None:
    """Codes of every kind, scales that float32 holds and others, columns of a row that no vector divides."""
    rng = np.random.default_rng([group, bits, nodes])
    n, k = 40, 192
    width = 4 if element in ("int4", "e2m1") else 8
    codes = rng.integers(0, 1 << 32, (n, k * width // 32), dtype=np.uint32)
    if element == "e4m3":
        codes &= np.uint32(0xBFBFBFBF)  # no NaN
    scales = rng.standard_normal((n, k // group)) * np.exp(2 * rng.standard_normal((n, 1)))
    scales[::2], scales[4] = scales[::2].astype(np.float16), 0
    zeros = rng.integers(0, 1 << width, scales.shape).astype(np.uint8) * (element[0] == "i")
    matrix = floats.CodedMatrix(
        element, codes, zeros.astype(np.uint8), scales, np.arange(k, dtype=np.int32) // group, group
    )
    numbers = np.empty((n, k), np.float32)
    floats.write(matrix, numbers.view(np.uint32), binary16=False)
    found, wanted = (np.empty((n, k * bits // 8), np.uint8) for _ in range(2))
    steps, wanted_steps = (np.empty((n, nodes), np.float32) for _ in range(2))
    kt_amx.quantize_codes(matrix, bits, found, steps)
    kt_amx.quantize(numbers, bits, wanted, wanted_steps)
    assert np.array_equal(found, wanted)
    assert np.array_equal(steps, wanted_steps, equal_nan=True)
