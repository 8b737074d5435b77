"""Loops of `moeq.layouts.loops.floats`, a row at a time."""

from __future__ import annotations

import numpy as np

from moeq.layouts.loops.compiler import loop, loop_of_sums, scratch
from moeq.layouts.loops.recode import BLOCK
from moeq.layouts.loops.vectors import load, look_up, store

_1, _16, _13 = np.uint32(1), np.uint32(16), np.uint32(13)
_SIGN, _REST, _REST64 = np.uint32(0x80000000), np.uint32(0x7FFFFFFF), np.uint64(0x7FFFFFFFFFFFFFFF)

# For rounding to binary16, as float32 bits: the least number that rounds to infinity; the least normal number; 0.5,
# whose last bit has the value of binary16's last subnormal bit; and the sum of a change of bias and of half a last bit.
_INFINITE16, _NORMAL16, _HALF, _REBIAS = (np.uint32(n) for n in (0x477FF000, 0x38800000, 0x3F000000, 0xC8000FFF))

# For rounding to E4M3: float32 bits of the least normal number, the change of bias, just below half a last bit, and two
# shifts. Then the float32 number whose last bit has the value of E4M3's last subnormal bit, and its bits.
_NORMAL8, _REBIAS8, _ROUND8, _20, _24 = (np.uint32(n) for n in (0x3C800000, 960, 0x7FFFF, 20, 24))
_STEP8, _STEP8_BITS = np.float32(2.0**14), np.uint32(0x46800000)


#: Bits of infinity in float32: magnitudes with these or larger bits are no finite numbers.
_NOT_FINITE = np.uint32(0x7F800000)

#: Exponent that stands for a block with a number that is not finite.
_NO_POWER = 1 << 20

_meanings = scratch(np.float32, 16)


@loop
def round_rows(codes, bits, table, zeros, index, ends, scales, kind, numbers, bits_of, out):  # type: ignore[no-untyped-def]
    """Fill rows with values by a table of codes, rounded to nearest even.

    Columns from k up to `ends[k]` have the group of column k. `kind` is 0 for bfloat16, 1 for binary16, 2 for float32.
    `numbers`, float32 `[1, K]`, holds a row, and `bits_of` is the same memory as uint32.
    """
    for n in range(out.shape[0]):
        look_up_row(codes[n], bits, table, zeros[n], index, ends, scales[n], 0, numbers[0])
        _round(bits_of[0], kind, out[n])


@loop
def round_numbers(bits_of, kind, out):  # type: ignore[no-untyped-def]
    """Fill rows with float32 numbers, rounded to nearest even; `kind` is that of `round_rows`."""
    for n in range(out.shape[0]):
        _round(bits_of[n], kind, out[n])


@loop
def look_up_row(codes, bits, table, zeros, index, ends, scales, first, values):  # type: ignore[no-untyped-def]
    """Fill `values` with the float32 values of a row from column `first` on."""
    start, end = first, first + len(values)
    meanings = _meanings()
    while start < end:
        scale, zero = scales[index[start]], np.float64(zeros[index[start]])
        stop = min(np.int64(ends[start]), end)
        filled = values[start - first : stop - first]
        if bits == 8:
            octets = codes[start:stop]
            for k in range(len(filled)):
                filled[k] = np.float32((np.float64(table[octets[k]]) - zero) * scale)
        else:
            for code in range(len(table)):  # a constant 16 would keep LLVM from making vectors
                meanings[code] = np.float32((np.float64(table[code]) - zero) * scale)
            _look_up_nibbles(codes, meanings, start, filled)
        start = stop


@loop
def _look_up_nibbles(codes, meanings, start, values):  # type: ignore[no-untyped-def]
    """Fill `values` with the meanings of 4-bit codes from column `start` on."""
    odd = start & 1
    if odd:
        values[0] = meanings[codes[start >> 1] >> np.uint8(4)]
    octets, rest = codes[(start + 1) >> 1 :], values[odd:]
    whole = len(rest) >> 4 << 3
    table = load(meanings, 0)
    for byte in range(0, whole, 8):
        store(rest, 2 * byte, look_up(table, octets, byte))
    for byte in range(whole, len(rest) >> 1):
        rest[2 * byte] = meanings[octets[byte] & np.uint8(15)]
        rest[2 * byte + 1] = meanings[octets[byte] >> np.uint8(4)]
    if len(rest) & 1:
        rest[len(rest) - 1] = meanings[octets[len(rest) >> 1] & np.uint8(15)]


