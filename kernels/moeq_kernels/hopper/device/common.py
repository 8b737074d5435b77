"""What the narrow and the wide kernel share: weights of a step, and the way from accumulators to stored rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moeq_kernels.hopper.device import layouts, weights


@gluon.jit
def find_item(index, tiles, blocks, TOKENS: gl.constexpr):
    """Expert, first row, end row, block (of columns and k) and number of the tile of a work item.

    Items are ordered by expert, then block, then tile of tokens: neighbours share weights, and an expert's tokens stay
    in the L2 cache.
    """
    entry = tiles + (index // blocks) * 8
    expert = gl.load(entry)
    first = gl.load(entry + 3)
    count = gl.load(entry + 4)
    row = gl.load(entry + 1) - (index // blocks - first) * TOKENS
    rest = index - first * blocks
    return expert, row + rest % count * TOKENS, gl.load(entry + 2), rest // count, first + rest % count


@gluon.jit
def zero_words(zero, row, row_words, tile, pair_tiles, WIDE: gl.constexpr):
    """Zero-point words of one group, spread over lanes as `weights.zero_offsets` takes them.

    zero: int32 `[rows, row_words]`, 8 words for each tile of 64 columns. tile is this warpgroup's first one.
    """
    layout: gl.constexpr = layouts.zeros(WIDE)
    pair = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    within = gl.arange(0, 8 if WIDE else 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    copies = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    upper = gl.arange(0, 2 if WIDE else 1, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 1), 2), 3)
    within = gl.expand_dims(gl.expand_dims(gl.expand_dims(within, 0), 2), 3)
    copies = gl.expand_dims(gl.expand_dims(gl.expand_dims(copies, 0), 1), 3)
    upper = gl.expand_dims(gl.expand_dims(gl.expand_dims(upper, 0), 1), 2)
    column = (tile + pair * pair_tiles) * 8 + within + 0 * copies + 0 * upper
    word = gl.load(zero + row.to(gl.int64) * row_words + column, mask=column < row_words, other=0)
    if WIDE:
        return word >> (upper * 8 + 0 * column)
    else:
        return word.reshape([2, 16, 4])


@gluon.jit
def step_weights(
    words,
    first_scale,
    second_scale,
    first_zero,
    second_zero,
    WIDE: gl.constexpr,
    TOKENS: gl.constexpr,
    SCALED: gl.constexpr,
    ZEROS: gl.constexpr,
):
    """The left operand of 64 rows of k: codes minus zero point, times scale where SCALED, times 2^-21.

    Scales and zero offsets `[pair, tile and g, (t,) j and h]` of the lower and the upper 32 rows.
    """
    if ZEROS:
        offset = weights.beside_words(first_zero, second_zero, WIDE)
        if SCALED:
            scale = weights.beside_words(weights.spread(first_scale, WIDE), weights.spread(second_scale, WIDE), WIDE)
            lower, upper = weights.unpack_offset_scaled(words, offset, scale)
        else:
            lower, upper = weights.unpack_offset(words, offset)
    elif SCALED:
        low1, high1, offset1 = weights.scale_factors(first_scale)
        low2, high2, offset2 = weights.scale_factors(second_scale)
        low = weights.beside_words(weights.spread(low1, WIDE), weights.spread(low2, WIDE), WIDE)
        high = weights.beside_words(weights.spread(high1, WIDE), weights.spread(high2, WIDE), WIDE)
        offset = weights.beside_words(weights.spread(offset1, WIDE), weights.spread(offset2, WIDE), WIDE)
        lower, upper = weights.unpack_scaled(words, low, high, offset)
    else:
        lower, upper = weights.unpack_plain(words)
    return weights.as_left_operand(lower, upper, WIDE, TOKENS)


@gluon.jit
def pair_columns(acc, WIDE: gl.constexpr, TOKENS: gl.constexpr):
    """Accumulators (rows in map order, TOKENS columns) -> two `[TOKENS, columns]`, one for each half of the pair."""
    if WIDE:
        x = acc.reshape([2, 2, 2, 16, TOKENS]).permute([4, 2, 0, 3, 1])  # token, j1, j0, column of 16, pair
    else:
        x = acc.reshape([4, 2, 2, 16, TOKENS]).permute([4, 2, 0, 3, 1])  # token, tile, j, column of 16, pair
    columns: gl.constexpr = 64 if WIDE else 128
    x = gl.convert_layout(x.reshape([TOKENS, columns, 2]), layouts.output_pair(WIDE, TOKENS))
    first, second = gl.split(x)
    layout: gl.constexpr = layouts.output(WIDE, TOKENS)
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(second, layout, assert_trivial=True),
    )


@gluon.jit
def swiglu(gate, up):
    """silu(gate) * up in float32."""
    return gate / (1.0 + gl.exp(-gate)) * up


@gluon.jit
def store_pair(
    first, second, out, row, end_row, column, second_column, columns, stride, GATED: gl.constexpr, WIDE: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Stores rows `row ..` before end_row: SwiGLU of both halves, or the halves at their own columns."""
    layout: gl.constexpr = layouts.output(WIDE, TOKENS)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout)), 1)
    n = gl.expand_dims(gl.arange(0, 64 if WIDE else 128, layout=gl.SliceLayout(0, layout)), 0)
    target = out + (row + t).to(gl.int64) * stride
    inside = row + t < end_row
    if GATED:
        value = swiglu(first, second).to(out.dtype.element_ty)
        gl.store(target + column + n, value, mask=inside & (column + n < columns))
    else:
        kind: gl.constexpr = out.dtype.element_ty
        gl.store(target + column + n, first.to(kind), mask=inside & (column + n < columns))
        gl.store(target + second_column + n, second.to(kind), mask=inside & (second_column + n < columns))
