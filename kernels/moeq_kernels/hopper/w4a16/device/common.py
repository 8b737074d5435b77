"""Functions that the W4A16 kernels share: work items, copies of words, and the way from accumulators to rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from moeq_kernels.device.caching import EVICT_LAST
from moeq_kernels.hopper.compat import barrier, reinterpret, tma_load
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.w4a16.device import layouts, weights


@gluon.jit
def find_item(index, tiles, blocks, TOKENS: gl.constexpr):
    """Return expert, first row, end row, block (of columns and k) and tile number of a work item.

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


#: Tiles of tokens that are combined with all blocks of columns before the next tiles are. 8 tiles of 160 tokens and 16
#: blocks of 256 weight rows (a quarter of the bytes per row) minimise what 132 concurrent programs read.
TILES_TOGETHER = gl.constexpr(8)


@gluon.jit
def find_tile(index, tiles, blocks):
    """Return expert, first row, end row and block of a work item; tiles of an expert have an even height.

    Items are ordered by expert, then group of TILES_TOGETHER tiles, then block, then tile.
    """
    entry = tiles + (index // blocks) * 8
    first = gl.load(entry + 3)
    height = gl.load(entry + 5)
    rest = index - first * blocks
    group = rest // (blocks * TILES_TOGETHER) * TILES_TOGETHER
    rest -= group * blocks
    together = gl.minimum(gl.load(entry + 4) - group, TILES_TOGETHER)
    row = gl.load(entry + 1) + (first + group + rest % together - index // blocks) * height
    return gl.load(entry), row, gl.minimum(row + height, gl.load(entry + 2)), rest // together


@gluon.jit
def word_buffers(SLOTS: gl.constexpr, STEP: gl.constexpr, TILES: gl.constexpr, KIND: gl.constexpr):
    """Allocate shared memory for the words of SLOTS steps; with uint3 a pair, the second for third bits."""
    shape: gl.constexpr = [SLOTS * 2, STEP // layouts.word_rows(KIND), TILES, layouts.tile_bytes(KIND) // 4]
    buffer = gl.allocate_shared_memory(gl.int32, shape, layouts.word_buffer())
    if KIND == "uint3":
        high: gl.constexpr = [SLOTS * 2, STEP // 64, TILES, layouts.tile_bytes(KIND) // 4]
        return buffer, gl.allocate_shared_memory(gl.int32, high, layouts.word_buffer())
    else:
        return buffer


@gluon.jit
def word_views(buffers, SLOTS: gl.constexpr, STEP: gl.constexpr, TILES: gl.constexpr, KIND: gl.constexpr):
    """Reinterpret `word_buffers` as bytes `[slot, pair, rows of words, bytes]`."""
    BYTES: gl.constexpr = TILES * layouts.tile_bytes(KIND)
    shape: gl.constexpr = [SLOTS, 2, STEP // layouts.word_rows(KIND), BYTES]
    if KIND == "uint3":
        high: gl.constexpr = [SLOTS, 2, STEP // 64, BYTES]
        first = reinterpret(buffers[0], gl.uint8, shape, layouts.plain_shared())
        return first, reinterpret(buffers[1], gl.uint8, high, layouts.plain_shared())
    else:
        return reinterpret(buffers, gl.uint8, shape, layouts.plain_shared())


@gluon.jit
def copy_words(
    w_desc, buffers, bar, slot, w_row, step, tile, pair_tiles, STEP: gl.constexpr, KIND: gl.constexpr, some=True
):
    """Start to copy a step's words if `some`; the expert's begin at row w_row of words.

    With uint3 `w_desc` is a pair like `buffers`, and there is one row of third bits for two rows of words.
    """
    if KIND == "uint3":
        _copy_rows(w_desc[0], buffers[0], bar, slot, w_row + step * (STEP // 32), tile, pair_tiles, some)
        _copy_rows(w_desc[1], buffers[1], bar, slot, w_row // 2 + step * (STEP // 64), tile, pair_tiles, some)
    else:
        at = w_row + step * (STEP // layouts.word_rows(KIND))
        _copy_rows(w_desc, buffers, bar, slot, at, tile, pair_tiles, some)


@gluon.jit
def _copy_rows(w_desc, buffer, bar, slot, at, tile, pair_tiles, some):
    tma_load(w_desc, [at, tile, 0], bar, buffer.index(2 * slot), pred=some)
    tma_load(w_desc, [at, tile + pair_tiles, 0], bar, buffer.index(2 * slot + 1), pred=some)


@gluon.jit
def group_at(k, more: gl.constexpr, groups, GROUP: gl.constexpr):
    """Return the group `more` groups after that of row k, at most the last one: a step may reach beyond K."""
    return gl.minimum(k // GROUP + more, groups - 1) if GROUP else 0


@gluon.jit
def zero_offsets(
    zero, row, row_words, tile, pair_tiles, WIDE: gl.constexpr, KIND: gl.constexpr = "uint4",
    HALF: gl.constexpr = False,
):
    """Load zero points of one group as `weights.step_operand` takes them.

    `zero` is int32 `[rows, row_words]` with 8 words per tile of 64 columns (8-bit: 16); `tile` is the first tile of
    this warpgroup.
    """
    layout: gl.constexpr = layouts.zeros(WIDE, KIND)
    two: gl.constexpr = layout.shape[3]
    pair = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    within = gl.arange(0, 8 if WIDE else 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, layout))))
    copies = gl.arange(0, 4, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, layout))))
    upper = gl.arange(0, two, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
    pair = gl.expand_dims(gl.expand_dims(gl.expand_dims(pair, 1), 2), 3)
    within = gl.expand_dims(gl.expand_dims(gl.expand_dims(within, 0), 2), 3)
    copies = gl.expand_dims(gl.expand_dims(gl.expand_dims(copies, 0), 1), 3)
    upper = gl.expand_dims(gl.expand_dims(gl.expand_dims(upper, 0), 1), 2)
    each = (tile + pair * pair_tiles) * 8 + within + 0 * copies
    column = 2 * each + upper if KIND == "uint8" else each + 0 * upper
    word = gl.load(zero + row.to(gl.int64) * row_words + column, mask=column < row_words, other=0)
    if WIDE and KIND == "uint4":
        word = word >> (upper * 8 + 0 * column)
    return weights.zero_offsets(word, KIND, HALF, WIDE)


@gluon.jit
def undone(acc, global_scale, expert, UNDO: gl.constexpr):
    """Multiply sums by UNDO, which their weights lack, and by the expert's global scale (float32 `[E]`, or None)."""
    if global_scale is None:
        return acc * UNDO
    else:
        return acc * (gl.load(global_scale + expert) * UNDO)


@gluon.jit
def pair_columns(acc, WIDE: gl.constexpr, TOKENS: gl.constexpr, INTERLEAVED: gl.constexpr = False):
    """Transpose accumulators (rows in map order, TOKENS columns) to two `[TOKENS, columns]`, one per half of the pair.

    With INTERLEAVED they hold even and odd columns, those of the first half before those of the second.
    """
    columns: gl.constexpr = 64 if WIDE else 128
    # wide: j0, pair, j1, column of 16, token; narrow: j, pair, tile, column of 16, token
    x = acc.reshape([2, 2, 2, 16, TOKENS] if WIDE else [4, 2, 2, 16, TOKENS])
    x = x.permute([4, 1, 2, 0, 3] if INTERLEAVED else [4, 2, 0, 3, 1])
    x = gl.convert_layout(x.reshape([TOKENS, columns, 2]), layouts.output_pair(WIDE, TOKENS))
    first, second = gl.split(x)
    layout: gl.constexpr = layouts.output(WIDE, TOKENS)
    return (
        gl.convert_layout(first, layout, assert_trivial=True),
        gl.convert_layout(second, layout, assert_trivial=True),
    )


@gluon.jit
def places(column, second_column, WIDE: gl.constexpr, TOKENS: gl.constexpr, EPILOGUE: gl.constexpr):
    """Return the columns `[1, n]` of out for both results of `pair_columns`.

    `column` and `second_column` are the packed columns where the two halves begin.
    """
    layout: gl.constexpr = layouts.output(WIDE, TOKENS)
    n = gl.expand_dims(gl.arange(0, 64 if WIDE else 128, layout=gl.SliceLayout(0, layout)), 0)
    if epilogue.interleaved(EPILOGUE):
        half: gl.constexpr = 32 if WIDE else 64
        first = gl.where(n < half, column // 2 + n, second_column // 2 + (n - half))
        return first, first
    else:
        return column + n, second_column + n


@gluon.jit
def row_places(column, second_column, expert, packed, WIDE: gl.constexpr, TOKENS: gl.constexpr):
    """Return places of channel scales and biases of accumulator rows (in map order), and which rows exist."""
    m = gl.arange(0, 128 if WIDE else 256, layout=gl.SliceLayout(1, layouts.accumulator(TOKENS)))
    within = ((m >> 4) & 1) * (32 if WIDE else 64) + (m >> 6) * 16 + (m & 15)  # maps B and A, see `layouts`
    feature = within + gl.where(((m >> 5) & 1) == 1, second_column, column)
    return expert.to(gl.int64) * packed + epilogue.single_order(feature), feature < packed


@gluon.jit
def affine_rows(
    acc, column, second_column, scale, bias, bias_here, expert, packed, WIDE: gl.constexpr, TOKENS: gl.constexpr,
    UNIT: gl.constexpr = 1.0,
):
    """Return acc * channel scale + bias for accumulators with rows in map order; arguments as in `store_chunks`.

    In this order a thread loads few scales and biases.
    """
    if scale is not None or bias is not None:
        place, inside = row_places(column, second_column, expert, packed, WIDE, TOKENS)
        if scale is not None:
            factor = gl.load(scale + place, mask=inside, other=0.0).to(gl.float32)
            if UNIT != 1.0:
                factor = factor * UNIT
            acc = acc * gl.expand_dims(factor, 1)
        if bias is not None:
            own = gl.load(bias + place, mask=inside & bias_here, other=0.0)
            acc = acc + gl.expand_dims(own.to(gl.float32), 1)
    return acc


@gluon.jit
def rounded(value, kind: gl.constexpr):
    """Convert float32 to `kind`; int16 holds a sign, 7 bits of exponent and 8 of fraction (bfloat16 has 7).

    `routing.sum_rows` decodes it: magnitudes from 2^-62 to 2^64, smaller ones as 0, larger ones as NaN.
    """
    if kind == gl.int16:
        small = value * 2.0**-64  # the exponent then fits 7 bits
        bits = small.to(gl.int32, bitcast=True)
        code = ((bits * 2 + 0x8000) & 0x7FFF0000) | (bits & -0x80000000)
        return (gl.where(gl.abs(small) < 1.0, code, 0x7FFF0000) >> 16).to(gl.int16)
    else:
        return value.to(kind)


@gluon.jit
def store_pair(
    first, second, out, row, end_row, column, second_column, columns, stride, EPILOGUE: gl.constexpr,
    WIDE: gl.constexpr, TOKENS: gl.constexpr,
):
    """Activate both results of `pair_columns` and store rows from `row` to end_row.

    `column` and `second_column` are the packed columns where the halves begin; out has `columns` columns.
    """
    layout: gl.constexpr = layouts.output(WIDE, TOKENS)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout)), 1)
    at, second_at = places(column, second_column, WIDE, TOKENS, EPILOGUE)
    target = out + (row + t).to(gl.int64) * stride
    inside = row + t < end_row
    below = at < columns
    kind: gl.constexpr = out.dtype.element_ty
    if epilogue.gated(EPILOGUE):
        value = epilogue.activate_gated(first, second, EPILOGUE)
        gl.store(target + at, value.to(kind), mask=inside & below, eviction_policy=EVICT_LAST)
    else:
        if epilogue.activation(EPILOGUE) != "none":
            first = epilogue.activate(first, epilogue.activation(EPILOGUE))
            second = epilogue.activate(second, epilogue.activation(EPILOGUE))
        gl.store(target + at, first.to(kind), mask=inside & below, eviction_policy=EVICT_LAST)
        gl.store(target + second_at, second.to(kind), mask=inside & (second_at < columns), eviction_policy=EVICT_LAST)


@gluon.jit
def store_split(
    first, second, out, partial, arrived, split, block, rows, row, end_row, column, second_column, columns, stride,
    EPILOGUE: gl.constexpr, TOKENS: gl.constexpr, SPLITS: gl.constexpr, EVICTION: gl.constexpr,
):
    """Store both results of `pair_columns` for one of SPLITS shares of k; the last program to arrive adds all shares.

    `partial` is float32 `[SPLITS, rows, 2 * columns]`; `arrived` counts programs per tile and block of columns. Shares
    are added in order. Other arguments are those of `store_pair`.
    """
    layout: gl.constexpr = layouts.output(False, TOKENS)
    t = gl.expand_dims(gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout)), 1)
    at, _ = places(column, second_column, False, TOKENS, EPILOGUE)
    inside = (row + t < end_row) & (at < columns)
    place = partial + (row + t).to(gl.int64) * (2 * columns) + at
    size = (row * 0 + rows).to(gl.int64) * (2 * columns)
    gl.store(place + split * size, first, mask=inside, eviction_policy=EVICTION)
    gl.store(place + split * size + columns, second, mask=inside, eviction_policy=EVICTION)
    barrier()
    number = gl.program_id(1) * (gl.num_programs(0) // SPLITS) + block
    if gl.atomic_add(arrived + number, 1, sem="acq_rel", scope="gpu") == SPLITS - 1:
        first = gl.zeros([TOKENS, 128], gl.float32, layout)
        second = gl.zeros([TOKENS, 128], gl.float32, layout)
        for other in gl.static_range(SPLITS):
            first += gl.load(place + other * size, mask=inside, other=0.0, cache_modifier=".cg")
            second += gl.load(place + other * size + columns, mask=inside, other=0.0, cache_modifier=".cg")
        store_pair(first, second, out, row, end_row, column, second_column, columns, stride, EPILOGUE, False, TOKENS)


@gluon.jit
def store_chunks(
    acc, out, row, end_row, column, second_column, columns, stride, scale, bias, bias_here, expert, packed,
    EPILOGUE: gl.constexpr, WIDE: gl.constexpr, TOKENS: gl.constexpr, CHUNK: gl.constexpr, UNIT: gl.constexpr = 1.0,
):
    """Finish and store accumulators in chunks of CHUNK tokens, which bounds the shared memory for transposing them.

    `scale` and `bias` are `[experts, packed]` in Marlin's 32-column order, or None; scales are in units of UNIT.
    `bias_here` says whether this share of k adds the biases. Other arguments are those of `store_pair`.
    """
    acc = affine_rows(acc, column, second_column, scale, bias, bias_here, expert, packed, WIDE, TOKENS, UNIT)
    if epilogue.activation(EPILOGUE) == "none":
        acc = rounded(acc, out.dtype.element_ty)
    _store_chunks(acc, out, row, end_row, column, second_column, columns, stride, EPILOGUE, WIDE, TOKENS, CHUNK)


@gluon.jit
def _store_chunks(
    acc, out, row, end_row, column, second_column, columns, stride, EPILOGUE: gl.constexpr, WIDE: gl.constexpr,
    TOKENS: gl.constexpr, CHUNK: gl.constexpr,
):
    if TOKENS == CHUNK:
        one, two = pair_columns(acc, WIDE, TOKENS, epilogue.interleaved(EPILOGUE))
        store_pair(one, two, out, row, end_row, column, second_column, columns, stride, EPILOGUE, WIDE, TOKENS)
    else:
        half: gl.constexpr = TOKENS // 2
        lower, upper = gl.split(acc.reshape([128 if WIDE else 256, 2, half]).permute([0, 2, 1]))
        _store_chunks(lower, out, row, end_row, column, second_column, columns, stride, EPILOGUE, WIDE, half, CHUNK)
        if row + half < end_row:
            _store_chunks(
                upper, out, row + half, end_row, column, second_column, columns, stride, EPILOGUE, WIDE, half, CHUNK
            )
