"""MXFP4 words times e4m3 tokens: words become e4m3 in registers, the left operand of wgmma.

Scales are folded into the exponents of weights (`fold`), so a product of 32 rows of k is one of e4m3 numbers. Tensor
cores keep some 14 bits of a sum, so those of each step of 128 are added to the others outside of them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.hopper.compat import barrier, reinterpret, tma_load
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.w4a8.device import codes
from moeq_kernels.hopper.w4a16.device import common, layouts
from moeq_kernels.hopper.w8a8.device import common as bytes_common

STEP = bytes_common.STEP


# Argument lists of twenty names, one to a line, would hide the code.
# fmt: off
@gluon.jit
def _copy(given, TOKENS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, PAIRED: gl.constexpr,
          DEPENDENT: gl.constexpr):
    """The copy warp: words, shifts, and the boxes of BOX tokens that hold any of the tile."""
    (
        w_desc, s_desc, x_desc, w_buf, s_buf, x_buf, ready, empty, tiles, num_tiles, steps, blocks, slabs, groups,
        pair_tiles,
    ) = given
    BOXES: gl.constexpr = TOKENS // BOX
    WORDS: gl.constexpr = 2 * 2 * (8 * 512 + 4 * 64)
    if DEPENDENT:
        gdc_wait()
    it = 0
    for index in range(gl.program_id(0), gl.load(num_tiles) * blocks, gl.num_programs(0)):
        expert, row, end_row, block = bytes_common.find_item(index, tiles, blocks, TOKENS)
        tile = block * (2 if PAIRED else 4)
        left = end_row - row
        for i in range(steps):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            for b in gl.static_range(BOXES):
                is_last = (left <= (b + 1) * BOX) | (b == BOXES - 1)
                mbarrier.expect(bar, WORDS + (b + 1) * BOX * STEP, pred=is_last & ((left > b * BOX) | (b == 0)))
            for half in gl.static_range(2):
                at = tile + half * pair_tiles
                tma_load(w_desc, [expert * slabs + i * 8, at, 0], bar, w_buf.index(2 * stage + half))
                tma_load(s_desc, [expert * groups + i * 4, at * 64], bar, s_buf.index(2 * stage + half))
            for b in gl.static_range(BOXES):
                needed = (left > b * BOX) | (b == 0)
                tma_load(x_desc, [row + b * BOX, i * STEP], bar, x_buf.index(stage * BOXES + b), pred=needed)
            it += 1


@gluon.jit
def weights(w_view, s_view, stage, QUARTER: gl.constexpr, WG: gl.constexpr, TOKENS: gl.constexpr):
    """A quarter of a step's weights."""
    words = w_view.index(stage).slice(2 * QUARTER, 2, dim=1).slice(WG * 512, 512, dim=2)
    shifts = s_view.index(stage).slice((2 * QUARTER + WG) * 8, 8, dim=1)
    return codes.e2m1_operand(
        words.load(layouts.words(True, 2, "e2m1")), shifts.load(gl.SliceLayout(2, layouts.scales(True))), TOKENS
    )


