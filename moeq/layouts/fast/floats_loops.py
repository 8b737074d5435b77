"""The loops of `moeq.layouts.fast.floats`, a row at a time."""

from __future__ import annotations

import numpy as np

from moeq.layouts.fast.compiler import loop

_1, _16, _13 = np.uint32(1), np.uint32(16), np.uint32(13)
_SIGN, _REST = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)

# float32 bits of the least numbers that round to infinity and to a normal number in binary16, of 0.5, whose last bit is
# that of binary16's subnormal numbers, and what moves an exponent from one bias to the other and rounds.
_INFINITE16, _NORMAL16, _HALF, _REBIAS = (np.uint32(n) for n in (0x477FF000, 0x38800000, 0x3F000000, 0xC8000FFF))

#: float32 bits, but for the sign, of what is no finite number.
_NOT_FINITE = np.uint32(0x7F800000)


@loop
def round_rows(codes, bits, table, zeros, index, run, scales, binary16, numbers, bits_of, out):  # type: ignore[no-untyped-def]
    """Fill rows: values by a table of codes, rounded to nearest even. `run` columns at a time have one group.

    `numbers`, float32 `[1, K]`, is room for a row, and `bits_of` the same as uint32.
    """
    for n in range(out.shape[0]):
        row, values, start = codes[n], numbers[0], 0
        while start < len(index):
            scale, zero = scales[n, index[start]], np.float64(zeros[n, index[start]])
            for k in range(start, min(start + run, len(index))):
                code = row[k >> 1] >> np.uint8(4 * (k & 1)) & np.uint8(15) if bits == 4 else row[k]
                values[k] = np.float32((np.float64(table[code]) - zero) * scale)
            start += run
        _round(bits_of[0], binary16, out[n])


@loop
def _round(numbers, binary16, out):  # type: ignore[no-untyped-def]
    if not binary16:
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
def measure_rows(words, element, zeros, index, run, block, scales, binary16, found, numbers, bits_of, sums, counts):  # type: ignore[no-untyped-def]
    """Compare rows with values that are computed from bits of codes, without the table.

    Args:
        numbers: float32 `[2, K]`, room for a row of each side.
        bits_of: the same as uint32.
        sums: float64 `[5]`, of zeros: squares of changes, squares of values, the largest change, and both numbers of
            the first one.
        counts: int64 `[4]`, of zeros: numbers and blocks that changed, row and column of the first number.

    Returns:
        Whether every number is finite, on both sides.
    """
    top = np.uint32(0)
    for n in range(found.shape[0]):
        values, read = numbers[0], numbers[1]
        _decode(words[n], element, zeros[n], index, run, scales[n], values)
        _widen(found[n], binary16, bits_of[1], read)
        for k in range(len(index)):
            top = max(top, np.uint32(bits_of[0, k] & _REST))
            top = max(top, np.uint32(bits_of[1, k] & _REST))
        _add_squares(values, read, sums)
        start = 0
        while start < len(index):
            stop = min(start + block, len(index))
            changed = np.int32(0)
            for k in range(start, stop):
                changed += np.int32(values[k] != read[k])
            if changed and counts[0] == 0:
                column = start
                while values[column] == read[column]:
                    column += 1
                counts[2], counts[3] = n, column
                sums[3], sums[4] = values[column], read[column]
            counts[0] += changed
            counts[1] += changed > 0
            start += block
    return top < _NOT_FINITE


@loop
def _add_squares(values, read, sums):  # type: ignore[no-untyped-def]
    """Four sums side by side, since an addition waits for the one before."""
    a = b = c = d = e = f = g = h = i = j = k = m = 0.0
    whole = len(values) // 4 * 4
    for n in range(0, whole, 4):
        v, w = np.float64(values[n]), np.float64(values[n + 1])
        x, y = np.float64(values[n + 2]), np.float64(values[n + 3])
        p, q = np.float64(read[n]) - v, np.float64(read[n + 1]) - w
        r, s = np.float64(read[n + 2]) - x, np.float64(read[n + 3]) - y
        a, b, c, d = a + p * p, b + q * q, c + r * r, d + s * s
        e, f, g, h = e + v * v, f + w * w, g + x * x, h + y * y
        p, q, r, s = abs(p), abs(q), abs(r), abs(s)
        i, j, k, m = p if p > i else i, q if q > j else j, r if r > k else k, s if s > m else m
    for n in range(whole, len(values)):
        v = np.float64(values[n])
        p = np.float64(read[n]) - v
        a, e, i = a + p * p, e + v * v, max(i, abs(p))
    sums[0] += (a + b) + (c + d)
    sums[1] += (e + f) + (g + h)
    sums[2] = max(sums[2], max(max(i, j), max(k, m)))


@loop
def _decode(words, element, zeros, index, run, scales, values):  # type: ignore[no-untyped-def]
    """float32 values of a row. `element`: 4 and 8 for integers, 21 for E2M1, 43 for E4M3."""
    start = 0
    while start < len(index):
        scale, stop = scales[index[start]], min(start + run, len(index))
        offset = np.float64(zeros[index[start]]) * scale
        if element == 4:
            for k in range(start, stop):
                values[k] = np.float32(np.float64(_field(words, k, 3, 4)) * scale - offset)
        elif element == 8:
            for k in range(start, stop):
                values[k] = np.float32(np.float64(_field(words, k, 2, 8)) * scale - offset)
        elif element == 21:
            for k in range(start, stop):
                code = _field(words, k, 3, 4)
                bits = np.uint32((code & np.uint32(8)) << np.uint32(28) | (code & np.uint32(7)) << np.uint32(22))
                values[k] = np.float32(np.float64(np.uint32(bits).view(np.float32)) * 2.0**126 * scale)
        else:
            for k in range(start, stop):
                code = _field(words, k, 2, 8)
                rest = np.uint32(code & np.uint32(0x7F))
                bits = (code & np.uint32(0x80)) << np.uint32(24) | rest << np.uint32(20)
                value = np.float32(np.float64(np.uint32(bits).view(np.float32)) * 2.0**120 * scale)
                values[k] = np.nan if rest == np.uint32(0x7F) else value
        start += run


@loop
def _field(words, k, shift, bits):  # type: ignore[no-untyped-def]
    """A code of 4 or 8 bits, of which 2**shift are in a word."""
    place = np.uint32((k & ((1 << shift) - 1)) * bits)
    return np.uint32(words[k >> shift] >> place & np.uint32((1 << bits) - 1))


@loop
def _widen(found, binary16, bits, read):  # type: ignore[no-untyped-def]
    if not binary16:
        for k in range(len(found)):
            bits[k] = np.uint32(found[k]) << _16
        return
    for k in range(len(found)):
        number = np.uint32(found[k])
        bits[k] = (number & np.uint32(0x8000)) << _16 | (number & np.uint32(0x7FFF)) << _13
    for k in range(len(found)):
        read[k] = read[k] * np.float32(2.0**112) if found[k] & 0x7C00 != 0x7C00 else np.inf
