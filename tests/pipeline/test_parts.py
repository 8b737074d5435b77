"""One part of a packed matrix: which rows lie where, what is filled with zeros, and what a comparison notices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline.fast_path_cases import Sizes, fast_paths, stored, write_checkpoint

from moeq.layouts import words
from moeq.layouts.float_bits import e4m3_values
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec

pytest.importorskip("numba")

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.bits import MUL_FREE
from moeq.pipeline.pack.fast.codecs import AsFloat32, Shifted, WidenedBf16
from moeq.pipeline.pack.fast.orders import MarlinOrder, Order, OwnOrder, ScatterOrder, TransposedOrder
from moeq.pipeline.pack.fast.parts import FastPart, RowBlock, Rows, packed_parts, present
from moeq.pipeline.pack.fast.scratch import Region

SCRATCH = np.zeros(4096, np.uint8)
REGION, SPARE = Region(0, 2048), Region(2048, 2048)


#: Rows in their own order, which are copied all the same.
COPIED = OwnOrder(in_place=False)


def part(**changes: Any) -> FastPart:
    """Gate and up of 3 rows and 4 columns each, interleaved or not, among 8 rows and 6 columns."""
    base = FastPart("scale", "scales", OwnOrder(), (8, 6), "u2", starts=(0, 4), step=1, filled=(3, 4))
    return replace(base, **changes)


def views() -> list[np.ndarray]:
    return [np.arange(1, 13, dtype=np.uint16).reshape(3, 4) + 100 * half for half in (0, 1)]


def expected(rows: dict[int, tuple[int, int]]) -> np.ndarray:
    """Elements whose rows come from (projection, row)."""
    found = np.zeros((8, 6), np.uint16)
    for row, (half, number) in rows.items():
        found[row, :4] = views()[half][number]
    return found


APART = {0: (0, 0), 1: (0, 1), 2: (0, 2), 4: (1, 0), 5: (1, 1), 6: (1, 2)}
INTERLEAVED = {0: (0, 0), 1: (1, 0), 2: (0, 1), 3: (1, 1), 4: (0, 2), 5: (1, 2)}
SWAPPED = {0: (1, 0), 1: (1, 1), 2: (1, 2), 4: (0, 0), 5: (0, 1), 6: (0, 2)}
CASES: list[tuple[dict[str, Any], dict[int, tuple[int, int]]]] = [
    ({}, APART),
    ({"starts": (0, 1), "step": 2}, INTERLEAVED),
    ({"starts": (4, 0)}, SWAPPED),
    ({"order": COPIED}, APART),
    ({"order": COPIED, "starts": (0, 1), "step": 2}, INTERLEAVED),
]


@pytest.mark.parametrize(("changes", "rows"), CASES)
@pytest.mark.parametrize("block", [12, 24, 36, 1 << 19])
def test_rows_lie_where_the_layout_has_them(
    changes: dict[str, Any], rows: dict[int, tuple[int, int]], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Block by block; what is left of the part is zero, and every bit of it counts."""
    monkeypatch.setattr("moeq.pipeline.pack.fast.parts.BLOCK", block)
    one = part(**changes)
    assert one.row_bytes == 12
    assert one.block == min(max(block // 12, 1), 8)
    assert [(some.row, some.count) for some in one.blocks] == [
        (row, min(one.block, 8 - row)) for row in range(0, 8, one.block)
    ]
    assert sum(len(range(some.count)[rows]) for some in one.blocks for rows in some.filling) == 2
    out = np.full(96, 0xA5, np.uint8)
    SCRATCH.fill(0x5A)
    one.pack(views(), out, REGION, SCRATCH)
    assert np.array_equal(out.view(np.uint16).reshape(8, 6), expected(rows))

    def holds() -> bool:
        found = (one.unpack(out, some, REGION, SPARE, SCRATCH) for some in one.blocks)
        return all(one.holds(each, some, views(), SPARE, SCRATCH) for each, some in zip(found, one.blocks, strict=True))

    assert holds()
    for place in range(96):
        out[place] ^= 1
        assert not holds()
        out[place] ^= 1
    blank: list[Any] = [np.zeros((3, 4), np.uint16) for _ in range(2)]
    one.fill(out, blank, REGION, SPARE, SCRATCH)
    assert all(np.array_equal(found, wanted) for found, wanted in zip(blank, views(), strict=True))
    one.fill(out, [None, blank[1]], REGION, SPARE, SCRATCH)


def test_a_shard_without_a_field_holds_zeros() -> None:
    """The bias of w2 belongs to the first rank."""
    one = part()
    out = np.full(96, 0xA5, np.uint8)
    only: list[Any] = [None, views()[1]]
    one.pack(only, out, REGION, SCRATCH)
    rows = {row: place for row, place in APART.items() if place[0] == 1}
    assert np.array_equal(out.view(np.uint16).reshape(8, 6), expected(rows))
    found = one.unpack(out, one.everything, REGION, SPARE, SCRATCH)
    assert one.holds(found, one.everything, only, SPARE, SCRATCH)
    out[0] ^= 1
    assert not one.holds(found, one.everything, only, SPARE, SCRATCH)
    with pytest.raises(ValueError, match="the shard does not hold this field"):
        present(None)


def test_rows_among_blocks() -> None:
    one = part(starts=(0, 1), step=2)
    assert one._rows(1, 4) == RowBlock(
        1, 4, (Rows(0, slice(1, 3), slice(1, 4, 2)), Rows(1, slice(0, 2), slice(0, 3, 2)))
    )
    assert one._rows(1, 4).filling == ()
    assert part()._rows(2, 4).filling == (slice(1, 2),)
    assert part()._rows(6, 2).filling == (slice(1, 2),)
    assert part()._rows(7, 1) == RowBlock(7, 1, ())
    assert part()._rows(7, 1).filling == (slice(0, 1),)


@pytest.mark.parametrize(
    ("changes", "whole"),
    [
        ({"filled": (4, 6)}, True),
        ({"filled": (3, 6)}, False),
        ({"filled": (4, 5)}, False),
        ({"filled": (4, 6), "step": 2, "starts": (0, 1)}, False),
        ({"filled": (4, 6), "widen": WidenedBf16()}, False),
        ({"filled": (4, 6), "every": 2}, False),
        ({"filled": (8, 6), "starts": (0,)}, True),
    ],
)
def test_parts_without_filling(changes: dict[str, Any], whole: bool) -> None:
    one = part(**changes)
    assert one.is_whole == whole
    assert one.spare_bytes == (0 if whole else 96)
    assert one.element_bytes == 0
    counted = replace(one, order=COPIED)
    assert counted.element_bytes == 96
    assert replace(one, flip=1).element_bytes == 96
    dense = replace(one, dense=True, order=MarlinOrder(4))
    assert dense.is_direct == whole
    assert not replace(dense, dense=False).is_direct
    assert not replace(dense, order=OwnOrder()).is_direct
    spared = replace(one, order=ScatterOrder(Arrangement("r, c -> c r"), 8, "u1", MUL_FREE))
    assert spared.spare_bytes == 96


def test_bits_that_are_stored_inverted() -> None:
    one = part(flip=0x81, filled=(4, 6), order=OwnOrder())
    sources = [np.arange(24, dtype=np.uint16).reshape(4, 6) + 100 * half for half in (0, 1)]
    out = np.zeros(96, np.uint8)
    one.pack(sources, out, REGION, SCRATCH)
    plain = np.concatenate(sources).reshape(-1).view(np.uint8)
    assert np.array_equal(out, plain ^ 0x81)
    assert not one.is_in_place
    found = one.unpack(out, one.everything, REGION, SPARE, SCRATCH)
    assert np.array_equal(found, np.concatenate(sources))
    assert one.holds(found, one.everything, sources, SPARE, SCRATCH)


@pytest.mark.parametrize("filled", [(4, 6), (3, 4)])
def test_numbers_that_are_stored_in_another_form(filled: tuple[int, int]) -> None:
    """bfloat16 as float32: the comparison widens what was read."""
    one = part(dtype="u4", widen=WidenedBf16(), filled=filled)
    sources = [np.arange(1, 1 + filled[0] * filled[1], dtype=np.uint16).reshape(filled) for _ in (0, 1)]
    out = np.full(192, 0xA5, np.uint8)
    one.pack(sources, out, REGION, SCRATCH)
    words = out.view(np.uint32).reshape(8, 6)
    assert np.array_equal(words[: filled[0], : filled[1]] >> 16, sources[0])
    assert words.sum() == 2 * (sources[0].astype(np.uint32) << 16).sum()
    found = one.unpack(out, one.everything, REGION, SPARE, SCRATCH)
    assert one.holds(found, one.everything, sources, SPARE, SCRATCH)
    for place in (0, 3, 191):
        out[place] ^= 1
        assert not one.holds(found, one.everything, sources, SPARE, SCRATCH)
        out[place] ^= 1
    blank = [np.zeros(filled, np.uint16) for _ in (0, 1)]
    one.fill(out, blank, REGION, SPARE, SCRATCH)
    assert np.array_equal(blank[1], sources[1])


@pytest.mark.parametrize(
    "order",
    [
        OwnOrder(),
        TransposedOrder("u2"),
        ScatterOrder(Arrangement("r4 s, c -> s r c"), 16, "u2"),
        ScatterOrder(Arrangement("r, c d4 -> c r | d"), 8, "u1", MUL_FREE),
    ],
)
def test_orders_go_back(order: Order) -> None:
    elements = np.random.default_rng(0).integers(0, 1 << 16, (8, 8), dtype=np.uint16)
    packed, spare = np.zeros(128, np.uint8), np.zeros(128, np.uint8)
    order.pack(elements, packed, 0)
    before, again = packed.copy(), np.zeros_like(elements)
    order.unpack(packed, again, spare, 0)
    assert np.array_equal(again, elements)
    assert np.array_equal(packed, before), "packed bytes stay as they are"
    assert (packed.tobytes() == elements.tobytes()) == order.in_place
    assert order.needs_spare == (getattr(order, "rewrite", None) is not None)
    packed[77] ^= 4
    order.unpack(packed, again, spare, 0)
    assert int((again != elements).sum()) == 1
    if order.rows == 1:
        rows = np.zeros(128, np.uint8)
        order.pack(elements[2:5], rows, 2)
        assert np.array_equal(rows.view(np.uint16).reshape(8, 8)[2:5], elements[2:5])
        assert np.count_nonzero(rows) == np.count_nonzero(elements[2:5].view(np.uint8))
        order.unpack(rows, again[:3], spare, 2)
        assert np.array_equal(again[:3], elements[2:5])


W13 = MatrixSpec("w13", 256, 128, "int4", 64, "f16", gated=True)


def test_parts_of_layouts() -> None:
    """Names, fields, dtypes and starts of gate and up; parts that only the layout can pack are left out."""
    found = {one.name: one for one in packed_parts(get_layout("marlin-wna16/1"), W13, W13)}
    assert {name: (one.field, one.dtype, one.shape, one.starts) for name, one in found.items()} == {
        "weight": ("codes", "u4", (256, 16), (0, 128)),
        "scale": ("scales", "u2", (256, 2), (0, 128)),
    }
    assert all((one.step, one.filled[0]) == (1, 128) for one in found.values())
    ungated = {one.name: one for one in packed_parts(get_layout("marlin-wna16/1"), *[replace(W13, gated=False)] * 2)}
    assert (ungated["weight"].starts, ungated["weight"].filled) == ((0,), (256, 16))
    int8 = replace(W13, element="int8", group_size=128, scale_dtype="bf16")
    wide = {one.name: one for one in packed_parts(get_layout("int8-w8a8/1"), int8, int8)}
    assert (wide["weight"].shape, wide["weight"].flip) == ((256, 32), 0x80)
    assert (wide["scale"].dtype, type(wide["scale"].widen)) == ("u4", WidenedBf16)
    blocks = replace(W13, element="e4m3", group_size=128, scale_dtype="f32")
    fnuz = {one.name: one for one in packed_parts(get_layout("aiter-fp8-block-fnuz/1"), blocks, blocks)}
    assert (fnuz["zero_sign"].field, fnuz["zero_sign"].shape, fnuz["zero_sign"].dtype) == ("codes", (256, 16), "u1")
    assert (fnuz["zero_sign"].starts, fnuz["zero_sign"].filled, fnuz["zero_sign"].step) == ((0, 128), (128, 16), 1)
    assert isinstance(fnuz["scale"].widen, AsFloat32)


@pytest.mark.parametrize(
    ("layout", "n", "rows", "second"),
    [
        ("triton-kernels-hopper/1", 192, 256, 128),
        ("triton-kernels-hopper/1", 320, 512, 256),
        ("triton-kernels-blackwell/1", 320, 384, 192),
        ("triton-kernels-hopper/1", 256, 256, 128),
    ],
)
def test_gate_and_up_are_filled_up_apart(layout: str, n: int, rows: int, second: int) -> None:
    """Where a layout fills rows up to a tile, half of the filling lies behind the gate."""
    spec = MatrixSpec("w13", n, 192, "e2m1", 32, "e8m0")
    found = {one.name: one for one in packed_parts(get_layout(layout), spec, spec)}
    scale = found["scale"]
    assert (scale.shape[0], scale.starts, scale.step, scale.filled) == (rows, (0, second), 1, (n // 2, 6))
    assert scale.shape[1] == 8


def test_exponents_cannot_be_filled_with_zeros() -> None:
    """A zero byte is a power of two."""
    spec = replace(W13, element="e4m3", group_size=128, scale_dtype="e8m0", n=192)
    layout = get_layout("marlin-fp8/1")
    whole = {one.name: one for one in packed_parts(layout, spec, spec)}
    assert isinstance(whole["scale"].widen, Shifted)
    assert "scale" not in {one.name for one in packed_parts(layout, spec, replace(spec, n=256))}
    other = replace(spec, scale_dtype="bf16")
    assert "scale" in {one.name for one in packed_parts(layout, other, replace(other, n=256))}


def test_the_largest_scale_of_nvfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gate and up; zero, minus zero and negative scales are none, whatever their bits."""
    monkeypatch.setattr(words, "COMPILED_FROM", 0)

    def edit(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith("weight_scale"):
                tensor.view(torch.uint8).fill_(0x80)
                tensor.view(torch.uint8)[0, 0] = 0x3A if "up_proj" in name else 0x38
                tensor.view(torch.uint8)[1, 0] = 0xC0

    checkpoint = write_checkpoint(tmp_path, "nvfp4", Sizes(128, 128), edit)
    _, on = fast_paths(checkpoint, "marlin-nvfp4/1")
    values = e4m3_values()
    for role, byte in (("w13", 0x3A), ("w2", 0x38)):
        path = on[role]  # type: ignore[index]
        found = stored(checkpoint, 0, 1, path)
        scratch = np.zeros(path.scratch_bytes, np.uint8)
        with pytest.raises(ValueError, match="the largest scale of all local experts has to be known first"):
            path.read(found, scratch)
        assert path.largest(found, scratch) == [float(values[byte])]
        calibrated = path.with_calibration([2.0])
        assert calibrated.calibration_reads == ()
        assert calibrated.with_calibration([4.0]).shards == calibrated.shards, "it is known already"
        for key in path.calibration_reads:
            assert found[key].size == 128 * 8
        found[path.calibration_reads[0]][3] = 0x7F
        assert path.largest(found, scratch) is None
