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


@gluon.jit
def _load_weights(step, last, stage, w_desc, s_desc, w_buf, s_buf, ready, w_row, s_row, tile, pair_tiles,
                  TOKENS: gl.constexpr, STEP: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):  # fmt: skip
    """Starts the copies of a step's words and scales, if there is such a step."""
    groups: gl.constexpr = layouts.groups_of(STEP, GROUP) if GROUP else 0
    scale_bytes: gl.constexpr = 2 * groups * 128 * s_desc.dtype.primitive_bitwidth // 8
    bar = ready.index(stage)
    some = step < last
    slabs: gl.constexpr = STEP // 16
    mbarrier.expect(bar, 2 * slabs * 2 * layouts.tile_bytes(KIND) + scale_bytes + TOKENS * STEP * 2, pred=some)
    tma_load(w_desc, [w_row + step * slabs, tile, 0], bar, w_buf.index(2 * stage), pred=some)
    tma_load(w_desc, [w_row + step * slabs, tile + pair_tiles, 0], bar, w_buf.index(2 * stage + 1), pred=some)
    if GROUP:
        at = s_row + (step * STEP) // GROUP
        tma_load(s_desc, [at, tile * 64], bar, s_buf.index(2 * stage), pred=some)
        tma_load(s_desc, [at, (tile + pair_tiles) * 64], bar, s_buf.index(2 * stage + 1), pred=some)


