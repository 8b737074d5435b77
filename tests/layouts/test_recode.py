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


def test_tables_by_difference_hold_every_number_of_e4m3_or_none() -> None:
    """A byte of two codes becomes two numbers, and NaN where E4M3 has no such number; the inverse has no code there."""
    table, inverse = recode._to_e4m3(), recode._from_e4m3()
    assert (table.shape, inverse.shape) == ((22, 256), (22, 256))  # from -11 to 9, and groups of zeros
    for row, difference in enumerate(range(-11, 10)):
        numbers = {}
        for code in ALL:
            number = int(e4m3(recode.E2M1[[code]] * 2.0**difference)[0])
            wanted = number if exact(code, difference) else 0x7F | (code & 8) << 4
            assert table[row, code | 3 << 4] & 0xFF == wanted, (difference, code)
            assert table[row, 3 | code << 4] >> 8 == wanted, (difference, code)
            if exact(code, difference):
                numbers[number] = code
        assert [int(code) for code in inverse[row]] == [numbers.get(number, 0x100) for number in range(256)]
    for code in ALL:
        assert table[21, code] == {0: 0, 8: 0x80}.get(code, 0x7F)
    assert {place: int(code) for place, code in enumerate(inverse[21]) if code != 0x100} == {0: 0, 0x80: 8}


@pytest.mark.parametrize("shift", [-120, -3, 0, 5, 100])
def test_exponents_become_the_nearest_power_that_e4m3_holds(shift: int) -> None:
    """2**-9 is its least number and 2**8 its greatest power."""
    exponents = np.arange(256, dtype=np.uint8).reshape(2, 128)
    out = np.empty((2, 256), np.uint8)
    recode.to_e4m3_scales(exponents, shift, out)
    powers = 2.0 ** np.clip(exponents.astype(np.int64) - BIAS - shift, -9, 8)
    assert (out == np.repeat(e4m3(powers), 2, axis=1)).all()


def test_scales_are_proven_where_a_group_holds_more_than_zeros() -> None:
    codes = np.zeros((2, 64), np.uint8)
    codes[0, 0], codes[1, 63] = 7, 12
    exponents = np.full((2, 2), BIAS - 2, np.uint8)
    out = np.empty((2, 4), np.uint8)
    recode.to_e4m3_scales(exponents, -3, out)
    assert recode.holds_e4m3_scales(packed(codes), exponents, out, 2.0**-3)
    assert not recode.holds_e4m3_scales(packed(codes), exponents, out, 2.0**-4)
    for row, group in ((0, 0), (1, 3)):
        wrong = out.copy()
        wrong[row, group] += 1
        assert not recode.holds_e4m3_scales(packed(codes), exponents, wrong, 2.0**-3)
    unused = out.copy()
    unused[0, 1:], unused[1, :3] = 0x11, 0x22
    assert recode.holds_e4m3_scales(packed(codes), exponents, unused, 2.0**-3)


def test_tables_by_exponent_have_256_rows() -> None:
    assert recode._values().shape == (256, 16)
    assert recode._to_bfloat16().shape == (256, 256)
    assert {recode._e4m3_powers(shift).shape for shift in (-3, 0, 7)} == {(256,)}
    powers = np.float64(2.0) ** (np.arange(256) - BIAS)
    with np.errstate(over="ignore"):
        wanted = (powers[:, None] * np.float64([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])).astype(
            np.float32
        )
    np.testing.assert_array_equal(recode._values(), wanted)
