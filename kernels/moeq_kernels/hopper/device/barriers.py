"""Barriers in shared memory between the warps that copy and those that multiply. `fence_async_shared` has to follow."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


@gluon.jit
def ready_slots(SLOTS: gl.constexpr):
    """Return a barrier per slot, which completes when the copy engine has filled the slot."""
    ready = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(ready.index(i), count=1)
    return ready


@gluon.jit
def ring(SLOTS: gl.constexpr, WRITERS: gl.constexpr, READERS: gl.constexpr):
    """Return two barriers per slot: WRITERS arrive at the first when it is full, READERS at the second when free."""
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=WRITERS)
        mbarrier.init(free.index(i), count=READERS)
    return full, free


@gluon.jit
def item_ring(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Return memory for SLOTS work items of four numbers that one warp announces, and the barriers of `ring`."""
    info = gl.allocate_shared_memory(gl.int32, [SLOTS * 4, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full, free = ring(SLOTS, 1, READERS)
    return info, full, free
