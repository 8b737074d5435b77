"""Wide W8A8 kernel, for many tokens per expert: each warpgroup multiplies 64 tokens with 256 weight rows.

The L2 cache limits the rate as much as the tensor cores do, so tiles are as large as registers allow: two warpgroups
share the 256 rows that a copy warp brings in. A warpgroup without tokens only frees its buffers. Warpgroups may be
several steps apart: while one finishes its tile, the other multiplies. The copy warp takes work items from a queue,
which shortens the tail.

Sums of e4m3 products take 128 registers for all steps, and 64 for one step and half of the rows; one warpgroup adds
these while the other multiplies.

With scales of blocks the gate-up product quantises its results: a program's 128 columns of activations are one group of
the down product's k, so no other program needs their maximum, and the down product of an expert begins when that
expert's activations are complete. Scales of groups are read a step ahead.
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
from moeq_kernels.hopper.device.barriers import item_ring, ring
from moeq_kernels.hopper.device.epilogue import activate_gated, gated
from moeq_kernels.hopper.w4a16.device import wide_copies
from moeq_kernels.hopper.w4a16.device.common import find_tile
from moeq_kernels.hopper.w8a8.device import common

STEP = common.STEP
#: Work items that are announced ahead.
SLOTS = gl.constexpr(4)
#: Activations of a group become zeros if all are below this bound, because the inverse of their scale could overflow.
LEAST = gl.constexpr(2.0**-100)


@gluon.constexpr_function
def stored(columns):
    """Return the layout `[64, columns]` for stores, with 8 adjacent columns in a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


@gluon.jit
def _load_weights(first_desc, second_desc, w_buf, bar, stage, expert, at, i, OWN: gl.constexpr):
    """Start to copy one step's weights: two boxes of 128 rows."""
    tma_load(first_desc, [expert, at, i * STEP], bar, w_buf.index(2 * stage))
    tma_load(second_desc, [expert, at + (OWN - 128), i * STEP], bar, w_buf.index(2 * stage + 1))


@gluon.jit
def _load_tokens(x_desc, x_buf, bar, stage, row, left, i):
    """Start to copy one step's tokens: 64 for each warpgroup that has any."""
    for w in gl.static_range(2):
        tma_load(x_desc, [row + 64 * w, i * STEP], bar, x_buf.index(2 * stage + w), pred=left > 64 * w)


@gluon.jit
def _expect(bar, left):
    """Set the byte count of a barrier for a tile with `left` tokens."""
    mbarrier.expect(bar, (256 + 64) * STEP, pred=left <= 64)
    mbarrier.expect(bar, (256 + 128) * STEP, pred=left > 64)


