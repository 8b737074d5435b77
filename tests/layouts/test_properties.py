"""What must hold for every layout: exact inverses, both loops to the bytes, shapes, reused buffers, legal slices."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts.cases import LAYOUT_IDS, LOSSY_ALWAYS, specs
from layouts.matrices import block, random_matrix, raw, same

from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.layouts.fp8 import Fp8Layout
from moeq.layouts.layout import Layout
from moeq.layouts.parts import torch_dtype
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix

EXACT = [layout_id for layout_id in LAYOUT_IDS if layout_id not in LOSSY_ALWAYS]


def tame(layout: Layout, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """The matrix without values that the layout cannot hold exactly: exponents pulled into fp16's range."""
    if layout.id == "flashinfer-b12x-nvfp4/1":  # it has no global scale but 1
        return replace(matrix, global_scale=torch.ones(matrix.spec.n))
    if isinstance(layout, Fp8Layout):  # scales of a block, or of a matrix, are one number
        rows = {"block": 128, "channel": 1, "tensor": matrix.spec.n}[layout.scope]
        return replace(
            matrix, scales=matrix.scales[::rows].repeat_interleave(rows, dim=0)[: matrix.spec.n].contiguous()
        )
    if matrix.spec.scale_dtype != "e8m0":
        return matrix
    low, high = {"marlin-mxfp4-fp8act": (0, 249), "marlin-mxfp4": (0, 255), "moeq-mxfp4": (0, 188)}.get(
        layout.id.partition("/")[0].removesuffix("-interleaved"), (112, 142)
    )
    return type(matrix)(**{**vars(matrix), "scales": matrix.scales.clamp(low, high)})


def ready(layout: Layout, matrix: QuantizedMatrix) -> Layout:
    found = layout.calibrate(matrix)
    return layout if found is None else layout.with_calibration(found)


@pytest.mark.parametrize("layout_id", EXACT)
def test_unpack_is_the_inverse_of_pack_at_uneven_sizes(layout_id: str) -> None:
    layout = get_layout(layout_id)
    for rows, columns in ((1, 2), (3, 5)):
        for seed, spec in enumerate(specs(layout_id, rows=rows, columns=columns)):
            matrix = tame(layout, random_matrix(spec, seed))
            bound = ready(layout, matrix)
            assert bound.losses(matrix) == 0
            assert same(layout.unpack(bound.pack(matrix), spec), matrix), spec


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("layout_id", LAYOUT_IDS)
def test_nothing_given_is_changed(layout_id: str) -> None:
    for spec in specs(layout_id):
        layout = get_layout(layout_id, allow_lossy=True)
        matrix = tame(layout, random_matrix(spec))
        layout = ready(layout, matrix)
        before = {name: value.clone() for name, value in vars(matrix).items() if isinstance(value, torch.Tensor)}
        packed = layout.pack(matrix)
        kept = {name: tensor.clone() for name, tensor in packed.items()}
        first, second = layout.unpack(packed, spec), layout.unpack(packed, spec)
        assert same(first, second), spec
        for name, tensor in before.items():
            assert torch.equal(raw(getattr(matrix, name)), raw(tensor)), (spec, name)
        for name, tensor in kept.items():
            assert torch.equal(raw(packed[name]), raw(tensor)), (spec, name)


