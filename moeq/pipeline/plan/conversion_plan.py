"""Plan of what a conversion will write, made from headers alone: files, tensors, units of work, sizes.

The plan is deterministic: the same source, layout, deployment and version give the same plan and so the same bytes.
Its digest names the job, by which an interrupted conversion recognises its own work.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import CopiedLayer
from moeq.checkpoint.source import Source
from moeq.checkpoint.writer import FileForm, file_form, tensor_bytes
from moeq.display import DisplayedRecord
from moeq.errors import MoeqError
from moeq.model import Checkpoint
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer
from moeq.pipeline.plan.options import DEFAULTS, ONE_RANK, ConvertOptions, Ranks
from moeq.pipeline.plan.units import CopyUnit, PackUnit, Piece, Unit, copy_units, pack_units

#: Name to shape and dtype, in file order.
TensorForms = dict[str, tuple[tuple[int, ...], str]]

#: Largest file of copied tensors, in bytes, unless a single tensor is larger.
REST_FILE_BYTES = 4 * 2**30

#: Version in the digest; it changes whenever the same inputs would give other units or other bytes.
PLAN_VERSION = 4


@dataclass(frozen=True)
class FilePlan:
    """One output file: either the experts of a layer, or tensors copied from the source."""

    name: str  #: file name
    tensors: Mapping[str, tuple[tuple[int, ...], str]]  #: name to `(shape, dtype)`, in file order
    layer: LayerPlan | None  #: the layer whose experts it holds, or None for copied tensors

    @property
    def data_bytes(self) -> int:
        """Bytes of tensor data."""
        return sum(tensor_bytes(shape, dtype) for shape, dtype in self.tensors.values())

    @cached_property
    def form(self) -> FileForm:
        """Header of the file, and places of its tensors."""
        metadata = {"format": "pt"} if self.layer is None else {"format": "pt", "moeq_layout": self.layer.entry.layout}
        return file_form(self.tensors, metadata)


@dataclass(frozen=True, repr=False)
class Plan(DisplayedRecord):
    """A whole conversion."""

    files: tuple[FilePlan, ...]  #: output files in order
    units: tuple[Unit, ...]  #: units of work in order; together they write all bytes of all files except the headers
    copied: tuple[CopiedLayer, ...]  #: layers whose experts are copied unchanged
    expert_bytes_in: int  #: bytes of the expert tensors that are converted
    digest: str  #: sha256 over everything that decides the output bytes

    @property
    def layers(self) -> tuple[LayerPlan, ...]:
        """Layers with experts, in order."""
        return tuple(file.layer for file in self.files if file.layer is not None)

    @property
    def padding_bytes(self) -> int:
        """Bytes of the output that are padding."""
        return sum(unit.padding_bytes for unit in self.units)

    @property
    def expert_bytes_out(self) -> int:
        """Bytes of packed experts."""
        return sum(file.data_bytes for file in self.files if file.layer is not None)

    @property
    def rest_bytes(self) -> int:
        """Bytes copied unchanged."""
        return sum(file.data_bytes for file in self.files if file.layer is None)

    @property
    def bytes_out(self) -> int:
        """Bytes of tensor data to write."""
        return self.expert_bytes_out + self.rest_bytes

    @cached_property
    def _units(self) -> dict[str, Unit]:
        return {unit.id: unit for unit in self.units}

    @cached_property
    def _files(self) -> dict[str, FilePlan]:
        return {file.name: file for file in self.files}

    def unit(self, unit_id: str) -> Unit:
        """Return a unit by its id. Raises MoeqError `usage.no-such-unit`."""
        try:
            return self._units[unit_id]
        except KeyError:
            raise MoeqError("usage.no-such-unit", f"this conversion has no unit {unit_id!r}", "see moeq plan") from None

    def file(self, name: str) -> FilePlan:
        """Return an output file by its name."""
        return self._files[name]

    def pieces(self, unit: Unit) -> Iterator[Piece]:
        """Yield the pieces of a unit, in the order in which they are hashed."""
        file = self.file(unit.file)
        return unit.pieces(file.form, file.layer)

    def layer_of(self, unit: PackUnit) -> LayerPlan:
        """Return the layer whose stack a unit writes."""
        layer = self._files[unit.file].layer
        assert layer is not None  # only copies are written to files of no layer
        return layer


def make_plan(
    checkpoint: Checkpoint,
    layouts: Mapping[int, str],
    copied: tuple[CopiedLayer, ...] = (),
    ranks: Ranks = ONE_RANK,
    options: ConvertOptions = DEFAULTS,
) -> Plan:
    """Plan the conversion of a source checkpoint.

    Args:
        layouts: layer number to layout id, for the layers to convert.
        copied: layers to copy unchanged, with the reason.

    Raises MoeqError `usage.layout-does-not-fit`, `usage.mixed-experts`, `usage.tp`, `usage.ep`, `usage.group-cut` if a
    layer cannot be packed, with all reasons.
    """
    layers = [plan_layer(checkpoint, layer, layout, ranks, options) for layer, layout in layouts.items()]
    consumed = [entry for plan in layers for entry in checkpoint.experts(plan.entry.layer).layer.tensors()]
    packed = {entry.name for entry in consumed}
    copies = in_source_order(
        checkpoint.source, (entry for name, entry in checkpoint.source.tensors.items() if name not in packed)
    )
    rest = list(bounded_files({entry.name: (entry.shape, entry.dtype)} for entry in copies))
    names = file_names(len(rest) + len(layers))
    files = [FilePlan(name, tensors, None) for name, tensors in zip(names, rest, strict=False)]
    for name, plan in zip(names[len(rest) :], layers, strict=True):
        tensors = {key: value for shard in plan.shards for key, value in shard.tensors().items()}
        files.append(FilePlan(name, tensors, plan))
    return Plan(
        files=tuple(files),
        units=tuple(_units(checkpoint, files)),
        copied=copied,
        expert_bytes_in=sum(entry.nbytes for entry in consumed),
        digest=_digest(checkpoint, files, ranks, options),
    )


def _units(checkpoint: Checkpoint, files: Iterable[FilePlan]) -> Iterator[CopyUnit | PackUnit]:
    counts: dict[str, int] = {}
    for file in files:
        if file.layer is None:
            tensors = {name: checkpoint.source.tensors[name] for name in file.tensors}
            yield from copy_units(tensors, file.name, file.form, counts)
        else:
            yield from pack_units(file.layer, checkpoint.experts(file.layer.entry.layer), file.name, file.form)


def in_source_order(source: Source, entries: Iterable[TensorEntry]) -> list[TensorEntry]:
    """Sort tensors by their places in the source, so that neighbours there are copied in one run.

    Tensors in files that a source makes (`moeq.gguf.derived`) come last.
    """
    order = {file.name: number for number, file in enumerate(source.files)}
    return sorted(entries, key=lambda entry: (order.get(entry.file, len(order)), entry.file, entry.start, entry.end))


def bounded_files(groups: Iterable[TensorForms]) -> Iterator[TensorForms]:
    """Yield the tensors of each file of at most `REST_FILE_BYTES`; the tensors of a group stay together."""
    file: TensorForms = {}
    size = 0
    for tensors in groups:
        count = sum(tensor_bytes(*form) for form in tensors.values())
        if file and size + count > REST_FILE_BYTES:
            yield file
            file, size = {}, 0
        file |= tensors
        size += count
    if file:
        yield file


def file_names(count: int) -> list[str]:
    """Return names of the weight files, numbered as every tool numbers them."""
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _digest(checkpoint: Checkpoint, files: Iterable[FilePlan], ranks: Ranks, options: ConvertOptions) -> str:
    """Compute the digest that names the job: source identity, options, layouts, and every output tensor."""
    job = {
        "version": PLAN_VERSION,
        "source": checkpoint.source.identity(),
        "options": {
            **asdict(ranks),
            **{name: getattr(options, name) for name in ("skip_unfit", "allow_lossy", "regroup")},
        },
        "files": [[file.name, {name: [list(s), d] for name, (s, d) in file.tensors.items()}] for file in files],
        "layers": [asdict(file.layer.entry) for file in files if file.layer is not None],
    }
    return hashlib.sha256(json.dumps(job, sort_keys=True, default=str).encode()).hexdigest()
