"""Quantised modules other than routed experts: attention of a GPTQ checkpoint, shared experts, a whole MTP layer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix
from moeq.schemes.declared import Declaration, Declared
from moeq.schemes.format import Context, Described, PartSig
from moeq.schemes.registry import get_format, match_format


@dataclass(frozen=True)
class QuantizedModule:
    """One quantised linear layer.

    Attributes:
        name: module name.
        parts: part to tensor.
        described: how it is quantised. Its role is of no meaning.
    """

    name: str
    parts: Mapping[str, TensorEntry]
    described: Described


def quantized_modules(tensors: Iterable[TensorEntry], declaration: Declaration | None) -> Iterator[QuantizedModule]:
    """The quantised modules among some tensors, in order of appearance.

    Args:
        tensors: tensors that hold no routed expert.
        declaration: the checkpoint's quantisation config.

    Raises:
        MoeqError: `source.inconsistent` where headers and config contradict each other.
    """
    grouped: dict[str, dict[str, TensorEntry]] = {}
    for entry in tensors:
        name, _, part = entry.name.rpartition(".")
        grouped.setdefault(name, {})[part] = entry
    for name, parts in grouped.items():
        signatures = {part: PartSig(entry.dtype, entry.shape) for part, entry in parts.items()}
        declared = declaration.resolve(name) if declaration else None
        found = match_format(signatures, declared)
        if found is None or found.id in ("unquantized", "foreign"):
            continue
        known = declared or (declaration.default if declaration else None) or Declared("", rule="tensor headers")
        yield QuantizedModule(name, parts, found.describe(signatures, Context(name, "down", known)))


def read_module(source: Source, module: QuantizedModule) -> QuantizedMatrix:
    """Decode a module, reading just its tensors. Raises MoeqError `source.bad-data` where the data is impossible."""
    from moeq.schemes.dequantize import check_matrix

    parts = {part: source.read(entry.name) for part, entry in module.parts.items()}
    described = module.described
    try:
        matrix = get_format(described.scheme.format).unpack(parts, described.spec, described.scheme)
    except MoeqError as error:
        raise MoeqError(error.code, f"{module.name}: {error.message}", error.hint) from None
    check_matrix(matrix, module.name)
    return matrix
