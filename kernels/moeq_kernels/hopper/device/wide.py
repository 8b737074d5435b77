"""Expert products with many tokens per expert: one copy warp feeds several warpgroups of 128 output rows each.

Programs are persistent and take their next work item from a queue, since items differ in length. While one warpgroup
turns words into bf16, the tensor cores work for another. A tile takes up to TOKENS tokens, those of an expert are of
one height (the last may be lower), and each is multiplied at the next height of `_heights`, as one product of a power
of two and one of 32 tokens where that is closer.
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
#: Steps later, gathered rows of a step are said to be there; they have been on their way that long.
LAG = gl.constexpr(3)


# Argument lists of twenty names, one to a line, would hide the code.
# fmt: off
@constexpr_function
def _weight_bytes(group, kind, scale_bits, warpgroups):
    """Bytes of a step's words and scales."""
    scales = layouts.groups_of(64, group) * 64 * scale_bits // 8 if group else 0
    return warpgroups * 2 * (4 * layouts.tile_bytes(kind) + scales)


@constexpr_function
def _heights(tokens):
    """Heights at which tiles are multiplied: the smallest one that is enough."""
    return {32: (32,), 64: (32, 64), 96: (32, 64, 96), 160: (64, 96, 128, 160)}[tokens]


@constexpr_function
def _main(height):
    """Tokens of the first of the two products that a height takes (the second has the others: none or 32)."""
    return 1 << (height.bit_length() - 1)


@constexpr_function
def _rests(box):
    """Whether the second product takes these 32 tokens, where they are a tile's last (1 or 0)."""
    return int(_main(32 * box + 32) < 32 * box + 32)


