"""Triton's interpreter without work whose result it throws away: some 40 % less time, the same results.

Of a layer's time in the interpreter of triton 3.7, a quarter went into looking for integers that overflow, whose
outcome is not looked at unless `debug` is set, and a fifth into searching the language for functions to replace, once
for every call of a device function. Of a sort's time, nine tenths went into reducing element by element. Of everything,
a twelfth went into making the same table of types again and again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

#: What the interpreter had before, for a test that compares.
REPLACED: dict[str, Any] = {}


def install() -> None:
    """Change the interpreter of this process. It must be enabled; that triton is installed is not required."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return

    builder = interpreter.interpreter_builder
    if not builder.options.debug:  # `device_assert` does nothing then
        builder.options = replace(builder.options, sanitize_overflow=False)

    is_builtin, search = tl.core.is_builtin, interpreter.inspect.getmembers

    @cache
    def names(place: Any) -> list[str]:
        return [name for name, member in search(place) if is_builtin(member)]

    def patch(place: Any, builder: Any, scope: Any) -> None:
        # All of them are replaced or none is: in a call from a kernel its own replacements are still there.
        if is_builtin(getattr(place, names(place)[0])):
            for name in names(place):
                interpreter._patch_attr(place, name, getattr(place, name), builder, scope)

    for place in (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base):
        names(place)  # now, while none is replaced
    interpreter._patch_builtin = patch
    numpy_type = cache(interpreter._get_np_dtype)

    def cached(dtype: Any) -> np.dtype[Any]:
        # Types of pointers have no hash.
        return np.dtype(np.uint64) if isinstance(dtype.scalar, tl.pointer_type) else numpy_type(dtype.scalar)

    interpreter._get_np_dtype = cached
    REPLACED["generic_reduce"] = interpreter.ReduceOps.generic_reduce
    interpreter.ReduceOps.generic_reduce = reduce_by_slices


def reduce_by_slices(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """`ReduceOps.generic_reduce` with whole slices: elements are combined in the same order, many at a time."""
    tensors, axis = self.unravel(given, self.axis)

    def part(at: int) -> list[Any]:
        return [self.to_tensor(np.take(one.handle.data, at, axis), one.dtype) for one in tensors]

    found = part(0)
    for at in range(1, tensors[0].handle.data.shape[axis]):
        combined = self.combine_fn.fn(*found, *part(at))
        found = list(combined) if isinstance(combined, tuple) else [combined]
    shape = list(given[0].handle.data.shape)
    if self.axis is None:
        shape = [1] * len(shape) * self.keep_dims
    else:
        shape[axis : axis + 1] = [1] * self.keep_dims
    return [
        self.to_tensor(one.handle.data.reshape(shape) if shape else one.handle.data.item(), whole.dtype)
        for one, whole in zip(found, tensors, strict=True)
    ]
