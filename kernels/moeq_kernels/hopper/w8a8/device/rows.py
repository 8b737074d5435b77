"""Kernels that quantise tokens and activations to int8 or e4m3 rows and route few pairs, without atomics.

Codes and scales equal those of the portable kernels' `quantize_rows` and `quantize_rows_e4m3` bit for bit, down to
scales of 2^-100: scale = max |row| / 127 or 448 (1 for a zero row), code = row / scale to nearest even. Codes in
unsigned bytes are e4m3. Every 128 columns of a row of these may have a scale of their own: `scale_stride` is the stride
between the scales of a row, or None where a row has one. MARLIN: whether every 16 codes are in the order of Marlin's
words, as `w4a8.device.wide` needs them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.device.activations import activate_gated
from moeq_kernels.device.caching import EVICT_LAST, NO_POLICY
from moeq_kernels.device.numerics import float_to_e4m3, quotients, round_to, round_to_int8
from moeq_kernels.device.routing import count_rows, list_tiles, local_experts, sorted_rows


@triton.jit
def _quantised(value, static_scale, codes, scale_stride, MARLIN: tl.constexpr, INTERPRET: tl.constexpr):
    """Return codes and scale of a float32 row, or the scales `[groups, 1]` of its groups; unused columns must be zero.

    The function takes one row, because Triton may give a thread all columns of a tensor with two axes.
    """
    E4M3: tl.constexpr = codes.dtype.element_ty == tl.uint8
    COLUMNS: tl.constexpr = value.shape[0]
    if scale_stride is not None:
        value = tl.reshape(value, (COLUMNS // 128, 128))
    if static_scale is not None:
        scale = tl.load(static_scale)
        value = tl.div_rn(value, scale)
        if not E4M3:
            value = tl.minimum(tl.maximum(value, -128.0), 127.0)
    else:
        if scale_stride is not None:
            top = tl.max(tl.abs(value), axis=1, keep_dims=True)
        else:
            top = tl.max(tl.abs(value), axis=0)
        scale = tl.where(top > 0.0, tl.div_rn(top, 448.0 if E4M3 else 127.0), 1.0)
        value = quotients(value, scale, INTERPRET)
    if E4M3:
        if MARLIN:  # column 8 a + 2 t + b of every 16 moves to position 4 t + 2 b + a
            value = tl.permute(tl.reshape(value, (COLUMNS // 16, 2, 4, 2)), (0, 2, 3, 1))
        code = float_to_e4m3(value) if INTERPRET else value.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        return tl.reshape(code, (COLUMNS,)), scale
    else:
        return round_to_int8(value), scale


@triton.jit
def _store_scale(scales, row, scale, there, columns, scale_stride, COLUMNS: tl.constexpr):
    """Store the scale of a row, or the scales of the groups of its `columns` columns, if the row is `there`."""
    if scale_stride is not None:
        group = tl.expand_dims(tl.arange(0, COLUMNS // 128), 1)
        tl.store(scales + group.to(tl.int64) * scale_stride + row, scale, mask=(group * 128 < columns) & there)
    else:
        tl.store(scales + row, scale, mask=there)


@triton.jit(do_not_specialize=["pairs", "EXPERTS", "KNOWN", "MOST", "TILE", "listers"])
def route_quantised(
    ids, expert_map, x, static_scale, codes, scales, inverse, expert_of_row, tiles, num_tiles, pairs, hidden, stride_x,
    stride_q, scale_stride, EXPERTS, KNOWN, MOST, TILE, listers, MAPPED: tl.constexpr, PAIRS: tl.constexpr,
    BINS: tl.constexpr, TOP_K: tl.constexpr, PER: tl.constexpr, CHOICES: tl.constexpr, COLUMNS: tl.constexpr,
    DIRECT: tl.constexpr, DEPENDENT: tl.constexpr,
    MARLIN: tl.constexpr, INTERPRET: tl.constexpr,
):
    """Sort and quantise up to a few thousand pairs in one kernel.

    The first `listers` programs list the tiles. Every other program takes PER pairs of a token: it writes the codes and
    the scale to the sorted rows of these pairs, and sets `inverse` and `expert_of_row`. Every program reads all pairs.
    DIRECT: pairs stay unsorted, and no tiles are listed. PER divides TOP_K, CHOICES is the next power of two from PER
    on, COLUMNS is at least `hidden`; `device.routing` explains the terms.
    """
    at = tl.arange(0, PAIRS)
    if DEPENDENT:
        gdc_wait()  # before anything else, because the next product may read `ids` before it waits
        gdc_launch_dependents()
    group = tl.program_id(0)
    if not DIRECT:
        group -= listers
    if group < 0:
        local = local_experts(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED)
        count = count_rows(local, EXPERTS, BINS)
        list_tiles(tiles, num_tiles, count, MOST, TILE, TILE, group + listers, listers, BINS)
    else:
        column = tl.arange(0, COLUMNS)
        token = group // (TOP_K // PER)
        source = x + token.to(tl.int64) * stride_x + column
        value = tl.load(source, mask=column < hidden, other=0.0).to(tl.float32)
        choice = tl.arange(0, CHOICES)
        pair = group * PER + choice
        mine = local_experts(ids, expert_map, pairs, pair, EXPERTS, KNOWN, MAPPED)
        there = (mine < EXPERTS) & (choice < PER)
        row = pair
        if not DIRECT:
            local = local_experts(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED)
            row = sorted_rows(local, mine, pair, PAIRS)
        code, scale = _quantised(value, static_scale, codes, scale_stride, MARLIN, INTERPRET)
        tl.store(expert_of_row + row, tl.where(there, mine, 0), mask=(choice < PER) if DIRECT else there)
        row = tl.where(there, row, -1)
        tl.store(inverse + pair, row, mask=choice < PER)
        for i in tl.static_range(PER):
            to = tl.max(tl.where(choice == i, row, -1))
            _store_scale(scales, to, scale, to >= 0, hidden, scale_stride, COLUMNS)
            target = codes + to.to(tl.int64) * stride_q + column
            tl.store(target, code, mask=(column < hidden) & (to >= 0), eviction_policy=EVICT_LAST)


@triton.jit
def quantise_tokens(
    x, static_scale, codes, scales, inverse, hidden, stride_x, stride_q, scale_stride, TOP_K: tl.constexpr,
    CHOICES: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
    MARLIN: tl.constexpr, INTERPRET: tl.constexpr,
):
    """Quantise a token into the sorted rows of its pairs; for many pairs, after `routing.place_pairs`."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    value = tl.load(x + token * stride_x + column, mask=column < hidden, other=0.0).to(tl.float32)
    code, scale = _quantised(value, static_scale, codes, scale_stride, MARLIN, INTERPRET)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    # All rows are loaded first, because a load after a store would wait for it.
    choice = tl.arange(0, CHOICES)
    rows = tl.load(inverse + token * TOP_K + choice, mask=choice < TOP_K, other=-1)
    for i in tl.static_range(TOP_K):
        row = tl.max(tl.where(choice == i, rows, -1))
        tl.store(codes + row.to(tl.int64) * stride_q + column, code, mask=(column < hidden) & (row >= 0))
        _store_scale(scales, row, scale, row >= 0, hidden, scale_stride, COLUMNS)


