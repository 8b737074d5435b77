"""Register and shared-memory layouts of the W4A16 kernels, as functions of constants for device code.

A product is computed transposed, Y^T = W^T X^T, so that weights are wgmma's left operand and can come from registers.
One Marlin 4-bit word of a lane holds the four registers of that lane's m64k16 fragment for 16 columns of the weight
matrix (two 8-bit words do), if output rows are taken in a suitable order; the orders are called maps:

map A ("narrow" kernels), one warpgroup, 256 output rows: warp w reads column tile w (64 columns), all of a lane;
    row = 64 j + 16 tile + 8 h + g.
map B ("wide" kernels), 128 output rows for each warpgroup: warp w reads words j = 2 (w % 2) + {0, 1} of tile w // 2;
    row = 64 j0 + 32 tile + 16 j1 + 8 h + g.

Here a lane is 4 g + t, j = 2 j1 + j0 the word's number and h the upper half of its 16 columns (8-bit: a second word),
so that the column is 64 tile + 16 j + 8 h + g. In both maps the upper tiles hold the second of two column ranges
("pair"): for gate-up weights gate is first and up is second. Registers follow the PTX definition of wgmma's register
fragments, and words follow vLLM's `gptq_marlin_repack` (0.33.0).
"""

from __future__ import annotations

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl

from moeq_kernels.hopper.w4a16.kinds import KINDS


@constexpr_function
def accumulator(tokens):
    """Return the layout of one warpgroup's fp32 accumulators, rows x tokens."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tokens, 16])


@constexpr_function
def left_operand(tokens):
    """Return the layout of 16-bit weights in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(tokens), k_width=2)


@constexpr_function
def plain_shared():
    """Return the layout of shared memory with three axes and without swizzling."""
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@constexpr_function
def word_buffer():
    """Return the layout of shared memory that the copy engine fills with words `[slabs, tiles, 128]`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


@constexpr_function
def scale_buffer(bits):
    """Return the layout of shared memory for scales `[groups, columns]` of `bits` bits."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=bits, rank=2)


@constexpr_function
def token_buffer():
    """Return the layout of shared memory for tokens `[tokens, 64]`, wgmma's right operand."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@constexpr_function
def groups_of(step, group):
    """Return the number of groups in a step of k."""
    return step // group if 0 < group < step else 1


@constexpr_function
def bits(kind):
    """Return the bits of a code."""
    return KINDS[kind].bits


@constexpr_function
def word_rows(kind):
    """Return the rows of k of a row of words: a slab, or two where a nibble has a code of 2 bits from each."""
    return 16 if KINDS[kind].bits >= 4 else 32


@constexpr_function
def tile_bytes(kind):
    """Return the bytes of a row of words and a tile (64 columns); words of 2- and 3-bit codes are those of 4 bits."""
    return 128 * max(4, KINDS[kind].bits)


@constexpr_function
def words_shape(wide, slabs, kind):
    """Return the shape of `words`: pair, slabs, bytes of this warpgroup's tiles of one half."""
    return [2, slabs, tile_bytes(kind) * (1 if wide else 2)]


@constexpr_function
def words(wide, slabs, kind):
    """Return the layout of packed words in the registers of their lanes; `words_shape` gives the shape."""
    tile = tile_bytes(kind)
    lane = tile // 32
    slab = [[0, 1 << bit, 0] for bit in range(slabs.bit_length() - 1)]
    own = [[0, 0, 1 << bit] for bit in range((lane // 2 if wide else lane).bit_length() - 1)]
    warps = [[0, 0, lane // 2 if wide else tile], [1, 0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=own + slab,
        lane_bases=[[0, 0, lane << bit] for bit in range(5)],
        warp_bases=warps,
        block_bases=[],
        shape=words_shape(wide, slabs, kind),
    )


@constexpr_function
def scales(wide):
    """Return the layout `[pair, tile and g, t, j and h]` of each lane's scales; lanes along t hold copies."""
    own = [[0, 0, 0, 1], [0, 0, 0, 2]] + ([] if wide else [[0, 0, 0, 4]])
    warps = [[0, 0, 0, 4], [1, 0, 0, 0]] if wide else [[0, 8, 0, 0], [1, 0, 0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=own,
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=warps,
        block_bases=[],
        shape=[2, 8 if wide else 16, 4, 8],
    )


@constexpr_function
def zeros(wide, kind):
    """Return the layout `[pair, tile and g, t, j1]` of each lane's zero-point words.

    A 4-bit word of a narrow kernel holds all j, so j1 has one entry there.
    """
    both = KINDS[kind].bits == 8 and not wide
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 0, 1]] if both else [],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=[[0, 0, 0, 1], [1, 0, 0, 0]] if wide else [[0, 8, 0, 0], [1, 0, 0, 0]],
        block_bases=[],
        shape=[2, 8 if wide else 16, 4, 2 if wide or both else 1],
    )


@constexpr_function
def output_pair(wide, tokens):
    """Return the layout `[tokens, columns, pair]` with both halves of a pair in one thread, 8 adjacent columns each."""
    flat = output(wide, tokens)
    widen = [[*base, 0] for base in flat.reg_bases]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], *widen],
        lane_bases=[[*base, 0] for base in flat.lane_bases],
        warp_bases=[[*base, 0] for base in flat.warp_bases],
        block_bases=[],
        shape=[tokens, 64 if wide else 128, 2],
    )


@constexpr_function
def output(wide, tokens):
    """Return the layout `[tokens, columns]` for stores, with 8 adjacent columns in a thread."""
    columns = 64 if wide else 128
    column_lanes = [[0, 8 << bit] for bit in range((columns // 8).bit_length() - 1)]
    rows = [[1 << bit, 0] for bit in range(tokens.bit_length() - 1)]
    row_lanes = 5 - len(column_lanes)
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], *rows[row_lanes + 2 :]],
        lane_bases=column_lanes + rows[:row_lanes],
        warp_bases=rows[row_lanes : row_lanes + 2],
        block_bases=[],
        shape=[tokens, columns],
    )
