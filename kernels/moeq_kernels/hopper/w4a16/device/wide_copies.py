"""Copy warps of the wide kernel: they take work items from the queue, announce them, and copy weights and tokens.

Sorted tokens are copied by the copy engine; unsorted tokens are gathered by four warps (`gather`).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_wait

from moeq_kernels.hopper.compat import barrier, reinterpret, rows_load, tma_load
from moeq_kernels.hopper.w4a16.device import common, layouts
from moeq_kernels.hopper.w4a16.device.steps import load_weights, weight_bytes
from moeq_kernels.hopper.w4a16.w4a16_plan import WIDE_HEIGHTS

#: Rows of k in one step.
STEP = gl.constexpr(64)
#: Delay, in steps, after which the gathered rows of a step are reported as complete.
LAG = gl.constexpr(3)


@constexpr_function
def _weight_bytes(group, kind, scale_bits, warpgroups):
    """Return the bytes of a step's words and scales."""
    return weight_bytes(64, group, kind, scale_bits) * warpgroups // 2


@constexpr_function
def heights(tokens, fine=False):
    """Return the heights at which tiles can be multiplied; `fine` adds heights 16 above 64 and 128."""
    return WIDE_HEIGHTS[tokens, fine]


@constexpr_function
def main_height(height):
    """Return the tokens of the first of a height's two products; the second has the others, often none."""
    return 1 << (height.bit_length() - 1)


@constexpr_function
def _rests(box):
    """Return 1 if the second product takes this box of 32 tokens when it is a tile's last, otherwise 0."""
    return int(main_height(32 * box + 32) < 32 * box + 32)


@gluon.jit
def extent(row, end_row, part, splits, each, steps, PAIRED: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr):
    """Return first step, end step, tokens and first tile of 64 columns of an item; shares of k have `each` steps."""
    first = part % splits * each
    last = gl.minimum(first + each, steps)
    left = end_row - row
    tile = part // splits * (GROUPS_OF_WARPS if PAIRED else 2 * GROUPS_OF_WARPS)
    return first, last, left, tile


