"""Narrow W8A8 kernel, for few tokens per expert: Y^T = W X^T, with weights as wgmma's 64-row operand.

A tile then has 8 to 128 tokens. Reading weights takes the time, so bytes in flight decide: one warp copies weights as
far ahead as shared memory allows, across work items, and in the down product before the preceding kernel has ended; a
second warp copies tokens.
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

from moeq_kernels.device.caching import EVICT_LAST
from moeq_kernels.hopper.compat import barrier, reinterpret, tma_load
from moeq_kernels.hopper.device.barriers import ring
from moeq_kernels.hopper.device.epilogue import activate_gated, gated
from moeq_kernels.hopper.w8a8.device import common

STEP = common.STEP


@gluon.jit
def _items(tiles, num_tiles, rows, parts, DIRECT: gl.constexpr):
    """Return the number of work items."""
    if DIRECT:
        return rows * parts
    else:
        return gl.load(num_tiles) * parts


@gluon.jit
def _find(index, tiles, num_tiles, parts, experts, known, TOKENS: gl.constexpr, DIRECT: gl.constexpr):
    """Return expert, first row, end row and part of a work item; see `w8a8_product_narrow`."""
    if DIRECT:
        pair = index // parts
        chosen = gl.load(tiles + pair).to(gl.int32)
        there = (chosen >= 0) & (chosen < known)
        if num_tiles is not None:
            chosen = gl.load(num_tiles + gl.where(there, chosen, 0)).to(gl.int32)
            there = there & (chosen >= 0) & (chosen < experts)
        return gl.where(there, chosen, 0), pair, pair + there.to(gl.int32), index - pair * parts
    else:
        return common.find_item(index, tiles, parts, TOKENS)


@gluon.jit
def _copy_weights(
    given, TOKENS: gl.constexpr, STAGES: gl.constexpr, EPILOGUE: gl.constexpr, WARPGROUPS: gl.constexpr,
    DIRECT: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Run the copy warp of weights: two boxes of 64 rows per warpgroup and step."""
    (
        first_desc, second_desc, w_buf, ready, empty, tiles, num_tiles, steps, blocks, splits, rows, experts, known,
    ) = given
    GATED: gl.constexpr = gated(EPILOGUE)
    OWN: gl.constexpr = 64 if GATED else 128
    if DEPENDENT and GATED and not DIRECT:
        gdc_wait()  # the preceding kernel writes the tiles
    it = 0
    for index in range(gl.program_id(0), _items(tiles, num_tiles, rows, blocks * splits, DIRECT), gl.num_programs(0)):
        expert, _, _, part = _find(index, tiles, num_tiles, blocks * splits, experts, known, TOKENS, DIRECT)
        first, last, _ = common.share(part, splits, steps)
        column = part // splits * (OWN * WARPGROUPS)
        for i in range(first, last):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            mbarrier.expect(bar, WARPGROUPS * 128 * STEP)
            for w in gl.static_range(WARPGROUPS):
                slot = (stage * WARPGROUPS + w) * 2
                at = column + OWN * w
                tma_load(first_desc, [expert, at, i * STEP], bar, w_buf.index(slot))
                tma_load(second_desc, [expert, at + (OWN - 64), i * STEP], bar, w_buf.index(slot + 1))
            it += 1


