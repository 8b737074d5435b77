"""Plans of the kernels for 16-bit activations: legal kernels and sizes for a call, and the one that takes least time.

`cost` predicts the time of each candidate from shapes and the GPU's rates. The kernels and their sizes were measured on
an H100 and an H200 (see kernels/bench/TUNING.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from moeq_kernels.gpu import H200, Gpu
from moeq_kernels.hopper import cost
from moeq_kernels.hopper.cost import Tiling, Work, splits_for
from moeq_kernels.hopper.w4a16.kinds import KINDS
from moeq_kernels.mma.mma_plan import RESIDENT, MmaPlan
from moeq_kernels.mma.mma_plan import choose as mma_plan


@dataclass(frozen=True)
class Narrow:
    """Sizes of the narrow kernel."""

    tokens: int  #: token rows per tile (8 or 16)
    stages: int  #: steps in shared memory
    after: bool  #: whether group scales multiply float32 sums; otherwise they are folded into weights
    resident: int  #: programs that a multiprocessor holds
    registers: int | None = None  #: cap for a thread, or None
    step: int = 128  #: rows of k in a step (64 or 128)


@dataclass(frozen=True)
class Direct:
    """Sizes of the two kernels for very few tokens."""

    stages: int = 4  #: steps in shared memory at most
    #: Attributes of `Narrow`.
    after: bool = True
    step: int = 128
    tokens: int = 1  #: token rows per tile


@dataclass(frozen=True)
class Queue:
    """Sizes of the kernel for both products."""

    tokens: int  #: token rows per tile (8, 16, 32 or 64)
    stages: int  #: steps in shared memory
    resident: int  #: programs that a multiprocessor holds (2 or 3)
    #: Attributes of `Narrow`.
    after: bool = False
    step: int = 128
    rows: int = 64  #: rows of k whose weights are in registers at a time (32 or 64)
    #: Upper bound of the shares, per program, into which the tiles of each product are cut.
    up: int = 3
    down: int = 3
    #: Tiles are multiplied at the smallest power of two from here to `tokens` that is enough; 0: at `tokens`.
    least: int = 0

    @property
    def registers(self) -> int:
        """Registers per thread, before the copy warp passes on some of its own."""
        return 65536 // (256 * self.resident) // 8 * 8


@dataclass(frozen=True)
class Wide:
    """Sizes of the wide kernel."""

    tokens: int  #: upper bound of token rows per tile (32, 64, 96 or 160)
    stages: int  #: steps of 64 rows of k in shared memory
    warpgroups: int  #: warpgroups that multiply (2 or 4)
    registers: int  #: registers per thread of these warpgroups
    #: Whether the gate-up product gathers tokens (two warpgroups only); otherwise another kernel copies them before.
    gathers: bool = False
    fine: bool = False  #: heights of tiles are multiples of 16, not of 32 (96 and 160 tokens only)


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
NARROW8 = Narrow(8, 3, after=True, resident=4, registers=128)
NARROW16 = Narrow(16, 2, after=False, resident=4, registers=128)
QUEUE8 = Queue(8, 3, resident=3, after=True)
#: Scales multiply sums where codes are int4, else they are folded and all weights of a step are in registers.
QUEUE16 = Queue(16, 3, resident=3, after=True, rows=32, down=2, least=8)
QUEUE16_FOLDED = Queue(16, 3, resident=3, least=8)
#: Two programs with more stages, where three on each multiprocessor would have less than a tile each.
QUEUE16_PAIR = Queue(16, 5, resident=2, least=8)
QUEUE32 = Queue(32, 4, resident=2, up=1, down=1, least=16)
QUEUE64 = Queue(64, 6, resident=2, step=64, up=2, down=2, least=32)
QUEUE64_LONG = replace(QUEUE64, stages=3, step=128)
WIDE32 = Wide(32, 6, warpgroups=4, registers=120)
WIDE64 = Wide(64, 6, warpgroups=4, registers=112)
WIDE96 = Wide(96, 8, warpgroups=2, registers=232, fine=True)
WIDE160 = Wide(160, 6, warpgroups=2, registers=232)
#: Its programs make half as many columns as those of `WIDE64`, so with few tiles more multiprocessors have work.
WIDE64_HALVES = Wide(64, 9, warpgroups=2, registers=232, gathers=True)
WIDES = (WIDE32, WIDE64, WIDE64_HALVES, WIDE96, replace(WIDE96, gathers=True), WIDE160, replace(WIDE160, gathers=True))


def kernel_for(kernel: Kernel, kind: str, group: int, gpu: Gpu = H200) -> Kernel:
    """Adapt a kernel to other codes than `uint4` and groups other than 128."""
    if isinstance(kernel, Wide):
        if kind != "uint4" and kernel.warpgroups == 4 and kernel.tokens == 64:  # too few registers, too little memory
            kernel = replace(kernel, warpgroups=2, registers=232, stages=9)
        if kind != "uint4":  # fine heights are no faster with e2m1, and unmeasured with others
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
    if isinstance(kernel, Direct):  # four stages of MXFP4's wider scales would leave room for two programs only
        return replace(kernel, after=after, step=step, stages=3 if small_float else kernel.stages)
    kernel = replace(kernel, after=after, step=step)
    scales = max(1, step // group if group else 1) * 256 * KINDS[kind].scale_bytes
    bytes_of_step = 32 * bits * step + scales + 2 * step * kernel.tokens
    room = gpu.shared_bytes // kernel.resident - _QUEUE_BYTES
    return replace(kernel, stages=min(kernel.stages, room // bytes_of_step))


def shares_for(items: int, steps: int, most: int, gpu: Gpu = H200) -> int:
    """Return how many programs share a tile's k in the kernels for few tokens, `most` at most.

    The grid is kept within one wave of about three programs per SM: one more would start when others have ended.
    """
    return max(1, min(most, steps, 3 * gpu.multiprocessors // 32 * 32 // items))


#: Heights at which the wide kernel multiplies tiles, by tokens of a tile and whether heights are fine.
WIDE_HEIGHTS = {
    (32, False): (32,), (64, False): (32, 64), (96, False): (32, 64, 96), (160, False): (64, 96, 128, 160),
    (96, True): (32, 64, 80, 96), (160, True): (64, 80, 96, 128, 144, 160),
}  # fmt: skip


@cache
def tiling(kernel: Kernel | MmaPlan, kind: str) -> Tiling:
    """Return how a kernel cuts the products, as the cost model takes it."""
    codes = "8" if KINDS[kind].bits == 8 else "int4" if kind == "uint4" else "e2m1"
    size = kernel.tokens
    if isinstance(kernel, MmaPlan):
        return Tiling("mma", f"mma{size} {codes}", size, (size,), size, 256, 64, RESIDENT[size])
    if isinstance(kernel, Wide):
        key = f"wide{size}x{kernel.warpgroups}{' gathers' * kernel.gathers}{' fine' * kernel.fine} {codes}"
        heights, grain = WIDE_HEIGHTS[size, kernel.fine], 16 if kernel.fine else 32
        return Tiling("wide", key, size, heights, grain, 128 * kernel.warpgroups, 64, 1)
    if isinstance(kernel, Queue):
        key = f"queue{size}x{kernel.resident}{'h' * (kernel.rows == 32)}{kernel.step} {codes}"
        heights = tuple(one for one in (8, 16, 32, 64) if (kernel.least or size) <= one <= size)
        return Tiling("queue", key, size, heights, size, 256, kernel.step, kernel.resident)
    family = type(kernel).__name__.lower()
    resident, rows = (kernel.resident, size) if isinstance(kernel, Narrow) else (3, 8)
    return Tiling(family, f"{family}{size} {codes}", rows, (rows,), rows, 256, kernel.step, resident)


def cut(plan: Plan | MmaPlan, kind: str) -> tuple[Tiling, tuple[int, int]]:
    """Return how a plan cuts the products, and how many programs share a tile's k in each."""
    if isinstance(plan, MmaPlan):
        return tiling(plan, kind), (plan.gate_up_splits, plan.down_splits)
    kernel = plan.kernel
    shares = (kernel.up, kernel.down) if isinstance(kernel, Queue) else (plan.gate_up_splits, plan.down_splits)
    return tiling(kernel, kind), shares


