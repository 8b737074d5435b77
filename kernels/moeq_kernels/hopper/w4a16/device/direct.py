"""Direct kernels: a MoE layer for very few tokens in two kernels, where every pair of token and expert is a tile.

Pairs are not sorted. The gate-up kernel reads its expert from the routing and stores float32 sums of its share of k.
The down kernel starts to copy its weights while the gate-up kernel still runs; it adds those shares and applies the
activation on the way to wgmma's right operand. The last of its programs to arrive for a token's columns sums choices.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.hopper.compat import barrier
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.device.barriers import ready_slots
from moeq_kernels.hopper.device.few import clear, expert_of, sum_choices
from moeq_kernels.hopper.w4a16.device import common, layouts, steps, weights

#: Tokens of wgmma's smallest product; only the first is used.
TOKENS = gl.constexpr(8)


@gluon.jit
def _store_row(acc, place, half, left, second_left):
    """Store the first token's sums: two ranges of 128 columns with distance `half`.

    Only the first `left` and `second_left` columns of the ranges exist.
    """
    layout: gl.constexpr = layouts.accumulator(TOKENS)
    m = gl.expand_dims(gl.arange(0, 256, layout=gl.SliceLayout(1, layout)), 1)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, layout)), 0)
    column = m // 16 % 2 * 64 + m // 64 * 16 + m % 16  # map A
    second = m // 32 % 2
    inside = column < gl.where(second == 1, second_left, left)
    gl.store(place + second * half + column + t * 0, acc, mask=(t == 0) & inside)


@gluon.jit(
    do_not_specialize=[
        "to_clear", "slabs", "groups", "count", "zero_words", "top_k", "pairs", "experts", "known",
    ]
)
def few_gate_up(
    w_desc, h_desc, x_desc, s_desc, zero, global_scale, ids, expert_map, partial, arrived, to_clear, slabs, groups,
    count, columns, zero_words, top_k, pairs, experts, known, MAPPED: gl.constexpr, SHARE: gl.constexpr,
    STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr,
    AFTER: gl.constexpr, PAIRED: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Compute shares of x[token of pair] @ W[expert of pair].T into partial `[shares, pairs, 2 columns]` (float32).

    The grid is (block of 256 columns, pair, share). Columns stay in the order of the weights; the down kernel applies
    channel scales and biases.

    Args:
        w_desc, h_desc, s_desc, global_scale: arguments of `narrow.expert_product_narrow`.
        x_desc: tokens `[tokens, K]`, block `[8, 64]`.
        ids: experts `[tokens * top_k]`, which expert_map `[known]` translates to local ones if MAPPED.
        arrived: int32 counters, of which to_clear are set to zero.
        count: number of steps.
        columns: number of gate columns.
        SHARE: steps per share.
        PAIRED: whether a block has 128 gate columns and their up columns; otherwise it has 256 adjacent columns.
    """
    if h_desc is not None:
        w_desc = (w_desc, h_desc)
    w_buf, s_buf = steps.buffers(s_desc, STAGES, STEP, GROUP, KIND)
    x_buf = steps.token_buffer(STAGES, STEP, TOKENS, x_desc.dtype)
    ready = ready_slots(STAGES)
    fence_async_shared()
    barrier()
    if DEPENDENT:
        gdc_wait()
    block = gl.program_id(0)
    pair = gl.program_id(1)
    expert = expert_of(ids, expert_map, pair, experts, known, MAPPED)
    first = gl.program_id(2) * SHARE
    last = gl.minimum(first + SHARE, count)
    w_row = expert * slabs
    s_row = expert * groups
    # First column of the block, and distance of its second half of 128 columns.
    column = block * (128 if PAIRED else 256)
    half = columns if PAIRED else 128
    tile = column // 64
    far = half // 64
    SIZE: gl.constexpr = steps.weight_bytes(STEP, GROUP, KIND, s_desc.dtype.primitive_bitwidth) + TOKENS * STEP * 2
    if expert >= 0:
        for i in gl.static_range(STAGES):
            if first + i < last:
                bar = ready.index(i)
                mbarrier.expect(bar, SIZE)
                steps.load_weights(
                    first + i, i, bar, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, far, STEP, GROUP, KIND,
                )
                steps.load_tokens(first + i, i, bar, x_desc, x_buf, pair // top_k, STEP)
    if DEPENDENT:
        gdc_launch_dependents()
    if (block == 0) & (pair == 0) & (first == 0):
        clear(arrived, to_clear)
    if expert >= 0:
        w_view, s_view = steps.views(w_buf, s_buf, STAGES, STEP, GROUP, KIND)
        acc = gl.zeros([256, TOKENS], gl.float32, layouts.accumulator(TOKENS))
        part = acc
        for step in range(first, last):
            slot = (step - first) % STAGES
            mbarrier.wait(ready.index(slot), ((step - first) // STAGES) & 1)
            acc, part = steps.multiply(
                acc, part, w_view, s_view, slot, x_buf, slot, zero, s_row, groups, zero_words, tile,
                far, step * STEP, STEP, TOKENS, GROUP, ZEROS, KIND, AFTER,
            )
            if step + STAGES < last:
                barrier()
                again = ready.index(slot)
                mbarrier.expect(again, SIZE)
                steps.load_weights(
                    step + STAGES, slot, again, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, far, STEP, GROUP,
                    KIND,
                )
                steps.load_tokens(step + STAGES, slot, again, x_desc, x_buf, pair // top_k, STEP)
        UNDO: gl.constexpr = weights.undo(KIND, x_desc.dtype == gl.float16, GROUP > 0 and not AFTER)
        place = partial + (gl.program_id(2) * pairs + pair).to(gl.int64) * (2 * columns) + column
        left = columns - column if PAIRED else 2 * columns - column
        _store_row(common.undone(acc, global_scale, expert, UNDO), place, half, left, left if PAIRED else left - 128)


@gluon.jit
def _activate(x_buf, slot, partial, scale, bias, expert, packed, pair, pairs, columns, step, STEP: gl.constexpr,
              EPILOGUE: gl.constexpr, UP_SHARES: gl.constexpr, UNIT: gl.constexpr):
    """Write one step's tokens, all TOKENS alike: the activation of the sums of all shares, rounded."""
    layout: gl.constexpr = gl.BlockedLayout([4, 1], [1, 32], [2, 2], [1, 0])
    for half in gl.static_range(STEP // 64):
        k = step * STEP + half * 64 + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
        own = 2 * k if epilogue.interleaved(EPILOGUE) else k
        beside = own + 1 if epilogue.interleaved(EPILOGUE) else own + columns
        row = partial + pair.to(gl.int64) * (2 * columns)
        size = (pair * 0 + pairs).to(gl.int64) * (2 * columns)
        inside = k < columns
        gate = gl.zeros([64], gl.float32, gl.SliceLayout(0, layout))
        up = gate
        for other in gl.static_range(UP_SHARES):
            gate += gl.load(row + other * size + own, mask=inside, other=0.0, cache_modifier=".cg")
            up += gl.load(row + other * size + beside, mask=inside, other=0.0, cache_modifier=".cg")
        gate = epilogue.affine(gate, own, scale, bias, True, expert, packed, inside, UNIT)
        up = epilogue.affine(up, beside, scale, bias, True, expert, packed, inside, UNIT)
        value = epilogue.activate_gated(gate, up, EPILOGUE).to(x_buf.dtype)
        _, value = gl.broadcast(gl.zeros([TOKENS, 64], x_buf.dtype, layout), gl.expand_dims(value, 0))
        x_buf.index(STEP // 64 * slot + half).store(value)


@gluon.jit(
    do_not_specialize=[
        "up_packed", "packed", "slabs", "groups", "count", "stride_w", "zero_words", "pairs", "experts", "known",
    ]
)
def few_down(
    w_desc, h_desc, s_desc, zero, global_scale, ids, expert_map, topk_weights, partial, parts, arrived, y, up_scale,
    up_bias, up_packed, scale, bias, packed, slabs, groups, count, columns, hidden, stride_w, zero_words, pairs,
    experts, known, MAPPED: gl.constexpr, TOP_K: gl.constexpr, UP_SHARES: gl.constexpr, SHARES: gl.constexpr,
    SHARE: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr,
    KIND: gl.constexpr, AFTER: gl.constexpr, EPILOGUE: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Compute y[token] = sum over its choices of weight * (activation of partial) @ W[expert].T.

    The grid is (block of 256 columns, pair, share).

    Args:
        partial: results of `few_gate_up`, `[UP_SHARES, pairs, 2 columns]`.
        parts: float32 `[SHARES, pairs, hidden]`.
        arrived: int32 zeros `[tokens, blocks]`.
        global_scale: factors of the down matrices, see `narrow.expert_product_narrow`.
        up_scale, up_bias: `[experts, up_packed]`, values per gate-up column in Marlin's 32-column order, or None.
        scale, bias: `[experts, packed]`, values per down column in the same order, or None.
        count: number of steps.
        columns: number of gate columns, the k of the weights.
        hidden: number of features of y.
        SHARE: steps per share.
    """
    if h_desc is not None:
        w_desc = (w_desc, h_desc)
    w_buf, s_buf = steps.buffers(s_desc, STAGES, STEP, GROUP, KIND)
    x_buf = steps.token_buffer(SHARE, STEP, TOKENS, y.dtype.element_ty)
    ready = ready_slots(STAGES)
    fence_async_shared()
    barrier()
    block = gl.program_id(0)
    pair = gl.program_id(1)
    expert = expert_of(ids, expert_map, pair, experts, known, MAPPED)
    first = gl.program_id(2) * SHARE
    last = gl.minimum(first + SHARE, count)
    w_row = expert * slabs
    s_row = expert * groups
    SIZE: gl.constexpr = steps.weight_bytes(STEP, GROUP, KIND, s_desc.dtype.primitive_bitwidth)
    UNIT: gl.constexpr = weights.channel_unit(KIND, y.dtype.element_ty == gl.float16)
    if expert >= 0:
        for i in gl.static_range(STAGES):
            if first + i < last:
                mbarrier.expect(ready.index(i), SIZE)
                steps.load_weights(
                    first + i, i, ready.index(i), w_desc, s_desc, w_buf, s_buf, w_row, s_row, block * 4, 2, STEP,
                    GROUP, KIND,
                )
    if DEPENDENT:
        gdc_wait()
    if expert >= 0:
        for i in gl.static_range(SHARE):
            if first + i < last:
                _activate(
                    x_buf, i, partial, up_scale, up_bias, expert, up_packed, pair, pairs, columns, first + i, STEP,
                    EPILOGUE, UP_SHARES, UNIT,
                )
        fence_async_shared()
        barrier()
        w_view, s_view = steps.views(w_buf, s_buf, STAGES, STEP, GROUP, KIND)
        acc = gl.zeros([256, TOKENS], gl.float32, layouts.accumulator(TOKENS))
        part = acc
        for step in range(first, last):
            slot = (step - first) % STAGES
            mbarrier.wait(ready.index(slot), ((step - first) // STAGES) & 1)
            acc, part = steps.multiply(
                acc, part, w_view, s_view, slot, x_buf, step - first, zero, s_row, groups,
                zero_words, block * 4, 2, step * STEP, STEP, TOKENS, GROUP, ZEROS, KIND, AFTER,
            )
            if step + STAGES < last:
                barrier()
                again = ready.index(slot)
                mbarrier.expect(again, SIZE)
                steps.load_weights(
                    step + STAGES, slot, again, w_desc, s_desc, w_buf, s_buf, w_row, s_row, block * 4, 2, STEP, GROUP,
                    KIND,
                )
        UNDO: gl.constexpr = weights.undo(KIND, y.dtype.element_ty == gl.float16, GROUP > 0 and not AFTER)
        place = parts + (gl.program_id(2) * pairs + pair).to(gl.int64) * hidden + block * 256
        left = hidden - block * 256
        _store_row(common.undone(acc, global_scale, expert, UNDO), place, 128, left, left - 128)
        barrier()
    token = pair // TOP_K
    counter = arrived + token * gl.num_programs(0) + block
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == TOP_K * SHARES - 1:
        sum_choices(
            y, ids, expert_map, topk_weights, parts, scale, bias, packed, token, block * 256, hidden, stride_w, pairs,
            experts, known, MAPPED, TOP_K, SHARES, 256, UNIT,
        )
