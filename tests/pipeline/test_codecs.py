"""Codecs of scales: tables and repeated rows give what arithmetic on every number gives."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moeq.layouts.flashinfer import MIN_BLOCK_SCALE
from moeq.layouts.float_bits import bits_of, e4m3_values, numbers_of
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec
from moeq.pipeline.pack.fast.codecs import (
    AsFloat32,
    Codec,
    Exponents,
    Fnuz,
    MarlinE5M3,
    Shifted,
    WidenedBf16,
    WidenedF16,
    ZeroSigns,
    _shifted,
    codecs_of,
)
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


def numbers_in(dtype: str, *numbers: float) -> np.ndarray:
    return bits_of(np.array([numbers], np.float32), dtype)


@pytest.mark.parametrize(("codec", "dtype"), [(WidenedBf16(), "bf16"), (WidenedF16(), "f16")])
def test_scales_are_stored_wider(codec: Codec, dtype: str) -> None:
    logical = numbers_in(dtype, 1.5, -2.0, 0.0, 2.0**-14)
    out, again = np.zeros((1, 4), np.uint32), np.zeros((1, 4), np.uint16)
    codec.widen(logical, out)
    assert out.view(np.float32).tolist() == [[1.5, -2.0, 0.0, 2.0**-14]]
    codec.narrow(out, again)
    assert np.array_equal(again, logical)
    assert codec.exact(logical)
    assert (codec.rounded(logical), codec.stores(logical, out)) == (None, None)


def test_exponents_are_stored_as_numbers() -> None:
    logical = np.array([[0, 1, 127, 254]], np.uint8)
    out, again = np.zeros((1, 4), np.uint32), np.zeros((1, 4), np.uint8)
    Exponents().widen(logical, out)
    assert out.view(np.float32).tolist() == [[0.0, 2.0**-126, 1.0, 2.0**127]]
    Exponents().narrow(out, again)
    assert np.array_equal(again, logical)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_scales_times_a_power_above_a_minimum(dtype: str) -> None:
    codec = AsFloat32(dtype, factor=2.0, least=0.25)
    logical = numbers_in(dtype, 0.25, 1.5, 0.125, -1.0)
    out = np.zeros((1, 4), np.uint32)
    codec.widen(logical, out)
    assert out.view(np.float32).tolist() == [[0.5, 3.0, 0.5, 0.5]]
    rounded = codec.rounded(logical)
    assert rounded is not None
    assert np.array_equal(rounded, numbers_in(dtype, 0.25, 1.5, 0.25, 0.25))
    assert codec.exact(logical[:, :2])
    assert not codec.exact(logical)
    plain = AsFloat32(dtype)
    assert plain.exact(logical)
    plain.widen(logical, out)
    assert np.array_equal(out.view(np.float32), numbers_of(logical, dtype))


def test_scales_that_overflow_cannot_be_rounded() -> None:
    codec = AsFloat32("f32", factor=2.0)
    largest = np.array([[0x7F7FFFFF]], np.uint32)
    assert codec.rounded(largest) is None
    assert not codec.exact(largest)
    assert codec.exact(np.array([[0x7EFFFFFF]], np.uint32))
    shifted = Shifted("f32", "F16", 8)
    assert shifted.rounded(numbers_in("f32", 256.0)) is None  # times 256 is 65,536
    assert shifted.rounded(numbers_in("f32", 255.0)) is not None
    assert (Shifted("f32", "F16", 8).infinite, Shifted("f32", "BF16", 8).infinite) == (0x7C00, 0x7F80)


def test_negative_zeros_are_kept_apart() -> None:
    """E4M3FNUZ has none: byte 0x80 is its NaN."""
    codes = np.array([[0x80, 0x01, 0x80, 0xFF, 0x00, 0x7F, 0x81, 0x80]], np.uint8)
    words, out = codes.view(np.uint32), np.zeros((1, 2), np.uint32)
    fnuz, signs = Fnuz(), ZeroSigns()
    fnuz.widen(words, out)
    assert out.view(np.uint8).tolist() == [[0, 1, 0, 0xFF, 0, 0x7F, 0x81, 0]]
    assert fnuz.stores(words, out)
    assert not fnuz.stores(words, out ^ 1)
    assert not fnuz.stores(words, words)
    flags = np.zeros((1, 1), np.uint8)
    signs.widen(words, flags)
    assert flags.tolist() == [[0b10000101]]
    assert signs.stores(words, flags)
    assert not signs.stores(words, flags ^ 2)
    again = np.zeros((1, 2), np.uint32)
    fnuz.narrow(out, again)
    assert np.array_equal(again, out)
    signs.narrow(flags, again)
    assert np.array_equal(again, words)


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_scales_of_nvfp4_for_marlin(factor: float) -> None:
    """Every E4M3 byte by arithmetic: times 2**7 in float16, the sign and the first bits of the exponent dropped."""
    codec = MarlinE5M3(factor)
    logical = np.arange(256, dtype=np.uint8)[None]
    out, again = np.zeros((1, 256), np.uint8), np.zeros((1, 256), np.uint8)
    codec.widen(logical, out)
    codec.narrow(out, again)
    values = e4m3_values()
    for byte in range(0x7F):
        with np.errstate(over="ignore"):
            number = np.float16(values[byte] * factor) * np.float16(128)
        stored = int(np.array([number if number >= 2 else 0], np.float16).view(np.uint16)[0]) >> 7
        assert out[0, byte] == stored
        exact = np.isfinite(number) and np.float32(number) / (128 * factor) == values[byte] and stored > 0
        assert codec.exact(logical[:, byte : byte + 1]) == (exact or byte == 0), byte
        assert again[0, byte] == byte or not exact
    assert not out[0, [0x7F, 0xFF]].any()
    for byte in (0x7F, 0x80, 0xB8, 0xFF):
        assert not codec.exact(logical[:, byte : byte + 1])


SPEC = MatrixSpec("down", 128, 256, "e4m3", 128, "bf16")


@pytest.mark.parametrize(
    ("layout", "scales", "expected"),
    [
        ("marlin-fp8/1", "bf16", {"scale": Shifted("bf16", "BF16", 120)}),
        ("marlin-fp8-fp16/1", "f16", {"scale": Shifted("f16", "F16", 8)}),
        ("marlin-wna16/1", "f16", {}),
        ("aiter-fp8-block-fnuz/1", "f32", {"scale": AsFloat32("f32", factor=2.0)}),
        ("deepgemm-fp8-sm100/1", "e8m0", {}),
        ("deepgemm-fp8-sm100/1", "f32", None),
        ("deepgemm-fp8-sm90/1", "f32", None),
        ("trtllm-fp8-block/1", "f32", {"scale": AsFloat32("f32", least=MIN_BLOCK_SCALE)}),
        ("marlin-nvfp4/1", "e4m3", {"scale": MarlinE5M3(1.0)}),
    ],
)
def test_codecs_of_layouts(layout: str, scales: str, expected: dict[str, Codec] | None) -> None:
    found = codecs_of(get_layout(layout), replace(SPEC, scale_dtype=scales))
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert {name: codec for name, codec in found.items() if name == "scale"} == expected
    assert set(found) == ({"weight", "zero_sign", "scale"} if "fnuz" in layout else set(expected))


def test_exponents_become_numbers_for_hopper() -> None:
    """Other scales are quantised again, which only the reference path does."""
    found = codecs_of(get_layout("deepgemm-fp8-sm90/1"), replace(SPEC, scale_dtype="e8m0"))
    assert found is not None
    assert {name: type(codec) for name, codec in found.items()} == {"scale": Exponents}
