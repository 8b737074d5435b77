"""Gather the elements of a matrix into the words of a packed tensor, and back: one kernel for every index map."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _moved_bits(word, STEPS: tl.constexpr):
    """Return words whose bits are permuted by `(left shift, mask)` pairs that are OR-ed, or unchanged without pairs."""
    moved = word
    for s in tl.static_range(len(STEPS)):
        part = (word << STEPS[s][0] if STEPS[s][0] >= 0 else word >> -STEPS[s][0]) & STEPS[s][1]
        moved = part if s == 0 else moved | part
    return moved


@triton.jit
def place_words(
    source,  # elements, or words of several elements
    target,  # packed words
    count,  # words to write
    rows,  # rows of the source matrix
    columns,
    row_stride,  # in source words
    column_stride,
    source_step,  # source words from one matrix to the next
    target_step,  # packed words from one matrix to the next
    # Digits of the number of a word, lowest first: axis, radix, multiple, reversed, stride.
    DIGITS: tl.constexpr,
    FIELDS: tl.constexpr,  # per element of a word: row and column offset
    BITS: tl.constexpr,  # bits of an element in the packed word
    FLIP: tl.constexpr,  # bits of an element that are stored inverted
    STEPS: tl.constexpr,  # permutation of the bits of a word: (left shift, mask) pairs that are OR-ed
    PER: tl.constexpr,  # elements in a source word
    ALONG_ROWS: tl.constexpr,  # whether the elements of a source word come from one column instead of one row
    ORDER: tl.constexpr,  # field of each element in a source word, a hexadecimal digit each
    SIGN: tl.constexpr,  # bits of a source element that are stored inverted
    BLOCK: tl.constexpr,
):
    """Write `count` words of one matrix, which axis 1 of the grid numbers; elements outside it are 0 before FLIP."""
    matrix = tl.program_id(1).to(tl.int64)
    source += matrix * source_step
    target += matrix * target_step
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = word < count
    left = word
    row = tl.zeros([BLOCK], tl.int64)
    column = tl.zeros([BLOCK], tl.int64)
    place = tl.zeros([BLOCK], tl.int64)
    for i in tl.static_range(len(DIGITS)):
        # Names of one iteration may not be constants in another, hence the indices.
        digit = left % DIGITS[i][1]
        left = left // DIGITS[i][1]
        place += digit * DIGITS[i][4]
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
        inside = live & (n < rows) & (k < columns)
        if PER == 1:
            value = tl.load(source + n * row_stride + k * column_stride, inside).to(tl.uint64)
        elif ALONG_ROWS:
            found = tl.load(source + (n // PER) * row_stride + k * column_stride, inside).to(tl.uint64)
            value = found >> (((ORDER >> (4 * (n % PER))) & 15) * BITS).to(tl.uint64)
        else:
            found = tl.load(source + n * row_stride + (k // PER) * column_stride, inside).to(tl.uint64)
            value = found >> (((ORDER >> (4 * (k % PER))) & 15) * BITS).to(tl.uint64)
        value = ((value & ((1 << BITS) - 1)) ^ SIGN) * inside.to(tl.uint64)
        packed |= (value ^ FLIP) << (BITS * f)
    packed = _moved_bits(packed, STEPS)
    tl.store(target + place, packed.to(target.dtype.element_ty), live)


@triton.jit
def place_tiles(
    source,  # elements, or words of several elements along columns
    target,  # packed words
    rows,  # rows of the source matrix
    columns,  # source words in a row of the source matrix
    row_stride,  # in source words
    column_stride,
    source_step,  # source words from one matrix to the next
    target_step,  # packed words from one matrix to the next
    top_rows,  # number of values of the topmost digit of the row number
    top_columns,  # number of values of the topmost digit of the column number
    ROWS: tl.constexpr,  # rows of a tile
    COLUMNS: tl.constexpr,  # source words in a row of a tile
    DIVIDED: tl.constexpr,  # axes of a source tile, one for each bit of its row and word number
    MOVED: tl.constexpr,  # order of these axes: bits of the packed word's number, then bits of the field's
    WORDS: tl.constexpr,  # number of values of the packed word's bits in MOVED
    WITHIN: tl.constexpr,  # number of values of the packed word's bits that lie within a source word
    FIELDS: tl.constexpr,  # number of values of the field's bits in MOVED
    WORD_BITS: tl.constexpr,  # bit of a source element's number for each bit of WITHIN, lowest first
    FIELD_BITS: tl.constexpr,  # source bit and field bit of all other bits, and whether the field counts backwards
    OUTER_BITS: tl.constexpr,  # field bit of each bit of FIELDS, lowest first, and whether it counts backwards
    GATHERED: tl.constexpr,  # axes of the packed tile before it is sorted by place
    SORTED: tl.constexpr,  # order of these axes
    RUN: tl.constexpr,  # words that follow each other
    # Bits of a run's number, lowest first: stride, whether it counts backwards, and its weights in the topmost digits
    # of row and column number.
    PLACES: tl.constexpr,
    TOP: tl.constexpr,  # values of the two topmost digits in a tile
    STRIDES: tl.constexpr,  # packed words between values of the two topmost digits
    BITS: tl.constexpr,  # bits of an element
    FLIP: tl.constexpr,  # bits of an element that are stored inverted
    STEPS: tl.constexpr,  # permutation of the bits of a word: (left shift, mask) pairs that are OR-ed
    ORDER: tl.constexpr,  # field of each element of a source word, a hexadecimal digit each
    SIGN: tl.constexpr,  # bits of a source word that are stored inverted
):
    """Write one tile of one matrix: rows of the source are read, bits change places, runs of words are written."""
    across, down, matrix = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    row = down * ROWS + tl.arange(0, ROWS)[:, None]
    column = across * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < columns)
    offsets = row.to(tl.int64) * row_stride + column.to(tl.int64) * column_stride
    found = tl.load(source + matrix * source_step + offsets, inside, 0)
    if SIGN != 0:
        found = tl.where(inside, found ^ SIGN, found)
    # `() + MOVED` is a tuple, as `permute` needs one; the constexpr MOVED is not.
    found = tl.reshape(tl.permute(tl.reshape(found, DIVIDED), () + MOVED), [WORDS, FIELDS])  # noqa: RUF005
    # Split by the lowest bit first: one thread gets all source words of a packed word before they are unpacked.
    pieces = (found,)
    for level in tl.static_range(len(OUTER_BITS)):
        halves = ()
        for j in tl.static_range(1 << level):
            even, odd = tl.split(tl.reshape(pieces[j], [WORDS, FIELDS >> (level + 1), 2]))
            halves = halves + (even, odd)  # noqa: RUF005
        pieces = halves

    word = tl.arange(0, WITHIN)[None, :]
    element = tl.zeros([1, WITHIN], tl.int32)
    for i in tl.static_range(len(WORD_BITS)):
        element += ((word >> i) & 1) << WORD_BITS[i]
    packed = tl.zeros([WORDS, WITHIN], tl.uint32)
    for j in tl.static_range(FIELDS):
        piece = tl.reshape(pieces[j], [WORDS, 1]).to(tl.uint32)
        for inner in tl.static_range(1 << len(FIELD_BITS)):
            taken = element
            put = tl.zeros([1, 1], tl.int32)
            for i in tl.static_range(len(OUTER_BITS)):
                put += (((j >> (len(OUTER_BITS) - 1 - i)) & 1) ^ OUTER_BITS[i][1]) << OUTER_BITS[i][0]
            for i in tl.static_range(len(FIELD_BITS)):
                taken += ((inner >> i) & 1) << FIELD_BITS[i][0]
                put += (((inner >> i) & 1) ^ FIELD_BITS[i][2]) << FIELD_BITS[i][1]
            value = piece >> (((ORDER >> (4 * taken).to(tl.uint64)) & 15) * BITS).to(tl.uint32)
            if BITS < 32:
                value &= (1 << BITS) - 1
            packed |= (value ^ FLIP) << (put * BITS).to(tl.uint32)
    packed = _moved_bits(packed, STEPS)
    packed = tl.reshape(tl.permute(tl.reshape(packed, GATHERED), () + SORTED), [WORDS * WITHIN])  # noqa: RUF005

    number = tl.arange(0, WORDS * WITHIN)
    run = number // RUN
    place = tl.zeros([WORDS * WITHIN], tl.int64)
    top_row = tl.zeros([WORDS * WITHIN], tl.int32) + down * TOP[0]
    top_column = tl.zeros([WORDS * WITHIN], tl.int32) + across * TOP[1]
    for i in tl.static_range(len(PLACES)):
        bit = (run >> i) & 1
        place += (bit ^ PLACES[i][1]).to(tl.int64) * PLACES[i][0]
        top_row += bit * PLACES[i][2]
        top_column += bit * PLACES[i][3]
    place += down.to(tl.int64) * (TOP[0] * STRIDES[0]) + across.to(tl.int64) * (TOP[1] * STRIDES[1])
    live = (top_row < top_rows) & (top_column < top_columns)
    place = tl.multiple_of(place, RUN) + number % RUN
    tl.store(target + matrix * target_step + place, packed.to(target.dtype.element_ty), live)


@triton.jit
def _places(number, DIGITS: tl.constexpr):
    """Return what row or column numbers contribute to the number of a word, and to that of a field."""
    word = tl.zeros(number.shape, tl.int64)
    field = tl.zeros(number.shape, tl.int32)
    for i in tl.static_range(len(DIGITS)):
        # Names of one iteration may not be constants in another, hence the indices.
        digit = number // DIGITS[i][1] % DIGITS[i][0]
        if DIGITS[i][2]:
            digit = DIGITS[i][0] - 1 - digit
        word += digit.to(tl.int64) * DIGITS[i][3]
        field += digit * DIGITS[i][4]
    return word, field


@triton.jit
def _element(
    source, row, column, live, BITS: tl.constexpr, FLIP: tl.constexpr, STEPS: tl.constexpr, WIDE: tl.constexpr
):
    """Load elements at the words and fields of their rows and columns."""
    word = tl.load(source + row[0] + column[0], live, 0)
    shift = BITS * (row[1] + column[1])
    if WIDE:
        value = _moved_bits(word.to(tl.uint64), STEPS) >> shift.to(tl.uint64)
    else:
        value = _moved_bits(word.to(tl.uint32), STEPS) >> shift.to(tl.uint32)
    if BITS < 32:
        value &= (1 << BITS) - 1
    return value ^ FLIP


@triton.jit(
    do_not_specialize=[
        "rows",
        "columns",
        "first_row",
        "half",
        "below",
        "above",
        "source_step",
        "target_step",
        "target_first",
    ]
)
def read_words(
    source,  # packed words
    target,  # elements in rows of `columns`, or pairs of them
    rows,  # rows that are read of a matrix
    columns,  # elements, or pairs, in a row
    first_row,  # row of the matrix at which they begin
    half,  # stored row of the matrix that divides it
    below,  # added to stored rows less than `half`
    above,  # added to stored rows from `half` on
    source_step,  # packed words from one matrix to the next
    target_step,  # elements of the target from one matrix to the next
    target_first,  # element of the target with which the first matrix begins
    # Digits of the row number, and of the column number: radix, multiple, reversed, and by how many words and fields
    # the digit counts.
    ROW_DIGITS: tl.constexpr,
    COLUMN_DIGITS: tl.constexpr,
    SHARED: tl.constexpr,  # rows of the matrix that share a stored row
    BITS: tl.constexpr,  # bits of an element in the packed word
    FLIP: tl.constexpr,  # bits of an element that are stored inverted
    STEPS: tl.constexpr,  # permutation of the bits of a stored word: (left shift, mask) pairs that are OR-ed
    WIDE: tl.constexpr,  # whether words have 64 bits
    PAIRS: tl.constexpr,  # whether the target holds two elements of four bits in a byte
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Read a tile of the elements of one matrix."""
    matrix = tl.program_id(2).to(tl.int64)
    source += matrix * source_step
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    live = (row < rows)[:, None] & (column < columns)[None, :]
    stored = (row + first_row) // SHARED
    across = _places(stored + tl.where(stored < half, below, above), ROW_DIGITS)
    across = (across[0][:, None], across[1][:, None])
    if PAIRS:
        even = _places(2 * column, COLUMN_DIGITS)
        odd = _places(2 * column + 1, COLUMN_DIGITS)
        low = _element(source, across, (even[0][None, :], even[1][None, :]), live, BITS, FLIP, STEPS, WIDE)
        high = _element(source, across, (odd[0][None, :], odd[1][None, :]), live, BITS, FLIP, STEPS, WIDE)
        value = low | (high << 4)
    else:
        one = _places(column, COLUMN_DIGITS)
        value = _element(source, across, (one[0][None, :], one[1][None, :]), live, BITS, FLIP, STEPS, WIDE)
    place = row[:, None].to(tl.int64) * columns + column[None, :]
    tl.store(target + target_first + matrix * target_step + place, value.to(target.dtype.element_ty), live)
