"""Sorting routed pairs by expert, and summing their results: plain Triton, deterministic, no atomics, no host reads.

DEPENDENT: launched while the kernel before it still runs (programmatic dependent launch, from sm_90 on).

A pair is `token * top_k + choice`. Sorted rows are numbered by expert, then by pair. `inverse[pair]` is a pair's row,
-1 where a choice has no expert here. A row of `tiles` is: expert (-1: unused), first row, end row of the expert, the
expert's first tile, the expert's number of tiles, their height (the last one may have fewer rows), 0, 0. Heights are
multiples of GRAIN up to TILE.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.device.numerics import round_to


@triton.jit
def _local(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED: tl.constexpr):
    """Local experts of the pairs `at`; EXPERTS where a choice has none here, EXPERTS + 1 beyond the last pair."""
    chosen = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
    known = (chosen >= 0) & (chosen < KNOWN)
    if MAPPED:
        chosen = tl.load(expert_map + tl.where(known, chosen, 0)).to(tl.int32)
        known = known & (chosen >= 0) & (chosen < EXPERTS)
    return tl.where(at < pairs, tl.where(known, chosen, EXPERTS), EXPERTS + 1)


@triton.jit
def _tiles_of(count, TILE, GRAIN):
    """Tiles of experts with `count` rows, and their height: the fewest of up to TILE rows, of nearly equal heights."""
    fewest = tl.maximum((count + TILE - 1) // TILE, 1)
    even = (count + fewest - 1) // fewest
    height = tl.maximum((even + GRAIN - 1) // GRAIN, 1) * GRAIN
    return (count + height - 1) // height, height


@triton.jit
def _write_tiles(tiles, expert, count, start, first, TILE, GRAIN):
    """The rows of `tiles` of one expert."""
    number, height = _tiles_of(count, TILE, GRAIN)
    for i in range(number):
        entry = tiles + (first + i) * 8
        tl.store(entry, expert)
        tl.store(entry + 1, start + i * height)
        tl.store(entry + 2, start + count)
        tl.store(entry + 3, first)
        tl.store(entry + 4, number)
        tl.store(entry + 5, height)


@triton.jit
def _mark_unused(tiles, num_tiles, used, MOST, BLOCK: tl.constexpr):
    """Ends the list of tiles."""
    tl.store(num_tiles, used)
    for at in range(used, MOST, BLOCK):
        unused = at + tl.arange(0, BLOCK)
        tl.store(tiles + unused * 8, tl.full([BLOCK], -1, tl.int32), mask=unused < MOST)


@triton.jit(do_not_specialize=["to_clear", "pairs", "top_k", "EXPERTS", "KNOWN", "MOST", "TILE", "GRAIN"])
def route_few(
    ids, expert_map, x, sorted_x, pair_of_row, inverse, tiles, num_tiles, cleared, to_clear, pairs, top_k, hidden,
    stride_x, EXPERTS, KNOWN, MOST, TILE, GRAIN, MAPPED: tl.constexpr, PAIRS: tl.constexpr, BINS: tl.constexpr,
    COPY: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Everything in one kernel for up to a few thousand pairs; programs: (expert, 0 or 1 + slice of columns).

    Each program counts all pairs for itself. Those of slices, with COPY, copy their expert's tokens (COLUMNS columns)
    to their sorted rows; else `gather_rows` or a product has to do that. Together they also set `to_clear` integers
    of `cleared` to zero.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, PAIRS)
    if DEPENDENT:
        gdc_wait()
    local = _local(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED)
    mine = local == expert
    count = tl.sum(mine.to(tl.int32))
    start = tl.sum((local < expert).to(tl.int32))
    row = start + tl.cumsum(mine.to(tl.int32)) - 1
    if DEPENDENT:
        gdc_launch_dependents()
    if tl.program_id(1) == 0:
        tl.store(pair_of_row + row, at, mask=mine)
        tl.store(inverse + at, row, mask=mine)
        if expert == 0:
            tl.store(inverse + at, tl.full([PAIRS], -1, tl.int32), mask=local == EXPERTS)
        bins = tl.arange(0, BINS)
        counts = tl.histogram(tl.minimum(local, BINS - 1), BINS)
        blocks, _ = _tiles_of(counts, TILE, GRAIN)
        first = tl.sum(tl.where(bins < expert, blocks, 0))
        _write_tiles(tiles, expert, count, start, first, TILE, GRAIN)
        if expert == 0:
            _mark_unused(tiles, num_tiles, tl.sum(tl.where(bins < EXPERTS, blocks, 0)), MOST, BINS)
    program = expert * tl.num_programs(1) + tl.program_id(1)
    for begin in range(program * BINS, to_clear, tl.num_programs(0) * tl.num_programs(1) * BINS):
        clear = begin + tl.arange(0, BINS)
        tl.store(cleared + clear, tl.zeros([BINS], tl.int32), mask=clear < to_clear)
    if COPY:
        part = tl.program_id(1) - 1
        if part >= 0:
            column = part * COLUMNS + tl.arange(0, COLUMNS)
            for begin in range(start, start + count, 8):
                rows = begin + tl.arange(0, 8)
                found = mine[None, :] & (row[None, :] == rows[:, None])
                token = tl.sum(tl.where(found, at[None, :], 0), 1) // top_k
                inside = (rows < start + count)[:, None] & (column < hidden)[None, :]
                value = tl.load(x + token.to(tl.int64)[:, None] * stride_x + column[None, :], mask=inside)
                tl.store(sorted_x + rows.to(tl.int64)[:, None] * hidden + column[None, :], value, mask=inside)


@triton.jit(do_not_specialize=["to_clear", "pairs", "EXPERTS", "KNOWN"])
def count_pairs(
    ids, expert_map, counts, cleared, to_clear, pairs, EXPERTS, KNOWN, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """counts `[blocks, BINS]`: pairs of each expert in each block of BLOCK pairs; sets `to_clear` integers to zero."""
    if DEPENDENT:
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = _local(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED)
    if DEPENDENT:
        gdc_launch_dependents()
    for begin in range(tl.program_id(0) * BINS, to_clear, tl.num_programs(0) * BINS):
        clear = begin + tl.arange(0, BINS)
        tl.store(cleared + clear, tl.zeros([BINS], tl.int32), mask=clear < to_clear)
    found = tl.histogram(tl.minimum(local, BINS - 1), BINS, local < EXPERTS)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["pairs", "EXPERTS", "KNOWN", "MOST", "TILE", "GRAIN"])
def place_pairs(
    ids, expert_map, counts, pair_of_row, inverse, tiles, num_tiles, pairs, EXPERTS, KNOWN, MOST, TILE, GRAIN,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Rows of the pairs of one block, and (shared among programs) the list of tiles."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    local = _local(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED)
    bins = tl.arange(0, BINS)
    if DEPENDENT:
        gdc_wait()
    total = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for other in range(0, tl.num_programs(0), GROUP):
        rows = other + tl.arange(0, GROUP)
        part = tl.load(
            counts + rows[:, None] * BINS + bins[None, :], mask=(rows < tl.num_programs(0))[:, None], other=0
        )
        total += tl.sum(part, 0)
        before += tl.sum(tl.where((rows < block)[:, None], part, 0), 0)
    total = tl.where(bins < EXPERTS, total, 0)
    start = tl.cumsum(total) - total
    base = start + before
    # The rank of a pair among the earlier ones of its block with its expert.
    own = tl.arange(0, BLOCK)
    key = tl.sort(local * BLOCK + own)  # unique, so the order is stable
    expert = key // BLOCK
    position = tl.arange(0, BLOCK)
    in_block = tl.histogram(tl.minimum(local, BINS - 1), BINS, local < EXPERTS)
    offset = tl.cumsum(in_block) - in_block
    clipped = tl.minimum(expert, BINS - 1)
    row = tl.gather(base, clipped, 0) + position - tl.gather(offset, clipped, 0)
    pair = block * BLOCK + key % BLOCK
    there = expert < EXPERTS
    tl.store(pair_of_row + row, pair, mask=there)
    tl.store(inverse + pair, tl.where(there, row, -1), mask=expert <= EXPERTS)
    if DEPENDENT:
        gdc_launch_dependents()
    tiles_of, height = _tiles_of(total, TILE, GRAIN)
    first_of = tl.cumsum(tiles_of) - tiles_of
    for one in range(block, tl.max(tiles_of), tl.num_programs(0)):  # this tile of every expert that has as many
        entry = tiles + (first_of + one) * 8
        filled = one < tiles_of
        tl.store(entry, bins, mask=filled)
        tl.store(entry + 1, start + one * height, mask=filled)
        tl.store(entry + 2, start + total, mask=filled)
        tl.store(entry + 3, first_of, mask=filled)
        tl.store(entry + 4, tiles_of, mask=filled)
        tl.store(entry + 5, height, mask=filled)
    if block == 0:
        _mark_unused(tiles, num_tiles, tl.sum(tiles_of), MOST, BINS)


@triton.jit(do_not_specialize=["pairs", "top_k"])
def gather_rows(
    x, sorted_x, pair_of_row, tiles, num_tiles, pairs, top_k, hidden, stride_x, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """sorted_x[row] = x[token of row]. Programs: (ROWS rows, COLUMNS columns)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if DEPENDENT:
        gdc_wait()
    if DEPENDENT:
        gdc_launch_dependents()
    used = tl.load(num_tiles)
    rows = tl.load(tiles + tl.maximum(used - 1, 0) * 8 + 2, mask=used > 0, other=0)
    token = tl.load(pair_of_row + row, mask=row < pairs, other=0) // top_k
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    value = tl.load(x + token.to(tl.int64)[:, None] * stride_x + column[None, :], mask=inside)
    tl.store(sorted_x + row.to(tl.int64)[:, None] * hidden + column[None, :], value, mask=inside)


