"""Narrow kernel, for few tokens per expert: one warpgroup, 256 output rows, copies issued several steps ahead.

Four programs run on an SM at once, which hides latencies better than a specialised copy warp does.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.device.caching import EVICT_LAST
from moeq_kernels.hopper.compat import barrier
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.w4a16.device import common, layouts, steps, weights


@gluon.jit(do_not_specialize=["rows"])
def expert_product_narrow(
    w_desc, h_desc, x_desc, s_desc, zero, out, partial, arrived, tiles, slabs, groups, count, pair_tiles, columns,
    stride, rows, zero_words, scale, bias, global_scale, packed, TOKENS: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, EPILOGUE: gl.constexpr,
    SPLITS: gl.constexpr, AFTER: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Compute out[row] = epilogue(x[row] @ W[expert of row].T), see `epilogue.Epilogue`.

    Args:
        w_desc: int32 words `[E * slabs, N / 64, 128]` (8-bit codes: 256), block `[rows of words in a step, 2, ..]`;
            an expert has `slabs` rows of words (`layouts.word_rows`).
        h_desc: int32 words of third bits `[E * slabs / 2, N / 64, 128]`, block `[STEP / 64, 2, 128]`, or None.
        x_desc: bf16 or float16 `[rows, K]` sorted by expert, block `[TOKENS, 64]`.
        s_desc: scales `[E * groups, N]`, block `[groups of a step, 128]`; not read if GROUP is 0.
        zero: int32 `[E * groups, zero_words]`, read if ZEROS.
        out: `[rows, ..]` with `stride`; for a down product `[SPLITS, rows, ..]`.
        partial: fp32 `[SPLITS, rows, 2 * columns]`, partial sums of a gated product with SPLITS > 1; the last program
            of a split to arrive adds all parts, in order.
        arrived: int32 zeros, a counter of arrived programs per tile and block of columns.
        tiles: int32 `[T, 8]`: expert (-1: no work), first row, end row of the expert.
        count: number of steps of STEP rows of k (64 or 128).
        pair_tiles: distance, in tiles of 64 columns, of the second half of a program's columns from the first.
        columns: number of columns of out.
        scale, bias: `[E, packed]`, one per output feature, or None.
        global_scale: float32 `[E]`, factor of an expert's matrix, or None.
        SPLITS: number of programs that share the k of a tile.
        GROUP: rows of k that share a scale; 0 for one scale per output feature.
        AFTER: whether scales multiply float32 sums of a group; otherwise they are folded into the weights.
        DEPENDENT: whether the kernel starts before the preceding one has ended.
    """
    if h_desc is not None:
        w_desc = (w_desc, h_desc)
    block = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    entry = tiles + gl.program_id(1) * 8
    GATED: gl.constexpr = epilogue.gated(EPILOGUE)
    FIRST: gl.constexpr = epilogue.activation(EPILOGUE) != "none"  # whether this is the gate-up product
    UNDO: gl.constexpr = weights.undo(KIND, x_desc.dtype == gl.float16, GROUP > 0 and not AFTER)
    UNIT: gl.constexpr = weights.channel_unit(KIND, x_desc.dtype == gl.float16)

    SIZE: gl.constexpr = steps.weight_bytes(STEP, GROUP, KIND, s_desc.dtype.primitive_bitwidth) + TOKENS * STEP * 2
    w_buf, s_buf = steps.buffers(s_desc, STAGES, STEP, GROUP, KIND)
    x_buf = steps.token_buffer(STAGES, STEP, TOKENS, x_desc.dtype)
    w_view, s_view = steps.views(w_buf, s_buf, STAGES, STEP, GROUP, KIND)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    if DEPENDENT and FIRST:
        gdc_wait()  # the preceding kernel writes the tiles
    expert = gl.load(entry)
    if expert >= 0:
        for i in gl.static_range(STAGES):
            mbarrier.init(ready.index(i), count=1)
        fence_async_shared()
        barrier()
        row = gl.load(entry + 1)
        end_row = gl.load(entry + 2)
        tile = block * (2 if GATED and not epilogue.interleaved(EPILOGUE) else 4)
        each = (count + SPLITS - 1) // SPLITS
        first = split * each
        last = gl.minimum(first + each, count)
        w_row = expert * slabs
        s_row = expert * groups
        for i in gl.static_range(STAGES):
            mbarrier.expect(ready.index(i), SIZE, pred=first + i < last)
            steps.load_weights(
                first + i, i, ready.index(i), w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, pair_tiles, STEP,
                GROUP, KIND, first + i < last,
            )
        if DEPENDENT and not FIRST:
            gdc_wait()
        for i in gl.static_range(STAGES):
            steps.load_tokens(first + i, i, ready.index(i), x_desc, x_buf, row, STEP, first + i < last)
        if DEPENDENT:
            gdc_launch_dependents()

        acc = gl.zeros([256, TOKENS], gl.float32, layouts.accumulator(TOKENS))
        part = acc
        for i in range(last - first):
            stage = i % STAGES
            step = first + i
            bar = ready.index(stage)
            mbarrier.wait(bar, (i // STAGES) & 1)
            acc, part = steps.multiply(
                acc, part, w_view, s_view, stage, x_buf, stage, zero, s_row, groups, zero_words,
                tile, pair_tiles, step * STEP, STEP, TOKENS, GROUP, ZEROS, KIND, AFTER,
            )
            barrier()
            ahead = step + STAGES
            mbarrier.expect(bar, SIZE, pred=ahead < last)
            steps.load_weights(
                ahead, stage, bar, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, pair_tiles, STEP, GROUP,
                KIND, ahead < last,
            )
            steps.load_tokens(ahead, stage, bar, x_desc, x_buf, row, STEP, ahead < last)

        column = tile * 64
        second = (tile + pair_tiles) * 64  # first column of the second half
        acc = common.undone(acc, global_scale, expert, UNDO)
        acc = common.affine_rows(acc, column, second, scale, bias, split == 0, expert, packed, False, TOKENS, UNIT)
        one, two = common.pair_columns(acc, False, TOKENS, epilogue.interleaved(EPILOGUE))
        if not GATED:
            base = out + (split * rows).to(gl.int64) * stride
            common.store_pair(one, two, base, row, end_row, column, second, columns, stride, EPILOGUE, False, TOKENS)
        elif SPLITS == 1:
            common.store_pair(one, two, out, row, end_row, column, second, columns, stride, EPILOGUE, False, TOKENS)
        else:
            common.store_split(
                one, two, out, partial, arrived, split, block, rows, row, end_row, column, second, columns, stride,
                EPILOGUE, TOKENS, SPLITS, EVICT_LAST,
            )
