"""Expert products with few tokens per expert: one warpgroup, 256 output rows, copies issued several steps ahead.

Four such programs run on a multiprocessor at once, which hides latencies better than a specialised copy warp does.
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
from moeq_kernels.hopper.device import common, layouts, weights

#: Rows of k in one step.
STEP = gl.constexpr(128)


@gluon.jit
def _load_weights(step, last, stage, w_desc, s_desc, w_buf, s_buf, ready, w_row, s_row, tile, pair_tiles,
                  TOKENS: gl.constexpr, GROUP: gl.constexpr):  # fmt: skip
    """Starts the copies of a step's words and scales, if there is such a step."""
    groups: gl.constexpr = STEP // GROUP
    bar = ready.index(stage)
    some = step < last
    mbarrier.expect(bar, 2 * 8 * 2 * 512 + 2 * groups * 256 + TOKENS * STEP * 2, pred=some)
    tma_load(w_desc, [w_row + step * 8, tile, 0], bar, w_buf.index(2 * stage), pred=some)
    tma_load(w_desc, [w_row + step * 8, tile + pair_tiles, 0], bar, w_buf.index(2 * stage + 1), pred=some)
    for g in gl.static_range(groups):
        at = s_row + step * groups + g
        slot = (stage * groups + g) * 2
        tma_load(s_desc, [at, tile * 64], bar, s_buf.index(slot), pred=some)
        tma_load(s_desc, [at, (tile + pair_tiles) * 64], bar, s_buf.index(slot + 1), pred=some)


@gluon.jit
def _load_tokens(step, last, stage, x_desc, x_buf, ready, row):
    """Starts the copies of a step's tokens."""
    bar = ready.index(stage)
    some = step < last
    tma_load(x_desc, [row, step * STEP], bar, x_buf.index(2 * stage), pred=some)
    tma_load(x_desc, [row, step * STEP + 64], bar, x_buf.index(2 * stage + 1), pred=some)


@gluon.jit
def _zero_offsets(zero, row, zero_words, tile, pair_tiles):
    word = common.zero_words(zero, row, zero_words, tile, pair_tiles, False)
    return weights.zero_offsets(word, False)


