"""The units of work of a conversion: what each reads, where it writes, and a name for it. No torch.

A unit is either one stack of one layer (`w13` or `w2`) or some tensors that are copied. Units do not depend on each
other and write disjoint ranges of preallocated files, so any process may execute any of them, in any order, and more
than once: the bytes are the same. The plan alone determines the units and their names.

Ranks of expert parallelism hold different experts, so each rank's stack is a unit of its own. Ranks of tensor
parallelism are cut from the same experts, which are read and decoded once for all of them: they share a unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import ClassVar, Literal

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import STACKED_ROLES, StackedRole
from moeq.checkpoint.names import FUSED
from moeq.checkpoint.writer import FileForm
from moeq.model.expert_kinds import Experts, is_whole
from moeq.model.shards import Range
from moeq.pipeline.plan.layer_plan import LayerPlan
from moeq.schemes.format import PartSig

#: Largest copy unit in bytes, unless a single tensor is larger.
COPY_UNIT_BYTES = 256 * 2**20

#: Bytes that are copied and hashed at once.
CHUNK_BYTES = 2 * 2**20

#: (first byte, byte after the last) in a file.
Span = tuple[int, int]


@dataclass(frozen=True)
class Piece:
    """Bytes that are written and hashed at once: one part of one expert for one rank, or a part of a copied tensor."""

    tensor: str  #: name of the tensor in the output
    start: int  #: first byte in the output file
    stop: int  #: byte after the last
    whole: int  #: bytes of a full piece of this tensor


@dataclass(frozen=True)
class Unit:
    """One unit of work."""

    id: str  #: stable name: `layer-3/w13`, `layer-3/w2/rank-1`, `copy/model-00001-of-00004.safetensors/0`
    file: str  #: the output file that it writes to
    inputs: Mapping[str, tuple[Span, ...]]  #: source file to the byte ranges that are read, in order, neighbours joined
    outputs: tuple[Span, ...]  #: byte ranges of `file` that are written, in order, neighbours joined
    padding_bytes: int  #: bytes of the output that are padding

    #: Name of this kind of unit in events.
    what: ClassVar[Literal["pack", "copy"]] = "pack"

    @property
    def kind(self) -> str:
        """Name of this unit's kind; units of one kind need the same memory."""
        return self.id

    @property
    def fetch_group(self) -> str:
        """Name of this unit's group; one machine executes a whole group if source files have to be fetched first."""
        return self.id

    @property
    def num_digests(self) -> int:
        """Logical digests that a record holds per projection: one for each expert; 0 for units without any."""
        return 0

    def pieces(self, form: FileForm, layer: LayerPlan | None) -> Iterator[Piece]:
        """Yield the pieces in a file of that form, in the order in which they are hashed; `layer`: None for copies."""
        raise NotImplementedError

    @cached_property
    def bytes_in(self) -> int:
        return sum(stop - start for spans in self.inputs.values() for start, stop in spans)

    @cached_property  # asked for with every expert that is packed
    def bytes_out(self) -> int:
        return sum(stop - start for start, stop in self.outputs)


@dataclass(frozen=True)
class PackUnit(Unit):
    """One stack of one layer: `w13` or `w2` of some experts, for one rank or for all that share these experts."""

    layer: int  #: layer number
    role: StackedRole  #: `w13` or `w2`
    experts: Range  #: the experts
    shards: tuple[int, ...]  #: indices of the `LayerPlan.shards` that it writes
    ranks: tuple[int, ...]  #: ranks of these shards

    @property
    def kind(self) -> str:
        return f"layer {self.layer} {self.role}"

    @property
    def fetch_group(self) -> str:
        return self.file

    @property
    def num_digests(self) -> int:
        return self.experts.size

    def pieces(self, form: FileForm, layer: LayerPlan | None) -> Iterator[Piece]:
        assert layer is not None  # only copies are written to files of no layer
        stacks = [
            (name, *form.ranges[name])
            for index in self.shards
            for name in layer.shards[index].matrices[self.role].tensors.values()
        ]
        for row in range(self.experts.size):
            for name, start, stop in stacks:
                size = (stop - start) // self.experts.size
                yield Piece(name, start + row * size, start + (row + 1) * size, size)


@dataclass(frozen=True)
class CopiedTensor:
    """A tensor that is copied: its first byte in the source file and in the output file, and its bytes."""

    name: str
    source: int
    output: int
    size: int


@dataclass(frozen=True)
class Chunk:
    """Bytes that are contiguous in the source and in the output, and are copied at once."""

    source: int  #: first byte in the source file
    output: int  #: first byte in the output file
    #: (tensor, count of its bytes), in order. Pieces begin at multiples of `CHUNK_BYTES` of their tensor.
    pieces: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return sum(size for _, size in self.pieces)


