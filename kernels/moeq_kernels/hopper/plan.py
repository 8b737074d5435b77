"""Which Hopper kernel a call uses, and with what sizes: tables and a short rule, from shapes alone.

Rule: what decides is how many tokens an expert that is hit gets on average. With few, the time is that of reading
weights, and the narrow kernel keeps most reads in flight; it works on tiles of 8, 16 or 32 tokens, and where that
leaves too few programs for the GPU, several share one tile's k. With many, the wide kernel multiplies tiles of up to
128 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Programs of the narrow kernel that an H100 or H200 holds: 132 multiprocessors, four each.
RESIDENT = 528


@dataclass(frozen=True)
class Narrow:
    """Sizes of the narrow kernel.

    Attributes:
        tokens: of a tile (8, 16, 32).
        stages: steps of 128 rows of k in shared memory.
        after: group scales multiply float32 sums (else they are folded into bf16 weights).
        registers: cap for a thread, or None.
    """

    tokens: int
    stages: int
    after: bool
    registers: int | None = None


@dataclass(frozen=True)
class Wide:
    """Sizes of the wide kernel.

    Attributes:
        tokens: of a tile at most (32, 64, 128).
        stages: steps of 64 rows of k in shared memory.
        warpgroups: that multiply (2 or 4).
        registers: of each of their threads.
    """

    tokens: int
    stages: int
    warpgroups: int
    registers: int


@dataclass(frozen=True)
class Plan:
    """A kernel, and how many programs share a tile's k (narrow only) in each product."""

    kernel: Narrow | Wide
    gate_up_splits: int = 1
    down_splits: int = 1


#: (tokens per hit expert up to, kernel), tried in order.
TABLE: tuple[tuple[float, Narrow | Wide], ...] = (
    (3.0, Narrow(8, 3, after=True, registers=128)),
    (9.0, Narrow(16, 3, after=True)),
    (20.0, Wide(32, 6, warpgroups=4, registers=120)),
    (48.0, Wide(64, 6, warpgroups=4, registers=120)),
    (float("inf"), Wide(128, 6, warpgroups=2, registers=232)),
)


def tokens_per_hit(pairs: int, experts: int) -> float:
    """Average tokens of an expert that gets any, for uniform routing."""
    hit = experts * (1.0 - (1.0 - 1.0 / max(1, experts)) ** pairs)
    return pairs / max(hit, 1.0)


def splits_for(tiles: float, blocks: int, steps: int) -> int:
    """Programs that share one tile's k: enough to fill the GPU, at least two steps each."""
    wanted = int(RESIDENT / max(1.0, tiles * blocks))
    wanted = max(1, min(wanted, steps // 2, 16))
    return -(-steps // -(-steps // wanted))  # without empty shares


def choose(pairs: int, experts: int, hidden: int, intermediate: int, group: int) -> Plan:
    """The plan for `pairs` routed pairs among `experts` with these packed sizes."""
    mean = tokens_per_hit(pairs, experts)
    kernel = next(one for limit, one in TABLE if mean <= limit)
    if isinstance(kernel, Wide):
        return Plan(kernel)
    if group < 64:
        kernel = Narrow(kernel.tokens, kernel.stages, after=False, registers=None)
    tiles = pairs / mean * max(1.0, mean / kernel.tokens)
    gate_up = splits_for(tiles, -(-intermediate // 128), -(-hidden // 128))
    down = splits_for(tiles, -(-hidden // 256), -(-intermediate // 128))
    return Plan(kernel, gate_up, down)
