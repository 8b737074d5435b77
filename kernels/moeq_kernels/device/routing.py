"""Kernels that sort routed pairs by expert and sum their results: deterministic, without atomics and host reads.

DEPENDENT: whether the kernel starts before the preceding one has ended (programmatic dependent launch, sm_90 on).

A pair is `token * top_k + choice`. Sorted rows are numbered by expert, then by pair. `inverse[pair]` is the row of a
pair, or -1 if its expert is not local. A row of `tiles` holds: expert (-1: unused), first row, end row of the expert,
first tile of the expert, number of its tiles, their height (the last one may have fewer rows), 0, 0. Heights are
multiples of GRAIN and at most TILE.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from moeq_kernels.device.caching import EVICT_FIRST, EVICT_LAST
from moeq_kernels.device.numerics import round_to


@triton.jit
def local_experts(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED: tl.constexpr):
    """Return local experts of the pairs `at`: EXPERTS if the expert is not local, EXPERTS + 1 beyond the last pair."""
    chosen = tl.load(ids + at, mask=at < pairs, other=-1).to(tl.int32)
    known = (chosen >= 0) & (chosen < KNOWN)
    if MAPPED:
        chosen = tl.load(expert_map + tl.where(known, chosen, 0)).to(tl.int32)
        known = known & (chosen >= 0) & (chosen < EXPERTS)
    return tl.where(at < pairs, tl.where(known, chosen, EXPERTS), EXPERTS + 1)


@triton.jit
def _tiles_of(count, TILE, GRAIN):
    """Return how many tiles experts with `count` rows need, and the height that makes these few tiles even."""
    fewest = tl.maximum((count + TILE - 1) // TILE, 1)
    even = (count + fewest - 1) // fewest
    height = tl.maximum((even + GRAIN - 1) // GRAIN, 1) * GRAIN
    return (count + height - 1) // height, height


@triton.jit
def list_tiles(tiles, num_tiles, count, MOST, TILE, GRAIN, lister, listers, BINS: tl.constexpr):
    """List the tiles of experts with `count [BINS]` rows; each of `listers` programs writes its share.

    `tiles` has room for MOST tiles; those that are not used get the expert -1.
    """
    expert = tl.arange(0, BINS)
    number, height = _tiles_of(count, TILE, GRAIN)
    end = tl.cumsum(count)
    start = end - count
    first = tl.cumsum(number) - number
    used = tl.sum(number)
    for one in range(lister, tl.max(number), listers):  # tile `one` of every expert that has it
        entry = tiles + (first + one) * 8
        filled = one < number
        tl.store(entry, expert, mask=filled)
        tl.store(entry + 1, start + one * height, mask=filled)
        tl.store(entry + 2, end, mask=filled)
        tl.store(entry + 3, first, mask=filled)
        tl.store(entry + 4, number, mask=filled)
        tl.store(entry + 5, height, mask=filled)
    for at in range(used + lister * BINS, MOST, listers * BINS):
        unused = at + expert
        tl.store(tiles + unused * 8, tl.full([BINS], -1, tl.int32), mask=unused < MOST)
    if lister == 0:
        tl.store(num_tiles, used)


@triton.jit
def count_rows(local, EXPERTS, BINS: tl.constexpr):
    """Count pairs per expert. A histogram costs elements x BINS / 32, so only programs that list tiles build one."""
    return tl.histogram(tl.minimum(local, BINS - 1), BINS, local < EXPERTS)


@triton.jit
def sorted_rows(local, mine, pair, PAIRS: tl.constexpr):
    """Return the sorted rows of the pairs `pair` with experts `mine`: the number of pairs that come before each."""
    key = local * PAIRS + tl.arange(0, PAIRS)
    own = mine * PAIRS + pair
    return tl.sum((key[None, :] < own[:, None]).to(tl.int32), 1)


@triton.jit(do_not_specialize=["to_clear", "pairs", "top_k", "EXPERTS", "KNOWN", "MOST", "TILE", "GRAIN", "listers"])
def route_few(
    ids, expert_map, x, sorted_x, pair_of_row, inverse, tiles, num_tiles, cleared, to_clear, pairs, top_k, hidden,
    stride_x, EXPERTS, KNOWN, MOST, TILE, GRAIN, listers, MAPPED: tl.constexpr, PAIRS: tl.constexpr,
    BINS: tl.constexpr, ROWS: tl.constexpr, COPY: tl.constexpr, COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Sort up to a few thousand pairs in one kernel; grid: (listers + blocks of ROWS pairs, slices).

    Every program reads all pairs. The first `listers` programs list the tiles; the others place their pairs and, with
    COPY, copy tokens to their sorted rows (interleaved slices of COLUMNS columns). Otherwise `gather_rows` or a product
    copies them. Programs also set `to_clear` integers of `cleared` to zero.
    """
    block = tl.program_id(0) - listers
    part = tl.program_id(1)
    if DEPENDENT:
        gdc_wait()
    local = local_experts(ids, expert_map, pairs, tl.arange(0, PAIRS), EXPERTS, KNOWN, MAPPED)
    if DEPENDENT:
        gdc_launch_dependents()
    if block < 0:
        if part == 0:
            count = count_rows(local, EXPERTS, BINS)
            list_tiles(tiles, num_tiles, count, MOST, TILE, GRAIN, block + listers, listers, BINS)
    else:
        pair = block * ROWS + tl.arange(0, ROWS)
        mine = local_experts(ids, expert_map, pairs, pair, EXPERTS, KNOWN, MAPPED)
        there = mine < EXPERTS
        row = sorted_rows(local, mine, pair, PAIRS)
        if part == 0:
            tl.store(pair_of_row + row, pair, mask=there)
            tl.store(inverse + pair, tl.where(there, row, -1), mask=pair < pairs)
            for begin in range(block * 512, to_clear, (tl.num_programs(0) - listers) * 512):
                clear = begin + tl.arange(0, 512)
                tl.store(cleared + clear, tl.zeros([512], tl.int32), mask=clear < to_clear)
        if COPY:
            source = x + (pair // top_k).to(tl.int64)[:, None] * stride_x
            target = sorted_x + row.to(tl.int64)[:, None] * hidden
            for begin in range(part * COLUMNS, hidden, tl.num_programs(1) * COLUMNS):
                column = (begin + tl.arange(0, COLUMNS))[None, :]
                inside = there[:, None] & (column < hidden)
                value = tl.load(source + column, mask=inside)
                tl.store(target + column, value, mask=inside, eviction_policy=EVICT_LAST)


@triton.jit(do_not_specialize=["to_clear", "pairs", "EXPERTS", "KNOWN"])
def count_pairs(
    ids, expert_map, counts, cleared, to_clear, pairs, EXPERTS, KNOWN, MAPPED: tl.constexpr, BLOCK: tl.constexpr,
    BINS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Count pairs per expert in each block of BLOCK pairs into `[blocks, BINS]`; set `to_clear` integers to zero."""
    if DEPENDENT:
        gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    local = local_experts(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED)
    if DEPENDENT:
        gdc_launch_dependents()
    for begin in range(tl.program_id(0) * BINS, to_clear, tl.num_programs(0) * BINS):
        clear = begin + tl.arange(0, BINS)
        tl.store(cleared + clear, tl.zeros([BINS], tl.int32), mask=clear < to_clear)
    tl.store(counts + tl.program_id(0) * BINS + tl.arange(0, BINS), count_rows(local, EXPERTS, BINS))


@triton.jit(do_not_specialize=["pairs", "EXPERTS", "KNOWN", "MOST", "TILE", "GRAIN"])
def place_pairs(
    ids, expert_map, counts, pair_of_row, inverse, tiles, num_tiles, pairs, EXPERTS, KNOWN, MOST, TILE, GRAIN,
    MAPPED: tl.constexpr, BLOCK: tl.constexpr, BINS: tl.constexpr, GROUP: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Place the pairs of one block, and write a share of the list of tiles."""
    block = tl.program_id(0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    local = local_experts(ids, expert_map, pairs, at, EXPERTS, KNOWN, MAPPED)
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
    # Rank of a pair among those of its block with the same expert.
    position = tl.arange(0, BLOCK)
    key = tl.sort(local * BLOCK + position)  # unique, so the order is stable
    expert = key // BLOCK
    in_block = count_rows(local, EXPERTS, BINS)
    offset = tl.cumsum(in_block) - in_block
    clipped = tl.minimum(expert, BINS - 1)
    row = tl.gather(base, clipped, 0) + position - tl.gather(offset, clipped, 0)
    pair = block * BLOCK + key % BLOCK
    there = expert < EXPERTS
    tl.store(pair_of_row + row, pair, mask=there)
    tl.store(inverse + pair, tl.where(there, row, -1), mask=expert <= EXPERTS)
    if DEPENDENT:
        gdc_launch_dependents()
    list_tiles(tiles, num_tiles, total, MOST, TILE, GRAIN, block, tl.num_programs(0), BINS)


@triton.jit(do_not_specialize=["pairs", "top_k"])
def gather_rows(
    x, sorted_x, pair_of_row, tiles, num_tiles, pairs, top_k, hidden, stride_x, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, DEPENDENT: tl.constexpr,
):
    """Copy tokens to sorted rows: sorted_x[row] = x[token of row]; grid: (ROWS rows, COLUMNS columns)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    used = tl.load(num_tiles)
    rows = tl.load(tiles + tl.maximum(used - 1, 0) * 8 + 2, mask=used > 0, other=0)
    token = tl.load(pair_of_row + row, mask=row < pairs, other=0) // top_k
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (column < hidden)[None, :]
    value = tl.load(x + token.to(tl.int64)[:, None] * stride_x + column[None, :], mask=inside)
    target = sorted_x + row.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(target, value, mask=inside, eviction_policy=EVICT_LAST)


@triton.jit
def _as_float(part):
    """Convert a stored result to float32; int16 encodes a float as in `w4a16.device.common.rounded`."""
    if part.dtype == tl.int16:
        bits = part.to(tl.int32) << 16
        small = ((bits & 0x7FFF0000) >> 1) | (bits & -0x80000000)
        value = small.to(tl.float32, bitcast=True) * 18446744073709551616.0  # 2^64
        return tl.where(part == 0x7FFF, float("nan"), value)
    else:
        return part.to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "rows", "stride_w"])
def sum_rows(
    parts, inverse, weights, y, tokens, hidden, rows, stride_w, TOP_K: tl.constexpr, SPLITS: tl.constexpr,
    COLUMNS: tl.constexpr, TOKENS: tl.constexpr, DEPENDENT: tl.constexpr, INTERPRET: tl.constexpr,
):
    """Compute y[t] = sum over choices of weight (1 if None) * sum over splits of parts `[SPLITS, rows, hidden]`."""
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
            place = parts + at[:, None] * hidden + column[None, :]
            part = tl.load(place, mask=there, other=0, eviction_policy=EVICT_FIRST)
            value += _as_float(part)
        if weights is not None:
            weight = tl.load(weights + token * stride_w + choice, mask=token < tokens, other=0.0).to(tl.float32)
            value *= tl.where(row >= 0, weight, 0.0)[:, None]  # the weight of a choice without an expert may be NaN
        total += value
    where = y + token.to(tl.int64)[:, None] * hidden + column[None, :]
    tl.store(where, round_to(total, y.dtype.element_ty, INTERPRET), mask=inside)
