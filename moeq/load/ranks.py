"""Plan which bytes of a layer one rank of a deployment reads, or raise why it cannot. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, MatrixEntry, StackedRole
from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout
from moeq.load.rank_reading import Window
from moeq.matrix import MatrixSpec
from moeq.model.division import slicing_obstacle, split_experts, split_intermediate


@dataclass(frozen=True)
class Rank:
    """Rank of a deployment: its number and the count of ranks, in tensor and in expert parallelism."""

    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1

    def check(self) -> None:
        """Check the numbers. Raises MoeqError `usage.rank` if one is outside its range."""
        for name, rank, size in (("tp", self.tp_rank, self.tp_size), ("ep", self.ep_rank, self.ep_size)):
            if size < 1 or not 0 <= rank < size:
                raise MoeqError("usage.rank", f"{name} rank {rank} of {size}: ranks count from 0 to size - 1")

    @property
    def title(self) -> str:
        """Name for people: `tp rank 0 of 2`."""
        parts = [f"tp rank {self.tp_rank} of {self.tp_size}"] if self.tp_size > 1 else []
        parts += [f"ep rank {self.ep_rank} of {self.ep_size}"] if self.ep_size > 1 else []
        return ", ".join(parts) or "the only rank"


@dataclass(frozen=True)
class MatrixPart:
    """Part of `w13` or `w2` that a rank reads."""

    stored: MatrixEntry  #: stacked tensors that hold it
    spec: MatrixSpec  #: padded matrix of one expert on this rank
    window: Window | None = None  #: part of the stored matrix; None for all of it
    zero_bias: bool = False  #: whether the bias becomes zero, since another rank adds it


@dataclass(frozen=True)
class RankPart:
    """Part of a layer that a rank reads."""

    experts: tuple[int, int]  #: `(start, stop)` of the rank's experts, as the model counts them
    rows: tuple[int, int]  #: `(start, stop)` of these experts within the stacked tensors
    matrices: Mapping[StackedRole, MatrixPart]  #: parts of `w13` and `w2`


def plan_rank(entry: LayerEntry, rank: Rank, unit: int | None = None) -> RankPart:
    """Plan what a rank reads of a layer.

    `unit`: ranks get whole blocks of that many intermediate features, and some ranks get more blocks than others
    (`moeq.model.division`); None: all ranks get equally many features.

    Raises MoeqError `usage.rank`, `usage.ep`, and `usage.tp` if the file does not serve that many ranks, naming the
    conversion that would.
    """
    rank.check()
    if entry.ranks:
        return _written_rank(entry, rank)
    experts = _experts(entry, rank, (0, entry.num_experts))
    matrices = whole_matrices(entry.matrices) if rank.tp_size == 1 else _cut(entry, rank, unit)
    return RankPart(experts, experts, matrices)


def whole_matrices(matrices: Mapping[StackedRole, MatrixEntry]) -> dict[StackedRole, MatrixPart]:
    """Return the parts of a rank that reads stacked tensors as a whole."""
    return {role: MatrixPart(matrix, matrix.padded_spec) for role, matrix in matrices.items()}


def plan_replicas(entry: LayerEntry, rank: Rank, redundant: int) -> list[RankPart]:
    """Plan what a rank reads of a layer whose first experts are held twice, for load balancing.

    Experts and `redundant` replicas are numbered consecutively: number `num_experts + i` is a replica of expert `i`.
    Ranks hold equally many of these numbers, in order (vLLM's initial placement, in `EplbState`).

    Raises MoeqError as `plan_places`, and `usage.eplb` if the replicas do not spread evenly.
    """
    rank.check()
    count = entry.num_experts + redundant
    if count % rank.ep_size or redundant < 0:
        near = -entry.num_experts % rank.ep_size
        raise MoeqError(
            "usage.eplb",
            f"layer {entry.layer}: {entry.num_experts} experts and {redundant} replicas do not spread evenly over "
            f"{rank.ep_size} ranks ({count} % {rank.ep_size} = {count % rank.ep_size})",
            f"{near} replicas spread evenly, and so does each further {rank.ep_size}",
        )
    each = count // rank.ep_size
    numbers = range(rank.ep_rank * each, (rank.ep_rank + 1) * each)
    return plan_places(entry, rank, [number % entry.num_experts for number in numbers])


def plan_places(entry: LayerEntry, rank: Rank, experts: Sequence[int]) -> list[RankPart]:
    """Plan what a rank reads if it holds these experts in this order; return a part per run of consecutive experts.

    Raises MoeqError as `plan_rank`, and `usage.eplb` if experts were packed with numbers that a rank computed from all
    of its experts, if ranks share experts, or if the layer has no such expert.
    """
    where = f"layer {entry.layer}"
    unknown = [expert for expert in experts if not 0 <= expert < entry.num_experts]
    if unknown:
        raise MoeqError(
            "usage.eplb",
            f"{where} has experts 0 to {entry.num_experts - 1}, and a rank is to hold expert {unknown[0]}",
            "place each expert by its number in the model",
        )
    if entry.ranks:
        raise MoeqError(
            "usage.eplb",
            f"{where} is written rank by rank, so its experts stay on their rank ({entry.sharding.why})",
            "start without --enable-eplb",
        )
    if rank.tp_size > 1:
        raise MoeqError(
            "usage.eplb",
            f"{where}: experts are moved whole, and here {rank.tp_size} ranks share each",
            f"start with --enable-expert-parallel; SGLang with --ep-size {rank.tp_size * rank.ep_size}",
        )
    whole = plan_rank(entry, Rank())
    starts = [row for row, expert in enumerate(experts) if row == 0 or expert != experts[row - 1] + 1]
    runs = ((experts[start], experts[stop - 1] + 1) for start, stop in pairwise([*starts, len(experts)]))
    return [replace(whole, experts=run, rows=run) for run in runs]


def _experts(entry: LayerEntry, rank: Rank, held: tuple[int, int]) -> tuple[int, int]:
    parts = split_experts(f"layer {entry.layer}", held[1] - held[0], rank.ep_size)
    part = parts[rank.ep_rank]
    return held[0] + part.start, held[0] + part.stop


def _written_rank(entry: LayerEntry, rank: Rank) -> RankPart:
    """Plan for a layer that was written rank by rank: it serves exactly as many ranks as it was written for."""
    by_expert = entry.sharding.axis == "ep"
    number, asked = (rank.ep_rank, rank.ep_size) if by_expert else (rank.tp_rank, rank.tp_size)
    if asked != len(entry.ranks) or (by_expert and rank.tp_size > 1):
        raise _wrong_size(entry, rank)
    home = next(found for found in entry.ranks if found.rank == number)
    experts = home.experts if by_expert else _experts(entry, rank, home.experts)
    rows = (experts[0] - home.experts[0], experts[1] - home.experts[0])
    return RankPart(experts, rows, whole_matrices(home.matrices))


def _wrong_size(entry: LayerEntry, rank: Rank) -> MoeqError:
    axis, written = entry.sharding.axis or "tp", len(entry.ranks)
    name, asked = ("ep", rank.ep_size) if rank.ep_size > 1 and rank.tp_size == 1 else ("tp", rank.tp_size)
    return MoeqError(
        f"usage.{axis}",
        f"layer {entry.layer} is written rank by rank for {axis} {written}, and {rank.title} was asked for "
        f"({entry.sharding.why})",
        f"run it with {axis} {written}, or convert it for {asked}: moeq convert SRC DST --{name} {asked}",
    )


def _cut(entry: LayerEntry, rank: Rank, unit: int | None) -> dict[StackedRole, MatrixPart]:
    """Plan the slices of `w13` and `w2` that a tensor-parallel rank reads of one packing for all ranks."""
    layout = get_layout(entry.layout)
    specs = {role: entry.matrices[role].spec for role in STACKED_ROLES}
    parts = split_intermediate(f"layer {entry.layer}", specs["w2"], rank.tp_size, unit)
    obstacle = slicing_obstacle(specs, layout, parts)
    if obstacle is not None:
        raise MoeqError(
            "usage.tp",
            f"layer {entry.layer} holds one packing for all ranks, which cannot be cut for tp {rank.tp_size}: "
            f"{obstacle}",
            f"convert it for that: moeq convert SRC DST --tp {rank.tp_size}",
        )
    own = (parts[rank.tp_rank].start, parts[rank.tp_rank].stop)
    found: dict[StackedRole, MatrixPart] = {}
    for role in STACKED_ROLES:
        padded = entry.matrices[role].padded_spec
        window = Window((0, padded.n), own) if role == "w2" else Window(own, (0, padded.k))
        spec = layout.shard_spec(padded, window.n, window.k)
        found[role] = MatrixPart(entry.matrices[role], spec, window, zero_bias=role == "w2" and rank.tp_rank > 0)
    return found
