"""Tile sizes of the portable kernels, chosen from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass

from moeq_kernels.formats import Format


@dataclass(frozen=True)
class Blocks:
    """Tile of one program: `m` rows, `n` columns per accumulator, `k` per step; powers of two.

    `m` and `k` are at least 16 (32 for int8 activations), `n` is at least 64 for Marlin layouts.
    """

    m: int
    n: int
    k: int
    num_warps: int = 4
    num_stages: int = 2


def next_power_of_two(value: int) -> int:
    """Return the smallest power of two that is at least `value`."""
    return 1 << max(0, value - 1).bit_length()


def choose_blocks(
    rows_per_expert: float,
    fmt: Format,
    *,
    shared: int = 227 * 1024,
    interpret: bool,
    fp8: str = "",
    wgmma: bool = False,
) -> Blocks:
    """Choose the tile for an average number of rows per expert.

    Args:
        shared: bytes of shared memory per program.
        interpret: whether the interpreter runs the kernels; it pays per operation and gets few, large tiles.
        fp8: result of `portable.fp8_products` for e4m3 activations, otherwise empty.
        wgmma: whether the tensor cores' e4m3 instruction takes 64 rows.
    """
    m = min(64, max(16, next_power_of_two(int(rows_per_expert))))
    if interpret:
        return Blocks(m, 256, 256)
    if fmt.kind == "int8":  # whole lines of 128 bytes; few experts need a second tile
        m = min(64, max(16, next_power_of_two(int(1.5 * rows_per_expert))))
        if m <= 32:
            return Blocks(m, 64, 128, num_warps=4, num_stages=5 if shared > 128 * 1024 else 3)
        large = shared > 200 * 1024  # on smaller GPUs tiles of 128 rows spill
        m = 128 if large and rows_per_expert > 64 else m
        return Blocks(m, 128, 128, num_warps=8, num_stages=3 if large else 2)
    if fp8:  # a step lies in one group of the weights; its sum takes a second accumulator
        k = 128 if fp8 == "native" else 64
        if wgmma and m >= 32:  # 32 rows would be float16 products with more instructions
            m = 128 if rows_per_expert > 64 else 64
            return Blocks(m, 64, k, num_warps=m // 16, num_stages=3)
        return Blocks(m, 64, k, num_warps=4 if m <= 32 else 8, num_stages=3 if shared > 100 * 1024 else 2)
    if m <= 32:
        return Blocks(m, 64, 64, num_warps=4, num_stages=3)
    # Wider tiles of these formats spill on sm_100 (e2m1 with triton 3.9 and 3.6, bytes and floats with 3.7).
    e2m1 = (("marlin4", "e2m1"), ("marlin4-permuted", "e2m1"), ("hopper4", "e2m1"))
    narrow_formats = (*e2m1, ("rows", "uint8"), ("rows", "float"))
    n = 64 if (fmt.codec, fmt.kind) in narrow_formats else 128
    return Blocks(m, n, 64, num_warps=8, num_stages=3 if shared > 100 * 1024 else 2)