@gluon.jit
def _half_step(acc, part, words, x, s_view, stage, zero, z_row, zero_words, tile, pair_tiles, SUB: gl.constexpr,
               TOKENS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, AFTER: gl.constexpr):  # fmt: skip
    """Multiplies 64 rows of k, the SUB-th of a step."""
    first: gl.constexpr = SUB * 64 // GROUP
    second: gl.constexpr = (SUB * 64 + 32) // GROUP
    layout: gl.constexpr = gl.SliceLayout(2, layouts.scales(False))
    words = words.slice(4 * SUB, 4, dim=1).load(layouts.words(False, 4))
    slot = stage * (STEP // GROUP)
    scale1 = s_view.index(slot + first).load(layout)
    scale2 = scale1
    if first != second:
        scale2 = s_view.index(slot + second).load(layout)
    zero1 = 0
    zero2 = 0
    if ZEROS:
        zero1 = _zero_offsets(zero, z_row + first, zero_words, tile, pair_tiles)
        zero2 = zero1
        if first != second:
            zero2 = _zero_offsets(zero, z_row + second, zero_words, tile, pair_tiles)
    a = common.step_weights(words, scale1, scale2, zero1, zero2, False, TOKENS, not AFTER, ZEROS)
    if AFTER:
        opens: gl.constexpr = SUB * 64 % GROUP == 0
        closes: gl.constexpr = (SUB + 1) * 64 % GROUP == 0
        part = warpgroup_mma(a, x.permute((1, 0)), part, use_acc=not opens, is_async=True)
        part, a = warpgroup_mma_wait(0, deps=(part, a))
        if closes:
            factor = scale1.to(gl.float32).reshape([2, 2, 8, 4, 2]).permute([3, 0, 1, 4, 2]).reshape([256])
            factor = gl.convert_layout(factor, gl.SliceLayout(1, layouts.accumulator(TOKENS)), assert_trivial=True)
            acc += part * gl.expand_dims(factor, 1)
    else:
        acc = warpgroup_mma(a, x.permute((1, 0)), acc, is_async=True)
        acc, a = warpgroup_mma_wait(0, deps=(acc, a))
    return acc, part


@gluon.jit
def expert_product_narrow(
    w_desc,
    x_desc,
    s_desc,
    zero,
    out,
    partial,
    arrived,
    tiles,
    slabs,
    groups,
    steps,
    pair_tiles,
    columns,
    stride,
    rows,
    zero_words,
    TOKENS: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    GATED: gl.constexpr,
    SPLITS: gl.constexpr,
    AFTER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """out[row] = x[row] @ W[expert of row].T, or SwiGLU of its halves.

    Args:
        w_desc: int32 words `[E * slabs, N / 64, 128]`, block `[8, 2, 128]`.
        x_desc: bf16 `[rows, K]` sorted by expert, block `[TOKENS, 64]`.
        s_desc: bf16 scales `[E * groups, N]`, block `[1, 128]`.
        zero: int32 `[E * groups, zero_words]`, read where ZEROS.
        out: `[rows, ..]` with `stride`; without GATED `[SPLITS, rows, ..]`.
        partial: fp32 `[SPLITS, rows, 2 * columns]` and arrived: int32 zeros, one for each tile and block of columns;
            used where GATED and SPLITS > 1: the last program of a split to arrive adds all parts, in order.
        tiles: int32 `[T, 8]`: expert (-1: nothing to do), first row, end row of the expert.
        steps: of 128 rows of k; SPLITS: how many programs share them.
        pair_tiles: distance, in tiles of 64 columns, of the second half of a program's columns from the first.
        columns: of each half where GATED, else of all.
        AFTER: scales multiply float32 sums of a group, else they are folded into the weights.
        DEPENDENT: launched while the kernel before it still runs.
    """
    block = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    entry = tiles + gl.program_id(1) * 8
    groups_step: gl.constexpr = STEP // GROUP

    w_buf = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 8, 2, 128], layouts.word_buffer())
    x_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, TOKENS, 64], layouts.token_buffer())
    s_buf = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2 * groups_step, 1, 128], layouts.scale_buffer())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_view = reinterpret(w_buf, gl.uint8, [STAGES, 2, 8, 1024], layouts.plain_shared())
    s_view = reinterpret(s_buf, gl.bfloat16, [STAGES * groups_step, 2, 16, 8], layouts.plain_shared())
    if DEPENDENT and GATED:
        gdc_wait()  # the tiles come from the kernel right before
    expert = gl.load(entry)
    if expert >= 0:
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        barrier()
        row = gl.load(entry + 1)
        end_row = gl.load(entry + 2)
        tile = block * (2 if GATED else 4)
        each = (steps + SPLITS - 1) // SPLITS
        first = split * each
        count = gl.minimum(each, steps - first)
        w_row = expert * slabs + first * 8
        s_row = expert * groups + first * groups_step
        for i in gl.static_range(STAGES):
            _load_weights(
                i, count, i, w_desc, s_desc, w_buf, s_buf, ready, w_row, s_row, tile, pair_tiles, TOKENS, GROUP
            )
        if DEPENDENT and not GATED:
            gdc_wait()
        for i in gl.static_range(STAGES):
            _load_tokens(i + first, count + first, i, x_desc, x_buf, ready, row)
        if DEPENDENT:
            gdc_launch_dependents()

        acc_layout: gl.constexpr = layouts.accumulator(TOKENS)
        acc = gl.zeros([256, TOKENS], gl.float32, acc_layout)
        part = acc
        for i in range(count):
            stage = i % STAGES
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            for sub in gl.static_range(2):
                acc, part = _half_step(
                    acc, part, w_view.index(stage), x_buf.index(2 * stage + sub), s_view, stage, zero,
                    s_row + i * groups_step, zero_words, tile, pair_tiles, sub, TOKENS, GROUP, ZEROS, AFTER,
                )  # fmt: skip
            barrier()
            ahead = i + STAGES
            _load_weights(
                ahead, count, stage, w_desc, s_desc, w_buf, s_buf, ready, w_row, s_row, tile, pair_tiles, TOKENS, GROUP
            )
            _load_tokens(ahead + first, count + first, stage, x_desc, x_buf, ready, row)

        one, two = common.pair_columns(acc * weights.UNDO, False, TOKENS)
        column = tile * 64
        second = (tile + pair_tiles) * 64
        if not GATED:
            base = out + (split * rows).to(gl.int64) * stride
            common.store_pair(one, two, base, row, end_row, column, second, columns, stride, False, False, TOKENS)
        elif SPLITS == 1:
            common.store_pair(one, two, out, row, end_row, column, second, columns, stride, True, False, TOKENS)
        else:
            layout: gl.constexpr = layouts.output(False, TOKENS)
            t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout)), 1)
            n = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(0, layout)), 0)
            inside = (row + t < end_row) & (column + n < columns)
            place = partial + (row + t).to(gl.int64) * (2 * columns) + column + n
            size = (row * 0 + rows).to(gl.int64) * (2 * columns)
            gl.store(place + split * size, one, mask=inside)
            gl.store(place + split * size + columns, two, mask=inside)
            barrier()
            number = gl.program_id(1) * (gl.num_programs(0) // SPLITS) + block
            before = gl.atomic_add(arrived + number, 1, sem="acq_rel", scope="gpu")
            if before == SPLITS - 1:
                one = gl.zeros([TOKENS, 128], gl.float32, layout)
                two = gl.zeros([TOKENS, 128], gl.float32, layout)
                for other in gl.static_range(SPLITS):
                    one += gl.load(place + other * size, mask=inside, other=0.0, cache_modifier=".cg")
                    two += gl.load(place + other * size + columns, mask=inside, other=0.0, cache_modifier=".cg")
                common.store_pair(one, two, out, row, end_row, column, second, columns, stride, True, False, TOKENS)
