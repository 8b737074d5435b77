"""Wide W4A8 kernel: 4-bit words times e4m3 tokens. Words become 8-bit floats in registers, wgmma's left operand.

MXFP4 codes become e5m2, int4 codes e4m3. Programs take work items from a queue, and tiles have even heights, as in the
wide W4A16 kernel. Words are decoded once per tile, so tiles are large: two products, of a power of two of tokens and of
the others, use the same weights in registers. Tensor cores keep some 14 bits of the sums, a negligible error beside
that of e4m3 activations.

MXFP4's scales are folded into the exponents of weights (`fold`), so products need no scales. int4 codes are exact in
e4m3, but their scales are not. Sums are in units of the last group's scale: when the next group begins, they are
multiplied by the ratio of both scales, which takes fewer registers than separate sums per group.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.hopper.compat import barrier, reinterpret, tma_load
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.device.barriers import item_ring, ring
from moeq_kernels.hopper.w4a8.device import codes
from moeq_kernels.hopper.w4a16.device import common, layouts, wide_copies
from moeq_kernels.hopper.w8a8.device import common as bytes_common

STEP = bytes_common.STEP
#: Tokens per copy, and work items that are announced ahead.
BOX, SLOTS = gl.constexpr(32), gl.constexpr(4)
#: Lower bound of the scales of int4 groups, because sums are divided by them.
LEAST = gl.constexpr(2.0**-60)


@constexpr_function
def _weight_bytes(group, scale_bits):
    """Return the bytes of a step's words and scales."""
    scales = layouts.groups_of(128, group) * 128 * scale_bits // 8 if group else 0
    return 2 * (2 * 8 * 512 + scales)


@constexpr_function
def boxes(tokens):
    """Return how many boxes of tokens each of a tile's two products has; the first has a power of two of tokens."""
    main = wide_copies.main_height(tokens) // 32
    return main, tokens // 32 - main


@gluon.jit
def _load_words(w_desc, s_desc, w_buf, s_buf, bar, stage, expert, i, tile, slabs, groups, pair_tiles,
                GROUP: gl.constexpr):
    """Start to copy one step's words and scales."""
    for half in gl.static_range(2):
        at = tile + half * pair_tiles
        tma_load(w_desc, [expert * slabs + i * 8, at, 0], bar, w_buf.index(2 * stage + half))
        if GROUP:
            s_row = expert * groups + i * layouts.groups_of(128, GROUP)
            tma_load(s_desc, [s_row, at * 64], bar, s_buf.index(2 * stage + half))


