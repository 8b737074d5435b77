"""Which Hopper kernel a call uses, and with what sizes: a table and a short rule, from shapes alone.

While all pairs together read little, the two kernels for few tokens, which need no sorting, take the least time. Then
what decides is how many tokens an expert that is hit gets on average. With few tokens the time is that of reading
weights: the narrow kernel, whose programs the GPU balances itself and which share a tile's k, where tiles are few; then
the queue kernel, which makes both products and keeps reading across tiles. With more the tokens' own traffic and
multiplying count too, and the wide kernel has several warpgroups share them. The limits were fitted to layers of models
and to random ones on an H200 and, for codes of 4 bits where memory is slow, on an H100 (see kernels/bench/TUNING.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from moeq_kernels.gpu import H200, Gpu
from moeq_kernels.hopper.w4a16.kinds import KINDS


@dataclass(frozen=True)
class Narrow:
    """Sizes of the narrow kernel.

    Attributes:
        tokens: token rows per tile (8 or 16).
        stages: steps in shared memory.
        after: group scales multiply float32 sums (else they are folded into bf16 weights).
        resident: programs that a multiprocessor holds.
        registers: cap for a thread, or None.
        step: rows of k in a step (64 or 128).
    """

    tokens: int
    stages: int
    after: bool
    resident: int
    registers: int | None = None
    step: int = 128


@dataclass(frozen=True)
class Direct:
    """Sizes of the two kernels for very few tokens.

    Attributes:
        stages: steps in shared memory at most.
        after, step: attributes of `Narrow`.
        tokens: token rows per tile.
    """

    stages: int = 4
    after: bool = True
    step: int = 128
    tokens: int = 1


@dataclass(frozen=True)
class Queue:
    """Sizes of the kernel for both products.

    Attributes:
        tokens: token rows per tile (8, 16, 32 or 64).
        stages: steps in shared memory.
        resident: programs that a multiprocessor holds (2 or 3).
        after, step: attributes of `Narrow`.
        rows: rows of k whose weights are in registers at a time (32 or 64).
        up, down: tiles of either product are cut into so many shares for each program at most.
        least: tiles are multiplied at the smallest power of two from here to `tokens` that is enough; 0: at `tokens`.
    """

    tokens: int
    stages: int
    resident: int
    after: bool = False
    step: int = 128
    rows: int = 64
    up: int = 3
    down: int = 3
    least: int = 0

    @property
    def registers(self) -> int:
        """Registers per thread, before the copy warp passes on some of its own."""
        return 65536 // (256 * self.resident) // 8 * 8


@dataclass(frozen=True)
class Wide:
    """Sizes of the wide kernel.

    Attributes:
        tokens: upper bound of token rows per tile (32, 64, 96 or 160).
        stages: steps of 64 rows of k in shared memory.
        warpgroups: that multiply (2 or 4).
        registers: registers per thread of these warpgroups.
        gathers: the gate-up product picks tokens itself (two warpgroups only), else a kernel before it copies them.
        fine: heights of tiles are multiples of 16, not of 32 (96 and 160 tokens only).
    """

    tokens: int
    stages: int
    warpgroups: int
    registers: int
    gathers: bool = False
    fine: bool = False


Kernel = Narrow | Direct | Queue | Wide


@dataclass(frozen=True)
class Plan:
    """A kernel, and how many programs share a tile's k in each product (gate-up: narrow only)."""

    kernel: Kernel
    gate_up_splits: int = 1
    down_splits: int = 1


#: Shared memory that a program of the queue and one of the wide kernel needs beside its steps.
_QUEUE_BYTES = 9472
_REGROUPING_WIDE = 16640