@dataclass(frozen=True)
class CopyUnit(Unit):
    """Tensors of one source file that are copied unchanged."""

    source_file: str  #: the source file
    tensors: tuple[CopiedTensor, ...]  #: tensors in the order of the output

    what = "copy"

    @property
    def kind(self) -> str:
        return "copies"

    def pieces(self, form: FileForm, layer: LayerPlan | None) -> Iterator[Piece]:
        for chunk in self.chunks():
            at = chunk.output
            for name, size in chunk.pieces:
                yield Piece(name, at, at + size, CHUNK_BYTES)
                at += size

    def chunks(self) -> Iterator[Chunk]:
        """Yield the tensors in chunks of at most `CHUNK_BYTES`; small neighbours share a chunk."""
        source = output = size = 0
        pieces: list[tuple[str, int]] = []
        for tensor in self.tensors:
            for at in range(0, tensor.size, CHUNK_BYTES):
                part = min(CHUNK_BYTES, tensor.size - at)
                places = (tensor.source + at, tensor.output + at)
                if pieces and (places != (source + size, output + size) or size + part > CHUNK_BYTES):
                    yield Chunk(source, output, tuple(pieces))
                    pieces, size = [], 0
                if not pieces:
                    source, output = places
                pieces.append((tensor.name, part))
                size += part
        if pieces:
            yield Chunk(source, output, tuple(pieces))


def pack_units(layer: LayerPlan, experts: Experts, file: str, form: FileForm) -> Iterator[PackUnit]:
    for role in STACKED_ROLES:
        by_experts: dict[Range, list[int]] = {}
        for index, plan in enumerate(layer.shards):
            by_experts.setdefault(plan.shard.experts, []).append(index)
        for held, shards in by_experts.items():
            plans = [layer.shards[index] for index in shards]
            spans = [form.ranges[name] for plan in plans for name in plan.matrices[role].tensors.values()]
            suffix = "" if len(by_experts) == 1 else f"/rank-{plans[0].shard.rank}"
            yield PackUnit(
                id=f"layer-{layer.entry.layer}/{role}{suffix}",
                file=file,
                inputs=_stored_spans(experts, held, role),
                outputs=joined(spans),
                padding_bytes=sum(plan.padding_bytes(role) for plan in plans) * held.size,
                layer=layer.entry.layer,
                role=role,
                experts=held,
                shards=tuple(shards),
                ranks=tuple(plan.shard.rank for plan in plans),
            )


def copy_units(
    tensors: Mapping[str, TensorEntry], file: str, form: FileForm, counts: dict[str, int]
) -> Iterator[CopyUnit]:
    """Yield the units of one output file of copied tensors; `tensors` has their output names, in the file's order.

    `counts` maps source files to the number of their last unit, which names need; it is updated.
    """
    for source_file, rows in groupby(tensors.items(), key=lambda row: row[1].file):
        places = [CopiedTensor(name, entry.start, form.ranges[name][0], entry.nbytes) for name, entry in rows]
        for group in _bounded(places):
            number = counts[source_file] = counts.get(source_file, -1) + 1
            yield CopyUnit(
                id=f"copy/{source_file}/{number}",
                file=file,
                inputs={source_file: joined([(one.source, one.source + one.size) for one in group])},
                outputs=joined([(one.output, one.output + one.size) for one in group]),
                padding_bytes=0,
                source_file=source_file,
                tensors=group,
            )


def place_of(entry: TensorEntry, part: str, experts: Experts, expert: int) -> Span:
    """Return the span of one expert's part of a stored tensor: the whole tensor, or a row of a stacked one."""
    if not experts.layer.fused or is_whole(part, entry):
        return entry.start, entry.end
    size = entry.nbytes // experts.num_experts
    return entry.start + expert * size, entry.start + (expert + 1) * size


def signature_of(entry: TensorEntry, part: str, *, fused: bool) -> PartSig:
    """Return dtype and shape of one expert's part of a stored tensor. `fused`: the tensor may hold all experts."""
    row = fused and not is_whole(part, entry)
    return PartSig(entry.dtype, entry.shape[1:] if row else entry.shape)


def joined(spans: list[Span]) -> tuple[Span, ...]:
    """Sort spans, join neighbours and overlaps, and leave out empty ones."""
    found: list[Span] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(stop, found[-1][1]))
        elif stop > start:
            found.append((start, stop))
    return tuple(found)


def _stored_spans(experts: Experts, held: Range, role: StackedRole) -> dict[str, tuple[Span, ...]]:
    spans: dict[str, list[Span]] = {}
    for (projection, part), entries in experts.layer.parts.items():
        if (projection == "down") != (role == "w2"):
            continue
        stacked = entries.get(FUSED)
        if stacked is not None:
            first, last = (place_of(stacked, part, experts, expert) for expert in (held.start, held.stop - 1))
            spans.setdefault(stacked.file, []).append((first[0], last[1]))
            continue
        for expert in range(held.start, held.stop):
            entry = entries.get(expert)
            if entry is not None:
                spans.setdefault(entry.file, []).append((entry.start, entry.end))
    return {file: joined(found) for file, found in sorted(spans.items())}


def _bounded(tensors: list[CopiedTensor]) -> Iterator[tuple[CopiedTensor, ...]]:
    """Yield tensors in groups of at most `COPY_UNIT_BYTES`; a larger tensor is a group of its own."""
    group: list[CopiedTensor] = []
    size = 0
    for tensor in tensors:
        if size and size + tensor.size > COPY_UNIT_BYTES:
            yield tuple(group)
            group, size = [], 0
        group.append(tensor)
        size += tensor.size
    if size:
        yield tuple(group)
