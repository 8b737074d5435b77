"""Write new weights of experts into a running vLLM: `reload_weights`, and weight transfer in the checkpoint's names.

The engine's layerwise reload takes the parameters of every layer aside, hands tensors to the model class by the names
that a checkpoint has, and puts the parameters back where no loader was called. Converted experts have no loader. So
their tensors are written in place, into the parameters that were taken aside, before these are put back.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.manifest import STACKED_ROLES
from moeq.checkpoint.names import FUSED, index_experts
from moeq.errors import MoeqError
from moeq.update.layers import WritableLayer, describe_layer
from moeq.update.writer import Writer

if TYPE_CHECKING:
    from torch import Tensor

#: Tensors of one expert: projection to part to tensor.
_Expert = dict[str, dict[str, "Tensor"]]


class ExpertReload:
    """The experts of a running model, for one pass over the tensors of a checkpoint.

    Args:
        layers: the engine's expert layers that moeq's method fills.

    Attributes:
        converted: whether they were filled from a converted checkpoint.
        written: projections that were written.

    Raises:
        MoeqError: `usage.reload` if a layer's kernel reads more than the stored bytes.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        served = list(layers)
        self.converted = any(layer.quant_method.experts.checkpoint.kind == "converted" for layer in served)
        found = {layer.quant_method.entry.prefix: _writable(layer) for layer in served}
        self._numbers = {prefix: layer.layer for prefix, layer in found.items()}
        self._writer = Writer(found.values())
        self._layer: int | None = None
        self._pending: dict[int, _Expert] = {}
        self.written = 0

    def take(self, name: str, tensor: Tensor) -> bool:
        """Take a tensor if it belongs to these experts. Those of one layer have to follow each other.

        Raises:
            MoeqError: the errors of `Writer.update`; experts that were written before stay written.
        """
        entry = TensorEntry(name, "", tuple(tensor.shape), "", 0, 0)
        layer = next(iter(index_experts({name: entry})), None)
        number = None if layer is None else self._numbers.get(layer.prefix)
        if layer is None or number is None:
            return False
        if number != self._layer:
            self.finish()
            self._layer = number
        for (projection, part), homes in layer.parts.items():
            for expert in homes:
                rows = enumerate(tensor) if expert == FUSED else [(expert, tensor)]
                for one, value in rows:
                    self._pending.setdefault(one, {}).setdefault(projection, {})[part] = value
        return True

    def finish(self) -> None:
        """Write the experts of the last layer."""
        layer, pending = self._layer, self._pending
        self._layer, self._pending = None, {}
        for expert, projections in pending.items():
            assert layer is not None  # what is pending belongs to it
            if {"gate", "up"} <= projections.keys():
                both = {name: projections.pop(name) for name in ("gate", "up")}
                self._write(layer, expert, "w13", both)
            for projection, parts in projections.items():
                self._write(layer, expert, projection, parts)

    def _write(self, layer: int, expert: int, projection: str, tensors: Mapping[str, Any]) -> None:
        self._writer.update(layer, expert, projection, tensors)
        self.written += 1


def divert(
    weights: Iterable[tuple[str, Tensor]], reload: ExpertReload, stacked: set[str]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are not of converted experts, and write those that are.

    Raises:
        MoeqError: `usage.reload` for stacked tensors of a converted checkpoint, which may be those of other ranks.
    """
    for name, tensor in weights:
        if name in stacked and reload.converted:
            raise MoeqError(
                "usage.reload",
                f"{name} is a stacked tensor of a converted checkpoint, which a running engine does not take",
                "pass the tensors as the source checkpoint names them, packed or in bf16; or start the engine again "
                "with the folder that holds the new weights",
            )
        if not reload.take(name, tensor):
            yield name, tensor
    reload.finish()


def _writable(layer: Any) -> WritableLayer:
    """Describe a layer's served tensors, which the engine may have taken aside."""
    import torch

    from moeq.engines.vllm.engine_experts import RECORDS

    method, held = layer.quant_method, _served(layer)
    if method.moe.moe_parallel_config.enable_eplb:
        raise MoeqError(
            "usage.reload",
            f"layer {method.entry.layer}: EPLB may have moved its experts, and a reload does not know where to",
            "start the engine again with the new weights, or without --enable-eplb",
        )
    tensors = {
        role: {part: held[f"{role}_{part}"].data for part in method.part.matrices[role].stored.tensors}
        for role in STACKED_ROLES
    }
    packed = {f"{role}_{part}" for role, parts in tensors.items() for part in parts}
    memory = {one.untyped_storage().data_ptr() for parts in tensors.values() for one in parts.values()}
    for name, tensor in {**held, **getattr(layer, RECORDS, {})}.items():
        derived = name.startswith(STACKED_ROLES) and name not in packed and isinstance(tensor, torch.Tensor)
        if derived and tensor.numel() and tensor.untyped_storage().data_ptr() not in memory:
            raise MoeqError(
                "usage.reload",
                f"layer {method.entry.layer}: the engine's kernel reads {name}, which was computed from the stored "
                "weights or scales when the engine started and would stay as it is",
                "start the engine again with the new weights, or let moeq's kernels run the experts",
            )
    return describe_layer(method.experts.checkpoint, method.entry, method.rank, method.part, tensors)


def _served(layer: Any) -> Mapping[str, Tensor]:
    """Return the parameters that kernels read: those that a layerwise reload has taken aside, or the layer's own."""
    try:
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # versions without the layerwise reload
        return dict(layer.named_parameters())
    kept = get_layerwise_info(layer).kernel_tensors
    return dict(layer.named_parameters()) if kept is None else {**kept[0], **kept[1]}