@gluon.jit
def _copy(given, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, DEPENDENT: gl.constexpr, FOLLOWS: gl.constexpr):
    """Run the copy warp: take items, announce them, copy weights and tokens. It copies first weights, then waits."""
    (
        first_desc, second_desc, x_desc, w_buf, x_buf, ready, empty, info, full, free, queue, done, needed, tiles,
        num_tiles, steps, blocks,
    ) = given
    OWN: gl.constexpr = 128 if gated(EPILOGUE) else 256
    complete = -1
    it = 0
    number = 0
    items = gl.load(num_tiles) * blocks
    index = gl.program_id(0)
    while index < items:
        expert, row, end_row, block = find_tile(index, tiles, blocks)
        count = gl.load(tiles + index // blocks * 8 + 4)
        index = gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed")
        left = end_row - row
        start = 0
        if (DEPENDENT or FOLLOWS) and it == 0:
            start = gl.minimum(STAGES, steps)
            for i in range(start):
                _expect(ready.index(i), left)
                _load_weights(first_desc, second_desc, w_buf, ready.index(i), i, expert, block * OWN, i, OWN)
            if DEPENDENT and not FOLLOWS:
                gdc_wait()
            it = start
        if FOLLOWS and expert != complete:
            wide_copies.wait_for(done + expert, count * needed)
            complete = expert
        wide_copies.announce(info, full, free, number, expert, row, end_row, block, SLOTS, 1)
        for i in range(start):
            _load_tokens(x_desc, x_buf, ready.index(i), i, row, left, i)
        number += 1
        for i in range(start, steps):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            _expect(bar, left)
            _load_weights(first_desc, second_desc, w_buf, bar, stage, expert, block * OWN, i, OWN)
            _load_tokens(x_desc, x_buf, bar, stage, row, left, i)
            it += 1
    wide_copies.announce(info, full, free, number, -1, 0, 0, 0, SLOTS, 1)
    if DEPENDENT and FOLLOWS:  # as in `wide_copies.copy`
        gdc_wait()


@gluon.jit
def _steps(acc, it, steps, w_view, x_view, ready, empty, WG: gl.constexpr, STAGES: gl.constexpr):
    """Multiply all steps of an item of int8 codes and return the sums."""
    for i in range(steps):
        stage = (it + i) % STAGES
        mbarrier.wait(ready.index(stage), ((it + i) // STAGES) & 1)
        tokens = x_view.index(2 * stage + WG)
        acc = warpgroup_mma(tokens, w_view.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # All but the last product are done, so the preceding stage is free.
        mbarrier.arrive(empty.index((it + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((it + steps + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _add_half(acc, tokens, weights, scale, GROUPED: gl.constexpr):
    """Add one step of e4m3 codes to acc `[64, 128]`, times the scale of each token if GROUPED."""
    part = gl.zeros([64, 128], gl.float32, common.accumulator(128))
    part = warpgroup_mma(tokens, weights.permute((1, 0)), part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    if GROUPED:
        part = part * gl.expand_dims(scale, 1)
    return acc + part


@gluon.jit
def _float_steps(it, steps, w_view, x_view, ready, empty, x_scale, first_scale, second_scale, row, scale_stride,
                 WG: gl.constexpr, STAGES: gl.constexpr):
    """Multiply all steps of an item of e4m3 codes and return the sums of both halves.

    Scales of groups are loaded one step ahead; `first_scale` and `second_scale` point to those of the first step.
    """
    GROUPED: gl.constexpr = scale_stride is not None
    layout: gl.constexpr = common.accumulator(128)
    t = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    first = gl.zeros([64, 128], gl.float32, layout)
    second = gl.zeros([64, 128], gl.float32, layout)
    token_scale = None
    one = None
    two = None
    if GROUPED:
        token_scale = gl.load(x_scale + t)
        one = gl.load(first_scale).to(gl.float32)
        two = gl.load(second_scale).to(gl.float32)
    for i in range(steps):
        stage = (it + i) % STAGES
        scale = None
        other = None
        if GROUPED:
            scale = token_scale * one
            other = token_scale * two
            after = gl.minimum(i + 1, steps - 1)
            token_scale = gl.load(x_scale + (after * scale_stride + t))
            one = gl.load(first_scale + after).to(gl.float32)
            two = gl.load(second_scale + after).to(gl.float32)
        bar = ready.index(stage)
        phase = ((it + i) // STAGES) & 1
        mbarrier.wait(bar, phase)
        tokens = x_view.index(2 * stage + WG)
        first = _add_half(first, tokens, w_view.index(2 * stage), scale, GROUPED)
        # Without these waits the compiler starts the second product before the addition, and registers spill: LLVM does
        # not move sums across a wait for them, and ptxas not across a branch.
        first = warpgroup_mma_wait(0, deps=(first,))
        mbarrier.wait(bar, phase)
        second = _add_half(second, tokens, w_view.index(2 * stage + 1), other, GROUPED)
        mbarrier.arrive(empty.index(stage), count=1)
    return first, second


@gluon.jit
def _store(value, out, row, end_row, column, columns, stride, COLUMNS: gl.constexpr):
    """Store `[64, COLUMNS]` in the output's type."""
    layout: gl.constexpr = stored(COLUMNS)
    value = gl.convert_layout(value.to(out.dtype.element_ty), layout)
    t = gl.expand_dims(row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
    n = gl.expand_dims(column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    gl.store(out + t.to(gl.int64) * stride + n, value, mask=(t < end_row) & (n < columns))


@gluon.jit
def _terms(of, expert, column, columns, w_rows, up_row, row_step, GATED: gl.constexpr):
    """Load scales or biases of 64 weight rows from `column` on, and of the other half's rows, in float32."""
    n = column + gl.arange(0, 64, layout=gl.BlockedLayout([1], [32], [4], [0]))
    at = expert.to(gl.int64) * w_rows + n * row_step
    further: gl.constexpr = 0 if GATED else 128  # without a gate the other half holds further columns
    first = gl.load(of + at, mask=n < columns, other=0.0).to(gl.float32)
    second = gl.load(of + (at + up_row), mask=n + further < columns, other=0.0).to(gl.float32)
    return first, second


@gluon.jit
def _apply(acc, token_scale, factor, shift):
    """Apply scales and biases to sums `[64, 64]`; None stands for scales that the sums include, or for no biases."""
    layout: gl.constexpr = gl.SliceLayout(0, common.accumulator(64))
    value = gl.convert_layout(acc, common.accumulator(64), assert_trivial=True)
    if factor is not None:
        token_scale = gl.convert_layout(token_scale, gl.SliceLayout(1, common.accumulator(64)), assert_trivial=True)
        value = common.scaled(value, token_scale, gl.convert_layout(factor, layout), False)
    if shift is not None:
        value += gl.expand_dims(gl.convert_layout(shift, layout), 0)
    return value


@gluon.jit
def _finish(first, second, token_scale, factor, other_factor, shift, other_shift, out, row, end_row, column,
                  columns, stride, EPILOGUE: gl.constexpr):
    """Apply scales and the activation to 64 columns of both halves, and store them."""
    value = _apply(first, token_scale, factor, shift)
    other = _apply(second, token_scale, other_factor, other_shift)
    if gated(EPILOGUE):
        _store(activate_gated(value, other, EPILOGUE), out, row, end_row, column, columns, stride, 64)
    else:
        _store(value, out, row, end_row, column, columns, stride, 64)
        _store(other, out, row, end_row, column + 128, columns, stride, 64)


@gluon.jit
def _quantise(
    first, second, out, out_scale, bias, expert, row, end_row, block, columns, stride, w_rows, up_row, scale_stride,
    ROUNDED: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr,
):
    """Activate and quantise a group of 128 columns to e4m3 codes with a scale per token.

    Activations are rounded to ROUNDED first, as `rows.requantise` reads them; that kernel divides exactly, this one
    multiplies by the inverse of the scale.
    """
    layout: gl.constexpr = common.accumulator(128)
    n = block * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, layout))
    t = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    inside = n < columns
    gate = gl.convert_layout(first, layout, assert_trivial=True)
    up = gl.convert_layout(second, layout, assert_trivial=True)
    if BIAS:
        at = expert.to(gl.int64) * w_rows + n
        gate += gl.expand_dims(gl.load(bias + at, mask=inside, other=0.0).to(gl.float32), 0)
        up += gl.expand_dims(gl.load(bias + at + up_row, mask=inside, other=0.0).to(gl.float32), 0)
    kind: gl.constexpr = gl.float16 if ROUNDED == "float16" else gl.bfloat16
    value = activate_gated(gate, up, EPILOGUE).to(kind).to(gl.float32)
    value = gl.where(gl.expand_dims(inside, 0), value, 0.0)
    top = gl.max(gl.abs(value), 1)
    scale = gl.where(top > LEAST, top * (1.0 / 448.0), 1.0)
    gl.store(out_scale + (block * scale_stride + t), scale, mask=t < end_row)
    code = (value * gl.expand_dims(1.0 / scale, 1)).to(gl.float8e4nv)
    rows: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0])
    code = gl.convert_layout(code, rows)
    t = gl.expand_dims(row + gl.arange(0, 64, layout=gl.SliceLayout(1, rows)), 1)
    n = gl.expand_dims(block * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, rows)), 0)
    gl.store(out + t.to(gl.int64) * stride + n, code, mask=(t < end_row) & (n < columns))


@gluon.jit
def _multiply(
    given, WG: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr, DEPENDENT: gl.constexpr,
    FOLLOWS: gl.constexpr, ROUNDED: gl.constexpr,
):
    """Run a computing warpgroup, which counts its finished items per expert if it quantises (ROUNDED)."""
    (
        w_buf, x_buf, ready, empty, info, full, free, done, x_scale, w_scale, bias, out, out_scale, steps, columns,
        stride, w_rows, up_row, row_step, scale_stride,
    ) = given
    GROUPED: gl.constexpr = scale_stride is not None
    SIGNALS: gl.constexpr = ROUNDED is not None
    INTEGERS: gl.constexpr = w_buf.dtype == gl.int8
    GATED: gl.constexpr = gated(EPILOGUE)
    OWN: gl.constexpr = 128 if GATED else 256
    BOXES: gl.constexpr = 1 if INTEGERS else 2
    w_view = reinterpret(w_buf, w_buf.dtype, [STAGES * BOXES, 256 // BOXES, STEP], common.operand())
    if DEPENDENT:
        if not FOLLOWS:
            gdc_wait()  # the preceding kernel writes the scales of tokens
        if WG == 0:
            gdc_launch_dependents()
    it = 0
    number = 0
    finished = -1
    expert, row, end_row, block = wide_copies.next_item(info, full, free, 0, SLOTS)
    while expert >= 0:
        row += 64 * WG
        if row < end_row:
            at = block * OWN
            # Scales (f, g) and biases (s, u) of both halves; 1 for the left 64 columns of each, 2 for the right ones.
            token_scale = None
            f1, g1, f2, g2 = None, None, None, None
            s1, u1, s2, u2 = None, None, None, None
            if not GROUPED:
                # Loaded before the products, so that an item does not end with waiting for them.
                t = row + gl.arange(0, 64, layout=gl.SliceLayout(1, common.accumulator(128)))
                token_scale = gl.load(x_scale + t, mask=t < end_row, other=0.0)
                f1, g1 = _terms(w_scale, expert, at, columns, w_rows, up_row, row_step, GATED)
                f2, g2 = _terms(w_scale, expert, at + 64, columns, w_rows, up_row, row_step, GATED)
            if BIAS and not SIGNALS:
                s1, u1 = _terms(bias, expert, at, columns, w_rows, up_row, row_step, GATED)
                s2, u2 = _terms(bias, expert, at + 64, columns, w_rows, up_row, row_step, GATED)
            if INTEGERS:
                acc = gl.zeros([64, 256], gl.int32, common.accumulator(128))
                acc = _steps(acc, it, steps, w_view, x_buf, ready, empty, WG, STAGES)
                first, second = gl.split(acc.reshape([64, 2, 128]).permute([0, 2, 1]))
            else:
                first_scale = w_scale
                second_scale = w_scale
                if GROUPED:
                    first_scale += common.step_scales(expert, block * OWN, w_rows, steps)
                    # Columns beyond the last row are multiplied, but not stored.
                    other_row = gl.minimum(block * OWN + up_row, w_rows - 1)
                    second_scale += common.step_scales(expert, other_row, w_rows, steps)
                first, second = _float_steps(it, steps, w_view, x_buf, ready, empty, x_scale, first_scale, second_scale,
                                             row, scale_stride, WG, STAGES)
            if SIGNALS and finished >= 0:  # the stores of the preceding item have completed by now
                wide_copies.signal(done, finished)
            if SIGNALS:
                _quantise(first, second, out, out_scale, bias, expert, row, end_row, block, columns, stride, w_rows,
                          up_row, scale_stride, ROUNDED, EPILOGUE, BIAS)
            else:
                one, one_right = gl.split(first.reshape([64, 2, 64]).permute([0, 2, 1]))
                two, two_right = gl.split(second.reshape([64, 2, 64]).permute([0, 2, 1]))
                _finish(one, two, token_scale, f1, g1, s1, u1, out, row, end_row, at, columns, stride, EPILOGUE)
                _finish(one_right, two_right, token_scale, f2, g2, s2, u2, out, row, end_row, at + 64, columns, stride,
                        EPILOGUE)
        else:
            if SIGNALS and finished >= 0:
                wide_copies.signal(done, finished)
            for i in range(steps):
                stage = (it + i) % STAGES
                mbarrier.wait(ready.index(stage), ((it + i) // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
        it += steps
        finished = expert
        number += 1
        expert, row, end_row, block = wide_copies.next_item(info, full, free, number, SLOTS)
    if SIGNALS and finished >= 0:
        wide_copies.signal(done, finished)


@gluon.jit(do_not_specialize=["steps", "blocks", "up_row", "needed"])
def w8a8_product_wide(
    first_desc, second_desc, x_desc, x_scale, w_scale, bias, out, out_scale, queue, done, needed, tiles, num_tiles,
    steps, blocks, columns, stride, w_rows, up_row, row_step, scale_stride,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr, FOLLOWS: gl.constexpr, ROUNDED: gl.constexpr,
):
    """Compute out[row] = x[row] @ W[expert of row].T with scales, or the activation of its halves.

    The arguments are those of `narrow.w8a8_product_narrow`, except:
        first_desc, second_desc: block `[1, 128, 128]`; x_desc: block `[64, 128]`.
        out: `[rows, columns]` with `stride`.
        tiles: tiles of 128 tokens, 64 for each of two warpgroups.
        w_rows, up_row: with `scale_stride` up_row is a multiple of 128 and row_step is 1.
        queue: int32 zero, counter of the work items that were taken after the first one of each program.
        done: int32 zeros `[experts]`, finished items of both warpgroups per expert, counted if ROUNDED.
        needed: count of `done` per tile after which an expert's tokens are ready; used if FOLLOWS.
        FOLLOWS: whether the preceding kernel is this one with the gate-up product, whose results are the tokens.
        ROUNDED: None, or the type (bfloat16, float16) to which activations are rounded before they are quantised: out
            gets their e4m3 codes, and out_scale, fp32 `[blocks, ..]` with `scale_stride`, a scale per 128 columns.
    """
    gl.static_assert(x_desc.dtype == gl.int8 or x_desc.dtype == gl.float8e4nv, "wgmma takes unsigned bytes as signed")
    gl.static_assert(first_desc.dtype == x_desc.dtype and second_desc.dtype == x_desc.dtype, "codes of one type")
    w_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 1, 128, STEP], common.weight_box())
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 64, STEP], common.operand())
    ready, empty = ring(STAGES, 1, 2)
    info, full, free = item_ring(SLOTS, 2)
    fence_async_shared()
    barrier()
    taken = (
        w_buf, x_buf, ready, empty, info, full, free, done, x_scale, w_scale, bias, out, out_scale, steps, columns,
        stride, w_rows, up_row, row_step, scale_stride,
    )
    copied = (
        first_desc, second_desc, x_desc, w_buf, x_buf, ready, empty, info, full, free, queue, done, needed, tiles,
        num_tiles, steps, blocks,
    )
    gl.warp_specialize(
        [
            (_multiply, (taken, 0, STAGES, EPILOGUE, BIAS, DEPENDENT, FOLLOWS, ROUNDED)),
            (_multiply, (taken, 1, STAGES, EPILOGUE, BIAS, DEPENDENT, FOLLOWS, ROUNDED)),
            (_copy, (copied, STAGES, EPILOGUE, DEPENDENT, FOLLOWS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
