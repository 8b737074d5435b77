"""Describe the tensors of a layer on one rank so that experts can be written into them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from moeq.checkpoint.facts import Facts
from moeq.checkpoint.families import find_family
from moeq.checkpoint.manifest import STACKED_ROLES, LayerEntry, Projection, StackedRole, stacked_role
from moeq.errors import MoeqError
from moeq.layouts.layout import Layout
from moeq.layouts.padding import PaddingPlan
from moeq.layouts.parts import torch_dtype
from moeq.layouts.registry import get_layout
from moeq.load.ranks import Rank, RankPart
from moeq.load.torch_loader import checked_part, layer_entry, open_converted, read_parts
from moeq.matrix import MatrixSpec
from moeq.model.describe import model_type
from moeq.model.shards import Range, shard_spec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from moeq.model import Checkpoint
    from moeq.schemes.base import Scheme

T = TypeVar("T", int, str)

#: Tensors of one layer: stacked matrix to part to tensor `[experts, ...]`.
RankTensors = Mapping[StackedRole, Mapping[str, "Tensor"]]


@dataclass(frozen=True)
class WritableLayer:
    """Tensors of one layer on one rank, with everything that is needed to write an expert into them.

    Attributes:
        layer: layer number.
        layout: layout that packed the layer, with losses allowed if the conversion had some.
        scheme: encoding of these experts in the source.
        specs: specs of `w13` and `w2` of a whole expert, in the source's groups.
        written: specs of `w13` and `w2` of a whole expert, in the written groups (`moeq convert --regroup`).
        padding: sizes of this rank's part before and after padding.
        intermediate: intermediate features of this rank.
        adds_w2_bias: whether the rank adds the bias of `w2`; only one rank does.
        tensors: the tensors that are written, `[rows, ...]` each, on one device.
        experts: expert of every row, as the model counts them; an expert in several rows is redundant.
        num_experts: experts of the layer on all ranks.
        digests: projection to the manifest's digest of every expert; empty for a rank that holds parts of experts.
        rank: the rank.
        interleaved: whether a `gate_up` tensor of the source alternates gate and up rows; None if unknown.
    """

    layer: int
    layout: Layout
    scheme: Scheme
    specs: Mapping[StackedRole, MatrixSpec]
    written: Mapping[StackedRole, MatrixSpec]
    padding: PaddingPlan
    intermediate: Range
    adds_w2_bias: bool
    tensors: RankTensors
    experts: tuple[int, ...]
    num_experts: int
    digests: Mapping[Projection, Sequence[str]] = field(default_factory=dict)
    rank: Rank = field(default_factory=Rank)
    interleaved: bool | None = False

    def __post_init__(self) -> None:
        """Raise MoeqError `usage.update-target` unless the tensors have the layout's parts, shapes and dtypes."""
        for role in STACKED_ROLES:
            wanted = self.layout.tensors(self.padded(role))
            if wanted.keys() != self.tensors[role].keys():
                raise self.unsuitable(f"{role} has parts {sorted(self.tensors[role])}, {sorted(wanted)} are needed")
            for part, spec in wanted.items():
                self._check(f"{role}_{part}", self.tensors[role][part], (len(self.experts), *spec.shape), spec.dtype)
        self._check_overlap()

    def rows(self, expert: int) -> list[int]:
        """Return the rows that hold an expert: none if it is on other ranks, several if it is redundant."""
        return [row for row, held in enumerate(self.experts) if held == expert]

    def padded(self, role: StackedRole) -> MatrixSpec:
        """Return the spec of this rank's part of an expert, padding included."""
        return self.padding.w2 if role == "w2" else self.padding.w13

    def own(self, role: StackedRole) -> MatrixSpec:
        """Return the spec of this rank's part of an expert, without padding."""
        return self.padding.original_w2 if role == "w2" else self.padding.original_w13

    @property
    def projections(self) -> tuple[Projection, ...]:
        """Projections of which an expert consists."""
        return ("gate", "up", "down") if self.specs["w13"].gated else ("up", "down")

    def names(self, role: StackedRole) -> tuple[Projection, ...]:
        """Return the projections that a stacked matrix holds."""
        return tuple(name for name in self.projections if stacked_role(name) == role)

    def row_bytes(self, role: StackedRole) -> int:
        """Return the bytes of one row of a stacked matrix's tensors."""
        return sum(tensor.nbytes for tensor in self.tensors[role].values()) // len(self.experts)

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return next(iter(self.tensors["w2"].values())).device

    @property
    def is_whole(self) -> bool:
        """Whether the rank holds whole experts."""
        return self.own("w2").k == self.specs["w2"].k

    def unsuitable(self, why: str) -> MoeqError:
        """Return the error for tensors that cannot be written."""
        return MoeqError(
            "usage.update-target",
            f"layer {self.layer} in layout {self.layout.id}: {why}",
            "pass the tensors that moeq.load_tensors returns for this rank",
        )

    def _check(self, name: str, tensor: Tensor, shape: tuple[int, ...], dtype: str) -> None:
        wanted = torch_dtype(dtype)
        is_float = tensor.dtype.is_floating_point and wanted.is_floating_point
        same_kind = tensor.dtype == wanted or (is_float and min(tensor.element_size(), wanted.itemsize) > 1)
        if tuple(tensor.shape) != shape or not same_kind:
            raise self.unsuitable(f"{name} is {tensor.dtype} {list(tensor.shape)}, not {wanted} {list(shape)}")
        if not tensor.is_contiguous():
            raise self.unsuitable(f"{name} has strides {tensor.stride()}, so its bytes are not one block")
        if tensor.requires_grad:
            raise self.unsuitable(f"{name} requires a gradient, and packed weights have none")
        if tensor.is_inference():
            raise self.unsuitable(f"{name} was made in torch's inference mode, which freezes it")

    def _check_overlap(self) -> None:
        """Check that no byte belongs to two tensors, since one update would change both."""
        named = ((f"{role}_{part}", one) for role in STACKED_ROLES for part, one in self.tensors[role].items())
        for one, other in sharing_memory(named):
            raise self.unsuitable(f"{one} and {other} share memory")
        if len({tensor.device for parts in self.tensors.values() for tensor in parts.values()}) > 1:
            raise self.unsuitable("its tensors are on several devices")


