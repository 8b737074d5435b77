"""Zero points as the kernels of every GPU load them: the matrix's own, and 0 beyond it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from moeq_kernels.device.scales import zero_points

ROWS, BN = tl.constexpr(4), tl.constexpr(64)


@triton.jit
def _zero_points_kernel(zero, y, first, G: tl.constexpr, N: tl.constexpr, CODEC: tl.constexpr, ELEMENT: tl.constexpr):
    found = zero_points(zero, first + tl.arange(0, ROWS), 0, G, N, ROWS, BN, CODEC, ELEMENT)
    tl.store(y + tl.arange(0, ROWS)[:, None] * BN + tl.arange(0, BN)[None, :], found)


@pytest.mark.parametrize(
    ("codec", "element", "largest"),
    [("marlin4", "uint4", 15), ("marlin8", "uint8", 255), ("plain", "uint4", 15), ("plain", "uint8", 255)],
)
def test_zero_points_are_0_beyond_the_matrix(codec: str, element: str, largest: int) -> None:
    groups, columns = 3, 32
    packed = torch.full((ROWS.value * BN.value,), -1, dtype=torch.int32)  # all bits, also behind the matrix
    zero = packed if codec.startswith("marlin") else packed.view(torch.uint8)
    for first in (0, 2):
        y = torch.full((ROWS.value, BN.value), -1, dtype=torch.int32)
        _zero_points_kernel[(1,)](zero, y, first, groups, columns, codec, element)
        wanted = torch.zeros_like(y)
        wanted[: groups - first, :columns] = largest
        assert torch.equal(y, wanted)