@gluon.jit
def _load_tokens(step, last, stage, x_desc, x_buf, ready, row, STEP: gl.constexpr):
    """Starts the copies of a step's tokens."""
    bar = ready.index(stage)
    some = step < last
    for half in gl.static_range(STEP // 64):
        tma_load(x_desc, [row, step * STEP + 64 * half], bar, x_buf.index(STEP // 64 * stage + half), pred=some)


@gluon.jit
def _half_step(acc, part, words, x, scales, zero, z_row, zero_words, tile, pair_tiles, k, SUB: gl.constexpr,
               TOKENS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, AFTER: gl.constexpr,
               KIND: gl.constexpr):  # fmt: skip
    """Multiplies 64 rows of k, the SUB-th of a step that begins at row k."""
    HALF: gl.constexpr = x.dtype == gl.float16
    first: gl.constexpr = SUB * 64 // GROUP if GROUP else 0
    second: gl.constexpr = (SUB * 64 + 32) // GROUP if GROUP else 0
    layout: gl.constexpr = gl.SliceLayout(2, layouts.scales(False))
    words = words.slice(4 * SUB, 4, dim=1).load(layouts.words(False, 4, KIND))
    scale1 = 0
    scale2 = 0
    if GROUP:
        scale1 = scales.slice(first * 16, 16, dim=1).load(layout)
        scale2 = scale1
        if first != second:
            scale2 = scales.slice(second * 16, 16, dim=1).load(layout)
    zero1 = 0
    zero2 = 0
    if ZEROS:
        if GROUP:
            z_row += k // GROUP
        zero1 = common.zero_offsets(zero, z_row + first, zero_words, tile, pair_tiles, False, KIND, HALF)
        zero2 = zero1
        if first != second:
            zero2 = common.zero_offsets(zero, z_row + second, zero_words, tile, pair_tiles, False, KIND, HALF)
    scaled: gl.constexpr = GROUP > 0 and not AFTER
    a = common.step_weights(words, scale1, scale2, zero1, zero2, False, TOKENS, scaled, ZEROS, KIND, HALF)
    if GROUP > 0 and AFTER:
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
    scale,
    bias,
    packed,
    TOKENS: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP: gl.constexpr,
    ZEROS: gl.constexpr,
    KIND: gl.constexpr,
    FINISH: gl.constexpr,
    SPLITS: gl.constexpr,
    AFTER: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """out[row] = finish(x[row] @ W[expert of row].T), see `finish.Finish`.

    Args:
        w_desc: int32 words `[E * slabs, N / 64, 128]` (8-bit codes: 256), block `[STEP / 16, 2, ..]`.
        x_desc: bf16 or float16 `[rows, K]` sorted by expert, block `[TOKENS, 64]`.
        s_desc: scales `[E * groups, N]`, block `[groups of a step, 128]`; not read where GROUP is 0.
        zero: int32 `[E * groups, zero_words]`, read where ZEROS.
        out: `[rows, ..]` with `stride`; for a down product `[SPLITS, rows, ..]`.
        partial: fp32 `[SPLITS, rows, 2 * columns]` and arrived: int32 zeros, one for each tile and block of columns;
            used where FINISH is gated and SPLITS > 1: the last program of a split to arrive adds all parts, in order.
        tiles: int32 `[T, 8]`: expert (-1: nothing to do), first row, end row of the expert.
        steps: of STEP rows of k (64 or 128); SPLITS: how many programs share them.
        pair_tiles: distance, in tiles of 64 columns, of the second half of a program's columns from the first.
        columns: of out.
        scale, bias: `[E, packed]`, one for each output feature, or None.
        GROUP: rows of k that share a scale; 0 for one scale for each output feature.
        AFTER: scales multiply float32 sums of a group, else they are folded into the weights.
        DEPENDENT: launched while the kernel before it still runs.
    """
    block = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    entry = tiles + gl.program_id(1) * 8
    groups_step: gl.constexpr = layouts.groups_of(STEP, GROUP)
    SLABS: gl.constexpr = STEP // 16
    BYTES: gl.constexpr = layouts.tile_bytes(KIND)
    GATED: gl.constexpr = common.gated(FINISH)
    FIRST: gl.constexpr = common.activation(FINISH) != "none"
    UNDO: gl.constexpr = weights.undo(KIND, x_desc.dtype == gl.float16, GROUP > 0 and not AFTER)

    w_buf = gl.allocate_shared_memory(gl.int32, [STAGES * 2, SLABS, 2, BYTES // 4], layouts.word_buffer())
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * SLABS // 4, TOKENS, 64], layouts.token_buffer())
    s_layout: gl.constexpr = layouts.scale_buffer(s_desc.dtype.primitive_bitwidth)
    s_buf = gl.allocate_shared_memory(s_desc.dtype, [STAGES * 2, groups_step, 128], s_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    w_view = reinterpret(w_buf, gl.uint8, [STAGES, 2, SLABS, 2 * BYTES], layouts.plain_shared())
    s_view = reinterpret(s_buf, s_desc.dtype, [STAGES, 2, groups_step * 16, 8], layouts.plain_shared())
    if DEPENDENT and FIRST:
        gdc_wait()  # the tiles come from the kernel right before
    expert = gl.load(entry)
    if expert >= 0:
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        barrier()
        row = gl.load(entry + 1)
        end_row = gl.load(entry + 2)
        tile = block * (2 if GATED and not common.interleaved(FINISH) else 4)
        each = (steps + SPLITS - 1) // SPLITS
        first = split * each
        last = gl.minimum(first + each, steps)
        w_row = expert * slabs
        s_row = expert * groups
        for i in gl.static_range(STAGES):
            _load_weights(
                first + i, last, i, w_desc, s_desc, w_buf, s_buf, ready, w_row, s_row, tile, pair_tiles, TOKENS, STEP,
                GROUP, KIND,
            )  # fmt: skip
        if DEPENDENT and not FIRST:
            gdc_wait()
        for i in gl.static_range(STAGES):
            _load_tokens(first + i, last, i, x_desc, x_buf, ready, row, STEP)
        if DEPENDENT:
            gdc_launch_dependents()

        acc_layout: gl.constexpr = layouts.accumulator(TOKENS)
        acc = gl.zeros([256, TOKENS], gl.float32, acc_layout)
        part = acc
        for i in range(last - first):
            stage = i % STAGES
            step = first + i
            mbarrier.wait(ready.index(stage), (i // STAGES) & 1)
            for sub in gl.static_range(STEP // 64):
                acc, part = _half_step(
                    acc, part, w_view.index(stage), x_buf.index(STEP // 64 * stage + sub), s_view.index(stage), zero,
                    s_row, zero_words, tile, pair_tiles, step * STEP, sub, TOKENS, GROUP, ZEROS, AFTER, KIND,
                )  # fmt: skip
            barrier()
            ahead = step + STAGES
            _load_weights(
                ahead, last, stage, w_desc, s_desc, w_buf, s_buf, ready, w_row, s_row, tile, pair_tiles, TOKENS, STEP,
                GROUP, KIND,
            )  # fmt: skip
            _load_tokens(ahead, last, stage, x_desc, x_buf, ready, row, STEP)

        one, two = common.pair_columns(acc * UNDO, False, TOKENS, common.interleaved(FINISH))
        column = tile * 64
        second = (tile + pair_tiles) * 64
        if not GATED:
            base = out + (split * rows).to(gl.int64) * stride
            common.store_pair(
                one, two, base, row, end_row, column, second, columns, stride, scale, bias, split == 0, expert, packed,
                FINISH, False, TOKENS,
            )  # fmt: skip
        elif SPLITS == 1:
            common.store_pair(
                one, two, out, row, end_row, column, second, columns, stride, scale, bias, True, expert, packed,
                FINISH, False, TOKENS,
            )  # fmt: skip
        else:
            layout: gl.constexpr = layouts.output(False, TOKENS)
            t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout)), 1)
            _, _, at, _ = common.features(column, second, False, TOKENS, FINISH)
            inside = (row + t < end_row) & (at < columns)
            place = partial + (row + t).to(gl.int64) * (2 * columns) + at
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
                common.store_pair(
                    one, two, out, row, end_row, column, second, columns, stride, scale, bias, True, expert, packed,
                    FINISH, False, TOKENS,
                )  # fmt: skip
