"""Which kernel for products of bytes a call uses, and with what sizes: a table and a short rule, from shapes alone.

With few tokens per expert the time is that of reading weights, and the narrow kernel reads them as far ahead as shared
memory reaches; its tiles take as many tokens as an expert is likely to get, so that weights are read once. With more,
multiplying counts, and the wide kernel does it at the larger tile. The table was measured on an H200 with int8 (see
kernels/bench/TUNING.md), the wide kernel with e4m3 as well, which has the same bytes and the same rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moeq_kernels.gpu import H200, Gpu
from moeq_kernels.hopper.cost import tokens_per_hit
from moeq_kernels.hopper.w4a16.w4a16_plan import MAX_DIRECT_MEAN, shares_for


@dataclass(frozen=True)
class Int8Narrow:
    """Sizes of the narrow kernel.

    Attributes:
        tokens: token rows per tile (8 to 128, a power of two).
        stages: steps of 128 bytes of k in shared memory.
        warpgroups: that multiply, 128 rows of the weights each (1 or 2).
        resident: programs that a multiprocessor holds.
    """

    tokens: int
    stages: int
    warpgroups: int = 1
    resident: int = 1

    @property
    def box(self) -> int:
        """Tokens that are copied together: what lies beyond an expert's last one is not copied."""
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
    """Sizes of the two kernels for very few tokens.

    Attributes:
        stages: steps of 128 bytes of k in shared memory at most.
    """

    stages: int = 3

    @property
    def tokens(self) -> int:
        """Token rows per tile."""
        return 1


@dataclass(frozen=True)
class Int8Wide:
    """Sizes of the wide kernel.

    Attributes:
        stages: steps of 128 bytes of k in shared memory.
        registers: registers per computing thread; the copy warp keeps 24.
    """

    stages: int
    registers: int = 232

    @property
    def tokens(self) -> int:
        """Token rows per tile: 64 for each of two warpgroups (a third would leave too few registers and stages)."""
        return 128

    @property
    def cap(self) -> None:
        """One program fills a multiprocessor."""
        return None


@dataclass(frozen=True)
class Int8Plan:
    """A kernel for each product, and how many programs share the k of a tile (not the wide one).

    Both kernels work on the same tiles, so they take as many tokens.
    """

    kernel: Int8Narrow | Int8Wide | Int8Direct
    gate_up_splits: int = 1
    down_splits: int = 1


Table = tuple[tuple[float, Int8Narrow | Int8Wide], ...]
WIDE = Int8Wide(4)
#: (tokens per hit expert up to, kernel), tried in order.
TABLE: Table = (
    (5.0, Int8Narrow(8, 6, resident=2)),
    (10.0, Int8Narrow(16, 6, resident=2)),
    (24.0, Int8Narrow(32, 5, resident=2)),
    (48.0, Int8Narrow(64, 4, resident=2)),
    (70.0, Int8Narrow(128, 6)),
    (float("inf"), WIDE),
)
#: TABLE for e4m3, whose sums of a step take as many registers again: 128 tokens are too many for the narrow kernel,
#: and with 64 it is behind the wide one where they are many.
E4M3_TABLE = (*TABLE[:3], (30.0, TABLE[3][1]), TABLE[5])
#: And where the wide kernel cannot be had.
E4M3_NARROW_TABLE = (*TABLE[:3], (float("inf"), TABLE[3][1]))
#: Bytes of k in a step. Rows of other lengths begin within a line of the L2 cache, of which a step reads a part: fewer
#: programs that are further ahead read more of it while it is there.
STEP = 128
#: Features of gate up to which 128 tokens a tile are left to the wide kernel: the other reads them once for each 64.
FEW_FEATURES = 512
#: Features of a row of activations that all programs can quantise for themselves (beyond, that takes too long), and
#: steps of k whose codes a program holds.
DIRECT_FEATURES, DIRECT_STEPS = 1024, 16
#: Weights of an expert, and weights that all pairs together read, up to which pairs are not sorted.
MAX_DIRECT_WEIGHTS, MAX_DIRECT_READ = 1 << 25, 165 * 10**6
#: Steps that a program keeps at least where several share k.
LEAST_STEPS = 6


def splits_for(items: float, steps: int, resident: int, gpu: Gpu = H200) -> int:
    """Return how many programs should share the k of each of `items` tiles, of `steps` steps.

    Two thirds of the multiprocessors read as fast as all; with fewer tiles, as many shares as fit at once.
    """
    if items * 3 >= gpu.multiprocessors * 2:
        return 1
    most = max(1, min(int(gpu.multiprocessors * resident / max(1.0, items)), steps // LEAST_STEPS))
    return -(-steps // -(-steps // most))  # without empty shares


def direct_plan(pairs: int, hidden: int, intermediate: int, gpu: Gpu = H200) -> Int8Plan:
    """Plan the kernels that do not sort; all programs start at once, with up to DIRECT_STEPS steps each."""

    def shares(items: int, steps: int) -> int:
        least = -(-steps // DIRECT_STEPS)
        shares = max(least, shares_for(items, steps, 16, gpu))
        return -(-steps // -(-steps // shares))

    up = shares(pairs * -(-intermediate // 64), -(-hidden // 128))
    return Int8Plan(Int8Direct(), up, shares(pairs * -(-hidden // 128), -(-intermediate // 128)))


def choose(pairs: int, experts: int, hidden: int, intermediate: int, gpu: Gpu = H200, table: Table = TABLE) -> Int8Plan:
    """Choose the plan for `pairs` routed pairs among `experts` with these packed sizes; e4m3 has tables of its own."""
    small = table is TABLE and 3 * hidden * intermediate <= MAX_DIRECT_WEIGHTS and intermediate <= DIRECT_FEATURES
    mean = tokens_per_hit(pairs, experts)
    if small and pairs * 3 * hidden * intermediate <= MAX_DIRECT_READ and mean <= MAX_DIRECT_MEAN:
        return direct_plan(pairs, hidden, intermediate, gpu)
    kernel = next(one for limit, one in table if mean <= limit)
    if isinstance(kernel, Int8Wide):
        return Int8Plan(kernel)
    if kernel.tokens == 128 and intermediate <= FEW_FEATURES:
        return Int8Plan(WIDE)
    if table is TABLE and (hidden % STEP or intermediate % STEP) and kernel.tokens <= 16:
        kernel = replace(kernel, stages=2 * kernel.stages, resident=1)
    tiles = pairs / mean * max(1.0, mean / kernel.tokens)
    gate_up = splits_for(tiles * -(-intermediate // (64 * kernel.warpgroups)), -(-hidden // 128), kernel.resident, gpu)
    down = splits_for(tiles * -(-hidden // (128 * kernel.warpgroups)), -(-intermediate // 128), kernel.resident, gpu)
    return Int8Plan(kernel, gate_up, down)
