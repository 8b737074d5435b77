"""The kernels read what `moeq.layouts` packs: the same product, and the same bytes as the packers of these tests."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from bench.cases import pack, random_floats, random_integers, random_mxfp4
from bench.reference import relative_error
from moeq.layouts.registry import LAYOUTS, get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq_kernels import PackedMatrix, expert_products
from moeq_kernels.formats import FORMATS

SHARED = sorted(key for key in FORMATS if key[0] in LAYOUTS)
EXPERTS, N, K = 3, 128, 256
SCALE_DTYPES = {torch.bfloat16: "bf16", torch.float32: "f32", torch.uint8: "e8m0"}


def random_matrix(layout: str, element: str, zero_points: bool):
    generator = torch.Generator().manual_seed(0)
    if element == "e2m1":
        return random_mxfp4((EXPERTS, N, K), generator=generator, bias=True)
    if element in ("bf16", "f16"):
        return random_floats((EXPERTS, N, K), torch.bfloat16, generator, True)
    group = -1 if layout == "int8-w8a8/1" else 64
    return random_integers(
        (EXPERTS, N, K), bits=int(element[3:]), group_size=group, zero_points=zero_points, dtype=torch.bfloat16,
        generator=generator, bias=True,
    )  # fmt: skip


def packed_by_moeq(layout_id: str, element: str, matrix, zero_points: bool) -> PackedMatrix:
    layout = get_layout(layout_id)
    group = K if matrix.group_size == -1 else matrix.group_size
    scales = matrix.scales.float() if layout_id == "int8-w8a8/1" else matrix.scales
    spec = MatrixSpec(
        role="w2", n=N, k=K, element=element, group_size=group, scale_dtype=SCALE_DTYPES[scales.dtype],
        symmetric=not zero_points, bias_dtype="bf16",
    )  # fmt: skip
    assert layout.problems(spec) == []
    experts = [
        layout.pack(
            QuantizedMatrix(
                spec=spec,
                codes=matrix.codes[expert],
                scales=scales[expert],
                zeros=matrix.zeros[expert] if zero_points else None,
                bias=matrix.bias[expert],
            )
        )
        for expert in range(EXPERTS)
    ]
    parts = {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}
    return PackedMatrix(layout=layout_id, n=N, k=K, element=element, group_size=matrix.group_size, **parts)


CASES = [(layout, element, False) for layout, element in SHARED]
CASES += [(layout, element, True) for layout, element in SHARED if FORMATS[layout, element].zero_points]


@pytest.mark.parametrize(("layout", "element", "zero_points"), CASES)
def test_packed_by_moeq(layout: str, element: str, zero_points: bool, device: torch.device) -> None:
    matrix = random_matrix(layout, element, zero_points)
    ours = packed_by_moeq(layout, element, matrix, zero_points)
    tests_own = pack(layout, element, matrix)
    for part in ("weight", "scale", "zero", "bias"):
        one, other = getattr(ours, part), getattr(tests_own, part)
        if one is None or other is None:
            assert one is other
            continue
        assert one.flatten().view(torch.uint8).equal(other.contiguous().flatten().view(torch.uint8)), part

    moved = {
        field.name: value.to(device)
        for field in dataclasses.fields(ours)
        if isinstance(value := getattr(ours, field.name), torch.Tensor)
    }
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    ids = torch.tensor([[0, 2], [1, 1], [2, 0], [1, 2], [0, 1]], device=device)
    y = expert_products(x, dataclasses.replace(ours, **moved), ids).cpu()
    wanted = torch.stack(
        [matrix.values[e] @ x[row].float().cpu() + matrix.bias[e].float() for row, pair in enumerate(ids) for e in pair]
    )
    assert relative_error(y, wanted) < 0.02