DIRECT = Direct()
#: Weights of an expert up to which the kernels for few tokens are used; larger ones keep the GPU busy anyway.
DIRECT_WEIGHTS = 1 << 25
#: Weights that all pairs together read there: every pair reads its expert for itself. Nothing else told so well whether
#: this pays.
DIRECT_READ = 290 * 10**6
#: DIRECT_READ for light codes on GPUs with fast memory, and for int8 activations.
DIRECT_READ_LESS = 165 * 10**6
#: Tokens for an expert up to which it was measured.
DIRECT_MEAN = 1.6
#: Tokens for an expert up to which `mma.sync` kernels are faster where one kernel cannot make both products.
MMA_MEAN = 24.0
#: With DIRECT_MEAN tokens and FEW_COLUMNS at most they are ahead from so many waves of 128 columns of gate and up on,
#: up to so many bytes of weights.
MMA_WAVES, MMA_BYTES = 1.15, 250 * 10**6
NARROW8 = Narrow(8, 3, after=True, resident=4, registers=128)
NARROW16 = Narrow(16, 2, after=False, resident=4, registers=128)
QUEUE8 = Queue(8, 3, resident=3, after=True)
QUEUE16 = Queue(16, 3, resident=3, after=True, rows=32, down=2, least=8)
QUEUE32 = Queue(32, 4, resident=2, up=1, down=1, least=16)
QUEUE64 = Queue(64, 6, resident=2, step=64, up=2, down=2, least=32)
QUEUE64_INT4 = replace(QUEUE64, stages=3, step=128)
WIDE32 = Wide(32, 6, warpgroups=4, registers=120)
WIDE64 = Wide(64, 6, warpgroups=4, registers=112)
WIDE96 = Wide(96, 8, warpgroups=2, registers=232, fine=True)
WIDE160 = Wide(160, 6, warpgroups=2, registers=232)
#: With few columns of gate and up, picking tokens costs less than copying them first; up to so many, and those that are
#: few for other kernels too.
GATHER_COLUMNS, FEW_COLUMNS = 1024, 512
#: Its programs make half as many columns as those of `WIDE64`, so with few tiles more multiprocessors have work.
WIDE64_HALVES = Wide(64, 9, warpgroups=2, registers=232, gathers=True)
#: What replaces kernels of the table then, and the columns up to which it does.
GATHERING: dict[Kernel, tuple[int, Kernel]] = {
    WIDE64: (FEW_COLUMNS, WIDE64_HALVES),
    WIDE96: (GATHER_COLUMNS, replace(WIDE96, gathers=True)),
    WIDE160: (GATHER_COLUMNS, replace(WIDE160, gathers=True)),
}
#: For e2m1, where scales are folded anyway: more stages, and all of the weights of a step in registers.
QUEUE16_FOLDED = Queue(16, 3, resident=3, least=8)
#: For light codes two programs with more stages, where three on each multiprocessor would have less than a tile each.
QUEUE16_PAIR = Queue(16, 5, resident=2, least=8)
#: Waves of 128 columns of gate and up from which three programs have a tile of 256 columns each, but for a tenth.
QUEUE16_WAVES = 5.4
#: Tokens for an expert up to which the queue kernel has tiles of 8. Beyond, tiles of 16 that are multiplied at 8 where
#: that is enough take as long with uniform routing, and less with uneven one.
QUEUE8_MEAN = 3.0
#: Weights in bytes beyond which the queue kernel keeps the memory busier, even where all of the narrow one's programs
#: run at once.
NARROW_BYTES = 200 * 10**6
#: The same where tiles are few and experts get more than 6 tokens, as many as its tiles have at most.
NARROW_BYTES_FULL = 120 * 10**6
#: Tiles are few up to so many waves of 128 columns of gate and up.
FEW_WAVES = 3
Table = tuple[tuple[float, Narrow | Queue | Wide], ...]
_MANY: Table = ((44.0, WIDE64), (90.0, WIDE96), (float("inf"), WIDE160))
_FEW: Table = ((1.0, NARROW8), (5.0, QUEUE8))
#: (tokens per hit expert up to, kernel), tried in order; for NARROW8, QUEUE8 and int4's QUEUE16 the work counts, too.
#: Tiles of 16 tokens hold until every fourth expert or so has more than 16.
TABLE: Table = (_FEW[0], (6.0, QUEUE8), (14.0, QUEUE16), (20.0, QUEUE32), (24.0, WIDE32), *_MANY)
#: TABLE for down products of many steps (see SHORT_K).
LONG_TABLE: Table = (_FEW[0], (6.0, QUEUE8), (14.0, QUEUE16), (26.0, QUEUE32), *_MANY)
#: The same with so many waves of tiles that only an even flow of reads counts.
MANY_WAVES = 9
LONG_TABLE_MANY: Table = (*LONG_TABLE[:4], (56.0, QUEUE64_INT4), *_MANY[1:])
#: For codes of 8 bits: from 8 tokens on programs of half the columns, which pick tokens themselves.
BYTES_TABLE: Table = (*_FEW, (8.0, QUEUE16), (48.0, WIDE64_HALVES), *_MANY[1:])
#: For e2m1, whose integer work counts beside its bytes.
_E2M1_MANY: Table = ((30.0, QUEUE32), (48.0, QUEUE64), (90.0, WIDE96), (float("inf"), WIDE160))
E2M1_TABLE: Table = (*_FEW, (14.0, QUEUE16_FOLDED), *_E2M1_MANY)
#: E2M1_TABLE for light codes, with int4's kernel for tiles of 64.
LIGHT_E2M1_TABLE: Table = tuple((limit, QUEUE64_INT4 if one == QUEUE64 else one) for limit, one in E2M1_TABLE)
#: What NARROW_BYTES is where memory is slow.
SLOW_NARROW_BYTES = 260 * 10**6
#: For int4 there.
SLOW_TABLE: Table = ((12.0, QUEUE16_PAIR), (30.0, WIDE32), *_MANY[1:])
SLOW_TABLE_MANY: Table = (*SLOW_TABLE[:2], (56.0, QUEUE64_INT4), *_MANY[1:])
#: For e2m1 there.
SLOW_E2M1_TABLE: Table = ((14.0, QUEUE16_PAIR), *_E2M1_MANY)
#: Tokens for an expert from which, and up to which, few columns are soonest done in programs of 128 of them there.
FEW_COLUMNS_FROM, FEW_COLUMNS_TO = 20.0, 48.0
#: Features of a down product's k up to which it counts as short.
SHORT_K = 1024
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)
#: Start and end of a program, in steps.
_OVERHEAD_STEPS = 2.5


