"""Tiles of the portable kernels."""

from __future__ import annotations

import pytest

from moeq_kernels.formats import FORMATS
from moeq_kernels.tuning import Blocks, choose_blocks

FP8 = [key for key, fmt in FORMATS.items() if fmt.fp8_activations]


@pytest.mark.parametrize("key", FP8)
def test_e4m3_tiles_of_hopper_are_those_of_its_tensor_cores_where_that_takes_fewer_instructions(
    key: tuple[str, str],
) -> None:
    chosen = {rows: choose_blocks(rows, FORMATS[key], interpret=False, fp8="native", wgmma=True) for rows in range(66)}
    assert chosen[16] == Blocks(16, 64, 128, 4, 3)
    assert chosen[17] == chosen[64] == Blocks(64, 64, 128, 4, 3)
    assert chosen[65] == Blocks(128, 64, 128, 8, 3)
    assert {blocks.m for blocks in chosen.values()} == {16, 64, 128}
    assert choose_blocks(65, FORMATS[key], interpret=False, fp8="native") == Blocks(64, 64, 128, 8, 3)
    assert choose_blocks(17, FORMATS[key], interpret=False, fp8="native").m == 32
    assert choose_blocks(17, FORMATS[key], interpret=False, fp8="decoded").m == 32


@pytest.mark.parametrize("key", FORMATS)
@pytest.mark.parametrize("shared", [99 * 1024, 163 * 1024, 227 * 1024])
def test_tiles_grow_with_the_rows_and_have_whole_marlin_tiles(key: tuple[str, str], shared: int) -> None:
    fmt = FORMATS[key]
    heights = []
    for rows in (0, 1, 16, 17, 40, 64, 65, 4096):
        blocks = choose_blocks(rows, fmt, shared=shared, interpret=False)
        assert blocks.n >= 64
        assert blocks.k >= 32
        heights.append(blocks.m)
    assert heights == sorted(heights)