@pytest.mark.parametrize("layout_id", LOSSY_ALWAYS)
def test_lossy_layouts_keep_codes_and_lose_only_what_they_say(layout_id: str) -> None:
    for spec in specs(layout_id):
        matrix = random_matrix(spec)
        layout = ready(get_layout(layout_id, allow_lossy=True), matrix)
        back = layout.unpack(layout.pack(matrix), spec)
        assert torch.equal(back.codes, matrix.codes)
        assert int((back.scales != matrix.scales).sum()) == layout.losses(matrix)
        largest = float(matrix.scales.max())
        # Half a step of max / 4096, and twice the rounding of bf16 itself.
        assert float((back.scales - matrix.scales).abs().max()) <= largest * (0.5 / 4096 + 2**-7)


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("layout_id", LAYOUT_IDS)
def test_packed_tensors_are_what_the_descriptor_says(layout_id: str) -> None:
    layout = get_layout(layout_id, allow_lossy=True)
    for spec in specs(layout_id, rows=2):
        matrix = tame(layout, random_matrix(spec))
        packed, wanted = ready(layout, matrix).pack(matrix), layout.tensors(spec)
        assert list(packed) == list(wanted)
        for name, tensor in packed.items():
            assert tuple(tensor.shape) == wanted[name].shape
            assert tensor.dtype == torch_dtype(wanted[name].dtype)
            assert tensor.is_contiguous()


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("layout_id", LAYOUT_IDS)
def test_compiled_and_torch_loops_and_reused_buffers_give_the_same_bytes(
    layout_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not words.have_numba():
        pytest.skip("numba is not installed")
    layout = get_layout(layout_id, allow_lossy=True)
    for spec in specs(layout_id, rows=2, columns=2):
        matrix = tame(layout, random_matrix(spec))
        bound = ready(layout, matrix)
        plain = bound.pack(matrix)
        monkeypatch.setattr(words, "COMPILED_FROM", 0)
        buffers = {
            name: torch.full_like(raw(tensor), 0xA5).view(tensor.dtype).view(tensor.shape)
            for name, tensor in plain.items()
        }
        bound.pack_into(matrix, buffers)
        compiled_back = layout.unpack(plain, spec)
        monkeypatch.undo()
        assert all(torch.equal(raw(buffers[name]), raw(plain[name])) for name in plain), spec
        assert same(layout.unpack(plain, spec), compiled_back)


# -------------------------------------------------------------------------------------------------- slices


@pytest.mark.parametrize("layout_id", EXACT)
def test_a_slice_of_the_whole_is_the_layout_of_the_slice(layout_id: str) -> None:
    layout = get_layout(layout_id)
    for small in specs(layout_id):
        spec, rule = sliceable(layout, small), layout.slices(small)
        matrix = tame(layout, random_matrix(spec))
        bound = ready(layout, matrix)
        half = spec.n // (2 if spec.role == "w13" else 1)
        packed = bound.pack(matrix)
        for n, k in legal_slices(half, spec.k, rule.n, rule.k, rule.k_least):
            part = block(matrix, n, k)
            wanted = bound.pack(part)
            cut = bound.slice_parts(packed, spec, n=n, k=k)
            assert cut.keys() == wanted.keys()
            for name in wanted:
                assert cut[name].shape == wanted[name].shape
                assert torch.equal(raw(cut[name]), raw(wanted[name])), (spec, n, k, name)


@pytest.mark.parametrize("layout_id", [one for one in EXACT if "fp8-block" in one or "deepgemm-fp8" in one])
def test_one_row_of_blocks_is_cut_along_k(layout_id: str) -> None:
    """A hidden size of 128 leaves one row of scales, which is not one scale for all columns."""
    layout = get_layout(layout_id)
    spec = replace(next(one for one in specs(layout_id) if one.role == "w2"), n=128, k=1024)
    matrix = tame(layout, random_matrix(spec))
    packed = layout.pack(matrix)
    for k in ((0, 512), (512, 1024)):
        wanted = layout.pack(block(matrix, (0, 128), k))
        cut = layout.slice_parts(packed, spec, n=(0, 128), k=k)
        assert all(torch.equal(raw(cut[name]), raw(wanted[name])) for name in wanted)
        assert {name: tensor.shape for name, tensor in cut.items()} == {n: t.shape for n, t in wanted.items()}


def sliceable(layout: Layout, small: MatrixSpec) -> MatrixSpec:
    """A spec of three slices by three (four, where slices have a least width) of the least that can be packed."""
    rule = layout.slices(small)
    halves = 2 if small.role == "w13" else 1
    n = 3 * math.lcm(rule.n or 1, small.n // halves)
    return small.with_sizes(n=halves * n, k=4 * math.lcm(rule.k or 1, small.k))


def legal_slices(
    half: int, columns: int, unit_n: int | None, unit_k: int | None, least: int
) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    found = []
    whole = (0, columns)
    if unit_n is not None and half >= 2 * unit_n:
        found += [((0, unit_n), whole), ((half - unit_n, half), whole)]
    if unit_k is not None:
        width = -(-max(unit_k, least) // unit_k) * unit_k
        if columns >= width + unit_k:
            found += [((0, half), (unit_k, unit_k + width))]
            if unit_n is not None:
                found += [((half - unit_n, half), (unit_k, unit_k + width))]
    return found


@pytest.mark.parametrize("layout_id", LAYOUT_IDS)
def test_illegal_slices_are_refused(layout_id: str) -> None:
    layout = get_layout(layout_id, allow_lossy=True)
    spec = sliceable(layout, next(specs(layout_id)))
    matrix = tame(layout, random_matrix(spec))
    packed, rule = ready(layout, matrix).pack(matrix), layout.slices(spec)
    half = spec.n // 2
    if rule.n != 1:
        with pytest.raises(MoeqError, match="is not a slice"):
            layout.slice_parts(packed, spec, n=(0, half - (rule.n or 2) // 2), k=(0, spec.k))
    if rule.k is None:
        with pytest.raises(MoeqError, match="the whole only"):
            layout.slice_parts(packed, spec, n=(0, half), k=(0, spec.k // 2))


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("layout_id", [one for one in EXACT if one not in ("int8-w8a8/1", "mxfp4-identity/1")])
def test_the_granularity_along_n_is_not_too_coarse_nor_too_fine(layout_id: str) -> None:
    """Taking half the stated granularity from the packed words (by their share of memory) is not the layout of it."""
    layout = get_layout(layout_id)
    for least in specs(layout_id):
        rule = layout.slices(least)
        if least.role == "w13" or rule.n is None or rule.n < 4:
            continue
        spec = sliceable(layout, least)
        matrix = tame(layout, random_matrix(spec))
        packed = ready(layout, matrix).pack(matrix)
        part = block(matrix, (0, rule.n // 2), (0, spec.k))
        whole_flat = {name: raw(tensor) for name, tensor in packed.items()}
        differs = bool(layout.problems(part.spec))
        if not differs:
            small = ready(layout, matrix).pack(part)
            differs = any(
                not torch.equal(raw(small[name]), whole_flat[name][: raw(small[name]).numel()]) for name in small
            )
        assert differs, spec


# ----------------------------------------------------------------------------------------- random shapes


@settings(max_examples=40)
@given(st.sampled_from(EXACT), st.integers(1, 3), st.integers(2, 5), st.integers(0, 2**31), st.data())
def test_round_trip_over_random_shapes(layout_id: str, rows: int, columns: int, seed: int, data: st.DataObject) -> None:
    layout = get_layout(layout_id)
    spec: MatrixSpec = data.draw(st.sampled_from(list(specs(layout_id, rows=rows, columns=columns))))
    matrix = tame(layout, random_matrix(spec, seed))
    assert same(layout.unpack(ready(layout, matrix).pack(matrix), spec), matrix)
