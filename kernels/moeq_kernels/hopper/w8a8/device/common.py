"""What both product kernels share: layouts, the order of work items, and scales.

Both operands of the products are rows of k in shared memory, of int8 or e4m3. Sums of int8 products are exact 32-bit
integers (`IGMMA`), and scales are applied once, as the portable kernels do: sum * weight scale * token scale, then the
bias. Sums of e4m3 products (`QGMMA`) are float32 numbers of which the tensor cores keep some 14 bits, so those of each
step are added to the others outside of them. There scales of groups are applied as well: a step is a group.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

#: Bytes of k in one step: the widest swizzled row of shared memory.
STEP = gl.constexpr(128)


@constexpr_function
def accumulator(columns):
    """Sums of one warpgroup, int32 or float32: 64 rows (or a multiple) x columns."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 32])


@constexpr_function
def operand():
    """Shared memory of an operand `[rows, 128]`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)


@constexpr_function
def weight_box():
    """The same memory as the copy engine fills it with weights `[1, rows, 128]` of one expert."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=3)


@gluon.jit
def step_scales(expert, n, rows, steps):
    """Where the scales of the blocks of 128 x 128 begin that rows n of an expert's `rows` rows of weights lie in."""
    return (expert * ((rows + 127) >> 7) + (n >> 7)) * steps


@gluon.jit
def find_item(index, tiles, parts, TOKENS: gl.constexpr):
    """Expert, first row, end row and part (of columns and k) of a work item; `tiles` as `device.routing` says.

    Items are ordered by expert, then part, then tile of tokens, so that neighbours share weights. An expert's last
    tile is often small: tiles are rotated from round to round, or a program could meet none but those.
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
    """First step and end of the share of k of an item, and its number."""
    each = (steps + splits - 1) // splits
    first = part % splits * each
    return first, gl.minimum(first + each, steps), part % splits


@gluon.jit
def scaled(acc, row_scale, column_scale, ROWS_FIRST: gl.constexpr):
    """float32 acc * weight scale * token scale; weight scales lie along the rows where ROWS_FIRST."""
    value = acc.to(gl.float32)
    if ROWS_FIRST:
        return value * gl.expand_dims(row_scale, 1) * gl.expand_dims(column_scale, 0)
    else:
        return value * gl.expand_dims(column_scale, 0) * gl.expand_dims(row_scale, 1)
