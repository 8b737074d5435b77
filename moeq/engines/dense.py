"""Linear layers outside the experts that the source had quantised, decoded by moeq's own schemes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moeq.errors import MoeqError
from moeq.model.declaration import find_declaration
from moeq.schemes.declared import Declaration
from moeq.schemes.format import Context, Described, PartSig
from moeq.schemes.registry import get_format, match_format

if TYPE_CHECKING:
    from torch import Tensor

    from moeq.model import Checkpoint

#: Parts of a linear layer that load as they are.
_PLAIN = {"weight", "bias"}
_PLAIN_DTYPES = {"F16", "BF16", "F32"}


@dataclass(frozen=True)
class QuantizedLinear:
    """A quantised linear layer as headers and config describe it.

    Attributes:
        module: its name.
        parts: names of its tensors below the module, bias apart.
        described: scheme and sizes.
    """

    module: str
    parts: tuple[str, ...]
    described: Described

    def dequantize(self, parts: Mapping[str, Tensor]) -> Tensor:
        """float32 `[out_features, in_features]` on the device of the parts."""
        from moeq.schemes.dequantize import dequantize

        device = next(iter(parts.values())).device
        on_cpu = {name: tensor.cpu() for name, tensor in parts.items()}
        matrix = get_format(self.described.scheme.format).unpack(on_cpu, self.described.spec, self.described.scheme)
        return dequantize(matrix).to(device)


def quantized_linears(
    checkpoint: Checkpoint, linears: Mapping[str, tuple[int, int]], original: Mapping[str, Any] | None
) -> list[QuantizedLinear]:
    """The linear layers of a model that its checkpoint stores quantised.

    Args:
        checkpoint: the converted checkpoint; tensors of experts are not looked at.
        linears: `(out_features, in_features)` by module name.
        original: the source's quantisation config.

    Raises:
        MoeqError: `source.unsupported-format` where a layer is in a format that moeq cannot decode.
    """
    config = {**checkpoint.source.config, "quantization_config": original or {}}
    declaration, _ = find_declaration(config, checkpoint.source.side_configs)
    stored: dict[str, dict[str, PartSig]] = {}
    for name, entry in checkpoint.source.tensors.items():
        module, _, part = name.rpartition(".")
        if module in linears and part != "bias":
            stored.setdefault(module, {})[part] = PartSig(entry.dtype, entry.shape)
    return [
        _describe(module, parts, linears[module], declaration)
        for module, parts in stored.items()
        if set(parts) - _PLAIN or parts["weight"].dtype not in _PLAIN_DTYPES
    ]


def _describe(
    module: str, parts: Mapping[str, PartSig], sizes: tuple[int, int], declaration: Declaration | None
) -> QuantizedLinear:
    declared = declaration.resolve(module) if declaration else None
    found = match_format(parts, declared)
    if found is None or declared is None:
        shown = ", ".join(f"{part} {sig.dtype}{list(sig.shape)}" for part, sig in sorted(parts.items()))
        raise MoeqError("source.unsupported-format", f"{module} is quantised in a way that moeq cannot decode: {shown}")
    # The role only matters to experts; `down` is a plain matrix to every format.
    described = found.describe(parts, Context(module, "down", declared, k_hint=sizes[1]))
    if (described.spec.n, described.spec.k) != sizes:
        raise MoeqError(
            "source.inconsistent",
            f"{module} is stored as [{described.spec.n}, {described.spec.k}], and the model has {list(sizes)}",
        )
    return QuantizedLinear(module, tuple(parts), described)
