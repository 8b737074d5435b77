"""Random updates of the example checkpoints, and the checkpoint that they lead to."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moeq.checkpoint.names import FUSED
from moeq.model import Checkpoint, open

Parts = dict[str, Tensor]


@dataclass
class Experts:
    """Tensors of a source checkpoint in memory, which updates change beside the writer."""

    folder: Path
    checkpoint: Checkpoint
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: Path) -> Experts:
        tensors: dict[str, Tensor] = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path)
        return cls(folder, open(folder), tensors)

    def parts(self, layer: int, expert: int, projection: str) -> Parts:
        """The stored tensors of one projection of one expert, views of `tensors`."""
        stored = self.checkpoint.experts(layer).layer
        found = {}
        for (name, part), entries in stored.parts.items():
            if name == projection or (name == "gate_up" and projection in ("gate", "up")):
                entry = entries.get(expert) or entries[FUSED]
                tensor = self.tensors[entry.name]
                tensor = tensor if expert in entries else tensor[expert]
                # The one fused checkpoint, gpt-oss, interleaves gate and up rows.
                found[part] = tensor if name == projection else tensor[int(projection == "up") :: 2]
        return found

    @property
    def projections(self) -> list[str]:
        return sorted({name for name, _ in self.checkpoint.experts(0).layer.parts})

    def save(self, folder: Path) -> Path:
        """Write the checkpoint with the tensors as they are now, one file of weights."""
        folder.mkdir()
        for path in self.folder.iterdir():
            if path.suffix != ".safetensors" and not path.name.endswith("index.json"):
                (folder / path.name).write_bytes(path.read_bytes())
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return folder


#: Kinds of updates: slices of one projection, all of it, and gate and up together. A block is rows and columns at once.
KINDS = ("rows", "columns", "block", "projection", "pair")

Span = tuple[int, int]


@dataclass(frozen=True)
class Change:
    """A drawn update: the tensors of another expert, by projection.

    `rows` and `columns` bound a slice of one projection.
    """

    layer: int
    expert: int
    parts: dict[str, Parts]
    rows: Span | None = None
    columns: Span | None = None

    @property
    def kind(self) -> str:
        if len(self.parts) == 2 or "gate_up" in self.parts:
            return "pair"
        if self.rows and self.columns:
            return "block"
        return "rows" if self.rows else "columns" if self.columns else "projection"

    @property
    def target(self) -> tuple[str, Parts | dict[str, Parts]]:
        """What `Writer.update` takes: the projection's name and its tensors."""
        if len(self.parts) == 2:
            return "w13", self.parts
        (found,) = self.parts.items()
        return found


def changes(experts: Experts, sizes: Mapping[str, Span], seed: int, count: int) -> Iterator[Change]:
    """Yield random updates.

    Args:
        experts: the checkpoint, which the caller may change between two of them.
        sizes: rows and columns by projection.
        seed: seed of the choice.
        count: number of updates.
    """
    draw = random.Random(seed)
    layers = experts.checkpoint.info.moe_layers
    original = {name: tensor.clone() for name, tensor in experts.tensors.items()}
    kept = Experts(experts.folder, experts.checkpoint, original)
    pair = ["gate_up"] if "gate_up" in experts.projections else ["gate", "up"]
    for _ in range(count):
        layer, donor, kind = draw.choice(layers), draw.choice(layers), draw.choice(KINDS)
        held = experts.checkpoint.num_experts(layer)
        expert, other = draw.randrange(held), draw.randrange(held)
        names = pair if kind == "pair" else [draw.choice(["gate", "up", "down"])]
        parts = {name: kept.parts(donor, other, name) for name in names}
        rows = columns = None
        if kind in ("rows", "columns", "block"):
            ((name, given),) = parts.items()
            units = block_units(given, sizes[name])
            rows = _span(draw, sizes[name][0], units[0]) if kind != "columns" else None
            columns = _span(draw, sizes[name][1], units[1]) if kind != "rows" else None
            if rows or columns:
                # What the whole projection shares stays: second-level scales, and scales of activations.
                shared = {part: one for part, one in experts.parts(layer, expert, name).items() if one.numel() == 1}
                parts = {name: cut(given | shared, sizes[name], rows, columns)}
        yield Change(layer, expert, parts, rows, columns)


def _span(draw: random.Random, size: int, unit: int) -> Span | None:
    """Draw whole units of a size; None for all of it."""
    count = -(-size // unit)
    start = draw.randrange(count)
    found = start * unit, min(draw.randint(start + 1, count) * unit, size)
    return None if found == (0, size) else found


def _axes(parts: Parts) -> Span:
    """Return the axes of rows and columns: GPTQ and AWQ store `[K, N]`."""
    return (1, 0) if "qweight" in parts else (0, 1)


def block_units(parts: Parts, size: Span) -> Span:
    """Return the rows and the columns that share a stored number, so that slices are multiples of them."""
    shapes = [tensor.shape for tensor in parts.values() if tensor.dim() > 1]
    rows, columns = (
        max(-(-whole // shape[axis]) for shape in shapes) for whole, axis in zip(size, _axes(parts), strict=True)
    )
    return rows, columns


def cut(parts: Parts, size: Span, rows: Span | None, columns: Span | None) -> Parts:
    """Return a block of a projection in the form in which a checkpoint would store it, as views."""
    spans = rows or (0, size[0]), columns or (0, size[1])
    found = {}
    for name, tensor in parts.items():
        if name == "weight_shape":
            found[name] = torch.tensor([stop - start for start, stop in spans])
        elif tensor.numel() == 1:
            found[name] = tensor
        elif tensor.dim() > 1:
            index = [slice(None)] * tensor.dim()
            for axis, whole, (start, stop) in zip(_axes(parts), size, spans, strict=True):
                unit = -(-whole // tensor.shape[axis])
                index[axis] = slice(start // unit, -(-stop // unit))
            found[name] = tensor[tuple(index)]
        elif name == "bias":
            found[name] = tensor[slice(*spans[0])]
    return found


def write(experts: Experts, sizes: Mapping[str, Span], change: Change) -> None:
    """Make an update in the checkpoint's own tensors."""
    for name, parts in change.parts.items():
        whole = experts.parts(change.layer, change.expert, name)
        if change.rows or change.columns:
            whole = cut(whole, sizes[name], change.rows, change.columns)
        for part, tensor in parts.items():
            whole[part].copy_(tensor)
