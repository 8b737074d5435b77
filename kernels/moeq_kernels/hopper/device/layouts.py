"""Register and shared-memory layouts of the Hopper kernels, as functions that device code can call with constants.

A product is computed transposed, Y^T = W^T X^T, so that weights are wgmma's left operand and can come from registers.
One Marlin int4 word of a lane holds the four registers of that lane's m64k16 fragment for 16 columns of the weight
matrix, if output rows are taken in a suitable order; the orders are called maps:

map A ("narrow" kernels), one warpgroup, 256 output rows: warp w reads column tile w (64 columns), 16 bytes a lane;
    row = 64 j + 16 tile + 8 h + g.
map B ("wide" kernels), 128 output rows for each warpgroup: warp w reads words j = 2 (w % 2) + {0, 1} of tile w // 2,
    8 bytes a lane; row = 64 j0 + 32 tile + 16 j1 + 8 h + g.

Here a lane is 4 g + t, j = 2 j1 + j0 the word's number and h the upper half of its 16 columns, so that the column is
64 tile + 16 j + 8 h + g. In both maps the upper tiles hold the second of two column ranges ("pair"): for gate-up
weights gate is first and up is second. Registers follow the PTX definition of wgmma's register fragments, words
vLLM's `gptq_marlin_repack` (0.33.0).
"""

from __future__ import annotations

from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl


@constexpr_function
def accumulator(tokens):
    """fp32 accumulators of one warpgroup: rows x tokens."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tokens, 16])


@constexpr_function
def left_operand(tokens):
    """bf16 weights in registers."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulator(tokens), k_width=2)


@constexpr_function
def plain_shared():
    """Shared memory without swizzling, three axes."""
    return gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])


@constexpr_function
def _lanes(step, axis, rank, count=5):
    return [[step << bit if at == axis else 0 for at in range(rank)] for bit in range(count)]


@constexpr_function
def word_buffer():
    """Shared memory that the copy engine fills with words `[slabs, tiles, 128]`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=3)


@constexpr_function
def scale_buffer():
    """Shared memory for scales `[1, columns]`."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=16, rank=2)


@constexpr_function
def token_buffer():
    """Shared memory for tokens `[tokens, 64]`, wgmma's right operand."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


@constexpr_function
def words(wide, slabs):
    """Bytes `[pair, slabs, tiles * 512]` of packed words (slab: 16 rows of k), in the registers of their lanes."""
    slab = [[0, 1 << bit, 0] for bit in range(slabs.bit_length() - 1)]
    own = [[0, 0, 1], [0, 0, 2], [0, 0, 4]] + ([] if wide else [[0, 0, 8]])
    warps = [[0, 0, 8], [1, 0, 0]] if wide else [[0, 0, 512], [1, 0, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=own + slab,
        lane_bases=_lanes(16, 2, 3),
        warp_bases=warps,
        block_bases=[],
        shape=[2, slabs, 512 if wide else 1024],
    )


@constexpr_function
def scales(wide):
    """`[pair, tile and g, t, j and h]`: each lane's own scales; `t` is a copy for the lanes that share them."""
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
def zeros(wide):
    """`[pair, tile and g, t, j1]`: the zero-point word of each lane; narrow kernels need all j, so have one j1."""
    return gl.DistributedLinearLayout(
        reg_bases=[],
        lane_bases=[[0, 0, 1, 0], [0, 0, 2, 0], [0, 1, 0, 0], [0, 2, 0, 0], [0, 4, 0, 0]],
        warp_bases=[[0, 0, 0, 1], [1, 0, 0, 0]] if wide else [[0, 8, 0, 0], [1, 0, 0, 0]],
        block_bases=[],
        shape=[2, 8 if wide else 16, 4, 2 if wide else 1],
    )


@constexpr_function
def output_pair(wide, tokens):
    """`[tokens, columns, pair]`: both halves of a pair in one thread, 8 neighbouring columns each."""
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
    """`[tokens, columns]` for stores: 8 neighbouring columns in a thread, rows spread over the rest."""
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
