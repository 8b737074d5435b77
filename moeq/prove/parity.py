"""Compare moeq's packing of experts with the engine's own packing, byte for byte, and say which side is right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.manifest import STACKED_ROLES, MatrixEntry, StackedRole
from moeq.errors import MoeqError
from moeq.layouts.layout import Layout
from moeq.layouts.padding import PaddingPlan
from moeq.layouts.registry import get_layout
from moeq.matrix import QuantizedMatrix
from moeq.model import Checkpoint
from moeq.model import open as open_checkpoint
from moeq.model.converted import ConvertedCheckpoint, written_padding
from moeq.model.shards import Range, shard_matrix
from moeq.model.tensor_bytes import flat_bytes, same_matrix
from moeq.pipeline.events import Advance
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer
from moeq.pipeline.plan.options import Ranks
from moeq.prove.parity_vllm import PACKERS, EngineCode, ParityExperts, find_engine

if TYPE_CHECKING:
    from torch import Tensor

_NOTE = (
    "Marlin's repacking is a CUDA operation in vLLM; the Python packer that vLLM ships beside it "
    "(marlin_utils_test.py) took its place"
)


@dataclass(frozen=True)
class PartParity:
    """Comparison of one part of one matrix of one rank, over the sampled experts."""

    layer: int  #: layer number
    rank: int | None  #: rank, or None for one packing for all ranks
    role: str  #: `w13` or `w2`
    part: str  #: `weight`, `scale`, ...
    experts: tuple[int, ...]  #: experts that were compared
    differing: tuple[int, ...]  #: experts whose bytes differ
    verdict: str | None = None  #: sentence about which side is right; None if nothing differs


@dataclass(frozen=True)
class Parity:
    """Result of `parity`."""

    checkpoint: str  #: checkpoint whose experts were compared
    engine: str  #: name and version of the engine
    layout: tuple[str, ...]  #: layout ids
    parts: tuple[PartParity, ...]  #: all comparisons
    notes: tuple[str, ...]  #: remarks about replaced operations of the engine

    @property
    def equal(self) -> bool:
        """Whether something was compared and every byte is equal."""
        return bool(self.parts) and not any(part.differing for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ParityUnit:
    """Experts of one rank of one layer whose packing is compared."""

    layer: int  #: layer number
    rank: int | None  #: rank, or None for one packing for all ranks
    experts: tuple[int, ...]  #: sampled experts of the rank
    intermediate: Range  #: intermediate features of the rank
    layout: Layout  #: layout of the layer
    padding: PaddingPlan  #: padding of the rank's matrices
    #: Stacked tensors of a conversion; empty for a source, whose experts are packed for the comparison.
    matrices: Mapping[StackedRole, MatrixEntry] = field(default_factory=dict)
    first: int = 0  #: expert in the first row of these tensors


def parity(
    checkpoint: str | Path,
    *,
    site: Path | None = None,
    layout: str | None = None,
    tp: int = 1,
    sample: int = 2,
    progress: Advance | None = None,
) -> Parity:
    """Run the engine's packing on sampled experts and compare bytes.

    Args:
        checkpoint: a conversion, whose own bytes are compared; or a source, which is packed for the comparison.
        site: folder that holds the engine's package; None takes the installed one.
        layout: layout for a source; None: the first that fits and that the engine packs.
        tp: tensor-parallel size for a source.
        sample: number of experts per layer, spread over the layer.
        progress: called with steps done, steps in all and a label.

    Raises MoeqError `environment.no-engine`, naming what to install; `environment.no-engine-packing` for layouts whose
    packing in the engine does not run on a CPU; `environment.engine-code` if the engine's code is of an unknown
    version, or fails.
    """
    engine = find_engine(site)
    opened = open_checkpoint(checkpoint)
    units = list(
        _converted_units(opened, sample)
        if isinstance(opened, ConvertedCheckpoint)
        else _source_units(opened, layout, tp, sample)
    )
    found: list[PartParity] = []
    for index, unit in enumerate(units):
        found += _compare(engine, opened, unit)
        if progress is not None:
            progress(index + 1, len(units), f"layer {unit.layer}")
    layouts = tuple(dict.fromkeys(unit.layout.id for unit in units))
    return Parity(str(checkpoint), f"vLLM {engine.version}", layouts, tuple(found), (_NOTE,))


def _sampled(count: int, sample: int) -> list[int]:
    """Choose experts spread over `count`, among them the first and the last."""
    if sample >= count:
        return list(range(count))
    return sorted({round(index * (count - 1) / max(sample - 1, 1)) for index in range(sample)})


def _require_packer(layout: str) -> None:
    if layout not in PACKERS:
        raise MoeqError(
            "environment.no-engine-packing",
            f"the engine's packing of {layout} does not run on a CPU, or does not exist: nothing can be compared",
            f"parity covers {', '.join(PACKERS)}",
        )


def _converted_units(checkpoint: ConvertedCheckpoint, sample: int) -> Iterator[ParityUnit]:
    for entry in checkpoint.manifest.layers:
        _require_packer(entry.layout)
        layout = get_layout(entry.layout)
        chosen = _sampled(entry.num_experts, sample)
        whole = Range(0, entry.matrices["w2"].spec.k)
        homes: list[tuple[int | None, Range, Range, Mapping[StackedRole, MatrixEntry]]] = [
            (rank.rank, Range(*rank.experts), Range(*rank.intermediate), rank.matrices) for rank in entry.ranks
        ] or [(None, Range(0, entry.num_experts), whole, entry.matrices)]
        for rank, experts, intermediate, matrices in homes:
            held = tuple(expert for expert in chosen if experts.start <= expert < experts.stop)
            if held:
                padding = written_padding(layout, matrices)
                yield ParityUnit(entry.layer, rank, held, intermediate, layout, padding, matrices, experts.start)


def _source_units(checkpoint: Checkpoint, layout_id: str | None, tp: int, sample: int) -> Iterator[ParityUnit]:
    for layer in checkpoint.info.moe_layers:
        plan = _plan(checkpoint, layer, layout_id, tp)
        held = tuple(_sampled(plan.entry.num_experts, sample))
        for shard in plan.shards:
            rank = shard.shard.rank if plan.entry.ranks else None
            yield ParityUnit(layer, rank, held, shard.shard.intermediate, plan.layout, shard.padding)


def _plan(checkpoint: Checkpoint, layer: int, layout_id: str | None, tp: int) -> LayerPlan:
    if layout_id is not None:
        _require_packer(layout_id)
        return plan_layer(checkpoint, layer, layout_id, Ranks(tp))
    refusals = []
    for candidate in PACKERS:
        try:
            return plan_layer(checkpoint, layer, candidate, Ranks(tp))
        except MoeqError as error:
            refusals.append(error)
    raise MoeqError(
        "environment.no-engine-packing",
        f"no layout with an engine's packing holds layer {layer}: {refusals[0].message}",
        f"parity covers {', '.join(PACKERS)}",
    )


def _packed(
    checkpoint: Checkpoint, unit: ParityUnit, role: StackedRole, expert: int, padded: QuantizedMatrix
) -> Mapping[str, Tensor]:
    """Return moeq's packed parts of one expert: read from the conversion, or packed now for a source."""
    if not unit.matrices:
        return unit.layout.pack(padded)
    source, names = checkpoint.source, unit.matrices[role].tensors
    return {part: source.read_row(source.entry(name), expert - unit.first) for part, name in names.items()}


