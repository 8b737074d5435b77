"""Grouped product with `mma.sync`: Y^T = W^T X^T, with packed words decoded into the left operand in registers.

A program takes a tile of tokens and 256 columns of the weights: four warps, which hold them in map A of
`hopper.w4a16.device.layouts`, because fragments of 16 rows are the same for `mma.sync`. Words, scales and tokens are
copied to shared memory by cp.async some steps of k ahead; tokens are gathered by their pairs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import constexpr_function
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.hopper.compat import barrier, rows_load
from moeq_kernels.hopper.device import epilogue
from moeq_kernels.hopper.w4a16.device import common, layouts, steps, weights

#: Rows of k in a step.
STEP = gl.constexpr(64)


@constexpr_function
def accumulator():
    """Return the layout of fp32 accumulators, rows x tokens."""
    return gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8])


@constexpr_function
def operand(index):
    """Return the layout of an operand in registers."""
    return gl.DotOperandLayout(operand_index=index, parent=accumulator(), k_width=2)


@constexpr_function
def word_copies(kind):
    """Return the layout of copies of a step's words `[2, slabs, bytes]`, 16 bytes per thread."""
    lanes = 2 * layouts.tile_bytes(kind) // 16
    return gl.BlockedLayout([1, 1, 16], [1, max(1, 32 // lanes), min(32, lanes)], [2, 2, 1], [2, 1, 0])


@constexpr_function
def scale_copies():
    """Return the layout of copies of a step's scales `[2, 16 groups, 8]`, 8 per thread."""
    return gl.BlockedLayout([1, 1, 8], [2, 16, 1], [1, 4, 1], [2, 1, 0])


@constexpr_function
def token_copies(rows):
    """Return the layout of copies of tokens `[tokens, rows]`, `rows` of k at a time, 8 numbers per thread."""
    return gl.BlockedLayout([1, 8], [256 // rows, rows // 8], [4, 1], [1, 0])


@constexpr_function
def token_buffer(rows):
    """Return the layout of shared memory for tokens that ldmatrix reads without bank conflicts."""
    return gl.SwizzledSharedLayout(8, 64 // rows, rows // 8, [1, 0])


@gluon.jit
def _copy(
    step, stage, some, w, group_scale, x, token, inside, w_buf, s_buf, x_buf, w_row, s_row, tile, pair_tiles, slabs,
    groups, width, eights_x, packed, features, GROUP: gl.constexpr, KIND: gl.constexpr, ROWS: gl.constexpr,
):
    """Start to copy a step where `some` is true; the expert's slabs and groups begin at w_row and s_row."""
    BYTES: gl.constexpr = layouts.tile_bytes(KIND)
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    layout: gl.constexpr = word_copies(KIND)
    half = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, layout)))
    slab = gl.arange(0, STEP // 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    byte = gl.arange(0, 2 * BYTES, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    half = gl.expand_dims(gl.expand_dims(half, 1), 2)
    slab = gl.expand_dims(gl.expand_dims(slab, 0), 2)
    byte = gl.expand_dims(gl.expand_dims(byte, 0), 1)
    first = tile + half * pair_tiles
    row = step * (STEP // 16) + slab
    there = (row < slabs) & (first * BYTES + byte < width) & some
    place = w + (w_row + row).to(gl.int64) * width + (first * BYTES + byte)
    rows_load(w_buf.index(stage), place, mask=there)
    if GROUP:
        s_layout: gl.constexpr = scale_copies()
        pair = gl.arange(0, 2, layout=gl.SliceLayout(1, gl.SliceLayout(2, s_layout)))
        line = gl.arange(0, PER * 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, s_layout)))
        inner = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, s_layout)))
        pair = gl.expand_dims(gl.expand_dims(pair, 1), 2)
        line = gl.expand_dims(gl.expand_dims(line, 0), 2)
        inner = gl.expand_dims(gl.expand_dims(inner, 0), 1)
        group = step * STEP // GROUP + line // 16
        column = (tile + pair * pair_tiles) * 64 + line % 16 * 8
        known = (group < groups) & (column < packed) & some
        rows_load(s_buf.index(stage), group_scale + (s_row + group).to(gl.int64) * packed + column + inner, mask=known)
    for sub in gl.static_range(STEP // ROWS):
        k = step * STEP + sub * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(0, token_copies(ROWS)))
        k = gl.expand_dims(k, 0)
        # The number of features is a multiple of eight; `k // 8 * 8` tells the compiler that eight are copied or none.
        place = x + token * (eights_x * 8) + k
        rows_load(x_buf.index(stage * (STEP // ROWS) + sub), place, mask=inside & (k // 8 * 8 < features) & some)
    async_copy.commit_group()


@gluon.jit
def _multiply(
    acc, words, scales, x_view, zero, s_row, groups, zero_words, tile, pair_tiles, k, SUB: gl.constexpr,
    TOKENS: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, HALF: gl.constexpr,
    ROWS: gl.constexpr, OLD: gl.constexpr,
):
    """Add the product of ROWS rows of k, the SUB-th of a step that begins at row k, to acc."""
    words = words.slice(ROWS // 16 * SUB, ROWS // 16, dim=1).load(layouts.words(False, ROWS // 16, KIND))
    scale1, scale2, zero1, zero2 = steps.scales_and_zeros(
        scales, zero, s_row, groups, zero_words, tile, pair_tiles, k, SUB, ROWS, GROUP, ZEROS, KIND, HALF,
    )
    a = weights.step_operand(
        words, scale1, scale2, zero1, zero2, KIND, HALF, False, TOKENS, GROUP > 0, ZEROS, ROWS // 16, OLD, operand(0)
    )
    return mma_v2(a, x_view.permute((1, 0)).load(operand(1)), acc)


@gluon.jit(
    do_not_specialize=[
        "top_k", "slabs", "groups", "count", "pair_tiles", "rows", "zero_words", "features",
    ]
)
def expert_product_mma(
    x, w, group_scale, zero, out, partial, arrived, tiles, pair_of_row, top_k, eights_x, features, slabs, width, groups,
    count, pair_tiles, columns, stride, rows, zero_words, scale, bias, global_scale, packed, TOKENS: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr, ZEROS: gl.constexpr, KIND: gl.constexpr, EPILOGUE: gl.constexpr,
    SPLITS: gl.constexpr, GATHER: gl.constexpr, ROWS: gl.constexpr, OLD: gl.constexpr, DEPENDENT: gl.constexpr,
):
    """Compute out[row] = epilogue(x of row @ W[expert of row].T), see `epilogue.Epilogue`.

    The grid is (block of columns and share of k, tile). The arguments are those of
    `hopper.w4a16.device.narrow.expert_product_narrow`, except:
        x: `[.., features]` with a row stride of 8 eights_x; rows pair_of_row // top_k if GATHER, otherwise sorted rows.
        w: bytes `[E * slabs, width]`.
        group_scale: `[E * groups, packed]`, or None if GROUP is 0.
        tiles: tiles of TOKENS rows.
        count: number of steps of 64 rows of k.
        ROWS: rows of k whose weights are in registers at a time (32 or 64).
        OLD: whether the GPU is older than sm_90.
    """
    block = gl.program_id(0) // SPLITS
    split = gl.program_id(0) % SPLITS
    entry = tiles + gl.program_id(1) * 8
    GATED: gl.constexpr = epilogue.gated(EPILOGUE)
    HALF: gl.constexpr = x.dtype.element_ty == gl.float16
    UNDO: gl.constexpr = weights.undo(KIND, HALF, GROUP > 0)
    UNIT: gl.constexpr = weights.channel_unit(KIND, HALF)
    PER: gl.constexpr = layouts.groups_of(STEP, GROUP)
    w_shape: gl.constexpr = [STAGES, 2, STEP // 16, 2 * layouts.tile_bytes(KIND)]
    w_buf = gl.allocate_shared_memory(gl.uint8, w_shape, layouts.plain_shared())
    s_buf = w_buf
    if GROUP:
        s_shape: gl.constexpr = [STAGES, 2, PER * 16, 8]
        s_buf = gl.allocate_shared_memory(group_scale.dtype.element_ty, s_shape, layouts.plain_shared())
    x_buf = gl.allocate_shared_memory(x.dtype.element_ty, [STAGES * (STEP // ROWS), TOKENS, ROWS], token_buffer(ROWS))
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    expert = gl.load(entry)
    if expert >= 0:
        row = gl.load(entry + 1)
        end_row = gl.load(entry + 2)
        tile = block * (2 if GATED and not epilogue.interleaved(EPILOGUE) else 4)
        each = (count + SPLITS - 1) // SPLITS
        first = split * each
        last = gl.minimum(first + each, count)
        w_row = expert * slabs
        s_row = expert * groups
        own = row + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, token_copies(ROWS)))
        token = own
        if GATHER:
            token = gl.load(pair_of_row + own, mask=own < end_row, other=0) // top_k
        inside = gl.expand_dims(own < end_row, 1)
        token = gl.expand_dims(token, 1).to(gl.int64)
        for i in gl.static_range(STAGES - 1):
            _copy(
                first + i, i, first + i < last, w, group_scale, x, token, inside, w_buf, s_buf, x_buf, w_row, s_row,
                tile, pair_tiles, slabs, groups, width, eights_x, packed, features, GROUP, KIND, ROWS,
            )
        acc = gl.zeros([256, TOKENS], gl.float32, accumulator())
        for step in range(first, last):
            async_copy.wait_group(STAGES - 2)
            barrier()
            ahead = step + STAGES - 1
            _copy(
                ahead, (ahead - first) % STAGES, ahead < last, w, group_scale, x, token, inside, w_buf, s_buf, x_buf,
                w_row, s_row, tile, pair_tiles, slabs, groups, width, eights_x, packed, features, GROUP, KIND, ROWS,
            )
            stage = (step - first) % STAGES
            for sub in gl.static_range(STEP // ROWS):
                acc = _multiply(
                    acc, w_buf.index(stage), s_buf.index(stage), x_buf.index(stage * (STEP // ROWS) + sub), zero, s_row,
                    groups, zero_words, tile, pair_tiles, step * STEP, sub, TOKENS, GROUP, ZEROS, KIND, HALF, ROWS, OLD,
                )
        async_copy.wait_group(0)

        column = tile * 64
        second = (tile + pair_tiles) * 64
        acc = gl.convert_layout(common.undone(acc, global_scale, expert, UNDO), layouts.accumulator(TOKENS))
        if GATED and SPLITS > 1:
            acc = common.affine_rows(acc, column, second, scale, bias, split == 0, expert, packed, False, TOKENS, UNIT)
            one, two = common.pair_columns(acc, False, TOKENS, epilogue.interleaved(EPILOGUE))
            common.store_split(
                one, two, out, partial, arrived, split, block, rows, row, end_row, column, second, columns, stride,
                EPILOGUE, TOKENS, SPLITS, "",
            )
        else:
            base = out
            if SPLITS > 1:
                base = out + (split * rows).to(gl.int64) * stride
            common.store_chunks(
                acc, base, row, end_row, column, second, columns, stride, scale, bias, split == 0, expert, packed,
                EPILOGUE, False, TOKENS, min(TOKENS, 16), UNIT,
            )
