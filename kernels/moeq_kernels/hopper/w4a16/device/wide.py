"""Expert products with many tokens per expert: one copy warp feeds several warpgroups of 128 output rows each.

Programs are persistent and take their next work item from a queue, since items differ in length. While one warpgroup
turns words into bf16, the tensor cores work for another. A tile takes up to TOKENS tokens, those of an expert are of
one height (the last may be lower), and each is multiplied at the next height of `wide_copies.heights`, as one product
of a power of two and one of 32 tokens where that is closer.
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
from moeq_kernels.hopper.w4a16.device import common, layouts, weights, wide_copies
from moeq_kernels.hopper.w4a16.device.wide_copies import STEP


# Argument lists of twenty names, one to a line, would hide the code.
# fmt: off
@gluon.jit
def _slab_scales(scales, SLAB: gl.constexpr, WG: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, LAYOUT: gl.constexpr):
    """A warpgroup's scales of the two slabs of 16 rows of k from SLAB of a step on."""
    lower = scales.slice((GROUPS_OF_WARPS * SLAB + WG) * 8, 8, dim=1).load(LAYOUT)
    return lower, scales.slice((GROUPS_OF_WARPS * (SLAB + 1) + WG) * 8, 8, dim=1).load(LAYOUT)


@gluon.jit
def _item(
    it, w_view, x_buf, x_rest, s_view, ready, empty, zero, out, row, end_row, s_row, groups, first, last, tile,
    pair_tiles, columns, stride, zero_words, scale, bias, whole, expert, packed, done, finished, WG: gl.constexpr,
    NOW: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr,
    KIND: gl.constexpr, EPILOGUE: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, SIGNALS: gl.constexpr,
):
    """One warpgroup's part of one item, with NOW of the TOKENS columns of the buffers.

    SIGNALS: counts the item before, of expert `finished`, when this one is multiplied: its stores have arrived by then.
    """
    HALF: gl.constexpr = x_buf.dtype == gl.float16
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    BYTES: gl.constexpr = layouts.tile_bytes(KIND)
    MAIN: gl.constexpr = wide_copies.main_height(NOW)
    # Half of a step's weights at a time where there are few registers.
    PARTS: gl.constexpr = 2 if GROUPS_OF_WARPS == 4 and TOKENS > 32 else 1
    SLABS: gl.constexpr = 4 // PARTS
    scale_layout: gl.constexpr = gl.SliceLayout(2, layouts.scales(True))
    EACH: gl.constexpr = wide_copies.main_height(TOKENS) // MAIN
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES * EACH, MAIN, STEP], layouts.token_buffer())
    acc = gl.zeros([128, MAIN], gl.float32, layouts.accumulator(MAIN))
    rest = acc
    if NOW > MAIN:
        rest = gl.zeros([128, NOW - MAIN], gl.float32, layouts.accumulator(NOW - MAIN))
    for i in range(first, last):
        stage = it % STAGES
        mbarrier.wait(ready.index(stage), (it // STAGES) & 1)
        for p in gl.static_range(PARTS):
            words = w_view.index(stage).slice(p * SLABS, SLABS, dim=1).slice(WG * BYTES, BYTES, dim=2)
            scale1 = 0
            scale2 = 0
            if GROUP == 16:  # a scale for each slab of words
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
            a = common.step_weights(
                words.load(layouts.words(True, SLABS, KIND)), scale1, scale2, zero1, zero2, True, MAIN, GROUP > 0,
                ZEROS, KIND, HALF, SLABS,
            )
            x = x_view.index(stage * EACH).slice(p * 16 * SLABS, 16 * SLABS, dim=1)
            acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
            if NOW > MAIN:
                x = x_rest.index(stage).slice(0, NOW - MAIN, dim=0).slice(p * 16 * SLABS, 16 * SLABS, dim=1)
                same = gl.convert_layout(a, layouts.left_operand(NOW - MAIN), assert_trivial=True)
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
    chunk: gl.constexpr = 32 if GROUPS_OF_WARPS == 4 else 64  # tokens regrouped at a time
    second: gl.constexpr = NOW - MAIN
    column = (tile + WG) * 64
    up = (tile + WG + pair_tiles) * 64
    if whole is None:
        acc = acc * undo
        rest = rest * undo
    else:
        factor = gl.load(whole + expert) * undo
        acc = acc * factor
        rest = rest * factor
    common.store_chunks(
        acc, out, row, end_row, column, up, columns, stride, scale, bias, first == 0, expert, packed, EPILOGUE,
        True, MAIN, min(MAIN, chunk), unit,
    )
    if NOW > MAIN:
        common.store_chunks(
            rest, out, row + MAIN, end_row, column, up, columns, stride, scale, bias, first == 0, expert, packed,
            EPILOGUE, True, second, second, unit,
        )
    return it


@gluon.jit
def _multiply(
    given, WG: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, EPILOGUE: gl.constexpr, PAIRED: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr, FINE: gl.constexpr, SIGNALS: gl.constexpr, SLOTS: gl.constexpr,
):
    """A multiplying warpgroup. SIGNALS: counts its finished items of each expert."""
    (
        w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, zero, out, groups, steps, splits, rows, pair_tiles,
        columns, stride, zero_words, scale, bias, whole, packed, done,
    ) = given
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    HEIGHTS: gl.constexpr = wide_copies.heights(TOKENS, FINE)
    w_shape: gl.constexpr = [STAGES, 2, 4, GROUPS_OF_WARPS * layouts.tile_bytes(KIND)]
    w_view = reinterpret(w_buf, gl.uint8, w_shape, layouts.plain_shared())
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
                    first, last, tile, pair_tiles, columns, stride, zero_words, scale, bias, whole, expert, packed,
                    done, finished, WG, HEIGHTS[h], TOKENS, STAGES, GROUP, ZEROS, KIND, EPILOGUE, GROUPS_OF_WARPS,
                    SIGNALS,
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
    w_desc, x_desc, s_desc, zero, out, queue, done, needed, tiles, num_tiles, x, pair_of_row, top_k, stride_x, slabs,
    groups, steps, blocks, splits, rows, pair_tiles, columns, stride, zero_words, scale, bias, global_scale, packed,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr,
    EPILOGUE: gl.constexpr, GATHER: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr, EARLY: gl.constexpr, FOLLOWS: gl.constexpr, FINE: gl.constexpr,
):
    """out[row] = epilogue(x[row] @ W[expert of row].T), see `epilogue.Epilogue`.

    Args as of `narrow.expert_product_narrow`, except:
        w_desc: block `[4, GROUPS_OF_WARPS, ..]`; x_desc: block `[32, 64]`; s_desc: block `[.., 64 GROUPS_OF_WARPS]`.
        queue: int32 0: counts the work items taken, after the first one of each program.
        tiles: int32 `[T, 8]`: expert, first row, end row of the expert, the expert's first tile, its tiles, height.
        num_tiles: int32 `[1]`, tiles in use.
        x: tokens `[tokens, K]` in their own order, with stride_x, and pair_of_row: int32, the pair (token * top_k +
            choice) of each sorted row; read instead of x_desc where GATHER.
        steps: of 64 rows of k.
        blocks: of columns; splits: work items that share their k (1 for gated ones); rows: of out.
        GROUPS_OF_WARPS: multiplying warpgroups; a program takes 64 columns of each half for each of them.
        global_scale: float32 `[E]` that multiplies an expert's matrix, or None.
        REGISTERS: of a thread of these.
        EARLY: the kernel before makes the tokens only, so that copies of weights need not wait for it.
        FOLLOWS: and it is this kernel with the gate-up product (FOLLOWS and EARLY): tokens of an expert are ready when
            `done` `[experts]` has counted `needed` for each of its tiles. Without FOLLOWS it is the one that counts.
        FINE: heights of tiles as of `wide_copies.heights`.
    """
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    PAIRED: gl.constexpr = epilogue.gated(EPILOGUE) and not epilogue.interleaved(EPILOGUE)
    w_shape: gl.constexpr = [STAGES * 2, 4, GROUPS_OF_WARPS, layouts.tile_bytes(KIND) // 4]
    w_buf = gl.allocate_shared_memory(gl.int32, w_shape, layouts.word_buffer())
    MAIN: gl.constexpr = wide_copies.main_height(TOKENS)
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (MAIN // 32), 32, STEP], layouts.token_buffer())
    x_rest = x_buf
    if TOKENS > MAIN:
        x_rest = gl.allocate_shared_memory(x_desc.dtype, [STAGES, 32, STEP], layouts.token_buffer())
    s_shape: gl.constexpr = [STAGES * 2, PER, GROUPS_OF_WARPS * 64]
    s_layout: gl.constexpr = layouts.scale_buffer(s_desc.dtype.primitive_bitwidth)
    s_buf = gl.allocate_shared_memory(s_desc.dtype, s_shape, s_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=2 if GATHER else 1)
        mbarrier.init(empty.index(i), count=GROUPS_OF_WARPS)
    RING: gl.constexpr = 4
    info = gl.allocate_shared_memory(gl.int32, [RING * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS_OF_WARPS)
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


# fmt: on
