"""Direct W8A8 kernels: a MoE layer for very few tokens in two kernels, where every pair of token and expert is a tile.

As in `w4a16.device.direct`, pairs are not sorted, and the down kernel starts to copy its weights while the gate-up
kernel still runs. Every program quantises its own input, which costs less than two more kernels: it reads the whole row
for the scale, and makes codes of its share of k.
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
from moeq_kernels.hopper.device.barriers import ready_slots
from moeq_kernels.hopper.device.epilogue import activate_gated
from moeq_kernels.hopper.device.few import clear, expert_of, sum_choices
from moeq_kernels.hopper.w8a8.device import common

STEP = common.STEP
#: Tokens of wgmma's smallest product; only the first is used, and the others may hold any codes.
TOKENS = gl.constexpr(8)


@gluon.jit
def _scale(value):
    """Return the scale of a float32 row, whose unused columns are zero; `rows._quantised` has the same formula."""
    top = gl.max(gl.abs(value), 0)
    return gl.where(top > 0.0, gl.div_rn(top, top * 0.0 + 127.0), 1.0)


@gluon.jit
def _store_codes(x_buf, value, scale, STEPS: gl.constexpr):
    """Store codes `[STEPS, 128]` of float32 values as the first row of each step's operand.

    Swizzling leaves the first of eight rows of 128 bytes in place, so a plain layout writes it.
    """
    code = gl.div_rn(value, gl.zeros_like(value) + scale)
    code = (code + 12582912.0) - 12582912.0  # rounds to nearest even: the sum has no fraction bits
    code = gl.minimum(gl.maximum(code, -128.0), 127.0).to(gl.int8)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    reinterpret(x_buf, gl.int8, [STEPS, TOKENS * STEP], plain).slice(0, STEP, dim=1).store(code)


@gluon.jit
def _k_of(first, STEPS: gl.constexpr):
    """Return the indices k `[STEPS, 128]` from step `first` on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    step = gl.expand_dims(first + gl.arange(0, STEPS, layout=gl.SliceLayout(1, layout)), 1)
    return step * STEP + gl.expand_dims(gl.arange(0, STEP, layout=gl.SliceLayout(0, layout)), 0)


@gluon.jit
def _load(i, slot, bar, first_desc, second_desc, w_buf, expert, row, second_row, ROWS: gl.constexpr):
    """Start to copy a step's weights: half of the ROWS rows from either descriptor, in boxes of 64."""
    mbarrier.expect(bar, ROWS * STEP)
    HALF: gl.constexpr = ROWS // 128
    for b in gl.static_range(HALF):
        tma_load(first_desc, [expert, row + 64 * b, i * STEP], bar, w_buf.index(2 * HALF * slot + b))
        tma_load(second_desc, [expert, second_row + 64 * b, i * STEP], bar, w_buf.index(2 * HALF * slot + HALF + b))


