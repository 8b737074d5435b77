"""Expert products with many tokens per expert: one copy warp feeds several warpgroups of 128 output rows each.

Programs are persistent. While one warpgroup turns words into bf16, the tensor cores work for another. A tile takes up
to TOKENS tokens; an expert's last tile is multiplied as 32 or 64 where no more are left.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.hopper.compat import barrier, reinterpret, rows_load, tma_load
from moeq_kernels.hopper.device import common, layouts, weights

#: Rows of k in one step.
STEP = gl.constexpr(64)


# Argument lists of twenty names, one to a line, would hide the code.
# fmt: off
@constexpr_function
def _weight_bytes(group, kind, scale_bits, warpgroups):
    """Bytes of a step's words and scales."""
    scales = layouts.groups_of(64, group) * 64 * scale_bits // 8 if group else 0
    return warpgroups * 2 * (4 * layouts.tile_bytes(kind) + scales)


@gluon.jit
def _load_words(
    w_desc, s_desc, w_buf, s_buf, bar, stage, w_row, s_row, i, tile, pair_tiles, GROUP: gl.constexpr,
):
    """Starts the copies of one step's words and scales."""
    tma_load(w_desc, [w_row + i * 4, tile, 0], bar, w_buf.index(2 * stage))
    tma_load(w_desc, [w_row + i * 4, tile + pair_tiles, 0], bar, w_buf.index(2 * stage + 1))
    if GROUP:
        at = s_row + (i * STEP) // GROUP
        tma_load(s_desc, [at, tile * 64], bar, s_buf.index(2 * stage))
        tma_load(s_desc, [at, (tile + pair_tiles) * 64], bar, s_buf.index(2 * stage + 1))


@gluon.jit
def _expect(bar, left, WORDS: gl.constexpr, TOKENS: gl.constexpr):
    """Tells a barrier how many bytes to wait for, where `left` tokens are left."""
    BOX: gl.constexpr = 32 * STEP * 2
    mbarrier.expect(bar, WORDS + BOX, pred=(left <= 32) | (TOKENS == 32))
    if TOKENS >= 64:
        mbarrier.expect(bar, WORDS + 2 * BOX, pred=(left > 32) & ((left <= 64) | (TOKENS == 64)))
    if TOKENS == 128:
        mbarrier.expect(bar, WORDS + 4 * BOX, pred=left > 64)


