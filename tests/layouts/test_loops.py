"""Compiled loops against the plain ones: Marlin from packed codes, comparisons, bit permutations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts.cases import LAYOUT_IDS, specs
from layouts.matrices import random_matrix
from torch import Tensor

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.bits import MUL_FREE
from moeq.layouts.marlin.maps import WEIGHT
from moeq.layouts.registry import get_layout
from moeq.layouts.words import block_sums, pack_words, take_columns, unpack_words
from moeq.matrix import MatrixSpec

pytest.importorskip("numba")

from moeq.layouts.loops import columns, compare, hopper, marlin, transpose

ROOT = Path(__file__).parents[2]


def rows_of(codes: Tensor, bits: int) -> np.ndarray:
    """uint8 codes `[N, K]` -> uint32 `[N, K * bits / 32]`, the first code in the lowest bits."""
    octets = codes[:, 0::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    return octets.contiguous().numpy().view(np.uint32)


@settings(max_examples=20)
@given(st.sampled_from([4, 8]), st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**31))
def test_marlin_from_rows_and_from_columns_is_marlin_from_codes(bits: int, tiles: int, k16: int, seed: int) -> None:
    n, k = 64 * tiles, 16 * k16
    codes = random_matrix(MatrixSpec("w2", n, k, f"int{bits}", 16, "bf16"), seed).codes
    plain = pack_words(WEIGHT[bits], codes, bits, compiled=False).numpy().view(np.uint32).reshape(k // 16, -1)
    rows = rows_of(codes, bits)
    for words in (rows, np.asfortranarray(rows)):
        out = np.full_like(plain, 0xA5)
        marlin.pack(words, bits, out)
        assert np.array_equal(out, plain)
    back = np.zeros_like(rows)
    marlin.unpack(plain, bits, back)
    assert np.array_equal(back, rows)


@pytest.mark.parametrize("rows", [16, 48])
def test_hopper_from_rows_is_the_layout(rows: int) -> None:
    spec = MatrixSpec("w2", 64, 128, "e2m1", 32, "e8m0")
    matrix = random_matrix(spec)
    plain = get_layout("triton-kernels-hopper-w4/1").pack(matrix)["weight"].numpy().view(np.uint64).reshape(-1)
    words = rows_of(matrix.codes, 4).view(np.uint64)
    out, back = np.zeros_like(plain), np.zeros_like(words)
    for first, last in ((0, rows), (rows, 64)):
        hopper.pack(words[first:last], out, first)
    assert np.array_equal(out, plain)
    hopper.unpack(out, back[:rows])
    hopper.unpack(out, back[rows:], rows)
    assert np.array_equal(back, words)


@pytest.mark.parametrize("bits", [4, 8])
def test_gate_and_up_are_packed_side_by_side(bits: int) -> None:
    codes = random_matrix(MatrixSpec("w13", 256, 96, f"int{bits}", 32, "bf16")).codes
    plain = pack_words(WEIGHT[bits], codes, bits, compiled=False).numpy().view(np.uint32).reshape(6, -1)
    out, rows = np.zeros_like(plain), rows_of(codes, bits)
    marlin.pack(rows[:128], bits, out)
    marlin.pack(np.asfortranarray(rows[128:]), bits, out, row=128)
    assert np.array_equal(out, plain)
    up = np.zeros_like(rows[128:])
    marlin.unpack(out, bits, up, row=128)
    assert np.array_equal(up, rows[128:])


@settings(max_examples=25)
@given(st.sampled_from([4, 8]), st.integers(0, 5), st.integers(0, 127), st.integers(0, 31))
def test_a_single_flipped_bit_is_unpacked(bits: int, row: int, column: int, bit: int) -> None:
    rows = rows_of(random_matrix(MatrixSpec("w2", 64, 96, f"int{bits}", 32, "bf16")).codes, bits)
    packed, back = np.zeros((6, 32 * bits), np.uint32), np.zeros_like(rows)
    marlin.pack(rows, bits, packed)
    packed[row, column] ^= np.uint32(1 << bit)
    marlin.unpack(packed, bits, back)
    assert int(np.bitwise_count(back ^ rows).sum()) == 1


#: Orders of scales: those of 64 rows of a group together, of both halves together, and others.
SCALES = [
    Arrangement("n o8 r8, g -> g n r o"),
    Arrangement("n o2 s2 t2 r8, g -> g n r o t s"),
    Arrangement("h2 n o2 s2 t2 r4, g -> g n r h o t s"),
    Arrangement("n a4 b4 c2, g -> g n b a c"),
]


@pytest.mark.parametrize("arrangement", SCALES, ids=str)
@pytest.mark.parametrize("columns", [1, 7, 8, 9, 16, 23, 90])
@pytest.mark.parametrize(("dtype", "bits"), [(torch.uint8, 8), (torch.int16, 16)])
def test_scales_are_packed_as_by_the_plain_loops(
    arrangement: Arrangement, columns: int, dtype: torch.dtype, bits: int
) -> None:
    generator = torch.Generator().manual_seed(columns)
    scales = torch.randint(0, 1 << 7, (256, columns), generator=generator).to(dtype)
    plain = pack_words(arrangement, scales, bits, compiled=False)
    assert torch.equal(pack_words(arrangement, scales, bits, compiled=True), plain)
    assert torch.equal(unpack_words(arrangement, plain, (256, columns), bits, compiled=True), scales)


def arrangements() -> dict[tuple[str, int], tuple[Arrangement, int, tuple[int, int]]]:
    """Arrangements of elements that are packed into words, with their bits and a shape of three by two units."""
    found = {}
    for layout_id in LAYOUT_IDS:
        for spec in specs(layout_id, rows=3):
            for part in get_layout(layout_id).parts(spec).values():
                order = part.arrangement
                if order.fields:
                    shape = (3 * order.row_multiple, 2 * order.column_multiple)
                    found[order.pattern, part.bits] = (order, part.bits, shape)
    return found


def test_words_of_every_layout_are_packed_as_by_the_plain_loops() -> None:
    cases = arrangements()
    assert {order.fields_per_word for order, _, _ in cases.values()} == {2, 4, 8, 16, 32}
    for order, bits, shape in cases.values():
        codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
        plain = pack_words(order, codes, bits, compiled=False)
        assert torch.equal(pack_words(order, codes, bits, compiled=True), plain), order
        assert torch.equal(unpack_words(order, plain, shape, bits, compiled=True), codes), order


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 70)])
def test_comparison_sees_every_element_whatever_the_strides(dtype: type, shape: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    right = rng.integers(0, 255, shape).astype(dtype)
    spaced = np.zeros((shape[0], 2, shape[1]), dtype)[:, 1]
    for left in (np.array(right), np.array(right, order="F"), spaced):
        left[:] = right
        assert compare.equal_rows(left, right)
        for place in {(0, 0), (shape[0] - 1, shape[1] - 1), (shape[0] // 2, shape[1] // 3)}:
            right[place] ^= 1
            assert not compare.equal_rows(left, right)
            right[place] ^= 1
    assert not compare.equal_rows(right[:, :0], right)
    assert not compare.equal_rows(right.astype(np.uint64), right)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (33, 70), (64, 16)])
def test_copies_of_any_strides(dtype: type, shape: tuple[int, int]) -> None:
    source = np.random.default_rng(4).integers(0, 255, shape).astype(dtype)
    room = np.empty((shape[0] + 1, shape[1] + 3), dtype)
    for matrix in (np.array(source), np.array(source, order="F"), np.repeat(source, 2, axis=0)[::2]):
        room[:] = 99
        transpose.copy(matrix, room[: shape[0], : shape[1]])
        assert np.array_equal(room[: shape[0], : shape[1]], source)
        assert (room[shape[0] :] == 99).all()
        assert (room[:, shape[1] :] == 99).all()


@pytest.mark.parametrize(("dtype", "mask"), [(np.uint8, 0xFF), (np.uint16, 0x7C00), (np.uint32, 0x7F800000)])
def test_words_with_all_bits_of_a_mask_are_seen(dtype: type, mask: int) -> None:
    words = np.full((5, 7), mask ^ (mask & -mask), dtype)
    assert not compare.any_all_ones(words, mask)
    words[4, 6] = mask
    assert compare.any_all_ones(words, mask)


def test_bit_permutation_loops_agree_and_invert() -> None:
    words = torch.randint(-(2**31), 2**31 - 1, (3000,), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    plain = MUL_FREE.apply_(words.clone(), compiled=False)
    assert torch.equal(MUL_FREE.apply_(words.clone(), compiled=True), plain)
    assert torch.equal(MUL_FREE.inverse.apply_(plain.clone(), compiled=False), words)
    assert torch.equal(MUL_FREE.inverse.apply_(plain.clone(), compiled=True), words)


def test_a_kernel_decodes_the_permuted_word_with_shifts() -> None:
    """How the kernel reads byte j of a word: bits 15, 8, 7, 6 of each half after shifting left by 3 j (j < 3)."""
    words = torch.randint(0, 2**31 - 1, (500,), generator=torch.Generator().manual_seed(2)).to(torch.int32)
    dealt = MUL_FREE.apply_(words.clone()).to(torch.int64) & 0xFFFFFFFF
    for byte in range(3):
        shifted = dealt << (3 * byte)
        for half in range(2):
            part = (shifted >> (16 * half)) & 0xFFFF
            code = ((part >> 15) & 1) << 3 | ((part >> 6) & 7)
            assert torch.equal(code, (words.to(torch.int64) >> (8 * byte + 4 * half)) & 15)


@pytest.mark.slow
def test_without_numba_everything_goes_through_torch() -> None:
    """In a fresh interpreter where numba cannot be imported: same bytes, and nothing compiled is loaded."""
    program = """
