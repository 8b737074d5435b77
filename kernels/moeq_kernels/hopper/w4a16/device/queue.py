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

from moeq_kernels.device.caching import EVICT_LAST
from moeq_kernels.hopper.compat import barrier, reinterpret
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.device.barriers import ring
from moeq_kernels.hopper.w4a16.device import common, layouts, steps, weights
from moeq_kernels.hopper.w4a16.device.queue_copies import COUNTERS, box_of, copy, fence_copies, get, tell


@gluon.jit
def cut(items, count, wanted, least):
    """Return the shares per tile, and the steps per share, of `items` tiles of `count` steps.

    There are at most `wanted` shares in all, unless there are more tiles, and a share has at least `least` steps.
    """
    shares = gl.maximum(1, gl.minimum(wanted // gl.maximum(items, 1), count // least))
    each = (count + shares - 1) // shares
    return (count + each - 1) // each, each


@constexpr_function
def heights(least, tokens):
    """Return the heights (powers of two) at which tiles can be multiplied; the smallest sufficient one is used."""
    return tuple(height for height in (8, 16, 32, 64) if least <= height <= tokens)


@gluon.jit
def _add_shares(acc, partial, arrived, item, share, shares, NOW: gl.constexpr, TOKENS: gl.constexpr):
    """Store the sums of a share. Return the sum of all shares and True for the last one to arrive, else acc and False.

    `partial` is fp32 `[items * shares, 256 * TOKENS]`; acc has NOW tokens.
    """
    layout: gl.constexpr = layouts.accumulator(NOW)
    m = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(1, layout)), 1)
    t = gl.expand_dims(gl.arange(0, NOW, layout=gl.SliceLayout(0, layout)), 0)
    SIZE: gl.constexpr = 256 * TOKENS
    place = partial + item.to(gl.int64) * shares * SIZE + m * NOW + t
    gl.store(place + share * SIZE, acc, eviction_policy=EVICT_LAST)
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
    gl.store(place, common.rounded(acc, out.dtype.element_ty), mask=inside, eviction_policy=EVICT_LAST)


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
    expert = get(info, place, 1, 4)
    block = get(info, place, 4, 4)
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
    for step in range(get(info, place, 6, 4), get(info, place, 7, 4)):
        slot = it % STAGES
        mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
        acc, part = steps.multiply(
            acc, part, w_view, s_view, slot, x_view, slot, zero, expert * groups, groups,
            zero_words, tile, pair_tiles, step * STEP, STEP, NOW, GROUP, ZEROS, KIND, AFTER, ROWS, EACH,
        )
        mbarrier.arrive(empty.index(slot), count=1)
        it += 1
    # These numbers are loaded only now, so that they take no registers in the main loop.
    row = get(info, place, 2, 4)
    end_row = get(info, place, 3, 4)
    shares = get(info, place, 10, 4)
    done = shares == 1
    if shares > 1:
        item = get(info, place, 8, 4)
        share = get(info, place, 9, 4)
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
            fence_copies()
            barrier()
            gl.atomic_add(finished + get(info, place, 5, 4), 1, sem="release", scope="gpu")
    return it


@gluon.jit
def _multiply(
    given, LEAST: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    ZEROS: gl.constexpr, KIND: gl.constexpr, AFTER: gl.constexpr, EPILOGUE: gl.constexpr, PAIRED: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Run the computing warpgroup: multiply units until the copy warp announces that there are no more."""
    _w_buf, _x_buf, _s_buf, info, ready, _empty, _up, _dn, _finished = given
    HEIGHTS: gl.constexpr = heights(LEAST, TOKENS)
    it = 0
    heard = 0
    mbarrier.wait(ready.index(0), 0)
    kind = get(info, 0, 0, 4)
    while kind >= 0:
        place = heard % (STAGES + 1)
        if len(HEIGHTS) == 1:
            it = _unit(
                given, it, place, kind == 1, TOKENS, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, EPILOGUE, PAIRED,
                ROWS,
            )
        else:
            left = get(info, place, 3, 4) - get(info, place, 2, 4)
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
        kind = get(info, heard % (STAGES + 1), 0, 4)


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
    ready, empty = ring(STAGES, 1, 1)
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
    # Tiles of short k are drawn several at a time as long as there are many.
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
    # The numbers follow the order of SHARES, EACH, ... in `queue_copies`: a copy warp has too few registers for them.
    tell(
        info, STAGES + 1,
        (up_shares, up_each, up_count, up_blocks, up_blocks, up_slabs, up_groups, units, total, 1, up_pair_tiles), 4,
    )
    tell(
        info, STAGES + 2,
        (
            down_shares, down_each, down_count, down_across, down_blocks, down_slabs, down_groups, units, total, bundle,
            2,
        ), 4,
    )
    gl.warp_specialize(
        [
            (_multiply, (taken, LEAST, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, EPILOGUE, PAIRED, ROWS)),
            (copy, (copied, TOKENS, STEP, STAGES, GROUP, KIND, PAIRED, WAITS)),
        ],
        [1],
        [32],
    )
