"""Expert products of bytes with many tokens per expert: each warpgroup multiplies 64 tokens with 256 rows of weights.

At the rate of such tensor cores the L2 cache is as much a limit as they are, hence tiles as large as registers can
hold: two warpgroups share the 256 rows that a copy warp brings in. A warpgroup without tokens only returns
its buffers. Warpgroups may be several steps apart: while one finishes its tile the others multiply.

Sums of e4m3 products take 128 registers for all steps and 64 for a step and half of the rows, which one warpgroup adds
while the other multiplies.
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
from moeq_kernels.hopper.device.epilogue import activate_gated, gated
from moeq_kernels.hopper.w8a8.device import common

STEP = common.STEP


@gluon.constexpr_function
def stored(columns):
    """`[64, columns]` for stores: 8 neighbouring columns in a thread."""
    return gl.BlockedLayout([1, 8], [256 // columns, columns // 8], [4, 1], [1, 0])


# fmt: off
@gluon.jit
def _copy_weights(
    given, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, WARPGROUPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """A copy warp: two boxes of 128 rows for each step."""
    first_desc, second_desc, w_buf, ready, empty, tiles, num_tiles, steps, blocks = given
    GATED: gl.constexpr = gated(EPILOGUE)
    OWN: gl.constexpr = 128 if GATED else 256
    if DEPENDENT and GATED:
        gdc_wait()  # the tiles come from the kernel right before
    it = 0
    for index in range(gl.program_id(0), gl.load(num_tiles) * blocks, gl.num_programs(0)):
        expert, _, _, block = common.find_item(index, tiles, blocks, 64 * WARPGROUPS)
        for i in range(steps):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, 256 * STEP)
            tma_load(first_desc, [expert, block * OWN, i * STEP], bar, w_buf.index(2 * stage))
            tma_load(second_desc, [expert, block * OWN + (OWN - 128), i * STEP], bar, w_buf.index(2 * stage + 1))
            it += 1


@gluon.jit
def _copy_tokens(
    given, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """A copy warp: 64 tokens for each warpgroup that has any."""
    x_desc, x_buf, ready, empty, tiles, num_tiles, steps, blocks = given
    if DEPENDENT:
        gdc_wait()
    it = 0
    for index in range(gl.program_id(0), gl.load(num_tiles) * blocks, gl.num_programs(0)):
        _, row, end_row, _ = common.find_item(index, tiles, blocks, 64 * WARPGROUPS)
        left = end_row - row
        for i in range(steps):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            for w in gl.static_range(WARPGROUPS):
                is_last = (left <= 64 * (w + 1)) | (w == WARPGROUPS - 1)
                mbarrier.expect(bar, (w + 1) * 64 * STEP, pred=is_last & ((left > 64 * w) | (w == 0)))
            for w in gl.static_range(WARPGROUPS):
                needed = (left > 64 * w) | (w == 0)
                tma_load(x_desc, [row + 64 * w, i * STEP], bar, x_buf.index(stage * WARPGROUPS + w), pred=needed)
            it += 1


@gluon.jit
def _steps(acc, it, steps, w_view, x_view, ready, empty, WG: gl.constexpr, STAGES: gl.constexpr,
           WARPGROUPS: gl.constexpr):
    """All steps of an item; returns the sums."""
    for i in range(steps):
        stage = (it + i) % STAGES
        mbarrier.wait(ready.index(stage), ((it + i) // STAGES) & 1)
        tokens = x_view.index(stage * WARPGROUPS + WG)
        acc = warpgroup_mma(tokens, w_view.index(stage).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        # All but the last product are done: give back the stage before this one.
        mbarrier.arrive(empty.index((it + i + STAGES - 1) % STAGES), count=1, pred=i > 0)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((it + steps + STAGES - 1) % STAGES), count=1)
    return acc


@gluon.jit
def _add_half(acc, tokens, weights, scale, GROUPED: gl.constexpr):
    """acc `[64, 128]` and what one step of e4m3 codes adds to it, times the scale of each token if GROUPED."""
    part = gl.zeros([64, 128], gl.float32, common.accumulator(128))
    part = warpgroup_mma(tokens, weights.permute((1, 0)), part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    if GROUPED:
        part = part * gl.expand_dims(scale, 1)
    return acc + part


@gluon.jit
def _float_steps(it, steps, w_view, x_view, ready, empty, x_scale, first_scale, second_scale, row, scale_stride,
                 WG: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr):
    """All steps of an item of e4m3 codes; returns the sums of both halves.

    first_scale, second_scale: pointers to the scales of the first step where scales are of groups.
    """
    GROUPED: gl.constexpr = scale_stride is not None
    layout: gl.constexpr = common.accumulator(128)
    t = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    first = gl.zeros([64, 128], gl.float32, layout)
    second = gl.zeros([64, 128], gl.float32, layout)
    for i in range(steps):
        stage = (it + i) % STAGES
        scale = None
        other = None
        if GROUPED:
            token_scale = gl.load(x_scale + (i * scale_stride + t))
            scale = token_scale * gl.load(first_scale + i).to(gl.float32)
            other = token_scale * gl.load(second_scale + i).to(gl.float32)
        bar = ready.index(stage)
        phase = ((it + i) // STAGES) & 1
        mbarrier.wait(bar, phase)
        tokens = x_view.index(stage * WARPGROUPS + WG)
        first = _add_half(first, tokens, w_view.index(2 * stage), scale, GROUPED)
        # Without these the compiler begins the other product before it adds, in registers that there are not: LLVM
        # keeps sums in front of a wait for them, and ptxas in front of a branch.
        first = warpgroup_mma_wait(0, deps=(first,))
        mbarrier.wait(bar, phase)
        second = _add_half(second, tokens, w_view.index(2 * stage + 1), other, GROUPED)
        mbarrier.arrive(empty.index(stage), count=1)
    return first, second


@gluon.jit
def _half(acc, token_scale, w_scale, bias, at, inside, COLUMNS: gl.constexpr, BIAS: gl.constexpr,
          GROUPED: gl.constexpr):
    """Scaled sums `[64, COLUMNS]` of rows `at` of the weights (offsets of scales and biases)."""
    value = gl.convert_layout(acc, common.accumulator(COLUMNS), assert_trivial=True)
    if not GROUPED:
        value = common.scaled(value, token_scale, gl.load(w_scale + at, mask=inside, other=0.0).to(gl.float32), False)
    if BIAS:
        value += gl.expand_dims(gl.load(bias + at, mask=inside, other=0.0).to(gl.float32), 0)
    return value


@gluon.jit
def _store(value, out, row, end_row, column, columns, stride, COLUMNS: gl.constexpr):
    """Stores `[64, COLUMNS]` in the output's type."""
    layout: gl.constexpr = stored(COLUMNS)
    value = gl.convert_layout(value.to(out.dtype.element_ty), layout)
    t = gl.expand_dims(row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout)), 1)
    n = gl.expand_dims(column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout)), 0)
    gl.store(out + t.to(gl.int64) * stride + n, value, mask=(t < end_row) & (n < columns))