@loop
def round_blocks(codes, bits, table, zeros, index, ends, scales, numbers, bits_of, out, powers):  # type: ignore[no-untyped-def]
    """Fill FP8 blocks, and int64 `[ceil(N / 128), ceil(K / 128)]` with the exponents of their scales.

    `numbers`, float32 `[128, 128]`, holds a block, and `bits_of` is the same memory as uint32.

    Returns:
        Whether every value is finite.
    """
    for row in range(0, out.shape[0], BLOCK):
        height = min(BLOCK, out.shape[0] - row)
        for column in range(0, out.shape[1], BLOCK):
            width = min(BLOCK, out.shape[1] - column)
            for n in range(height):
                look_up_row(
                    codes[row + n],
                    bits,
                    table,
                    zeros[row + n],
                    index,
                    ends,
                    scales[row + n],
                    column,
                    numbers[n, :width],
                )
            block = out[row : row + height, column : column + width]
            power = _round_block(numbers[:height, :width], bits_of[:height, :width], block)
            if power == _NO_POWER:
                return False
            powers[row // BLOCK, column // BLOCK] = power
    return True


@loop
def round_strip(numbers, bits_of, out, powers):  # type: ignore[no-untyped-def]
    """Fill a row of FP8 blocks from float32 numbers, which change; otherwise as `round_blocks`."""
    for column in range(0, out.shape[1], BLOCK):
        stop = min(column + BLOCK, out.shape[1])
        power = _round_block(numbers[:, column:stop], bits_of[:, column:stop], out[:, column:stop])
        if power == _NO_POWER:
            return False
        powers[column // BLOCK] = power
    return True


@loop
def _round_block(numbers, bits_of, out):  # type: ignore[no-untyped-def]
    """Fill an FP8 block from numbers, which change; return its scale's exponent, `_NO_POWER` if one is not finite."""
    top = np.uint32(0)
    for n in range(out.shape[0]):
        for k in range(out.shape[1]):
            top = max(top, np.uint32(bits_of[n, k] & _REST))
    if top >= _NOT_FINITE:
        return _NO_POWER
    power = _power(top)
    factor = np.uint32((127 - power) << 23)
    for n in range(out.shape[0]):
        _scale(numbers[n], np.uint32(factor).view(np.float32))
        _round_e4m3(bits_of[n], out[n])
    return power


@loop
def _power(top):  # type: ignore[no-untyped-def]
    """Return the least exponent of a normal power of two under which a magnitude (float32 bits) fits 448."""
    if top == 0:
        return 0
    above = np.int64((top & np.uint32(0x7FFFFF)) > np.uint32(0x600000))  # 448 is 1.75 * 2**8
    return max(np.int64(top >> np.uint32(23)) - 127 - 8 + above, -126)


@loop
def _scale(numbers, factor):  # type: ignore[no-untyped-def]
    for k in range(len(numbers)):
        numbers[k] *= factor


@loop
def _round_e4m3(numbers, out):  # type: ignore[no-untyped-def]
    """Round magnitudes of at most 448 to nearest even, from bits of float32."""
    for k in range(len(out)):
        number = numbers[k] & _REST
        normal = ((number + _ROUND8 + (number >> _20 & _1)) >> _20) - _REBIAS8
        small = np.float32(np.uint32(number).view(np.float32) + _STEP8).view(np.uint32) - _STEP8_BITS
        out[k] = (small if number < _NORMAL8 else normal) | (numbers[k] >> _24 & np.uint32(0x80))


@loop
def _round(numbers, kind, out):  # type: ignore[no-untyped-def]
    if kind == 2:
        for k in range(len(out)):
            out[k] = numbers[k]
        return
    if kind == 0:
        for k in range(len(out)):
            number = numbers[k]
            out[k] = (number + np.uint32(0x7FFF) + (number >> _16 & _1)) >> _16
        return
    for k in range(len(out)):
        sign, number = numbers[k] & _SIGN, numbers[k] & _REST
        if number >= _INFINITE16:
            found = np.uint32(0x7C00)
        elif number < _NORMAL16:
            found = np.float32(np.uint32(number).view(np.float32) + np.float32(0.5)).view(np.uint32) - _HALF
        else:
            found = (number + _REBIAS + (number >> _13 & _1)) >> _13
        out[k] = found | sign >> _16


@loop
def measure_rows(  # type: ignore[no-untyped-def]
    codes, element, zeros, index, run, scales, kind, found, block, numbers, bits_of, sums, counts, touched
):
    """Compare rows of floats with values that are computed from bits of codes, without the table.

    Args:
        kind: 0 for bfloat16, 1 for binary16, 2 for float32.
        block: int64 `[2]`, rows and columns of a block.
        numbers: float32 `[2, K]`, room for a row of each side.
        bits_of: the same memory as uint32.
        sums: float64 `[5]`, of zeros: squares of changes, squares of values, the largest change, and both numbers
            of the first change.
        counts: int64 `[4]`, of zeros: numbers and blocks that changed, row and column of the first number.
        touched: uint8, room for as many blocks as a row has.

    Returns:
        Whether every number is finite, on both sides.
    """
    start = 0
    while start < found.shape[0]:
        touched[:] = 0
        for n in range(start, min(start + block[0], found.shape[0])):
            _decode(codes[n], element, zeros[n], index, run, scales[n], numbers[0])
            _widen(found[n], kind, bits_of[1], numbers[1])
            _compare_numbers(n, block[1], numbers[0], numbers[1], sums, counts, touched)
        start += block[0]
    return np.isfinite(sums[0]) and np.isfinite(sums[1])


@loop
def measure_codes(  # type: ignore[no-untyped-def]
    codes,
    element,
    zeros,
    index,
    run,
    scales,
    found,
    kind,
    offsets,
    groups,
    length,
    factors,
    block,
    numbers,
    sums,
    counts,
    touched,
):
    """Compare rows of codes with a matrix of other codes, whose arguments are `found` to `factors`."""
    start = 0
    while start < found.shape[0]:
        touched[:] = 0
        for n in range(start, min(start + block[0], found.shape[0])):
            _decode(codes[n], element, zeros[n], index, run, scales[n], numbers[0])
            _decode(found[n], kind, offsets[n], groups, length, factors[n], numbers[1])
            _compare_numbers(n, block[1], numbers[0], numbers[1], sums, counts, touched)
        start += block[0]
    return np.isfinite(sums[0]) and np.isfinite(sums[1])


@loop
def measure_numbers(before, found, first, block, sums, counts, touched):  # type: ignore[no-untyped-def]
    """Compare float32 rows, of which the first one is row `first` of a matrix and begins a block.

    Other arguments, and the result, are those of `measure_rows`.
    """
    start = 0
    while start < found.shape[0]:
        touched[:] = 0
        for n in range(start, min(start + block[0], found.shape[0])):
            _compare_numbers(first + n, block[1], before[n], found[n], sums, counts, touched)
        start += block[0]
    return np.isfinite(sums[0]) and np.isfinite(sums[1])


@loop
def _compare_numbers(n, width, values, read, sums, counts, touched):  # type: ignore[no-untyped-def]
    """Add the changes in row n. Sums become infinite or NaN where a number of either side is so."""
    _add_squares(values, read, sums)
    for place in range(len(touched)):
        start = place * width
        stop = min(start + width, len(values))
        before, after, changed = values[start:stop], read[start:stop], np.int32(0)
        for k in range(len(before)):
            changed += np.int32(before[k] != after[k])
        if changed and counts[0] == 0:
            column = start
            while values[column] == read[column]:
                column += 1
            counts[2], counts[3] = n, column
            sums[3], sums[4] = values[column], read[column]
        counts[0] += changed
        counts[1] += np.int64(changed > 0 and touched[place] == 0)
        touched[place] |= np.uint8(changed > 0)


@loop_of_sums
def _add_squares(values, read, sums):  # type: ignore[no-untyped-def]
    changes = sizes = 0.0
    largest = np.uint64(0)
    for n in range(len(values)):
        value = np.float64(values[n])
        change = np.float64(read[n]) - value
        changes += change * change
        sizes += value * value
        largest = max(
            largest, np.uint64(np.float64(change).view(np.uint64) & _REST64)
        )  # bits of magnitudes sort as the magnitudes do
    sums[0] += changes
    sums[1] += sizes
    sums[2] = max(sums[2], np.uint64(largest).view(np.float64))


@loop
def _decode(codes, element, zeros, index, run, scales, values):  # type: ignore[no-untyped-def]
    """Fill the float32 values of a row from its bytes. `element`: 4 and 8 for integers, 21 for E2M1, 43 for E4M3."""
    start = 0
    while start < len(index):
        scale, stop = scales[index[start]], min(start + run, len(index))
        zero, filled = zeros[index[start]], values[start:stop]
        if element == 8 or element == 43:
            _decode_octets(codes[start:stop], element, scale, zero, filled)
        elif (start | stop) & 1:
            for k in range(start, stop):
                code = codes[k >> 1] >> np.uint8(4 * (k & 1)) & np.uint8(15)
                values[k] = _integer(code, zero, scale) if element == 4 else _e2m1(code, scale)
        else:
            _decode_nibbles(codes[start >> 1 : stop >> 1], element, scale, zero, filled)
        start += run


@loop
def _decode_octets(octets, element, scale, zero, filled):  # type: ignore[no-untyped-def]
    if element == 43:
        for k in range(len(filled)):
            filled[k] = _e4m3(octets[k], scale)
    elif np.float32(scale) == scale:
        for k in range(len(filled)):
            filled[k] = _short_product(octets[k], zero, np.float32(scale))
    else:
        for k in range(len(filled)):
            filled[k] = _integer(octets[k], zero, scale)


@loop
def _decode_nibbles(octets, element, scale, zero, filled):  # type: ignore[no-untyped-def]
    if element == 21:
        for k in range(len(octets)):
            filled[2 * k] = _e2m1(octets[k] & np.uint8(15), scale)
            filled[2 * k + 1] = _e2m1(octets[k] >> np.uint8(4), scale)
    elif np.float32(scale) == scale:
        for k in range(len(octets)):
            filled[2 * k] = _short_product(octets[k] & np.uint8(15), zero, np.float32(scale))
            filled[2 * k + 1] = _short_product(octets[k] >> np.uint8(4), zero, np.float32(scale))
    else:
        for k in range(len(octets)):
            filled[2 * k] = _integer(octets[k] & np.uint8(15), zero, scale)
            filled[2 * k + 1] = _integer(octets[k] >> np.uint8(4), zero, scale)


@loop
def _integer(code, zero, scale):  # type: ignore[no-untyped-def]
    return np.float32(np.float64(code) * scale - np.float64(zero) * scale)


@loop
def _short_product(code, zero, scale):  # type: ignore[no-untyped-def]
    """Return the result of `_integer` for a float32 scale, faster: the only inexact step is the float32 product."""
    return np.float32(np.float32(np.float32(np.int32(code)) - np.float32(np.int32(zero))) * scale)


@loop
def _e2m1(code, scale):  # type: ignore[no-untyped-def]
    code = np.uint32(code)
    bits = np.uint32((code & np.uint32(8)) << np.uint32(28) | (code & np.uint32(7)) << np.uint32(22))
    return np.float32(np.float64(np.uint32(bits).view(np.float32)) * 2.0**126 * scale)


@loop
def _e4m3(code, scale):  # type: ignore[no-untyped-def]
    rest = np.uint32(code & np.uint8(0x7F))
    bits = np.uint32(code & np.uint8(0x80)) << np.uint32(24) | rest << np.uint32(20)
    value = np.float32(np.float64(np.uint32(bits).view(np.float32)) * 2.0**120 * scale)
    return np.float32(np.nan) if rest == np.uint32(0x7F) else value


@loop
def _widen(found, kind, bits, read):  # type: ignore[no-untyped-def]
    if kind == 2:
        for k in range(len(found)):
            bits[k] = found[k]
        return
    if kind == 0:
        for k in range(len(found)):
            bits[k] = np.uint32(found[k]) << _16
        return
    for k in range(len(found)):
        number = np.uint32(found[k])
        bits[k] = (number & np.uint32(0x8000)) << _16 | (number & np.uint32(0x7FFF)) << _13
    for k in range(len(found)):
        read[k] = read[k] * np.float32(2.0**112) if found[k] & 0x7C00 != 0x7C00 else np.inf
