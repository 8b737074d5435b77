"""Functions that the W8A8 product kernels share: layouts, the order of work items, and scales.

Both operands are rows of k in shared memory, of int8 or e4m3. Sums of int8 products (`IGMMA`) are exact 32-bit
integers, and scales are applied once, as in the portable kernels: sum * weight scale * token scale, then the bias.
Tensor cores keep some 14 bits of sums of e4m3 products (`QGMMA`), so the sums of every step are added up in float32
registers, where scales of groups are applied as well: a step is a group.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

#: Bytes of k in one step: the widest swizzled row of shared memory.
STEP = gl.constexpr(128)


@constexpr_function
def accumulator(columns):
    """Return the layout of one warpgroup's sums, int32 or float32: 64 rows (or a multiple) x columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@constexpr_function
def operand():
    """Return the layout of shared memory for an operand `[rows, 128]`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@constexpr_function
def weight_box():
    """Return the layout with which the copy engine fills an operand with weights `[1, rows, 128]` of one expert."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)


@gluon.jit
def step_scales(expert, n, rows, steps):
    """Return the offsets of the first scale of the blocks of 128 x 128 that hold rows n of an expert."""
    return (expert * ((rows + 127) >> 7) + (n >> 7)) * steps


@gluon.jit
def find_item(index, tiles, parts, TOKENS: gl.constexpr):
    """Return expert, first row, end row and part (of columns and k) of a work item; `device.routing` describes tiles.

    Items are ordered by expert, then part, then tile of tokens, so that neighbours share weights. The last tile of an
    expert is often small; tiles are rotated from round to round, so that no program gets small tiles only.
    """
    entry = tiles + (index // parts) * 8
    expert = gl.load(entry)
    first = gl.load(entry + 3)
    count = gl.load(entry + 4)
    row = gl.load(entry + 1) - (index // parts - first) * TOKENS
    rest = index - first * parts
    part = rest // count
    turn = part * count // gl.num_programs(0) * (count + 1 - gl.num_programs(0) % count)
    return expert, row + (rest + turn) % count * TOKENS, gl.load(entry + 2), part


@gluon.jit
def share(part, splits, steps):
    """Return the first step, end step and number of an item's share of k."""
    each = (steps + splits - 1) // splits
    first = part % splits * each
    return first, gl.minimum(first + each, steps), part % splits


@gluon.jit
def scaled(acc, row_scale, column_scale, ROWS_FIRST: gl.constexpr):
    """Return acc * weight scale * token scale in float32; weight scales lie along the rows if ROWS_FIRST."""
    value = acc.to(gl.float32)
    if ROWS_FIRST:
        return value * gl.expand_dims(row_scale, 1) * gl.expand_dims(column_scale, 0)
    else:
        return value * gl.expand_dims(column_scale, 0) * gl.expand_dims(row_scale, 1)
