"""Queue kernel: both expert products of a layer in one kernel, for few tokens per expert, bound by reading weights.

Programs are persistent, two or three per SM: a copy warp and a computing warpgroup. They draw work units from one
queue, first those of the gate-up product: tiles (256 output rows, up to TOKENS tokens), shares of a tile's k if tiles
are few, or several tiles if their k is short. The copy warp runs ahead and describes its copies to the warpgroup in
shared memory. A down unit waits, after it has started to copy its first weights, for the gate-up columns of its tokens.
Those were drawn earlier, by programs that never wait, so there is no deadlock. The last share of a tile to arrive adds
all shares in order, so results do not depend on which program draws a unit.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.device.caching import KEPT
from moeq_kernels.hopper.compat import barrier, reinterpret, tma_load
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.w4a16.device import common, layouts, steps, weights


@gluon.jit
def cut(items, count, wanted, least):
    """Return the shares per tile of `count` steps, and their steps: up to `wanted` shares in all, of `least` steps."""
    shares = gl.maximum(1, gl.minimum(wanted // gl.maximum(items, 1), count // least))
    each = (count + shares - 1) // shares
    return (count + each - 1) // each, each


@gluon.jit
def find_share(number, shares, each, count):
    """Return item, share, first step and end step of a unit; `cut` gives the arguments."""
    item = number
    share = number * 0
    last = count + share
    if shares > 1:
        item = number // shares
        share = number % shares
        last = gl.minimum(share * each + each, count)
    return item, share, share * each, last


@constexpr_function
def box_of(tokens):
    """Return the tokens per copy; copies of tokens that the expert lacks are left out."""
    return max(8, tokens // 4)


@constexpr_function
def heights(least, tokens):
    """Return the heights (powers of two) at which tiles can be multiplied; the smallest sufficient one is used."""
    return tuple(height for height in (8, 16, 32, 64) if least <= height <= tokens)


#: Index of the first tile counter, in another cache line than the queue, so that waiting does not slow down drawing.
COUNTERS = gl.constexpr(32)
#: Indices of a product's numbers in its slot of `info`; these slots follow those of the steps.
SHARES, EACH, COUNT, ACROSS, BLOCKS, SLABS, GROUPS, UNITS, TOTAL, BUNDLE, PAIR = map(gl.constexpr, range(11))


# Argument lists of twenty names, one to a line, would hide the code.
# fmt: off
@gluon.jit
def _draw(queue):
    """Start to draw the next unit in lane 0 of a copy warp; `_drawn` waits for it."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 lane;
        mov.u32 lane, %laneid;
        setp.eq.u32 first, lane, 0;
        mov.u32 $0, 0;
        @first atom.relaxed.gpu.global.add.u32 $0, [$1], 1;
        }""",
        "=&r,l", [queue.to(gl.int64)], gl.int32, False, 1,
    )


@gluon.jit
def _drawn(ticket):
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, 0, 0x1f, 0xffffffff;", "=r,r", [ticket], gl.int32, False, 1
    )


@gluon.jit
def _look(counter):
    """Load a counter with acquire semantics, which do not extend to the copy engine."""
    return gl.inline_asm_elementwise(
        "ld.acquire.gpu.global.b32 $0, [$1];", "=r,l", [counter.to(gl.int64)], gl.int32, False, 1
    )


@gluon.jit
def _fence_copies():
    """Order writes to memory before later reads by the copy engine."""
    gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def _get(info, place, number: gl.constexpr, WARPS: gl.constexpr):
    """Load a number from a slot of `info`, in a copy warp or a warpgroup."""
    return gl.max(info.index(place * 16 + number).load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0)


@gluon.jit
def _tell(info, place, numbers, WARPS: gl.constexpr):
    """Store numbers into a slot of `info`."""
    for i in gl.static_range(len(numbers)):
        info.index(place * 16 + i).store(gl.full([1], numbers[i], gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
    barrier()


@gluon.jit
def _expect(bar, row, end_row, BYTES: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr):
    """Set the byte count of a step's barrier: BYTES of weights, and the boxes that hold any tokens."""
    BOX: gl.constexpr = box_of(TOKENS)
    for boxes in gl.static_range(1, TOKENS // BOX + 1):
        here = row + BOX * boxes >= end_row if boxes < TOKENS // BOX else True
        if boxes > 1:
            here = here & (row + BOX * (boxes - 1) < end_row)
        mbarrier.expect(bar, BYTES + boxes * BOX * 2 * STEP, pred=here)


@gluon.jit
def _open(
    down, step, at, descriptors, w_buf, s_buf, info, ready, empty, row, end_row, w_row, s_row, block,
    PAIRED: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    BYTES: gl.constexpr, KIND: gl.constexpr,
):
    """Wait for the slot of the at-th step, start to copy its weights, and return the slot."""
    up_w_desc, up_s_desc, down_w_desc, down_s_desc = descriptors
    slot = at % STAGES
    mbarrier.wait(empty.index(slot), ((at // STAGES) & 1) ^ 1)
    bar = ready.index(slot)
    _expect(bar, row, end_row, BYTES, TOKENS, STEP)
    if down:
        steps.load_weights(
            step, slot, bar, down_w_desc, down_s_desc, w_buf, s_buf, w_row, s_row, block * 4, 2, STEP, GROUP,
            KIND,
        )
    else:
        steps.load_weights(
            step, slot, bar, up_w_desc, up_s_desc, w_buf, s_buf, w_row, s_row, block * (2 if PAIRED else 4),
            _get(info, STAGES + 1, PAIR, 1), STEP, GROUP, KIND,
        )
    return slot


@gluon.jit
def _load_tokens(
    down, step, slot, bar, x_desc, m_desc, x_buf, row, end_row, TOKENS: gl.constexpr, STEP: gl.constexpr,
):
    """Start to copy the boxes of a step that hold any tokens."""
    BOX: gl.constexpr = box_of(TOKENS)
    for part in gl.static_range(TOKENS // BOX):
        some = row + BOX * part < end_row if part else True
        for half in gl.static_range(STEP // 64):
            target = x_buf.index((STEP // 64 * slot + half) * (TOKENS // BOX) + part)
            if down:
                tma_load(m_desc, [row + BOX * part, step * STEP + 64 * half], bar, target, pred=some)
            else:
                tma_load(x_desc, [row + BOX * part, step * STEP + 64 * half], bar, target, pred=some)


@gluon.jit
def _copy(
    given, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr,
    PAIRED: gl.constexpr, WAITS: gl.constexpr,
):
    """Run the copy warp. WAITS: whether it waits for the preceding kernel before it copies its first tokens."""
    descriptors, x_desc, m_desc, w_buf, x_buf, s_buf, info, ready, empty, queue, tiles = given
    SCALE_BITS: gl.constexpr = s_buf.dtype.primitive_bitwidth
    UP: gl.constexpr = STAGES + 1
    DOWN: gl.constexpr = STAGES + 2
    BYTES: gl.constexpr = steps.weight_bytes(STEP, GROUP, KIND, SCALE_BITS)
    it = 0
    told = 0
    opened = -1
    fresh = True
    ticket = _drawn(_draw(queue))
    while ticket < _get(info, UP, TOTAL, 1):
        following = _draw(queue)
        units = _get(info, UP, UNITS, 1)
        down = ticket >= units
        product = gl.where(down, DOWN, UP)
        shares = _get(info, product, SHARES, 1)
        item, share, first, last = find_share(
            ticket - gl.where(down, units, 0), shares, _get(info, product, EACH, 1), _get(info, product, COUNT, 1)
        )
        expert, row, end_row, block, number = common.find_item(item, tiles, _get(info, product, ACROSS, 1), TOKENS)
        end = block + 1
        waits = down & (number != opened)
        if down:
            bundle = _get(info, DOWN, BUNDLE, 1)
            block *= bundle
            end = gl.minimum(block + bundle, _get(info, DOWN, BLOCKS, 1))
        if waits:
            waits = _look(queue + COUNTERS + number) < _get(info, UP, BLOCKS, 1)
        w_row = expert * _get(info, product, SLABS, 1)
        s_row = expert * _get(info, product, GROUPS, 1)
        while block < end:
            slot = it % STAGES
            mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
            # A unit has at least one step, so the warpgroup still needs at most the last STAGES + 1 slots.
            _tell(
                info, told % (STAGES + 1),
                (down.to(gl.int32), expert, row, end_row, block, number, first, last, item, share, shares), 1,
            )
            told += 1
            start = first
            held = waits
            if WAITS:
                held = held | fresh
            if held:
                start = gl.minimum(first + STAGES, last)
                for step in range(first, start):
                    _open(
                        down, step, it + step - first, descriptors, w_buf, s_buf, info, ready, empty, row, end_row,
                        w_row, s_row, block, PAIRED, TOKENS, STEP, STAGES, GROUP, BYTES, KIND,
                    )
                if WAITS:
                    if fresh:
                        gdc_wait()
                    fresh = False
                if waits:
                    there = _look(queue + COUNTERS + number)
                    while there < _get(info, UP, BLOCKS, 1):
                        there = _look(queue + COUNTERS + number)
                    waits = False
            if down & (number != opened):
                opened = number
                _fence_copies()
            if held:
                for step in range(first, start):
                    slot = (it + step - first) % STAGES
                    _load_tokens(
                        down, step, slot, ready.index(slot), x_desc, m_desc, x_buf, row, end_row, TOKENS, STEP
                    )
                it += start - first
            for step in range(start, last):
                slot = _open(
                    down, step, it, descriptors, w_buf, s_buf, info, ready, empty, row, end_row, w_row, s_row, block,
                    PAIRED, TOKENS, STEP, STAGES, GROUP, BYTES, KIND,
                )
                _load_tokens(
                    down, step, slot, ready.index(slot), x_desc, m_desc, x_buf, row, end_row, TOKENS, STEP
                )
                it += 1
            block += 1
        ticket = _drawn(following)
    if WAITS and fresh:
        gdc_wait()
    slot = it % STAGES
    mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
    _tell(info, told % (STAGES + 1), (-1,), 1)
    mbarrier.arrive(ready.index(slot), count=1)


@gluon.jit
def _add_shares(acc, partial, arrived, item, share, shares, NOW: gl.constexpr, TOKENS: gl.constexpr):
    """Store the sums of a share; the item's last share to arrive gets the sum of all shares, and True.

    `partial` is fp32 `[items * shares, 256 * TOKENS]`; acc has NOW tokens.
    """
    layout: gl.constexpr = layouts.accumulator(NOW)
    m = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(1, layout)), 1)
    t = gl.expand_dims(gl.arange(0, NOW, layout=gl.SliceLayout(0, layout)), 0)
    SIZE: gl.constexpr = 256 * TOKENS
    place = partial + item.to(gl.int64) * shares * SIZE + m * NOW + t
    gl.store(place + share * SIZE, acc, eviction_policy=KEPT)
    barrier()
    done = gl.atomic_add(arrived + item, 1, sem="acq_rel", scope="gpu") == shares - 1
    if done:
        acc = gl.zeros([256, NOW], gl.float32, layout)
        for other in range(shares):
            acc += gl.load(place + other * SIZE, cache_modifier=".cg")
    return acc, done


@gluon.jit
def _store_down(
    acc, out, row, end_row, column, columns, stride, scale, bias, expert, packed, TOKENS: gl.constexpr,
    UNIT: gl.constexpr,
):
    """Finish and store down sums without a transposition: eight columns of a token lie in eight lanes."""
    layout: gl.constexpr = layouts.accumulator(TOKENS)
    acc = common.affine_rows(acc, column, column + 128, scale, bias, True, expert, packed, False, TOKENS, UNIT)
    m = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(1, layout)), 1)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout)), 0)
    at = column + ((m >> 4) & 3) * 64 + (m >> 6) * 16 + (m & 15)  # map A, see `layouts`
    place = out + (row + t).to(gl.int64) * stride + at
    inside = (at < columns) & (row + t < end_row)
    gl.store(place, common.rounded(acc, out.dtype.element_ty), mask=inside, eviction_policy=KEPT)


@gluon.jit
def _unit(
    given, it, place, down, NOW: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, AFTER: gl.constexpr, EPILOGUE: gl.constexpr,
    PAIRED: gl.constexpr, ROWS: gl.constexpr,
):
    """Multiply the unit that a slot of `info` describes, with NOW of the TOKENS rows of the buffers."""
    w_buf, x_buf, s_buf, info, ready, empty, up, dn, finished = given
    (
        up_zero, up_zero_words, up_groups, up_pair_tiles, up_out, up_columns, up_stride, up_scale, up_bias, up_global,
        up_packed, up_partial, up_arrived,
    ) = up
    (
        down_zero, down_zero_words, down_groups, down_out, down_columns, down_stride, down_scale, down_bias,
        down_global, down_packed, down_partial, down_arrived,
    ) = dn
    EACH: gl.constexpr = TOKENS // NOW
    w_view, s_view = steps.views(w_buf, s_buf, STAGES, STEP, GROUP, KIND)
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES * STEP // 64 * EACH, NOW, 64], layouts.token_buffer())
    UNDO: gl.constexpr = weights.undo(KIND, x_buf.dtype == gl.float16, GROUP > 0 and not AFTER)
    UNIT: gl.constexpr = weights.channel_unit(KIND, x_buf.dtype == gl.float16)
    expert = _get(info, place, 1, 4)
    block = _get(info, place, 4, 4)
    tile = block * gl.where(down, 4, 2 if PAIRED else 4)
    pair_tiles = gl.where(down, 2, up_pair_tiles)
    groups = gl.where(down, down_groups, up_groups)
    zero = up_zero
    zero_words = up_zero_words
    if ZEROS:
        zero = down_zero if down else up_zero
        zero_words = gl.where(down, down_zero_words, up_zero_words)
    acc = gl.zeros([256, NOW], gl.float32, layouts.accumulator(NOW))
    part = acc
    for step in range(_get(info, place, 6, 4), _get(info, place, 7, 4)):
        slot = it % STAGES
        mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
        acc, part = steps.multiply(
            acc, part, w_view, s_view, slot, x_view, slot, zero, expert * groups, groups,
            zero_words, tile, pair_tiles, step * STEP, STEP, NOW, GROUP, ZEROS, KIND, AFTER, ROWS, EACH,
        )
        mbarrier.arrive(empty.index(slot), count=1)
        it += 1
    # Loaded only now, so that they take no registers in the main loop.
    row = _get(info, place, 2, 4)
    end_row = _get(info, place, 3, 4)
    shares = _get(info, place, 10, 4)
    done = shares == 1
    if shares > 1:
        item = _get(info, place, 8, 4)
        share = _get(info, place, 9, 4)
        partial = down_partial if down else up_partial
        arrived = down_arrived if down else up_arrived
        acc, done = _add_shares(acc, partial, arrived, item, share, shares, NOW, TOKENS)
    if done:
        if down:
            _store_down(
                common.undone(acc, down_global, expert, UNDO), down_out, row, end_row, tile * 64, down_columns,
                down_stride, down_scale, down_bias, expert, down_packed, NOW, UNIT,
            )
        else:
            common.store_chunks(
                common.undone(acc, up_global, expert, UNDO), up_out, row, end_row, tile * 64,
                (tile + pair_tiles) * 64, up_columns, up_stride, up_scale, up_bias, True, expert, up_packed,
                EPILOGUE, False, NOW, 8, UNIT,
            )
            _fence_copies()
            barrier()
            gl.atomic_add(finished + _get(info, place, 5, 4), 1, sem="release", scope="gpu")
    return it


@gluon.jit
def _multiply(
    given, LEAST: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ZEROS: gl.constexpr, KIND: gl.constexpr, AFTER: gl.constexpr, EPILOGUE: gl.constexpr, PAIRED: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Run the computing warpgroup."""
    _w_buf, _x_buf, _s_buf, info, ready, _empty, _up, _dn, _finished = given
    HEIGHTS: gl.constexpr = heights(LEAST, TOKENS)
    it = 0
    heard = 0
    mbarrier.wait(ready.index(0), 0)
    kind = _get(info, 0, 0, 4)
    while kind >= 0:
        place = heard % (STAGES + 1)
        if len(HEIGHTS) == 1:
            it = _unit(
                given, it, place, kind == 1, TOKENS, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, EPILOGUE, PAIRED,
                ROWS,
            )
        else:
            left = _get(info, place, 3, 4) - _get(info, place, 2, 4)
            for h in gl.static_range(len(HEIGHTS)):
                # `left` counts rows up to the expert's end and exceeds TOKENS for full tiles.
                lower = left <= HEIGHTS[h] if h < len(HEIGHTS) - 1 else True
                if lower & (h == 0 or left > HEIGHTS[h - 1]):
                    it = _unit(
                        given, it, place, kind == 1, HEIGHTS[h], TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER,
                        EPILOGUE, PAIRED, ROWS,
                    )
        heard += 1
        mbarrier.wait(ready.index(it % STAGES), (it // STAGES) & 1)
        kind = _get(info, heard % (STAGES + 1), 0, 4)


@gluon.jit(do_not_specialize=[
    "up_slabs", "up_groups", "up_count", "up_blocks", "up_pair_tiles", "up_zero_words", "up_packed", "down_slabs",
    "down_groups", "down_count", "down_blocks", "down_zero_words", "down_packed", "most", "wanted_up", "least_up",
    "wanted_down", "least_down", "bundle",
])
def expert_layer(
    x_desc, m_desc, middle, out, partial, counters, tiles, num_tiles, most, wanted_up, least_up, wanted_down,
    least_down, bundle, up_w_desc, up_h_desc, up_s_desc, up_zero, up_slabs, up_groups, up_count, up_blocks,
    up_pair_tiles, up_columns, up_stride, up_zero_words, up_scale, up_bias, up_global_scale, up_packed, down_w_desc,
    down_h_desc, down_s_desc, down_zero, down_slabs, down_groups, down_count, down_blocks, down_columns, down_stride,
    down_zero_words, down_scale, down_bias, down_global_scale, down_packed, TOKENS: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, AFTER: gl.constexpr,
    ROWS: gl.constexpr, EPILOGUE: gl.constexpr, DEPENDENT: gl.constexpr, EARLY: gl.constexpr, LEAST: gl.constexpr,
):
    """Compute middle[row] = epilogue(x[row] @ W13[expert].T) and out[row] = middle[row] @ W2[expert].T.

    Each product has the arguments of `narrow.expert_product_narrow`, except:
        x_desc, m_desc: x and middle in blocks of `box_of` tokens.
        out: `[rows, ..]` with down_stride.
        partial: fp32 `[wanted_up + wanted_down, 256 * TOKENS]`.
        counters: int32 zeros, `COUNTERS + most + wanted_up + wanted_down`: the queue; finished gate-up items per tile;
            arrived shares per item.
        tiles: int32 `[most, 8]`, see `device.routing`.
        num_tiles: int32 `[1]`, number of used tiles.
        wanted_up, wanted_down, least_up, least_down: arguments of `cut`.
        bundle: upper bound of the tiles in a down unit; if it is not 1, tiles are not split.
        up_count, down_count: number of steps.
        up_blocks, down_blocks: number of blocks of 256 output rows.
        EARLY: whether the preceding kernel writes x only, so that copies of weights need not wait for it.
        LEAST: least of the `heights` at which tiles are multiplied.
    """
    if up_h_desc is not None:
        up_w_desc = (up_w_desc, up_h_desc)
        down_w_desc = (down_w_desc, down_h_desc)
    PAIRED: gl.constexpr = epilogue.gated(EPILOGUE) and not epilogue.interleaved(EPILOGUE)
    w_buf, s_buf = steps.buffers(up_s_desc, STAGES, STEP, GROUP, KIND)
    BOX: gl.constexpr = box_of(TOKENS)
    x_buf = steps.token_buffer(STAGES * (TOKENS // BOX), STEP, BOX, x_desc.dtype)
    info = gl.allocate_shared_memory(gl.int32, [(STAGES + 3) * 16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    barrier()
    if DEPENDENT and not EARLY:
        gdc_wait()
    if DEPENDENT:
        gdc_launch_dependents()
    WAITS: gl.constexpr = DEPENDENT and EARLY
    used = gl.load(num_tiles)
    takers = gl.num_programs(0)
    up_items = used * up_blocks
    up_shares, up_each = cut(up_items, up_count, wanted_up, least_up)
    # Units of short k are drawn several at a time as long as there are many.
    bundle = gl.maximum(1, gl.minimum(bundle, used * down_blocks // (4 * takers)))
    down_across = (down_blocks + bundle - 1) // bundle
    down_shares, down_each = cut(used * down_across, down_count, wanted_down, least_down)
    units = up_items * up_shares
    total = units + used * down_across * down_shares
    finished = counters + COUNTERS
    arrived = finished + most
    up = (
        up_zero, up_zero_words, up_groups, up_pair_tiles, middle, up_columns, up_stride, up_scale, up_bias,
        up_global_scale, up_packed, partial, arrived,
    )
    down = (
        down_zero, down_zero_words, down_groups, out, down_columns, down_stride, down_scale, down_bias,
        down_global_scale, down_packed, partial + wanted_up.to(gl.int64) * (256 * TOKENS), arrived + wanted_up,
    )
    taken = (w_buf, x_buf, s_buf, info, ready, empty, up, down, finished)
    copied = (
        (up_w_desc, up_s_desc, down_w_desc, down_s_desc), x_desc, m_desc, w_buf, x_buf, s_buf, info, ready, empty,
        counters, tiles,
    )
    # In the order of SHARES, EACH, ...; a copy warp has too few registers to keep these numbers.
    _tell(
        info, STAGES + 1,
        (up_shares, up_each, up_count, up_blocks, up_blocks, up_slabs, up_groups, units, total, 1, up_pair_tiles), 4,
    )
    _tell(
        info, STAGES + 2,
        (
            down_shares, down_each, down_count, down_across, down_blocks, down_slabs, down_groups, units, total, bundle,
            2,
        ), 4,
    )
    gl.warp_specialize(
        [
            (_multiply, (taken, LEAST, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, EPILOGUE, PAIRED, ROWS)),
            (_copy, (copied, TOKENS, STEP, STAGES, GROUP, KIND, PAIRED, WAITS)),
        ],
        [1],
        [32],
    )


# fmt: on