@gluon.jit
def announce(info, full, free, number, expert, row, end_row, part, SLOTS: gl.constexpr, WARPS: gl.constexpr):
    """Announce work item `number` of this program to the computing warpgroups; expert -1 ends the list."""
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
def next_item(info, full, free, number, SLOTS: gl.constexpr):
    """Receive expert, first row, end row and part of work item `number`."""
    slot = number % SLOTS
    mbarrier.wait(full.index(slot), (number // SLOTS) & 1)
    expert = _told(info, slot * 4)
    row = _told(info, slot * 4 + 1)
    end_row = _told(info, slot * 4 + 2)
    part = _told(info, slot * 4 + 3)
    mbarrier.arrive(free.index(slot), count=1)
    return expert, row, end_row, part


@gluon.jit
def expect(bar, left, WORDS: gl.constexpr, TOKENS: gl.constexpr):
    """Set the byte count of a barrier for a tile with `left` tokens."""
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
    """Start to copy one step's tokens in boxes of 32 for both products of the tile's height."""
    BOXES: gl.constexpr = main_height(TOKENS) // 32
    for b in gl.static_range(TOKENS // 32):
        if b < BOXES:
            needed = left > 32 * (b + _rests(b))
            tma_load(x_desc, [row + 32 * b, i * STEP], bar, x_buf.index(stage * BOXES + b), pred=needed)
        if _rests(b):
            needed = (left > 32 * b) & (left <= 32 * b + 32)
            tma_load(x_desc, [row + 32 * b, i * STEP], bar, x_rest.index(stage), pred=needed)


@gluon.jit
def wait_for(counter, needed):
    """Wait until `needed` warpgroups have counted; the copy engine then sees their stores."""
    while gl.atomic_add(counter, 0, sem="acquire", scope="gpu") < needed:
        pass
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", (needed,), gl.int32, False, 1)


@gluon.jit
def signal(done, expert):
    """Count an item that this warpgroup has stored."""
    barrier()
    gl.atomic_add(done + expert, 1, sem="release", scope="gpu")


@gluon.jit
def copy(
    given, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr, PAIRED: gl.constexpr,
    GROUPS_OF_WARPS: gl.constexpr, WAITS: gl.constexpr, FOLLOWS: gl.constexpr, SLOTS: gl.constexpr,
):
    """Run the copy warp: words, scales and sorted tokens of every step of every item.

    WAITS: whether it waits for the preceding kernel before it copies its first tokens. FOLLOWS: whether tokens are
    results of the preceding kernel, which may still run: the warp waits for those of each expert, and for the kernel
    itself (WAITS) at the end.

    Every program waits, even without work: the next kernel waits for this kernel only, and may overwrite what earlier
    kernels read.
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
        announce(info, full, free, number, expert, row, end_row, part, SLOTS, 1)
        number += 1
        index_of = index // (blocks * splits)
        index = gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed")
        first, last, left, tile = extent(row, end_row, part, splits, each, steps, PAIRED, GROUPS_OF_WARPS)
        w_row = expert * slabs
        s_row = expert * groups
        start = first
        if (WAITS or FOLLOWS) and (it == 0) & (last > first):
            start = gl.minimum(first + STAGES, last)
            for i in range(first, start):
                early = ready.index(i - first)
                expect(early, left, WORDS, TOKENS)
                load_weights(
                    i, i - first, early, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, pair_tiles, STEP, GROUP,
                    KIND,
                )
            if WAITS and not FOLLOWS:
                gdc_wait()
            if FOLLOWS:
                wait_for(done + expert, gl.load(tiles + index_of * 8 + 4) * needed)
                complete = expert
            for i in range(first, start):
                _load_rows(x_desc, x_buf, x_rest, ready.index(i - first), i - first, row, left, i, TOKENS)
            it = start - first
        if FOLLOWS and expert != complete:
            wait_for(done + expert, gl.load(tiles + index_of * 8 + 4) * needed)
            complete = expert
        for i in range(start, last):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            expect(bar, left, WORDS, TOKENS)
            load_weights(
                i, stage, bar, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, pair_tiles, STEP, GROUP, KIND,
            )
            _load_rows(x_desc, x_buf, x_rest, bar, stage, row, left, i, TOKENS)
            it += 1
    announce(info, full, free, number, -1, 0, 0, 0, SLOTS, 1)
    if WAITS and (FOLLOWS or it == 0):
        gdc_wait()


@gluon.jit
def _gather_item(
    it, w_desc, s_desc, w_buf, x_buf, x_rest, s_buf, ready, empty, x, pair_of_row, top_k, stride_x, row, end_row,
    w_row, s_row, first, last, tile, pair_tiles, HEIGHT: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, KIND: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr,
):
    """Copy one item whose tokens are unsorted, with HEIGHT of the TOKENS rows of the buffers."""
    WORDS: gl.constexpr = _weight_bytes(GROUP, KIND, s_desc.dtype.primitive_bitwidth, GROUPS_OF_WARPS)
    MAIN: gl.constexpr = main_height(HEIGHT)
    PER: gl.constexpr = main_height(TOKENS) // MAIN
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES * PER, MAIN, STEP], layouts.token_buffer())
    column = gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, layout)), 0)
    # Rows behind the last row of the tile are not stored, so they may hold any token.
    at = gl.minimum(row + gl.arange(0, MAIN, layout=gl.SliceLayout(1, layout)), end_row - 1)
    token = (gl.load(pair_of_row + at) // top_k).to(gl.int64)
    place = x + gl.expand_dims(token * stride_x, 1) + column
    rest = place
    if HEIGHT > MAIN:
        at = gl.minimum(row + MAIN + gl.arange(0, HEIGHT - MAIN, layout=gl.SliceLayout(1, layout)), end_row - 1)
        token = (gl.load(pair_of_row + at) // top_k).to(gl.int64)
        rest = x + gl.expand_dims(token * stride_x, 1) + column
    for i in range(first, last):
        stage = it % STAGES
        mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
        bar = ready.index(stage)
        mbarrier.expect(bar, WORDS)
        load_weights(i, stage, bar, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, pair_tiles, STEP, GROUP, KIND)
        rows_load(x_view.index(stage * PER), place + i * STEP)
        if HEIGHT > MAIN:
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
def gather(
    given, gathered, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
    PAIRED: gl.constexpr, GROUPS_OF_WARPS: gl.constexpr, SLOTS: gl.constexpr,
):
    """Run the four copy warps that gather tokens by their pairs, with cp.async instead of the copy engine.

    Threads report the completion of their rows themselves, LAG steps later.
    """
    (
        w_desc, _x_desc, s_desc, w_buf, x_buf, x_rest, s_buf, ready, empty, info, full, free, queue, tiles, num_tiles,
        slabs, groups, steps, blocks, splits, pair_tiles, _done, _needed,
    ) = given
    x, pair_of_row, top_k, stride_x = gathered
    HEIGHTS: gl.constexpr = heights(TOKENS)
    it = 0
    number = 0
    each = (steps + splits - 1) // splits
    items = gl.load(num_tiles) * (blocks * splits)
    index = gl.program_id(0)
    while index < items:
        expert, row, end_row, part = common.find_tile(index, tiles, blocks * splits)
        announce(info, full, free, number, expert, row, end_row, part, SLOTS, 4)
        number += 1
        index = gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed")
        first, last, left, tile = extent(row, end_row, part, splits, each, steps, PAIRED, GROUPS_OF_WARPS)
        for h in gl.static_range(len(HEIGHTS)):
            if (left <= HEIGHTS[h]) & (h == 0 or left > HEIGHTS[h - 1]):
                it = _gather_item(
                    it, w_desc, s_desc, w_buf, x_buf, x_rest, s_buf, ready, empty, x, pair_of_row, top_k, stride_x, row,
                    end_row, expert * slabs, expert * groups, first, last, tile, pair_tiles, HEIGHTS[h], TOKENS, STAGES,
                    GROUP, KIND, GROUPS_OF_WARPS,
                )
    announce(info, full, free, number, -1, 0, 0, 0, SLOTS, 4)
