"""Facts the Hopper kernels rest on: where Marlin's words put codes, and what one bf16 multiply-add makes of them."""

from __future__ import annotations

import pytest
import torch

from bench.packing import marlin_weight
from moeq_kernels.hopper.device import layouts


def _plain(function: object, *arguments: object) -> object:
    return getattr(function, "fn", function)(*arguments)


@pytest.mark.parametrize("wide", [False, True])
def test_words_hold_wgmma_fragments_in_the_documented_row_order(wide: bool) -> None:
    """Each lane's words, read as `layouts.words` says, hold the fragments of the rows that the map names."""
    tiles, slabs = (1, 4) if wide else (2, 4)
    n_size, k_size = 2 * tiles * 64, 16 * slabs
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(0, 16, (1, n_size, k_size), generator=generator, dtype=torch.uint8)
    words = marlin_weight(codes, 4)[0].view(slabs, 2, tiles * 128).permute(1, 0, 2)  # pair, slab, words of the tiles
    layout = _plain(layouts.words, wide, slabs)
    groups = [layout.reg_bases, layout.lane_bases, layout.warp_bases]
    for warp in range(4):
        for lane in range(32):
            g, t = divmod(lane, 4)
            for register in range(0, 1 << len(layout.reg_bases), 4):  # four bytes are a word
                at = [0, 0, 0]
                for number, bases in zip((register, lane, warp), groups, strict=True):
                    for bit, basis in enumerate(bases):
                        if number >> bit & 1:
                            at = [a ^ b for a, b in zip(at, basis, strict=True)]
                pair, slab, byte = at
                word = int(words[pair, slab, byte // 4]) & 0xFFFFFFFF
                j = byte // 4 % 4
                tile = pair * tiles + byte // 512
                for h in range(2):
                    for upper_k in range(2):
                        for odd in range(2):
                            # nibbles 0 / 4: h 0, k 2t / 2t + 1; 2 / 6: h 1; 1 / 5 and 3 / 7: the same at k + 8
                            nibble = word >> (4 * (2 * h + upper_k + 4 * odd)) & 15
                            n, k = 64 * tile + 16 * j + 8 * h + g, 16 * slab + 2 * t + 8 * upper_k + odd
                            assert nibble == int(codes[0, n, k])
                # wgmma gives rows 16 w .. of each 64 to warp w: the map must put this word's columns there
                row = 64 * (j % 2) + 32 * tile + 16 * (j // 2) if wide else 64 * j + 16 * tile
                assert row // 16 % 4 == warp


def test_one_multiply_add_is_the_rounded_product_of_code_and_scale() -> None:
    generator = torch.Generator().manual_seed(2)
    scales = torch.exp2(torch.rand(4000, generator=generator, dtype=torch.float64) * 40 - 26).bfloat16()
    codes = torch.arange(16, dtype=torch.float64)[None, :]
    s = scales.double()[:, None]
    wanted = ((codes - 8) * s).bfloat16().double() * 2.0**-21
    for shift, factor in ((0, 2.0**112), (4, 2.0**108)):  # a code in the lowest or the next four bits
        bits = (torch.arange(16, dtype=torch.int32) << shift).to(torch.int16)
        denormal = bits.view(torch.bfloat16).double()[None, :]
        multiplier = (s * factor).bfloat16().double()
        offset = (s * -(2.0**-18)).bfloat16().double()
        exact = denormal * multiplier + offset  # float64 holds the sum exactly; fma rounds it once
        assert torch.equal(exact.to(torch.bfloat16).double(), wanted)
