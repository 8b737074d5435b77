"""The direct road from GPTQ words to Marlin words, against the plain one; both roads of bit permutations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts.matrices import random_matrix
from torch import Tensor

from moeq.errors import MoeqError
from moeq.layouts.bits import MUL_FREE
from moeq.layouts.marlin import WEIGHT
from moeq.layouts.registry import get_layout
from moeq.layouts.words import pack_words
from moeq.matrix import MatrixSpec

pytest.importorskip("numba")

from moeq.layouts.fast.gptq_marlin import pack_gptq4, same_gptq4, unpack_gptq4

ROOT = Path(__file__).parents[2]


def gptq_words(codes: Tensor) -> Tensor:
    """uint8 codes `[N, K]` -> int32 `[K / 8, N]`, k % 8 in the nibble."""
    n, k = codes.shape
    octets = codes.T.reshape(k // 8, 8, n).to(torch.int32)
    words = torch.zeros(k // 8, n, dtype=torch.int32)
    for field in range(8):
        words |= octets[:, field] << (4 * field)
    return words


def w13(half: int, k: int) -> MatrixSpec:
    return MatrixSpec("w13", 2 * half, k, "int4", 16, "bf16")


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**31))
def test_direct_and_plain_roads_agree(tiles: int, k16: int, seed: int) -> None:
    half, k = 64 * tiles, 16 * k16
    matrix = random_matrix(w13(half, k), seed)
    layout = get_layout("marlin-wna16/1")
    plain = layout.pack(matrix)
    out = {name: torch.zeros_like(tensor) for name, tensor in plain.items()}
    gate, up = gptq_words(matrix.codes[:half]), gptq_words(matrix.codes[half:])
    pack_gptq4(gate, out["weight"])
    pack_gptq4(up, out["weight"], column=half)
    layout.pack_into(matrix, {name: tensor for name, tensor in out.items() if name != "weight"})
    assert all(torch.equal(out[name], plain[name]) for name in plain)
    for column, words in ((0, gate), (half, up)):
        assert same_gptq4(words, out["weight"], column)
        back = torch.empty_like(words)
        unpack_gptq4(out["weight"], back, column)
        assert torch.equal(back, words)


def test_compressed_tensors_words_take_the_same_road() -> None:
    matrix = random_matrix(MatrixSpec("w2", 128, 96, "int4", 32, "bf16"))
    stored = gptq_words(matrix.codes).T.contiguous()  # [N, K / 8], as compressed-tensors has them
    out = torch.zeros(96 // 16, 2 * 128, dtype=torch.int32)
    pack_gptq4(stored.T, out)
    assert torch.equal(out, get_layout("marlin-wna16/1").pack(matrix)["weight"])
    assert same_gptq4(stored.T, out)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 5), st.integers(0, 127), st.integers(0, 31))
def test_a_single_flipped_bit_is_seen(row: int, column: int, bit: int) -> None:
    matrix = random_matrix(MatrixSpec("w2", 64, 96, "int4", 32, "bf16"))
    packed = get_layout("marlin-wna16/1").pack(matrix)["weight"]
    words = gptq_words(matrix.codes)
    assert same_gptq4(words, packed)
    packed[row, column] ^= -(1 << 31) if bit == 31 else 1 << bit
    assert not same_gptq4(words, packed)


@pytest.mark.parametrize(("words", "packed", "column"), [((3, 64), (1, 128), 0), ((2, 32), (1, 64), 0),
                                                         ((2, 64), (1, 128), 64), ((2, 64), (2, 128), 0)])  # fmt: skip
def test_what_does_not_fit_is_refused(words: tuple[int, int], packed: tuple[int, int], column: int) -> None:
    with pytest.raises(MoeqError, match="must be a multiple of 16"):
        pack_gptq4(torch.zeros(words, dtype=torch.int32), torch.zeros(packed, dtype=torch.int32), column)


def test_bit_permutation_roads_agree_and_invert() -> None:
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


def test_without_numba_everything_goes_through_torch() -> None:
    """In a fresh interpreter where numba cannot be imported: same bytes, and nothing compiled is loaded."""
    program = """
import sys
sys.modules["numba"] = None
import torch
from moeq.layouts import words
from moeq.layouts.marlin import WEIGHT
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