#: Largest means of tokens per expert, and most pairs, for which kernels are candidates.
MAX_DIRECT_MEAN, MAX_DIRECT_PAIRS, MAX_MMA_MEAN = 1.6, 128, 48.0
#: Shares of k of the wide kernel's down product.
MAX_WIDE_SHARES = 4


def _shares_to_try(up: int, down: int) -> dict[tuple[int, int], None]:
    """Return the shares of both products to try: one, the largest powers of two up to `up` and `down`, and these."""
    return dict.fromkeys(((1, 1), (1 << (up.bit_length() - 1), 1 << (down.bit_length() - 1)), (up, down)))


def kernels(kind: str) -> tuple[Kernel, ...]:
    """Return the kernels and sizes that plans of a kind of codes may have, before `kernel_for`, the simplest first."""
    if KINDS[kind].bits == 8:
        return *WIDES, DIRECT, NARROW8, QUEUE8, QUEUE16, QUEUE16_PAIR, QUEUE32
    narrows, queues = (NARROW8,), (QUEUE32, QUEUE64_LONG)
    if KINDS[kind].is_small_float:
        narrows, queues = (NARROW8, NARROW16), (QUEUE32, QUEUE64, QUEUE64_LONG)
    return *WIDES, DIRECT, *narrows, QUEUE8, QUEUE16 if kind == "uint4" else QUEUE16_FOLDED, QUEUE16_PAIR, *queues