import sys
sys.modules["numba"] = None
import torch
from moeq.layouts import words
from moeq.layouts.marlin.maps import WEIGHT
words.COMPILED_FROM = 0
assert not words.have_numba()
codes = torch.arange(64 * 32).reshape(64, 32).remainder(16).to(torch.uint8)
packed = words.pack_words(WEIGHT[4], codes, 4)
assert torch.equal(words.unpack_words(WEIGHT[4], packed, (64, 32), 4), codes)
print(packed.sum().item())
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    codes = torch.arange(64 * 32).reshape(64, 32).remainder(16).to(torch.uint8)
    assert int(done.stdout) == int(pack_words(WEIGHT[4], codes, 4, compiled=True).sum())


@pytest.mark.parametrize("shape", [(1, 2), (5, 8), (33, 64), (128, 10)])
@pytest.mark.parametrize("lie", ["rows", "columns", "every other row"])
def test_negative_zeros_are_told_and_put_back(shape: tuple[int, int], lie: str) -> None:
    random = np.random.default_rng(shape[0])
    codes = random.choice(np.array([0x80, 0x80, 0, 0x81, 0x7F, 0xFF, 1, 0x40], np.uint8), (shape[0], 4 * shape[1]))
    words = codes.view(np.uint32)
    given = {"rows": words, "columns": np.asfortranarray(words), "every other row": np.repeat(words, 2, axis=0)[::2]}[
        lie
    ]
    flags = np.full((shape[0], shape[1] // 2), 0xA5, np.uint8)
    columns.negative_zeros(given, flags)
    assert np.array_equal(flags, np.packbits(codes == 0x80, axis=1, bitorder="little"))
    assert columns.are_negative_zeros(given, flags)
    without = np.where(codes == 0x80, 0, codes).astype(np.uint8).view(np.uint32)
    assert columns.lacks_negative_zeros(given, without)
    back = without.copy()
    columns.add_negative_zeros(flags, back)
    assert np.array_equal(back, words)
    without[-1, -1] ^= np.uint32(1 << 17)
    flags[0, 0] ^= 4
    assert not columns.lacks_negative_zeros(given, without)
    assert not columns.are_negative_zeros(given, flags)


@pytest.mark.parametrize(("n", "k"), [(1, 4), (3, 12), (70, 256), (130, 520)])
def test_columns_that_are_taken_and_summed(n: int, k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(n)
    codes = torch.randint(256, (n, k), generator=generator, dtype=torch.uint8)
    order = torch.randperm(k, generator=generator)
    wide = torch.stack([codes, codes], dim=2)[:, :, 0]  # columns that do not follow each other in memory
    wanted = torch.tensor([[row[place] for place in order.tolist()] for row in codes.tolist()], dtype=torch.uint8)
    for least in (0, 1 << 40):
        monkeypatch.setattr("moeq.layouts.words.COMPILED_FROM", least)
        for given_codes in (codes, wide):
            assert torch.equal(take_columns(given_codes, order), wanted)
            assert torch.equal(take_columns(given_codes, order.to(torch.int32)), wanted)
            for block in (2, 4, k):
                sums = block_sums(given_codes, block)
                found = [[sum(row[at : at + block]) for at in range(0, k, block)] for row in codes.tolist()]
                assert sums.dtype == torch.int32
                assert sums.tolist() == found