@triton.jit
def _as_float(part):
    """float32 of a stored result; int16 as `common.rounded` makes it."""
    if part.dtype == tl.int16:
        bits = part.to(tl.int32) << 16
        small = ((bits & 0x7FFF0000) >> 1) | (bits & -0x80000000)
        value = small.to(tl.float32, bitcast=True) * 18446744073709551616.0  # 2^64
        return tl.where(part == 0x7FFF, float("nan"), value)
    else:
        return part.to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "rows", "stride_w"])
def sum_rows(
    parts,
    inverse,
    weights,
    y,
    tokens,
    hidden,
    rows,
    stride_w,
    TOP_K: tl.constexpr,
    SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
    DEPENDENT: tl.constexpr,
    INTERPRET: tl.constexpr,
):
    """y[t] = sum over choices of weight (1 if None) * (sum over splits of parts `[SPLITS, rows, hidden]`), in order."""
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (token < tokens)[:, None] & (column < hidden)[None, :]
    total = tl.zeros([TOKENS, COLUMNS], tl.float32)
    if DEPENDENT:
        gdc_wait()
    for choice in tl.static_range(TOP_K):
        row = tl.load(inverse + token * TOP_K + choice, mask=token < tokens, other=-1)
        there = inside & (row >= 0)[:, None]
        value = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for split in tl.static_range(SPLITS):
            at = (split * rows + row).to(tl.int64)
            part = tl.load(parts + at[:, None] * hidden + column[None, :], mask=there, other=0)
            value += _as_float(part)
        if weights is not None:
            weight = tl.load(weights + token * stride_w + choice, mask=token < tokens, other=0.0).to(tl.float32)
            value *= weight[:, None]
        total += value
    where = y + token.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(where, round_to(total, y.dtype.element_ty, INTERPRET), mask=inside)
