"""The gather kernels write and read what an index map says, for random maps that no layout has."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.parts import Part
from moeq.update.placing import placement_of
from moeq_kernels.errors import KernelArgumentError
from moeq_kernels.index_maps import Digit, Packing, Placement, Reading
from moeq_kernels.placement import Elements, Write, place_together, read
from moeq_kernels.placement_tiles import NUMBERS, tiling_of

WORDS = {8: torch.uint8, 16: torch.int16, 32: torch.int32}


def random_arrangement(draw: random.Random, bits: int) -> tuple[str, int]:
    """A pattern whose fixed digits are powers of two, and the number of fields in its words."""
    fields = draw.choice([one for one in (1, 2, 4, 8) if bits * one in WORDS])
    letters = iter("abcdefgh")
    axes = [[(next(letters), draw.choice([2, 4, 8])) for _ in range(draw.randint(0, 2))] for _ in range(2)]
    within = [(next(letters), 2) for _ in range(fields.bit_length() - 1)]
    for one in within:
        axes[draw.randint(0, 1)].append(one)
    for axis in axes:
        draw.shuffle(axis)
    words = [one for axis in axes for one in axis if one not in within]
    right = ["n", "k"] + [draw.choice(["", "~"]) + name for name, _ in words]
    draw.shuffle(right)
    inner = [draw.choice(["", "~"]) + name for name, _ in within]
    draw.shuffle(inner)
    left = ", ".join(
        " ".join([free, *(f"{name}{radix}" for name, radix in axis)]) for free, axis in zip("nk", axes, strict=True)
    )
    return f"{left} -> {' '.join(right)} | {' '.join(inner)}", fields


def expected(arrangement: Arrangement, codes: torch.Tensor, bits: int, flip: int, fields: int) -> torch.Tensor:
    """Words that hold the codes, by the arrangement's own view of the matrix."""
    spread = arrangement.spread(codes.long() ^ flip).reshape(-1, fields)
    packed = (spread << (bits * torch.arange(fields))).sum(1)
    size = bits * fields
    if size > 8:
        packed -= packed >> (size - 1) << size
    return packed.to(WORDS[size])


def whole(arrangement: Arrangement, bits: int, rows: int, columns: int, flip: int = 0) -> Placement:
    """Placement of a whole matrix; its shape and dtype as stored are of no interest here."""
    part = Part("codes", arrangement, (), "U8", bits, flip=flip)
    found = placement_of(part, (rows, columns))
    assert found is not None
    return found


