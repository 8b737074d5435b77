"""Widths of torchao's integers, which headers of tensors do not have: read from the metadata of their files."""

from __future__ import annotations

import json
import re

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import Source

#: Classes of matrices that are read.
_READ = ("Int8Tensor", "IntxUnpackedToInt8Tensor")

_SUFFIX = "_qdata"


def with_bits(source: Source) -> None:
    """Add to every integer matrix of torchao the part `_weight_bits`: no bytes, shape `(0, bits)`.

    Matrices of other classes, and those that no metadata describe, get none and are no format that moeq reads.
    """
    added: dict[str, TensorEntry] = {}
    for name, codes in source.tensors.items():
        module, _, parameter = name.removesuffix(_SUFFIX).rpartition(".")
        if not name.endswith(_SUFFIX) or not parameter.startswith("_"):
            continue
        bits = _bits(source.metadata.get(f"{module}.{parameter[1:]}"))
        if bits is not None:
            stacked = codes.shape[:1] if len(codes.shape) == 3 else ()
            found = f"{module}.{parameter}_bits"
            added[found] = TensorEntry(found, "U8", (*stacked, 0, bits), codes.file, codes.start, codes.start)
    if added:
        source.tensors = {**source.tensors, **added}


def _bits(text: str | None) -> int | None:
    """Return the bits of a code by the description of a matrix, or None if it is none that moeq reads."""
    try:
        table = json.loads(text or "")
        if table["_type"] not in _READ:
            return None
        if table["_type"] == "Int8Tensor":
            return 8
        found = re.fullmatch("int([1-8])", table["_data"]["target_dtype"]["_data"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return int(found[1]) if found else None
