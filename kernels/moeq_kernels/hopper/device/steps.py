"""Steps of products of one warpgroup and 256 output rows (map A): their copies and multiplications."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from moeq_kernels.hopper.compat import reinterpret, tma_load
from moeq_kernels.hopper.device import common, layouts


@constexpr_function
def weight_bytes(step, group, kind, scale_bits):
    """Bytes of a step's words and scales."""
    scales = 2 * layouts.groups_of(step, group) * 128 * scale_bits // 8 if group else 0
    return step // 16 * 4 * layouts.tile_bytes(kind) + scales


# Argument lists of twenty names, one to a line, would hide the code.
# fmt: off
@gluon.jit
def buffers(s_desc, SLOTS: gl.constexpr, STEP: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """Shared memory for words and scales of SLOTS steps."""
    w_shape: gl.constexpr = [SLOTS * 2, STEP // 16, 2, layouts.tile_bytes(KIND) // 4]
    s_shape: gl.constexpr = [SLOTS * 2, layouts.groups_of(STEP, GROUP), 128]
    w_buf = gl.allocate_shared_memory(gl.int32, w_shape, layouts.word_buffer())
    s_layout: gl.constexpr = layouts.scale_buffer(s_desc.dtype.primitive_bitwidth)
    return w_buf, gl.allocate_shared_memory(s_desc.dtype, s_shape, s_layout)


@gluon.jit
def token_buffer(SLOTS: gl.constexpr, STEP: gl.constexpr, TOKENS: gl.constexpr, dtype: gl.constexpr):
    """Shared memory for tokens of SLOTS steps."""
    return gl.allocate_shared_memory(dtype, [SLOTS * STEP // 64, TOKENS, 64], layouts.token_buffer())


@gluon.jit
def views(w_buf, s_buf, SLOTS: gl.constexpr, STEP: gl.constexpr, GROUP: gl.constexpr, KIND: gl.constexpr):
    """The same memory as `multiply` reads it."""
    w_shape: gl.constexpr = [SLOTS, 2, STEP // 16, 2 * layouts.tile_bytes(KIND)]
    s_shape: gl.constexpr = [SLOTS, 2, layouts.groups_of(STEP, GROUP) * 16, 8]
    w_view = reinterpret(w_buf, gl.uint8, w_shape, layouts.plain_shared())
    return w_view, reinterpret(s_buf, s_buf.dtype, s_shape, layouts.plain_shared())


@gluon.jit
def load_weights(
    step, slot, bar, w_desc, s_desc, w_buf, s_buf, w_row, s_row, tile, pair_tiles, STEP: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Starts the copies of a step's words and scales; w_row, s_row: the expert's first ones."""
    tma_load(w_desc, [w_row + step * (STEP // 16), tile, 0], bar, w_buf.index(2 * slot))
    tma_load(w_desc, [w_row + step * (STEP // 16), tile + pair_tiles, 0], bar, w_buf.index(2 * slot + 1))
    if GROUP:
        at = s_row + (step * STEP) // GROUP
        tma_load(s_desc, [at, tile * 64], bar, s_buf.index(2 * slot))
        tma_load(s_desc, [at, (tile + pair_tiles) * 64], bar, s_buf.index(2 * slot + 1))


@gluon.jit
def load_tokens(step, slot, bar, x_desc, x_buf, row, STEP: gl.constexpr):
    """Starts the copies of a step's tokens."""
    for half in gl.static_range(STEP // 64):
        tma_load(x_desc, [row, step * STEP + 64 * half], bar, x_buf.index(STEP // 64 * slot + half))


@gluon.jit
def _dequantised(
    words, scales, zero, z_row, zero_words, tile, pair_tiles, k, AT: gl.constexpr, TOKENS: gl.constexpr,
    GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr, SCALED: gl.constexpr,
):
    """The left operand of 32 rows of k, from AT on, of a step that begins at row k."""
    group: gl.constexpr = AT // GROUP if GROUP else 0
    scale = 0
    if SCALED:
        scale = scales.slice(group * 16, 16, dim=1).load(gl.SliceLayout(2, layouts.scales(False)))
    offset = 0
    if ZEROS:
        if GROUP:
            z_row += k // GROUP
        offset = common.zero_offsets(zero, z_row + group, zero_words, tile, pair_tiles, False, KIND, HALF)
    words = words.slice(AT // 16, 2, dim=1).load(layouts.words(False, 2, KIND))
    return common.step_weights(words, scale, scale, offset, offset, False, TOKENS, SCALED, ZEROS, KIND, HALF, 2)


@gluon.jit
def multiply(
    acc, words, scales, x_buf, x_slot, zero, z_row, zero_words, tile, pair_tiles, k, STEP: gl.constexpr,
    TOKENS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, AFTER: gl.constexpr,
):
    """Multiplies a step that begins at row k. words, scales: its slots of `views`; x_slot: where its tokens are.

    While the tensor cores multiply 32 rows, the next ones are dequantised; the registers of rows are free again when
    all but the last product are done.
    """
    HALF: gl.constexpr = x_buf.dtype == gl.float16
    LATER: gl.constexpr = GROUP > 0 and AFTER
    RUN: gl.constexpr = GROUP if LATER else STEP
    gl.static_assert(RUN <= STEP)
    for run in gl.static_range(STEP // RUN):
        part = acc  # not read where LATER
        for sub in gl.static_range(RUN // 32):
            a = _dequantised(
                words, scales, zero, z_row, zero_words, tile, pair_tiles, k, run * RUN + sub * 32, TOKENS,
                GROUP, ZEROS, KIND, HALF, GROUP > 0 and not AFTER,
            )
            x = x_buf.index(STEP // 64 * x_slot + (run * RUN + sub * 32) // 64).slice(sub % 2 * 32, 32, dim=1)
            part = warpgroup_mma(a, x.permute((1, 0)), part, use_acc=sub > 0 or not LATER, is_async=True)
            if sub > 0:
                before = warpgroup_mma_wait(1, deps=(before,))
            before = a
        part, before = warpgroup_mma_wait(0, deps=(part, before))
        if LATER:
            scale = scales.slice(run * 16, 16, dim=1).load(gl.SliceLayout(2, layouts.scales(False)))
            scale = scale.to(gl.float32).reshape([2, 2, 8, 4, 2]).permute([3, 0, 1, 4, 2]).reshape([256])
            scale = gl.convert_layout(scale, gl.SliceLayout(1, layouts.accumulator(TOKENS)), assert_trivial=True)
            acc += part * gl.expand_dims(scale, 1)
        else:
            acc = part
    return acc


# fmt: on
