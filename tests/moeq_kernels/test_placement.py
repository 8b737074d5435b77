"""Both gather kernels write what an index map says, for random maps that no layout has."""

from __future__ import annotations

import random

import pytest
import torch

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.parts import Part
from moeq.update.placing import placement_of
from moeq_kernels.index_maps import Packing, Placement
from moeq_kernels.placement import Write, place_together
from moeq_kernels.placement_tiles import tiling_of

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


@pytest.mark.cover(every=4)
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