def sharing_memory(tensors: Iterable[tuple[T, Tensor]]) -> Iterator[tuple[T, T]]:
    """Yield pairs of names of tensors that overlap in memory, among neighbours by address."""
    spans = [
        (tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, name)
        for name, tensor in tensors
        if tensor.device.type != "meta" and tensor.nbytes
    ]
    for (_, stop, one), (start, _, other) in pairwise(sorted(spans)):
        if start < stop:
            yield one, other


def writable_layer(
    dst: str | Path | Checkpoint,
    layer: int,
    *,
    tensors: RankTensors | None = None,
    device: str | torch.device = "cpu",
    tp_rank: int = 0,
    tp_size: int = 1,
    ep_rank: int = 0,
    ep_size: int = 1,
    check_gpu: bool = True,
) -> WritableLayer:
    """Describe one layer of a converted checkpoint for `moeq.Writer`.

    Args:
        dst: output of `moeq convert`: a folder, or the result of `moeq.open`.
        layer: layer number.
        tensors: tensors that an engine serves from, as `moeq.load_tensors` returns them; None: read them here.
        device: device of the tensors that are read here.
        tp_rank: rank within tensor parallelism.
        tp_size: number of ranks that share every expert.
        ep_rank: rank within expert parallelism.
        ep_size: number of ranks that share the experts.
        check_gpu: refuse a GPU of another architecture than the one converted for.

    Raises:
        MoeqError: `usage.update-target` if the tensors do not fit the layout, and the errors of `moeq.load_tensors`.
    """
    import torch

    checkpoint = open_converted(dst)
    entry, rank = layer_entry(checkpoint, layer), Rank(tp_rank, tp_size, ep_rank, ep_size)
    target = torch.device(device)
    part = checked_part(checkpoint, entry, rank, target, verify=False, check_gpu=check_gpu and tensors is None)
    if tensors is None:
        tensors = {role: read_parts(checkpoint, entry, part, part.matrices[role], target) for role in STACKED_ROLES}
    return describe_layer(checkpoint, entry, rank, part, tensors)


def describe_layer(
    checkpoint: Checkpoint,
    entry: LayerEntry,
    rank: Rank,
    part: RankPart,
    tensors: RankTensors,
    experts: tuple[int, ...] | None = None,
) -> WritableLayer:
    """Describe a rank's part of a layer, as `moeq.load.ranks.plan_rank` planned it, for writing.

    `experts` is the expert of every row; None: the experts of `part`, in order.
    """
    layout = get_layout(entry.layout, allow_lossy=entry.losses > 0)
    written = {role: entry.matrices[role].spec for role in STACKED_ROLES}
    held = _features(entry, part)
    own = {role: shard_spec(written[role], held) for role in STACKED_ROLES}
    w13, w2 = (part.matrices[role].spec for role in STACKED_ROLES)
    family = find_family(model_type(Facts(checkpoint.source.config)))
    return WritableLayer(
        layer=entry.layer,
        layout=layout,
        scheme=checkpoint.scheme_of(entry.layer),
        specs={role: entry.source_spec(role) for role in STACKED_ROLES},
        written=written,
        padding=PaddingPlan(layout.padding, w13, w2, own["w13"], own["w2"]),
        intermediate=held,
        adds_w2_bias=held.start == 0,
        tensors=tensors,
        experts=tuple(range(*part.experts)) if experts is None else experts,
        num_experts=entry.num_experts,
        digests=entry.digests if held.size == written["w2"].k else {},
        rank=rank,
        interleaved=family.interleaved if family else None,
    )


def _features(entry: LayerEntry, part: RankPart) -> Range:
    """Return the intermediate features of a rank, without padding."""
    whole, window = entry.matrices["w2"].spec.k, part.matrices["w2"].window
    if window is not None:
        return Range(min(window.k[0], whole), min(window.k[1], whole))
    stored = part.matrices["w2"].stored
    for home in entry.ranks:
        if home.matrices["w2"] is stored:
            return Range(*home.intermediate)
    return Range(0, whole)


def snapshot_digest(layer: int, digests: Iterator[tuple[int, str, str]]) -> str:
    """Return the digest of a layer: hex BLAKE3 over a line `expert projection digest` for each projection."""
    from blake3 import blake3

    lines = "".join(f"{expert} {projection} {digest}\n" for expert, projection, digest in digests)
    return blake3(f"moeq-layer-1 {layer}\n{lines}".encode()).hexdigest()
