"""One expert by the general path and by its direct road."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moeq.checkpoint.manifest import StackedRole
from moeq.digest import logical_digest
from moeq.matrix import split_projections
from moeq.model import Checkpoint
from moeq.model.experts import WHOLE_PARTS
from moeq.model.shards import shard_matrix
from moeq.pipeline.keepsake import unrestorable
from moeq.pipeline.layers import LayerPlan, PlanOptions, plan_layer
from moeq.pipeline.roads import Proof, Road, find_road
from moeq.pipeline.tensors import as_bytes

Array = np.ndarray


@dataclass(frozen=True)
class Packed:
    """What packing one expert's matrix comes to: bytes by part and shard, digests, tensors to keep."""

    parts: list[dict[str, bytes]]
    digests: tuple[tuple[str, str], ...]
    kept: set[str]


def in_general(checkpoint: Checkpoint, plan: LayerPlan, role: StackedRole, expert: int) -> Packed:
    """What conversion does where there is no road."""
    layer = plan.entry.layer
    matrix = checkpoint.matrix(layer, expert, role)
    parts = []
    for shard in plan.shards:
        cut = shard_matrix(matrix, shard.shard.intermediate, first=shard.shard.rank == 0)
        packed = plan.layout.pack(shard.padding.pad(cut))
        parts.append({name: bytes(as_bytes(tensor)) for name, tensor in packed.items()})
    digests = tuple((projection, logical_digest(part)) for projection, part in split_projections(matrix))
    return Packed(parts, digests, unrestorable(checkpoint, layer, expert, role, matrix, exact=True))


def buffer(size: int, fill: int = 0xA5) -> Array:
    """Memory that starts at a cache line and holds rubbish."""
    room = np.full(size + 64, fill, np.uint8)
    start = -room.ctypes.data % 64
    return room[start : start + size]


def stored(checkpoint: Checkpoint, layer: int, expert: int, road: Road) -> dict[tuple[str, str], Array]:
    """The stored bytes that a road asks for."""
    experts = checkpoint.experts(layer)
    unit, found = experts.layer.unit(expert), {}
    for projection, part in road.reads:
        entry = unit[projection][part]
        row = experts.layer.fused and part not in WHOLE_PARTS
        size = entry.nbytes // experts.num_experts if row else entry.nbytes
        start = entry.start + (expert * size if row else 0)
        found[projection, part] = buffer(size)
        found[projection, part][:] = np.frombuffer(checkpoint.source.read_bytes(entry.file, start, start + size), "u1")
    return found


class OnRoad:
    """One expert's matrix on its road, with buffers of its own."""

    def __init__(self, checkpoint: Checkpoint, plan: LayerPlan, role: StackedRole, expert: int, road: Road) -> None:
        self.road = road
        self.inputs = stored(checkpoint, plan.entry.layer, expert, road)
        self.outputs = [
            {part: buffer(size) for part, size in _sizes(plan, role, index).items()}
            for index in range(len(plan.shards))
        ]
        self.scratch = buffer(road.scratch_bytes)

    def pack(self) -> bool:
        return self.road.pack(self.inputs, self.outputs, self.scratch)

    def prove(self) -> Proof | None:
        self.scratch[:] = 0x5A  # nothing may depend on what packing left there
        return self.road.prove(self.inputs, self.outputs, self.scratch)

    def packed(self) -> Packed | None:
        """None where the road declines."""
        if not self.pack():
            return None
        proof = self.prove()
        assert proof is not None, "what was packed does not unpack to the source"
        return Packed(
            [{name: out.tobytes() for name, out in parts.items()} for parts in self.outputs], proof.digests, set()
        )


def _sizes(plan: LayerPlan, role: StackedRole, shard: int) -> dict[str, int]:
    widths = {"U8": 1, "I8": 1, "F16": 2, "BF16": 2, "I32": 4, "F32": 4}
    specs = plan.shards[shard].parts[role]
    return {part: int(np.prod(spec.shape)) * widths[spec.dtype] for part, spec in specs.items()}


def roads(
    checkpoint: Checkpoint, layout: str, layer: int = 0, **options: int
) -> tuple[LayerPlan, dict[StackedRole, Road]]:
    """The plan of a layer and the roads that it has."""
    plan = plan_layer(checkpoint, layer, layout, PlanOptions(**options))
    experts = checkpoint.experts(layer)
    found = {role: find_road(experts, role, plan.layout, plan.shards) for role in ("w13", "w2")}
    return plan, {role: road for role, road in found.items() if road is not None}
