"""GGUF headers: parse and validate them without trusting a byte.

GGUF versions 2 and 3, little-endian, as `gguf` 0.19 and llama.cpp write them: magic, version, two counts, metadata,
tensor infos, and data from the next multiple of `general.alignment` on. The `gguf` package's own reader trusts every
count in a file, which untrusted files forbid.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from moeq.checkpoint.header import MAX_NAME_LENGTH
from moeq.errors import MoeqError

MAGIC = b"GGUF"

#: Largest header, in bytes. Vocabularies of 200,000 tokens with their merges make about 12 MB.
MAX_HEADER_BYTES = 256 << 20

#: Bytes that are read at first, and the factor by which each further read is larger.
_FIRST_BYTES, _GROWTH = 1 << 20, 4

_MAX_KEYS, _MAX_TENSORS, _MAX_DEPTH, _MAX_ALIGNMENT = 1 << 16, 1 << 20, 4, 1 << 20
_MAX_KEY_LENGTH, _MAX_TEXT = 1 << 16, 1 << 24

#: Number of a type to (name, elements per block, bytes per block), by `GGML_QUANT_SIZES` of gguf 0.19.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("f32", 1, 4),
    1: ("f16", 1, 2),
    2: ("q4_0", 32, 18),
    3: ("q4_1", 32, 20),
    6: ("q5_0", 32, 22),
    7: ("q5_1", 32, 24),
    8: ("q8_0", 32, 34),
    9: ("q8_1", 32, 40),
    10: ("q2_k", 256, 84),
    11: ("q3_k", 256, 110),
    12: ("q4_k", 256, 144),
    13: ("q5_k", 256, 176),
    14: ("q6_k", 256, 210),
    15: ("q8_k", 256, 292),
    16: ("iq2_xxs", 256, 66),
    17: ("iq2_xs", 256, 74),
    18: ("iq3_xxs", 256, 98),
    19: ("iq1_s", 256, 50),
    20: ("iq4_nl", 32, 18),
    21: ("iq3_s", 256, 110),
    22: ("iq2_s", 256, 82),
    23: ("iq4_xs", 256, 136),
    24: ("i8", 1, 1),
    25: ("i16", 1, 2),
    26: ("i32", 1, 4),
    27: ("i64", 1, 8),
    28: ("f64", 1, 8),
    29: ("iq1_m", 256, 56),
    30: ("bf16", 1, 2),
    34: ("tq1_0", 256, 54),
    35: ("tq2_0", 256, 66),
    39: ("mxfp4", 32, 17),
    40: ("nvfp4", 64, 36),
    41: ("q1_0", 128, 18),
}

#: Struct format of metadata values by the number of their type. Type 8 is text, type 9 an array.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of a file."""

    name: str  #: name in the file, such as `blk.0.ffn_gate_exps.weight`
    type: str  #: name of the type, such as `q4_k`
    shape: tuple[int, ...]  #: row-major shape: GGUF's dimensions in reverse
    start: int  #: first byte in the file
    end: int  #: byte after the last


@dataclass(frozen=True)
class GgufHeader:
    """The validated header of one file."""

    file: str
    size: int  #: bytes of the whole file
    version: int
    metadata: Mapping[str, Any]  #: values by key; arrays of numbers are memoryviews
    tensors: Mapping[str, GgufTensor]  #: tensors by name, in the order of the file


class _NeedMoreError(Exception):
    """The bytes that were read end before the header ends; `args[0]` is the least number of bytes to read."""