@gluon.jit
def _finish(
    first, second, out, x_scale, w_scale, bias, expert, row, end_row, column, columns, stride, w_rows, up_row, row_step,
    COLUMNS: gl.constexpr, CHUNK: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr, GROUPED: gl.constexpr,
):
    """Scales, activation and stores of both halves `[64, COLUMNS]`, CHUNK columns at a time to save registers."""
    GATED: gl.constexpr = gated(EPILOGUE)
    if COLUMNS > CHUNK:
        half: gl.constexpr = COLUMNS // 2
        first, first_right = gl.split(first.reshape([64, 2, half]).permute([0, 2, 1]))
        second, second_right = gl.split(second.reshape([64, 2, half]).permute([0, 2, 1]))
        _finish(first, second, out, x_scale, w_scale, bias, expert, row, end_row, column, columns, stride, w_rows,
                up_row, row_step, half, CHUNK, EPILOGUE, BIAS, GROUPED)
        _finish(first_right, second_right, out, x_scale, w_scale, bias, expert, row, end_row, column + half, columns,
                stride, w_rows, up_row, row_step, half, CHUNK, EPILOGUE, BIAS, GROUPED)
    else:
        layout: gl.constexpr = common.accumulator(COLUMNS)
        t = row + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
        token_scale = None
        if not GROUPED:
            token_scale = gl.load(x_scale + t, mask=t < end_row, other=0.0)
        n = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        at = expert.to(gl.int64) * w_rows + n * row_step
        value = _half(first, token_scale, w_scale, bias, at, n < columns, COLUMNS, BIAS, GROUPED)
        # Without a gate the second half holds the columns 128 further.
        beside: gl.constexpr = 0 if GATED else 128
        at += up_row
        other = _half(second, token_scale, w_scale, bias, at, n + beside < columns, COLUMNS, BIAS, GROUPED)
        if GATED:
            value = activate_gated(value, other, EPILOGUE)
            _store(value, out, row, end_row, column, columns, stride, COLUMNS)
        else:
            _store(value, out, row, end_row, column, columns, stride, COLUMNS)
            _store(other, out, row, end_row, column + 128, columns, stride, COLUMNS)


