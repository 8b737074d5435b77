"""Decoding of stored parts: values by hand, both ways, and data that cannot be what it says it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.bits import lane_codes, pack_lanes
from moeq.schemes.declared import Declared
from moeq.schemes.dequantize import check_matrix
from moeq.schemes.format import Context, Described, PartSig
from moeq.schemes.registry import get_format

NAMES = {torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.float16: "F16", torch.float32: "F32"}

Parts = dict[str, torch.Tensor]


def read(form: str, parts: Parts, **declared: Any) -> tuple[Described, QuantizedMatrix]:
    declared = {"method": "any", **declared}
    signatures = {part: PartSig(NAMES[tensor.dtype], tuple(tensor.shape)) for part, tensor in parts.items()}
    found = get_format(form).describe(signatures, Context("here", "down", Declared(**declared)))
    return found, get_format(form).unpack(parts, found.spec, found.scheme)


def rebuilt(form: str, parts: Parts, **declared: Any) -> Parts:
    """What `repack` makes of the decoded parts."""
    found, matrix = read(form, parts, **declared)
    made = {}
    for part, tensor in parts.items():
        sig = PartSig(NAMES[tensor.dtype], tuple(tensor.shape))
        made[part] = get_format(form).rebuild(matrix, part, sig, found.scheme)
    return made


def assert_rebuilt(form: str, parts: Parts, **declared: Any) -> None:
    for part, made in rebuilt(form, parts, **declared).items():
        assert made is not None, part
        assert made.dtype == parts[part].dtype
        assert torch.equal(made, parts[part]), part


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_whole_codes_in_words(bits: int) -> None:
    lanes = 32 // bits
    codes = torch.arange(2 * (lanes + 1)).reshape(2, -1).remainder(1 << bits).to(torch.uint8)
    words = pack_lanes(codes, bits, 2)
    first = sum(int(code) << (bits * lane) for lane, code in enumerate(codes[0, :lanes]))
    assert [int(word) & 0xFFFFFFFF for word in words[0]] == [first, int(codes[0, lanes])]
    assert torch.equal(lane_codes(words, bits, lanes + 1), codes)


@pytest.mark.parametrize("n", [8, 16])
def test_quark_stores_groups_transposed_whatever_the_sizes(n: int) -> None:
    """Sixteen columns in two groups: words of nibbles along N, in AWQ's order; square matrices as others."""
    words = torch.zeros(16, n // 8, dtype=torch.int32)
    words[3, 0] = 1 << 16  # fifth nibble: column 1 of N
    found, matrix = read("quark-int4", {"weight": words, "weight_scale": torch.arange(2.0 * n).reshape(2, n)}, bits=4)
    assert found.scheme.packing == "nibbles along N, transposed"
    assert (matrix.spec.n, matrix.spec.k, matrix.spec.group_size) == (n, 16, 8)
    expected = torch.full((n, 16), 8, dtype=torch.uint8)
    expected[1, 3] = 9
    assert torch.equal(matrix.codes, expected)
    assert matrix.scales.tolist() == [[row, n + row] for row in range(n)]


def test_quark_stores_channels_upright() -> None:
    words = torch.zeros(16, 2, dtype=torch.int32)
    words[3, 1] = 1
    parts = {"weight": words, "weight_scale": torch.arange(16.0).reshape(16, 1)}
    found, matrix = read("quark-int4", parts, variant="order")
    assert found.scheme.packing == "nibbles along K"
    assert (matrix.spec.n, matrix.spec.k, matrix.codes[3, 8], matrix.codes.sum()) == (16, 16, 9, 8 * 256 + 1)
    assert torch.equal(matrix.scales, parts["weight_scale"])


def fast_parts(zero: float = 5.0) -> Parts:
    scales = torch.zeros(8, 8, dtype=torch.float16)
    scales[:2] = 0.5
    codes = torch.arange(2 * 64, dtype=torch.int16).reshape(2, 64) * 517
    return {"qweight": codes, "scales": scales, "qzeros": -scales * zero}


def test_offsets_are_scale_times_zero_point() -> None:
    _, matrix = read("awq-gemv-fast", fast_parts(), group_size=32)
    assert matrix.zeros is not None
    assert matrix.zeros.tolist() == [[5, 5]] * 8
    assert_rebuilt("awq-gemv-fast", fast_parts(), group_size=32)
    for zero in (0.0, 15.0):
        read("awq-gemv-fast", fast_parts(zero), group_size=32)
    for zero in (-1.0, 16.0, float("nan")):
        with pytest.raises(MoeqError, match="not scale times a zero point from 0 to 15") as caught:
            read("awq-gemv-fast", fast_parts(zero), group_size=32)
        assert caught.value.code == "source.zero-points"


def test_padded_scales_of_gemv() -> None:
    words = torch.arange(8 * 8, dtype=torch.int32).reshape(8, 8) * 0x01234567
    scales = torch.zeros(8, 8, dtype=torch.float16)
    scales[:, :2] = 1.5
    parts = {"qweight": words, "scales": scales, "qzeros": torch.arange(8, dtype=torch.int32).reshape(8, 1)}
    _, matrix = read("awq-gemv", parts, group_size=32)
    assert matrix.zeros is not None
    assert matrix.zeros.tolist() == [[row, 0] for row in range(8)]
    assert matrix.scales.tolist() == [[1.5, 1.5]] * 8
    assert_rebuilt("awq-gemv", parts, group_size=32)


def awq_parts(zero: int) -> Parts:
    words = torch.arange(32, dtype=torch.int32).reshape(32, 1) * 0x01234567
    zeros = torch.tensor([[sum(zero << 4 * nibble for nibble in range(8))]]).to(torch.int32)
    return {"qweight": words, "scales": torch.ones(1, 8, dtype=torch.float16), "qzeros": zeros}


def test_zero_points_of_symmetric_weights_are_the_constant() -> None:
    _, matrix = read("awq", awq_parts(8), symmetric=True)
    assert (matrix.zeros, matrix.spec.symmetric) == (None, True)
    assert_rebuilt("awq", awq_parts(8), symmetric=True)
    _, matrix = read("awq", awq_parts(7), symmetric=False)
    assert matrix.zeros is not None
    assert matrix.zeros.tolist() == [[7]] * 8
    with pytest.raises(MoeqError, match="range from 7 to 7 where the symmetric constant is 8") as caught:
        read("awq", awq_parts(7), symmetric=True)
    assert caught.value.code == "source.zero-points"


def test_nibbles_of_awq_are_shuffled() -> None:
    parts = awq_parts(8) | {"qweight": torch.zeros(32, 1, dtype=torch.int32)}
    parts["qweight"][2, 0] = 0x76543210
    _, matrix = read("awq", parts, symmetric=True)
    assert matrix.codes[:, 2].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


@pytest.mark.parametrize("shape", [(4, 1), (4,), (1,), (1, 1), (), (4, 2)])
def test_int8_with_zero_points(shape: tuple[int, ...]) -> None:
    count = int(torch.zeros(shape).numel())
    scales, zeros = torch.arange(1.0, 1 + count).reshape(shape), torch.arange(count).to(torch.int8).reshape(shape) - 3
    parts = {"weight": torch.arange(-16, 16, dtype=torch.int8).reshape(4, 8), "weight_scale": scales}
    found, matrix = read("ct-int8", {**parts, "weight_zero_point": zeros})
    assert matrix.codes[0].tolist() == [112, 113, 114, 115, 116, 117, 118, 119]
    groups = 2 if shape == (4, 2) else 1
    assert matrix.scales.shape == (4, groups)
    assert matrix.zeros is not None
    assert (matrix.scales[1, 0], matrix.zeros[1, 0]) == ((1, 125) if count == 1 else (1 + groups, 125 + groups))
    assert found.scheme.weight.scale.granularity == ("tensor" if count == 1 else "group" if groups == 2 else "channel")
    assert_rebuilt("ct-int8", {**parts, "weight_zero_point": zeros})
    assert_rebuilt("ct-int8", parts)


def test_zero_points_of_compressed_tensors() -> None:
    words = torch.arange(8 * 2, dtype=torch.int32).reshape(8, 2) * 0x01234567
    parts = {
        "weight_packed": words,
        "weight_scale": torch.ones(8, 2),
        "weight_shape": torch.tensor([8, 16], dtype=torch.int32),
    }
    packed = torch.tensor([[0x76543210, -1]], dtype=torch.int32)
    _, matrix = read("ct-pack", {**parts, "weight_zero_point": packed}, bits=4, symmetric=False)
    assert matrix.zeros is not None
    assert matrix.zeros.tolist() == [[row, 15] for row in range(8)]
    assert_rebuilt("ct-pack", {**parts, "weight_zero_point": packed}, bits=4, symmetric=False)
    signed = torch.arange(-8, 8, dtype=torch.int8).reshape(8, 2)
    _, matrix = read("ct-pack", {**parts, "weight_zero_point": signed}, bits=4, symmetric=False)
    assert matrix.zeros is not None
    assert matrix.zeros.flatten().tolist() == list(range(16))
    assert_rebuilt("ct-pack", {**parts, "weight_zero_point": signed}, bits=4, symmetric=False)
    with pytest.raises(MoeqError, match=r"weight_shape says \[8, 15\], the packed tensor holds \[8, 16\]") as caught:
        read("ct-pack", parts | {"weight_shape": torch.tensor([8, 15], dtype=torch.int32)}, bits=4)
    assert caught.value.code == "source.inconsistent"


@pytest.mark.parametrize(
    ("index", "words"),
    [
        ([0] * 8 + [1] * 8, None),
        ([0] * 16, None),
        ([1, 0] * 8, None),
        ([-1] + [0] * 7 + [1] * 8, "ranges from -1 to 1; indices are 0 to 1"),
        ([0] * 8 + [1] * 7 + [2], "ranges from 0 to 2; indices are 0 to 1"),
        ([1] * 16, "is 1 for all 16 columns, of which every group of 2 has at most 8"),
        ([0] * 9 + [1] * 7, "has 9 of 16 columns in group 0; a group has 8"),
    ],
)
def test_group_indices(index: list[int], words: str | None) -> None:
    parts = {
        "qweight": torch.zeros(2, 8, dtype=torch.int32),
        "scales": torch.ones(2, 8),
        "g_idx": torch.tensor(index, dtype=torch.int32),
    }
    if words is None:
        _, matrix = read("gptq", parts, bits=4)
        if index[0] == 1:
            assert matrix.group_index is not None
            assert matrix.group_index.tolist() == index
        assert matrix.spec.act_order is (matrix.group_index is not None) is (index[0] == 1)
        return
    with pytest.raises(MoeqError) as caught:
        read("gptq", parts, bits=4)
    assert (caught.value.code, caught.value.message) == ("source.bad-data", f"g_idx {words}")


def test_scales_that_are_not_finite() -> None:
    spec = MatrixSpec("down", 2, 4, "int4", 2, "f32")
    matrix = QuantizedMatrix(spec, torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 2))
    check_matrix(matrix, "here")
    matrix.scales[1, 0] = float("inf")
    with pytest.raises(MoeqError, match="here: 1 scales are not finite, first row 1 group 0: inf") as caught:
        check_matrix(matrix, "here")
    assert caught.value.code == "source.bad-data"
    wrong = replace(matrix, scales=torch.ones(2, 2), global_scale=torch.tensor([1.0, float("nan")]))
    with pytest.raises(MoeqError, match="here: the global scale is not finite"):
        check_matrix(wrong, "here")


def test_int8_gives_back_no_part_that_it_does_not_hold() -> None:
    spec = MatrixSpec("down", 2, 4, "int8", 4, "f32", symmetric=False)
    matrix = QuantizedMatrix(spec, torch.zeros(2, 4, dtype=torch.uint8), torch.ones(2, 1), torch.full((2, 1), 130))
    made, scheme = get_format("ct-int8"), None
    sig = PartSig("I8", (2, 1))
    found = made.repack(matrix, "weight_zero_point", sig, scheme)  # type: ignore[arg-type]
    assert found is not None
    assert found.tolist() == [[2], [2]]
    assert made.repack(matrix, "bias", sig, scheme) is None  # type: ignore[arg-type]
    plain = QuantizedMatrix(spec, matrix.codes, matrix.scales)
    assert made.repack(plain, "weight_zero_point", sig, scheme) is None  # type: ignore[arg-type]
