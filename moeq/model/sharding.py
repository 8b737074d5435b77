"""Which tensor-parallel degrees divide an expert's matrices, with the arithmetic. No torch.

Under TP every rank holds `I / tp` intermediate features of each expert: rows of gate and up, columns of down. Columns
come in scale groups and in kernel tiles, so a shard that ends inside a group needs padding or another degree.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, lcm

from moeq.matrix import MatrixSpec

#: Degrees that engines are run with.
TP_DEGREES = (1, 2, 4, 8, 16)

#: Columns of the tiles that the dense int4 kernels work on.
TILE_K = 64


@dataclass(frozen=True)
class ShardFit:
    """How an expert's matrices divide over one TP degree.

    Attributes:
        tp: ranks.
        intermediate: intermediate features per rank, or None where they do not divide.
        groups_whole: shards of `w2` end at scale-group boundaries.
        tiles_whole: shards are whole kernel tiles.
        padded: intermediate features per rank after padding to whole groups and tiles.
        arithmetic: the sums, in words.
    """

    tp: int
    intermediate: int | None
    groups_whole: bool
    tiles_whole: bool
    padded: int
    arithmetic: str

    @property
    def fits(self) -> bool:
        """Whether no padding is needed."""
        return self.intermediate is not None and self.groups_whole and self.tiles_whole


def shard_fit(w2: MatrixSpec, tp: int) -> ShardFit:
    """How the intermediate features (`K` of `w2`) divide over `tp` ranks."""
    whole = w2.k
    # One scale per channel covers a shard as well as the whole row.
    group = w2.group_size if w2.num_groups > 1 else 1
    shard, rest = divmod(whole, tp)
    step = lcm(group, TILE_K)
    padded = ceil(ceil(whole / tp) / step) * step
    if rest:
        return ShardFit(tp, None, False, False, padded, f"{whole} / {tp} leaves {rest}; pad shards to {padded}")
    groups_whole, tiles_whole = shard % group == 0, shard % TILE_K == 0
    sums = [f"{whole} / {tp} = {shard}"]
    if group > 1:
        sums.append(f"{shard} / group {group} = {shard / group:g}")
    sums.append(f"{shard} / tile {TILE_K} = {shard / TILE_K:g}")
    if not (groups_whole and tiles_whole):
        sums.append(f"pad shards to {padded}")
    return ShardFit(tp, shard, groups_whole, tiles_whole, padded, ", ".join(sums))


def shard_fits(w2: MatrixSpec, degrees: tuple[int, ...] = TP_DEGREES) -> tuple[ShardFit, ...]:
    """`shard_fit` for every degree."""
    return tuple(shard_fit(w2, tp) for tp in degrees)