def packed_source(codes: torch.Tensor, bits: int, per: int, order: tuple[int, ...]) -> torch.Tensor:
    """Words of `per` codes along columns, code i in field `order[i]`."""
    words = (codes.long().unflatten(1, (-1, per)) << (bits * torch.tensor(order))).sum(2)
    size = max(8, bits * per)
    return (words if size == 8 else words - (words >> (size - 1) << size)).to(WORDS[size])


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("seed", range(24))
def test_random_index_maps_from_random_sources(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    bits = draw.choice([2, 4, 8])
    pattern, fields = random_arrangement(draw, bits)
    arrangement = Arrangement(pattern)
    per = draw.choice([one for one in (1, 8 // bits, 16 // bits, 32 // bits) if one == 1 or bits * one in WORDS])
    rows = arrangement.row_multiple * draw.choice([1, 3, 5])
    columns = arrangement.column_multiple * draw.choice([1, 3, 4]) * per
    while seed % 6 == 3 and rows * columns <= 2 * NUMBERS:  # several tiles along both axes
        rows, columns = 2 * rows, 2 * columns
    flip, sign = draw.choice([0, 1 << (bits - 1)]), draw.choice([0, 1 << (bits - 1)])
    placement = whole(arrangement, bits, rows, columns, flip)
    order = tuple(draw.sample(range(per), per))
    packing = Packing(per, order=order, sign=sign)
    assert tiling_of(placement, packing, max(1, bits * per // 8)) is not None
    codes = torch.randint(0, 1 << bits, (3, rows, columns), dtype=torch.uint8)
    source = torch.stack([packed_source(one ^ sign, bits, per, order) for one in codes])
    if draw.random() < 0.3:  # strides of a transposed tensor
        source = source.mT.contiguous().mT
    wanted = torch.stack([expected(arrangement, one, bits, flip, fields) for one in codes])
    target = torch.full_like(wanted, 0x5A)
    place_together([Write(source, target, placement, (rows, columns), packing)])
    assert torch.equal(target, wanted), pattern


def test_columns_that_cut_a_source_word_are_placed_one_by_one() -> None:
    arrangement = Arrangement("n, k a4 -> n k | a")
    placement = whole(arrangement, 4, 2, 12)
    codes = torch.randint(0, 16, (2, 16), dtype=torch.uint8)
    target = torch.zeros(2, 3, dtype=torch.int16)
    place_together([Write(packed_source(codes, 4, 8, tuple(range(8))), target, placement, (2, 12), Packing(8))])
    assert torch.equal(target.flatten(), expected(arrangement, codes[:, :12], 4, 0, 4))


def test_tiles_have_zeros_beyond_the_columns_of_the_source() -> None:
    arrangement = Arrangement("n, k a4 -> n k | a")
    placement = whole(arrangement, 4, 4, 32)
    codes = torch.randint(1, 16, (4, 32), dtype=torch.uint8)
    codes[:, 16:] = 0
    assert tiling_of(placement, Packing(8), 4) is not None
    target = torch.full((4, 8), 0x5A, dtype=torch.int16)
    source = packed_source(codes[:, :16], 4, 8, tuple(range(8)))
    place_together([Write(source, target, placement, (4, 16), Packing(8))])
    assert torch.equal(target.flatten(), expected(arrangement, codes, 4, 0, 4))


def inner_bits_swapped(bits: int) -> tuple[tuple[int, int], ...]:
    """Return the steps that exchange the two bits in the middle of each byte of a word."""
    kept, low, high = (int(f"{byte:02x}" * (bits // 8), 16) for byte in (0xE7, 0x08, 0x10))
    return (0, kept), (1, high), (-1, low)


def moved(word: int, steps: tuple[tuple[int, int], ...]) -> int:
    """Return a word whose bits are permuted by steps."""
    parts = [(word << shift if shift >= 0 else word >> -shift) & mask for shift, mask in steps]
    return sum(parts) if steps else word


def random_digits(draw: random.Random, bits: int, fields: int) -> tuple[Placement, int]:
    """A placement of overlapping digits that reach beyond the matrix, and the words of the packed tensor."""
    radixes = [draw.randint(2, 6) for _ in range(4)]
    strides, words = {}, 1
    for place in draw.sample(range(4), 4):
        strides[place] = words
        words *= radixes[place]
    digits = [
        Digit(place % 2, radix, draw.randint(1, 3), draw.random() < 0.5, strides[place])
        for place, radix in enumerate(radixes)
    ]
    offsets = tuple((draw.randint(0, 3), draw.randint(0, 3)) for _ in range(fields))
    steps = inner_bits_swapped(bits * fields) if bits * fields % 8 == 0 and draw.random() < 0.3 else ()
    return Placement(tuple(digits), offsets, bits, draw.randrange(1 << bits), steps), words


@pytest.mark.parametrize("seed", range(8))
def test_random_digits_are_written_word_by_word_and_zeros_around_the_matrix(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    bits = draw.choice([2, 4, 8])
    fields = draw.choice([one for one in (1, 2, 4, 8) if bits * one in WORDS])
    placement, words = random_digits(draw, bits, fields)
    per = 1 if seed % 2 else draw.choice([one for one in (2, 4, 8) if bits * one in WORDS])
    packing = Packing(per, seed % 4 == 2, tuple(draw.sample(range(per), per)), draw.randrange(1 << bits))
    rows, columns = draw.randint(4, 7), draw.randint(4, 7)
    codes = torch.randint(0, 1 << bits, (2, 8, 8), dtype=torch.uint8)
    stored = [packed_source(one.T if packing.along_rows else one, bits, per, packing.order) for one in codes]
    source = torch.stack([one.T if packing.along_rows else one for one in stored])
    around = torch.randint(0, 100, (4, *source.shape[1:])).to(source.dtype)  # what lies before and behind is not read
    around[1:3] = source
    if seed % 4 == 3:  # strides of a transposed tensor
        around = around.mT.contiguous().mT
    target = torch.full((2, words), 0x5A, dtype=WORDS[bits * fields])
    wanted = target.clone()
    for matrix, numbers in itertools.product(range(2), itertools.product(*(range(d.radix) for d in placement.digits))):
        first, place = [0, 0], 0
        for digit, value in zip(placement.digits, numbers, strict=True):
            place += value * digit.stride
            first[digit.axis] += (digit.radix - 1 - value if digit.reversed else value) * digit.multiple
        word = 0
        for field, (row, column) in enumerate((first[0] + n, first[1] + k) for n, k in placement.fields):
            inside = 0 <= row < rows and 0 <= column < columns
            element = int(codes[matrix, row, column]) ^ packing.sign if inside else 0
            word |= (element ^ placement.flip) << (bits * field)
        word = moved(word, placement.steps) & ((1 << bits * fields) - 1)
        signed = bits * fields > 8 and word >> (bits * fields - 1)
        wanted[matrix, place] = word - (1 << bits * fields) if signed else word
    place_together([Write(around[1:3], target, placement, (rows, columns), packing)])
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("seed", range(6))
def test_random_readings_find_words_and_fields(seed: int) -> None:
    draw = random.Random(seed)
    bits, fields = draw.choice([(8, 1), (4, 2), (4, 4), (2, 16), (8, 4), (4, 16)])
    pairs = seed % 2 == 1 and bits <= 4
    axes: list[tuple[tuple[int, int, int, int, int], ...]] = []
    words = 1
    for _ in range(2):
        digits: list[tuple[int, int, int, int, int]] = []
        multiple = 1
        for _ in range(draw.randint(1, 3)):
            radix = draw.randint(2, 5)
            digits.append((radix, multiple, draw.randint(0, 1), words, draw.randint(0, 1) if fields > 8 else 0))
            words, multiple = words * radix, multiple * radix
        axes.append((*digits, (fields // 8, multiple, 0, 0, 1)) if fields > 8 else tuple(digits))
    steps = inner_bits_swapped(bits * fields) if seed % 5 == 0 else ()
    flip, shared, half = draw.randrange(1 << bits), draw.randint(1, 3), draw.randint(2, 4)
    below, above = draw.randint(0, 2), draw.randint(3, 5)
    reading = Reading(axes[0], axes[1], bits, fields, flip, steps, shared, half, below, above)
    rows, columns, first_row = 520 if seed == 3 else draw.randint(3, 9), 260 if seed == 4 else 6, draw.randint(1, 4)
    size = bits * fields
    source = torch.randint(-(1 << size - 1), (1 << size - 1) - 1, (2, words)).to({**WORDS, 64: torch.int64}[size])

    def places(numbers: range, digits: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
        found = []
        for number in numbers:
            word = field = 0
            for radix, multiple, backwards, by_words, by_fields in digits:
                digit = number // multiple % radix
                digit = radix - 1 - digit if backwards else digit
                word, field = word + digit * by_words, field + digit * by_fields
            found.append((word, field))
        return found

    stored = [(row + first_row) // shared for row in range(rows)]
    at = [number + (reading.below if number < half else reading.above) for number in stored]
    across = places(range(max(at) + 1), reading.rows)
    down = places(range(columns), reading.columns)
    elements = torch.empty(2, rows, columns, dtype=torch.uint8)
    for matrix, raw in enumerate((source.long() if size == 64 else source.long() & ((1 << size) - 1)).tolist()):
        whole_words = [moved(word & ((1 << size) - 1), steps) for word in raw]
        for row, number in enumerate(at):
            elements[matrix, row] = torch.tensor([
                whole_words[across[number][0] + word] >> (bits * (across[number][1] + field)) & ((1 << bits) - 1) ^ flip
                for word, field in down
            ])  # fmt: skip
    wanted = elements[..., ::2] | elements[..., 1::2] << 4 if pairs else elements
    step = wanted[0].numel() + 3
    target = torch.full((5 + 2 * step,), 0x5A, dtype=torch.uint8)
    filled = target.clone()
    for matrix in range(2):
        filled[5 + matrix * step :][: step - 3] = wanted[matrix].flatten()
    read(source, target, reading, first_row, Elements(rows, wanted.shape[2], 5, step), pairs=pairs)
    assert torch.equal(target, filled)


def test_words_of_no_dtype_and_tensors_on_two_devices_are_refused() -> None:
    source, elements = torch.zeros(1, 6, dtype=torch.uint8), Elements(1, 6, 0, 6)
    reading = Reading(((1, 1, 0, 0, 0),), ((6, 1, 0, 1, 0),), bits=8, fields=3)
    with pytest.raises(KernelArgumentError, match="words of 3 bytes cannot be read"):
        read(source, torch.zeros(6, dtype=torch.uint8), reading, 0, elements)
    placement = whole(Arrangement("n, k -> n k"), 8, 1, 6)
    with pytest.raises(KernelArgumentError, match="a matrix on cpu cannot be written to meta and meta"):
        place_together([Write(source, source.to("meta"), placement, (1, 6))])
    for target, told in (
        (torch.zeros(1, 12, dtype=torch.uint8)[:, ::2], r"words of 1 bytes in strides \(12, 2\) cannot be written"),
        (torch.zeros(1, 5, dtype=torch.uint8), r"word 5 of 5, from \[1, 1, 6\]"),
    ):
        with pytest.raises(KernelArgumentError, match=told):
            place_together([Write(source, target, placement, (1, 6))])