@triton.jit
def _rows_in_use(tiles, num_tiles, pairs, DIRECT: tl.constexpr):
    """Return the number of sorted rows, the end row of the last tile's expert."""
    if DIRECT:
        return pairs
    else:
        used = tl.load(num_tiles)
        return tl.load(tiles + tl.maximum(used - 1, 0) * 8 + 2, mask=used > 0, other=0)


@triton.jit(do_not_specialize=["pairs"])
def requantise(
    middle, static_scale, codes, scales, tiles, num_tiles, pairs, size, stride_q, scale_stride,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DIRECT: tl.constexpr, DEPENDENT: tl.constexpr,
    MARLIN: tl.constexpr, INTERPRET: tl.constexpr,
):
    """Quantise the used rows (DIRECT: all rows) of activations `[pairs, size]`."""
    first = tl.program_id(0) * ROWS
    column = tl.arange(0, COLUMNS)
    rows = _rows_in_use(tiles, num_tiles, pairs, DIRECT)  # the preceding product has waited for the sorting kernels
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    policy: tl.constexpr = EVICT_LAST if ROWS == 1 else NO_POLICY  # many kept rows would evict the weights
    for i in tl.static_range(ROWS):
        row = (first + i).to(tl.int64)
        # Unused rows are read, but not written, so the load need not wait for the number of rows.
        inside = (column < size) & (row < pairs)
        value = tl.load(middle + row * size + column, mask=inside, other=0.0).to(tl.float32)
        code, scale = _quantised(value, static_scale, codes, scale_stride, MARLIN, INTERPRET)
        tl.store(codes + row * stride_q + column, code, mask=(column < size) & (row < rows), eviction_policy=policy)
        _store_scale(scales, row, scale, row < rows, size, scale_stride, COLUMNS)


