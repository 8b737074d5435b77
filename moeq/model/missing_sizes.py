"""Sizes that headers lack: HQQ and bitsandbytes store them in parts beside the codes, torchao in metadata."""

from __future__ import annotations

import json
import re

from moeq.checkpoint.header import TensorEntry
from moeq.checkpoint.source import Source
from moeq.errors import MoeqError
from moeq.schemes.bitsandbytes import MAX_STATE_BYTES, STATES, FourBitSizes, read_state
from moeq.schemes.hqq import PACKINGS, SIZES, HqqSizes

#: Largest tensor that holds a setting, in bytes; the longest setting is a text of 14.
_MAX_SETTING_BYTES = 64


def add_missing_sizes(source: Source) -> None:
    """Put into a source the sizes that its headers lack. Raises MoeqError `source.inconsistent`, `source.bad-data`."""
    for entries in (_bitsandbytes_entries, _hqq_entries, _torchao_entries):
        if found := entries(source):
            source.tensors = {**source.tensors, **found}


def _hqq_entries(source: Source) -> dict[str, TensorEntry]:
    """Return the part `hqq_sizes` of every HQQ matrix of a source: no bytes, shape `(0, *HqqSizes)`.

    From a repository, only the sizes of one matrix of each name and shape are read; `unpack` checks the others.
    Raises MoeqError `source.inconsistent` if settings are missing or not what the library writes.
    """
    added: dict[str, TensorEntry] = {}
    known: dict[object, HqqSizes] = {}
    for name, codes in source.tensors.items():
        module = name.removesuffix(".W_q")
        # Older writers pickled all settings into one tensor; `moeq.schemes.foreign` refuses those by name.
        if module == name or f"{module}.packing" not in source.tensors:
            continue
        scale = source.tensors.get(f"{module}.scale")
        kind = (module.rpartition(".")[2], codes.dtype, codes.shape, scale and scale.shape)
        key = kind if source.remote else name
        if key not in known:
            known[key] = _read_sizes(source, module)
        added[f"{module}.{SIZES}"] = codes._replace(
            name=f"{module}.{SIZES}", dtype="U8", shape=(0, *known[key]), end=codes.start
        )
    return added


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


def _bitsandbytes_entries(source: Source) -> dict[str, TensorEntry]:
    """Return every 4-bit matrix of a source in its shape `[N, K / 2]` instead of `[N K / 2, 1]`.

    From a repository, only the sizes of one matrix of each name and shape are read; `unpack` checks the others.
    Raises MoeqError `source.bad-data` for sizes that cannot be read, `source.inconsistent` if they do not fit a matrix.
    """
    suffixes = tuple(f".{state}" for state in STATES)
    found = {}
    known: dict[object, FourBitSizes] = {}
    for name, entry in source.tensors.items():
        if not name.endswith(suffixes):
            continue
        weight_name = name[: name.index(".weight.quant_state.")] + ".weight"
        weight = source.tensors.get(weight_name)
        if weight is None or weight.dtype != "U8" or entry.nbytes > MAX_STATE_BYTES:
            raise MoeqError("source.inconsistent", f"{name} describes no matrix of bytes called {weight_name}")
        module = weight_name.removesuffix(".weight")
        key = (module.rpartition(".")[2], weight.shape) if source.remote else name
        if key not in known:
            known[key] = read_state(source.peek(entry), name)
        state = known[key]
        if 2 * weight.nbytes != state.rows * state.columns:
            detail = f"{weight_name} has {weight.nbytes:,} bytes for {state.rows} x {state.columns} codes of 4 bits"
            raise MoeqError("source.inconsistent", detail)
        found[weight_name] = weight._replace(shape=(state.rows, state.columns // 2))
    return found


_CODES_SUFFIX = "_qdata"

#: Elements of `MXTensor` that moeq reads; torchao has FP6 and E5M2 too.
_MX_ELEMENTS = ("float8_e4m3fn", "float4_e2m1fn_x2")


def _torchao_entries(source: Source) -> dict[str, TensorEntry]:
    """Return a part without bytes for each matrix of torchao, whose name and shape say what the matrix holds.

    Integers get `_weight_bits` `(0, bits)`; packed int4 gets `_weight_int4`, `(0, 0)` with zero points in floats and
    `(0, 1)` otherwise; MX and NVFP4 get `_weight_mx` `(0, 0)`. Matrices of other classes, and those that no metadata
    describe, get no part: of these moeq reads only FP8.
    """
    added: dict[str, TensorEntry] = {}
    for name, codes in source.tensors.items():
        module, _, parameter = name.removesuffix(_CODES_SUFFIX).rpartition(".")
        if not name.endswith(_CODES_SUFFIX) or not parameter.startswith("_"):
            continue
        described = _torchao_part(source.metadata.get(f"{module}.{parameter[1:]}"))
        if described is not None:
            suffix, last_size = described
            part = f"{module}.{parameter}_{suffix}"
            stacked = codes.shape[:1] if len(codes.shape) == 3 else ()
            added[part] = TensorEntry(part, "U8", (*stacked, 0, last_size), codes.file, codes.start, codes.start)
    return added


def _torchao_part(text: str | None) -> tuple[str, int] | None:
    """Return the end of the name and the last size of a matrix's part, given its metadata; None for other classes."""
    try:
        table = json.loads(text or "")
        if table["_type"] == "Int8Tensor":
            return "bits", 8
        if table["_type"] == "Int4Tensor":
            activation = table["_data"].get("activation_dtype") or {}
            return "int4", int(activation.get("_data") == "float8_e4m3fn")
        if table["_type"] == "NVFP4Tensor":
            return "mx", 0
        if table["_type"] == "MXTensor":
            return ("mx", 0) if table["_data"]["elem_dtype"]["_data"] in _MX_ELEMENTS else None
        if table["_type"] != "IntxUnpackedToInt8Tensor":
            return None
        found = re.fullmatch("int([1-8])", table["_data"]["target_dtype"]["_data"])
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return ("bits", int(found[1])) if found else None
