"""Codecs of scales: tables and repeated rows give what arithmetic on every number gives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeq.layouts.float_bits import bits_of, numbers_of
from moeq.pipeline.pack.fast.codecs import Shifted, _shifted
from moeq.pipeline.pack.fast.parts import FastPart, present

WIDTHS = {"f32": np.uint32, "bf16": np.uint16, "f16": np.uint16, "e8m0": np.uint8}


def arithmetic(logical: np.ndarray, dtype: str, params: str, exponent: int) -> np.ndarray:
    """Store numbers one by one, in float64: rounded to the dtype of the parameters, times the power of two."""
    kind = "bf16" if params == "BF16" else "f16"
    with np.errstate(over="ignore"):
        rounded = numbers_of(bits_of(numbers_of(logical, dtype), kind), kind).astype(np.float64)
        return bits_of((rounded * 2.0**exponent).astype(np.float32), kind)


@pytest.mark.parametrize(("params", "exponent"), [("BF16", 120), ("F16", 8)])
@pytest.mark.parametrize("dtype", list(WIDTHS))
@pytest.mark.parametrize(("rows", "repeats"), [(256, 1), (256, 64), (16384, 128), (100, 33)])
def test_shifted_scales(dtype: str, params: str, exponent: int, rows: int, repeats: int) -> None:
    numbers = np.random.default_rng(rows + repeats).normal(size=(-(-rows // repeats), 3)).astype(np.float32)
    powers = np.exp2(np.round(np.log2(np.abs(numbers))))  # which every dtype stores exactly
    once = bits_of(powers if dtype == "e8m0" else numbers, dtype).astype(WIDTHS[dtype])
    logical = np.repeat(once, repeats, axis=0)[:rows]
    codec, out = Shifted(dtype, params, exponent, repeats), np.zeros((rows, 5), np.uint16)
    codec.widen(logical, out[:, 1:4])
    assert np.array_equal(out[:, 1:4], arithmetic(logical, dtype, params, exponent))
    assert not out[:, [0, 4]].any()
    again = np.empty_like(logical)
    codec.narrow(out[:, 1:4], again)
    assert codec.exact(logical) == np.array_equal(again, logical)
    exact = bits_of(np.abs(powers), dtype).astype(WIDTHS[dtype])
    assert codec.exact(np.repeat(exact, repeats, axis=0)[:rows])


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_one_inexact_or_infinite_scale_among_many_is_found(dtype: str) -> None:
    codec = Shifted(dtype, "BF16", 120, 128)
    scales = np.full((256 * 128, 4), bits_of(np.float32([1.0]), dtype)[0])
    assert codec.exact(scales)
    bad = {"f32": [1 + 2**-20, 3e38], "bf16": [3e38, 1e30]}[dtype]
    for number in bad:
        scales[128 * 77 : 128 * 78, 2] = bits_of(np.float32([number]), dtype)[0]
        assert not codec.exact(scales)


@pytest.mark.parametrize(("logical", "bits"), [("e8m0", 8), ("bf16", 16), ("f16", 16)])
def test_tables_have_every_number_once(logical: str, bits: int) -> None:
    stored, kept = _shifted(logical, "BF16", 120)
    assert (stored.shape, kept.shape) == ((1 << bits,), (1 << bits,))
    one = int(bits_of(np.float32([1.0]), logical)[0])
    assert (int(kept[one]), int(kept[-1])) == (1, 0)  # the last is no number


@pytest.mark.parametrize("every", [1, 2, 3])
def test_rows_that_share_a_stored_row_are_sampled_and_spread(every: int) -> None:
    part: Any = SimpleNamespace(every=every, starts=(0, 0))
    part.sampled = lambda views: FastPart.sampled(part, views)
    part._shared = lambda views: FastPart._shared(part, views)
    first, second = np.arange(6.0).repeat(every).reshape(-1, 1), np.arange(10.0, 16.0).repeat(every).reshape(-1, 1)
    sampled = FastPart.sampled(part, [first, None])
    assert sampled[1] is None
    assert present(sampled[0])[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert FastPart.shares(part, [first, second])
    first[-1] += 1
    assert FastPart.shares(part, [first, second]) is (every == 1)
    FastPart.spread(part, [first, second])
    assert first[-1] == (6.0 if every == 1 else 5.0)
    assert FastPart.shares(part, [first, second])
