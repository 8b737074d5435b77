"""Gather the elements of a matrix into the words of a packed tensor: one kernel for every index map."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place_words(
    source,  # elements, or words of several elements
    target,  # packed words
    count,  # words to write
    rows,  # rows of the source matrix
    columns,
    row_stride,  # in source words
    column_stride,
    first_row,  # row and column of the packed matrix where the source begins
    first_column,
    source_step,  # source words from one matrix to the next
    target_step,  # packed words from one matrix to the next
    # Digits of the number of a word, lowest first: axis, radix, multiple, reversed, start, extent, stride.
    DIGITS: tl.constexpr,
    FIELDS: tl.constexpr,  # per element of a word: row and column offset
    BITS: tl.constexpr,  # bits of an element in the packed word
    FLIP: tl.constexpr,  # bits of an element that are stored inverted
    STEPS: tl.constexpr,  # permutation of the bits of a word: (left shift, mask) pairs that are OR-ed
    PER: tl.constexpr,  # elements in a source word
    ALONG_ROWS: tl.constexpr,  # whether they follow each other along rows instead of columns
    ORDER: tl.constexpr,  # field of each of them, a hexadecimal digit each
    SIGN: tl.constexpr,  # bits of a source element that are stored inverted
    BLOCK: tl.constexpr,
):
    """Write `count` words of the matrix that program 1 counts; elements beyond it are 0 before they are flipped."""
    matrix = tl.program_id(1).to(tl.int64)
    source += matrix * source_step
    target += matrix * target_step
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = word < count
    left = word
    row = tl.zeros([BLOCK], tl.int64) - first_row
    column = tl.zeros([BLOCK], tl.int64) - first_column
    place = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(len(DIGITS)):
        # Names of one iteration may not be constants in another, hence the indices.
        digit = left % DIGITS[i][5] + DIGITS[i][4]
        left = left // DIGITS[i][5]
        place += digit * DIGITS[i][6]
        if DIGITS[i][3]:
            digit = DIGITS[i][1] - 1 - digit
        if DIGITS[i][0] == 0:
            row += digit * DIGITS[i][2]
        else:
            column += digit * DIGITS[i][2]
    packed = tl.zeros([BLOCK], tl.uint64)
    for f in tl.static_range(len(FIELDS)):
        n = row + FIELDS[f][0]
        k = column + FIELDS[f][1]
        inside = live & (n >= 0) & (n < rows) & (k >= 0) & (k < columns)
        if PER == 1:
            value = tl.load(source + n * row_stride + k * column_stride, inside, 0).to(tl.uint64)
        elif ALONG_ROWS:
            found = tl.load(source + (n // PER) * row_stride + k * column_stride, inside, 0).to(tl.uint64)
            value = found >> (((ORDER >> (4 * (n % PER))) & 15) * BITS).to(tl.uint64)
        else:
            found = tl.load(source + n * row_stride + (k // PER) * column_stride, inside, 0).to(tl.uint64)
            value = found >> (((ORDER >> (4 * (k % PER))) & 15) * BITS).to(tl.uint64)
        value = ((value & ((1 << BITS) - 1)) ^ SIGN) * inside.to(tl.uint64)
        packed |= (value ^ FLIP) << (BITS * f)
    if len(STEPS) > 0:
        moved = tl.zeros([BLOCK], tl.uint64)
        for s in tl.static_range(len(STEPS)):
            if STEPS[s][0] >= 0:
                moved |= (packed << STEPS[s][0]) & STEPS[s][1]
            else:
                moved |= (packed >> -STEPS[s][0]) & STEPS[s][1]
        packed = moved
    tl.store(target + place, packed.to(target.dtype.element_ty), live)