@gluon.jit
def _multiply(
    given, WG: gl.constexpr, STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """A multiplying warpgroup."""
    (
        w_buf, x_buf, ready, empty, x_scale, w_scale, bias, out, tiles, num_tiles, steps, blocks, columns, stride,
        w_rows, up_row, row_step, scale_stride,
    ) = given
    GATED: gl.constexpr = gated(EPILOGUE)
    GROUPED: gl.constexpr = scale_stride is not None
    INTEGERS: gl.constexpr = w_buf.dtype == gl.int8
    OWN: gl.constexpr = 128 if GATED else 256
    BOXES: gl.constexpr = 1 if INTEGERS else 2
    w_view = reinterpret(w_buf, w_buf.dtype, [STAGES * BOXES, 256 // BOXES, STEP], common.operand())
    CHUNK: gl.constexpr = 64
    if DEPENDENT:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    it = 0
    for index in range(gl.program_id(0), gl.load(num_tiles) * blocks, gl.num_programs(0)):
        expert, row, end_row, block = common.find_item(index, tiles, blocks, 64 * WARPGROUPS)
        row += 64 * WG
        if row < end_row:
            if INTEGERS:
                acc = gl.zeros([64, 256], gl.int32, common.accumulator(128))
                acc = _steps(acc, it, steps, w_view, x_buf, ready, empty, WG, STAGES, WARPGROUPS)
                first, second = gl.split(acc.reshape([64, 2, 128]).permute([0, 2, 1]))
            else:
                first_scale = w_scale
                second_scale = w_scale
                if GROUPED:
                    first_scale += common.step_scales(expert, block * OWN, w_rows, steps)
                    # What lies beyond the last row is multiplied, but not stored.
                    other_row = gl.minimum(block * OWN + up_row, w_rows - 1)
                    second_scale += common.step_scales(expert, other_row, w_rows, steps)
                first, second = _float_steps(it, steps, w_view, x_buf, ready, empty, x_scale, first_scale, second_scale,
                                             row, scale_stride, WG, STAGES, WARPGROUPS)
            _finish(first, second, out, x_scale, w_scale, bias, expert, row, end_row, block * OWN, columns, stride,
                    w_rows, up_row, row_step, 128, CHUNK, EPILOGUE, BIAS, GROUPED)
        else:
            for i in range(steps):
                stage = (it + i) % STAGES
                mbarrier.wait(ready.index(stage), ((it + i) // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
        it += steps


@gluon.jit(do_not_specialize=["steps", "blocks", "up_row"])
def w8a8_product_wide(
    first_desc, second_desc, x_desc, x_scale, w_scale, bias, out, tiles, num_tiles, steps, blocks, columns, stride,
    w_rows, up_row, row_step, scale_stride,
    STAGES: gl.constexpr, WARPGROUPS: gl.constexpr, REGISTERS: gl.constexpr,
    EPILOGUE: gl.constexpr, BIAS: gl.constexpr,
    DEPENDENT: gl.constexpr,
):
    """out[row] = x[row] @ W[expert of row].T with scales, or the activation of its halves.

    Args as of `narrow.w8a8_product_narrow`, except:
        first_desc, second_desc: block `[1, 128, 128]`; x_desc: block `[64, 128]`.
        out: `[rows, columns]` with `stride`.
        w_rows, up_row: with `scale_stride` up_row is a multiple of 128 and row_step is 1.
        WARPGROUPS: 2; a tile has 64 tokens for each.
    """
    gl.static_assert(x_desc.dtype == gl.int8 or x_desc.dtype == gl.float8e4nv, "wgmma takes unsigned bytes as signed")
    gl.static_assert(first_desc.dtype == x_desc.dtype and second_desc.dtype == x_desc.dtype, "codes of one type")
    w_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * 2, 1, 128, STEP], common.weight_box())
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * WARPGROUPS, 64, STEP], common.operand())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=2)
        mbarrier.init(empty.index(i), count=WARPGROUPS)
    fence_async_shared()
    barrier()
    gl.static_assert(WARPGROUPS == 2, "a partition is listed for each")
    taken = (
        w_buf, x_buf, ready, empty, x_scale, w_scale, bias, out, tiles, num_tiles, steps, blocks, columns, stride,
        w_rows, up_row, row_step, scale_stride,
    )
    weights = (first_desc, second_desc, w_buf, ready, empty, tiles, num_tiles, steps, blocks)
    tokens = (x_desc, x_buf, ready, empty, tiles, num_tiles, steps, blocks)
    gl.warp_specialize(
        [
            (_multiply, (taken, 0, STAGES, 2, EPILOGUE, BIAS, DEPENDENT)),
            (_multiply, (taken, 1, STAGES, 2, EPILOGUE, BIAS, DEPENDENT)),
            (_copy_weights, (weights, STAGES, EPILOGUE, 2, DEPENDENT)),
            (_copy_tokens, (tokens, STAGES, 2, DEPENDENT)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )


# fmt: on
