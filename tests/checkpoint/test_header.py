"""Safetensors headers: every malformed file of the reference's own test list, and what real files look like."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint.builder import Stored, file_bytes, header_of

from moeq.checkpoint.header import DTYPE_BITS, parse_header, read_header
from moeq.checkpoint.source import _TORCH_DTYPES
from moeq.errors import MoeqError

GOOD: dict[str, Any] = {"t": {"dtype": "I32", "shape": [2, 2], "data_offsets": [0, 16]}}
DATA = bytes(16)
BYTE = b'{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def entry(dtype: Any = "I32", shape: Any = (2, 2), offsets: Any = (0, 16)) -> dict[str, Any]:
    return {"t": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def raw(text: str) -> bytes:
    return file_bytes(text.encode("utf-8", "surrogatepass"))


BAD: dict[str, bytes] = {
    "empty file": b"",
    "seven bytes": bytes(7),
    "length zero": bytes(8),
    "length above the cap": (100_000_001).to_bytes(8, "little") + b"{}",
    "length of 2**64 - 1": b"\xff" * 8 + b"{}",
    "length beyond the end": (1000).to_bytes(8, "little") + b"{}",
    "not UTF-8": file_bytes(b'{"\xff\xfe": 1}'),
    "not JSON": file_bytes(b"{nope"),
    "a list": file_bytes(b"[1, 2]"),
    "a number": file_bytes(b"12345"),
    "byte order mark": file_bytes(b"\xef\xbb\xbf{}"),
    "leading space": file_bytes(b" {}"),
    "trailing NULs": file_bytes(b"{}\0\0"),
    "nested brackets": file_bytes(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "entry is null": file_bytes({"t": None}),
    "entry is a list": file_bytes({"t": []}),
    "no dtype": file_bytes({"t": {"shape": [], "data_offsets": [0, 0]}}),
    "no shape": file_bytes({"t": {"dtype": "U8", "data_offsets": [0, 0]}}),
    "no offsets": file_bytes({"t": {"dtype": "U8", "shape": []}}),
    "unknown dtype": file_bytes(entry("I33"), DATA),
    "lower-case dtype": file_bytes(entry("i32"), DATA),
    "dtype is a number": file_bytes(entry(32), DATA),
    "dtype is a list": file_bytes(entry(["I32"]), DATA),
    "shape is a number": file_bytes(entry(shape=4), DATA),
    "shape is null": file_bytes(entry(shape=None), DATA),
    "shape is text": file_bytes(entry(shape="22"), DATA),
    "negative size": file_bytes(entry(shape=[-2, -2]), DATA),
    "boolean size": file_bytes(entry(shape=[True, 4]), DATA),
    "boolean size after an equal one": file_bytes(
        {
            "a": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
            "b": {"dtype": "U8", "shape": [True], "data_offsets": [1, 2]},
        },
        bytes(2),
    ),
    "float size": file_bytes(b'{"t":{"dtype":"I32","shape":[2.0,2],"data_offsets":[0,16]}}', DATA),
    "NaN size": file_bytes(b'{"t":{"dtype":"I32","shape":[NaN,2],"data_offsets":[0,16]}}', DATA),
    "infinite size": file_bytes(b'{"t":{"dtype":"I32","shape":[Infinity],"data_offsets":[0,16]}}', DATA),
    "huge integer": file_bytes(b'{"t":{"dtype":"I32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,16]}}', DATA),
    "sizes overflow": file_bytes(entry(shape=[1 << 62, 8], offsets=[0, 16]), DATA),
    "zero product that overflows on the way": file_bytes(entry("U8", [1 << 63, 2, 0], [0, 0])),
    "negative offset": file_bytes(entry(offsets=[-16, 0]), DATA),
    "float offset": file_bytes(b'{"t":{"dtype":"I32","shape":[2,2],"data_offsets":[0.0,16]}}', DATA),
    "three offsets": file_bytes(entry(offsets=[0, 16, 16]), DATA),
    "one offset": file_bytes(entry(offsets=[16]), DATA),
    "offsets are text": file_bytes(entry(offsets="01"), DATA),
    "offsets reversed": file_bytes(entry(offsets=[16, 0]), DATA),
    "offset is a boolean": file_bytes(entry("U8", [1], [False, True]), b"\0"),
    "size is not shape times dtype": file_bytes(entry(shape=[2, 3]), DATA),
    "first offset is not 0": file_bytes(entry(offsets=[8, 24]), bytes(24)),
    "a hole": file_bytes(
        {
            "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [8, 12]},
        },
        bytes(12),
    ),
    "overlap": file_bytes(
        {
            "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            "b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]},
        },
        bytes(6),
    ),
    "same range twice": file_bytes({name: GOOD["t"] for name in "ab"}, DATA),
    "duplicate key, same range": file_bytes(
        b'{"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        b"\0",
    ),
    "duplicate field": file_bytes(b'{"t":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"\0"),
    "trailing bytes": file_bytes(GOOD, bytes(20)),
    "truncated data": file_bytes(GOOD, bytes(12)),
    "tiny file that claims a petabyte": file_bytes(entry("U8", [10**15], [0, 10**15]), b""),
    "F4 that does not fill bytes": file_bytes(entry("F4", [3], [0, 2]), bytes(2)),
    "F6 that does not fill bytes": file_bytes(entry("F6_E2M3", [3], [0, 3]), bytes(3)),
    "metadata with a number": file_bytes({"__metadata__": {"a": 1}, **GOOD}, DATA),
    "metadata is a list": file_bytes({"__metadata__": [], **GOOD}, DATA),
    "empty name": file_bytes({"": GOOD["t"]}, DATA),
    "NUL in a name": file_bytes({"a\0b": GOOD["t"]}, DATA),
    "terminal escape in a name": file_bytes({"a\x1b[2Jb": GOOD["t"]}, DATA),
    "newline in a name": file_bytes({"a\nb": GOOD["t"]}, DATA),
    "right-to-left override in a name": file_bytes({"a\u202eb": GOOD["t"]}, DATA),
    "lone surrogate in a name": file_bytes(b'{"\\ud800":{"dtype":"I32","shape":[2,2],"data_offsets":[0,16]}}', DATA),
    "name of a megabyte": file_bytes({"a" * (1 << 20): GOOD["t"]}, DATA),
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 1234\n",
    "HTML page": b"<!DOCTYPE html><html><body>Bad gateway</body></html>",
    "JSON error body": b'{"error": "Repository not found"}',
    "GGUF": b"GGUF" + bytes(100),
    "PyTorch zip": b"PK\x03\x04" + bytes(100),
    "pickle": b"\x80\x02}q\x00." + bytes(100),
    "zeros": bytes(1000),
    "sixteen zeros": bytes(16),
    "fifteen zeros": bytes(15),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_one_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(BAD[name])
    with pytest.raises(MoeqError) as caught:
        read_header(path, "model.safetensors")
    error = caught.value
    assert error.code in {"source.bad-header", "source.truncated", "source.not-safetensors"}
    if error.code != "source.not-safetensors":
        assert (error.hint or "").endswith("fetch the file again") is (error.code == "source.truncated")
    assert error.message.startswith("model.safetensors")
    assert error.message.isprintable()
    assert len(error.message) < 700


SAYS = {
    "empty file": "is 0 bytes long, a safetensors file starts with 8 bytes of header length",
    "seven bytes": "is 7 bytes long, a safetensors file starts with 8 bytes of header length",
    "length zero": "declares a header of 0 bytes",
    "length above the cap": "declares a header of 100,000,001 bytes, the limit is 100,000,000",
    "length of 2**64 - 1": "declares a header of 18,446,744,073,709,551,615 bytes, the limit is 100,000,000",
    "length beyond the end": "declares a header of 1,000 bytes but is 10 bytes long",
    "a list": "the header does not start with `{`",
    "entry is null": "tensor t: entry is None, expected an object",
    "no dtype": "tensor t: entry lacks 'dtype'",
    "no shape": "tensor t: entry lacks 'shape'",
    "no offsets": "tensor t: entry lacks 'data_offsets'",
    "unknown dtype": "tensor t: unknown dtype 'I33' (written by a newer safetensors?)",
    "dtype is a list": "tensor t: unknown dtype ['I32'] (written by a newer safetensors?)",
    "shape is text": "tensor t: shape '22' is not a list of sizes",
    "negative size": "tensor t: shape [-2, -2] is not a list of sizes",
    "boolean size after an equal one": "tensor b: shape [True] is not a list of sizes",
    "float size": "header: not valid JSON: 2.0 is not a whole number",
    "sizes overflow": "tensor t: shape [4611686018427387904, 8] overflows 64 bits",
    "zero product that overflows on the way": "tensor t: shape [9223372036854775808, 2, 0] overflows 64 bits",
    "negative offset": "tensor t: data_offsets [-16, 0] are not a byte range",
    "offsets are text": "tensor t: data_offsets '01' are not a byte range",
    "offsets reversed": "tensor t: data_offsets [16, 0] are not a byte range",
    "size is not shape times dtype": "tensor t: I32 [2, 3] needs 24 bytes, data_offsets span 16",
    "first offset is not 0": "tensor t: begins at data byte 8, expected 0 (leaves a hole before it)",
    "a hole": "tensor b: begins at data byte 8, expected 4 (leaves a hole before it)",
    "overlap": "tensor b: begins at data byte 2, expected 4 (overlaps the tensor before it)",
    "same range twice": "tensor b: begins at data byte 0, expected 16 (overlaps the tensor before it)",
    "duplicate key, same range": "header: not valid JSON: duplicate key 't'",
    "trailing bytes": "is 93 bytes long, its header accounts for 89",
    "truncated data": "is 85 bytes long, its header needs 89",
    "tiny file that claims a petabyte": "is 98 bytes long, its header needs 1,000,000,000,000,098",
    "F4 that does not fill bytes": "tensor t: [3] elements of F4 do not fill whole bytes",
    "metadata with a number": "`__metadata__` must map strings to strings",
    "metadata is a list": "`__metadata__` must map strings to strings",
    "NUL in a name": r"tensor name 'a\x00b' is empty, not printable or over 1024 characters long",
    "name of a megabyte": f"tensor name '{'a' * 80}' is empty, not printable or over 1024 characters long",
    "Git LFS pointer": "this is a Git LFS pointer, not the file itself",
    "HTML page": "this is an HTML page, probably an error page saved as a file",
    "JSON error body": "this is JSON text, not a safetensors file",
    "GGUF": "this is a GGUF file",
    "PyTorch zip": "this is a PyTorch pickle (zip) file",
    "pickle": "this is a Python pickle",
    "fifteen zeros": "declares a header of 0 bytes",
    "sixteen zeros": "this is filled with zero bytes: an incomplete download",
    "zeros": "this is filled with zero bytes: an incomplete download",
}


@pytest.mark.parametrize("name", SAYS)
def test_messages_name_the_cause(name: str, tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(BAD[name])
    with pytest.raises(MoeqError) as caught:
        read_header(path, "x.safetensors")
    assert caught.value.message == f"x.safetensors: {SAYS[name]}"


@pytest.mark.parametrize(
    ("table", "says"),
    [
        (entry("I" * 50), f"tensor t: unknown dtype '{'I' * 39} (written by a newer safetensors?)"),
        (entry(shape=[-1] * 50), f"tensor t: shape {str([-1] * 50)[:80]} is not a list of sizes"),
        (entry(offsets=[7] * 50), f"tensor t: data_offsets {str([7] * 50)[:80]} are not a byte range"),
        ({"t": "x" * 50}, f"tensor t: entry is '{'x' * 39}, expected an object"),
        ({"x" * 199: 1}, f"tensor {'x' * 199}: entry is 1, expected an object"),
        ({"x" * 200: 1}, f"tensor '{'x' * 80}': entry is 1, expected an object"),
        ({"\n": 1}, r"tensor '\n': entry is 1, expected an object"),
        (entry("U8", [1 << 63, 0], [0, 0]), "tensor t: shape [9223372036854775808, 0] overflows 64 bits"),
        (entry("U8", [1 << 62, 4], [0, 0]), "tensor t: shape [4611686018427387904, 4] overflows 64 bits"),
        (entry("U8", [(1 << 63) - 1, 2], [0, 0]), "tensor t: U8 [9223372036854775807, 2] needs "
         "18,446,744,073,709,551,614 bytes, data_offsets span 0"),
    ],
)  # fmt: skip
def test_long_values_are_cut_and_large_ones_counted(table: dict[str, Any], says: str) -> None:
    raw_header = json.dumps(table).encode()
    with pytest.raises(MoeqError) as caught:
        parse_header(raw_header, "f", 8 + len(raw_header))
    assert caught.value.message == f"f: {says}"


@pytest.mark.parametrize("length", [1024, 1025])
def test_the_longest_name(length: int) -> None:
    raw_header = json.dumps({"a" * length: GOOD["t"]}).encode()
    with nullcontext() if length == 1024 else pytest.raises(MoeqError, match="over 1024 characters"):
        assert list(parse_header(raw_header, "f", 24 + len(raw_header)).tensors) == ["a" * length]


def test_unknown_fields_are_noted() -> None:
    raw_header = json.dumps({"t": {**GOOD["t"], "x" * 300: 1, "a": 2}}).encode()
    [note] = parse_header(raw_header, "f", 24 + len(raw_header)).notes
    start = "f: tensor t has unknown header fields: "
    assert note == start + f"'a', 'data_offsets', 'dtype', 'shape', '{'x' * 300}'"[:200]


GOOD_FILES: dict[str, tuple[bytes, int]] = {
    "no tensors": (file_bytes(b"{}"), 0),
    "trailing spaces": (file_bytes(json.dumps(GOOD).encode() + b"   ", DATA), 1),
    "metadata null": (file_bytes({"__metadata__": None, **GOOD}, DATA), 1),
    "metadata": (file_bytes({"__metadata__": {"format": "pt"}, **GOOD}, DATA), 1),
    "scalar and empty": (
        file_bytes(
            {
                "scalar": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]},
                "empty": {"dtype": "F32", "shape": [0, 5], "data_offsets": [4, 4]},
            },
            bytes(4),
        ),
        2,
    ),
    "two F4 to a byte": (file_bytes(entry("F4", [2, 4], [0, 4]), bytes(4)), 1),
    "any order": (
        file_bytes(
            {
                "b": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]},
                "a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]},
            },
            bytes(8),
        ),
        2,
    ),
    "unknown field": (file_bytes({"t": {**GOOD["t"], "strides": [2, 1]}}, DATA), 1),
    "word true in a name": (file_bytes({"is_true": GOOD["t"]}, DATA), 1),
}


@pytest.mark.parametrize("name", GOOD_FILES)
def test_good_files_are_read(name: str, tmp_path: Path) -> None:
    data, count = GOOD_FILES[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    header = read_header(path, "x.safetensors")
    assert len(header.tensors) == count
    assert bool(header.notes) == (name == "unknown field")


def test_metadata_are_what_the_header_says(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(file_bytes({"__metadata__": {"format": "pt", "by": "x"}, **GOOD}, DATA))
    assert read_header(tmp_path / "t", "t").metadata == {"format": "pt", "by": "x"}


def test_offsets_are_absolute() -> None:
    tensors = {"a": Stored("U8", (3,)), "b": Stored("I32", (2,))}
    raw_header = json.dumps(header_of(tensors)).encode()
    header = parse_header(raw_header, "f", 8 + len(raw_header) + 11)
    assert header.tensors["b"].start == 8 + len(raw_header) + 3
    assert header.tensors["b"].end == 8 + len(raw_header) + 11
    assert header.tensors["b"].nbytes == 8


def test_the_reference_library_reads_what_we_accept(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    for name, (data, count) in GOOD_FILES.items():
        path = tmp_path / "x.safetensors"
        path.write_bytes(data)
        with safetensors.safe_open(path, framework="pt") as reader:
            assert len(list(reader.keys())) == count, name


def test_every_dtype_has_the_width_that_its_name_says() -> None:
    """And torch's, where torch has it."""
    assert len(DTYPE_BITS) == 22
    for name, bits in DTYPE_BITS.items():
        assert bits == (8 if name == "BOOL" else int(re.findall(r"\d+", name)[0]))
    for name, dtype in _TORCH_DTYPES.items():
        assert DTYPE_BITS[name] == 8 * getattr(torch, dtype).itemsize
