"""Numbers and their bits, for every code of 8 and of 16 bits, against torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moeq.layouts.float_bits import bits_of, e4m3_values, numbers_of

DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "e8m0": torch.float8_e8m0fnu,
    "e4m3": torch.float8_e4m3fn,
}  # fmt: skip
CODES = {
    **dict.fromkeys(("e8m0", "e4m3"), np.arange(256).astype(np.uint8)),
    **dict.fromkeys(("bf16", "f16"), np.arange(1 << 16).astype(np.uint16)),
    "f32": np.random.default_rng(0).integers(0, 1 << 32, 5000).astype(np.uint32),
}


def by_torch(bits: np.ndarray, dtype: str) -> np.ndarray:
    found: np.ndarray = torch.from_numpy(bits.copy()).view(DTYPES[dtype]).float().numpy()
    return found


@pytest.mark.parametrize("dtype", CODES)
def test_every_number_has_its_bits(dtype: str) -> None:
    bits = CODES[dtype]
    numbers = numbers_of(bits, dtype)
    assert numbers.dtype == np.float32
    np.testing.assert_array_equal(numbers, by_torch(bits, dtype))
    real = ~np.isnan(numbers)
    np.testing.assert_array_equal(np.signbit(numbers[real]), np.signbit(by_torch(bits, dtype)[real]))
    if dtype != "e4m3":
        found = bits_of(numbers[real], dtype)
        assert found.dtype == bits.dtype
        np.testing.assert_array_equal(found, bits[real])


def test_tables_have_an_entry_for_each_byte() -> None:
    assert e4m3_values().shape == (256,)
    assert np.flatnonzero(np.isnan(e4m3_values())).tolist() == [0x7F, 0xFF]
    with pytest.raises(IndexError):
        numbers_of(np.array([256]), "e8m0")
    with pytest.raises(IndexError):
        numbers_of(np.array([256]), "e4m3")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_numbers_between_are_rounded_to_nearest_even(dtype: str) -> None:
    bits = np.arange(0, 0x7F7F if dtype == "bf16" else 0x7BFF, 37).astype(np.uint16)  # the last is the greatest number
    low, high = (numbers_of(bits + np.uint16(step), dtype).astype(np.float64) for step in (0, 1))
    for share in (0.25, 0.5, 0.75):
        between = (low + share * (high - low)).astype(np.float32)
        between = np.concatenate([between, -between])
        wanted = torch.from_numpy(between).to(DTYPES[dtype]).view(torch.int16).numpy().view(np.uint16)
        np.testing.assert_array_equal(bits_of(between, dtype), wanted)
    assert bits_of(np.array([1e6], np.float32), "f16").tolist() == [0x7C00], "too large for binary16: infinite"


def test_what_is_no_power_of_two_is_no_exponent() -> None:
    numbers = np.array([1, 2, 0.5, 2.0**-127, 2.0**127, 3, 0, -1, np.inf, np.nan, 2.0**-128], np.float64)
    assert bits_of(numbers, "e8m0").tolist() == [127, 128, 126, 0, 254, 255, 255, 255, 255, 255, 255]
