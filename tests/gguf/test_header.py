"""GGUF headers: what is read of good files, and what is said about bad ones."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
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
    raw = gguf_bytes({"tokenizer.ggml.tokens": words}, {})
    sizes: list[int] = []

    def read(count: int) -> bytes:
        sizes.append(count)
        return raw[:count]

    assert read_gguf_header(read, "m.gguf", len(raw)).metadata["tokenizer.ggml.tokens"] == words
    assert len(sizes) == 2


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
    "alignment text": (gguf_bytes({"general.alignment": "32"}, {}), "source.bad-header", "power of two"),
    "rank": (with_tensor((1,), rank=1 << 31), "source.bad-header", "2,147,483,648 dimensions"),
    "overflow": (with_tensor((1 << 40, 1 << 40)), "source.bad-header", "overflows 64 bits"),
    "overflow before zero": (with_tensor((0, 1 << 63)), "source.bad-header", "overflows 64 bits"),
    "type": (with_tensor((32,), kind=4), "source.bad-header", "type 4"),
    "blocks": (with_tensor((33,), kind=2), "source.bad-header", "no whole blocks of 32 q4_0"),
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
    infos = b"".join(text(name) + struct.pack("<IQIQ", 1, 64, 0, offset) for name, offset in (("a", 0), ("b", 32)))
    with pytest.raises(MoeqError, match="overlaps"):
        parsed(b"GGUF" + struct.pack("<IQQ", 3, 2, 0) + infos + bytes(1024))


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