@cache
def kernels_for(kind: str, group: int, gpu: Gpu) -> tuple[Kernel, ...]:
    """Return the kernels that plans of a layer may have, the simplest first."""
    return tuple(dict.fromkeys(kernel_for(one, kind, group, gpu) for one in kernels(kind)))


def candidates(work: Work, mma: bool = False) -> Iterator[Plan | MmaPlan]:
    """Yield the legal plans of a call whose tiles suit its tokens per expert, the simplest kernels first.

    `mma`: whether the `mma.sync` kernels read the layer.
    """
    pairs, mean, gpu, kind, group = work.pairs, work.mean, work.gpu, work.kind, work.group
    hidden, intermediate = work.hidden, work.intermediate
    for kernel in kernels_for(kind, group, gpu):
        if isinstance(kernel, Wide):
            if min(mean / 3, 100.0) <= kernel.tokens <= mean * 8:
                items = pairs / mean * max(1.0, mean / kernel.tokens) * -(-hidden // (128 * kernel.warpgroups))
                limit = max(1, min(MAX_WIDE_SHARES, -(-intermediate // 64) // 2))  # each has two steps at least
                shares = max(1, min(limit, int(gpu.multiprocessors / max(1.0, items))))
                yield from (Plan(kernel, 1, splits) for splits in dict.fromkeys((1, shares, min(limit, 2 * shares))))
        elif isinstance(kernel, Direct):
            if work.gated and mean <= MAX_DIRECT_MEAN and pairs <= MAX_DIRECT_PAIRS:
                up = shares_for(pairs * -(-intermediate // 128), -(-hidden // kernel.step), 16, gpu)
                yield Plan(kernel, up, shares_for(pairs * -(-hidden // 256), -(-intermediate // kernel.step), 8, gpu))
        elif isinstance(kernel, Narrow):
            if mean <= 1.3 * kernel.tokens:
                tiles = work.hit * max(1.0, mean / kernel.tokens)
                programs = gpu.multiprocessors * kernel.resident
                up = splits_for(tiles * -(-intermediate // 128), -(-hidden // 128), programs) if work.gated else 1
                down = splits_for(tiles * -(-hidden // 256), -(-intermediate // 128), programs)
                yield from (Plan(kernel, *shares) for shares in _shares_to_try(up, down))
        elif work.both and mean / 3 <= kernel.tokens and (kernel.least or kernel.tokens) <= max(16.0, mean * 6):
            yield Plan(kernel)
    if mma and mean <= MAX_MMA_MEAN:
        plan = mma_plan(pairs, work.experts, hidden, intermediate, group, kind, work.gated, gpu)
        for up, down in _shares_to_try(plan.gate_up_splits, plan.down_splits):
            yield replace(plan, gate_up_splits=up, down_splits=down)


def ranked(work: Work, mma: bool = False) -> list[tuple[float, Plan | MmaPlan]]:
    """Return the candidates with their predicted microseconds, the cheapest first; ties go to the simplest."""
    return cost.ranked(work, [(one, *cut(one, work.kind)) for one in candidates(work, mma)])
