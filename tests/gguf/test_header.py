"""GGUF headers: what is read of good files, and what is said about bad ones."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf_files import gguf_bytes, moe_metadata, moe_tensors, random_tensor, text, write_model

from moeq.errors import MoeqError
from moeq.gguf.header import TYPES, GgufHeader, read_gguf_header


def parsed(raw: bytes) -> GgufHeader:
    return read_gguf_header(lambda count: raw[:count], "m.gguf", len(raw))


def test_everything_is_read() -> None:
    tensor = random_tensor(np.random.default_rng(0), "q4_0", (2, 3, 64))
    header = parsed(
        gguf_bytes({"a": 7, "b": 1.5, "c": "text", "d": ["x", "yz"], "e": [1, -2], "f": True}, {"t": tensor})
    )
    assert {**header.metadata, "e": list(header.metadata["e"])} == {
        "a": 7, "b": 1.5, "c": "text", "d": ["x", "yz"], "e": [1, -2], "f": True,
    }  # fmt: skip
    found = header.tensors["t"]
    assert (found.type, found.shape, found.end - found.start) == ("q4_0", (2, 3, 64), 2 * 3 * 64 // 32 * 18)


def test_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    reader = pytest.importorskip("gguf").GGUFReader(write_model(tmp_path / "m.gguf"))
    header = parsed((tmp_path / "m.gguf").read_bytes())
    assert [tensor.name for tensor in reader.tensors] == list(header.tensors)
    for tensor in reader.tensors:
        mine = header.tensors[tensor.name]
        assert (tensor.data_offset, tensor.n_bytes) == (mine.start, mine.end - mine.start)
        assert (tensor.tensor_type.name.lower(), tuple(tensor.shape[::-1])) == (mine.type, mine.shape)


def test_types_are_those_of_the_gguf_package() -> None:
    gguf = pytest.importorskip("gguf")
    theirs = {int(kind): (kind.name.lower(), *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert theirs == TYPES


def test_large_headers_are_read_in_steps() -> None:
    words = [f"token {number}" for number in range(100_000)]
    raw = gguf_bytes({"tokenizer.ggml.tokens": words}, {}) + bytes(4 << 20)
    sizes: list[int] = []

    def read(count: int) -> bytes:
        sizes.append(count)
        return raw[:count]

    assert read_gguf_header(read, "m.gguf", len(raw)).metadata["tokenizer.ggml.tokens"] == words
    assert sizes == [1 << 20, 4 << 20]


def test_headers_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = gguf_bytes({"a": "x" * 2000, "b": "y" * 2000}, {})
    monkeypatch.setattr("moeq.gguf.header._FIRST_BYTES", 100)
    monkeypatch.setattr("moeq.gguf.header.MAX_HEADER_BYTES", 4066)  # its last character is byte 4066
    assert parsed(raw).metadata == {"a": "x" * 2000, "b": "y" * 2000}
    monkeypatch.setattr("moeq.gguf.header.MAX_HEADER_BYTES", 4065)
    with pytest.raises(MoeqError, match="its header needs 4,066 bytes, the limit is 4,065") as caught:
        parsed(raw)
    assert caught.value.code == "source.too-large"


@pytest.mark.parametrize(
    ("kind", "raw", "value"),
    [
        (0, b"\xff", 255),
        (1, b"\xff", -1),
        (2, b"\xff\xfe", 0xFEFF),
        (3, b"\xfe\xff", -2),
        (4, b"\xff\xff\xff\xff", 0xFFFFFFFF),
        (5, b"\xfd\xff\xff\xff", -3),
        (6, b"\x00\x00\xc0\x3f", 1.5),
        (7, b"\x01", True),
        (10, b"\xff" * 8, 0xFFFFFFFFFFFFFFFF),
        (11, b"\xfc" + b"\xff" * 7, -4),
        (12, b"\x00" * 6 + b"\x04\xc0", -2.5),
    ],
)
def test_values_of_each_type(kind: int, raw: bytes, value: float) -> None:
    metadata = parsed(with_value(struct.pack("<I", kind) + raw)).metadata
    assert (metadata["key"], type(metadata["key"])) == (value, type(value))
    assert list(parsed(with_value(array(kind, 2, raw * 2))).metadata["key"]) == [value, value]


def nested(depth: int) -> bytes:
    return with_value(struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * (depth - 1) + struct.pack("<IQB", 0, 1, 7))


def head(version: int = 3, tensors: int = 0, keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, keys)


def test_what_is_just_allowed() -> None:
    assert (parsed(head(version=2)).version, parsed(head()).version, parsed(head()).size) == (2, 3, 24)
    assert parsed(nested(4)).metadata["key"][0][0][0].tolist() == [7]
    assert parsed(gguf_bytes({"general.alignment": 1 << 20}, {})).metadata["general.alignment"] == 1 << 20
    assert parsed(gguf_bytes({"k" * (1 << 16): 1}, {})).metadata == {"k" * (1 << 16): 1}
    whole = head(keys=1) + text("key") + array(0, 9) + bytes(9)  # the array ends where the file does
    assert parsed(whole).metadata["key"].tolist() == [0] * 9
    assert parsed(with_tensor((1, 1, 1, 8))).tensors["t"].shape == (8, 1, 1, 1)
    assert parsed(with_tensor(())).tensors["t"].shape == ()


def test_tensors_begin_at_a_multiple_of_the_alignment() -> None:
    tensors = {name: random_tensor(np.random.default_rng(0), "f32", (3,)) for name in "ab"}
    for alignment in (32, 256):
        named = {"general.alignment": alignment} if alignment != 32 else {}
        raw = gguf_bytes(named, tensors, alignment)
        first, second = parsed(raw).tensors.values()
        assert (first.start % alignment, second.start - first.start, first.end - first.start) == (0, alignment, 12)
        assert raw[second.start : second.end] == tensors["b"][2]


def array(inner: int, count: int, data: bytes = b"") -> bytes:
    return struct.pack("<IIQ", 9, inner, count) + data


def with_value(value: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("key") + value + bytes(64)


def with_tensor(dims: tuple[int, ...], kind: int = 0, offset: int = 0, rank: int | None = None) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + text("t")
    head += struct.pack(f"<I{len(dims)}QIQ", len(dims) if rank is None else rank, *dims, kind, offset)
    return head + bytes(1024)


HOSTILE: dict[str, tuple[bytes, str, str]] = {
    "empty": (b"", "source.truncated", "0 bytes long"),
    "magic": (b"GGML" + bytes(60), "source.bad-header", "does not start with GGUF"),
    "version 1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "source.unsupported-format", "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "source.unsupported-format", "big-endian"),
    "counts": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 1 << 61), "source.bad-header", "1,152,921,504,606,846,976"),
    "tensor count": (
        b"GGUF" + struct.pack("<IQQ", 3, (1 << 20) + 1, 0),
        "source.bad-header",
        "1,048,577 tensors and 0",
    ),
    "key count": (b"GGUF" + struct.pack("<IQQ", 3, 0, (1 << 16) + 1), "source.bad-header", "65,537 metadata keys"),
    "text of an array": (
        with_value(array(8, 2, struct.pack("<Q", 1) + b"a" + struct.pack("<Q", (1 << 24) + 1))),
        "source.bad-header",
        "an item of key has 16,777,217 bytes",
    ),
    "array count": (with_value(array(4, 1 << 62)), "source.bad-header", "more than the file's"),
    "array of bytes": (with_value(array(0, 1 << 40)), "source.bad-header", "more than the file's"),
    "array of text": (with_value(array(8, 1 << 61)), "source.bad-header", "more than the file's"),
    "array type": (with_value(array(13, 1)), "source.bad-header", "an array of type 13"),
    "value type": (with_value(struct.pack("<I", 99)), "source.bad-header", "has type 99"),
    "text length": (with_value(struct.pack("<IQ", 8, 1 << 63)), "source.bad-header", "9,223,372,036,854,775,808 bytes"),
    "nesting": (with_value(array(9, 1, struct.pack("<IQ", 9, 1) * 9)), "source.bad-header", "more than 4 deep"),
    "key twice": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + (text("k") + struct.pack("<IB", 0, 1)) * 2,
        "source.bad-header",
        "occurs twice",
    ),
    "key unprintable": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a\x1b[2J") + bytes(16),
        "source.bad-header",
        "not printable",
    ),
    "alignment 0": (gguf_bytes({"general.alignment": 0}, {}), "source.bad-header", "power of two"),
    "alignment 3": (gguf_bytes({"general.alignment": 3}, {}), "source.bad-header", "power of two"),
    "alignment beyond the limit": (
        gguf_bytes({"general.alignment": 1 << 21}, {}),
        "source.bad-header",
        "up to 1,048,576",
    ),
    "alignment text": (gguf_bytes({"general.alignment": "32"}, {}), "source.bad-header", "power of two"),
    "rank 5": (with_tensor((1, 1, 1, 1, 1)), "source.bad-header", "tensor t has 5 dimensions, but GGUF allows 4"),
    "rank": (with_tensor((1,), rank=1 << 31), "source.bad-header", "2,147,483,648 dimensions"),
    "overflow": (with_tensor((1 << 40, 1 << 40)), "source.bad-header", "overflows 64 bits"),
    "overflow before zero": (with_tensor((0, 1 << 63)), "source.bad-header", "overflows 64 bits"),
    "overflow after zero": (with_tensor((1 << 63, 0)), "source.bad-header", "overflows 64 bits"),
    "nearly overflow": (with_tensor(((1 << 63) - 1,)), "source.truncated", "ends at 36,893,488,147,419,103,"),
    "block of a number": (
        with_tensor((), kind=2),
        "source.bad-header",
        "rows of [] do not divide into blocks of 32 q4_0",
    ),
    "array beyond the file": (head(keys=1) + text("key") + array(0, 10) + bytes(9), "source.bad-header", "hold"),
    "longest text": (with_value(struct.pack("<IQ", 8, 1 << 24)), "source.truncated", "needs 16,777,"),
    "longer text": (with_value(struct.pack("<IQ", 8, (1 << 24) + 1)), "source.bad-header", "16,777,217 bytes"),
    "nested 5 deep": (nested(5), "source.bad-header", "more than 4 deep"),
    "long key": (gguf_bytes({"k" * ((1 << 16) + 1): 1}, {}), "source.bad-header", "longer than 65,536"),
    "no key": (gguf_bytes({"": 1}, {}), "source.bad-header", "unusable metadata key ''"),
    "tensor twice": (
        head(tensors=2) + (text("t") + struct.pack("<IQIQ", 1, 0, 0, 0)) * 2 + bytes(64),
        "source.bad-header",
        "tensor t occurs twice",
    ),
    "type": (with_tensor((32,), kind=4), "source.bad-header", "type 4"),
    "blocks": (with_tensor((33,), kind=2), "source.bad-header", "do not divide into blocks of 32 q4_0"),
    "outside": (with_tensor((1 << 20,)), "source.truncated", "ends at"),
    "offset": (with_tensor((1,), offset=1 << 62), "source.truncated", "ends at"),
    "unaligned": (with_tensor((1,), offset=4), "source.bad-header", "no multiple of the alignment"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(case: str) -> None:
    raw, code, words = HOSTILE[case]
    with pytest.raises(MoeqError) as caught:
        parsed(raw)
    assert caught.value.code == code
    assert words in caught.value.message


def test_tensors_that_overlap() -> None:
    def placed(*tensors: tuple[str, int, int]) -> GgufHeader:
        infos = (text(name) + struct.pack("<IQIQ", 1, size, 0, offset) for name, size, offset in tensors)
        return parsed(head(tensors=len(tensors)) + b"".join(infos) + bytes(1024))

    assert list(placed(("b", 16, 64), ("a", 16, 0), ("empty", 0, 32)).tensors) == ["b", "a", "empty"]
    for other in (("b", 64, 32), ("b", 8, 96), ("b", 64, 0)):
        with pytest.raises(MoeqError, match="overlaps the tensor before it"):
            placed(("a", 32, 0), ("empty", 0, 32), other)


def test_no_array_outgrows_the_limit_of_headers() -> None:
    raw = head(keys=1) + text("key") + array(0, 1 << 28) + bytes(64)
    with pytest.raises(MoeqError, match="has 268,435,456 items, more than 268,435,456 bytes") as caught:
        read_gguf_header(lambda count: raw[:count], "m.gguf", 1 << 40)
    assert caught.value.code == "source.bad-header"


def mutations(raw: bytes, rng: random.Random) -> bytes:
    kinds: list[Callable[[bytearray], bytearray]] = [
        lambda data: data[: rng.randrange(len(data))],
        lambda data: _patched(data, rng, struct.pack("<Q", rng.choice((0, 1 << 20, 1 << 40, 1 << 63, (1 << 64) - 1)))),
        lambda data: _patched(data, rng, struct.pack("<I", rng.choice((0, 8, 9, 13, 1 << 31, (1 << 32) - 1)))),
        lambda data: _patched(data, rng, bytes([rng.randrange(256)])),
    ]
    data = bytearray(raw)
    for _ in range(rng.randrange(1, 4)):
        data = rng.choice(kinds)(data)
    return bytes(data)


def _patched(data: bytearray, rng: random.Random, patch: bytes) -> bytearray:
    at = rng.randrange(max(1, min(len(data), 6000)))
    data[at : at + len(patch)] = patch
    return data


def test_two_thousand_damaged_headers() -> None:
    """Each is read or refused by name; nothing else is raised, and nothing large is made."""
    metadata = moe_metadata("qwen3moe", layers=1, hidden=64, inner=64, experts=2)
    good = gguf_bytes(metadata, moe_tensors(np.random.default_rng(1), layers=1, hidden=64, inner=64, experts=2))
    rng, codes = random.Random(45), list[str]()
    for _ in range(2000):
        try:
            parsed(mutations(good, rng))
        except MoeqError as error:
            codes.append(error.code)
    assert len(codes) > 1000
    assert all(code.startswith("source.") for code in codes)


def test_sizes_of_blocks_are_the_librarys() -> None:
    assert {int(kind): (kind.name.lower(), *sizes) for kind, sizes in GGML_QUANT_SIZES.items()} == TYPES
