"""Tensors that llama.cpp's converter rearranged: each becomes the model's again, or is refused by name."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moeq.checkpoint.header import TensorEntry
from moeq.errors import MoeqError
from moeq.gguf.derived import Make, derive, join, join_latent, open_in_memory
from moeq.gguf.header import GgufTensor
from moeq.gguf.names import Change

torch = pytest.importorskip("torch")

#: Bytes of the file before its first tensor.
HEAD = 5

#: Two key heads, three value heads for each, two rows per value head.
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_value_head_dim": 2, "linear_key_head_dim": 2}

#: The rows of those value heads as a file has them: the first heads of all key heads come first.
MOVED = [0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11]


class File:
    """A file of some tensors, one after the other."""

    def __init__(self, *arrays: np.ndarray, kinds: Sequence[str] = ("f32", "f32")) -> None:
        self.raw, self.tensors = bytearray(HEAD), list[GgufTensor]()
        for array, kind in zip(arrays, kinds, strict=False):
            start = len(self.raw)
            self.raw += np.ascontiguousarray(array).tobytes()
            name = f"blk.3.t{len(self.tensors)}.weight"
            self.tensors.append(GgufTensor(name, kind, array.shape, start, len(self.raw)))

    def read(self, file: str, start: int, end: int) -> bytearray:
        assert file == "m.gguf"
        return self.raw[start:end]

    def derived(self, change: Change, config: Mapping[str, Any], where: str = "t") -> tuple[TensorEntry, Any]:
        stored = self.tensors[0]
        entry = TensorEntry("a.b.weight", "F32", stored.shape, "m.gguf", stored.start, stored.end)
        return derive(change, entry, stored, config, where)

    def numbers(self, make: Make) -> list[float]:
        return np.frombuffer(make(self.read), np.float32).tolist()


def floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize(("where", "heads"), [("blk.0.attn_q.weight", 2), ("blk.0.attn_k.weight", 1)])
def test_halves_of_heads(where: str, heads: int) -> None:
    order = [0, 2, 1, 3, 4, 6, 5, 7] if heads == 2 else [0, 4, 1, 5, 2, 6, 3, 7]
    file = File(floats(8, 3)[order])
    entry, made = file.derived("rotary", {"num_attention_heads": 2, "num_key_value_heads": 1}, where)
    assert entry == TensorEntry("a.b.weight", "F32", (8, 3), f"{where} of m.gguf", 0, 96)
    assert file.numbers(made) == floats(24).tolist()


@pytest.mark.parametrize(
    ("shape", "heads"), [((8,), 0), ((8,), -2), ((8,), "2"), ((8,), True), ((8,), 3), ((6,), 2), ((), 2), ((0, 4), 2)]
)
def test_rows_that_are_no_pairs(shape: tuple[int, ...], heads: object) -> None:
    words = rf"blk: {shape[0] if shape else 0} rows do not divide into pairs for {heads!r} heads"
    with pytest.raises(MoeqError, match=words) as e:
        File(np.zeros(shape, np.float32)).derived("rotary", {"num_attention_heads": heads}, "blk")
    assert e.value.code == "source.inconsistent"


@pytest.mark.parametrize(
    ("change", "stored", "shape", "expected"),
    [
        ("values", floats(12, 1)[MOVED], (12, 1), floats(12)),
        ("value-tail", np.concatenate([[50, 51], floats(12)[MOVED]]).astype(np.float32), (14,), [50, 51, *range(12)]),
        ("conv-tail", floats(13, 1)[[0, *(1 + row for row in MOVED)]], (13, 1, 1), floats(13)),
        ("value-heads", floats(6)[[0, 3, 1, 4, 2, 5]], (6,), [0, 1, 2, 3, 4, 5]),
        ("value-columns", floats(2, 12)[:, MOVED], (2, 48), floats(24)),
        ("value-columns", floats(2, 13)[:, [0, *(1 + column for column in MOVED)]], (2, 52), floats(26)),
    ],
)
def test_value_heads(change: Change, stored: np.ndarray, shape: tuple[int, ...], expected: Sequence[float]) -> None:
    file = File(stored)
    entry, made = file.derived(change, LINEAR)
    kind = ("a.b.gguf_f32", "U8") if change == "value-columns" else ("a.b.weight", "F32")
    assert entry == TensorEntry(*kind, shape, "t of m.gguf", 0, stored.nbytes)
    assert file.numbers(made) == list(expected)


def test_decays() -> None:
    file = File(-np.exp(floats(6)[[0, 3, 1, 4, 2, 5]]))
    entry, made = file.derived("value-logarithm", LINEAR)
    assert (entry.dtype, entry.shape, entry.start, entry.end) == ("F32", (6,), 0, 24)
    assert file.numbers(made) == pytest.approx([0, 1, 2, 3, 4, 5], abs=1e-6)
    file = File(np.array([[-1.0], [-np.e]], np.float32))
    entry, made = file.derived("logarithm", {})
    assert entry == TensorEntry("a.b.weight", "F32", (2, 1), "t of m.gguf", 0, 8)
    assert file.numbers(made) == pytest.approx([0, 1], abs=1e-6)
    for wrong in (0.0, 1.0):
        file = File(np.array([-1.0, wrong, -1, -1, -1, -1], np.float32))
        for change in ("logarithm", "value-logarithm"):
            with pytest.raises(MoeqError, match="not negative") as caught:
                file.numbers(file.derived(change, LINEAR)[1])
            assert caught.value.code == "source.bad-data"


def test_norms() -> None:
    file = File(np.array([1.0, 3.5], np.float32))
    entry, made = file.derived("minus-one", {})
    assert entry == TensorEntry("a.b.weight", "F32", (2,), "t of m.gguf", 0, 8)
    assert file.numbers(made) == [0.0, 2.5]


@pytest.mark.parametrize(
    ("change", "shape", "expected"),
    [
        ("row", (4,), (1, 4)),
        ("row", (2, 4), (2, 4)),
        ("row", (), ()),
        ("channels", (4, 3), (4, 1, 3)),
        ("channels", (4, 1, 3), (4, 1, 3)),
        ("channels", (4,), (4,)),
        ("channels", (), ()),
    ],
)
def test_axes_of_length_one(change: Change, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    entry, made = File(np.zeros(shape, np.float32)).derived(change, {})
    assert (entry.shape, entry.file, entry.start, made) == (expected, "m.gguf", HEAD, None)


@pytest.mark.parametrize(
    ("shape", "config", "words"),
    [
        ((12,), {"linear_num_key_heads": 0}, r"are \[6, 2\], which do not fit together"),
        ((12,), {"linear_num_key_heads": True}, "do not fit"),
        ((12,), {"linear_value_head_dim": 1 << 16}, r"are \[2, 6\], which do not fit together"),
        ((12,), {"linear_num_key_heads": 4}, r"are \[4, 6, 2\], which do not fit together"),
        ((11,), {}, r"t: shape \[11\] has no 12 rows of value heads"),
        ((), {}, r"shape \[\] has no 12 rows"),
    ],
)
def test_value_heads_that_do_not_fit(shape: tuple[int, ...], config: dict[str, Any], words: str) -> None:
    with pytest.raises(MoeqError, match=words) as caught:
        File(np.zeros(shape, np.float32)).derived("values", LINEAR | config)
    assert caught.value.code == "source.inconsistent"


def test_sizes_of_value_heads_have_a_limit() -> None:
    with pytest.raises(MoeqError, match="has no 131070 rows"):
        File(floats(1)).derived("values", dict.fromkeys(LINEAR, 1) | {"linear_value_head_dim": 65535, **HEADS})


#: One key head with two value heads.
HEADS = {"linear_num_key_heads": 1, "linear_num_value_heads": 2}


def test_rows_of_two_tensors() -> None:
    file = File(floats(4, 2), 100 + floats(2, 2))
    whole, made = join("m.gguf", *file.tensors, {}, "place")
    assert (whole.name, whole.type, whole.shape, whole.start, whole.end) == ("place", "f32", (6, 2), 0, 48)
    assert file.numbers(made) == [*range(8), 100, 101, 102, 103]


def test_rows_of_two_types_become_float32() -> None:
    file = File(floats(2, 2), 100 + floats(1, 2).astype(np.float16), kinds=("f32", "f16"))
    whole, made = join("m.gguf", *file.tensors, {}, "place")
    assert (whole.type, whole.shape, whole.end) == ("f32", (3, 2), 24)
    assert file.numbers(made) == [0, 1, 2, 3, 100, 101]


def qwen3_next(file: File, config: dict[str, Any]) -> Any:
    first, second = file.tensors
    return join("m.gguf", replace(first, name="blk.3.attn_qkv.weight"), second, config, "place")


def test_rows_of_queries_keys_values_and_gates() -> None:
    """Two key heads of two rows each: queries, keys and three rows of values a head, then gates."""
    file = File(floats(14, 1), 100 + floats(6, 1))
    _, made = qwen3_next(file, LINEAR)
    queries_of_0 = [0, 1, 4, 5, 8, 9, 10, 100, 101, 102]
    assert file.numbers(made) == [*queries_of_0, 2, 3, 6, 7, 11, 12, 13, 103, 104, 105]


@pytest.mark.parametrize(
    ("rows", "gates", "config"),
    [
        (14, 6, {}),
        (14, 6, LINEAR | {"linear_num_key_heads": 0}),
        (14, 6, LINEAR | {"linear_num_key_heads": "2"}),
        (14, 6, LINEAR | {"linear_key_head_dim": None}),
        (14, 6, LINEAR | {"linear_num_key_heads": -2, "linear_key_head_dim": -2}),
        (14, 6, LINEAR | {"linear_key_head_dim": "2"}),
        (14, 5, LINEAR),
        (13, 6, LINEAR),
        (8, 6, LINEAR),
    ],
)
def test_rows_that_are_no_key_heads(rows: int, gates: int, config: dict[str, Any]) -> None:
    with pytest.raises(MoeqError, match=rf"place: blk\.3\.attn_qkv\.weight \[{rows}, 1\] and .* do not fit") as caught:
        qwen3_next(File(floats(rows, 1), floats(gates, 1)), config)
    assert caught.value.code == "source.inconsistent"


@pytest.mark.parametrize(
    ("first", "second"), [((2, 2), (2, 3)), ((2, 0), (2, 0)), ((4,), (4,)), ((2, 2), (2, 2, 1)), ((0, 2), (2, 2))]
)
def test_tensors_that_do_not_follow_each_other(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    with pytest.raises(MoeqError, match="do not fit together"):
        join("m.gguf", *File(np.zeros(first, np.float32), np.zeros(second, np.float32)).tensors, {}, "place")


def test_latent_projections() -> None:
    """Two heads, rank 3: keys are stored transposed, one row of keys and two of values a head."""
    keys = np.array([[[0], [1], [2]], [[10], [11], [12]]], np.float32)
    values = 100 + floats(2, 2, 3)
    file = File(keys, values)
    entry, made = join_latent("a.gguf_f32", "m.gguf", *file.tensors, "blk.3")
    assert entry == TensorEntry("a.gguf_f32", "U8", (6, 12), "blk.3.attn_kv_b of m.gguf", 0, 72)
    assert file.numbers(made) == [0, 1, 2, *range(100, 106), 10, 11, 12, *range(106, 112)]


@pytest.mark.parametrize(
    ("keys", "values"), [((2, 3), (2, 2, 3)), ((2, 3, 1), (2, 3)), ((2, 3, 1), (3, 2, 3)), ((2, 3, 1), (2, 3, 2))]
)
def test_halves_of_different_projections(keys: tuple[int, ...], values: tuple[int, ...]) -> None:
    tensors = File(np.zeros(keys, np.float32), np.zeros(values, np.float32)).tensors
    with pytest.raises(MoeqError, match=r"blk\.3: attn_k_b .* are no halves of one projection") as caught:
        join_latent("a.gguf_f32", "m.gguf", *tensors, "blk.3")
    assert caught.value.code == "source.inconsistent"


def test_made_files_are_read_from_their_beginning() -> None:
    fd = open_in_memory(memoryview(b"content"))
    try:
        assert (os.pread(fd, 99, 0), os.fstat(fd).st_size) == (b"content", 7)
    finally:
        os.close(fd)
