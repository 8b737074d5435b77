"""Tensors of more than 2^31 elements: products that make offsets have to be 64-bit numbers.

They are not filled: memory that nothing touches is not used.
"""

from __future__ import annotations

import pytest
import torch

from moeq_kernels import PackedExperts, PackedMatrix, fused_moe, interpreter
from moeq_kernels.device import routing
from moeq_kernels.hopper.w8a8.device import rows as w8a8_rows

#: Rows of 32768 numbers, with elements number 2^31 and 2^32 among them.
ROWS, WIDTH = 140_000, 32768
LAST = ROWS - 1
OFF = {"DEPENDENT": False}


@pytest.fixture(autouse=True)
def _interpreted() -> None:
    if not interpreter.active():
        pytest.skip("on a GPU they would take its memory")


@pytest.mark.slow
def test_the_last_expert_lies_beyond_them() -> None:
    experts, hidden, intermediate = 600, 2048, 1024
    w13 = torch.empty(experts, 2 * intermediate, hidden, dtype=torch.bfloat16)
    w2 = torch.empty(experts, hidden, intermediate, dtype=torch.bfloat16)
    assert w13.numel() > 2**31
    generator = torch.Generator().manual_seed(0)
    last = experts - 1
    for expert in (0, last):
        w13[expert] = torch.randn(2 * intermediate, hidden, generator=generator) / hidden**0.5
        w2[expert] = torch.randn(hidden, intermediate, generator=generator) / intermediate**0.5
    x = torch.randn(2, hidden, generator=generator).to(torch.bfloat16)
    packed = PackedExperts(
        PackedMatrix("unquantized/1", w13, 2 * intermediate, hidden, "bf16", -1),
        PackedMatrix("unquantized/1", w2, hidden, intermediate, "bf16", -1),
    )
    y = fused_moe(x, packed, torch.ones(2, 1), torch.tensor([[last], [0]], dtype=torch.int32))
    few = PackedExperts(
        PackedMatrix("unquantized/1", w13[[0, last]], 2 * intermediate, hidden, "bf16", -1),
        PackedMatrix("unquantized/1", w2[[0, last]], hidden, intermediate, "bf16", -1),
    )
    assert torch.equal(y, fused_moe(x, few, torch.ones(2, 1), torch.tensor([[1], [0]], dtype=torch.int32)))


@pytest.mark.parametrize("splits", [1, 2])
def test_sums_of_rows_beyond_them(splits: int) -> None:
    parts = torch.empty(splits, ROWS // splits, WIDTH, dtype=torch.bfloat16)
    last = ROWS // splits - 1
    parts[:, last], parts[:, 3] = 2.0, 1.0
    y = torch.empty(1, WIDTH, dtype=torch.bfloat16)
    routing.sum_rows[(1, 1)](
        parts, torch.tensor([last, 3], dtype=torch.int32), torch.tensor([[1.0, 10.0]]), y, 1, WIDTH, last + 1, 2,
        TOP_K=2, SPLITS=splits, COLUMNS=WIDTH, TOKENS=1, INTERPRET=True, **OFF,
    )  # fmt: skip
    assert (y == 12.0 * splits).all()


def test_tokens_are_copied_from_rows_beyond_them() -> None:
    x, sorted_x = (torch.empty(size, WIDTH, dtype=torch.bfloat16) for size in (ROWS, 2))
    x[LAST], x[1] = 5.0, 7.0
    tiles = torch.tensor([[0, 0, 2, 0, 1, 2, 0, 0]], dtype=torch.int32)
    routing.gather_rows[(1, 1)](
        x, sorted_x, torch.tensor([LAST, 1], dtype=torch.int32), tiles, torch.ones(1, dtype=torch.int32), 2, 1, WIDTH,
        WIDTH, ROWS=2, COLUMNS=WIDTH, **OFF,
    )  # fmt: skip
    assert sorted_x[:, 0].tolist() == [5.0, 7.0]
    assert (sorted_x == sorted_x[:, :1]).all()


def test_codes_are_written_to_rows_beyond_them() -> None:
    codes = torch.empty(ROWS, WIDTH, dtype=torch.int8)
    scales = torch.zeros(ROWS)
    x = torch.full((1, WIDTH), -2.0, dtype=torch.bfloat16)
    w8a8_rows.quantise_tokens[(1,)](
        x, None, codes, scales, torch.tensor([LAST], dtype=torch.int32), WIDTH, WIDTH, WIDTH, None,
        TOP_K=1, CHOICES=1, COLUMNS=WIDTH, MARLIN=False, INTERPRET=True, **OFF,
    )  # fmt: skip
    assert (codes[LAST] == -127).all()
    assert scales[LAST] == pytest.approx(2 / 127)
