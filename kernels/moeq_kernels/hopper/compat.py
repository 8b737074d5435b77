"""Common names for Gluon functions that were renamed between triton 3.6 and 3.9. Importing this module needs triton.

`gl.thread_barrier` became `gl.barrier` in 3.7; the copy functions lost their long names, and a shared-memory
descriptor's `_reinterpret` became `reinterpret` in 3.9.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

barrier = getattr(gl, "barrier", None) or gl.thread_barrier
#: Asynchronous copy (cp.async) of scattered rows; `tma_load` copies boxes.
rows_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Reinterpret shared memory with another type, shape and layout."""
        return memory.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Reinterpret shared memory with another type, shape and layout."""
        return memory._reinterpret(dtype, shape, layout)