@gluon.jit
def _load_rows(x_desc, x_buf, bar, stage, row, left, i, TOKENS: gl.constexpr):
    """Starts the copies of one step's tokens."""
    for b in gl.static_range(TOKENS // 32):
        needed = left > (64 if b >= 2 else 32 * b)
        tma_load(x_desc, [row + b * 32, i * STEP], bar, x_buf.index(stage * (TOKENS // 32) + b), pred=needed)


@gluon.jit
def _copy(
    given, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, PAIRED: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr, WAITS: gl.constexpr,
):
    """The copy warp: words, scales and tokens (rows in sorted order) of every step of every item.

    WAITS: for the kernel before this one, but only with its first tokens.
    """
    (
        w_desc, x_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, tiles, num_tiles, slabs, groups, steps, blocks,
        splits, pair_tiles,
    ) = given
    WORDS: gl.constexpr = _weight_bytes(GROUP, KIND, s_desc.dtype.primitive_bitwidth, GROUPS_OF_WARPS)
    it = 0
    each = (steps + splits - 1) // splits
    for index in range(gl.program_id(0), gl.load(num_tiles) * (blocks * splits), gl.num_programs(0)):
        expert, row, end_row, part, _ = common.find_item(index, tiles, blocks * splits, TOKENS)
        first = part % splits * each
        last = gl.minimum(first + each, steps)
        left = end_row - row
        tile = part // splits * (GROUPS_OF_WARPS if PAIRED else 2 * GROUPS_OF_WARPS)
        w_row = expert * slabs
        s_row = expert * groups
        start = first
        if WAITS and (it == 0) & (last > first):
            start = gl.minimum(first + STAGES, last)
            for i in range(first, start):
                early = ready.index(i - first)
                _expect(early, left, WORDS, TOKENS)
                _load_words(w_desc, s_desc, w_buf, s_buf, early, i - first, w_row, s_row, i, tile, pair_tiles, GROUP)
            gdc_wait()
            for i in range(first, start):
                _load_rows(x_desc, x_buf, ready.index(i - first), i - first, row, left, i, TOKENS)
            it = start - first
        for i in range(start, last):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            _expect(bar, left, WORDS, TOKENS)
            _load_words(w_desc, s_desc, w_buf, s_buf, bar, stage, w_row, s_row, i, tile, pair_tiles, GROUP)
            _load_rows(x_desc, x_buf, bar, stage, row, left, i, TOKENS)
            it += 1


@gluon.jit
def _gather_item(
    it, w_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, x, pair_of_row, top_k, stride_x, row, end_row, w_row, s_row,
    first, last, tile, pair_tiles, NOW: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    GROUP: gl.constexpr, KIND: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr,
):
    """Copies of one item whose tokens stand in any order, with NOW of the TOKENS rows of the buffers."""
    WORDS: gl.constexpr = _weight_bytes(GROUP, KIND, s_desc.dtype.primitive_bitwidth, GROUPS_OF_WARPS)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES * TOKENS // NOW, NOW, STEP], layouts.token_buffer())
    # Rows after the expert's last one are not stored, so any token will do.
    at = gl.minimum(row + gl.arange(0, NOW, layout=gl.SliceLayout(1, layout)), end_row - 1)
    token = (gl.load(pair_of_row + at) // top_k).to(gl.int64)
    column = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, layout)), 0)
    place = x + gl.expand_dims(token * stride_x, 1) + column
    for i in range(first, last):
        stage = it % STAGES
        mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, WORDS)
        _load_words(w_desc, s_desc, w_buf, s_buf, bar, stage, w_row, s_row, i, tile, pair_tiles, GROUP)
        rows_load(x_view.index(stage * (TOKENS // NOW)), place + i * STEP)
        async_copy.commit_group()
        if it >= LAG:
            async_copy.wait_group(LAG)
            fence_async_shared()
            mbarrier.arrive(ready.index((it - LAG) % STAGES), count=1)
        it += 1
    return it


@gluon.jit
def _gather(
    given, x, pair_of_row, top_k, stride_x, TOKENS: gl.constexpr, STAGES: gl.constexpr, LAG: gl.constexpr,
    GROUP: gl.constexpr, KIND: gl.constexpr, PAIRED: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr,
):
    """The copy warps (four) where tokens are gathered by their pairs: `_copy` with cp.async instead of the copy engine.

    Threads have to say themselves when their rows are there; they do so LAG steps later.
    """
    (
        w_desc, _x_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, tiles, num_tiles, slabs, groups, steps, blocks,
        splits, pair_tiles,
    ) = given
    it = 0
    each = (steps + splits - 1) // splits
    for index in range(gl.program_id(0), gl.load(num_tiles) * (blocks * splits), gl.num_programs(0)):
        expert, row, end_row, part, _ = common.find_item(index, tiles, blocks * splits, TOKENS)
        first = part % splits * each
        last = gl.minimum(first + each, steps)
        left = end_row - row
        tile = part // splits * (GROUPS_OF_WARPS if PAIRED else 2 * GROUPS_OF_WARPS)
        if TOKENS > 32 and left <= 32:
            it = _gather_item(
                it, w_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, x, pair_of_row, top_k, stride_x, row, end_row,
                expert * slabs, expert * groups, first, last, tile, pair_tiles, 32, TOKENS, STAGES, LAG, GROUP,
                KIND, GROUPS_OF_WARPS,
            )
        elif TOKENS > 64 and left <= 64:
            it = _gather_item(
                it, w_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, x, pair_of_row, top_k, stride_x, row, end_row,
                expert * slabs, expert * groups, first, last, tile, pair_tiles, 64, TOKENS, STAGES, LAG, GROUP,
                KIND, GROUPS_OF_WARPS,
            )
        else:
            it = _gather_item(
                it, w_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, x, pair_of_row, top_k, stride_x, row, end_row,
                expert * slabs, expert * groups, first, last, tile, pair_tiles, TOKENS, TOKENS, STAGES, LAG, GROUP,
                KIND, GROUPS_OF_WARPS,
            )
    async_copy.wait_group(0)
    fence_async_shared()
    for done in range(gl.maximum(it - LAG, 0), it):
        mbarrier.arrive(ready.index(done % STAGES), count=1)


@gluon.jit
def _item(
    it, w_view, x_buf, s_view, ready, empty, zero, out, row, end_row, s_row, first, last, tile, pair_tiles, columns,
    stride, zero_words, scale, bias, expert, packed, WG: gl.constexpr, NOW: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, FINISH: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr,
):
    """One warpgroup's part of one item, with NOW of the TOKENS columns of the buffers."""
    HALF: gl.constexpr = x_buf.dtype == gl.float16
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    BYTES: gl.constexpr = layouts.tile_bytes(KIND)
    scale_layout: gl.constexpr = gl.SliceLayout(2, layouts.scales(True))
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES * TOKENS // NOW, NOW, STEP], layouts.token_buffer())
    acc = gl.zeros([128, NOW], gl.float32, layouts.accumulator(NOW))
    for i in range(first, last):
        stage = it % STAGES
        mbarrier.wait(ready.index(stage), (it // STAGES) & 1)
        words = w_view.index(stage).slice(WG * BYTES, BYTES, dim=2).load(layouts.words(True, 4, KIND))
        scale1 = 0
        scale2 = 0
        if GROUP:
            scales = s_view.index(stage)
            scale1 = scales.slice(WG * 8, 8, dim=1).load(scale_layout)
            scale2 = scale1
            if PER == 2:
                scale2 = scales.slice((GROUPS_OF_WARPS + WG) * 8, 8, dim=1).load(scale_layout)
        zero1 = 0
        zero2 = 0
        if ZEROS:
            group = s_row
            if GROUP:
                group += (i * STEP) // GROUP
            zero1 = common.zero_offsets(zero, group, zero_words, tile + WG, pair_tiles, True, KIND, HALF)
            zero2 = zero1
            if PER == 2:
                zero2 = common.zero_offsets(zero, group + 1, zero_words, tile + WG, pair_tiles, True, KIND, HALF)
        a = common.step_weights(words, scale1, scale2, zero1, zero2, True, NOW, GROUP > 0, ZEROS, KIND, HALF)
        acc = warpgroup_mma(a, x_view.index(stage * (TOKENS // NOW)).permute((1, 0)), acc, is_async=True)
        acc, a = warpgroup_mma_wait(0, deps=(acc, a))
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    column = (tile + WG) * 64
    second = (tile + WG + pair_tiles) * 64
    undo: gl.constexpr = weights.undo(KIND, HALF, GROUP > 0)
    acc = acc * undo
    if scale is None and bias is None and common.activation(FINISH) == "none":
        acc = acc.to(out.dtype.element_ty)
    common.store_chunks(
        acc, out, row, end_row, column, second, columns, stride, scale, bias, first == 0, expert, packed, FINISH, True,
        NOW, 32,
    )
    return it


@gluon.jit
def _multiply(
    given, WG: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, FINISH: gl.constexpr, PAIRED: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr,
):
    """A multiplying warpgroup."""
    (
        w_buf, x_buf, s_buf, ready, empty, zero, out, tiles, num_tiles, groups, steps, blocks, splits, rows, pair_tiles,
        columns, stride, zero_words, scale, bias, packed,
    ) = given
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    w_shape: gl.constexpr = [STAGES, 2, 4, GROUPS_OF_WARPS * layouts.tile_bytes(KIND)]
    w_view = reinterpret(w_buf, gl.uint8, w_shape, layouts.plain_shared())
    s_view = reinterpret(s_buf, s_buf.dtype, [STAGES, 2, PER * GROUPS_OF_WARPS * 8, 8], layouts.plain_shared())
    it = 0
    each = (steps + splits - 1) // splits
    for index in range(gl.program_id(0), gl.load(num_tiles) * (blocks * splits), gl.num_programs(0)):
        expert, row, end_row, part, _ = common.find_item(index, tiles, blocks * splits, TOKENS)
        block = part // splits
        first = part % splits * each
        last = gl.minimum(first + each, steps)
        base = out + ((part % splits) * rows).to(gl.int64) * stride
        tile = block * (GROUPS_OF_WARPS if PAIRED else 2 * GROUPS_OF_WARPS)
        s_row = expert * groups
        left = end_row - row
        if TOKENS > 32 and left <= 32:
            it = _item(
                it, w_view, x_buf, s_view, ready, empty, zero, base, row, end_row, s_row, first, last, tile,
                pair_tiles, columns, stride, zero_words, scale, bias, expert, packed, WG, 32, TOKENS, STAGES, GROUP,
                ZEROS, KIND, FINISH, GROUPS_OF_WARPS,
            )
        elif TOKENS > 64 and left <= 64:
            it = _item(
                it, w_view, x_buf, s_view, ready, empty, zero, base, row, end_row, s_row, first, last, tile,
                pair_tiles, columns, stride, zero_words, scale, bias, expert, packed, WG, 64, TOKENS, STAGES, GROUP,
                ZEROS, KIND, FINISH, GROUPS_OF_WARPS,
            )
        else:
            it = _item(
                it, w_view, x_buf, s_view, ready, empty, zero, base, row, end_row, s_row, first, last, tile,
                pair_tiles, columns, stride, zero_words, scale, bias, expert, packed, WG, TOKENS, TOKENS, STAGES,
                GROUP, ZEROS, KIND, FINISH, GROUPS_OF_WARPS,
            )


@gluon.jit(
    do_not_specialize=[
        "top_k", "slabs", "groups", "steps", "blocks", "splits", "rows", "pair_tiles", "zero_words", "packed",
    ]
)
def expert_product_wide(
    w_desc, x_desc, s_desc, zero, out, tiles, num_tiles, x, pair_of_row, top_k, stride_x, slabs, groups, steps, blocks,
    splits, rows, pair_tiles, columns, stride, zero_words, scale, bias, packed, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, FINISH: gl.constexpr,
    GATHER: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr, EARLY: gl.constexpr,
):
    """out[row] = finish(x[row] @ W[expert of row].T), see `finish.Finish`.

    Args as of `narrow.expert_product_narrow`, except:
        w_desc: block `[4, GROUPS_OF_WARPS, ..]`; x_desc: block `[32, 64]`; s_desc: block `[.., 64 GROUPS_OF_WARPS]`.
        tiles: int32 `[T, 8]`: expert, first row, end row of the expert, the expert's first tile, its tiles.
        num_tiles: int32 `[1]`, tiles in use.
        x: tokens `[tokens, K]` in their own order, with stride_x, and pair_of_row: int32, the pair (token * top_k +
            choice) of each sorted row; read instead of x_desc where GATHER.
        steps: of 64 rows of k.
        blocks: of columns; splits: work items that share their k (1 for gated ones); rows: of out.
        GROUPS_OF_WARPS: multiplying warpgroups; a program takes 64 columns of each half for each of them.
        REGISTERS: of a thread of these.
        EARLY: the kernel before makes the tokens only, so that copies of weights need not wait for it.
    """
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    PAIRED: gl.constexpr = common.gated(FINISH) and not common.interleaved(FINISH)
    w_shape: gl.constexpr = [STAGES * 2, 4, GROUPS_OF_WARPS, layouts.tile_bytes(KIND) // 4]
    w_buf = gl.allocate_shared_memory(gl.int32, w_shape, layouts.word_buffer())
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (TOKENS // 32), 32, STEP], layouts.token_buffer())
    s_shape: gl.constexpr = [STAGES * 2, PER, GROUPS_OF_WARPS * 64]
    s_layout: gl.constexpr = layouts.scale_buffer(s_desc.dtype.primitive_bitwidth)
    s_buf = gl.allocate_shared_memory(s_desc.dtype, s_shape, s_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=2 if GATHER else 1)
        mbarrier.init(empty.index(i), count=GROUPS_OF_WARPS)
    fence_async_shared()
    barrier()
    if DEPENDENT and not EARLY:
        gdc_wait()
    if DEPENDENT:
        gdc_launch_dependents()
    WAITS: gl.constexpr = DEPENDENT and EARLY
    taken = (
        w_buf, x_buf, s_buf, ready, empty, zero, out, tiles, num_tiles, groups, steps, blocks, splits, rows, pair_tiles,
        columns, stride, zero_words, scale, bias, packed,
    )
    copied = (
        w_desc, x_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, tiles, num_tiles, slabs, groups, steps, blocks,
        splits, pair_tiles,
    )
    if GROUPS_OF_WARPS == 2:
        if GATHER:
            gl.warp_specialize(
                [
                    (_multiply, (taken, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 2)),
                    (_multiply, (taken, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 2)),
                    (_gather, (copied, x, pair_of_row, top_k, stride_x, TOKENS, STAGES, 3, GROUP, KIND, PAIRED, 2)),
                ],
                [4, 4],
                [REGISTERS - 8, 48],
            )
        else:
            gl.warp_specialize(
                [
                    (_multiply, (taken, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 2)),
                    (_multiply, (taken, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 2)),
                    (_copy, (copied, TOKENS, STAGES, GROUP, KIND, PAIRED, 2, WAITS)),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
    else:
        gl.static_assert(GROUPS_OF_WARPS == 4)
        gl.static_assert(not GATHER)
        gl.warp_specialize(
            [
                (_multiply, (taken, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 4)),
                (_multiply, (taken, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 4)),
                (_multiply, (taken, 2, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 4)),
                (_multiply, (taken, 3, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 4)),
                (_copy, (copied, TOKENS, STAGES, GROUP, KIND, PAIRED, 4, WAITS)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )


# fmt: on
