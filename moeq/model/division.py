"""Divide a layer into the shards of a deployment, and decide if one unsharded file can serve them. Imports no torch.

A loader can slice an unsharded file if slicing the packed bytes gives the bytes that packing the slice would give, and
if neither the whole layer nor a shard needs padding. Every other layer is written rank by rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from moeq.checkpoint.manifest import STACKED_ROLES, StackedRole
from moeq.errors import MoeqError
from moeq.layouts.layout import Layout
from moeq.layouts.padding import plan_padding
from moeq.matrix import MatrixSpec
from moeq.model.shards import Range, shard_spec
from moeq.spelling import option

#: Format whose engines give ranks whole blocks, fewer to the last ranks (gpt-oss: 2880 over 4) -> features per block.
UNEVEN_FORMATS: Mapping[str, int] = {"mxfp4": 32}

Specs = Mapping[StackedRole, MatrixSpec]


@dataclass(frozen=True)
class Shard:
    """Part of a layer on one rank."""

    rank: int
    experts: Range
    intermediate: Range  #: intermediate features of the rank


@dataclass(frozen=True)
class Division:
    """Division of a layer into shards, and how it is written."""

    axis: Literal["tp", "ep"] | None  #: `tp` or `ep`, or None for a single rank
    shards: tuple[Shard, ...]  #: shard of every rank
    #: Contents of the files: the whole layer once (`unsharded`) or the shard of every rank (`ranks`).
    written: Literal["unsharded", "ranks"]
    why: str  #: sentence that gives the reason


def divide(where: str, specs: Specs, layout: Layout, num_experts: int, tp: int, ep: int, unit: int | None) -> Division:
    """Decide how to write a layer for a deployment.

    Args:
        tp: number of ranks that share an expert.
        ep: number of ranks over which whole experts are spread; 1 without expert parallelism.
        unit: features of a block that ranks get whole, so that some get more than others; None for equal shares.

    Raises:
        MoeqError: `usage.tp`, `usage.group-cut` or `usage.ep` with the arithmetic and the nearest size that works.
    """
    size = specs["w2"].k
    if ep > 1:
        shards = tuple(
            Shard(rank, part, Range(0, size)) for rank, part in enumerate(split_experts(where, num_experts, ep))
        )
        if layout.calibration_scope is None:
            return Division("ep", shards, "unsharded", f"sliceable by expert: ranks of ep {ep} read whole experts")
        return Division("ep", shards, "ranks", f"{layout.id}: {layout.calibration_scope}, so each ep rank has its own")
    everyone = Range(0, num_experts)
    if tp == 1:
        return Division(None, (Shard(0, everyone, Range(0, size)),), "unsharded", "one rank holds every expert whole")
    parts = split_intermediate(where, specs["w2"], tp, unit)
    shards = tuple(Shard(rank, everyone, part) for rank, part in enumerate(parts))
    obstacle = slicing_obstacle(specs, layout, parts)
    if obstacle is None:
        return Division("tp", shards, "unsharded", f"sliceable for tp {tp}: {layout.slicing}")
    return Division("tp", shards, "ranks", obstacle)


def split_experts(where: str, num_experts: int, ep: int) -> list[Range]:
    """Divide experts over ranks in order; the first ranks get the remainder, as in vLLM's linear placement."""
    if ep > num_experts:
        raise MoeqError(
            "usage.ep", f"{where} has {num_experts} experts, too few for ep {ep}", f"ep {num_experts} works"
        )
    least, more = divmod(num_experts, ep)
    starts = [rank * least + min(rank, more) for rank in range(ep + 1)]
    return [Range(start, stop) for start, stop in pairwise(starts)]


def split_intermediate(where: str, w2: MatrixSpec, tp: int, unit: int | None) -> list[Range]:
    """Divide intermediate features over the ranks of tensor parallelism."""
    problem = _split_problem(w2, tp, unit)
    if problem is not None:
        code, message = problem
        hint = _nearest(w2, tp, unit)
        raise MoeqError(code, f"{where} cannot be cut for tp {tp}: {message}", hint)
    size = _share(w2.k, tp, unit)
    return [Range(rank * size, min((rank + 1) * size, w2.k)) for rank in range(tp)]


def _share(size: int, tp: int, unit: int | None) -> int:
    """Return the largest number of features that a rank gets."""
    return size // tp if unit is None or size % unit else -(-(size // unit) // tp) * unit


def _split_problem(w2: MatrixSpec, tp: int, unit: int | None) -> tuple[str, str] | None:
    size = w2.k
    if tp == 1:
        return None  # nothing is cut, even if the last group is partial
    if unit is not None and size % unit == 0:
        share = _share(size, tp, unit)
        if share * (tp - 1) < size:
            return None
        return "usage.tp", f"{size} / {unit} = {size // unit} blocks leave the last of {tp} ranks without work"
    if size % tp:
        return "usage.tp", f"the intermediate size {size} / {tp} leaves a remainder of {size % tp}"
    if w2.num_groups > 1 and not w2.act_order and (size // tp) % w2.group_size:
        share, group = size // tp, w2.group_size
        return (
            "usage.group-cut",
            f"{size} / {tp} = {share} per rank cuts groups of {group} ({share} % {group} = {share % group})",
        )
    return None


def _nearest(w2: MatrixSpec, tp: int, unit: int | None) -> str:
    works = [size for size in range(1, 2 * tp + 1) if _split_problem(w2, size, unit) is None]
    below = max(size for size in works if size < tp)
    above = [size for size in works if size > tp]
    return (
        f"tp {below} works"
        + (f", and so does tp {above[0]}" if above else "")
        + f"; or expert parallelism ({option('ep')})"
    )


def slicing_obstacle(specs: Specs, layout: Layout, parts: list[Range]) -> str | None:
    """Say why a loader cannot slice an unsharded packing into these shards; None if it can."""
    whole = plan_padding(layout, specs["w13"], specs["w2"])
    if whole.w2.k != specs["w2"].k:
        return f"the intermediate size {specs['w2'].k} is padded to {whole.w2.k}, so ranks are padded apart"
    for part in parts:
        shard = {role: shard_spec(specs[role], part) for role in STACKED_ROLES}
        padded = plan_padding(layout, shard["w13"], shard["w2"])
        if padded.w2.k != part.size:
            return f"{part.size} intermediate features per rank are padded to {padded.w2.k}"
        obstacle = _slicing_problem(layout, {"w13": whole.w13, "w2": whole.w2}, part)
        if obstacle is not None:
            return obstacle
    return None


def _slicing_problem(layout: Layout, padded: Specs, part: Range) -> str | None:
    for role, axis in (("w13", "N"), ("w2", "K")):
        rule = layout.slices(padded[role])  # type: ignore[index]
        unit = rule.n if axis == "N" else rule.k
        if unit is None:
            return f"{layout.id} does not allow slices of {role} along {axis}"
        if part.start % unit or part.stop % unit:
            return f"{layout.id} slices {role} along {axis} by {unit}; a rank has {part.start} .. {part.stop}"
        if axis == "K" and part.size < min(rule.k_least, padded["w2"].k):
            return f"{layout.id} slices w2 along K from {rule.k_least} on; a rank has {part.size}"
    return None
