"""Copies and multiplications of a step of k, for kernels of one warpgroup and 256 output rows (map A, `layouts`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from moeq_kernels.hopper.compat import reinterpret, tma_load
from moeq_kernels.hopper.w4a16.device import common, layouts, weights


@constexpr_function
def weight_bytes(step, group, kind, scale_bits):
    """Return the bytes of a step's words and scales."""
    scales = 2 * layouts.groups_of(step, group) * 128 * scale_bits // 8 if group else 0
    return 32 * step * layouts.bits(kind) + scales


@constexpr_function
def span(step, group):
    """Return the rows of k within a step that share a scale."""
    return min(group, step)


@gluon.jit
def buffers(s_desc, SLOTS: gl.constexpr, STEP: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Allocate shared memory for words and scales of SLOTS steps."""
    s_shape: gl.constexpr = [SLOTS * 2, layouts.groups_of(STEP, GROUP), 128]
    w_buf = common.word_buffers(SLOTS, STEP, 2, KIND)
    s_layout: gl.constexpr = layouts.scale_buffer(s_desc.dtype.primitive_bitwidth)
    return w_buf, gl.allocate_shared_memory(s_desc.dtype, s_shape, s_layout)


@gluon.jit
def token_buffer(SLOTS: gl.constexpr, STEP: gl.constexpr, TOKENS: gl.constexpr, dtype: gl.constexpr):
    """Allocate shared memory for tokens of SLOTS steps."""
    return gl.allocate_shared_memory(dtype, [SLOTS * STEP // 64, TOKENS, 64], layouts.token_buffer())


@gluon.jit
def views(w_buf, s_buf, SLOTS: gl.constexpr, STEP: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Reinterpret the shared memory of words and scales as `multiply` reads it."""
    s_shape: gl.constexpr = [SLOTS, 2, layouts.groups_of(STEP, GROUP) * 16, 8]
    w_view = common.word_views(w_buf, SLOTS, STEP, 2, KIND)
    return w_view, reinterpret(s_buf, s_buf.dtype, s_shape, layouts.plain_shared())


@gluon.jit
def load_weights(
    step, slot, bar, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, pair_tiles, STEP: gl.constexpr,
    GROUP: gl.constexpr, KIND: gl.constexpr, pred=True,
):
    """Start to copy a step's words and scales if `pred`; the expert begins at w_row of words and s_row of scales."""
    common.copy_words(w_desc, w_buf, bar, slot, w_row, step, tile, pair_tiles, STEP, KIND, pred)
    if GROUP:
        at = s_row + (step * STEP) // GROUP
        tma_load(s_desc, [at, tile * 64], bar, s_buf.index(2 * slot), pred=pred)
        tma_load(s_desc, [at, (tile + pair_tiles) * 64], bar, s_buf.index(2 * slot + 1), pred=pred)


@gluon.jit
def load_tokens(step, slot, bar, x_desc, x_buf, row, STEP: gl.constexpr, pred=True):
    """Start to copy a step's tokens if `pred`."""
    for half in gl.static_range(STEP // 64):
        tma_load(x_desc, [row, step * STEP + 64 * half], bar, x_buf.index(STEP // 64 * slot + half), pred=pred)


@gluon.jit
def _slab_scales(scales, SLAB: gl.constexpr, LAYOUT: gl.constexpr):
    """Load the scales of slabs SLAB and SLAB + 1 of a step; a slab is 16 rows of k."""
    return scales.slice(SLAB * 16, 16, dim=1).load(LAYOUT), scales.slice(SLAB * 16 + 16, 16, dim=1).load(LAYOUT)


@gluon.jit
def scales_and_zeros(
    scales, zero, z_row, groups, zero_words, tile, pair_tiles, k, SUB: gl.constexpr, ROWS: gl.constexpr,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr,
):
    """Load scales and zero points of the lower and the upper half of ROWS rows of k.

    The step begins at row k; the rows begin SUB * ROWS rows later. The results are arguments of `weights.step_operand`.
    """
    first: gl.constexpr = SUB * ROWS // GROUP if GROUP else 0
    second: gl.constexpr = (SUB * ROWS + ROWS - 32) // GROUP if GROUP else 0
    layout: gl.constexpr = gl.SliceLayout(2, layouts.scales(False))
    scale1 = 0
    scale2 = 0
    if GROUP == 16:  # every slab of words has a scale of its own
        scale1 = _slab_scales(scales, ROWS // 16 * SUB, layout)
        scale2 = scale1
        if ROWS == 64:
            scale2 = _slab_scales(scales, ROWS // 16 * SUB + 2, layout)
    elif GROUP:
        scale1 = scales.slice(first * 16, 16, dim=1).load(layout)
        scale2 = scale1
        if first != second:
            scale2 = scales.slice(second * 16, 16, dim=1).load(layout)
    zero1 = 0
    zero2 = 0
    if ZEROS:
        row = z_row + common.group_at(k, first, groups, GROUP)
        zero1 = common.zero_offsets(zero, row, zero_words, tile, pair_tiles, False, KIND, HALF)
        zero2 = zero1
        if first != second:
            row = z_row + common.group_at(k, second, groups, GROUP)
            zero2 = common.zero_offsets(zero, row, zero_words, tile, pair_tiles, False, KIND, HALF)
    return scale1, scale2, zero1, zero2


@gluon.jit
def _rows(
    acc, part, words, slot, x, scales, zero, z_row, groups, zero_words, tile, pair_tiles, k, SUB: gl.constexpr,
    TOKENS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, AFTER: gl.constexpr, KIND: gl.constexpr,
    ROWS: gl.constexpr, SPAN: gl.constexpr,
):
    """Multiply ROWS rows of k (32 or 64) of a step that begins at row k; the rows begin SUB * ROWS rows later.

    SPAN: if AFTER, the number of rows of k whose sum a scale multiplies.
    """
    HALF: gl.constexpr = x.dtype == gl.float16
    words = weights.load_words(words, slot, ROWS // 16 * SUB, ROWS // 16, KIND, False)
    scale1, scale2, zero1, zero2 = scales_and_zeros(
        scales, zero, z_row, groups, zero_words, tile, pair_tiles, k, SUB, ROWS, GROUP, ZEROS, KIND, HALF,
    )
    scaled: gl.constexpr = GROUP > 0 and not AFTER
    a = weights.step_operand(
        words, scale1, scale2, zero1, zero2, KIND, HALF, False, TOKENS, scaled, ZEROS, ROWS // 16
    )
    if ROWS < 64:
        x = x.slice(SUB * ROWS % 64, ROWS, dim=1)
    if GROUP > 0 and AFTER:
        opens: gl.constexpr = SUB * ROWS % SPAN == 0
        closes: gl.constexpr = (SUB + 1) * ROWS % SPAN == 0
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
def multiply(
    acc, part, words, scales, slot, x_buf, x_slot, zero, z_row, groups, zero_words, tile, pair_tiles, k,
    STEP: gl.constexpr, TOKENS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr,
    AFTER: gl.constexpr, ROWS: gl.constexpr = 64, EACH: gl.constexpr = 1,
):
    """Multiply a step that begins at row k.

    Args:
        part: float32 sums, not scaled yet, of a group or of its share within the step; used if AFTER.
        words, scales: results of `views`, of which `slot` is multiplied.
        x_slot: slot of the tokens in x_buf.
        zero: zero points of all experts; this expert's are `groups` rows from row z_row on.
        AFTER: whether scales multiply sums of a group; otherwise they multiply weights.
        ROWS: rows of k whose weights are in registers at a time.
        EACH: room of a slot of x_buf as a multiple of TOKENS; the first TOKENS rows are multiplied.
    """
    for sub in gl.static_range(STEP // ROWS):
        acc, part = _rows(
            acc, part, words, slot, x_buf.index((STEP // 64 * x_slot + sub * ROWS // 64) * EACH), scales.index(slot),
            zero, z_row, groups, zero_words, tile, pair_tiles, k, sub, TOKENS, GROUP, ZEROS, AFTER, KIND, ROWS,
            span(STEP, GROUP),
        )
    return acc, part
