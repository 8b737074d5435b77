"""Plans of the kernels for bytes x bytes: legal kernels and sizes for a call, of which `cost` finds the fastest.

With few tokens per expert the time is that of reading weights, and the narrow kernel reads them as far ahead as shared
memory reaches; its tiles take as many tokens as an expert is likely to get, so that weights are read once. With more,
multiplying counts, and the wide kernel does it at the larger tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from moeq_kernels.gpu import H200, Gpu
from moeq_kernels.hopper.cost import Tiling, Work
from moeq_kernels.hopper.w4a16.w4a16_plan import MAX_DIRECT_MEAN, MAX_DIRECT_PAIRS, shares_for
from moeq_kernels.sorting import MAX_FEW_PAIRS


@dataclass(frozen=True)
class Int8Narrow:
    """Sizes of the narrow kernel."""

    tokens: int  #: token rows per tile (8 to 128, a power of two)
    stages: int  #: steps of 128 bytes of k in shared memory
    warpgroups: int = 1  #: warpgroups that multiply 128 rows of the weights each (1 or 2)
    resident: int = 1  #: programs that a multiprocessor holds

    @property
    def box(self) -> int:
        """Tokens per copy; copies that hold no token of the expert are left out."""
        return max(8, self.tokens // 4)

    @property
    def registers(self) -> int:
        """Registers per computing thread; the copy warps keep 24."""
        return 232 if self.warpgroups == 2 else self.cap or 255

    @property
    def cap(self) -> int | None:
        """Registers of a thread when the kernel starts, where several programs share a multiprocessor."""
        threads = 128 * (self.warpgroups + 1) * self.resident
        return 65536 // threads // 8 * 8 if self.resident > 1 else None


@dataclass(frozen=True)
class Int8Direct:
    """Sizes of the two kernels for very few tokens."""

    stages: int = 3  #: steps of 128 bytes of k in shared memory at most

    @property
    def tokens(self) -> int:
        """Token rows per tile."""
        return 1


@dataclass(frozen=True)
class Int8Wide:
    """Sizes of the wide kernel."""

    stages: int  #: steps of 128 bytes of k in shared memory
    registers: int = 232  #: registers per computing thread; the copy warp keeps 24

    @property
    def tokens(self) -> int:
        """Token rows per tile: 64 for each of two warpgroups (a third would leave too few registers and stages)."""
        return 128


@dataclass(frozen=True)
class Int8Plan:
    """The kernel of both products, and how many programs share the k of a tile in each (one in the wide kernel)."""

    kernel: Int8Narrow | Int8Wide | Int8Direct
    gate_up_splits: int = 1
    down_splits: int = 1


WIDE, DIRECT = Int8Wide(4), Int8Direct()
#: Sizes of the narrow kernel: tokens, stages, warpgroups and resident programs. Fewer stages let the next launch begin
#: earlier; more of them, in one program, read further ahead.
NARROWS = tuple(
    Int8Narrow(*sizes)
    for sizes in (
        (8, 6, 1, 2), (8, 3, 1, 2), (8, 12, 1, 1), (16, 6, 1, 2), (16, 3, 1, 2), (16, 12, 1, 1), (32, 5, 1, 2),
        (32, 3, 1, 2), (64, 4, 1, 2), (128, 6, 1, 1),
    )
)  # fmt: skip
#: Bytes of k in a step. Rows of other lengths begin within a line of the L2 cache, of which a step reads a part: fewer
#: programs that are further ahead read more of it while it is there.
STEP = 128
#: Upper bounds in the kernels that do not sort: features of a row of activations, which every program quantises for
#: itself, and steps of k whose codes a program holds.
DIRECT_FEATURES, DIRECT_STEPS = 4096, 16
#: Steps that a program keeps at least where several share k.
MIN_STEPS = 6


def splits_for(items: float, steps: int, resident: int, gpu: Gpu = H200) -> int:
    """Return how many programs should share the k of each of `items` tiles, of `steps` steps.

    Two thirds of the multiprocessors read as fast as all; with fewer tiles, as many shares as fit at once.
    """
    if items * 3 >= gpu.multiprocessors * 2:
        return 1
    max_splits = max(1, min(int(gpu.multiprocessors * resident / max(1.0, items)), steps // MIN_STEPS))
    return -(-steps // -(-steps // max_splits))  # without empty shares


def direct_plan(pairs: int, hidden: int, intermediate: int, gpu: Gpu = H200) -> Int8Plan:
    """Plan the kernels that do not sort; all programs start at once, with up to DIRECT_STEPS steps each."""

    def shares(items: int, steps: int) -> int:
        least = -(-steps // DIRECT_STEPS)
        shares = max(least, shares_for(items, steps, 16, gpu))
        return -(-steps // -(-steps // shares))

    up = shares(pairs * -(-intermediate // 64), -(-hidden // 128))
    return Int8Plan(DIRECT, up, shares(pairs * -(-hidden // 128), -(-intermediate // 128)))


@cache
def tiling(kernel: Int8Narrow | Int8Wide | Int8Direct, codes: str) -> Tiling:
    """Return how a kernel cuts the products of `codes`, "int8" or "e4m3", as the cost model takes it."""
    size = kernel.tokens
    if isinstance(kernel, Int8Direct):
        return Tiling("direct", f"direct{size} {codes}", 8, (8,), 8, 128, STEP, 3)
    if isinstance(kernel, Int8Wide):
        return Tiling("bytes wide", f"wide{size} {codes}", size, (size,), size, 256, STEP, 1)
    key = f"narrow{size}x{kernel.stages}x{kernel.resident} {codes}"
    return Tiling("bytes narrow", key, size, (size,), size, 128 * kernel.warpgroups, STEP, kernel.resident)


def kernels(int8: bool, wide: bool = True) -> tuple[Int8Wide | Int8Narrow, ...]:
    """Return the kernels that sort, for int8 or e4m3; `wide`: whether the wide kernel reads the layer.

    e4m3's sums of a step take as many registers again, so 128 tokens are too many for the narrow kernel.
    """
    return *((WIDE,) if wide else ()), *(one for one in NARROWS if int8 or one.tokens < 128)


def candidates(work: Work, wide: bool = True) -> Iterator[Int8Plan]:
    """Yield the legal plans of a call whose tiles suit its tokens per expert."""
    int8, pairs, mean, gpu = work.kind == "int8", work.pairs, work.mean, work.gpu
    hidden, intermediate = work.hidden, work.intermediate
    if int8 and mean <= MAX_DIRECT_MEAN and pairs <= MAX_DIRECT_PAIRS and intermediate <= DIRECT_FEATURES:
        yield direct_plan(pairs, hidden, intermediate, gpu)
    unaligned = int8 and bool(hidden % STEP or intermediate % STEP)
    for kernel in kernels(int8, wide):
        if isinstance(kernel, Int8Wide):
            if mean >= 8:
                yield Int8Plan(kernel)
            continue
        if not (min(mean, pairs if wide else 128.0) / 2 <= kernel.tokens <= max(16.0, mean * 5)):
            continue
        if unaligned and kernel.tokens <= 16 and kernel.resident > 1:
            continue
        tiles = pairs / mean * max(1.0, mean / kernel.tokens)
        width = 64 * kernel.warpgroups
        up = splits_for(tiles * -(-intermediate // width), -(-hidden // STEP), kernel.resident, gpu)
        down = splits_for(tiles * -(-hidden // (2 * width)), -(-intermediate // STEP), kernel.resident, gpu)
        # The kernel that adds shares of gate and up looks experts up in a list that exists for few pairs only.
        up = up if pairs <= MAX_FEW_PAIRS else 1
        yield from (Int8Plan(kernel, *shares) for shares in dict.fromkeys(((1, 1), (1, down), (up, down))))
