"""Write new weights of experts into an engine that runs: its reloads and weight updates in a checkpoint's names.

Engines hand new tensors to the model class by the names that a checkpoint has. This module takes out those of experts
that moeq's method fills and writes them in place. The class gets the others.

Tensors have the source's names, or are stacked tensors of a converted folder: the one that is served, or another one
of the same model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.checkpoint.names import FUSED, index_experts
from moeq.errors import MoeqError
from moeq.load.rank_reading import equals_stored
from moeq.load.ranks import RankPart, plan_places, plan_rank
from moeq.load.refill import refill_experts
from moeq.load.torch_loader import layer_entry, open_converted, uneven_unit
from moeq.update.layers import WritableLayer, describe_layer
from moeq.update.progress import Progress
from moeq.update.writer import Writer

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.engines.packed_method import PackedMethod

#: Tensors of one expert: projection to part to tensor.
_Expert = dict[str, dict[str, "Tensor"]]


class ExpertReload:
    """The experts of a running model, for one pass over the tensors of a checkpoint.

    Args:
        layers: the engine's expert layers with moeq's method (`PackedMethod`).
        path: folder or Hub repository that stacked tensors come from.
        from_path: whether the engine itself reads the tensors there, so that they need not be compared.

    Attributes:
        stacked: names of stacked tensors, as a converted folder has them.
        progress: experts that were written.
    """

    def __init__(self, layers: Iterable[Any], path: str, *, from_path: bool = False) -> None:
        self._layers = {layer.quant_method.entry.layer: layer for layer in layers}
        self._path, self._from_path = path, from_path
        methods = [layer.quant_method for layer in self._layers.values()]
        self.stacked = {
            name
            for method in methods
            for name in method.entry.tensors
            if method.experts.checkpoint.kind == "converted" or name not in method.experts.names
        }
        self._numbers = {method.entry.prefix: method.entry.layer for method in methods}
        self._folded = [method.entry.layer for method in methods if method.folds_scales]
        # Only the layer whose tensors come gets a writer, since some trainers pass one tensor a call.
        self._writer: Writer | None = None
        self._layer: int | None = None
        self._pending: dict[int, _Expert] = {}
        self.progress = Progress()

    def take(self, name: str, tensor: Tensor) -> bool:
        """Take a tensor if it belongs to these experts; the tensors of a layer have to come one after the other.

        Raises MoeqError `usage.reload` if a layer's kernel reads more than the stored bytes, and the errors of
        `Writer.update_expert`; experts that were written before stay written.
        """
        entry = TensorEntry(name, "", tuple(tensor.shape), "", 0, 0)
        layer = next(iter(index_experts({name: entry})), None)
        number = None if layer is None else self._numbers.get(layer.prefix)
        if layer is None or number is None:
            return False
        self._check_scales()
        if number != self._layer:
            self.finish()
            self._layer, self._writer = number, Writer([_writable(self._layers[number])])
        for (projection, part), homes in layer.parts.items():
            for expert in homes:
                rows = enumerate(tensor) if expert == FUSED else [(expert, tensor)]
                for one, value in rows:
                    self._pending.setdefault(one, {}).setdefault(projection, {})[part] = value
        return True

    def _check_scales(self) -> None:
        """Refuse layers whose kernels read scales that were computed from the stored ones."""
        if self._folded:
            raise MoeqError(
                "usage.reload",
                f"layer {self._folded[0]}: beside e4m3 activations moeq's kernels read scales that were folded when "
                "the engine started and would stay as they are",
                "start the engine again with the new weights, or without activations fp8",
            )

    def folder(self) -> FolderReload:
        """Open the converted folder that the engine reads, for tensors that come stacked."""
        self._check_scales()
        return FolderReload(self._layers.values(), self._path, self._from_path, self.progress)

    def finish(self) -> None:
        """Write the experts of the last layer, each as a whole."""
        layer, pending = self._layer, self._pending
        self._layer, self._pending = None, {}
        for expert, projections in pending.items():
            assert layer is not None  # pending tensors belong to a layer
            assert self._writer is not None
            self._writer.update_expert(layer, expert, projections)
            self.progress.wrote(layer, [expert])
        self.progress.finished()


class FolderReload:
    """The experts of a running model, for one pass over the tensors of a converted folder.

    A stacked tensor does not say which layout it has. So experts are read by the manifest of the folder that the
    engine's config names, as at a start, and the tensors that the engine hands over have to be that folder's.

    Raises MoeqError `usage.not-converted`, and `usage.reload` if the folder's experts are packed otherwise than the
    served ones.
    """

    def __init__(self, layers: Iterable[Any], path: str, from_path: bool, progress: Progress) -> None:
        self._progress = progress
        self._layers = {layer.quant_method.entry.layer: layer for layer in layers}
        self._folder, self._from_path = open_converted(path), from_path
        self._parts = {number: self._plan(layer) for number, layer in self._layers.items()}
        self._missing = {
            name: number
            for number, parts in self._parts.items()
            for matrix in parts[0].matrices.values()
            for name in matrix.stored.tensors.values()
        }
        self._begun: set[int] = set()

    def _plan(self, layer: Any) -> list[RankPart]:
        """Plan what this rank reads of a layer: parts that follow each other in its tensors."""
        method: PackedMethod = layer.quant_method
        number, held = method.entry.layer, method.held(layer)
        entry = layer_entry(self._folder, number)
        if held is None:
            parts = [plan_rank(entry, method.rank, uneven_unit(self._folder, number))]
        else:
            parts = plan_places(entry, method.rank, held)
        specs, served = ([one.matrices[role].spec for role in STACKED_ROLES] for one in (parts[0], method.part))
        if entry.layout != method.entry.layout or specs != served:
            other = entry.layout if entry.layout != method.entry.layout else "other sizes or groups"
            raise MoeqError(
                "usage.reload",
                f"layer {number} of {self._folder.source.name} is packed in {other}, but the served experts are "
                f"packed in {method.entry.layout}",
                "convert the new weights as the served folder was converted, or start the engine again",
            )
        return parts

    def take(self, name: str, tensor: Tensor) -> None:
        """Note that a stacked tensor has come. Raises MoeqError `usage.reload` if it is not the folder's."""
        source = self._folder.source
        if not self._from_path and not (name in source.tensors and equals_stored(source, name, tensor)):
            raise MoeqError(
                "usage.reload",
                f"{name} is not the tensor of {source.name}, and a stacked tensor does not say how it is packed",
                "pass the tensors as the source checkpoint names them, or pass the path of the converted folder",
            )
        if name in self._missing:  # other ranks read the others
            self._begun.add(self._missing.pop(name))

    def finish(self) -> None:
        """Write the layers whose tensors came.

        Raises MoeqError `usage.reload` if tensors of such a layer are missing, and the errors of `refill_experts`. Then
        earlier layers are new, and each expert of this layer is old or new as a whole.
        """
        left = sorted(name for name, number in self._missing.items() if number in self._begun)
        if left:
            raise MoeqError("usage.reload", f"a layer's stacked tensors come together, and {left[0]} is missing")
        for number in sorted(self._begun):
            entry, layer, first = layer_entry(self._folder, number), self._layers[number], 0
            served = layer.quant_method.served(layer)
            for part in self._parts[number]:
                rows = slice(first, first + part.experts[1] - part.experts[0])
                targets = {role: {name: one[rows] for name, one in served[role].items()} for role in STACKED_ROLES}
                for experts in refill_experts(self._folder, entry, part, targets):
                    self._progress.wrote(number, experts)
                first = rows.stop
            self._progress.finished()


def divert(weights: Iterable[tuple[str, Tensor]], reload: ExpertReload) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that belong to no converted expert, and write the others in place.

    Raises MoeqError: the errors of `ExpertReload` and `FolderReload`.
    """
    folder: FolderReload | None = None
    with reload.progress:
        for name, tensor in weights:
            if name in reload.stacked:
                folder = folder or reload.folder()
                folder.take(name, tensor)
            elif not reload.take(name, tensor):
                yield name, tensor
        reload.finish()
        if folder is not None:
            folder.finish()


def _writable(layer: Any) -> WritableLayer:
    """Describe a layer's served tensors."""
    method: PackedMethod = layer.quant_method
    method.check_reload(layer)
    checkpoint, tensors = method.experts.checkpoint, method.served(layer)
    return describe_layer(checkpoint, method.entry, method.rank, method.part, tensors, method.held(layer))