def read_gguf_header(read: Callable[[int], bytes], file: str, size: int) -> GgufHeader:
    """Read and validate the header of a file of `size` bytes; `read(n)` returns its first n bytes.

    Raises MoeqError `source.bad-header`, `source.truncated`, `source.too-large`, `source.unsupported-format`.
    """
    wanted = min(size, _FIRST_BYTES)
    while True:
        raw = read(wanted)
        try:
            return _Parser(raw, file, size).header()
        except _NeedMoreError as need:
            needed = int(need.args[0])
        if needed > size:
            raise MoeqError(
                "source.truncated",
                f"{file} is {size:,} bytes long, but its GGUF header needs {needed:,} at least",
                "the download is incomplete; fetch the file again",
            )
        if needed > MAX_HEADER_BYTES:
            detail = f"{file}: its header needs {needed:,} bytes, the limit is {MAX_HEADER_BYTES:,}"
            raise MoeqError("source.too-large", detail)
        wanted = min(size, MAX_HEADER_BYTES, max(needed, wanted * _GROWTH))


class _Parser:
    """State of one pass over the first bytes of a file."""

    def __init__(self, raw: bytes, file: str, size: int) -> None:
        self._raw = raw
        self._view = memoryview(raw)
        self._file = file
        self._size = size
        self._at = 0

    def header(self) -> GgufHeader:
        version, tensor_count, key_count = self._preamble()
        metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = self._name(_MAX_KEY_LENGTH, "metadata key")
            if key in metadata:
                self._bad(f"metadata key {key[:80]!a} occurs twice")
            metadata[key] = self._value(self._number("I"), key, 0)
        infos = [self._tensor_info() for _ in range(tensor_count)]
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._bad(f"general.alignment is {ascii(alignment)[:40]}, expected a power of two up to {_MAX_ALIGNMENT:,}")
        base = -(-self._at // alignment) * alignment
        return GgufHeader(self._file, self._size, version, metadata, self._placed(infos, base, alignment))

    def _preamble(self) -> tuple[int, int, int]:
        if self._raw[:4] != MAGIC[: len(self._raw)]:
            raise MoeqError("source.bad-header", f"{self._file} does not start with GGUF", "fetch the file again")
        self._at = 4
        version = self._number("I")
        if version in (0x02000000, 0x03000000):
            raise MoeqError("source.unsupported-format", f"{self._file} is a big-endian GGUF file")
        if version not in (2, 3):
            detail = f"{self._file} has GGUF version {version}, but moeq reads 2 and 3"
            raise MoeqError("source.unsupported-format", detail, "llama.cpp's gguf tools rewrite older files")
        tensors, keys = self._number("Q"), self._number("Q")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            limits = f"the limits are {_MAX_TENSORS:,} and {_MAX_KEYS:,}"
            self._bad(f"declares {tensors:,} tensors and {keys:,} metadata keys, {limits}")
        return version, tensors, keys

    def _require(self, count: int) -> int:
        """Step over `count` bytes and return the first one's position. Raises `_NeedMoreError` if they are not read."""
        start = self._at
        if start + count > len(self._raw):
            raise _NeedMoreError(start + count)
        self._at = start + count
        return start

    def _number(self, code: str) -> Any:
        layout = f"<{code}"
        return struct.unpack_from(layout, self._raw, self._require(struct.calcsize(layout)))[0]

    def _text(self, what: str) -> str:
        length = self._number("Q")
        if length > _MAX_TEXT:
            self._bad(f"{what} has {length:,} bytes, the limit is {_MAX_TEXT:,}")
        start = self._require(length)
        return self._raw[start : start + length].decode("utf-8", "replace")

    def _name(self, limit: int, what: str) -> str:
        name = self._text(what)
        if not name or len(name) > limit or not name.isprintable():
            self._bad(f"unusable {what} {name[:80]!a}: empty, longer than {limit:,} or not printable")
        return name

    def _value(self, kind: int, key: str, depth: int) -> Any:
        if kind == _TEXT:
            return self._text(f"the value of {key[:80]}")
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind != _ARRAY:
            self._bad(f"the value of {key[:80]!a} has type {kind}, types are 0 to 12")
        inner, count = self._number("I"), self._number("Q")
        if depth == _MAX_DEPTH:
            self._bad(f"the value of {key[:80]!a} nests arrays more than {_MAX_DEPTH} deep")
        if inner in _SCALARS:
            width = struct.calcsize(f"<{_SCALARS[inner]}")
            self._affordable(count * width, key, count)
            start = self._require(count * width)
            code: Any = _SCALARS[inner]
            return self._view[start : start + count * width].cast(code)
        if inner not in (_TEXT, _ARRAY):
            self._bad(f"the value of {key[:80]!a} is an array of type {inner}, types are 0 to 12")
        # Text takes 8 bytes at least and an array 12, so that a count cannot outgrow the file.
        self._affordable(count * (8 if inner == _TEXT else 12), key, count)
        if inner == _TEXT:
            return self._texts(count, key)
        return [self._value(_ARRAY, key, depth + 1) for _ in range(count)]

    def _texts(self, count: int, key: str) -> list[str]:
        """Read an array of text, such as a vocabulary, without a call per item."""
        raw, at, found = self._raw, self._at, list[str]()
        for _ in range(count):
            length = int.from_bytes(raw[at : at + 8], "little")
            at += 8 + length
            if at > len(raw) or length > _MAX_TEXT:
                self._at = at - 8 - length
                self._text(f"an item of {key[:80]}")  # raises, and says what is wrong
            found.append(raw[at - length : at].decode("utf-8", "replace"))
        self._at = at
        return found

    def _affordable(self, count: int, key: str, items: int) -> None:
        if self._at + count > self._size:
            self._bad(f"the value of {key[:80]!a} has {items:,} items, more than the file's {self._size:,} bytes hold")
        if self._at + count > MAX_HEADER_BYTES:
            self._bad(f"the value of {key[:80]!a} has {items:,} items, more than {MAX_HEADER_BYTES:,} bytes")

    def _tensor_info(self) -> tuple[str, str, tuple[int, ...], int, int]:
        """Return (name, type, shape, size in bytes, offset in the data area)."""
        name = self._name(MAX_NAME_LENGTH, "tensor name")
        rank = self._number("I")
        if rank > 4:
            self._bad(f"tensor {name} has {rank:,} dimensions, but GGUF allows 4")
        shape = tuple(self._number("Q") for _ in range(rank))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if kind not in TYPES:
            self._bad(f"tensor {name}: moeq does not know type {kind} (was it written by a newer llama.cpp?)")
        title, block, width = TYPES[kind]
        numbers = 1
        for size in shape:
            numbers *= size
            if numbers >= 1 << 63 or size >= 1 << 63:
                self._bad(f"tensor {name}: shape {list(shape)} overflows 64 bits")
        if block > 1 and (not shape or shape[-1] % block):
            self._bad(f"tensor {name}: rows of {list(shape)} do not divide into blocks of {block} {title}")
        return name, title, shape, numbers // block * width, offset

    def _placed(
        self, infos: list[tuple[str, str, tuple[int, ...], int, int]], base: int, alignment: int
    ) -> dict[str, GgufTensor]:
        found: dict[str, GgufTensor] = {}
        for name, title, shape, nbytes, offset in infos:
            start = base + offset
            if name in found:
                self._bad(f"tensor {name} occurs twice")
            if offset % alignment:
                self._bad(f"tensor {name}: begins at data byte {offset:,}, no multiple of the alignment {alignment}")
            if start + nbytes > self._size:
                raise MoeqError(
                    "source.truncated",
                    f"{self._file} is {self._size:,} bytes long, but tensor {name} ends at {start + nbytes:,}",
                    "the download is incomplete; fetch the file again",
                )
            found[name] = GgufTensor(name, title, shape, start, start + nbytes)
        end = 0
        for tensor in sorted(found.values(), key=lambda tensor: (tensor.start, tensor.end)):
            if tensor.start < end and tensor.end > tensor.start:
                self._bad(f"tensor {tensor.name} overlaps the tensor before it")
            end = max(end, tensor.end)
        return found

    def _bad(self, detail: str) -> NoReturn:
        raise MoeqError("source.bad-header", f"{self._file}: {detail}")
