"""GGUF blocks: every type's numbers are those of the gguf package, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf_files import NUMBERS, random_tensor

from moeq.errors import MoeqError
from moeq.schemes.declared import Declared
from moeq.schemes.dequantize import dequantize
from moeq.schemes.format import Context, Described, PartSig
from moeq.schemes.gguf import Gguf, part_of
from moeq.schemes.gguf_blocks import AS_FLOAT32, CODED, FLOATS, WIDENED, exactness, readings


def values(kind: str, rows: np.ndarray) -> np.ndarray:
    """Decode rows of blocks as a checkpoint's projection is decoded."""
    parts = {part_of(kind): torch.from_numpy(rows.copy())}
    form, found = Gguf(), described(kind, rows.shape)
    return dequantize(form.unpack(parts, found.spec, found.scheme)).numpy()


def described(kind: str, shape: tuple[int, ...], k: int | None = None) -> Described:
    form, signatures = Gguf(), {part_of(kind): PartSig("U8", tuple(shape))}
    assert form.matches(signatures, None)
    return form.describe(signatures, Context("m", "down", Declared("gguf"), k_hint=k))


@pytest.mark.parametrize(
    ("kind", "octets", "element", "shape"),
    [
        ("q4_0", 36, "int4", (1, 32)),
        ("q4_0_int8", 36, "int8", (1, 32)),
        ("q8_0", 68, "int8", (1, 32)),
        ("nvfp4", 36, "e2m1", (1, 16)),
        ("q6_k", 210, "f32", (1, 256)),
        ("bf16", 128, "bf16", (1, 64)),
    ],
)
def test_schemes_of_blocks(kind: str, octets: int, element: str, shape: tuple[int, int]) -> None:
    found = described(kind, (4, octets))
    k = 256 if kind == "q6_k" else 64
    assert (found.spec.n, found.spec.k, found.spec.element, found.spec.group_size) == (4, k, element, shape[1])
    assert found.scheme.weight.scale.group_shape == shape
    assert (found.scheme.weight.scale2 is not None) is (kind == "nvfp4")
    assert found.scheme.checkpoint_format == kind
    with pytest.raises(MoeqError, match=f"weight has K={k}, the sibling projection implies 32"):
        described(kind, (4, octets), 32)


def random_rows(kind: str, seed: int, n: int = 64, k: int = 1024) -> np.ndarray:
    raw = random_tensor(np.random.default_rng(seed), kind, (n, k))[2]
    return np.frombuffer(raw, np.uint8).reshape(n, -1)


@pytest.mark.parametrize("kind", [*CODED, *FLOATS])
def test_random_blocks_as_the_gguf_package_reads_them(kind: str) -> None:
    gguf = pytest.importorskip("gguf")
    rows = random_rows(kind, seed=NUMBERS[kind][0])
    expected = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind.upper()])
    if kind in ("f32", "f16"):  # which it takes as numbers, not as bytes
        expected = rows.view({"f32": np.float32, "f16": np.float16}[kind])
    assert np.array_equal(values(kind, rows), expected.astype(np.float32).reshape(64, 1024))


def block(kind: str, *octets: int) -> np.ndarray:
    return np.array([octets], np.uint8).reshape(1, NUMBERS[kind][2])


ONE = (0x00, 0x3C)  # 1.0 in float16


def test_blocks_by_hand() -> None:
    """Low nibbles come first, then high ones; worked out from ggml's block structures."""
    assert values("q4_0", block("q4_0", *ONE, 0x90, *(0x88,) * 15))[0, [0, 1, 16, 17]].tolist() == [-8, 0, 1, 0]
    assert values("q8_0", block("q8_0", *ONE, 0x80, 0x7F, *(0,) * 30))[0, :3].tolist() == [-128, 127, 0]
    five = values("q5_0", block("q5_0", *ONE, 1, 0, 1, 0, *(0,) * 16))
    assert five[0, [0, 1, 16, 17]].tolist() == [0, -16, 0, -16]
    assert values("iq4_nl", block("iq4_nl", *ONE, 0xF0, *(0,) * 15))[0, [0, 16]].tolist() == [-127, 113]
    assert values("mxfp4", block("mxfp4", 128, 0xF7, *(0,) * 15))[0, [0, 16]].tolist() == [12, -12]
    assert values("nvfp4", block("nvfp4", 0x38, 0x40, 0, 0, *(0x21,) * 32))[0, [0, 8, 16, 24]].tolist() == [
        0.5,
        1,
        1,
        2,
    ]


def test_scales_that_nvfp4_does_not_have() -> None:
    with pytest.raises(MoeqError, match="unsigned E4M3"):
        values("nvfp4", block("nvfp4", 127, *(0,) * 35))


def test_floats_that_are_not_finite() -> None:
    with pytest.raises(MoeqError, match="not finite"):
        values("f32", np.array([[np.inf, 1]], np.float32).view(np.uint8))


def test_types_that_others_hold_exactly() -> None:
    assert all("exact in" in exactness(kind) for kind in (*CODED, *FLOATS))


@pytest.mark.parametrize("kind", [*WIDENED, *AS_FLOAT32])
def test_other_readings_are_the_same_numbers(kind: str) -> None:
    own = AS_FLOAT32.get(kind, kind.removesuffix("_int8"))
    rows = random_rows(own, seed=3)
    assert np.array_equal(values(kind, rows), values(own, rows))


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("q4_0", "q4_0", "q4_0"), ("q4_0", "q4_0", "q4_0")),
        (("q4_0", "q4_0", "q8_0"), ("q4_0_int8", "q4_0_int8", "q8_0")),
        (("q8_0", "q4_0", "q4_0"), ("q8_0", "q4_0_int8", "q4_0_int8")),
        (("q4_0", "iq4_nl", "q6_k"), ("q4_0_int8", "iq4_nl", "q6_k")),
        (("q5_0", "q8_0", "q4_k"), ("q5_0", "q8_0", "q4_k")),
        (("q4_k", "q6_k", "q8_0"), ("q4_k", "q6_k", "q8_0")),
        (("q8_0", "q4_k", "q8_0"), ("q8_0_f32", "q4_k", "q8_0")),
        (("mxfp4", "nvfp4", "q8_0"), ("mxfp4_f32", "nvfp4_f32", "q8_0")),
        (("f16", "bf16", "f32"), ("f16_f32", "bf16_f32", "f32")),
        (("f16", "f16", "q8_0"), ("f16", "f16", "q8_0")),
    ],
)
def test_experts_of_a_layer_are_read_as_one_kind(types: tuple[str, str, str], expected: tuple[str, str, str]) -> None:
    assert readings(*types) == expected
