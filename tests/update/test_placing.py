"""The gather kernel writes the bytes that layouts pack, for every layout."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts.cases import LAYOUT_IDS, LOSSY_ALWAYS, specs
from layouts.matrices import random_matrix

from moeq.layouts.layout import Layout
from moeq.layouts.parts import word_dtype
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.update.placing import placement_of, reading_of
from moeq_kernels.index_maps import Packing
from moeq_kernels.placement import Elements, Write, place_together, read

ARRANGED = [one for one in LAYOUT_IDS if get_layout(one).is_index_map() and one not in LOSSY_ALWAYS]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def matrix_of(layout: Layout, spec: MatrixSpec, seed: int) -> QuantizedMatrix:
    """A matrix whose scales and zeros every layout can hold."""
    matrix = random_matrix(spec, seed)
    scales = matrix.scales
    if spec.scale_dtype == "e8m0":
        scales = (scales % 16 + 110).to(torch.uint8)
    for part in layout.parts(spec).values():
        if part.rows > 1:
            scales = scales[:: part.rows].repeat_interleave(part.rows, 0)[: spec.n].contiguous()
    return replace(matrix, scales=scales)


@pytest.mark.cover(every=30)
@pytest.mark.parametrize("layout_id", ARRANGED)
def test_every_part_of_every_layout_is_placed(layout_id) -> None:
    layout = get_layout(layout_id, allow_lossy=True)
    for number, spec in enumerate(specs(layout_id)):
        if number % 3 and spec.role == "w2":
            continue
        matrix = matrix_of(layout, spec, number)
        if layout.calibration_scope is not None:
            layout = layout.with_calibration(layout.calibrate(matrix) or 1.0)
        packed = layout.pack(matrix)
        for name, part in layout.parts(spec).items():
            if layout_id.startswith("marlin-wna16-fp8act") and name == "weight":
                continue  # rewritten around the zero point after packing
            elements = layout.encode(name, matrix)
            target = torch.full_like(raw(packed[name]), 0xA5)
            placement = placement_of(part, tuple(elements.shape))
            if placement is None:
                assert part.halves_swapped or (part.arrangement.has_halves and target.numel() > elements.numel()), name
                continue
            place_together([Write(elements, target, placement, tuple(elements.shape))])
            assert torch.equal(target, raw(packed[name])), (layout_id, name, spec)


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("layout_id", ARRANGED)
def test_every_part_of_every_layout_is_read_back(layout_id) -> None:
    """Halves that are swapped or padded, too, which no kernel writes but digests are taken of."""
    layout = get_layout(layout_id, allow_lossy=True)
    for number, spec in enumerate(specs(layout_id)):
        matrix = matrix_of(layout, spec, number)
        if layout.calibration_scope is not None:
            layout = layout.with_calibration(layout.calibrate(matrix) or 1.0)
        packed = layout.pack(matrix)
        for name, part in layout.parts(spec).items():
            elements = layout.encode(name, matrix)
            wanted = elements.repeat_interleave(part.rows, 0)[: spec.n] if part.rows > 1 else elements
            dtype = torch.uint8 if part.arrangement.fields_per_word > 1 else word_dtype(part.bits)
            found = torch.zeros(wanted.shape, dtype=dtype)
            into = Elements(*wanted.shape, 0, wanted.numel())
            read(packed[name][None], found, reading_of(part, tuple(elements.shape)), 0, into)
            assert torch.equal(raw(found), raw(wanted.to(dtype) if dtype == torch.uint8 else wanted)), (name, spec)


def words(codes: torch.Tensor, order: tuple[int, ...], axis: int) -> torch.Tensor:
    """int32 words of eight codes along an axis, code i in field `order[i]`."""
    spread = codes.long().unflatten(axis, (-1, 8))
    shifts = torch.tensor(order) * 4
    found = (spread << (shifts if axis == 1 else shifts[None, :, None])).sum(axis + 1)
    return (found - (found >> 31 << 32)).to(torch.int32)


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq", "awq", "int8"])
def test_packed_sources_are_read_as_they_are(form) -> None:
    layout = get_layout("marlin-wna16/1")
    element = "int8" if form == "int8" else "int4"
    spec = MatrixSpec("w2", 128, 256, element, 64, "f16")
    matrix = random_matrix(spec, 3)
    if form == "int8":
        source, packing = (matrix.codes ^ 0x80).view(torch.int8), Packing(sign=0x80)
    elif form == "awq":
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        source, packing = words(matrix.codes, order, 0).t().contiguous().t(), Packing(8, along_rows=True, order=order)
    else:
        source, packing = words(matrix.codes, tuple(range(8)), 1), Packing(8)
        source = source.t().contiguous().t() if form == "gptq" else source
    packed = layout.pack(matrix)["weight"]
    target = torch.zeros_like(packed)
    placement = placement_of(layout.parts(spec)["weight"], (128, 256))
    assert placement is not None
    place_together([Write(source, target, placement, (128, 256), packing)])
    assert torch.equal(target, packed)
