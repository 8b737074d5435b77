"""What single formats do with numbers that others do not have."""

from __future__ import annotations

import pytest
import torch
from refusing import refuses

from moeq.schemes import ct_pack, marlin_v1, nvfp4
from moeq.schemes.awq import column_codes, column_words


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_columns_of_words(bits: int) -> None:
    codes = torch.randint(1 << bits, (3, 64), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    words = column_words(codes, bits, 64 * bits // 32)
    assert torch.equal(column_codes(words, bits, 64), codes)
    if bits == 8:
        assert torch.equal(words.view(torch.uint8), codes)


@pytest.mark.parametrize(
    ("writer", "version"),
    [
        ("compressed-tensors 0.10.2", (0, 10)), ("compressed-tensors 1.2", (1, 2)), ("0.9.dev1", (0, 9)),
        (None, (1 << 30,)), ("compressed-tensors", (1 << 30,)),
    ],
)  # fmt: skip
def test_the_newest_version_is_assumed(writer: str | None, version: tuple[int, ...]) -> None:
    assert ct_pack._version(writer) == version


def test_orders_of_scales_of_marlin() -> None:
    """The orders are those of vLLM's `get_scale_perms`, for scales of several groups and of one group."""
    assert marlin_v1._scale_order(grouped=True)[:10] == [0, 8, 16, 24, 32, 40, 48, 56, 1, 9]
    single = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]
    assert marlin_v1._scale_order(grouped=False) == [*single, *(one + 4 for one in single)]
    assert sorted(marlin_v1._scale_order(grouped=True)) == list(range(64))


@pytest.mark.parametrize("divisor", [0.0, -2.0, float("nan")])
def test_scales_that_are_no_divisors(divisor: float) -> None:
    with refuses("source.bad-data", f"weight_global_scale is {divisor}, expected a positive number"):
        nvfp4._multiplier({"weight_global_scale": torch.tensor(divisor)})
    assert nvfp4._multiplier({"weight_global_scale": torch.tensor([4.0])}).tolist() == [0.25]
    assert nvfp4._multiplier({"weight_scale_2": torch.tensor(4.0)}).tolist() == [4.0]
