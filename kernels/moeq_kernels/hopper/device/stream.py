"""Expert products that are bound by reading weights: pairs of a copy warp and a multiplying warpgroup, side by side.

Programs are persistent, one on each multiprocessor, with two or three such pairs. Each pair has tiles of its own (256
output rows, up to TOKENS tokens) and its own buffers, so pairs run out of step and share the tensor cores well, and
copies run ahead across tiles. Tiles that do not fill all pairs of the GPU once more are cut into shares of k of equal
length, taken before the whole tiles; the last of a tile's shares to arrive adds all, in order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.hopper.compat import barrier
from moeq_kernels.hopper.device import common, layouts, steps, weights


@gluon.jit
def share(unit, taker, takers, items, count):
    """What `taker` of `takers` does as its unit-th piece of work: item, first step, end step, steps of a share.

    Items have `count` steps. The first `items % takers` items are shared: laid end to end, every taker gets the same
    number of their steps, so at most the end of one item and the beginning of the next (units 0 and 1; either may be
    empty). The other items are taken whole, in turn.
    """
    rest = items % takers
    each = (rest * count + takers - 1) // takers
    begin = gl.minimum(taker * each, rest * count)
    end = gl.minimum(begin + each, rest * count)
    item = begin // count + unit
    first = begin % count
    last = gl.minimum(first + end - begin, count)
    if unit == 1:
        last = end - begin - (last - first)
        first = first * 0
    if unit > 1:
        item = rest + (unit - 2) * takers + taker
        first = first * 0
        last = last * 0 + count
    return item, first, last, each


# Argument lists of twenty names, one to a line, would hide the code.
# fmt: off
@gluon.jit
def _copy(
    given, PAIR: gl.constexpr, PAIRS: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, KIND: gl.constexpr, PAIRED: gl.constexpr, WAITS: gl.constexpr,
):
    """The copy warp of a pair. WAITS: for the kernel before this one, but only with its first tokens."""
    (
        w_desc, x_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, tiles, num_tiles, slabs, groups, count, blocks,
        pair_tiles,
    ) = given
    SIZE: gl.constexpr = steps.weight_bytes(STEP, GROUP, KIND, s_desc.dtype.primitive_bitwidth) + TOKENS * STEP * 2
    items = gl.load(num_tiles) * blocks
    takers = gl.num_programs(0) * PAIRS
    it = 0
    for unit in range(2 + items // takers):
        item, first, last, _ = share(unit, PAIR * gl.num_programs(0) + gl.program_id(0), takers, items, count)
        if last > first:
            expert, row, _, block, _ = common.find_item(item, tiles, blocks, TOKENS)
            w_row = expert * slabs
            s_row = expert * groups
            tile = block * (2 if PAIRED else 4)
            start = first
            if WAITS and it == 0:
                start = gl.minimum(first + STAGES, last)
                for step in range(first, start):
                    slot = PAIR * STAGES + step - first
                    mbarrier.expect(ready.index(slot), SIZE)
                    steps.load_weights(
                        step, slot, ready.index(slot), w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile,
                        pair_tiles, STEP, GROUP,
                    )
                gdc_wait()
                for step in range(first, start):
                    slot = PAIR * STAGES + step - first
                    steps.load_tokens(step, slot, ready.index(slot), x_desc, x_buf, row, STEP)
                it = start - first
            for step in range(start, last):
                slot = PAIR * STAGES + it % STAGES
                mbarrier.wait(empty.index(slot), ((it // STAGES) & 1) ^ 1)
                bar = ready.index(slot)
                mbarrier.expect(bar, SIZE)
                steps.load_weights(
                    step, slot, bar, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, pair_tiles, STEP, GROUP,
                )
                steps.load_tokens(step, slot, bar, x_desc, x_buf, row, STEP)
                it += 1


@gluon.jit
def _add_shares(acc, partial, arrived, taker, item, count, each, TOKENS: gl.constexpr):
    """Leaves a share's sums for the others; the item's last share to arrive gets the sum of all, and True.

    partial: fp32 `[2 * takers, 256 * TOKENS]`: a taker's first and second shared item.
    """
    layout: gl.constexpr = layouts.accumulator(TOKENS)
    m = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(1, layout)), 1)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout)), 0)
    place = partial + m * TOKENS + t
    SIZE: gl.constexpr = 256 * TOKENS
    own = taker * 2 + (item != taker * each // count).to(gl.int32)
    gl.store(place + own * SIZE, acc)
    barrier()
    begin = item * count // each
    end = (item * count + count - 1) // each + 1
    done = gl.atomic_add(arrived + item, 1, sem="acq_rel", scope="gpu") == end - begin - 1
    if done:
        acc = gl.zeros([256, TOKENS], gl.float32, layout)
        for other in range(begin, end):
            slot = other * 2 + (item != other * each // count).to(gl.int32)
            acc += gl.load(place + slot * SIZE, cache_modifier=".cg")
    return acc, done


@gluon.jit
def _multiply(
    given, PAIR: gl.constexpr, PAIRS: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, AFTER: gl.constexpr, FINISH: gl.constexpr,
    PAIRED: gl.constexpr,
):
    """The multiplying warpgroup of a pair."""
    (
        w_buf, x_buf, s_buf, ready, empty, zero, out, partial, arrived, tiles, num_tiles, groups, count, blocks,
        pair_tiles, columns, stride, zero_words, scale, bias, packed,
    ) = given
    w_view, s_view = steps.views(w_buf, s_buf, PAIRS * STAGES, STEP, GROUP, KIND)
    UNDO: gl.constexpr = weights.undo(KIND, x_buf.dtype == gl.float16, GROUP > 0 and not AFTER)
    items = gl.load(num_tiles) * blocks
    takers = gl.num_programs(0) * PAIRS
    taker = PAIR * gl.num_programs(0) + gl.program_id(0)
    it = 0
    for unit in range(2 + items // takers):
        item, first, last, each = share(unit, taker, takers, items, count)
        if last > first:
            expert, row, end_row, block, _ = common.find_item(item, tiles, blocks, TOKENS)
            tile = block * (2 if PAIRED else 4)
            acc = gl.zeros([256, TOKENS], gl.float32, layouts.accumulator(TOKENS))
            part = acc
            for step in range(first, last):
                slot = PAIR * STAGES + it % STAGES
                mbarrier.wait(ready.index(slot), (it // STAGES) & 1)
                acc, part = steps.multiply(
                    acc, part, w_view.index(slot), s_view.index(slot), x_buf, slot, zero, expert * groups, zero_words,
                    tile, pair_tiles, step * STEP, STEP, TOKENS, GROUP, ZEROS, KIND, AFTER,
                )
                mbarrier.arrive(empty.index(slot), count=1)
                it += 1
            done = last - first == count
            if last - first < count:
                acc, done = _add_shares(acc, partial, arrived, taker, item, count, each, TOKENS)
            if done:
                common.store_chunks(
                    acc * UNDO, out, row, end_row, tile * 64, (tile + pair_tiles) * 64, columns, stride, scale, bias,
                    True, expert, packed, FINISH, False, TOKENS, 8,
                )


@gluon.jit(do_not_specialize=["slabs", "groups", "count", "blocks", "pair_tiles", "zero_words", "packed"])
def expert_product_stream(
    w_desc, x_desc, s_desc, zero, out, partial, arrived, tiles, num_tiles, slabs, groups, count, blocks, pair_tiles,
    columns, stride, zero_words, scale, bias, packed, PAIRS: gl.constexpr, TOKENS: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr,
    AFTER: gl.constexpr, FINISH: gl.constexpr, DEPENDENT: gl.constexpr, EARLY: gl.constexpr,
):
    """out[row] = finish(x[row] @ W[expert of row].T), see `finish.Finish`.

    Args as of `narrow.expert_product_narrow`, except:
        out: `[rows, ..]` with `stride`.
        partial: fp32 `[2 * PAIRS * programs, 256 * TOKENS]`; arrived: int32 zeros, `PAIRS * programs`.
        tiles: int32 `[T, 8]`: expert, first row, end row of the expert, the expert's first tile, its tiles.
        num_tiles: int32 `[1]`, tiles in use.
        count: of steps; blocks: of 256 output rows.
        PAIRS: of a copy warp and a multiplying warpgroup; REGISTERS: of a thread of the latter.
        EARLY: the kernel before makes the tokens only, so that copies of weights need not wait for it.
    """
    PAIRED: gl.constexpr = common.gated(FINISH) and not common.interleaved(FINISH)
    w_buf, s_buf = steps.buffers(s_desc, PAIRS * STAGES, STEP, GROUP, KIND)
    x_buf = steps.token_buffer(PAIRS * STAGES, STEP, TOKENS, x_desc.dtype)
    ready = gl.allocate_shared_memory(gl.int64, [PAIRS * STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PAIRS * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(PAIRS * STAGES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    barrier()
    if DEPENDENT and not EARLY:
        gdc_wait()
    if DEPENDENT:
        gdc_launch_dependents()
    WAITS: gl.constexpr = DEPENDENT and EARLY
    taken = (
        w_buf, x_buf, s_buf, ready, empty, zero, out, partial, arrived, tiles, num_tiles, groups, count, blocks,
        pair_tiles, columns, stride, zero_words, scale, bias, packed,
    )
    copied = (
        w_desc, x_desc, s_desc, w_buf, x_buf, s_buf, ready, empty, tiles, num_tiles, slabs, groups, count, blocks,
        pair_tiles,
    )
    if PAIRS == 2:
        gl.warp_specialize(
            [
                (_multiply, (taken, 0, 2, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, FINISH, PAIRED)),
                (_multiply, (taken, 1, 2, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, FINISH, PAIRED)),
                (_copy, (copied, 0, 2, TOKENS, STEP, STAGES, GROUP, KIND, PAIRED, WAITS)),
                (_copy, (copied, 1, 2, TOKENS, STEP, STAGES, GROUP, KIND, PAIRED, WAITS)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
    else:
        gl.static_assert(PAIRS == 3)
        gl.warp_specialize(
            [
                (_multiply, (taken, 0, 3, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, FINISH, PAIRED)),
                (_multiply, (taken, 1, 3, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, FINISH, PAIRED)),
                (_multiply, (taken, 2, 3, TOKENS, STEP, STAGES, GROUP, ZEROS, KIND, AFTER, FINISH, PAIRED)),
                (_copy, (copied, 0, 3, TOKENS, STEP, STAGES, GROUP, KIND, PAIRED, WAITS)),
                (_copy, (copied, 1, 3, TOKENS, STEP, STAGES, GROUP, KIND, PAIRED, WAITS)),
                (_copy, (copied, 2, 3, TOKENS, STEP, STAGES, GROUP, KIND, PAIRED, WAITS)),
            ],
            [4, 4, 1, 1, 1],
            [REGISTERS, REGISTERS, 24, 24, 24],
        )


# fmt: on