@gluon.jit
def _announce(info, full, free, number, expert, row, end_row, part, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Tells the multiplying warpgroups about work item `number` of this program; expert -1: there are no more."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    slot = number % SLOTS
    mbarrier.wait(free.index(slot), ((number // SLOTS) & 1) ^ 1)
    info.index(slot * 4).store(gl.zeros([1], gl.int32, layout) + expert)
    info.index(slot * 4 + 1).store(gl.zeros([1], gl.int32, layout) + row)
    info.index(slot * 4 + 2).store(gl.zeros([1], gl.int32, layout) + end_row)
    info.index(slot * 4 + 3).store(gl.zeros([1], gl.int32, layout) + part)
    mbarrier.arrive(full.index(slot), count=1)


@gluon.jit
def _told(info, slot):
    return gl.sum(info.index(slot).load(gl.BlockedLayout([1], [32], [4], [0])), 0)


@gluon.jit
def _next_item(info, full, free, number, SLOTS: gl.constexpr):
    """Expert, first row, end row and part of work item `number`."""
    slot = number % SLOTS
    mbarrier.wait(full.index(slot), (number // SLOTS) & 1)
    expert = _told(info, slot * 4)
    row = _told(info, slot * 4 + 1)
    end_row = _told(info, slot * 4 + 2)
    part = _told(info, slot * 4 + 3)
    mbarrier.arrive(free.index(slot), count=1)
    return expert, row, end_row, part


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
    if TOKENS == 32:
        mbarrier.expect(bar, WORDS + BOX)
    else:
        for b in gl.static_range(TOKENS // 32):
            some = left > 32 * b
            if b < TOKENS // 32 - 1:
                some = some & (left <= 32 * b + 32)
            mbarrier.expect(bar, WORDS + (b + 1) * BOX, pred=some)


@gluon.jit
def _load_rows(x_desc, x_buf, x_rest, bar, stage, row, left, i, TOKENS: gl.constexpr):
    """Starts the copies of one step's tokens: a box of 32 for each product of the tile's height."""
    BOXES: gl.constexpr = _main(TOKENS) // 32
    for b in gl.static_range(TOKENS // 32):
        if b < BOXES:
            needed = left > 32 * (b + _rests(b))
            tma_load(x_desc, [row + 32 * b, i * STEP], bar, x_buf.index(stage * BOXES + b), pred=needed)
        if _rests(b):
            needed = (left > 32 * b) & (left <= 32 * b + 32)
            tma_load(x_desc, [row + 32 * b, i * STEP], bar, x_rest.index(stage), pred=needed)


@gluon.jit
def _await(counter, needed):
    """Returns when `needed` warpgroups have counted, and what they stored before can be copied."""
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < needed:
        pass
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", (needed,), gl.int32, False, 1)


@gluon.jit
def _copy(
    given, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, PAIRED: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr, WAITS: gl.constexpr, FOLLOWS: gl.constexpr, SLOTS: gl.constexpr,
):
    """The copy warp: words, scales and tokens (rows in sorted order) of every step of every item.

    WAITS: for the kernel before this one, but only with its first tokens. FOLLOWS: tokens are the results of the kernel
    before, which may still run: waits for each expert's.
    """
    (
        w_desc, x_desc, s_desc, w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, queue, tiles, num_tiles,
        slabs, groups, steps, blocks, splits, pair_tiles, done, needed,
    ) = given
    complete = -1
    WORDS: gl.constexpr = _weight_bytes(GROUP, KIND, s_desc.dtype.primitive_bitwidth, GROUPS_OF_WARPS)
    it = 0
    number = 0
    each = (steps + splits - 1) // splits
    items = gl.load(num_tiles) * (blocks * splits)
    index = gl.program_id(0)
    while index < items:
        expert, row, end_row, part = common.find_tile(index, tiles, blocks * splits)
        _announce(info, full, free, number, expert, row, end_row, part, SLOTS, 1)
        number += 1
        index_of = index // (blocks * splits)
        index = gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed")
        first = part % splits * each
        last = gl.minimum(first + each, steps)
        left = end_row - row
        tile = part // splits * (GROUPS_OF_WARPS if PAIRED else 2 * GROUPS_OF_WARPS)
        w_row = expert * slabs
        s_row = expert * groups
        start = first
        if (WAITS or FOLLOWS) and (it == 0) & (last > first):
            start = gl.minimum(first + STAGES, last)
            for i in range(first, start):
                early = ready.index(i - first)
                _expect(early, left, WORDS, TOKENS)
                _load_words(w_desc, s_desc, w_buf, s_buf, early, i - first, w_row, s_row, i, tile, pair_tiles, GROUP)
            if WAITS:
                gdc_wait()
            if FOLLOWS:
                _await(done + expert, gl.load(tiles + index_of * 8 + 4) * needed)
                complete = expert
            for i in range(first, start):
                _load_rows(x_desc, x_buf, x_rest, ready.index(i - first), i - first, row, left, i, TOKENS)
            it = start - first
        if FOLLOWS and expert != complete:
            _await(done + expert, gl.load(tiles + index_of * 8 + 4) * needed)
            complete = expert
        for i in range(start, last):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            _expect(bar, left, WORDS, TOKENS)
            _load_words(w_desc, s_desc, w_buf, s_buf, bar, stage, w_row, s_row, i, tile, pair_tiles, GROUP)
            _load_rows(x_desc, x_buf, x_rest, bar, stage, row, left, i, TOKENS)
            it += 1
    _announce(info, full, free, number, -1, 0, 0, 0, SLOTS, 1)


@gluon.jit
def _gather_item(
    it, w_desc, s_desc, w_buf, x_buf, x_rest, s_buf, ready, empty, x, pair_of_row, top_k, stride_x, row, end_row,
    w_row, s_row, first, last, tile, pair_tiles, NOW: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, KIND: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr,
):
    """Copies of one item whose tokens stand in any order, with NOW of the TOKENS rows of the buffers."""
    WORDS: gl.constexpr = _weight_bytes(GROUP, KIND, s_desc.dtype.primitive_bitwidth, GROUPS_OF_WARPS)
    MAIN: gl.constexpr = _main(NOW)
    PER: gl.constexpr = _main(TOKENS) // MAIN
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES * PER, MAIN, STEP], layouts.token_buffer())
    column = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, layout)), 0)
    # Rows after the tile's last one are not stored, so any token will do.
    at = gl.minimum(row + gl.arange(0, MAIN, layout=gl.SliceLayout(1, layout)), end_row - 1)
    token = (gl.load(pair_of_row + at) // top_k).to(gl.int64)
    place = x + gl.expand_dims(token * stride_x, 1) + column
    rest = place
    if NOW > MAIN:
        at = gl.minimum(row + MAIN + gl.arange(0, NOW - MAIN, layout=gl.SliceLayout(1, layout)), end_row - 1)
        token = (gl.load(pair_of_row + at) // top_k).to(gl.int64)
        rest = x + gl.expand_dims(token * stride_x, 1) + column
    for i in range(first, last):
        stage = it % STAGES
        mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, WORDS)
        _load_words(w_desc, s_desc, w_buf, s_buf, bar, stage, w_row, s_row, i, tile, pair_tiles, GROUP)
        rows_load(x_view.index(stage * PER), place + i * STEP)
        if NOW > MAIN:
            rows_load(x_rest.index(stage), rest + i * STEP)
        async_copy.commit_group()
        if i - first >= LAG:
            async_copy.wait_group(LAG)
            fence_async_shared()
            mbarrier.arrive(ready.index((it - LAG) % STAGES), count=1)
        it += 1
    async_copy.wait_group(0)
    fence_async_shared()
    for done in range(gl.maximum(it - LAG, it - (last - first)), it):
        mbarrier.arrive(ready.index(done % STAGES), count=1)
    return it


@gluon.jit
def _gather(
    given, gathered, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
    PAIRED: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, SLOTS: gl.constexpr,
):
    """The copy warps (four) where tokens are gathered by their pairs: `_copy` with cp.async instead of the copy engine.

    Threads have to say themselves when their rows are there; they do so LAG steps later.
    """
    (
        w_desc, _x_desc, s_desc, w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, queue, tiles, num_tiles,
        slabs, groups, steps, blocks, splits, pair_tiles, _done, _needed,
    ) = given
    x, pair_of_row, top_k, stride_x = gathered
    HEIGHTS: gl.constexpr = _heights(TOKENS)
    it = 0
    number = 0
    each = (steps + splits - 1) // splits
    items = gl.load(num_tiles) * (blocks * splits)
    index = gl.program_id(0)
    while index < items:
        expert, row, end_row, part = common.find_tile(index, tiles, blocks * splits)
        _announce(info, full, free, number, expert, row, end_row, part, SLOTS, 4)
        number += 1
        index = gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed")
        first = part % splits * each
        last = gl.minimum(first + each, steps)
        left = end_row - row
        tile = part // splits * (GROUPS_OF_WARPS if PAIRED else 2 * GROUPS_OF_WARPS)
        for h in gl.static_range(len(HEIGHTS)):
            if (left <= HEIGHTS[h]) & (h == 0 or left > HEIGHTS[h - 1]):
                it = _gather_item(
                    it, w_desc, s_desc, w_buf, x_buf, x_rest, s_buf, ready, empty, x, pair_of_row, top_k, stride_x, row,
                    end_row, expert * slabs, expert * groups, first, last, tile, pair_tiles, HEIGHTS[h], TOKENS, STAGES,
                    GROUP, KIND, GROUPS_OF_WARPS,
                )
    _announce(info, full, free, number, -1, 0, 0, 0, SLOTS, 4)


@gluon.jit
def _item(
    it, w_view, x_buf, x_rest, s_view, ready, empty, zero, out, row, end_row, s_row, first, last, tile, pair_tiles,
    columns, stride, zero_words, scale, bias, expert, packed, done, finished, WG: gl.constexpr, NOW: gl.constexpr,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr,
    FINISH: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, SIGNALS: gl.constexpr,
):
    """One warpgroup's part of one item, with NOW of the TOKENS columns of the buffers.

    SIGNALS: counts the item before, of expert `finished`, when this one is multiplied: its stores have arrived by then.
    """
    HALF: gl.constexpr = x_buf.dtype == gl.float16
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    BYTES: gl.constexpr = layouts.tile_bytes(KIND)
    MAIN: gl.constexpr = _main(NOW)
    # Half of a step's weights at a time where there are few registers.
    PARTS: gl.constexpr = 2 if GROUPS_OF_WARPS == 4 and TOKENS > 32 else 1
    SLABS: gl.constexpr = 4 // PARTS
    scale_layout: gl.constexpr = gl.SliceLayout(2, layouts.scales(True))
    EACH: gl.constexpr = _main(TOKENS) // MAIN
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
            if GROUP:
                scales = s_view.index(stage)
                scale1 = scales.slice((GROUPS_OF_WARPS * (p * PER // PARTS) + WG) * 8, 8, dim=1).load(scale_layout)
                scale2 = scale1
                if PER > PARTS:
                    scale2 = scales.slice((GROUPS_OF_WARPS + WG) * 8, 8, dim=1).load(scale_layout)
            zero1 = 0
            zero2 = 0
            if ZEROS:
                group = s_row
                if GROUP:
                    group += (i * STEP) // GROUP + p * PER // PARTS
                zero1 = common.zero_offsets(zero, group, zero_words, tile + WG, pair_tiles, True, KIND, HALF)
                zero2 = zero1
                if PER > PARTS:
                    zero2 = common.zero_offsets(zero, group + 1, zero_words, tile + WG, pair_tiles, True, KIND, HALF)
            a = common.step_weights(
                words.load(layouts.words(True, SLABS, KIND)), scale1, scale2, zero1, zero2, True, MAIN, GROUP > 0,
                ZEROS, KIND, HALF, SLABS,
            )
            x = x_view.index(stage * EACH).slice(p * 16 * SLABS, 16 * SLABS, dim=1)
            acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
            if NOW > MAIN:
                x = x_rest.index(stage).slice(p * 16 * SLABS, 16 * SLABS, dim=1)
                same = gl.convert_layout(a, layouts.left_operand(NOW - MAIN), assert_trivial=True)
                rest = warpgroup_mma(same, x.permute((1, 0)), rest, is_async=True)
                acc, rest, a = warpgroup_mma_wait(0, deps=(acc, rest, a))
            else:
                acc, a = warpgroup_mma_wait(0, deps=(acc, a))
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    if SIGNALS and finished >= 0:
        _signal(done, finished)
    undo: gl.constexpr = weights.undo(KIND, HALF, GROUP > 0)
    chunk: gl.constexpr = 32 if GROUPS_OF_WARPS == 4 else 64  # tokens regrouped at a time
    second: gl.constexpr = NOW - MAIN
    column = (tile + WG) * 64
    up = (tile + WG + pair_tiles) * 64
    common.store_chunks(
        acc * undo, out, row, end_row, column, up, columns, stride, scale, bias, first == 0, expert, packed, FINISH,
        True, MAIN, min(MAIN, chunk),
    )
    if NOW > MAIN:
        common.store_chunks(
            rest * undo, out, row + MAIN, end_row, column, up, columns, stride, scale, bias, first == 0, expert, packed,
            FINISH, True, second, second,
        )
    return it


@gluon.jit
def _signal(done, expert):
    """Counts an item that this warpgroup has stored."""
    barrier()
    gl.atomic_add(done + expert, 1, sem="release", scope="gpu")


@gluon.jit
def _multiply(
    given, WG: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, FINISH: gl.constexpr, PAIRED: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr, SIGNALS: gl.constexpr, SLOTS: gl.constexpr,
):
    """A multiplying warpgroup. SIGNALS: counts its finished items of each expert."""
    (
        w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, zero, out, groups, steps, splits, rows, pair_tiles,
        columns, stride, zero_words, scale, bias, packed, done,
    ) = given
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    HEIGHTS: gl.constexpr = _heights(TOKENS)
    w_shape: gl.constexpr = [STAGES, 2, 4, GROUPS_OF_WARPS * layouts.tile_bytes(KIND)]
    w_view = reinterpret(w_buf, gl.uint8, w_shape, layouts.plain_shared())
    s_view = reinterpret(s_buf, s_buf.dtype, [STAGES, 2, PER * GROUPS_OF_WARPS * 8, 8], layouts.plain_shared())
    it = 0
    number = 0
    finished = -1
    each = (steps + splits - 1) // splits
    expert, row, end_row, part = _next_item(info, full, free, 0, SLOTS)
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
                    it, w_view, x_buf, x_rest, s_view, ready, empty, zero, base, row, end_row, expert * groups, first,
                    last, tile, pair_tiles, columns, stride, zero_words, scale, bias, expert, packed, done, finished,
                    WG, HEIGHTS[h], TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, GROUPS_OF_WARPS, SIGNALS,
                )
        finished = expert
        number += 1
        expert, row, end_row, part = _next_item(info, full, free, number, SLOTS)
    if SIGNALS and finished >= 0:
        _signal(done, finished)


@gluon.jit(
    do_not_specialize=[
        "needed", "top_k", "slabs", "groups", "steps", "blocks", "splits", "rows", "pair_tiles", "zero_words", "packed",
    ]
)
def expert_product_wide(
    w_desc, x_desc, s_desc, zero, out, queue, done, needed, tiles, num_tiles, x, pair_of_row, top_k, stride_x, slabs,
    groups, steps, blocks, splits, rows, pair_tiles, columns, stride, zero_words, scale, bias, packed,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr,
    FINISH: gl.constexpr, GATHER: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, REGISTERS: gl.constexpr,
    DEPENDENT: gl.constexpr, EARLY: gl.constexpr, FOLLOWS: gl.constexpr,
):
    """out[row] = finish(x[row] @ W[expert of row].T), see `finish.Finish`.

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
        REGISTERS: of a thread of these.
        EARLY: the kernel before makes the tokens only, so that copies of weights need not wait for it.
        FOLLOWS: and it is this kernel with the gate-up product (FOLLOWS and EARLY): tokens of an expert are ready when
            `done` `[experts]` has counted `needed` for each of its tiles. Without FOLLOWS it is the one that counts.
    """
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    PAIRED: gl.constexpr = common.gated(FINISH) and not common.interleaved(FINISH)
    w_shape: gl.constexpr = [STAGES * 2, 4, GROUPS_OF_WARPS, layouts.tile_bytes(KIND) // 4]
    w_buf = gl.allocate_shared_memory(gl.int32, w_shape, layouts.word_buffer())
    MAIN: gl.constexpr = _main(TOKENS)
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
    SLOTS: gl.constexpr = 4
    info = gl.allocate_shared_memory(gl.int32, [SLOTS * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(free.index(i), count=GROUPS_OF_WARPS)
    fence_async_shared()
    barrier()
    if DEPENDENT and not EARLY:
        gdc_wait()
    if DEPENDENT:
        gdc_launch_dependents()
    WAITS: gl.constexpr = DEPENDENT and EARLY and not FOLLOWS
    SIGNALS: gl.constexpr = not FOLLOWS
    taken = (
        w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, zero, out, groups, steps, splits, rows, pair_tiles,
        columns, stride, zero_words, scale, bias, packed, done,
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
                    (_multiply, (taken, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 2, SIGNALS, SLOTS)),
                    (_multiply, (taken, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 2, SIGNALS, SLOTS)),
                    (_gather, (copied, gathered, TOKENS, STAGES, GROUP, KIND, PAIRED, 2, SLOTS)),
                ],
                [4, 4],
                [REGISTERS - 8, 48],
            )
        else:
            gl.warp_specialize(
                [
                    (_multiply, (taken, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 2, SIGNALS, SLOTS)),
                    (_multiply, (taken, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 2, SIGNALS, SLOTS)),
                    (_copy, (copied, TOKENS, STAGES, GROUP, KIND, PAIRED, 2, WAITS, FOLLOWS, SLOTS)),
                ],
                [4, 1],
                [REGISTERS, 24],
            )
    else:
        gl.static_assert(GROUPS_OF_WARPS == 4)
        gl.static_assert(not GATHER)
        gl.warp_specialize(
            [
                (_multiply, (taken, 0, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 4, SIGNALS, SLOTS)),
                (_multiply, (taken, 1, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 4, SIGNALS, SLOTS)),
                (_multiply, (taken, 2, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 4, SIGNALS, SLOTS)),
                (_multiply, (taken, 3, TOKENS, STAGES, GROUP, ZEROS, KIND, FINISH, PAIRED, 4, SIGNALS, SLOTS)),
                (_copy, (copied, TOKENS, STAGES, GROUP, KIND, PAIRED, 4, WAITS, FOLLOWS, SLOTS)),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )


# fmt: on