@triton.jit(do_not_specialize=["rows"])
def activate_quantised(
    sums, static_scale, x_scale, w_scale, bias, expert_of_row, codes, scales, tiles, num_tiles, rows, size, stride_q,
    up_row, row_step, scale_stride, SPLITS: tl.constexpr, ACTIVATION: tl.constexpr, ALPHA: tl.constexpr,
    BETA: tl.constexpr, LIMIT: tl.constexpr, DTYPE: tl.constexpr, COLUMNS: tl.constexpr, DIRECT: tl.constexpr,
    INTERPRET: tl.constexpr, DEPENDENT: tl.constexpr,
    MARLIN: tl.constexpr,
):
    """Finish a split gate-up product: from its partial sums `[SPLITS, rows, 2 * size]` to quantised activations.

    The kernel adds the shares of a row, applies scales (unless the sums include scales of groups) and the activation,
    rounds to DTYPE and quantises. Arguments of weights are those of `narrow.w8a8_product_narrow`.
    """
    row = tl.program_id(0)
    column = tl.arange(0, COLUMNS)
    inside = column < size
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    if row >= _rows_in_use(tiles, num_tiles, rows, DIRECT):
        return
    expert = tl.load(expert_of_row + row).to(tl.int64)
    if scale_stride is None:
        token_scale = tl.load(x_scale + row)
    at = expert * 2 * size + column * row_step
    gate = tl.zeros([COLUMNS], sums.dtype.element_ty)
    up = tl.zeros([COLUMNS], sums.dtype.element_ty)
    for split in tl.static_range(SPLITS):
        source = sums + (split * rows + row).to(tl.int64) * (2 * size) + column
        gate += tl.load(source, mask=inside, other=0)
        up += tl.load(source + size, mask=inside, other=0)
    gate_value = gate.to(tl.float32)
    up_value = up.to(tl.float32)
    if scale_stride is None:
        gate_value = gate_value * tl.load(w_scale + at, mask=inside, other=0.0).to(tl.float32) * token_scale
        up_value = up_value * tl.load(w_scale + at + up_row, mask=inside, other=0.0).to(tl.float32) * token_scale
    if bias is not None:
        gate_value += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        up_value += tl.load(bias + at + up_row, mask=inside, other=0.0).to(tl.float32)
    value = activate_gated(gate_value, up_value, ACTIVATION, ALPHA, BETA, LIMIT)
    value = tl.where(inside, round_to(value, DTYPE, INTERPRET).to(tl.float32), 0.0)
    code, scale = _quantised(value, static_scale, codes, scale_stride, MARLIN, INTERPRET)
    tl.store(codes + row.to(tl.int64) * stride_q + column, code, mask=inside, eviction_policy=EVICT_LAST)
    _store_scale(scales, row, scale, True, size, scale_stride, COLUMNS)
