"""Random updates of the example checkpoints, and the checkpoint that they lead to."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
            if name == projection:
                entry = entries.get(expert) or entries[FUSED]
                whole = self.tensors[entry.name]
                found[part] = whole if expert in entries else whole[expert]
        return found

    @property
    def projections(self) -> list[str]:
        return sorted({name for name, _ in self.checkpoint.experts(0).layer.parts})

    def copy(self, parts: Parts, into: Parts) -> None:
        for name, tensor in parts.items():
            into[name].copy_(tensor)

    def save(self, folder: Path) -> Path:
        """Write the checkpoint with the tensors as they are now, one file of weights."""
        folder.mkdir()
        for path in self.folder.iterdir():
            if path.suffix != ".safetensors" and not path.name.endswith("index.json"):
                (folder / path.name).write_bytes(path.read_bytes())
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        return folder


def donors(experts: Experts, seed: int, count: int, *, joined: bool) -> Iterator[tuple[int, int, dict[str, Parts]]]:
    """Yield random updates: layer, expert, and tensors by projection, those of other experts.

    Args:
        experts: the checkpoint before all updates.
        seed: seed of the choice.
        count: number of updates.
        joined: whether gate and up come together, since they share something.
    """
    draw = random.Random(seed)
    layers = experts.checkpoint.info.moe_layers
    original = {name: tensor.clone() for name, tensor in experts.tensors.items()}
    kept = Experts(experts.folder, experts.checkpoint, original)
    for _ in range(count):
        layer, donor, projection = draw.choice(layers), draw.choice(layers), draw.choice(experts.projections)
        size = experts.checkpoint.num_experts(layer)
        expert, other = draw.randrange(size), draw.randrange(size)
        names = ["gate", "up"] if joined and projection in ("gate", "up") else [projection]
        yield layer, expert, {name: kept.parts(donor, other, name) for name in names}
