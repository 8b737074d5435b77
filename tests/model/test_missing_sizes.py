"""Sizes that headers lack, read from the parts beside the codes: what is read, how often, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from moeq.checkpoint.header import TensorEntry
from moeq.errors import MoeqError
from moeq.model.missing_sizes import (
    _bitsandbytes_entries,
    _hqq_entries,
    _torchao_entries,
    _torchao_part,
    add_missing_sizes,
)
from moeq.schemes.bitsandbytes import MAX_STATE_BYTES

STATE = "weight.quant_state.bitsandbytes__nf4"


class Stored:
    """A source whose tensors have these dtypes, shapes and bytes; it notes what is read."""

    def __init__(self, remote: bool = False, **metadata: str) -> None:
        self.remote, self.metadata = remote, metadata
        self.tensors: dict[str, TensorEntry] = {}
        self.bytes: dict[str, bytes] = {}
        self.read: list[str] = []

    def add(self, name: str, dtype: str, shape: tuple[int, ...], data: bytes = b"", size: int | None = None) -> None:
        size = len(data) if size is None else size
        self.tensors[name] = TensorEntry(name, dtype, shape, "f", 100, 100 + size)
        self.bytes[name] = data

    def peek(self, entry: TensorEntry) -> bytes:
        self.read.append(entry.name)
        return self.bytes[entry.name]


def state(rows: int = 4, columns: int = 6, **changes: object) -> bytes:
    return json.dumps({"shape": [rows, columns], "blocksize": 64, "dtype": "bfloat16", **changes}).encode()


def four_bit(*modules: str, remote: bool = False) -> Any:
    found = Stored(remote)
    for module in modules:
        found.add(f"{module}.weight", "U8", (12, 1), size=12)
        found.add(f"{module}.{STATE}", "U8", (1,), state())
    return found


@pytest.mark.parametrize("remote", [False, True])
def test_four_bit_matrices_get_their_shape(remote: bool) -> None:
    source = four_bit("a.up", "b.up", "a.down", remote=remote)
    source.add("norm", "BF16", (4,), size=8)
    found = _bitsandbytes_entries(source)
    assert {name: entry.shape for name, entry in found.items()} == {
        "a.up.weight": (4, 3),
        "b.up.weight": (4, 3),
        "a.down.weight": (4, 3),
    }
    assert all(entry == source.tensors[name]._replace(shape=(4, 3)) for name, entry in found.items())
    every = [f"a.up.{STATE}", f"b.up.{STATE}", f"a.down.{STATE}"]
    assert source.read == ([every[0], every[2]] if remote else every)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda source: source.tensors.pop("a.up.weight"), "describes no matrix of bytes called a.up.weight"),
        (lambda source: source.add("a.up.weight", "I8", (12, 1), size=12), "describes no matrix of bytes"),
        (
            lambda source: source.add(f"a.up.{STATE}", "U8", (1,), state(), size=MAX_STATE_BYTES + 1),
            "describes no matrix of bytes",
        ),
        (lambda source: source.add("a.up.weight", "U8", (13, 1), size=13), "has 13 bytes for 4 x 6 codes of 4 bits"),
        (lambda source: source.add("a.up.weight", "U8", (11, 1), size=11), "has 11 bytes for 4 x 6 codes of 4 bits"),
    ],
)
def test_states_that_fit_no_matrix(change: Any, said: str) -> None:
    source = four_bit("a.up")
    change(source)
    with pytest.raises(MoeqError, match=said) as caught:
        _bitsandbytes_entries(source)
    assert caught.value.code == "source.inconsistent"


def test_a_state_may_be_as_long_as_the_limit() -> None:
    source = four_bit("a.up")
    source.add(f"a.up.{STATE}", "U8", (1,), state(), size=MAX_STATE_BYTES)
    assert _bitsandbytes_entries(source)["a.up.weight"].shape == (4, 3)


def number(value: int, size: int) -> bytes:
    return value.to_bytes(size, "little")


def hqq(*modules: str, remote: bool = False, **changes: tuple[str, bytes] | None) -> Any:
    found = Stored(remote)
    for module in modules:
        found.add(f"{module}.W_q", "U8", (8, 64), size=512)
        settings: dict[str, tuple[str, bytes] | None] = {
            "packing": ("U8", b"4bit_u8"), "shape": ("I64", number(16, 8) + number(64, 8)),
            "group_size": ("I32", number(64, 4)), "axis": ("I32", number(1, 4)), **changes,
        }  # fmt: skip
        for part, given in settings.items():
            if given is not None:
                found.add(f"{module}.{part}", given[0], (1,), given[1])
        found.add(f"{module}.scale", "BF16", (16, 1), size=32)
    return found


@pytest.mark.parametrize("remote", [False, True])
def test_hqq_matrices_get_a_part_with_their_sizes(remote: bool) -> None:
    source = hqq("a.up", "b.up", "b.down", remote=remote)
    source.add("pickled.W_q", "U8", (8, 64), size=512)
    found = _hqq_entries(source)
    assert list(found) == [f"{module}.hqq_sizes" for module in ("a.up", "b.up", "b.down")]
    for name, entry in found.items():
        assert entry == TensorEntry(name, "U8", (0, 16, 64, 4, 64, 1), "f", 100, 100)
    modules = [name.rpartition(".")[0] for name in source.read]
    assert sorted(set(modules)) == (["a.up", "b.down"] if remote else ["a.up", "b.down", "b.up"])
    assert len(modules) == 4 * len(set(modules))


def test_matrices_of_one_name_with_other_scales_are_read_apart() -> None:
    source = hqq("a.up", "b.up", remote=True)
    source.add("b.up.scale", "BF16", (8, 2), size=32)
    _hqq_entries(source)
    assert len(source.read) == 8


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"axis": None}, r"a.up.axis is missing"),
        ({"axis": ("I64", number(1, 8))}, r"a.up.axis is I64\[1\], expected a small I32"),
        ({"axis": ("I32", b"")}, r"a.up.axis is I32\[1\], expected a small I32"),
        ({"packing": ("U8", b"4bit_u8" + b" " * 58)}, r"a.up.packing is U8\[1\], expected a small U8"),
        ({"packing": ("U8", b"4bit_u8" + b" " * 57)}, r"packing '4bit_u8 .* are no settings of an HQQ matrix"),
        ({"packing": ("U8", b"5bit_u8")}, r"packing '5bit_u8' and a shape of 16 bytes are no settings"),
        ({"shape": ("I64", number(16, 8))}, r"packing '4bit_u8' and a shape of 8 bytes are no settings"),
        ({"group_size": ("I32", number(60, 4))}, r"groups of 60 codes do not divide 16 x 64"),
        ({"axis": ("I32", number(2, 4))}, r"with groups along axis 2 are out of range"),
    ],
)
def test_settings_that_no_hqq_matrix_has(changes: Any, said: str) -> None:
    with pytest.raises(MoeqError, match=said) as caught:
        _hqq_entries(hqq("a.up", **changes))
    assert caught.value.code == "source.inconsistent"


@pytest.mark.parametrize(
    ("table", "part"),
    [
        ({"_type": "Int8Tensor"}, ("bits", 8)),
        ({"_type": "Int4Tensor", "_data": {}}, ("int4", 0)),
        ({"_type": "Int4Tensor", "_data": {"activation_dtype": {"_data": "float8_e4m3fn"}}}, ("int4", 1)),
        ({"_type": "Int4Tensor", "_data": {"activation_dtype": {"_data": "bfloat16"}}}, ("int4", 0)),
        ({"_type": "Int4Tensor"}, None),
        ({"_type": "NVFP4Tensor"}, ("mx", 0)),
        ({"_type": "MXTensor", "_data": {"elem_dtype": {"_data": "float8_e4m3fn"}}}, ("mx", 0)),
        ({"_type": "MXTensor", "_data": {"elem_dtype": {"_data": "float4_e2m1fn_x2"}}}, ("mx", 0)),
        ({"_type": "MXTensor", "_data": {"elem_dtype": {"_data": "float8_e5m2"}}}, None),
        *(
            ({"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_data": f"int{bits}"}}}, ("bits", bits))
            for bits in (1, 4, 8)
        ),
        ({"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_data": "int9"}}}, None),
        ({"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_data": "int44"}}}, None),
        ({"_type": "Float8Tensor", "_data": {"target_dtype": {"_data": "int4"}}}, None),
        ([], None),
        ({"_type": "MXTensor", "_data": 5}, None),
    ],
)
def test_what_metadata_of_torchao_says(table: Any, part: tuple[str, int] | None) -> None:
    assert _torchao_part(json.dumps(table)) == part


@pytest.mark.parametrize("text", [None, "", "{", "[" * 100_000])
def test_metadata_that_says_nothing(text: str | None) -> None:
    assert _torchao_part(text) is None


def test_matrices_of_torchao_get_a_part_without_bytes() -> None:
    bits = json.dumps({"_type": "Int8Tensor"})
    source: Any = Stored(**{"a.weight": bits, "b.weight": bits, "c.qdata": bits, "d.weight": "{}"})
    source.add("a._weight_qdata", "I8", (8, 4), size=32)
    source.add("b._weight_qdata", "I8", (3, 8, 4), size=96)
    source.add("d._weight_qdata", "I8", (8, 4), size=32)  # of a class that moeq does not read
    source.add("c.weight_qdata", "I8", (8, 4), size=32)  # no parameter of torchao's
    source.add("a._weight_scale", "BF16", (8, 1), size=16)
    found = _torchao_entries(source)
    assert found == {
        "a._weight_bits": TensorEntry("a._weight_bits", "U8", (0, 8), "f", 100, 100),
        "b._weight_bits": TensorEntry("b._weight_bits", "U8", (3, 0, 8), "f", 100, 100),
    }
    before = dict(source.tensors)
    add_missing_sizes(source)
    assert source.tensors == before | found


def test_sources_without_such_matrices_stay_as_they_are() -> None:
    source: Any = SimpleNamespace(tensors={"x": TensorEntry("x", "BF16", (2,), "f", 0, 4)}, metadata={}, remote=False)
    before = source.tensors
    add_missing_sizes(source)
    assert source.tensors is before