def tokens_per_hit(pairs: int, experts: int) -> float:
    """Return the average tokens of an expert that gets any, for uniform routing."""
    hit = experts * (1.0 - (1.0 - 1.0 / max(1, experts)) ** pairs)
    return pairs / max(hit, 1.0)


def splits_for(items: float, steps: int, resident: int) -> int:
    """Return how many programs should share a tile's k; of `items` tiles of `steps` steps, `resident` fit at once.

    Least time of: waves of programs x (steps of each + overhead). With less than one wave programs are faster, and
    time falls as the square root. Beyond one wave sharing only evens out the last one: it then has to save a tenth,
    and leave every program 12 steps.
    """

    def cost(splits: int) -> float:
        waves = items * splits / resident
        each = -(-steps // splits)
        if waves <= 1.0:
            return math.sqrt(waves) * (each + _OVERHEAD_STEPS)
        if splits > 1 and each < 12:
            return math.inf
        return math.ceil(waves) * (each + _OVERHEAD_STEPS) * (1.1 if splits > 1 else 1.0)

    best = min((splits for splits in _SPLITS if splits == 1 or 2 * splits <= steps), key=cost)
    return -(-steps // -(-steps // best))  # without empty shares


def table_for(kind: str, intermediate: int = 0, waves: float = 0.0) -> Table:
    """Return the table for a kind of codes, k of the down product and tiles of gate and up per SM."""
    if KINDS[kind].is_small_float:
        return LIGHT_E2M1_TABLE if KINDS[kind].has_cheap_decode else E2M1_TABLE
    if KINDS[kind].bits == 8:
        return BYTES_TABLE
    return TABLE if intermediate <= SHORT_K else LONG_TABLE_MANY if waves > MANY_WAVES else LONG_TABLE


def kernel_for(kernel: Kernel, kind: str, group: int, gpu: Gpu = H200) -> Kernel:
    """Adapt a kernel of the tables to other codes than `uint4` and groups other than 128."""
    if isinstance(kernel, Wide):
        if kind != "uint4" and kernel.warpgroups == 4 and kernel.tokens == 64:  # too few registers, too little memory
            kernel = replace(kernel, warpgroups=2, registers=232, stages=9)
        if kind != "uint4":  # of e2m1 no faster, of others not measured
            kernel = replace(kernel, fine=False)
        scales = max(1, 64 // group if group else 1) * 256
        bytes_of_step = kernel.warpgroups * (1024 * KINDS[kind].bits + scales) + 128 * kernel.tokens
        room = gpu.shared_bytes - kernel.warpgroups * _REGROUPING_WIDE
        return replace(kernel, stages=min(kernel.stages, room // bytes_of_step))
    after = kernel.after and kind == "uint4" and (group >= 64 or not group)
    bits, small_float = KINDS[kind].bits, KINDS[kind].is_small_float
    if isinstance(kernel, Narrow):  # four programs have to fit a multiprocessor's shared memory
        if bits == 8:
            return replace(kernel, after=False, step=64, stages=3)
        return replace(kernel, after=after, stages=2 if small_float else kernel.stages)
    step = 64 if bits == 8 else kernel.step
    if isinstance(kernel, Direct):  # of MXFP4's wider scales, four stages would leave room for two programs only
        return replace(kernel, after=after, step=step, stages=3 if small_float else kernel.stages)
    kernel = replace(kernel, after=after, step=step)
    scales = max(1, step // group if group else 1) * 256 * KINDS[kind].scale_bytes
    bytes_of_step = 32 * bits * step + scales + 2 * step * kernel.tokens
    room = gpu.shared_bytes // kernel.resident - _QUEUE_BYTES
    return replace(kernel, stages=min(kernel.stages, room // bytes_of_step))


def shares_for(items: int, steps: int, most: int, gpu: Gpu = H200) -> int:
    """Return how many programs share a tile's k in the kernels for few tokens, `most` at most.

    All should start at once, some three on each multiprocessor; one more would start when others have ended.
    """
    return max(1, min(most, steps, 3 * gpu.multiprocessors // 32 * 32 // items))


@dataclass(frozen=True)
class Work:
    """What a call has to do, as far as the kernel depends on it.

    Attributes:
        pairs: routed ones, among `experts`.
        hidden, intermediate: packed sizes.
        kind: a key of `kinds.KINDS`.
        top_k: pairs of a token, which have different experts.
        gpu: whose multiprocessors, shared memory and rate of reading are planned for.
        both: whether one kernel can make both products (their weights are read alike).
    """

    pairs: int
    experts: int
    hidden: int
    intermediate: int
    kind: str = "uint4"
    top_k: int = 1
    gpu: Gpu = H200
    both: bool = True

    @property
    def mean(self) -> float:
        """Tokens for an expert that is hit."""
        return tokens_per_hit(self.pairs, self.experts)

    @property
    def hit(self) -> float:
        """Experts hit. One program too many is a second wave, so they are counted as they are, not by single pairs."""
        missed = 1.0 - min(self.top_k, self.experts) / self.experts
        return self.experts * (1.0 - missed ** (self.pairs / self.top_k))

    @property
    def bytes(self) -> float:
        """Weight bytes of all experts that are hit."""
        return self.hit * 3 * self.hidden * self.intermediate * KINDS[self.kind].bits / 8

    @property
    def waves(self) -> float:
        """128 columns of gate and up by expert, for each multiprocessor."""
        return self.hit * -(-self.intermediate // 128) / self.gpu.multiprocessors

    @property
    def one_wave(self) -> bool:
        """Whether all programs of the narrow kernel run at once."""
        tiles = self.hit * max(1.0, self.pairs / self.hit / NARROW8.tokens)
        resident = self.gpu.multiprocessors * NARROW8.resident
        return tiles * -(-self.intermediate // 128) <= resident and tiles * -(-self.hidden // 256) <= 2 * resident

    @property
    def halves(self) -> bool:
        """Whether programs that make 128 columns take less time than those that make 256."""
        halves, wholes = (
            math.ceil(self.hit * -(-self.intermediate // of) / self.gpu.multiprocessors) for of in (128, 256)
        )
        return 2 * halves <= 3 * wholes


def kernel_for_few_tiles(base: Kernel, work: Work) -> Kernel:
    """Replace a kernel of the table if tiles are so few that whole waves of programs count."""
    int4, small_float = work.kind == "uint4", KINDS[work.kind].is_small_float
    mean, waves = work.mean, work.waves
    if waves * max(1.0, mean / 64.0 + 0.5) <= 1.0 and isinstance(base, Wide):
        return WIDE64_HALVES
    if base in (QUEUE16, QUEUE16_PAIR, QUEUE16_FOLDED):
        # The queue kernel shares the k of tiles that are very few, and multiplies tiles of 16 tokens once.
        if int4 and waves <= 0.6 and work.hidden > 4096:
            return QUEUE8
        if (small_float and not 0.5 < waves <= 1.0) or (int4 and (waves > 2.0 or (waves > 1.0 and mean <= 9.0))):
            return base
    elif mean > 60.0 or base == WIDE160:
        return base
    if 1.0 < waves <= 2.0 and mean <= (30.0 if int4 else 24.0):
        return WIDE32
    return WIDE64 if int4 and base != WIDE96 and not work.halves else WIDE64_HALVES


def kernel_where_memory_is_fast(work: Work) -> Kernel:
    """Choose the kernel by what was fitted on an H200."""
    kind, mean, waves = work.kind, work.mean, work.waves
    small_float, light, few_tiles = KINDS[kind].is_small_float, KINDS[kind].has_cheap_decode, waves <= FEW_WAVES
    base = next(one for limit, one in table_for(kind, work.intermediate, waves) if mean <= limit)
    queue16 = QUEUE16_FOLDED if small_float else QUEUE16
    if light and waves <= QUEUE16_WAVES:
        base = QUEUE16_PAIR if base == queue16 else base
        queue16 = QUEUE16_PAIR
    full = base not in (NARROW8, QUEUE8)
    if not full or (few_tiles and round(mean) <= NARROW8.tokens):
        few_bytes = work.bytes <= (NARROW_BYTES_FULL if full else NARROW_BYTES)
        if (work.one_wave and few_bytes) or not (work.both or full):
            return NARROW8
        if few_tiles and KINDS[kind].bits == 8 and mean > _FEW[1][0]:
            return WIDE32
        # A second tile of 8 tokens costs less than what few tiles leave idle.
        return QUEUE8 if mean <= QUEUE8_MEAN or (few_tiles and not small_float) else queue16
    return kernel_for_few_tiles(base, work) if few_tiles else base


def kernel_where_memory_is_slow(work: Work) -> Kernel:
    """Choose the kernel for 4-bit codes by what was fitted on an H100."""
    mean, small_float = work.mean, KINDS[work.kind].is_small_float
    if mean <= 8.0 and ((work.one_wave and work.bytes <= SLOW_NARROW_BYTES) or not work.both):
        return NARROW8
    if mean <= 14.0 and work.one_wave and work.bytes <= NARROW_BYTES and small_float:
        return NARROW16
    few_columns = work.intermediate <= FEW_COLUMNS
    many = work.waves > MANY_WAVES and not few_columns
    table = SLOW_E2M1_TABLE if small_float else SLOW_TABLE_MANY if many else SLOW_TABLE
    base = next(one for limit, one in table if mean <= limit)
    if base == QUEUE16_PAIR:
        return WIDE64_HALVES if work.waves <= 1.0 and mean > 12.0 else base
    if work.waves <= FEW_WAVES:
        return kernel_for_few_tiles(base, work)
    if few_columns and FEW_COLUMNS_FROM < mean <= FEW_COLUMNS_TO:
        return WIDE64_HALVES
    if few_columns and base == QUEUE32:
        return WIDE32 if work.intermediate > 128 else WIDE64_HALVES
    # The wide kernels beat the queue kernel where their down products are one wave of tiles at most.
    tokens = base.tokens if isinstance(base, Queue) else 0
    one_wave = work.hit * max(1.0, mean / max(1, tokens)) * -(-work.hidden // 512) <= 1.1 * work.gpu.multiprocessors
    return {32: WIDE32, 64: WIDE64}.get(tokens, base) if one_wave else base


def mma_is_faster(work: Work, kernel: Kernel) -> bool:
    """Return whether `mma.sync` kernels are faster than `kernel` of `choose`, as fitted on an H100 and an H200.

    They pick tokens themselves, which counts where those weigh most beside an expert's weights, and five of them run on
    a multiprocessor, which counts where tiles are few.
    """
    mean, waves, direct = work.mean, work.waves, isinstance(kernel, Direct)
    if not work.both:
        return not direct and mean <= MMA_MEAN
    if KINDS[work.kind].bits != 4:
        return False
    if work.gpu.slow_memory:
        few_tiles = waves <= 1.0 and NARROW8.tokens < mean <= (12.0 if waves > 0.5 else 30.0)
        return not direct and (few_tiles or (work.intermediate <= 256 and 6.0 < mean <= 11.0))
    few_columns = KINDS[work.kind].has_cheap_decode and work.intermediate <= FEW_COLUMNS
    return few_columns and mean <= DIRECT_MEAN and waves > MMA_WAVES and work.bytes <= MMA_BYTES


def choose(work: Work, group: int, gated: bool = True) -> Plan:
    """Choose the plan for a call.

    Args:
        group: weights that share a scale, 0 for one scale for each output feature.
        gated: whether the first product makes gate and up (only then can the narrow kernel share its k).
    """
    pairs, hidden, intermediate, kind, gpu = work.pairs, work.hidden, work.intermediate, work.kind, work.gpu
    slow = gpu.slow_memory and KINDS[kind].bits == 4
    weights, mean = 3 * hidden * intermediate, work.mean
    few = weights <= DIRECT_WEIGHTS and pairs * weights <= DIRECT_READ
    if KINDS[kind].has_cheap_decode and not slow:
        few = pairs * weights <= DIRECT_READ_LESS
    if gated and few and mean <= DIRECT_MEAN:
        kernel = kernel_for(DIRECT, kind, group, gpu)
        up = shares_for(pairs * -(-intermediate // 128), -(-hidden // kernel.step), 16, gpu)
        return Plan(kernel, up, shares_for(pairs * -(-hidden // 256), -(-intermediate // kernel.step), 8, gpu))
    base = kernel_where_memory_is_slow(work) if slow else kernel_where_memory_is_fast(work)
    if isinstance(base, Queue) and not work.both:
        base = WIDE64  # so it is with a single group of k in the down product, hence few columns of gate and up
    most_columns, gathering = GATHERING.get(base, (0, base))
    if kind not in ("uint4", "uint8"):  # their copy warps have little time left
        most_columns = min(FEW_COLUMNS, most_columns)
    kernel = kernel_for(gathering if intermediate <= most_columns else base, kind, group, gpu)
    if isinstance(kernel, Queue):
        return Plan(kernel)
    if isinstance(kernel, Wide):
        tiles = pairs / mean * max(1.0, mean / kernel.tokens)
        down_items = max(1.0, tiles * -(-hidden // (128 * kernel.warpgroups)))
        steps = -(-intermediate // 64)
        shares = min(4, int(gpu.multiprocessors / down_items), steps // 9)  # of 9 steps at least
        # With one long tile for each multiprocessor, halves are spread more evenly.
        even = (slow or kernel.warpgroups == 4) and down_items <= 1.1 * gpu.multiprocessors and steps >= 70
        return Plan(kernel, down_splits=max(1, shares, 2 if even else 1))
    tiles = work.hit * max(1.0, pairs / work.hit / kernel.tokens)
    resident = gpu.multiprocessors * kernel.resident
    gate_up = splits_for(tiles * -(-intermediate // 128), -(-hidden // 128), resident) if gated else 1
    return Plan(kernel, gate_up, splits_for(tiles * -(-hidden // 256), -(-intermediate // 128), resident))
