"""What Gluon's compiler demands of layouts, for kernels that run where layouts say nothing."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from triton.experimental.gluon import language as gl

#: Lanes of a warp.
LANES = 32


class Warps(threading.local):
    """Number of warps that run the program in this thread."""

    count = 4


WARPS = Warps()


def is_power(number: int) -> bool:
    """Return whether a number is a power of two."""
    return number > 0 and number & (number - 1) == 0


def in_registers(layout: Any, shape: Sequence[int]) -> Any:
    """Return the layout of a tensor in registers, or fail as the compiler would."""
    _distributed(layout, WARPS.count)
    assert layout.rank == len(shape), f"{layout} is no layout of {list(shape)}"
    assert all(map(is_power, shape)), f"tensors have powers of two elements along an axis, not {list(shape)}"
    return layout


@cache
def _distributed(layout: Any, warps: int) -> None:
    if isinstance(layout, gl.SliceLayout):
        assert 0 <= layout.dim < layout.parent.rank
        _distributed(layout.parent, warps)
    elif isinstance(layout, gl.DotOperandLayout):
        assert layout.operand_index in (0, 1)
        assert is_power(layout.k_width)
        _distributed(layout.parent, warps)
    elif isinstance(layout, gl.NVMMADistributedLayout):
        m, n, *k = layout.instr_shape
        assert (layout.version, m) in (([2, 0], 16), ([3, 0], 16))
        assert n % 8 == 0
        assert all(one in (8, 16, 32) for one in k)
        assert math.prod(layout.warps_per_cta) == warps
        assert layout.version == [2, 0] or layout.warps_per_cta[0] % 4 == 0
    elif isinstance(layout, gl.DistributedLinearLayout):
        assert (len(layout.lane_bases), 1 << len(layout.warp_bases)) == (5, warps), layout
        bases = [tuple(one) for one in (*layout.reg_bases, *layout.lane_bases, *layout.warp_bases) if any(one)]
        places = [
            tuple((1 << bit) * (one == axis) for one in range(layout.rank))
            for axis, size in enumerate(layout.shape)
            for bit in range(size.bit_length() - 1)
        ]
        assert sorted(bases) == sorted(places), f"{layout} has elements in several lanes, or in none"
    else:
        assert isinstance(layout, gl.BlockedLayout), layout
        sizes = (*layout.size_per_thread, *layout.threads_per_warp, *layout.warps_per_cta)
        assert all(map(is_power, sizes)), f"{layout} has sizes that are no powers of two"
        assert math.prod(layout.threads_per_warp) == LANES, f"{layout} has no {LANES} lanes"
        assert math.prod(layout.warps_per_cta) == warps, f"{layout} is not of {warps} warps"
        assert sorted(layout.order) == list(range(layout.rank)), f"{layout} has no order of axes"


def in_shared_memory(layout: Any, shape: Sequence[int], itemsize: int) -> None:
    """Fail as the compiler would for a layout of shared memory; mbarriers have None."""
    if isinstance(layout, gl.NVMMASharedLayout):
        assert (layout.rank, layout.element_bitwidth) == (len(shape[-layout.rank :]), 8 * itemsize), layout
        row = shape[-1] * itemsize
        assert not layout.transposed
        assert row % max(16, layout.swizzle_byte_width) == 0, f"{layout} does not fit rows of {row} bytes"
    elif layout is not None:
        assert isinstance(layout, gl.SwizzledSharedLayout)
        assert all(map(is_power, (layout.vec, layout.per_phase, layout.max_phase)))
        assert sorted(layout.order) == list(range(len(layout.order)))