def _compare(engine: EngineCode, checkpoint: Checkpoint, unit: ParityUnit) -> Iterator[PartParity]:
    plain: dict[StackedRole, list[QuantizedMatrix]] = {"w13": [], "w2": []}
    padded: dict[StackedRole, list[QuantizedMatrix]] = {"w13": [], "w2": []}
    for role in STACKED_ROLES:
        for expert in unit.experts:
            whole = checkpoint.matrix(unit.layer, expert, role)
            shard = shard_matrix(whole, unit.intermediate, first=not unit.rank)
            plain[role].append(shard)
            padded[role].append(unit.padding.pad(shard))
    scheme = checkpoint.scheme_of(unit.layer)
    experts = ParityExperts(
        w13=plain["w13"],
        w2=plain["w2"],
        padded=dict(padded),
        awq=scheme.format == "awq",
        group_size=scheme.group_size,
        interleaved=unit.layout.w13_order == "interleaved",
    )
    try:
        theirs = PACKERS[unit.layout.id](engine, experts)
    except (AssertionError, ArithmeticError, LookupError, NameError, RuntimeError, TypeError, ValueError) as error:
        detail = f"vLLM {engine.version}'s own packing of layer {unit.layer} fails: {type(error).__name__}: {error}"
        raise MoeqError("environment.engine-code", detail, "parity knows the code of vLLM 0.33.0") from error
    for role in STACKED_ROLES:
        ours = [_packed(checkpoint, unit, role, expert, padded[role][i]) for i, expert in enumerate(unit.experts)]
        for part in ours[0]:
            differing = []
            for index, expert in enumerate(unit.experts):
                tensor = theirs[role].get(part)
                if tensor is None or not _same(ours[index][part], tensor[index]):
                    differing.append(expert)
            verdict = None
            if differing:
                index = unit.experts.index(differing[0])
                verdict = _verdict(unit, experts, padded[role][index], ours[index], theirs[role], index, part)
            yield PartParity(unit.layer, unit.rank, role, part, unit.experts, tuple(differing), verdict)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    import torch

    left, right = flat_bytes(ours), flat_bytes(theirs)
    return left.numel() == right.numel() and bool(torch.equal(left, right))


def _verdict(
    unit: ParityUnit,
    experts: ParityExperts,
    matrix: QuantizedMatrix,
    ours: Mapping[str, Tensor],
    theirs: Mapping[str, Tensor],
    index: int,
    part: str,
) -> str:
    """Return a sentence about which side is right: each side's part is unpacked, with moeq's other parts."""
    spec = matrix.spec
    if not same_matrix(unit.layout.unpack(ours, spec), matrix):
        return "moeq is wrong: its bytes do not unpack to the source's values"
    tensor = theirs.get(part)
    like = ours[part]
    if tensor is None or tensor[index].numel() * tensor.element_size() != like.numel() * like.element_size():
        shape = "absent" if tensor is None else list(tensor[index].shape)
        return f"the engine's {part} has another size ({shape}, here {list(like.shape)}): it pads differently"
    swapped = {**ours, part: flat_bytes(tensor[index]).view(like.dtype).view(like.shape)}
    if same_matrix(unit.layout.unpack(swapped, spec), matrix):
        return "both are right: the kernel reads the same values from both"
    size = unit.intermediate.size
    if part == "scale" and spec.num_groups > 1 and experts.group_size >= size:
        advisory = " (moeq explain marlin-w13-scale-order)" if spec.role == "w13" else ""
        return (
            f"moeq is right: its bytes unpack to the source's values; the engine compares the group size "
            f"{experts.group_size} with the intermediate size {size} per rank instead of K = {spec.k}, and orders the "
            f"scales as for one group although the kernel reads {spec.num_groups} groups{advisory}"
        )
    return "moeq is right: its bytes unpack to the source's values, the engine's do not"
