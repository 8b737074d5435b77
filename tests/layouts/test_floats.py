"""Compiled loops to bfloat16, binary16 and FP8 blocks against torch's rounding, on every kind of code and odd sizes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from moeq.layouts.loops import floats
from moeq.layouts.loops.floats import CodedMatrix, MeasuredChange
from moeq.schemes.dequantize import E2M1_VALUES

ELEMENTS = ("int4", "int8", "e2m1", "e4m3")


def drawn(element: str, seed: int, rows: int = 40) -> tuple[CodedMatrix, torch.Tensor]:
    """A matrix and its values, by the definition: float32 of scale times code less zero point."""
    draw = np.random.default_rng([seed, ELEMENTS.index(element)])
    integer, bits = element.startswith("int"), 4 if element in ("int4", "e2m1") else 8
    n, k = int(draw.integers(1, rows)), 8 * int(draw.integers(1, 40))
    group = min(int(draw.choice([16, 24, 32, 128, 1000])), k)
    codes = draw.integers(0, 1 << bits, (n, k), dtype=np.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0x7E  # NaN in E4M3
    count = -(-k // group)
    zeros = draw.integers(0, 17, (n, count), dtype=np.uint8) if integer else np.zeros((n, count), np.uint8)
    # Of any size, down to what float32 and binary16 hold as subnormal numbers; some of 0, some negative.
    scales = np.exp2(draw.uniform(*draw.choice([(-8, -2), (-24, -10), (-149, -120)]), (n, count)))
    scales = (scales * draw.choice([1, 1, 1, -1, 0], (n, count))).astype(np.float32).astype(np.float64)
    index = np.arange(k, dtype=np.int32) // group
    run = group
    if draw.random() < 0.3:
        index, run = draw.permutation(index), 1
    table = {"e2m1": torch.tensor(E2M1_VALUES), "e4m3": torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn)}
    numbers = table[element].double()[codes.astype(np.int64)] if not integer else torch.from_numpy(codes).double()
    values = (numbers - torch.from_numpy(zeros[:, index]).double()) * torch.from_numpy(scales[:, index])
    octets = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    words = np.ascontiguousarray(octets).view(np.uint32)
    return CodedMatrix(element, words, zeros, scales, index, run), values.float()


def assert_measured(
    change: MeasuredChange | None, values: torch.Tensor, found: torch.Tensor, block: tuple[int, int]
) -> None:
    """What was measured is what torch finds."""
    assert change is not None
    unequal, differences = found != values.double(), (found - values.double()).abs()
    assert change.numbers == int(unequal.sum())
    (height, width), (n, k) = block, values.shape
    touched = [
        unequal[row : row + height, column : column + width].any()
        for row in range(0, n, height)
        for column in range(0, k, width)
    ]
    assert change.blocks == sum(map(int, touched))
    assert change.largest == float(differences.max())
    assert change.squares == pytest.approx(float((differences**2).sum()), rel=1e-12)
    assert change.norm == pytest.approx(float((values.double() ** 2).sum()), rel=1e-12)
    if change.numbers:
        place = tuple(int(number) for number in unequal.nonzero()[0])
        assert change.first == place
        assert (change.before, change.after) == (float(values[place]), float(found[place]))


@pytest.mark.cover("element")
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("seed", range(12))
def test_fp8_blocks_are_rounded_once_and_measured(seed: int, element: str) -> None:
    matrix, values = drawn(element, seed, rows=300)
    n, k = values.shape
    out = np.full((n, k), 0x5A, np.uint8)
    powers = floats.write_fp8_blocks(matrix, out)
    assert powers is not None
    spread = torch.from_numpy(powers).double().repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    # No power of two below would do: 448 is the largest number.
    scaled = values.double() / torch.exp2(spread)
    for row in range(0, n, 128):
        for column in range(0, k, 128):
            largest, power = (
                scaled[row : row + 128, column : column + 128].abs().max(),
                powers[row // 128, column // 128],
            )
            assert largest <= 448
            assert largest > 224 or power == -126 or (largest == 0 and power == 0)
    wanted = scaled.float().to(torch.float8_e4m3fn)
    assert np.array_equal(out, wanted.view(torch.uint8).numpy())
    for row in range(0, n, 128):  # from numbers, the same
        strip, again = values[row : row + 128].contiguous().numpy().copy(), np.empty_like(out[row : row + 128])
        exponents = floats.write_fp8_strip(strip, again)
        assert np.array_equal(exponents, powers[row // 128])
        assert np.array_equal(again, out[row : row + 128])
    # Some codes are made wrong: the comparison finds what torch finds.
    draw = np.random.default_rng(seed)
    for _ in range(seed % 4):
        out[draw.integers(n), draw.integers(k)] ^= np.uint8(1 << draw.integers(3))
    out[(out & 0x7F) == 0x7F] = 0x7E
    found = torch.from_numpy(out).view(torch.float8_e4m3fn).double() * torch.exp2(spread)
    index, count = np.arange(k, dtype=np.int32) // 128, -(-k // 128)
    scales = np.exp2(np.repeat(powers, 128, 0)[:n].astype(np.float64))
    blocks = CodedMatrix("e4m3", out.view(np.uint32), np.zeros((n, count), np.uint8), scales, index, 128)
    change = floats.measure_codes(matrix, blocks, (128, 128))
    assert_measured(change, values, found.float().double(), (128, 128))


def test_fp8_blocks_need_finite_values() -> None:
    matrix, values = drawn("e4m3", 3)
    matrix.codes.view(np.uint8)[-1, -1] = 0x7F
    assert floats.write_fp8_blocks(matrix, np.empty(values.shape, np.uint8)) is None


@pytest.mark.cover(("element", "dtype"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("seed", range(12))
def test_values_are_rounded_once_and_measured(seed: int, element: str, dtype: torch.dtype) -> None:
    matrix, values = drawn(element, seed)
    wanted, binary16 = values.to(dtype), dtype == torch.float16
    word, signed = (np.uint32, np.int32) if dtype == torch.float32 else (np.uint16, np.int16)
    out = np.full(values.shape, 0x5A5A, word)
    floats.write(matrix, out, binary16=binary16)
    expected = wanted.view(torch.int32 if dtype == torch.float32 else torch.int16).numpy().view(word)
    assert np.array_equal(out, expected)
    again = np.full(values.shape, 0xA5A5, word)
    floats.write_numbers(values.contiguous().numpy(), again, binary16=binary16)
    assert np.array_equal(again, expected)
    # Some numbers are made wrong: the comparison finds what torch finds.
    draw = np.random.default_rng(seed)
    for _ in range(seed % 4):
        out[draw.integers(out.shape[0]), draw.integers(out.shape[1])] ^= word(1 << draw.integers(10))
    found = torch.from_numpy(out.view(signed)).view(dtype)
    block = 1 + seed % 5, 1 + 16 * (seed % 3)
    rounding = floats.measure(matrix, out, block, binary16=binary16)
    assert_measured(rounding, values, found.double(), block)


@pytest.mark.parametrize("element", ["int8", "e4m3"])
def test_what_becomes_infinite_is_not_measured(element: str) -> None:
    matrix, values = drawn(element, 1)
    matrix.scales[:] = 1e4
    out = np.empty(values.shape, np.uint16)
    floats.write(matrix, out, binary16=True)
    assert (out & 0x7FFF == 0x7C00).any()
    assert floats.measure(matrix, out, (1, 16), binary16=True) is None
    floats.write(matrix, out, binary16=False)
    assert floats.measure(matrix, out, (1, 16), binary16=False) is not None


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_codes_that_are_no_number_are_not_measured(code: int) -> None:
    matrix, values = drawn("e4m3", 2)
    matrix.codes.view(np.uint8)[-1, -1] = code
    out = np.empty(values.shape, np.uint16)
    floats.write(matrix, out, binary16=False)
    assert floats.measure(matrix, out, (1, 16), binary16=False) is None


def test_halves_are_one_matrix() -> None:
    """Rows of gate and up, one after the other or in turns."""
    (matrix, values), found = drawn("int4", 5), []
    matrix.scales[:] = np.float32(0.3)
    whole = np.empty(values.shape, np.uint16)
    floats.write(matrix, whole, binary16=False)
    whole[0] = 0  # no change where the value is 0
    n = len(values) // 2 * 2
    for half in (slice(0, n // 2), slice(n // 2, n)):
        part = CodedMatrix(
            "int4", matrix.codes[half], matrix.zeros[half], matrix.scales[half], matrix.index, matrix.run
        )
        found.append(floats.measure(part, whole[half], (1, 8), binary16=False))
    rows = CodedMatrix("int4", matrix.codes[:n], matrix.zeros[:n], matrix.scales[:n], matrix.index, matrix.run)
    expected, halves = (
        floats.measure(rows, whole[:n], (1, 8), binary16=False),
        floats.joined(found, n, interleaved=False),
    )
    assert expected is not None
    assert halves is not None
    assert (halves.numbers, halves.blocks, halves.largest) == (expected.numbers, expected.blocks, expected.largest)
    assert (halves.first, halves.before, halves.after) == (expected.first, expected.before, expected.after)
    turns = floats.joined(found, n, interleaved=True)
    assert turns is not None
    assert turns.first == min((2 * row + half, column) for half, one in enumerate(found) for row, column in [one.first])
    assert floats.joined([None, None], n, interleaved=False) is None
    with pytest.raises(ValueError, match="only one"):
        floats.joined([found[0], None], n, interleaved=False)
