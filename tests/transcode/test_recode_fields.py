"""What each recoder of the fast path fills, proves and measures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from moeq.matrix import MatrixSpec

pytest.importorskip("numba")

from moeq.layouts.float_bits import bits_of, e4m3_values, numbers_of
from moeq.layouts.loops.blocks import numbers as block_numbers
from moeq.transcode.recode_fields import (
    CopyNvfp4,
    CopyRecoder,
    Mxfp4ToBfloat16,
    Mxfp4ToFp8Blocks,
    Mxfp4ToNvfp4,
    NumberRecoder,
    ToFloats,
    ToFp8Blocks,
    _strips,
    coded,
    same_bits,
)

Matrix = dict[str, np.ndarray]


def integers(**changes: Any) -> Matrix:
    """Fields of 2 rows: 16 columns of 4 bits in 2 groups, which are in activation order."""
    found: Matrix = {
        "codes": np.arange(4, dtype=np.uint32).reshape(2, 2) * 0x1234567,
        "scales": np.array([[1, 2], [3, 4]], np.uint16),
        "zeros": np.array([[5, 6], [7, 8]], np.uint8),
        "index": np.arange(16, dtype=np.int32) % 2,
    }
    return {**found, **changes}


def blank(fields: Matrix, **shapes: tuple[int, ...]) -> Matrix:
    return {name: np.zeros(shapes.get(name, one.shape), one.dtype) for name, one in fields.items()}


def damaged(fields: Matrix, name: str, change: Callable[[np.ndarray], Any] = lambda field: field ^ 1) -> Matrix:
    return {**fields, name: change(fields[name])}


def test_codes_and_groups_are_copied() -> None:
    source, recoder = integers(), CopyRecoder(1, nonzero=False)
    made = blank(source)
    recoder.fill([source], [made])
    assert all(np.array_equal(made[name], source[name]) for name in source)
    assert recoder.changes([source], [made]) == [None]
    for name in source:
        assert recoder.changes([source], [damaged(made, name)]) is None
        assert recoder.holds_one(source, {key: one for key, one in made.items() if key != name}) is False
        assert recoder.holds_one({key: one for key, one in source.items() if key != name}, made) is False
    fewer = {name: field for name, field in blank(source).items() if name != "zeros"}
    recoder.fill([source], [fewer])  # which is proven by no comparison
    assert np.array_equal(fewer["codes"], source["codes"])
    assert not recoder.holds([source, source], [made, damaged(made, "codes")])
    assert recoder.changes([source, source], [made, made]) == [None, None]


@pytest.mark.parametrize(("times", "columns"), [(2, [0, 0, 1]), (3, [0, 0, 0, 1, 1])])
def test_groups_are_repeated(times: int, columns: list[int]) -> None:
    """The last group may be shorter."""
    source, recoder = integers(), CopyRecoder(times, nonzero=False)
    made = blank(source, scales=(2, len(columns)), zeros=(2, len(columns)))
    recoder.fill([source], [made])
    for name in ("scales", "zeros"):
        assert np.array_equal(made[name], source[name][:, columns])
    assert np.array_equal(made["codes"], source["codes"])
    assert recoder.holds([source], [made])
    for name in source:
        assert not recoder.holds([source], [damaged(made, name)])
    assert not recoder.holds([source], [damaged(made, "scales", lambda field: field.astype(np.uint32))])
    assert not CopyRecoder(1, nonzero=False).holds([source], [made])


def test_one_scale_of_a_row_is_repeated_over_all_blocks() -> None:
    source = {"codes": np.arange(8, dtype=np.uint32).reshape(2, 4), "scales": np.array([[7], [9]], np.uint16)}
    recoder, made = CopyRecoder(0, nonzero=False), blank(source, scales=(2, 3))
    recoder.fill([source], [made])
    assert made["scales"].tolist() == [[7, 7, 7], [9, 9, 9]]
    assert recoder.holds([source], [made])
    made["scales"][1, 2] = 7
    assert not recoder.holds([source], [made])


def test_zero_points_of_0_are_left_to_the_reference_path() -> None:
    zero = integers(zeros=np.array([[5, 0], [7, 8]], np.uint8))
    assert CopyRecoder(1, nonzero=True).holds_one(zero, zero) is False
    assert CopyRecoder(1, nonzero=False).holds_one(zero, zero)
    assert CopyRecoder(1, nonzero=True).holds_one(integers(), integers())
    none = {name: field for name, field in integers().items() if name != "zeros"}
    assert CopyRecoder(1, nonzero=True).holds_one(none, none)


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("times", [1, 2])
def test_scales_are_widened(dtype: str, times: int) -> None:
    """The proof narrows the scales again; a float32 number that does not fit is no scale of the source."""
    numbers = np.array([[0.5, 1.5], [-3.0, 0.0]], np.float32)
    source = integers(scales=bits_of(numbers, dtype))
    recoder = CopyRecoder(times, nonzero=False, widened=dtype)
    made = blank(source, scales=(2, 2 * times), zeros=(2, 2 * times))
    made["scales"] = np.zeros((2, 2 * times), np.uint32)
    recoder.fill([source], [made])
    assert np.array_equal(made["scales"].view(np.float32), numbers.repeat(times, axis=1))
    assert recoder.holds([source], [made])
    made["scales"][1, 1] += 1
    assert not recoder.holds([source], [made])


def test_what_is_recoded_from_mxfp4_is_proven() -> None:
    """Every bit counts, in the second of two projections as well."""
    source = {"codes": np.full((2, 8), 0x22222222, np.uint32), "scales": np.array([[120, 121]] * 2, np.uint8)}
    targets: list[tuple[Any, Matrix]] = [
        (Mxfp4ToFp8Blocks(), {"codes": np.zeros((2, 64), np.uint8), "scales": np.zeros((2, 1), np.uint32)}),
        (Mxfp4ToBfloat16(), {"values": np.zeros((2, 64), np.uint16)}),
        (
            Mxfp4ToNvfp4(),
            {
                "codes": np.zeros((2, 8), np.uint32),
                "scales": np.zeros((2, 4), np.uint8),
                "global_scale": np.zeros((2, 1), np.uint32),
            },
        ),
    ]
    for recoder, shapes in targets:
        made = [blank(shapes), blank(shapes)]
        recoder.fill([source, source], made)
        assert recoder.changes([source, source], made) == [None, None]
        for name in shapes:
            for wrong in ([made[0], damaged(made[1], name)], [damaged(made[0], name), made[1]]):
                assert recoder.changes([source, source], wrong) is None


@pytest.mark.parametrize(
    ("exponents", "codes", "power"),
    [((127, 120), 0x22222222, -8), ((120, 130), 0x22222222, -5), ((0, 0), 0x22222222, -135), ((130, 130), 0, -8)],
)
def test_the_largest_scale_in_use_becomes_the_largest_power(exponents: tuple[int, int], codes: int, power: int) -> None:
    """A matrix of zeros uses none, whatever its scales say; the other one decides for both."""
    source = {"codes": np.full((1, 8), codes, np.uint32), "scales": np.array([exponents], np.uint8)}
    empty = {"codes": np.full((1, 8), 0x88888888, np.uint32), "scales": np.array([[200, 200]], np.uint8)}
    made = [
        {"codes": np.zeros((1, 8), np.uint32), "scales": np.zeros((1, 4), np.uint8),
         "global_scale": np.zeros((1, 1), np.uint32)} for _ in range(2)
    ]  # fmt: skip
    Mxfp4ToNvfp4().fill([source, empty], made)
    assert [float(one["global_scale"].view(np.float32)[0, 0]) for one in made] == [2.0**power] * 2
    if codes:
        largest = max(exponents) - 127 - power
        assert e4m3_values()[made[0]["scales"]].max() == 2.0**largest == 256.0


def test_a_number_that_engines_share_is_one() -> None:
    """Values may be right under another global scale for each projection, and engines keep one of them."""
    source = {"codes": np.full((1, 4), 0x22222222, np.uint32), "scales": np.array([[120]], np.uint8)}
    made = {
        "codes": source["codes"],
        "scales": np.array([[0x38, 0x38]], np.uint8),
        "global_scale": np.array([[2.0**-7]], np.float32).view(np.uint32),
    }
    half = {
        **made,
        "scales": np.array([[0x40, 0x40]], np.uint8),
        "global_scale": np.array([[2.0**-8]], np.float32).view(np.uint32),
    }
    recoder = Mxfp4ToNvfp4()
    for one in (made, half):
        assert recoder.holds([source, source], [one, one])
    assert not recoder.holds([source, source], [made, half])
    rows = {name: np.concatenate([made[name], half[name]]) for name in made}
    assert not recoder.holds([{name: field.repeat(2, axis=0) for name, field in source.items()}], [rows])


def nvfp4(shared: float, scale: int = 0x38) -> Matrix:
    """Two rows of 32 numbers, 0 to 6 twice, in groups of 16."""
    codes = np.full((2, 4), 0x76543210, np.uint32)
    shares = np.full((2, 1), shared, np.float32).view(np.uint32)
    return {"codes": codes, "scales": np.full((2, 2), scale, np.uint8), "global_scale": shares}


def test_a_global_scale_that_changes_is_measured() -> None:
    spec = MatrixSpec("w2", 2, 32, "e2m1", 16, "e4m3")
    recoder, source = CopyNvfp4(1, nonzero=False, spec=spec), nvfp4(0.5)
    assert recoder.changes([source, source], [nvfp4(0.5), nvfp4(0.5)]) == [None, None]
    found = recoder.changes([source, source], [nvfp4(0.5), nvfp4(0.25)])
    assert found is not None
    same, other = found
    assert same is not None
    assert other is not None
    assert (same.numbers, other.numbers, other.blocks, other.largest) == (0, 2 * 28, 4, 1.5)
    assert (other.first, other.before, other.after) == ((0, 1), 0.25, 0.125)
    assert recoder.changes([source, source], [nvfp4(0.5), nvfp4(0.25, scale=0x7F)]) is None


E4M3 = MatrixSpec("w2", 200, 256, "e4m3", 256, "f32")


def fp8(scales: np.ndarray, spec: MatrixSpec = E4M3) -> Matrix:
    draw = np.random.default_rng(0)
    codes = draw.integers(0x30, 0x7F, (spec.n, spec.k), dtype=np.uint8)
    codes[:, ::BLOCK] = 0x7E
    return {"codes": codes.view(np.uint32), "scales": bits_of(scales.astype(np.float32), spec.scale_dtype)}


BLOCK = 128


@pytest.mark.parametrize(
    ("before", "scales", "after", "kept"),
    [
        ({}, np.full((200, 1), 0.3), "f32", True),
        ({}, np.full((200, 1), 0.3), "bf16", False),  # no bfloat16 number
        ({}, np.full((200, 1), 0.5), "e8m0", True),
        ({}, np.full((200, 1), 0.3), "e8m0", False),
        ({"group_size": 128}, np.tile([[0.3, 0.7]], (200, 1)), "f32", True),
        ({"group_size": 64}, np.full((200, 4), 0.3), "f32", False),
        ({"group_size": 192}, np.tile([[0.3, 0.7]], (200, 1)), "f32", False),
        ({"k": 320, "group_size": 256}, np.tile([[0.3, 0.7]], (200, 1)), "f32", True),
        ({"k": 64, "group_size": 64}, np.full((200, 1), 0.3), "f32", True),
        ({}, np.array([[0.3]] * 128 + [[0.7]] * 72), "f32", True),
        ({}, np.array([[0.3]] * 129 + [[0.7]] * 71), "f32", False),
    ],
)
def test_fp8_codes_stay_where_every_block_has_one_scale(
    before: dict[str, Any], scales: np.ndarray, after: str, kept: bool
) -> None:
    old = replace(E4M3, **before)
    new = replace(old, group_size=min(BLOCK, old.k), scale_dtype=after)
    source = fp8(scales, old)
    wide = np.uint32 if after == "f32" else np.uint16 if after == "bf16" else np.uint8
    made = {"codes": np.zeros_like(source["codes"]), "scales": np.zeros((200, new.num_groups), wide)}
    recoder = ToFp8Blocks(old, new)
    recoder.fill([source], [made])
    found = scales.repeat(-(-old.group_size // BLOCK), axis=1)[:, : new.num_groups].astype(np.float32)
    written = numbers_of(made["scales"], after)
    assert np.array_equal(made["codes"], source["codes"]) == kept
    assert np.array_equal(written, found) == kept
    assert recoder.holds([source], [made]) == kept
    if not kept:  # the largest number of a block of 0.3 * 448 lies under 2**-1, that of 0.7 * 448 under 2**0
        assert set(np.log2(np.unique(written)).tolist()) <= {-1.0, 0.0}


def test_rounded_values_are_measured() -> None:
    """A projection is proven if no number changed; a value that is not finite leaves all to the reference path."""
    spec = replace(E4M3, n=2, k=64, group_size=64)
    source = fp8(np.array([[1.0], [0.5]]), spec)
    recoder = ToFloats(spec, replace(spec, element="f16", scale_dtype="f32"))
    made = {"values": np.zeros((2, 64), np.uint16)}
    recoder.fill([source], [made])
    wanted = e4m3_values()[source["codes"].view(np.uint8)] * [[1.0], [0.5]]
    assert np.array_equal(made["values"].view(np.float16), wanted)
    assert recoder.holds([source], [made]) is True
    found = recoder.changes([source, source], [made, damaged(made, "values")])
    assert found is not None
    assert [one and one.numbers for one in found] == [0, 128]
    assert [one and one.blocks for one in found] == [0, 2]
    wrong = damaged(made, "values")
    assert recoder.holds([source], [wrong]) is False
    infinite = {"values": np.full((2, 64), 0x7C00, np.uint16)}
    assert recoder.changes([source, source], [made, infinite]) is None
    assert recoder.holds([source], [infinite]) is False
    bfloat = ToFloats(spec, replace(spec, element="bf16", scale_dtype="f32"))
    bfloat.fill([source], [made])
    assert np.array_equal(numbers_of(made["values"], "bf16"), wanted)


@pytest.mark.parametrize(("dtype", "width"), [("f16", np.uint16), ("bf16", np.uint16), ("f32", np.uint32)])
def test_floats_come_strip_by_strip(dtype: str, width: type) -> None:
    spec = MatrixSpec("w2", 130, 8, dtype, 8, "f32")
    numbers = np.arange(130 * 8, dtype=np.float32).reshape(130, 8) % 64 - 20
    stored = bits_of(numbers, dtype)
    assert stored.dtype == width
    for name in ("values", "blocks"):
        found = [(rows, strip.copy()) for rows, strip in _strips({name: stored}, spec)]
        assert [rows for rows, _ in found] == [slice(0, 128), slice(128, 130)]
        assert all(np.array_equal(strip, numbers[rows]) for rows, strip in found)


def test_blocks_and_codes_come_strip_by_strip() -> None:
    blocks = np.arange(3 * 20, dtype=np.uint8).reshape(3, 20) % 60  # q4_1: scale and minimum, then 16 bytes
    wanted = np.zeros((3, 32), np.float32)
    block_numbers("q4_1", blocks, wanted)
    ((rows, strip),) = _strips({"blocks": blocks}, MatrixSpec("w2", 3, 32, "f32", 32, "f32"), "q4_1")
    assert rows == slice(0, 3)
    assert np.array_equal(strip, wanted)
    spec = replace(E4M3, n=129)
    source = fp8(np.arange(1.0, 130.0)[:, None], spec)
    found = np.concatenate([strip.copy() for _, strip in _strips(source, spec)])
    values = e4m3_values()[source["codes"].view(np.uint8)]
    assert np.array_equal(found, values * np.arange(1.0, 130.0, dtype=np.float32)[:, None])


def test_numbers_become_blocks_strip_by_strip() -> None:
    """Each of 129 rows and two blocks of columns; a number that is not finite is left to the comparison."""
    before = MatrixSpec("w2", 129, 256, "f32", 256, "f32")
    after = MatrixSpec("w2", 129, 256, "e4m3", 128, "bf16")
    numbers = np.tile(np.array([1.0, 2.0, 4.0, 448.0], np.float32), (129, 64))
    numbers[:, 128:] *= 2
    numbers[128] *= 4
    source = {"values": numbers.view(np.uint32)}
    made = {"codes": np.zeros((129, 64), np.uint32), "scales": np.zeros((129, 2), np.uint16)}
    recoder = NumberRecoder(before, after, "f32")
    recoder.fill([source], [made])
    assert numbers_of(made["scales"], "bf16").tolist() == [[1.0, 2.0]] * 128 + [[4.0, 8.0]]
    assert recoder.holds([source], [made])
    found = recoder.changes([source], [damaged(made, "scales", lambda field: field + 0x80)])
    assert found is not None
    assert found[0] is not None
    assert (found[0].numbers, found[0].blocks) == (129 * 256, 4)
    changed = numbers.copy()
    changed[128, 200] += 1000
    (one,) = recoder.changes([{"values": changed.view(np.uint32)}], [made]) or [None]
    assert one is not None
    assert (one.numbers, one.blocks, one.first, one.before) == (1, 1, (128, 200), changed[128, 200])
    changed[0, 0] = np.inf
    infinite = {"values": changed.view(np.uint32)}
    recoder.fill([infinite], [made])
    assert recoder.changes([infinite], [made]) is None


@pytest.mark.parametrize(
    ("after", "block"),
    [
        ({"element": "bf16"}, (1, 32)),
        ({"element": "e4m3", "group_size": 128}, (128, 128)),
        ({"element": "int8", "group_size": 64}, (1, 64)),
        ({"element": "int4", "group_size": 64}, (1, 64)),
    ],
)
def test_blocks_of_the_report(after: dict[str, Any], block: tuple[int, int]) -> None:
    """Floats have no blocks: those of the source are counted."""
    before = MatrixSpec("w2", 128, 256, "f16", 32, "f32")
    assert NumberRecoder(before, replace(before, **after), None)._block == block


def test_a_matrix_in_the_form_of_the_loops() -> None:
    """Codes that lie along N are copied once, into the fields; what is not stored follows from the spec."""
    spec = MatrixSpec("w2", 4, 16, "int4", 8, "f16")
    strided = np.arange(8, dtype=np.uint32).reshape(2, 4).T
    fields: Matrix = {"codes": strided, "scales": np.full((4, 2), 0x3C00, np.uint16)}
    found = coded(fields, spec)
    assert np.array_equal(fields["codes"], strided)
    assert fields["codes"] is found.codes
    assert fields["codes"].flags.c_contiguous
    assert (found.element, found.run) == ("int4", 8)
    assert found.scales.tolist() == [[1.0, 1.0]] * 4
    assert found.zeros.tolist() == [[8, 8]] * 4
    assert found.index.tolist() == [0] * 8 + [1] * 8
    again = coded(fields, spec)
    assert again.codes is found.codes
    index = np.arange(16, dtype=np.int32) % 2
    shared = np.array([[2.0], [3.0], [4.0], [5.0]], np.float32).view(np.uint32)
    more = coded({**fields, "index": index, "zeros": np.full((4, 2), 3, np.uint8), "global_scale": shared}, spec)
    assert (more.run, more.index.tolist()) == (1, index.tolist())
    assert more.zeros.tolist() == [[3, 3]] * 4
    assert more.scales.tolist() == [[2.0, 2.0], [3.0, 3.0], [4.0, 4.0], [5.0, 5.0]]


def test_equal_bits_whatever_their_strides() -> None:
    one = np.arange(12, dtype=np.uint16).reshape(3, 4)
    wide = np.zeros((6, 8), np.uint16)
    strided = wide[::2, ::2]
    strided[:] = one
    forms = [one, np.asfortranarray(one), strided]
    for left in forms:
        for right in forms:
            assert same_bits(left, right)
            assert not same_bits(left, one[:2])
            assert not same_bits(left, one.astype(np.uint32))
            for form in (np.asfortranarray, np.ascontiguousarray, lambda new: new.repeat(2, 0).repeat(2, 1)[::2, ::2]):
                for place in ((0, 0), (2, 3)):
                    changed = one.copy()
                    changed[place] ^= 1
                    assert not same_bits(left, form(changed))
