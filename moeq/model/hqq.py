"""Sizes of HQQ's matrices, which their headers do not have: read from the small tensors beside them."""

from __future__ import annotations

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.schemes.hqq import PACKINGS, SIZES, HqqSizes

#: Most bytes of a tensor that holds a setting; the longest is a text of 14.
_MAX_SETTING_BYTES = 64


def with_sizes(source: Source) -> None:
    """Add to every HQQ matrix of a source the part `hqq_sizes`: no bytes, shape `(0, *HqqSizes)`.

    A repository is asked for the sizes of one matrix of each name and shape; `unpack` checks the others.

    Raises:
        MoeqError: `source.inconsistent` if settings are missing or not what the library writes.
    """
    added: dict[str, TensorEntry] = {}
    known: dict[object, HqqSizes] = {}
    for name, codes in source.tensors.items():
        module = name.removesuffix(".W_q")
        # Older writers pickled all settings into one tensor; `moeq.schemes.foreign` refuses those by name.
        if module == name or f"{module}.packing" not in source.tensors:
            continue
        scale = source.tensors.get(f"{module}.scale")
        key = (module.rpartition(".")[2], codes.dtype, codes.shape, scale and scale.shape) if source.remote else name
        if key not in known:
            known[key] = _read_sizes(source, module)
        added[f"{module}.{SIZES}"] = codes._replace(
            name=f"{module}.{SIZES}", dtype="U8", shape=(0, *known[key]), end=codes.start
        )
    if added:
        source.tensors = {**source.tensors, **added}


def _read_sizes(source: Source, module: str) -> HqqSizes:
    packing = _setting(source, module, "packing", "U8").decode("ascii", "replace")
    shape = _setting(source, module, "shape", "I64")
    if packing not in PACKINGS or len(shape) != 16:
        detail = f"packing {packing!a} and a shape of {len(shape)} bytes are no settings of an HQQ matrix"
        raise MoeqError("source.inconsistent", f"{module}: {detail}", f"known packings: {', '.join(PACKINGS)}")
    group, axis = (int.from_bytes(_setting(source, module, part, "I32"), "little") for part in ("group_size", "axis"))
    rows, columns = int.from_bytes(shape[:8], "little"), int.from_bytes(shape[8:], "little")
    sizes = HqqSizes(rows, columns, PACKINGS[packing], group, axis)
    if problem := sizes.problem():
        raise MoeqError("source.inconsistent", f"{module}: {problem}: no HQQ matrix has such sizes")
    return sizes


def _setting(source: Source, module: str, part: str, dtype: str) -> bytes:
    entry = source.tensors.get(f"{module}.{part}")
    if entry is None or entry.dtype != dtype or not 0 < entry.nbytes <= _MAX_SETTING_BYTES:
        found = "is missing" if entry is None else f"is {entry.dtype}{list(entry.shape)}, expected a small {dtype}"
        raise MoeqError("source.inconsistent", f"{module}.{part} {found}")
    return source.peek(entry)
