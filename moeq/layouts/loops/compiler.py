"""Compilation of loops with numba. Only loops import this module, and code that runs a loop missing in the cache.

A loop becomes a function of C that depends on nothing but the C library, so that its object code can be loaded without
numba, whose import takes longer than most of what moeq starts with (`moeq.layouts.loops.native` calls and keeps it).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from math import prod
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir
from numba import cfunc, from_dtype, njit, types
from numba.core import cgutils
from numba.extending import intrinsic, overload

from moeq.layouts.loops.target import INTERFACE_WORDS, Kind, target_machine

#: Options of loops and of functions that loops call. Every function is inlined into its caller: only then LLVM sees
#: that nothing raises and that no array is kept, and leaves out calls of numba's runtime.
_OPTIONS = {"boundscheck": False, "forceinline": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
loop = njit(**_OPTIONS)

#: Decorator of a loop whose sums may be added in any order, several at once, with products that are not rounded.
loop_of_sums = njit(**_OPTIONS, fastmath={"reassoc", "contract", "nsz"})

#: Functions that compiled loops may call: LLVM turns copies and fills into these.
_C_LIBRARY = {"memcpy", "memmove", "memset"}

_WORD = ir.IntType(64)


class Compiled(NamedTuple):
    """A loop that has been compiled."""

    function: Callable[[bytes], int]  #: function that calls the loop in this process
    #: Object code of the loop; None where it needs numba's runtime, because the loop raises, allocates, or calls a
    #: function that is not inlined. Exceptions are printed and ignored.
    code: bytes | None


def compile_loop(module: str, name: str, kinds: Sequence[Kind], symbol: str) -> Compiled:
    """Compile a loop for arguments of these kinds.

    Args:
        symbol: name of the function in the object, `int64 symbol(void *words)`: `words` are the arguments as
            `moeq.layouts.loops.native` spells them, the result is the loop's, and 0 where it returns none.
    """
    looped, arguments = getattr(import_module(module), name), _arguments([_numba_type(kind) for kind in kinds])

    @cfunc(types.int64(types.voidptr), forceinline=True)
    def entry(words):  # type: ignore[no-untyped-def]
        return _number(looped(*arguments(words)))  # type: ignore[no-untyped-call]

    text = entry.inspect_llvm().replace(entry.native_name, symbol)
    compiled = llvm.parse_assembly(text)
    declared = {item.name for item in (*compiled.functions, *compiled.global_variables) if item.is_declaration}
    alone = {item for item in declared if not item.startswith("llvm.")} <= _C_LIBRARY
    function = entry.ctypes
    function.owner = entry  # keep the machine code alive
    return Compiled(function, target_machine().emit_object(compiled) if alone else None)


def scratch(dtype: type, *shape: int) -> Callable[..., Any]:
    """Return a function that gives a contiguous array on the stack, of a few KiB, aligned to 64 bytes."""
    kind = types.Array(from_dtype(np.dtype(dtype)), len(shape), "C")

    @intrinsic
    def allocate(typing):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
            data = cgutils.alloca_once(builder, ir.ArrayType(context.get_data_type(kind.dtype), prod(shape)))
            data.align = 64
            strides = [prod(shape[axis + 1 :]) * np.dtype(dtype).itemsize for axis in range(len(shape))]
            sizes = [[ir.Constant(_WORD, size) for size in row] for row in (shape, strides)]
            return _view(context, builder, kind, data, *sizes)

        return kind(), generate

    return allocate  # type: ignore[no-any-return]


def _numba_type(kind: Kind) -> Any:
    dtype = from_dtype(kind.dtype)
    if kind.layout is None:
        return dtype
    return types.Array(dtype, kind.ndim, kind.layout, readonly=not kind.writeable, aligned=kind.aligned)


def _arguments(kinds: Sequence[Any]) -> Any:
    """Return a function from the words of an argument list (`moeq.layouts.loops.native`) to the arguments."""
    together = types.Tuple(kinds)

    @intrinsic
    def arguments(typing, words):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
            made = []
            for word, kind in zip(_load(builder, values[0], len(kinds)), kinds, strict=True):
                if not isinstance(kind, types.Array):
                    made.append(context.cast(builder, word, types.int64, kind))
                    continue
                shape, strides, data = _load(builder, word, INTERFACE_WORDS)[-3:]
                sizes = [_load(builder, place, kind.ndim) for place in (shape, strides)]
                made.append(_view(context, builder, kind, data, *sizes))
            return context.make_tuple(builder, together, made)

        return together(words), generate

    return arguments


def _load(builder: Any, address: Any, count: int) -> list[Any]:
    """Load `count` words from an address on."""
    convert = builder.bitcast if isinstance(address.type, ir.PointerType) else builder.inttoptr
    start = convert(address, _WORD.as_pointer())
    return [builder.load(builder.gep(start, [ir.Constant(_WORD, place)])) for place in range(count)]


def _view(context: Any, builder: Any, kind: Any, data: Any, shape: Sequence[Any], strides: Sequence[Any]) -> Any:
    """Return an array over memory without reference counts."""
    array = context.make_array(kind)(context, builder)
    convert = builder.bitcast if isinstance(data.type, ir.PointerType) else builder.inttoptr
    array.data = convert(data, array.data.type)
    array.shape, array.strides = cgutils.pack_array(builder, shape), cgutils.pack_array(builder, strides)
    array.itemsize = ir.Constant(_WORD, kind.dtype.bitwidth // 8)
    count = shape[0]
    for size in shape[1:]:
        count = builder.mul(count, size)
    array.nitems = count
    return array._getvalue()


def _number(result):  # type: ignore[no-untyped-def]
    """Turn what a loop returns into the result of a function of C. Only compiled code calls it."""
    raise NotImplementedError


@overload(_number)
def _compiled_number(result):  # type: ignore[no-untyped-def]
    return (lambda result: 0) if result is types.none else (lambda result: types.int64(result))