@gluon.jit
def _copy_tokens(
    given, TOKENS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, DIRECT: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Run the copy warp of tokens: the boxes of BOX tokens that hold any tokens of the tile."""
    x_desc, x_buf, ready, empty, tiles, num_tiles, steps, blocks, splits, rows, experts, known = given
    BOXES: gl.constexpr = TOKENS // BOX
    if DEPENDENT:
        gdc_wait()
    it = 0
    for index in range(gl.program_id(0), _items(tiles, num_tiles, rows, blocks * splits, DIRECT), gl.num_programs(0)):
        _, row, end_row, part = _find(index, tiles, num_tiles, blocks * splits, experts, known, TOKENS, DIRECT)
        first, last, _ = common.share(part, splits, steps)
        left = end_row - row
        for i in range(first, last):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            for b in gl.static_range(BOXES):
                is_last = (left <= (b + 1) * BOX) | (b == BOXES - 1)
                mbarrier.expect(bar, (b + 1) * BOX * STEP, pred=is_last & ((left > b * BOX) | (b == 0)))
            for b in gl.static_range(BOXES):
                needed = (left > b * BOX) | (b == 0)
                tma_load(x_desc, [row + b * BOX, i * STEP], bar, x_buf.index(stage * BOXES + b), pred=needed)
            it += 1


@gluon.jit
def _scales(w_scale, bias, expert, n, rows, inside, HAS_BIAS: gl.constexpr, GROUPED: gl.constexpr):
    """Load scales (unless GROUPED) and biases of rows n of an expert's `rows` weight rows."""
    at = expert.to(gl.int64) * rows + n
    if GROUPED:
        scale = gl.zeros_like(at).to(gl.float32)
    else:
        scale = gl.load(w_scale + at, mask=inside, other=0.0).to(gl.float32)
    shift = scale
    if HAS_BIAS:
        shift = gl.load(bias + at, mask=inside, other=0.0).to(gl.float32)
    return scale, shift


@gluon.jit
def _add_step(acc, weights, tokens, empty, row_scale, token_scale, GROUPED: gl.constexpr):
    """Add one step of e4m3 codes to acc, with both scales if GROUPED."""
    part = gl.zeros([acc.shape[0], acc.shape[1]], gl.float32, common.accumulator(acc.shape[1]))
    part = warpgroup_mma(weights, tokens, part, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=(part,))
    mbarrier.arrive(empty, count=1)
    if GROUPED:
        part = part * gl.expand_dims(row_scale, 1) * gl.expand_dims(token_scale, 0)
    return acc + part


@gluon.jit
def _multiply(
    given, WG: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, WARPGROUPS: gl.constexpr,
    EPILOGUE: gl.constexpr, BIAS: gl.constexpr, DIRECT: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Run a computing warpgroup: 128 weight rows, or 64 of gate and 64 of up."""
    (
        w_buf, x_buf, ready, empty, x_scale, w_scale, bias, out, tiles, num_tiles, steps, blocks, splits, rows, columns,
        stride, w_rows, up_row, row_step, experts, known, scale_stride,
    ) = given
    GATED: gl.constexpr = gated(EPILOGUE)
    GROUPED: gl.constexpr = scale_stride is not None
    INTEGERS: gl.constexpr = w_buf.dtype == gl.int8
    OWN: gl.constexpr = 64 if GATED else 128
    wide: gl.constexpr = common.accumulator(TOKENS)
    w_view = reinterpret(w_buf, w_buf.dtype, [STAGES * WARPGROUPS, 128, STEP], common.operand())
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES, TOKENS, STEP], common.operand())
    n = gl.arange(0, OWN, layout=gl.SliceLayout(1, wide))
    t = gl.arange(0, TOKENS, layout=gl.SliceLayout(0, wide))
    if DEPENDENT:
        gdc_wait()
        if WG == 0:
            gdc_launch_dependents()
    it = 0
    for index in range(gl.program_id(0), _items(tiles, num_tiles, rows, blocks * splits, DIRECT), gl.num_programs(0)):
        expert, row, end_row, part = _find(index, tiles, num_tiles, blocks * splits, experts, known, TOKENS, DIRECT)
        first, last, number = common.share(part, splits, steps)
        column = part // splits * (OWN * WARPGROUPS) + OWN * WG
        inside = column + n < columns
        present = row + t < end_row
        scale, shift = _scales(w_scale, bias, expert, (column + n) * row_step, w_rows, inside, BIAS, GROUPED)
        up_scale = scale
        up_shift = shift
        if GATED:
            up_scale, up_shift = _scales(
                w_scale, bias, expert, (column + n) * row_step + up_row, w_rows, inside, BIAS, GROUPED
            )
        if GROUPED:
            both = gl.arange(0, 128, layout=gl.SliceLayout(1, wide))
            own = column + (both & (OWN - 1))
            block = common.step_scales(expert, own * row_step + both // OWN * up_row, w_rows, steps)
        else:
            token_scale = gl.load(x_scale + row + t, mask=present, other=0.0)

        acc = gl.zeros([128, TOKENS], gl.int32 if INTEGERS else gl.float32, wide)
        for i in range(first, last):
            stage = it % STAGES
            if GROUPED:
                row_scale = gl.load(w_scale + block + i, mask=own < columns, other=0.0).to(gl.float32)
                token_scale = gl.load(x_scale + i * scale_stride + row + t, mask=present, other=0.0)
            mbarrier.wait(ready.index(stage), (it // STAGES) & 1)
            weights = w_view.index(stage * WARPGROUPS + WG)
            tokens = x_view.index(stage).permute((1, 0))
            if INTEGERS:
                acc = warpgroup_mma(weights, tokens, acc, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                # All but the last product are done, so the preceding stage is free.
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=i > first)
            elif GROUPED:
                acc = _add_step(acc, weights, tokens, empty.index(stage), row_scale, token_scale, True)
            else:
                acc = _add_step(acc, weights, tokens, empty.index(stage), None, None, False)
            it += 1
        if INTEGERS:
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)

        target = out + gl.expand_dims((row + t).to(gl.int64) * stride, 0) + gl.expand_dims(column + n, 1)
        mask = gl.expand_dims(inside, 1) & gl.expand_dims(present, 0)
        target += number.to(gl.int64) * rows * stride
        if GATED:
            gate, up = gl.split(acc.reshape([2, 64, TOKENS]).permute([1, 2, 0]))
            gate = gl.convert_layout(gate, wide, assert_trivial=True)
            up = gl.convert_layout(up, wide, assert_trivial=True)
            if SPLIT:
                gl.store(target, gate, mask=mask, eviction_policy=EVICT_LAST)
                gl.store(target + columns, up, mask=mask, eviction_policy=EVICT_LAST)
            else:
                if not GROUPED:
                    gate = common.scaled(gate, scale, token_scale, True)
                    up = common.scaled(up, up_scale, token_scale, True)
                if BIAS:
                    gate += gl.expand_dims(shift, 1)
                    up += gl.expand_dims(up_shift, 1)
                value = activate_gated(gate, up, EPILOGUE)
                gl.store(target, value.to(out.dtype.element_ty), mask=mask, eviction_policy=EVICT_LAST)
        else:
            value = acc
            if not GROUPED:
                value = common.scaled(acc, scale, token_scale, True)
            if BIAS:
                value += gl.expand_dims(gl.where(number == 0, shift, 0.0), 1)
            gl.store(target, value.to(out.dtype.element_ty), mask=mask, eviction_policy=EVICT_LAST)


@gluon.jit(do_not_specialize=["steps", "blocks", "splits", "rows", "up_row", "experts", "known"])
def w8a8_product_narrow(
    first_desc, second_desc, x_desc, x_scale, w_scale, bias, out, tiles, num_tiles, steps, blocks, splits, rows,
    columns, stride, w_rows, up_row, row_step, experts, known, scale_stride,
    TOKENS: gl.constexpr, BOX: gl.constexpr, STAGES: gl.constexpr, SPLIT: gl.constexpr, WARPGROUPS: gl.constexpr,
    REGISTERS: gl.constexpr, EPILOGUE: gl.constexpr, BIAS: gl.constexpr, DIRECT: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Compute out[row] = x[row] @ W[expert of row].T with scales, or the activation of its halves.

    Args:
        first_desc, second_desc: weights `[E, rows, k]` of int8 or e4m3, block `[1, 64, 128]`: gate and up if gated,
            otherwise twice the same.
        x_desc: tokens `[rows, k]` of the same type sorted by expert, block `[BOX, 128]`.
        x_scale: fp32 `[rows]`, or `[steps, ..]` with `scale_stride`.
        w_scale, bias: `[E, w_rows]`; gate n is row `n * row_step`, and its up row follows at distance `up_row`. With
            `scale_stride` w_scale is `[E, ceil(w_rows / 128), steps]`, a scale per block of 128 x 128.
        out: `[rows, ..]` with `stride`; `[splits, rows, ..]` without a gate; if gated and SPLIT, int32 or float32 sums
            `[splits, rows, 2 * columns]`, which include scales of groups but no others.
        tiles, num_tiles: int32 `[T, 8]` and `[1]` of `device.routing`. With DIRECT: the chosen experts `[rows]`, and
            the expert map or None; every row is a tile, and weights need not wait for routing.
        experts, known: number of local experts, and of experts that routing may name (DIRECT).
        scale_stride: stride between scales of groups; None if a row has one scale.
        steps: number of steps of 128 of k.
        blocks: number of blocks of columns.
        splits: number of work items among which the k of a tile is divided.
        columns: number of columns of out, or of each half if gated and SPLIT.
        TOKENS: token rows per tile.
        BOX: tokens per copy.
        EPILOGUE: operations after the product, see `epilogue.Epilogue`.
        WARPGROUPS: number of computing warpgroups (1 or 2), of 128 weight rows each.
        REGISTERS: registers per thread of these warpgroups.
        DEPENDENT: whether the kernel starts before the preceding one has ended.
    """
    gl.static_assert(x_desc.dtype == gl.int8 or x_desc.dtype == gl.float8e4nv, "wgmma takes unsigned bytes as signed")
    gl.static_assert(first_desc.dtype == x_desc.dtype and second_desc.dtype == x_desc.dtype, "codes of one type")
    w_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * WARPGROUPS * 2, 1, 64, STEP], common.weight_box())
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * (TOKENS // BOX), BOX, STEP], common.operand())
    ready, empty = ring(STAGES, 2, WARPGROUPS)
    fence_async_shared()
    barrier()
    taken = (
        w_buf, x_buf, ready, empty, x_scale, w_scale, bias, out, tiles, num_tiles, steps, blocks, splits, rows, columns,
        stride, w_rows, up_row, row_step, experts, known, scale_stride,
    )
    weights = (
        first_desc, second_desc, w_buf, ready, empty, tiles, num_tiles, steps, blocks, splits, rows, experts, known,
    )
    tokens = (x_desc, x_buf, ready, empty, tiles, num_tiles, steps, blocks, splits, rows, experts, known)
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (_multiply, (taken, 0, TOKENS, STAGES, SPLIT, 1, EPILOGUE, BIAS, DIRECT, DEPENDENT)),
                (_copy_weights, (weights, TOKENS, STAGES, EPILOGUE, 1, DIRECT, DEPENDENT)),
                (_copy_tokens, (tokens, TOKENS, BOX, STAGES, DIRECT, DEPENDENT)),
            ],
            [1, 1],
            [24, 24],
        )
    else:
        gl.static_assert(WARPGROUPS == 2)
        gl.warp_specialize(
            [
                (_multiply, (taken, 0, TOKENS, STAGES, SPLIT, 2, EPILOGUE, BIAS, DIRECT, DEPENDENT)),
                (_multiply, (taken, 1, TOKENS, STAGES, SPLIT, 2, EPILOGUE, BIAS, DIRECT, DEPENDENT)),
                (_copy_weights, (weights, TOKENS, STAGES, EPILOGUE, 2, DIRECT, DEPENDENT)),
                (_copy_tokens, (tokens, TOKENS, BOX, STAGES, DIRECT, DEPENDENT)),
            ],
            [4, 1, 1],
            [REGISTERS, 24, 24],
        )