@gluon.jit
def _load_rows(x_desc, x_buf, x_rest, bar, stage, row, left, i, TOKENS: gl.constexpr):
    """Start to copy one step's boxes that hold any tokens of the tile."""
    COUNTS: gl.constexpr = boxes(TOKENS)
    for b in gl.static_range(TOKENS // BOX):
        if b < COUNTS[0]:
            target = x_buf.index(stage * COUNTS[0] + b)
        else:
            target = x_rest.index(stage * COUNTS[1] + (b - COUNTS[0]))
        tma_load(x_desc, [row + b * BOX, i * STEP], bar, target, pred=left > b * BOX)


@gluon.jit
def _copy(given, TOKENS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, PAIRED: gl.constexpr,
          DEPENDENT: gl.constexpr):
    """Run the copy warp: take items, announce them, copy words, scales, tokens. It copies first words, then waits."""
    (
        w_desc, s_desc, x_desc, w_buf, s_buf, x_buf, x_rest, ready, empty, info, full, free, queue, tiles, num_tiles,
        steps, blocks, slabs, groups, pair_tiles,
    ) = given
    BYTES: gl.constexpr = _weight_bytes(GROUP, s_buf.dtype.primitive_bitwidth)
    it = 0
    number = 0
    items = gl.load(num_tiles) * blocks
    index = gl.program_id(0)
    while index < items:
        expert, row, end_row, block = common.find_tile(index, tiles, blocks)
        wide_copies.announce(info, full, free, number, expert, row, end_row, block, SLOTS, 1)
        number += 1
        index = gl.num_programs(0) + gl.atomic_add(queue, 1, sem="relaxed")
        tile = block * (2 if PAIRED else 4)
        left = end_row - row
        start = 0
        if DEPENDENT and it == 0:
            start = gl.minimum(STAGES, steps)
            for i in range(start):
                wide_copies.expect(ready.index(i), left, BYTES, TOKENS)
                _load_words(w_desc, s_desc, w_buf, s_buf, ready.index(i), i, expert, i, tile, slabs, groups, pair_tiles,
                            GROUP)
            gdc_wait()
            for i in range(start):
                _load_rows(x_desc, x_buf, x_rest, ready.index(i), i, row, left, i, TOKENS)
            it = start
        for i in range(start, steps):
            stage = it % STAGES
            mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(stage)
            wide_copies.expect(bar, left, BYTES, TOKENS)
            _load_words(w_desc, s_desc, w_buf, s_buf, bar, stage, expert, i, tile, slabs, groups, pair_tiles, GROUP)
            _load_rows(x_desc, x_buf, x_rest, bar, stage, row, left, i, TOKENS)
            it += 1
    wide_copies.announce(info, full, free, number, -1, 0, 0, 0, SLOTS, 1)


@gluon.jit
def _weights(w_view, s_view, stage, QUARTER: gl.constexpr, WG: gl.constexpr, TOKENS: gl.constexpr, KIND: gl.constexpr):
    """Decode a quarter of a step's weights."""
    words = w_view.index(stage).slice(2 * QUARTER, 2, dim=1).slice(WG * 512, 512, dim=2)
    words = words.load(layouts.words(True, 2, KIND))
    if KIND != "uint4":
        shifts = s_view.index(stage).slice((2 * QUARTER + WG) * 8, 8, dim=1)
        return codes.e2m1_operand(words, shifts.load(gl.SliceLayout(2, layouts.scales(True))), TOKENS,
                                  KIND == "e2m1-permuted")
    else:
        return codes.int4_operand(words, TOKENS)


@gluon.jit
def _step(acc, rest, unit, w_view, s_view, x, others, stage, left, WG: gl.constexpr, MAIN: gl.constexpr,
          OTHERS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr):
    """Add 128 rows of k to sums in units of `unit`, and return sums and unit.

    All words are decoded before the products. `left` is the number of the expert's groups from this step on.
    """
    SCALED: gl.constexpr = KIND == "uint4" and GROUP > 0
    PER: gl.constexpr = layouts.groups_of(128, GROUP) if SCALED else 1
    EACH: gl.constexpr = 4 // PER
    a = ()
    for q in gl.static_range(4):
        a += (_weights(w_view, s_view, stage, q, WG, MAIN, KIND),)
    for p in gl.static_range(PER):
        if SCALED:
            stored = s_view.index(stage).slice((2 * p + WG) * 8, 8, dim=1)
            stored = stored.load(gl.SliceLayout(2, layouts.scales(True))).to(gl.float32)
            scale = codes.row_scales(stored, MAIN)
            if p:  # the next expert's scales follow the expert's last group
                scale = gl.where(left > p, scale, unit)
            scale = gl.where(gl.abs(scale) < LEAST, LEAST, scale)
            ratio = unit * epilogue.reciprocal(scale)
            unit = scale
            acc = acc * gl.expand_dims(ratio, 1)
            if OTHERS:
                rest = rest * gl.expand_dims(_of(ratio, OTHERS), 1)
        for q in gl.static_range(p * EACH, p * EACH + EACH):
            acc = warpgroup_mma(a[q], x.slice(32 * q, 32, dim=1).permute((1, 0)), acc, is_async=True)
            if OTHERS:
                same = gl.convert_layout(a[q], codes.left_operand(OTHERS), assert_trivial=True)
                rest = warpgroup_mma(same, others.slice(32 * q, 32, dim=1).permute((1, 0)), rest, is_async=True)
        if OTHERS:
            acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(0, deps=(acc,))
    return acc, rest, unit


@gluon.jit
def _of(rows, TOKENS: gl.constexpr):
    """Convert values per row to the layout of sums of TOKENS tokens."""
    return gl.convert_layout(rows, gl.SliceLayout(1, bytes_common.accumulator(TOKENS)), assert_trivial=True)


@gluon.jit
def _token_scales(x_scale, row, end_row, TOKENS: gl.constexpr):
    """Load the scales of TOKENS rows, at most one per thread."""
    t = row + gl.arange(0, TOKENS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return gl.load(x_scale + t, mask=t < end_row, other=0.0)


@gluon.jit
def _store(acc, token_scale, factor, shift, out, row, end_row, column, up, columns, stride, expert, packed,
           TOKENS: gl.constexpr, EPILOGUE: gl.constexpr):
    """Apply scales, biases and the activation to `[128, TOKENS]`, and store it."""
    token_scale = gl.convert_layout(token_scale, gl.SliceLayout(0, bytes_common.accumulator(TOKENS)))
    acc = acc * gl.expand_dims(token_scale, 0)
    acc = gl.convert_layout(acc, layouts.accumulator(TOKENS), assert_trivial=True)
    rows: gl.constexpr = gl.SliceLayout(1, layouts.accumulator(TOKENS))
    acc = acc * gl.expand_dims(gl.convert_layout(factor, rows, assert_trivial=True), 1)
    if shift is not None:
        acc = acc + gl.expand_dims(gl.convert_layout(shift, rows, assert_trivial=True), 1)
    common.store_chunks(
        acc, out, row, end_row, column, up, columns, stride, None, None, True, expert, packed, EPILOGUE, True, TOKENS,
        min(TOKENS, 64),
    )


@gluon.jit
def _item(
    it, w_view, s_view, x_buf, x_rest, ready, empty, x_scale, factor, bias, out, expert, row, end_row, tile, steps,
    groups, columns, stride, packed, pair_tiles, WG: gl.constexpr, NOW: gl.constexpr, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr, EPILOGUE: gl.constexpr,
):
    """Compute one warpgroup's part of an item, with NOW of the TOKENS columns of the buffers."""
    COUNTS: gl.constexpr = boxes(TOKENS)
    PER: gl.constexpr = layouts.groups_of(128, GROUP)
    MAIN: gl.constexpr = wide_copies.main_height(NOW)
    OTHERS: gl.constexpr = NOW - MAIN
    MOST: gl.constexpr = wide_copies.main_height(TOKENS)
    EACH: gl.constexpr = MOST // MAIN
    x_view = reinterpret(x_buf, x_buf.dtype, [STAGES * EACH, MAIN, STEP], bytes_common.operand())
    # Tokens of the second product follow those of the first, or lie in buffers of their own.
    others_view = x_view
    FACTOR: gl.constexpr = (COUNTS[1] * BOX if NOW > MOST else MOST) // max(OTHERS, BOX)
    AT: gl.constexpr = 0 if NOW > MOST else MAIN // max(OTHERS, BOX)
    if OTHERS:
        buffer = x_rest if NOW > MOST else x_buf
        others_view = reinterpret(buffer, x_buf.dtype, [STAGES * FACTOR, OTHERS, STEP], bytes_common.operand())
    acc = gl.zeros([128, MAIN], gl.float32, bytes_common.accumulator(MAIN))
    rest = acc
    if OTHERS:
        rest = gl.zeros([128, OTHERS], gl.float32, bytes_common.accumulator(OTHERS))
    unit = gl.full([128], 1.0, gl.float32, gl.SliceLayout(1, bytes_common.accumulator(MAIN)))
    column = (tile + WG) * 64
    up = (tile + WG + pair_tiles) * 64
    # Loaded before the products, so that an item does not end with waiting for them.
    scale = _token_scales(x_scale, row, end_row, MAIN)
    rest_scale = scale
    if OTHERS:
        rest_scale = _token_scales(x_scale, row + MAIN, end_row, OTHERS)
    place, inside = common.row_places(column, up, expert, packed, True, MAIN)
    row_factor = unit
    if factor is not None:
        row_factor = gl.load(factor + place, mask=inside, other=0.0).to(gl.float32)
    shift = None
    if bias is not None:
        shift = gl.load(bias + place, mask=inside, other=0.0).to(gl.float32)
    for i in range(steps):
        stage = it % STAGES
        mbarrier.wait(ready.index(stage), (it // STAGES) & 1)
        x = x_view.index(stage * EACH)
        others = x
        if OTHERS:
            others = others_view.index(stage * FACTOR + AT)
        acc, rest, unit = _step(
            acc, rest, unit, w_view, s_view, x, others, stage, groups - i * PER, WG, MAIN, OTHERS, KIND, GROUP
        )
        mbarrier.arrive(empty.index(stage), count=1)
        it += 1
    if factor is None:
        row_factor = unit
    _store(acc, scale, row_factor, shift, out, row, end_row, column, up, columns, stride, expert, packed, MAIN,
           EPILOGUE)
    if OTHERS:
        _store(rest, rest_scale, row_factor, shift, out, row + MAIN, end_row, column, up, columns, stride, expert,
               packed, OTHERS, EPILOGUE)
    return it


@gluon.jit
def _multiply(given, WG: gl.constexpr, TOKENS: gl.constexpr, STAGES: gl.constexpr, KIND: gl.constexpr,
              GROUP: gl.constexpr, EPILOGUE: gl.constexpr, PAIRED: gl.constexpr, DEPENDENT: gl.constexpr):
    """Run a computing warpgroup: 128 weight rows, 64 of each half of a pair."""
    (
        w_buf, s_buf, x_buf, x_rest, ready, empty, info, full, free, x_scale, factor, bias, out, steps, groups, columns,
        stride, packed, pair_tiles,
    ) = given
    HEIGHTS: gl.constexpr = wide_copies.heights(TOKENS)
    w_view = reinterpret(w_buf, gl.uint8, [STAGES, 2, 8, 2 * 512], layouts.plain_shared())
    PER: gl.constexpr = layouts.groups_of(128, GROUP)
    s_view = reinterpret(s_buf, s_buf.dtype, [STAGES, 2, PER * 2 * 8, 8], layouts.plain_shared())
    if DEPENDENT:
        gdc_wait()  # the preceding kernel writes the scales of tokens
        if WG == 0:
            gdc_launch_dependents()
    it = 0
    number = 0
    expert, row, end_row, block = wide_copies.next_item(info, full, free, 0, SLOTS)
    while expert >= 0:
        tile = block * (2 if PAIRED else 4)
        left = end_row - row
        for h in gl.static_range(len(HEIGHTS)):
            if (left <= HEIGHTS[h]) & (h == 0 or left > HEIGHTS[h - 1]):
                it = _item(
                    it, w_view, s_view, x_buf, x_rest, ready, empty, x_scale, factor, bias, out, expert, row, end_row,
                    tile, steps, groups, columns, stride, packed, pair_tiles, WG, HEIGHTS[h], TOKENS, STAGES, KIND,
                    GROUP, EPILOGUE,
                )
        number += 1
        expert, row, end_row, block = wide_copies.next_item(info, full, free, number, SLOTS)


@gluon.jit(do_not_specialize=["steps", "blocks", "slabs", "groups", "pair_tiles", "packed"])
def w4a8_product_wide(
    w_desc, s_desc, x_desc, x_scale, factor, bias, out, queue, tiles, num_tiles, steps, blocks, slabs, groups,
    pair_tiles, columns, stride, packed,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr, KIND: gl.constexpr, GROUP: gl.constexpr,
    EPILOGUE: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Compute out[row] = epilogue(x[row] @ W[expert of row].T), see `epilogue.Epilogue`.

    Args:
        w_desc: words int32 `[E K / 16, N / 64, 128]`, block `[8, 2, 128]`.
        s_desc: uint8 shifts (int4: 16-bit scales) of groups in Marlin's order `[E groups, N]`, block `[.., 128]`.
        x_desc: e4m3 tokens `[rows, k]` sorted by expert, k in the order of words, block `[32, 128]`.
        x_scale: fp32 `[rows]`.
        factor: `[E, packed]` in Marlin's 32-column order: fp32 factors of `fold`, or int4's scales of output features;
            None if groups have scales.
        bias: `[E, packed]` in the same order, or None.
        out: `[rows, columns]` with `stride`.
        queue: int32 zero, counter of the work items that were taken after the first one of each program.
        tiles, num_tiles: int32 `[T, 8]` and `[1]` of `device.routing`; heights are multiples of 32 up to TOKENS.
        steps: number of steps of 128 of k.
        blocks: number of blocks of 128 columns if gated and not interleaved, otherwise of 256 packed columns.
        slabs: number of slabs of 16 rows of k per expert.
        groups: number of groups along k per expert.
        pair_tiles: distance, in tiles of 64 columns, between both halves of a pair.
        TOKENS: token rows per tile: 64 or 160.
        REGISTERS: registers per thread of the computing warpgroups.
        KIND, GROUP: `e2m1` or `e2m1-permuted` and 32, or `uint4` and the codes that share a scale (0 for one scale per
            feature).
        DEPENDENT: whether the kernel starts before the preceding one has ended.
    """
    PAIRED: gl.constexpr = epilogue.gated(EPILOGUE) and not epilogue.interleaved(EPILOGUE)
    COUNTS: gl.constexpr = boxes(TOKENS)
    w_buf = gl.allocate_shared_memory(gl.int32, [STAGES * 2, 8, 2, 128], layouts.word_buffer())
    s_shape: gl.constexpr = [STAGES * 2, layouts.groups_of(128, GROUP), 128]
    s_layout: gl.constexpr = layouts.scale_buffer(s_desc.dtype.primitive_bitwidth)
    s_buf = gl.allocate_shared_memory(s_desc.dtype, s_shape, s_layout)
    x_buf = gl.allocate_shared_memory(x_desc.dtype, [STAGES * COUNTS[0], 32, STEP], bytes_common.operand())
    x_rest = x_buf
    if COUNTS[1]:
        x_rest = gl.allocate_shared_memory(x_desc.dtype, [STAGES * COUNTS[1], 32, STEP], bytes_common.operand())
    ready, empty = ring(STAGES, 1, 2)
    info, full, free = item_ring(SLOTS, 2)
    fence_async_shared()
    barrier()
    taken = (
        w_buf, s_buf, x_buf, x_rest, ready, empty, info, full, free, x_scale, factor, bias, out, steps, groups, columns,
        stride, packed, pair_tiles,
    )
    copied = (
        w_desc, s_desc, x_desc, w_buf, s_buf, x_buf, x_rest, ready, empty, info, full, free, queue, tiles, num_tiles,
        steps, blocks, slabs, groups, pair_tiles,
    )
    gl.warp_specialize(
        [
            (_multiply, (taken, 0, TOKENS, STAGES, KIND, GROUP, EPILOGUE, PAIRED, DEPENDENT)),
            (_multiply, (taken, 1, TOKENS, STAGES, KIND, GROUP, EPILOGUE, PAIRED, DEPENDENT)),
            (_copy, (copied, TOKENS, STAGES, GROUP, PAIRED, DEPENDENT)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
