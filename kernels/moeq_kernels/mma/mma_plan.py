"""Sizes of the `mma.sync` kernels, from the problem and the GPU."""

from __future__ import annotations

from dataclasses import dataclass

from moeq_kernels.gpu import Gpu
from moeq_kernels.hopper.cost import splits_for, tokens_per_hit
from moeq_kernels.hopper.w4a16.kinds import KINDS


@dataclass(frozen=True)
class MmaPlan:
    """Sizes of both products."""

    tokens: int  #: token rows per tile (8, 16, 32 or 64)
    stages: int  #: steps of 64 rows of k in shared memory
    rows: int  #: rows of k whose weights are in registers at a time
    #: Programs that share a tile's k.
    gate_up_splits: int = 1
    down_splits: int = 1


#: (Upper bound of the mean tokens per expert with tokens, token rows per tile), smallest first.
TILES = ((6.0, 8), (12.0, 16), (24.0, 32), (float("inf"), 64))
#: `TILES` for small experts: their weights stay in the L2 cache, from which a second tile reads them cheaply.
SMALL_TILES = ((7.0, 8), (14.0, 16), (40.0, 32), (float("inf"), 64))
#: Largest number of weights of a small expert.
MAX_SMALL_EXPERT_WEIGHTS = 1 << 24
#: Programs that fit a multiprocessor's registers, by tokens of a tile.
RESIDENT = {8: 5, 16: 4, 32: 3, 64: 2}


def stage_bytes(tokens: int, kind: str, group: int) -> int:
    """Return the bytes of shared memory of a step of 64 rows of k: words, scales and tokens."""
    words = 2048 * KINDS[kind].bits
    scales = (max(1, 64 // group) * 256 * KINDS[kind].scale_bytes) if group else 0
    return words + scales + 128 * tokens


def choose(
    pairs: int, experts: int, hidden: int, intermediate: int, group: int, kind: str, gated: bool, gpu: Gpu
) -> MmaPlan:
    """Choose the plan for `pairs` routed pairs among `experts` with these packed sizes."""
    mean = tokens_per_hit(pairs, experts)
    table = SMALL_TILES if 3 * hidden * intermediate <= MAX_SMALL_EXPERT_WEIGHTS else TILES
    tokens = next(size for limit, size in table if mean <= limit)
    step_bytes = stage_bytes(tokens, kind, group)
    programs = RESIDENT[tokens]
    stages = max(3, min(6, gpu.shared_bytes // programs // step_bytes))
    resident = gpu.multiprocessors * max(1, min(programs, gpu.shared_bytes // (stages * step_bytes)))
    tiles = pairs / mean * max(1.0, mean / tokens)
    width = 128 if gated else 256
    up = splits_for(tiles * -(-intermediate // width), max(1, hidden // 128), resident) if gated else 1
    down = splits_for(tiles * -(-hidden // 256), max(1, intermediate // 128), resident)
    return MmaPlan(tokens, stages, 64 if tokens <= 16 else 32, min(up, 8), min(down, 8))
