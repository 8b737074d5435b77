"""The kernels read what `moeq.layouts` packs: the same layer, and the same bytes as the packers of these tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from support.cases import (
    Quantised,
    as_stored,
    pack,
    random_floats,
    random_fp8,
    random_integers,
    random_mxfp4,
    random_nvfp4,
    route,
)
from support.comparison import compare
from support.reference import Layer

from moeq.layouts.registry import LAYOUTS, get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix, Role
from moeq_kernels import PackedExperts, PackedMatrix
from moeq_kernels.formats import FORMATS

SHARED = [key for key in FORMATS if key[0] in LAYOUTS]
EXPERTS, HIDDEN, INTERMEDIATE = 3, 128, 128
SCALE_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.uint8: "e8m0", torch.float8_e4m3fn: "e4m3"}
BIAS_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16"}

CASES = [(layout, element, False) for layout, element in SHARED]
CASES += [(layout, element, True) for layout, element in SHARED if FORMATS[layout, element].zero_points]


def random_matrix(key: tuple[str, str], n: int, k: int, zero_points: bool) -> Quantised:
    generator = torch.Generator().manual_seed(n)
    shape = (EXPERTS, n, k)
    fmt = FORMATS[key]
    dtype: torch.dtype = getattr(torch, fmt.dtypes[0])
    if key[1] == "e2m1" and fmt.group_sizes == (16,):
        return random_nvfp4(shape, generator=generator, bias=True, dtype=dtype)
    if key[1] == "e4m3":
        made = random_fp8(shape, fmt.group_sizes[0], generator=generator, bias=True, dtype=dtype)
        return as_stored(made, fmt)
    if key[1] == "e2m1":
        return random_mxfp4(shape, generator=generator, bias=True)
    if key[1] in ("bf16", "f16"):
        return random_floats(shape, torch.bfloat16, generator, True)
    matrix = random_integers(
        shape, bits=int(key[1][3:]), group_size=-1 if key[0] == "int8-w8a8/1" else 32, zero_points=zero_points,
        dtype=torch.bfloat16, generator=generator, bias=True, act_order=FORMATS[key].act_order,
    )  # fmt: skip
    return dataclasses.replace(matrix, scales=matrix.scales.float()) if key[0] == "int8-w8a8/1" else matrix


def spec_of(matrix: Quantised, element: str, role: Role, bias: bool) -> MatrixSpec:
    _, n, k = matrix.values.shape
    return MatrixSpec(
        role=role,
        n=n,
        k=k,
        element=element,
        group_size=k if matrix.group_size == -1 else matrix.group_size,
        scale_dtype=SCALE_DTYPES[matrix.scales.dtype],
        symmetric=matrix.zeros is None,
        act_order=matrix.group_index is not None,
        bias_dtype=BIAS_DTYPES[matrix.bias.dtype] if bias and matrix.bias is not None else None,
    )


def packed_by_moeq(layout_id: str, spec: MatrixSpec, matrix: Quantised) -> PackedMatrix:
    layout = get_layout(layout_id)
    assert layout.problems(spec) == []

    def of(tensor: torch.Tensor | None, expert: int) -> torch.Tensor | None:
        return None if tensor is None else tensor[expert]

    matrices = [
        QuantizedMatrix(
            spec=spec,
            codes=matrix.codes[expert],
            scales=matrix.scales[expert],
            zeros=None if matrix.zeros is None else matrix.zeros[expert].to(torch.int16),
            group_index=None if matrix.group_index is None else matrix.group_index[expert].to(torch.int32),
            global_scale=None if matrix.global_scale is None else matrix.global_scale[expert].expand(spec.n),
            bias=of(matrix.bias, expert) if spec.bias_dtype else None,
        )
        for expert in range(EXPERTS)
    ]
    if layout.calibration_scope is not None:  # it has to have seen every expert
        layout = layout.with_calibration(max(layout.calibrate(one) or 0.0 for one in matrices))
    experts = [layout.pack(one) for one in matrices]
    parts = {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}
    return PackedMatrix(layout_id, n=spec.n, k=spec.k, element=spec.element, group_size=matrix.group_size, **parts)


def to_device(matrix: PackedMatrix, device: torch.device) -> PackedMatrix:
    fields = {field.name: getattr(matrix, field.name) for field in dataclasses.fields(matrix)}
    return PackedMatrix(**{name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in fields.items()})


def adds_bias(layout_id: str, spec: MatrixSpec) -> bool:
    return all(problem.code != "layout.bias" for problem in get_layout(layout_id).problems(spec))


@pytest.mark.cover(every=5)
@pytest.mark.parametrize(("layout", "element", "zero_points"), CASES)
def test_a_layer_packed_by_moeq(layout: str, element: str, zero_points: bool, device: torch.device) -> None:
    w13 = random_matrix((layout, element), 2 * INTERMEDIATE, HIDDEN, zero_points)
    w2 = random_matrix((layout, element), HIDDEN, INTERMEDIATE, zero_points)
    bias = adds_bias(layout, spec_of(w2, element, "w2", True))
    packed = PackedExperts(
        to_device(packed_by_moeq(layout, spec_of(w13, element, "w13", bias), w13), device),
        to_device(packed_by_moeq(layout, spec_of(w2, element, "w2", bias), w2), device),
        get_layout(layout).w13_order,
    )
    b13, b2 = (m.bias.float().to(device) if bias else None for m in (w13, w2))
    layer = Layer(w13.values.to(device), w2.values.to(device), b13, b2)  # logical order: gate rows, then up rows
    dtype: torch.dtype = getattr(torch, FORMATS[layout, element].dtypes[0])
    result = compare(packed, layer, route(7, HIDDEN, EXPERTS, 2, dtype=dtype, device=device))
    assert result.passed, f"{result.ratio:.2f} times the error of 16-bit products"


@pytest.mark.parametrize(("layout", "element", "zero_points"), CASES)
def test_bytes_are_those_of_the_tests_own_packers(layout: str, element: str, zero_points: bool) -> None:
    matrix = random_matrix((layout, element), HIDDEN, 2 * INTERMEDIATE, zero_points)
    bias = adds_bias(layout, spec_of(matrix, element, "w2", True))
    theirs = packed_by_moeq(layout, spec_of(matrix, element, "w2", bias), matrix)
    own = pack(layout, element, matrix if bias else dataclasses.replace(matrix, bias=None))
    if theirs.scale_factor is not None:  # the layout's own choice of a power of two; the numbers are compared above
        factor = theirs.scale_factor / own.scale_factor
        own = dataclasses.replace(own, scale=times(own.scale, factor), global_scale=own.global_scale / factor)
    for part in ("weight", "scale", "zero", "bias", "permutation", "group_index", "global_scale"):
        one, other = getattr(theirs, part), getattr(own, part)
        if one is None or other is None:
            assert one is other, part
        else:
            assert one.shape == other.shape, part
            assert torch.equal(one.double(), other.double()), part


def times(scales: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """NVFP4 scales in Marlin's bytes times powers of two."""
    numbers = (scales.view(torch.uint8).to(torch.int16) << 7).view(torch.float16).float() * factor[:, :, None]
    return (numbers.half().view(torch.int16) >> 7).to(torch.uint8).view(torch.float8_e4m3fn)