@gluon.jit
def _load_first(
    first, last, ready, first_desc, second_desc, w_buf, expert, row, second_row, STAGES: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Start to copy the first steps, as many as there are stages."""
    for i in gl.static_range(STAGES):
        if first + i < last:
            _load(first + i, i, ready.index(i), first_desc, second_desc, w_buf, expert, row, second_row, ROWS)


@gluon.jit
def _multiply(
    first, last, ready, first_desc, second_desc, w_buf, x_buf, expert, row, second_row, STAGES: gl.constexpr,
    ROWS: gl.constexpr,
):
    """Return the int32 sums `[ROWS, TOKENS]` of steps first to last."""
    w_view = reinterpret(w_buf, gl.int8, [STAGES, ROWS, STEP], common.operand())
    acc = gl.zeros([ROWS, TOKENS], gl.int32, common.accumulator(TOKENS))
    for i in range(first, last):
        slot = (i - first) % STAGES
        mbarrier.wait(ready.index(slot), ((i - first) // STAGES) & 1)
        acc = warpgroup_mma(w_view.index(slot), x_buf.index(i - first).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if i + STAGES < last:
            barrier()
            _load(i + STAGES, slot, ready.index(slot), first_desc, second_desc, w_buf, expert, row, second_row, ROWS)
    return acc


@gluon.jit
def _prepare(STAGES: gl.constexpr, STEPS: gl.constexpr, ROWS: gl.constexpr):
    """Allocate buffers of weights and tokens, and barriers."""
    w_buf = gl.allocate_shared_memory(gl.int8, [STAGES * (ROWS // 64), 1, 64, STEP], common.weight_box())
    x_buf = gl.allocate_shared_memory(gl.int8, [STEPS, TOKENS, STEP], common.operand())
    ready = ready_slots(STAGES)
    fence_async_shared()
    barrier()
    return w_buf, x_buf, ready


@gluon.jit(do_not_specialize=["to_clear", "count", "top_k", "pairs", "experts", "known"])
def few_gate_up_int8(
    first_desc, second_desc, x, static_scale, ids, expert_map, sums, scales, arrived, to_clear, count, columns, hidden,
    stride_x, top_k, pairs, experts, known, MAPPED: gl.constexpr, SHARE: gl.constexpr, STEPS: gl.constexpr,
    STAGES: gl.constexpr, COLUMNS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Compute shares of codes of x[token of pair] @ W[expert of pair].T into int32 sums `[shares, pairs, 2 columns]`.

    The grid is (block of 64 columns of gate and of up, pair, share).

    Args:
        first_desc, second_desc: gate and up, see `narrow.w8a8_product_narrow`.
        x: `[tokens, hidden]` with stride_x.
        static_scale: float32 `[1]`, or None if each row has a scale of its own.
        ids: experts `[tokens * top_k]`, which expert_map `[known]` translates to local ones if MAPPED.
        scales: float32 `[pairs]`, written with the scales of tokens.
        arrived: int32 counters, of which to_clear are set to zero.
        count: number of steps.
        SHARE: steps per share.
        STEPS, COLUMNS: powers of two, at least SHARE and hidden.
    """
    w_buf, x_buf, ready = _prepare(STAGES, STEPS, 128)
    if DEPENDENT:
        gdc_wait()
    block = gl.program_id(0)
    pair = gl.program_id(1)
    expert = expert_of(ids, expert_map, pair, experts, known, MAPPED)
    first = gl.program_id(2) * SHARE
    last = gl.minimum(first + SHARE, count)
    if expert >= 0:
        _load_first(first, last, ready, first_desc, second_desc, w_buf, expert, block * 64, block * 64, STAGES, 128)
    if DEPENDENT:
        gdc_launch_dependents()
    if (block == 0) & (pair == 0) & (first == 0):
        clear(arrived, to_clear)
    if expert >= 0:
        row = x + (pair // top_k).to(gl.int64) * stride_x
        if static_scale is not None:
            scale = gl.load(static_scale)
        else:
            whole = gl.arange(0, COLUMNS, layout=gl.BlockedLayout([8], [32], [4], [0]))
            scale = _scale(gl.load(row + whole, mask=whole < hidden, other=0.0).to(gl.float32))
        k = _k_of(first, STEPS)
        _store_codes(x_buf, gl.load(row + k, mask=k < hidden, other=0.0).to(gl.float32), scale, STEPS)
        fence_async_shared()
        barrier()
        acc = _multiply(
            first, last, ready, first_desc, second_desc, w_buf, x_buf, expert, block * 64, block * 64, STAGES, 128,
        )
        n = gl.expand_dims(gl.arange(0, 128, layout=gl.SliceLayout(1, common.accumulator(TOKENS))), 1)
        t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, common.accumulator(TOKENS))), 0)
        column = block * 64 + n % 64
        place = sums + (gl.program_id(2) * pairs + pair).to(gl.int64) * (2 * columns)
        gl.store(place + n // 64 * columns + column + 0 * t, acc, mask=(t == 0) & (column < columns))
        if (block == 0) & (first == 0):
            gl.store(scales + pair, scale)


@gluon.jit
def _activation(
    sums, token_scale, up_scale, up_bias, expert, pair, pairs, columns, k, up_row, row_step, dtype: gl.constexpr,
    EPILOGUE: gl.constexpr, UP_SHARES: gl.constexpr,
):
    """Return the activations of columns k in float32, rounded to dtype; they are zero beyond the last column."""
    inside = k < columns
    place = sums + pair.to(gl.int64) * (2 * columns) + k
    size = (pair * 0 + pairs).to(gl.int64) * (2 * columns)
    gate = gl.load(place, mask=inside, other=0, cache_modifier=".cg")
    up = gl.load(place + columns, mask=inside, other=0, cache_modifier=".cg")
    for other in gl.static_range(1, UP_SHARES):
        gate += gl.load(place + other * size, mask=inside, other=0, cache_modifier=".cg")
        up += gl.load(place + other * size + columns, mask=inside, other=0, cache_modifier=".cg")
    at = expert.to(gl.int64) * (2 * columns) + k * row_step
    gate = gate.to(gl.float32) * gl.load(up_scale + at, mask=inside, other=0.0).to(gl.float32) * token_scale
    up = up.to(gl.float32) * gl.load(up_scale + at + up_row, mask=inside, other=0.0).to(gl.float32) * token_scale
    if up_bias is not None:
        gate += gl.load(up_bias + at, mask=inside, other=0.0).to(gl.float32)
        up += gl.load(up_bias + at + up_row, mask=inside, other=0.0).to(gl.float32)
    return gl.where(inside, activate_gated(gate, up, EPILOGUE), 0.0).to(dtype).to(gl.float32)


@gluon.jit(do_not_specialize=["count", "stride_w", "pairs", "experts", "known", "up_row"])
def few_down_int8(
    first_desc, second_desc, static_scale, ids, expert_map, topk_weights, sums, scales, parts, arrived, y, up_scale,
    up_bias, w_scale, bias, w_rows, count, columns, hidden, stride_w, up_row, row_step, pairs, experts, known,
    MAPPED: gl.constexpr, TOP_K: gl.constexpr, UP_SHARES: gl.constexpr, SHARES: gl.constexpr, SHARE: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, COLUMNS: gl.constexpr, ROWS: gl.constexpr, EPILOGUE: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """Quantise the activation of sums, multiply it with W[expert].T, and sum a token's choices by weight into y.

    The grid is (block of ROWS columns, pair, share).

    Args:
        first_desc, second_desc: the weights of the down product, twice the same.
        static_scale: scale of the activations, or None as in `few_gate_up_int8`.
        sums, scales: results of `few_gate_up_int8`.
        parts: float32 `[SHARES, pairs, hidden]`.
        arrived: int32 zeros `[tokens, blocks]`.
        up_scale, up_bias: `[experts, 2 columns]`; gate n is row `n * row_step`, its up row lies `up_row` further.
        w_scale, bias: `[experts, w_rows]`; biases may be None.
        count: number of steps.
        SHARE: steps per share.
        STEPS, COLUMNS: powers of two, at least SHARE and columns.
    """
    w_buf, x_buf, ready = _prepare(STAGES, STEPS, ROWS)
    block = gl.program_id(0)
    pair = gl.program_id(1)
    expert = expert_of(ids, expert_map, pair, experts, known, MAPPED)
    first = gl.program_id(2) * SHARE
    last = gl.minimum(first + SHARE, count)
    row = block * ROWS
    if expert >= 0:
        _load_first(first, last, ready, first_desc, second_desc, w_buf, expert, row, row + ROWS // 2, STAGES, ROWS)
    if DEPENDENT:
        gdc_wait()
    if expert >= 0:
        kind: gl.constexpr = y.dtype.element_ty
        token_scale = gl.load(scales + pair)
        k = _k_of(first, STEPS)
        value = _activation(sums, token_scale, up_scale, up_bias, expert, pair, pairs, columns, k, up_row, row_step,
                            kind, EPILOGUE, UP_SHARES)
        if static_scale is not None:
            scale = gl.load(static_scale)
        else:
            whole = gl.arange(0, COLUMNS, layout=gl.BlockedLayout([4], [32], [4], [0]))
            scale = _scale(
                _activation(sums, token_scale, up_scale, up_bias, expert, pair, pairs, columns, whole, up_row, row_step,
                            kind, EPILOGUE, UP_SHARES))
        _store_codes(x_buf, value, scale, STEPS)
        fence_async_shared()
        barrier()
        acc = _multiply(
            first, last, ready, first_desc, second_desc, w_buf, x_buf, expert, row, row + ROWS // 2, STAGES, ROWS,
        )
        n = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, common.accumulator(TOKENS)))
        t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(0, common.accumulator(TOKENS))), 0)
        at = expert.to(gl.int64) * w_rows + n
        factor = gl.load(w_scale + at, mask=n < hidden, other=0.0).to(gl.float32)
        result = acc.to(gl.float32) * gl.expand_dims(factor, 1) * scale
        if bias is not None:
            shift = gl.load(bias + at, mask=(n < hidden) & (first == 0), other=0.0).to(gl.float32)
            result += gl.expand_dims(shift, 1)
        n = gl.expand_dims(n, 1)
        place = parts + (gl.program_id(2) * pairs + pair).to(gl.int64) * hidden
        gl.store(place + n + 0 * t, result, mask=(t == 0) & (n < hidden))
        barrier()
    token = pair // TOP_K
    counter = arrived + token * gl.num_programs(0) + block
    if gl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == TOP_K * SHARES - 1:
        sum_choices(
            y, ids, expert_map, topk_weights, parts, None, None, 0, token, row, hidden, stride_w, pairs,
            experts, known, MAPPED, TOP_K, SHARES, ROWS,
        )
