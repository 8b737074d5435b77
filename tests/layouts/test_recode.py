"""Loops that recode MXFP4: every code under every difference of exponents, tables and shifts alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from moeq.layouts.loops import recode

BIAS = 127
ALL = list(range(16))


def e4m3(values: np.ndarray) -> np.ndarray:
    """Bytes of E4M3 by torch's rounding."""
    return torch.from_numpy(values.astype(np.float32)).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


def exact(code: int, difference: int) -> bool:
    """Whether E4M3 holds a code's number times a power of two."""
    value = float(recode.E2M1[code]) * 2.0**difference
    return abs(value) <= 448 and float(torch.tensor(value).to(torch.float8_e4m3fn)) == value


def packed(codes: np.ndarray) -> np.ndarray:
    return (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)


@pytest.mark.parametrize("difference", range(recode.LOWEST - 3, recode.HIGHEST + 1))
@pytest.mark.parametrize("wide", [True, False])
def test_every_code_under_every_difference_of_exponents(difference: int, wide: bool) -> None:
    """A first group of sixes makes the block's scale 2**-6; the second lies by the difference above or below it."""
    codes = np.full((2, 128), 7, np.uint8)
    fitting = [code for code in ALL if exact(code, difference)]
    codes[:, 32:64] = np.resize(np.array(fitting, np.uint8), (2, 32))
    codes[:, 64:] = 0
    exponents = np.full((2, 4), BIAS, np.uint8)
    exponents[:, 1] = BIAS + difference - 6
    out = np.empty((2, 128), np.uint8)
    scales = np.empty((2, 1), np.uint32 if wide else np.uint8)
    recode.to_fp8_blocks(packed(codes), exponents, out, scales)
    assert (scales == ((BIAS - 6) << 23 if wide else BIAS - 6)).all()
    expected = recode.E2M1[codes] * np.where(np.arange(128) // 32 == 1, 2.0**difference, 2.0**6)
    assert (out == e4m3(expected)).all()
    assert recode.holds_fp8_blocks(packed(codes), exponents, out, scales)
    for column in (0, 33, 40, 127):
        wrong = out.copy()
        wrong[1, column] ^= 1
        assert not recode.holds_fp8_blocks(packed(codes), exponents, wrong, scales)


@pytest.mark.parametrize("exponent", [*range(8), *range(120, 134), *range(246, 255)])
def test_every_code_becomes_bfloat16(exponent: int) -> None:
    codes = np.array([ALL * 2, ALL[::-1] * 2], np.uint8)
    exponents = np.full((2, 1), exponent, np.uint8)
    out = np.empty((2, 32), np.uint16)
    recode.to_bf16(packed(codes), exponents, out)
    values = torch.from_numpy(recode.E2M1[codes].astype(np.float64) * 2.0 ** (exponent - BIAS))
    expected = values.to(torch.float32).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    assert (out == expected).all()


@pytest.mark.parametrize("code", ALL)
def test_every_code_of_every_group_uses_its_exponent(code: int) -> None:
    exponents = np.array([[10, 20, 250], [30, 1, 5]], np.uint8)
    for row, column in [(row, column) for row in (0, 1) for column in (0, 15, 16, 31, 32, 47, 48, 63, 64, 79, 80, 95)]:
        codes = np.zeros((2, 96), np.uint8)
        codes[row, column] = code
        used = int(exponents[row, column // 32])
        expected = (255, -1) if code in (0, 8) else (used, used)  # both zeros
        assert recode.used_exponents(packed(codes), exponents) == expected
    codes = np.zeros((2, 96), np.uint8)
    codes[0, 70] = codes[1, 40] = 3
    assert recode.used_exponents(packed(codes), exponents) == (1, 250)
