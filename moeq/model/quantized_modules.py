"""Find and decode quantised modules other than routed experts: attention, shared experts, whole MTP layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declaration, Declared
from moeq.schemes.dequantize import check_matrix
from moeq.schemes.format import Context, Described, PartSig
from moeq.schemes.registry import get_format, match_format
from moeq.schemes.unquantized import PLAIN_DTYPES

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class QuantizedModule:
    """Quantised linear layer."""

    name: str
    parts: Mapping[str, TensorEntry]  #: its tensors by part
    described: Described  #: its scheme and sizes; the role in its spec has no meaning


def quantized_modules(tensors: Iterable[TensorEntry], declaration: Declaration | None) -> Iterator[QuantizedModule]:
    """Find the quantised modules among some tensors, in order of appearance.

    Raises MoeqError `source.inconsistent` if headers and config contradict each other.
    """
    for name, parts in _by_module(tensors):
        signatures = {part: PartSig(entry.dtype, entry.shape) for part, entry in parts.items()}
        declared = declaration.resolve(name) if declaration else None
        found = match_format(signatures, declared)
        if found is None or found.id in ("unquantized", "foreign"):
            continue
        known = declared or (declaration.default if declaration else None) or Declared("", rule="tensor headers")
        yield QuantizedModule(name, parts, found.describe(signatures, Context(name, "down", known)))


def quantized_linears(
    tensors: Iterable[TensorEntry], declaration: Declaration | None, linears: Mapping[str, tuple[int, int]]
) -> Iterator[QuantizedModule]:
    """Find the linear layers of a model that its checkpoint stores quantised, in order of appearance.

    Args:
        linears: `(out_features, in_features)` of the model's linear layers by module name.

    Raises:
        MoeqError: `source.unsupported-format` for a format that moeq does not decode, `source.inconsistent` for a layer
            of another size than the model's.
    """
    for name, stored in _by_module(tensors):
        parts = {part: entry for part, entry in stored.items() if part != "bias"}
        if name not in linears or not parts or (set(parts) == {"weight"} and parts["weight"].dtype in PLAIN_DTYPES):
            continue
        signatures = {part: PartSig(entry.dtype, entry.shape) for part, entry in parts.items()}
        declared = declaration.resolve(name) if declaration else None
        found = match_format(signatures, declared)
        if found is None or declared is None:
            shown = ", ".join(f"{part} {sig.dtype}{list(sig.shape)}" for part, sig in sorted(signatures.items()))
            detail = f"{name} is quantised in a way that moeq cannot decode: {shown}"
            raise MoeqError("source.unsupported-format", detail)
        described = found.describe(signatures, Context(name, "down", declared, k_hint=linears[name][1]))
        size = (described.spec.n, described.spec.k)
        if size != linears[name]:
            detail = f"{name} is stored as {list(size)}, and the model has {list(linears[name])}"
            raise MoeqError("source.inconsistent", detail)
        yield QuantizedModule(name, parts, described)


def _by_module(tensors: Iterable[TensorEntry]) -> Iterable[tuple[str, dict[str, TensorEntry]]]:
    """Group tensors by the module that they belong to."""
    grouped: dict[str, dict[str, TensorEntry]] = {}
    for entry in tensors:
        # Parts of bitsandbytes are named below the weight: `weight.absmax`.
        name, found, part = entry.name.partition(".weight.")
        if found:
            part = f"weight.{part}"
        else:
            name, _, part = entry.name.rpartition(".")
        grouped.setdefault(name, {})[part] = entry
    return grouped.items()


def read_module(source: Source, module: QuantizedModule, rows: tuple[int, int] | None = None) -> QuantizedMatrix:
    """Read the tensors of a module and decode them.

    Args:
        rows: first row and the row after the last, for formats whose parts all have rows; None for all rows.

    Raises:
        MoeqError: `source.bad-data` if the data is impossible.
    """
    scheme, spec = module.described.scheme, module.described.spec
    if rows is None:
        parts = {part: source.read(entry.name) for part, entry in module.parts.items()}
        return decode(parts, spec, scheme, module.name)
    parts = {part: source.read_rows(entry, *rows) for part, entry in module.parts.items()}
    return decode(parts, spec.with_sizes(n=rows[1] - rows[0]), scheme, module.name)


def decode(parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme, module: str) -> QuantizedMatrix:
    """Decode the stored parts of a matrix and check its scales. Raises MoeqError `source.*`, naming the module."""
    try:
        matrix = get_format(scheme.format).unpack(parts, spec, scheme)
    except MoeqError as error:
        raise MoeqError(error.code, f"{module}: {error.message}", error.hint) from None
    check_matrix(matrix, module)
    return matrix
