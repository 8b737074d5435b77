"""Wide kernel, for many tokens per expert: one copy warp feeds several warpgroups of 128 output rows each.

Programs are persistent and take work items of different lengths from a queue. While one warpgroup decodes words, the
tensor cores work for another. A tile takes up to TOKENS tokens. The tiles of an expert have one height (the last may
have fewer rows), and each is multiplied at the next height of `wide_copies.heights`: as one product of a power of two,
or as two products of a power of two and of 32 tokens.
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

from moeq_kernels.hopper.compat import barrier, reinterpret
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.device.barriers import item_ring, ring
from moeq_kernels.hopper.w4a16.device import common, layouts, weights, wide_copies
from moeq_kernels.hopper.w4a16.device.wide_copies import STEP


@gluon.jit
def _slab_scales(scales, SLAB: gl.constexpr, WG: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """Load a warpgroup's scales of two slabs of 16 rows of k, from slab SLAB of a step on."""
    lower = scales.slice((GROUPS_OF_WARPS * SLAB + WG) * 8, 8, dim=1).load(LAYOUT)
    return lower, scales.slice((GROUPS_OF_WARPS * (SLAB + 1) + WG) * 8, 8, dim=1).load(LAYOUT)


@gluon.jit
def _item(
    it, w_view, x_buf, x_rest, s_view, ready, empty, zero, out, row, end_row, s_row, groups, first, last, tile,
    pair_tiles, columns, stride, zero_words, scale, bias, global_scale, expert, packed, done, finished,
    WG: gl.constexpr, HEIGHT: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ZEROS: gl.constexpr, KIND: gl.constexpr, EPILOGUE: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr,
    SIGNALS: gl.constexpr,
):
    """Compute one warpgroup's part of an item, with HEIGHT of the TOKENS columns of the buffers.

    SIGNALS: whether to count the preceding item, of expert `finished`, after this one is multiplied; the stores of that
    item have completed by then.
    """
    HALF: gl.constexpr = x_buf.dtype == gl.float16
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    MAIN: gl.constexpr = wide_copies.main_height(HEIGHT)
    # With few registers per thread half of a step's weights are decoded at a time.
    PARTS: gl.constexpr = 2 if GROUPS_OF_WARPS == 4 and TOKENS > 32 else 1
    SLABS: gl.constexpr = 4 // PARTS
    scale_layout: gl.constexpr = gl.SliceLayout(2, layouts.scales(True))
    EACH: gl.constexpr = wide_copies.main_height(TOKENS) // MAIN
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES * EACH, MAIN, STEP], layouts.token_buffer())
    acc = gl.zeros([128, MAIN], gl.float32, layouts.accumulator(MAIN))
    rest = acc
    if HEIGHT > MAIN:
        rest = gl.zeros([128, HEIGHT - MAIN], gl.float32, layouts.accumulator(HEIGHT - MAIN))
    for i in range(first, last):
        stage = it % STAGES
        mbarrier.wait(ready.index(stage), (it // STAGES) & 1)
        for p in gl.static_range(PARTS):
            words = weights.load_words(w_view, stage, p * SLABS, SLABS, KIND, True, WG)
            scale1 = 0
            scale2 = 0
            if GROUP == 16:  # every slab of words has a scale of its own
                scales = s_view.index(stage)
                scale1 = _slab_scales(scales, p * SLABS, WG, GROUPS_OF_WARPS, scale_layout)
                scale2 = scale1
                if SLABS == 4:
                    scale2 = _slab_scales(scales, 2, WG, GROUPS_OF_WARPS, scale_layout)
            elif GROUP:
                scales = s_view.index(stage)
                scale1 = scales.slice((GROUPS_OF_WARPS * (p * PER // PARTS) + WG) * 8, 8, dim=1).load(scale_layout)
                scale2 = scale1
                if PER > PARTS:
                    scale2 = scales.slice((GROUPS_OF_WARPS + WG) * 8, 8, dim=1).load(scale_layout)
            zero1 = 0
            zero2 = 0
            if ZEROS:
                z_row = s_row + common.group_at(i * STEP, p * PER // PARTS, groups, GROUP)
                zero1 = common.zero_offsets(zero, z_row, zero_words, tile + WG, pair_tiles, True, KIND, HALF)
                zero2 = zero1
                if PER > PARTS:
                    z_row = s_row + common.group_at(i * STEP, p * PER // PARTS + 1, groups, GROUP)
                    zero2 = common.zero_offsets(zero, z_row, zero_words, tile + WG, pair_tiles, True, KIND, HALF)
            a = weights.step_operand(
                words, scale1, scale2, zero1, zero2, KIND, HALF, True, MAIN, GROUP > 0, ZEROS, SLABS,
            )
            x = x_view.index(stage * EACH).slice(p * 16 * SLABS, 16 * SLABS, dim=1)
            acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
            if HEIGHT > MAIN:
                x = x_rest.index(stage).slice(0, HEIGHT - MAIN, dim=0).slice(p * 16 * SLABS, 16 * SLABS, dim=1)
                same = gl.convert_layout(a, layouts.left_operand(HEIGHT - MAIN), assert_trivial=True)
                rest = warpgroup_mma(same, x.permute((1, 0)), rest, is_async=True)
                acc, rest, a = warpgroup_mma_wait(0, deps=(acc, rest, a))
            else:
                acc, a = warpgroup_mma_wait(0, deps=(acc, a))
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    if SIGNALS and finished >= 0:
        wide_copies.signal(done, finished)
    undo: gl.constexpr = weights.undo(KIND, HALF, GROUP > 0)
    unit: gl.constexpr = weights.channel_unit(KIND, HALF)
    chunk: gl.constexpr = 32 if GROUPS_OF_WARPS == 4 else 64  # tokens that are transposed at a time
    column = (tile + WG) * 64
    up = (tile + WG + pair_tiles) * 64
    if global_scale is None:
        acc = acc * undo
        rest = rest * undo
    else:
        factor = gl.load(global_scale + expert) * undo
        acc = acc * factor
        rest = rest * factor
    common.store_chunks(
        acc, out, row, end_row, column, up, columns, stride, scale, bias, first == 0, expert, packed, EPILOGUE,
        True, MAIN, min(MAIN, chunk), unit,
    )
    if HEIGHT > MAIN:
        common.store_chunks(
            rest, out, row + MAIN, end_row, column, up, columns, stride, scale, bias, first == 0, expert, packed,
            EPILOGUE, True, HEIGHT - MAIN, HEIGHT - MAIN, unit,
        )
    return it


@gluon.jit
def _multiply(
    given, WG: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, EPILOGUE: gl.constexpr, PAIRED: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr, FINE: gl.constexpr, SIGNALS: gl.constexpr, SLOTS: gl.constexpr,
):
    """Run a computing warpgroup. SIGNALS: whether it counts its finished items per expert."""
    (
        w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, zero, out, groups, steps, splits, rows, pair_tiles,
        columns, stride, zero_words, scale, bias, global_scale, packed, done,
    ) = given
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    HEIGHTS: gl.constexpr = wide_copies.heights(TOKENS, FINE)
    w_view = common.word_views(w_buf, STAGES, STEP, GROUPS_OF_WARPS, KIND)
    s_view = reinterpret(s_buf, s_buf.dtype, [STAGES, 2, PER * GROUPS_OF_WARPS * 8, 8], layouts.plain_shared())
    it = 0
    number = 0
    finished = -1
    each = (steps + splits - 1) // splits
    expert, row, end_row, part = wide_copies.next_item(info, full, free, 0, SLOTS)
    while expert >= 0:
        block = part // splits
        first = part % splits * each
        last = gl.minimum(first + each, steps)
        base = out + ((part % splits) * rows).to(gl.int64) * stride
        tile = block * (GROUPS_OF_WARPS if PAIRED else 2 * GROUPS_OF_WARPS)
        left = end_row - row
        for h in gl.static_range(len(HEIGHTS)):
            if (left <= HEIGHTS[h]) & (h == 0 or left > HEIGHTS[h - 1]):
                it = _item(
                    it, w_view, x_buf, x_rest, s_view, ready, empty, zero, base, row, end_row, expert * groups, groups,
                    first, last, tile, pair_tiles, columns, stride, zero_words, scale, bias, global_scale, expert,
                    packed, done, finished, WG, HEIGHTS[h], TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE,
                    GROUPS_OF_WARPS, SIGNALS,
                )
        finished = expert
        number += 1
        expert, row, end_row, part = wide_copies.next_item(info, full, free, number, SLOTS)
    if SIGNALS and finished >= 0:
        wide_copies.signal(done, finished)


@gluon.jit(
    do_not_specialize=[
        "needed", "top_k", "slabs", "groups", "steps", "blocks", "splits", "rows", "pair_tiles", "zero_words", "packed",
    ]
)
def expert_product_wide(
    w_desc, h_desc, x_desc, s_desc, zero, out, queue, done, needed, tiles, num_tiles, x, pair_of_row, top_k, stride_x,
    slabs, groups, steps, blocks, splits, rows, pair_tiles, columns, stride, zero_words, scale, bias, global_scale,
    packed, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr,
    EPILOGUE: gl.constexpr, GATHER: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr, EARLY: gl.constexpr, FOLLOWS: gl.constexpr, FINE: gl.constexpr,
):
    """Compute out[row] = epilogue(x[row] @ W[expert of row].T), see `epilogue.Epilogue`.

    The arguments are those of `narrow.expert_product_narrow`, except:
        w_desc, h_desc: block `[.., GROUPS_OF_WARPS, ..]`; x_desc: block `[32, 64]`; s_desc: block
            `[.., 64 GROUPS_OF_WARPS]`.
        queue: int32 zero, counter of the work items that were taken after the first one of each program.
        tiles: int32 `[T, 8]`, see `device.routing`.
        num_tiles: int32 `[1]`, number of used tiles.
        x: tokens `[tokens, K]` in their original order with stride_x, read instead of x_desc if GATHER.
        pair_of_row: int32, pair (token * top_k + choice) of each sorted row.
        steps: number of steps of 64 rows of k.
        blocks: number of blocks of columns.
        splits: number of work items that share a k (1 for gated products).
        rows: number of rows of out.
        done: int32 `[experts]`, finished items of the gate-up product per expert.
        needed: finished items per tile after which an expert's tokens are ready.
        GROUPS_OF_WARPS: number of computing warpgroups, each with 64 columns of both halves.
        REGISTERS: registers per thread of these warpgroups.
        EARLY: whether the preceding kernel writes only the tokens, so that copies of weights need not wait for it.
        FOLLOWS: whether the preceding kernel is this one with the gate-up product, whose results are the tokens (EARLY
            then holds too). Without FOLLOWS the kernel counts its items in `done`.
        FINE: argument of `wide_copies.heights`.
    """
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    PAIRED: gl.constexpr = epilogue.gated(EPILOGUE) and not epilogue.interleaved(EPILOGUE)
    if h_desc is not None:
        w_desc = (w_desc, h_desc)
    w_buf = common.word_buffers(STAGES, STEP, GROUPS_OF_WARPS, KIND)
    MAIN: gl.constexpr = wide_copies.main_height(TOKENS)
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (MAIN // 32), 32, STEP], layouts.token_buffer())
    x_rest = x_buf
    if TOKENS > MAIN:
        x_rest = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 32, STEP], layouts.token_buffer())
    s_shape: gl.constexpr = [STAGES * 2, PER, GROUPS_OF_WARPS * 64]
    s_layout: gl.constexpr = layouts.scale_buffer(s_desc.dtype.primitive_bitwidth)
    s_buf = gl.allocate_shared_memory(s_desc.dtype, s_shape, s_layout)
    ready, empty = ring(STAGES, 2 if GATHER else 1, GROUPS_OF_WARPS)
    RING: gl.constexpr = 4
    info, full, free = item_ring(RING, GROUPS_OF_WARPS)
    fence_async_shared()
    barrier()
    if DEPENDENT and not EARLY:
        gdc_wait()
    if DEPENDENT:
        gdc_launch_dependents()
    WAITS: gl.constexpr = DEPENDENT and EARLY
    SIGNALS: gl.constexpr = not FOLLOWS
    own = (
        w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, zero, out, groups, steps, splits, rows, pair_tiles,
        columns, stride, zero_words, scale, bias, global_scale, packed, done,
    )
    copied = (
        w_desc, x_desc, s_desc, w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, queue, tiles, num_tiles,
        slabs, groups, steps, blocks, splits, pair_tiles, done, needed,
    )
    if GROUPS_OF_WARPS == 2:
        if GATHER:
            gathered = (x, pair_of_row, top_k, stride_x)
            gl.warp_specialize(
                [
                    (_multiply, (own, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, PAIRED, 2, FINE, SIGNALS, RING)),
                    (_multiply, (own, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, PAIRED, 2, FINE, SIGNALS, RING)),
                    (wide_copies.gather, (copied, gathered, TOKENS, STAGES, GROUP, KIND, PAIRED, 2, RING)),
                ],
                [4, 4],
                [REGISTERS - 8, 48],
            )
        else:
            gl.warp_specialize(
                [
                    (_multiply, (own, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, PAIRED, 2, FINE, SIGNALS, RING)),
                    (_multiply, (own, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, PAIRED, 2, FINE, SIGNALS, RING)),
                    (wide_copies.copy, (copied, TOKENS, STAGES, GROUP, KIND, PAIRED, 2, WAITS, FOLLOWS, RING)),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
    else:
        gl.static_assert(GROUPS_OF_WARPS == 4)
        gl.static_assert(not GATHER)
        gl.warp_specialize(
            [
                (_multiply, (own, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, PAIRED, 4, FINE, SIGNALS, RING)),
                (_multiply, (own, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, PAIRED, 4, FINE, SIGNALS, RING)),
                (_multiply, (own, 2, TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, PAIRED, 4, FINE, SIGNALS, RING)),
                (_multiply, (own, 3, TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, PAIRED, 4, FINE, SIGNALS, RING)),
                (wide_copies.copy, (copied, TOKENS, STAGES, GROUP, KIND, PAIRED, 4, WAITS, FOLLOWS, RING)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
