"""Which part of the work an item of the Hopper kernels is: shares of k, and tiles of columns; the code as it is."""

from __future__ import annotations

import pytest
from support.gluon_on_cpu import device_function
from support.ptx_on_cpu import value


@pytest.mark.parametrize(("steps", "splits"), [(7, 1), (7, 2), (8, 3), (5, 5)])
@pytest.mark.parametrize(("paired", "groups"), [(False, 1), (True, 1), (False, 2), (True, 2)])
def test_items_of_wide_kernels_cover_steps_and_columns_once(steps: int, splits: int, paired: bool, groups: int) -> None:
    extent = device_function("hopper.w4a16.device.wide_copies:extent")
    each = -(-steps // splits)
    found = [[int(one) for one in extent(40, 100, part, splits, value(each), steps, paired, groups)]
             for part in range(3 * splits)]  # fmt: skip
    tiles = groups if paired else 2 * groups
    wanted = [[share * each, min(share * each + each, steps), 60, tile * tiles]
              for tile in range(3) for share in range(splits)]  # fmt: skip
    assert found == wanted


@pytest.mark.parametrize(("steps", "splits"), [(7, 1), (7, 2), (8, 3)])
def test_shares_of_w8a8_items_cover_k_once(steps: int, splits: int) -> None:
    share = device_function("hopper.w8a8.device.common:share")
    each = -(-steps // splits)
    for part in range(2 * splits):
        number = part % splits
        wanted = [number * each, min(number * each + each, steps), number]
        assert [int(one) for one in share(part, splits, value(steps))] == wanted