@gluon.jit
def _multiply(given, WG: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr,
              PAIRED: gl.constexpr, DEPENDENT: gl.constexpr):
    """A multiplying warpgroup: 128 rows of the weights, 64 of each half of a pair."""
    (
        w_buf, s_buf, x_buf, ready, empty, x_scale, factor, bias, out, tiles, num_tiles, steps, blocks, columns, stride,
        packed, pair_tiles,
    ) = given
    layout: gl.constexpr = bytes_common.accumulator(TOKENS)
    w_view = reinterpret(w_buf, gl.uint8, [STAGES, 2, 8, 2 * 512], layouts.plain_shared())
    s_view = reinterpret(s_buf, gl.uint8, [STAGES, 2, 4 * 2 * 8, 8], layouts.plain_shared())
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES, TOKENS, STEP], bytes_common.operand())
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout))
    if DEPENDENT:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    it = 0
    for index in range(gl.program_id(0), gl.load(num_tiles) * blocks, gl.num_programs(0)):
        expert, row, end_row, block = bytes_common.find_item(index, tiles, blocks, TOKENS)
        tile = block * (2 if PAIRED else 4)
        acc = gl.zeros([128, TOKENS], gl.float32, layout)
        for _ in range(steps):
            stage = it % STAGES
            mbarrier.wait(ready.index(stage), (it // STAGES) & 1)
            x = x_view.index(stage)
            part = gl.zeros([128, TOKENS], gl.float32, layout)
            one = weights(w_view, s_view, stage, 0, WG, TOKENS)
            x1 = x.slice(0, 32, dim=1).permute((1, 0))
            part = warpgroup_mma(one, x1, part, use_acc=False, is_async=True)
            two = weights(w_view, s_view, stage, 1, WG, TOKENS)
            part = warpgroup_mma(two, x.slice(32, 32, dim=1).permute((1, 0)), part, is_async=True)
            three = weights(w_view, s_view, stage, 2, WG, TOKENS)
            part = warpgroup_mma(three, x.slice(64, 32, dim=1).permute((1, 0)), part, is_async=True)
            four = weights(w_view, s_view, stage, 3, WG, TOKENS)
            part = warpgroup_mma(four, x.slice(96, 32, dim=1).permute((1, 0)), part, is_async=True)
            part = warpgroup_mma_wait(0, deps=(part,))
            mbarrier.arrive(empty.index(stage), count=1)
            acc = acc + part
            it += 1
        token_scale = gl.load(x_scale + row + t, mask=row + t < end_row, other=0.0)
        acc = acc * gl.expand_dims(token_scale, 0)
        acc = gl.convert_layout(acc, layouts.accumulator(TOKENS), assert_trivial=True)
        column = (tile + WG) * 64
        up = (tile + WG + pair_tiles) * 64
        common.store_chunks(
            acc, out, row, end_row, column, up, columns, stride, factor, bias, True, expert, packed, EPILOGUE, True,
            TOKENS, 64,
        )


@gluon.jit(do_not_specialize=["steps", "blocks", "slabs", "groups", "pair_tiles", "packed"])
def w4a8_product_wide(
    w_desc, s_desc, x_desc, x_scale, factor, bias, out, tiles, num_tiles, steps, blocks, slabs, groups, pair_tiles,
    columns, stride, packed,
    TOKENS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, EPILOGUE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """out[row] = epilogue(x[row] @ W[expert of row].T), see `epilogue.Epilogue`.

    Args:
        w_desc: words int32 `[E K / 16, N / 64, 128]`, block `[8, 2, 128]`.
        s_desc: shifts uint8 `[E K / 32, N]`, block `[4, 128]`.
        x_desc: e4m3 tokens `[rows, k]` sorted by expert, k in the order of words, block `[BOX, 128]`.
        x_scale: fp32 `[rows]`; factor: fp32 and bias `[E, packed]`, in Marlin's 32-column order, bias or None.
        out: `[rows, columns]` with `stride`.
        tiles: int32 `[T, 8]` and num_tiles: int32 `[1]`, of `device.routing`, of TOKENS tokens.
        steps: of 128 of k; blocks: of 128 columns where gated and not interleaved, else of 256 packed ones.
        slabs, groups: of 16 and of 32 rows of k of an expert; pair_tiles: from a tile of 64 columns to its other half.
        BOX: tokens that are copied together; REGISTERS: of multiplying threads.
        DEPENDENT: launched while the kernel before it still runs.
    """
    PAIRED: gl.constexpr = epilogue.gated(EPILOGUE) and not epilogue.interleaved(EPILOGUE)
    w_buf = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 8, 2, 128], layouts.word_buffer())
    s_buf = gl.allocate_shared_memory(gl.uint8, [STAGES * 2, 4, 128], layouts.scale_buffer(8))
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (TOKENS // BOX), BOX, STEP], bytes_common.operand())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    barrier()
    taken = (
        w_buf, s_buf, x_buf, ready, empty, x_scale, factor, bias, out, tiles, num_tiles, steps, blocks, columns, stride,
        packed, pair_tiles,
    )
    copied = (
        w_desc, s_desc, x_desc, w_buf, s_buf, x_buf, ready, empty, tiles, num_tiles, steps, blocks, slabs, groups,
        pair_tiles,
    )
    gl.warp_specialize(
        [
            (_multiply, (taken, 0, TOKENS, STAGES, EPILOGUE, PAIRED, DEPENDENT)),
            (_multiply, (taken, 1, TOKENS, STAGES, EPILOGUE, PAIRED, DEPENDENT)),
            (_copy, (copied, TOKENS, BOX, STAGES, PAIRED, DEPENDENT)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )


# fmt: on
