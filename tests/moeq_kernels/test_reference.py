"""How results are compared with the reference: no number of good rows hides a wrong one."""

from __future__ import annotations

import torch
from support.comparison import FACTOR
from support.random_check import ROW_FACTOR
from support.reference import relative_error, worst_row


def test_a_few_wrong_numbers_show_in_their_row() -> None:
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(3000, 1024, generator=generator)
    truth[7] = truth[8] * 1e-6  # a token whose experts cancel out
    truth[9] = 0
    plain = truth.bfloat16().float()
    other = (truth * (1 + 2**-9 * torch.rand(truth.shape, generator=generator))).bfloat16()
    other[7] += 1e-3
    assert worst_row(other, truth) <= ROW_FACTOR * worst_row(plain, truth)
    for row, wrong in ((5, 0.0), (9, 1.0), (5, float("nan"))):
        spoilt = plain.clone()
        spoilt[row, :2] = wrong
        assert not worst_row(spoilt, truth) <= ROW_FACTOR * worst_row(plain, truth)
        assert wrong != wrong or relative_error(spoilt, truth) <= FACTOR * relative_error(plain, truth)
