"""Stored bytes as matrices and back, part by part: what is read, what is declined, what would be lost."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moeq.matrix import MatrixSpec
from moeq.schemes.base import Granularity, QuantKey, ScaleKey, Scheme
from moeq.schemes.format import Described, PartSig

pytest.importorskip("numba")

from moeq.layouts.float_bits import bits_of
from moeq.pipeline.pack.fast.formats import StoredProjection, stored_projection
from moeq.pipeline.pack.fast.scales import EXPONENT, WIDTH, GlobalScale, StoredScales
from moeq.pipeline.pack.fast.scratch import Region, regions_of
from moeq.pipeline.pack.fast.shared import SharedScale, stored_largest

BYTES = {"I32": 4, "I64": 8, "F16": 2, "BF16": 2, "F32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}

INT4 = MatrixSpec("down", 16, 64, "int4", 32, "f16")
ASYMMETRIC = replace(INT4, symmetric=False)


def scheme(stored: str, spec: MatrixSpec, granularity: Granularity = "group", rows: int = 1, **more: Any) -> Scheme:
    key = QuantKey(spec.element, "", ScaleKey(spec.scale_dtype, granularity, (rows, spec.group_size)))
    return Scheme(stored, key, **more)


def gptq(spec: MatrixSpec = INT4, **changes: PartSig | None) -> dict[str, PartSig]:
    n, k, groups, bits = spec.n, spec.k, spec.num_groups, spec.bits
    parts: dict[str, PartSig | None] = {
        "qweight": PartSig("I32", (k * bits // 32, n)),
        "qzeros": PartSig("I32", (groups, n * bits // 32)),
        "scales": PartSig("F16", (groups, n)),
        "g_idx": PartSig("I32", (k,)),
        **changes,
    }
    return {name: part for name, part in parts.items() if part is not None}


def ct_pack(spec: MatrixSpec = INT4, **changes: PartSig) -> dict[str, PartSig]:
    parts = {
        "weight_packed": PartSig("I32", (spec.n, spec.k * spec.bits // 32)),
        "weight_scale": PartSig("F16", (spec.n, spec.num_groups)),
        "weight_shape": PartSig("I64", (2,)),
    }
    if not spec.symmetric:
        parts["weight_zero_point"] = PartSig("I32", (spec.n * spec.bits // 32, spec.num_groups))
    return {**parts, **changes}


def awq(spec: MatrixSpec) -> dict[str, PartSig]:
    n, k, groups = spec.n, spec.k, spec.num_groups
    return {
        "qweight": PartSig("I32", (k, n // 8)),
        "qzeros": PartSig("I32", (groups, n // 8)),
        "scales": PartSig("F16", (groups, n)),
    }


def found(
    sigs: dict[str, PartSig], spec: MatrixSpec, stored: str = "gptq", *, any_order: bool = False, **more: Any
) -> StoredProjection | None:
    return stored_projection(sigs, Described(scheme(stored, spec, **more), spec), any_order=any_order)


def reader(sigs: dict[str, PartSig], spec: MatrixSpec, stored: str = "gptq", **more: Any) -> StoredProjection:
    one = found(sigs, spec, stored, **more)
    assert one is not None
    return one


@pytest.mark.parametrize(
    ("sigs", "spec", "stored", "fits"),
    [
        (gptq(), INT4, "gptq", True),
        (gptq(), replace(INT4, act_order=True), "gptq", False),
        (gptq(g_idx=PartSig("I64", (64,))), INT4, "gptq", False),
        (gptq(g_idx=None), INT4, "gptq", True),
        (gptq(qzeros=None), INT4, "gptq", True),
        (gptq(qzeros=None), ASYMMETRIC, "gptq", False),
        (gptq(qzeros=PartSig("I64", (2, 2))), ASYMMETRIC, "gptq", False),
        (gptq(scales=None), INT4, "gptq", False),
        (gptq(scales=PartSig("F16", (3, 16))), INT4, "gptq", False),
        (gptq(scales=PartSig("F16", (1, 16))), INT4, "gptq", False),
        (gptq(other=PartSig("F16", (1,))), INT4, "gptq", False),
        (gptq(bias=PartSig("F16", (16,))), replace(INT4, bias_dtype="f16"), "gptq", True),
        (gptq(replace(INT4, n=12)), replace(INT4, n=12), "gptq", False),  # a word of zero points has 8
        (gptq(replace(INT4, n=12), qzeros=None), replace(INT4, n=12), "gptq", True),
        (gptq(replace(INT4, k=60)), replace(INT4, k=60), "gptq", False),
        (gptq(replace(INT4, k=68)), replace(INT4, k=68), "gptq", False),
        (gptq(replace(INT4, k=72)), replace(INT4, k=72), "gptq", True),
        (gptq(replace(INT4, element="int8")), replace(INT4, element="int8"), "gptq", True),
        (gptq(replace(INT4, element="int2")), replace(INT4, element="int2"), "gptq", False),
        (ct_pack(), INT4, "ct-pack", True),
        (ct_pack(weight_shape=PartSig("I32", (2,))), INT4, "ct-pack", True),
        (ct_pack(weight_shape=PartSig("I64", (3,))), INT4, "ct-pack", False),
        (ct_pack(weight_shape=PartSig("F32", (2,))), INT4, "ct-pack", False),
        (ct_pack(ASYMMETRIC), ASYMMETRIC, "ct-pack", True),
        (awq(ASYMMETRIC), ASYMMETRIC, "awq", True),
        (awq(replace(ASYMMETRIC, element="int8")), replace(ASYMMETRIC, element="int8"), "awq", False),
    ],
)
def test_headers_that_the_fast_path_reads(sigs: dict[str, PartSig], spec: MatrixSpec, stored: str, fits: bool) -> None:
    assert (found(sigs, spec, stored) is not None) == fits


def test_columns_in_activation_order_are_read_where_that_is_wanted() -> None:
    ordered = replace(INT4, act_order=True)
    assert found(gptq(), ordered, any_order=True) is not None
    assert found(gptq(), ordered) is None


def test_signed_codes_of_eight_bits() -> None:
    spec = replace(INT4, element="int8", group_size=64)
    sigs = {"weight": PartSig("I8", (16, 64)), "weight_scale": PartSig("F16", (16, 1))}
    one = reader(sigs, spec, "ct-int8", granularity="channel")
    stored = {"weight": np.arange(16 * 64, dtype=np.uint8), "weight_scale": np.zeros(32, np.uint8)}
    fields = one.read(stored, np.zeros(one.scratch_bytes, np.uint8))
    assert fields is not None
    assert np.array_equal(fields["codes"].view(np.uint8).reshape(-1), stored["weight"] ^ 0x80)


def filled(one: StoredProjection, seed: int = 0) -> dict[str, np.ndarray]:
    """Random codes and zero points, scales between 1 and 2, and the shape and index that the spec says."""
    draw, spec = np.random.default_rng(seed), one.spec
    made: dict[str, np.ndarray] = {}
    for name, sig in one.sigs.items():
        size = math.prod(sig.shape) * BYTES[sig.dtype]
        made[name] = draw.integers(0, 0x77, size, dtype=np.uint8)
    for name, role in ((name, role) for role, name in one.names.items()):
        if role == "scale":
            made[name] = bits_of(1 + draw.random(math.prod(one.sigs[name].shape), np.float32), spec.scale_dtype).view(
                np.uint8
            )
        elif role == "shape":
            width = np.int64 if one.sigs[name].dtype == "I64" else np.int32
            made[name] = np.array([spec.n, spec.k], width).view(np.uint8)
        elif role == "index":
            index = np.arange(spec.k, dtype=np.int32) // spec.group_size
            made[name] = (draw.permutation(index) if spec.act_order else index).view(np.uint8)
        elif role == "scale2":
            made[name] = np.array([0.25], np.float32).view(np.uint8)
        elif role == "zeros" and spec.symmetric:
            word = (0x77777777 if one.scheme.zero_point == "stored-minus-one" else 0x88888888) & 0xFFFFFFFF
            made[name] = np.full(len(made[name]) // 4, word, np.uint32).view(np.uint8)
    return made


NVFP4 = MatrixSpec("down", 16, 64, "e2m1", 16, "e4m3")
FP8 = MatrixSpec("down", 20, 64, "e4m3", 64, "f32")

CASES: dict[str, StoredProjection] = {
    "gptq": reader(gptq(), INT4, zero_point="stored-minus-one"),
    "gptq_v2": reader(gptq(), INT4, zero_point="stored"),
    "gptq asymmetric": reader(gptq(), ASYMMETRIC, zero_point="stored-minus-one"),
    "gptq_v2 asymmetric": reader(gptq(), ASYMMETRIC, zero_point="stored"),
    "gptq 8 bits": reader(
        gptq(replace(ASYMMETRIC, element="int8")), replace(ASYMMETRIC, element="int8"), zero_point="stored-minus-one"
    ),
    "gptq ordered": reader(
        gptq(bias=PartSig("BF16", (16,))), replace(ASYMMETRIC, act_order=True, bias_dtype="bf16"), any_order=True
    ),
    "ct-pack": reader(ct_pack(), INT4, "ct-pack"),
    "ct-pack asymmetric": reader(
        ct_pack(ASYMMETRIC, weight_shape=PartSig("I32", (2,))), ASYMMETRIC, "ct-pack", zero_point="stored"
    ),
    "awq": reader(awq(ASYMMETRIC), ASYMMETRIC, "awq", zero_point="stored"),
    "nvfp4": reader(
        {
            "weight_packed": PartSig("U8", (16, 32)),
            "weight_scale": PartSig("F8_E4M3", (16, 4)),
            "weight_global_scale": PartSig("F32", (1,)),
        },
        replace(NVFP4, scale_dtype="e4m3"), "nvfp4",
    ),
    "fp8 blocks": reader(
        {"weight": PartSig("F8_E4M3", (20, 64)), "weight_scale_inv": PartSig("F32", (3, 1))},
        FP8, "fp8-block", granularity="block", rows=8,
    ),
    "fp8 tensor": reader(
        {"weight": PartSig("F8_E4M3", (20, 64)), "weight_scale": PartSig("F32", ())}, FP8, "fp8", granularity="tensor"
    ),
}  # fmt: skip


def stored_of(one: StoredProjection, seed: int = 0) -> dict[str, np.ndarray]:
    made = filled(one, seed)
    if one.spec.scale_dtype == "e4m3":
        made[one.names["scale"]] = np.random.default_rng(seed).integers(0x30, 0x60, 64, dtype=np.uint8)
    return made


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_can_be_written_again(name: str) -> None:
    """Matrices lie in regions of their own: what one of them holds survives reading the others."""
    one = CASES[name]
    made, scratch = stored_of(one), np.full(one.scratch_bytes, 0x5A, np.uint8)
    fields = one.read(made, scratch)
    assert fields is not None
    spec = one.spec
    assert fields["codes"].shape == (spec.n, spec.k * spec.bits // 32)
    assert fields["scales"].shape == (spec.n, spec.num_groups)
    assert ("zeros" in fields) == (not spec.symmetric)
    assert ("global_scale" in fields) == (spec.scale_dtype == "e4m3")
    assert ("index" in fields) == spec.act_order
    assert ("bias" in fields) == (spec.bias_dtype is not None)
    assert one.kept(made, scratch) == ()
    copies = {field: matrix.copy() for field, matrix in fields.items()}
    again = {part: np.full_like(data, 0xA5) for part, data in made.items()}
    scratch.fill(0xC3)
    blank = one.blank(again, scratch)
    assert blank.keys() == fields.keys()
    for field, matrix in copies.items():
        assert (blank[field].dtype, blank[field].shape) == (matrix.dtype, matrix.shape)
        blank[field][:] = matrix
    for field, matrix in copies.items():
        assert np.array_equal(blank[field], matrix), field
    one.finish(again, scratch)
    for part, data in made.items():
        assert np.array_equal(again[part], data), part


def read(one: StoredProjection, made: dict[str, np.ndarray]) -> Any:
    return one.read(made, np.zeros(one.scratch_bytes, np.uint8))


@pytest.mark.parametrize(
    ("name", "part", "words", "expected"),
    [
        ("gptq asymmetric", "qzeros", 0x00000000, 1),
        ("gptq asymmetric", "qzeros", 0xFF000000, "read"),
        ("gptq asymmetric", "qzeros", 0xFFF00000, None),  # zero points of 0 that borrowed from each other
        ("gptq asymmetric", "qzeros", 0x7FF00000, "read"),
        ("gptq_v2 asymmetric", "qzeros", 0xFFF00000, "read"),
        ("gptq_v2 asymmetric", "qzeros", 0x22222222, 2),
        ("gptq 8 bits", "qzeros", 0xFFFFFF00, None),
        ("gptq 8 bits", "qzeros", 0xFFFF0000, "read"),
        ("gptq 8 bits", "qzeros", 0x05050505, 6),
        ("gptq", "qzeros", 0x77777777, "read"),
        ("gptq", "qzeros", 0x88888888, None),
        ("gptq_v2", "qzeros", 0x88888888, "read"),
        ("gptq_v2", "qzeros", 0x77777777, None),
        ("gptq_v2", "qzeros", 0x88888889, None),
    ],
)
def test_zero_points(name: str, part: str, words: int, expected: Any) -> None:
    one = CASES[name]
    made = stored_of(one)
    made[part] = np.full(len(made[part]) // 4, words, np.uint32).view(np.uint8)
    fields = read(one, made)
    assert (fields is None) == (expected is None)
    if isinstance(expected, int):
        assert np.all(fields["zeros"] == expected)
    if fields is not None and one.spec.symmetric:
        assert "zeros" not in fields


@pytest.mark.parametrize("name", ["gptq asymmetric", "gptq_v2 asymmetric", "awq", "ct-pack asymmetric"])
def test_each_zero_point_has_its_place(name: str) -> None:
    one = CASES[name]
    made = stored_of(one)
    part = one.names["zeros"]
    digits = (np.arange(32) % 7 + 1).astype(np.uint8).reshape(2, 16)  # [groups, N]
    minus = one.scheme.zero_point == "stored-minus-one"
    packed = np.zeros((2, 2), np.uint32)
    order = (0, 4, 1, 5, 2, 6, 3, 7) if name == "awq" else range(8)
    for group in range(2):
        for column in range(16):
            packed[group, column // 8] |= np.uint32(digits[group, column] - minus) << np.uint32(4 * order[column % 8])
    made[part] = np.ascontiguousarray(packed.T if "ct" in name else packed).view(np.uint8).reshape(-1)
    assert np.array_equal(read(one, made)["zeros"], digits.T)


def test_an_index_of_zeros_is_a_placeholder() -> None:
    """It is read, and kept for the way back, where columns would have another index."""
    one = CASES["gptq"]
    made, scratch = stored_of(one), np.zeros(one.scratch_bytes, np.uint8)
    made["g_idx"] = np.zeros(64 * 4, np.uint8)
    assert one.read(made, scratch) is not None
    assert one.kept(made, scratch) == ("g_idx",)
    single = reader(gptq(replace(INT4, group_size=64)), replace(INT4, group_size=64), zero_point="stored-minus-one")
    made = stored_of(single)
    assert not made["g_idx"].any()
    assert single.kept(made, scratch) == ()
    made = stored_of(one)
    made["g_idx"].view(np.int32)[5] = 1
    assert read(one, made) is None
    ordered = CASES["gptq ordered"]
    assert ordered.kept(stored_of(ordered), np.zeros(ordered.scratch_bytes, np.uint8)) == ()


@pytest.mark.parametrize(("place", "group"), [(0, -1), (0, 2), (3, 0)])
def test_groups_that_are_not_full(place: int, group: int) -> None:
    """Indices outside the groups, and groups with another number of columns than the others."""
    one = CASES["gptq ordered"]
    made = stored_of(one)
    assert read(one, made) is not None
    index = made["g_idx"].view(np.int32)
    if group == 0:
        place = int(np.flatnonzero(index == 1)[0])
    index[place] = group
    assert read(one, made) is None


@pytest.mark.parametrize("place", [0, 1])
def test_a_stored_shape_that_is_another(place: int) -> None:
    made = stored_of(CASES["ct-pack"])
    made["weight_shape"].view(np.int64)[place] += 1
    assert read(CASES["ct-pack"], made) is None


@pytest.mark.parametrize("name", CASES)
def test_scales_that_are_no_numbers(name: str) -> None:
    one = CASES[name]
    made = stored_of(one)
    scales = made[one.names["scale"]]
    pattern = EXPONENT[one.spec.scale_dtype]
    scales.view(WIDTH[one.spec.scale_dtype])[-1] = pattern
    assert read(one, made) is None
    scales.view(WIDTH[one.spec.scale_dtype])[-1] = pattern - 1
    assert read(one, made) is not None


def test_rows_that_share_a_scale() -> None:
    """20 rows in blocks of 8: the last block has 4."""
    blocks, tensor = CASES["fp8 blocks"], CASES["fp8 tensor"]
    assert (blocks.scale_rows, tensor.scale_rows, CASES["gptq"].scale_rows) == (8, 20, 1)
    made = stored_of(blocks)
    scales = made["weight_scale_inv"].view(np.uint32)
    assert np.array_equal(read(blocks, made)["scales"][:, 0], scales.repeat(8)[:20])
    made = stored_of(tensor)
    assert np.array_equal(read(tensor, made)["scales"][:, 0], made["weight_scale"].view(np.uint32).repeat(20))
    odd = replace(FP8, n=17)
    one = reader(
        {"weight": PartSig("F8_E4M3", (17, 64)), "weight_scale_inv": PartSig("F32", (3, 1))},
        odd, "fp8-block", granularity="block", rows=8,
    )  # fmt: skip
    made = stored_of(one)
    assert np.array_equal(read(one, made)["scales"][:, 0], made["weight_scale_inv"].view(np.uint32).repeat(8)[:17])
    even = replace(FP8, n=16)
    one = reader(
        {"weight": PartSig("F8_E4M3", (16, 64)), "weight_scale_inv": PartSig("F32", (2, 1))},
        even, "fp8-block", granularity="block", rows=8,
    )  # fmt: skip
    made = stored_of(one)
    assert np.array_equal(read(one, made)["scales"][:, 0], made["weight_scale_inv"].view(np.uint32).repeat(8))


@pytest.mark.parametrize(
    ("shape", "granularity", "rows", "repeated", "fits"),
    [
        ((20, 1), "channel", 1, False, True),
        ((20,), "channel", 1, False, True),
        ((), "channel", 1, False, False),
        ((), "tensor", 20, True, True),
        ((), "tensor", 20, False, False),
        ((1,), "tensor", 20, True, True),
        ((2,), "tensor", 20, True, False),
        ((3, 1), "block", 8, True, True),
        ((2, 1), "block", 8, True, False),
        ((3, 1), "block", 8, False, False),
        ((19, 1), "channel", 1, True, False),
    ],
)
def test_shapes_of_scales(
    shape: tuple[int, ...], granularity: Granularity, rows: int, repeated: bool, fits: bool
) -> None:
    one = StoredScales(PartSig("F32", shape), FP8, scheme("fp8", FP8, granularity, rows), False, repeated)
    assert one.fits() == fits
    assert one.scratch_bytes == (Region(0, 20 * 4).stop if one.rows > 1 else 0)
    assert not replace(one, spec=replace(FP8, scale_dtype="f64")).fits()


def number(value: float) -> np.ndarray:
    return np.array([value], np.float32).view(np.uint8)


def test_scales_of_the_second_level() -> None:
    scratch = np.zeros(64, np.uint8)
    plain, divisor = GlobalScale(PartSig("F32", (1,)), False, 3), GlobalScale(PartSig("F32", ()), True, 3)
    assert [one.fits() for one in (plain, divisor)] == [True, True]
    assert not GlobalScale(PartSig("F32", (2,)), False, 3).fits()
    assert not GlobalScale(PartSig("BF16", (1,)), False, 3).fits()
    assert plain.scratch_bytes == 64
    read = plain.read(number(0.25), scratch)
    assert read is not None
    assert read.view(np.float32).tolist() == [[0.25]] * 3
    inverse = divisor.read(number(4.0), scratch)
    assert inverse is not None
    assert inverse.view(np.float32).tolist() == [[0.25]] * 3
    for value in (float("inf"), float("nan")):
        assert plain.read(number(value), scratch) is None
    assert plain.read(number(-1.0), scratch) is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for value in (0.0, -4.0, float("nan"), 1e-45):
            assert divisor.read(number(value), scratch) is None
    assert divisor.read(number(4.0), scratch) is not None
    assert not divisor.is_lost(number(4.0), scratch)
    assert divisor.is_lost(number(5.0), scratch)
    again = np.zeros(4, np.uint8)
    divisor.finish(again, scratch)
    assert np.array_equal(again, number(4.0))
    plain.finish(again, scratch)
    assert np.array_equal(again, number(0.25))


def test_a_divisor_that_would_be_lost_is_kept() -> None:
    """Not every float32 number is what the reciprocal of its reciprocal gives back."""
    one = CASES["nvfp4"]
    kept = set()
    for step in range(200):
        made, scratch = stored_of(one), np.zeros(one.scratch_bytes, np.uint8)
        made["weight_global_scale"] = number(2 - step * 2**-23)
        assert one.read(made, scratch) is not None
        kept.add(one.kept(made, scratch))
    assert kept == {(), ("weight_global_scale",)}


def test_regions_do_not_overlap() -> None:
    made = regions_of({"a": 1, "b": 64, "c": 65, "d": 0}, 128)
    assert [(one.start, one.stop) for one in made.values()] == [(128, 192), (192, 256), (256, 384), (384, 384)]
    scratch = np.arange(128, dtype=np.uint8)
    assert Region(64, 8).array(scratch, (2, 2), "u2").tolist() == [[0x4140, 0x4342], [0x4544, 0x4746]]


def test_one_global_scale_is_shared() -> None:
    def fields(*values: float) -> dict[str, np.ndarray]:
        return {"global_scale": np.array([[value] for value in values], np.float32).view(np.uint32)}

    shared = SharedScale()
    assert shared.exact([fields(0.5, 0.5), fields(0.5)])
    assert not shared.exact([fields(0.5, 0.25), fields(0.5)])
    assert not shared.exact([fields(0.5), fields(0.25)])
    packed = {"global_scale": number(0.0).copy()}
    shared.fill([fields(0.5, 0.5)], packed)
    assert np.array_equal(packed["global_scale"], number(0.5))
    assert shared.holds([fields(0.5, 0.5), fields(0.5)], packed)
    assert not shared.holds([fields(0.5, 0.5), fields(0.25)], packed)
    assert not shared.holds([fields(0.5, 0.25)], packed)
    blank = [fields(0.0, 0.0), fields(0.0)]
    shared.rebuild(packed, blank)
    assert all(np.all(one["global_scale"].view(np.float32) == 0.5) for one in blank)
    assert shared.with_calibration(3.0) is shared


@pytest.mark.parametrize(
    ("factor", "largest"),
    [(1.0, 448.0), (2.0, 224.0), (2.0**20, 448.0 / 2**20), (2.0**21, None), (0.5, None), (3.0, None), (0.0, None)],
)
def test_factors_that_some_scale_gives(factor: float, largest: float | None) -> None:
    assert stored_largest({"scale_factor": number(factor)}) == largest
    assert stored_largest({"scale_factor": number(float("inf"))}) is None
    assert stored_largest({"scale_factor": number(float("nan"))}) is None
