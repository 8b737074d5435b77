"""safetensors headers: parse and validate without trusting a byte.

The rules are those of the safetensors reference implementation 0.8 (every tensor inside the file, no holes, no
overlaps, sizes equal to shape times dtype) and of its README (the header starts with `{`, no duplicate keys), which
not every parser enforces. Names that would break a terminal or a log line are refused as well.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from operator import itemgetter, lt
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.files import open_regular, read_exactly
from moeq.checkpoint.jsonfile import parse_object
from moeq.errors import MoeqError

#: Limit of the safetensors reference implementation on the JSON header, in bytes.
MAX_HEADER_BYTES = 100_000_000

#: Longest tensor name accepted, in characters; real ones stay under 200.
MAX_NAME_LENGTH = 1024

#: Bits per element, by safetensors dtype.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}

#: First bytes of files that are not safetensors, with what they are and what to do.
_SNIFF: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        "a Git LFS pointer, not the file itself",
        "run `git lfs pull` in the checkpoint folder",
    ),
    (b"<!DOCTYPE", "an HTML page, probably an error page saved as a file", "download the file again"),
    (b"<!doctype", "an HTML page, probably an error page saved as a file", "download the file again"),
    (b"<html", "an HTML page, probably an error page saved as a file", "download the file again"),
    (b"GGUF", "a GGUF file", "moeq reads safetensors checkpoints"),
    (b"PK\x03\x04", "a PyTorch pickle (zip) file", "moeq refuses pickles; convert it to safetensors"),
    (b"\x80\x02", "a Python pickle", "moeq refuses pickles; convert it to safetensors"),
    (b'{"', "JSON text, not a safetensors file", "download the file again"),
    (b"{\n", "JSON text, not a safetensors file", "download the file again"),
    (b"\x00" * 16, "filled with zero bytes: an incomplete download", "download the file again"),
)


class TensorEntry(NamedTuple):
    """One tensor of a checkpoint, from headers alone."""

    name: str
    dtype: str  #: safetensors dtype (`I32`, `BF16`, ...)
    shape: tuple[int, ...]  #: row-major shape; `()` is a scalar
    file: str  #: file name relative to the checkpoint
    start: int  #: first byte, absolute in the file
    end: int  #: one past the last byte, absolute in the file

    @property
    def nbytes(self) -> int:
        """Size of the stored data in bytes."""
        return self.end - self.start


@dataclass(frozen=True)
class Header:
    """The validated header of one file."""

    file: str
    size: int
    tensors: dict[str, TensorEntry]
    metadata: dict[str, str]
    notes: tuple[str, ...] = ()


def read_header(path: Path, file: str) -> Header:
    """Read and validate the header of a local file. Raises MoeqError (`source.*`) naming `file`."""
    with closing_fd(open_regular(path, file)) as fd:
        return parse_header(raw_header(fd, file)[8:], file, os.fstat(fd).st_size)


def raw_header(fd: int, file: str) -> bytes:
    """Return the first bytes of an open file, up to its data; only their number is checked. Raises MoeqError."""
    size = os.fstat(fd).st_size
    first = bytearray(min(64, size))
    read_exactly(fd, memoryview(first), 0, file)
    found = bytearray(8 + header_length(bytes(first), file, size))
    read_exactly(fd, memoryview(found), 0, file)
    return bytes(found)


def header_length(first: bytes, file: str, size: int) -> int:
    """Return the bytes of the JSON header from the first 8 bytes of a file (more let messages name the file type)."""
    if size < 8 or len(first) < 8:
        _refuse_file(first, file, f"is {size} bytes long, a safetensors file starts with 8 bytes of header length")
    length = int.from_bytes(first[:8], "little")
    if length > MAX_HEADER_BYTES:
        _refuse_file(first, file, f"declares a header of {length:,} bytes, the limit is {MAX_HEADER_BYTES:,}")
    if 8 + length > size:
        _refuse_file(
            first, file, f"declares a header of {length:,} bytes but is {size:,} bytes long", "source.truncated"
        )
    if length < 2:
        _refuse_file(first, file, f"declares a header of {length} bytes")
    return length


def _refuse_file(first: bytes, file: str, detail: str, code: str = "source.bad-header") -> NoReturn:
    for magic, what, hint in _SNIFF:
        if first.startswith(magic):
            raise MoeqError("source.not-safetensors", f"{file}: this is {what}", hint)
    raise MoeqError(code, f"{file}: {detail}", "fetch the file again" if code == "source.truncated" else None)


def parse_header(raw: bytes, file: str, size: int) -> Header:
    """Validate the JSON header `raw` of a file of `size` bytes.

    Raises MoeqError `source.bad-header` naming file and tensor, or `source.truncated` with both sizes.
    """
    if not raw.startswith(b"{"):
        _bad(file, "the header does not start with `{`")
    table = parse_object(raw, f"{file}: header", "source.bad-header", floats=False)
    metadata = _metadata(table.pop("__metadata__", None), file)
    data_start = 8 + len(raw)
    notes: list[str] = []
    # `true` equals 1 as a dictionary key: a header that has it anywhere gets every shape checked by itself.
    strict = b"true" in raw or b"false" in raw
    tensors = _entries(table, file, data_start, notes, strict)
    _check_cover(tensors, file, data_start, size)
    return Header(file, size, tensors, metadata, tuple(notes))


def _metadata(value: Any, file: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        _bad(file, "`__metadata__` must map strings to strings")
    return value


def _entries(table: dict[str, Any], file: str, base: int, notes: list[str], strict: bool) -> dict[str, TensorEntry]:
    # Checkpoints have hundreds of thousands of tensors of a few dozen kinds: a kind is checked once.
    kinds: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}
    tensors: dict[str, TensorEntry] = {}
    dtype: Any
    for name, info in table.items():
        try:
            dtype, begin_end = info["dtype"], info["data_offsets"]
            key = (dtype, tuple(info["shape"]))
            begin, end = begin_end
            kind = kinds.get(key)
        except (TypeError, KeyError, ValueError):
            _explain_entry(name, info, file)
        if kind is None or strict:
            kind = kinds[key] = _kind(name, info, file)
        if type(begin) is not int or type(end) is not int or begin < 0 or end - begin != kind[2]:
            _explain_offsets(name, info, file, kind[2])
        if len(name) > MAX_NAME_LENGTH or not name or not name.isprintable():
            _bad(file, f"tensor name {name[:80]!a} is empty, not printable or over {MAX_NAME_LENGTH} characters long")
        if len(info) != 3:
            notes.append(f"{file}: tensor {name} has unknown header fields: {', '.join(sorted(map(repr, info)))[:200]}")
        tensors[name] = TensorEntry(name, kind[0], kind[1], file, base + begin, base + end)
    return tensors


def _kind(name: str, info: dict[str, Any], file: str) -> tuple[str, tuple[int, ...], int]:
    """Check an entry's dtype and shape, and return `(dtype, shape, bytes)`."""
    dtype, shape = info["dtype"], info["shape"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        _bad(file, f"tensor {_show(name)}: unknown dtype {ascii(dtype)[:40]} (written by a newer safetensors?)")
    if not isinstance(shape, list) or any(type(size) is not int or size < 0 for size in shape):
        _bad(file, f"tensor {_show(name)}: shape {ascii(shape)[:80]} is not a list of sizes")
    bits = DTYPE_BITS[dtype]
    for size in shape:
        bits *= size
        # The reference multiplies in 64 bits before it looks at later dimensions: [2**63, 2, 0] overflows too.
        if bits >= 1 << 67 or size >= 1 << 63:
            _bad(file, f"tensor {_show(name)}: shape {shape} overflows 64 bits")
    if bits % 8:
        _bad(file, f"tensor {_show(name)}: {shape} elements of {dtype} do not fill whole bytes")
    return dtype, tuple(shape), bits // 8


def _explain_entry(name: str, info: Any, file: str) -> NoReturn:
    if not isinstance(info, dict):
        _bad(file, f"tensor {_show(name)}: entry is {ascii(info)[:40]}, expected an object")
    for key in ("dtype", "shape", "data_offsets"):
        if key not in info:
            _bad(file, f"tensor {_show(name)}: entry lacks {key!r}")
    _kind(name, info, file)
    _explain_offsets(name, info, file, None)


def _explain_offsets(name: str, info: dict[str, Any], file: str, nbytes: int | None) -> NoReturn:
    offsets = info["data_offsets"]
    proper = isinstance(offsets, list) and len(offsets) == 2 and all(type(value) is int for value in offsets)
    if not proper or offsets[0] < 0 or offsets[1] < offsets[0]:
        _bad(file, f"tensor {_show(name)}: data_offsets {ascii(offsets)[:80]} are not a byte range")
    span = offsets[1] - offsets[0]
    _bad(
        file,
        f"tensor {_show(name)}: {info['dtype']} {info['shape']} needs {nbytes:,} bytes, data_offsets span {span:,}",
    )


def _check_cover(tensors: dict[str, TensorEntry], file: str, data_start: int, size: int) -> None:
    """Refuse tensors that do not tile the data area exactly: no hole, no overlap, nothing after the last."""
    position = data_start
    for entry in _by_offset(tensors.values()):
        if entry.start != position:
            what = "overlaps the tensor before it" if entry.start < position else "leaves a hole before it"
            offset, expected = entry.start - data_start, position - data_start
            _bad(file, f"tensor {_show(entry.name)}: begins at data byte {offset:,}, expected {expected:,} ({what})")
        position = entry.end
    if position > size:
        hint = "the download is incomplete; fetch the file again"
        raise MoeqError("source.truncated", f"{file}: is {size:,} bytes long, its header needs {position:,}", hint)
    if position < size:
        _bad(file, f"is {size:,} bytes long, its header accounts for {position:,}")


def _by_offset(entries: Collection[TensorEntry]) -> Collection[TensorEntry]:
    """Return entries in the order of their data; most headers list them in this order already."""
    starts = [entry.start for entry in entries]
    in_order = all(map(lt, starts, starts[1:]))
    return entries if in_order else sorted(entries, key=itemgetter(4, 5))


def _show(name: str) -> str:
    return name if name.isprintable() and len(name) < 200 else ascii(name[:80])


def _bad(file: str, detail: str) -> NoReturn:
    raise MoeqError("source.bad-header", f"{file}: {detail}")
