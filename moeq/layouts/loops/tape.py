"""Record the loops that one piece of work runs, and replay them on other memory with a single call.

Packing an expert is a dozen loops and as many lines of Python around each, and Python holds the interpreter's lock. A
`Tape` records the loops while the first expert is packed: their machine code, and where in its memory each argument
lies. A `Player` runs them for many experts, whose memory begins elsewhere, without the lock.

The memory that differs is given to the work as `Traced` arrays, which allow views of themselves, and beyond loops only
copies, fills and flipped bits, which become loops. Everything else raises `UnrecordedError`. All other arguments are
constants. What a loop returned decides what the work does next, so an expert counts as done only if each loop returned
what it returned for the first.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import llvmlite.binding as llvm
import numpy as np
from llvmlite import ir

from moeq.layouts.loops.native import Array, Loops, code_lock, engine, watched
from moeq.layouts.loops.target import INTERFACE_WORDS

_loops = Loops("moeq.layouts.loops.tape_loops")

_WORD = ir.IntType(64)
_WORD_BYTES = 8

#: Dimensions of the arrays that loops copy, fill and flip.
_NDIM = 3


class UnrecordedError(Exception):
    """Error of work that did something that no tape can repeat."""


class Traced(np.ndarray[Any, Any]):
    """View of memory that differs from one run of a tape to the next."""

    base_number: int | None = None  #: number of the piece of memory that the view lies in
    base_address: int = 0  #: address at which that memory begins
    base_bytes: int = 0  #: size of that memory

    def __array_finalize__(self, parent: Any) -> None:
        if isinstance(parent, Traced):
            self.base_number, self.base_address = parent.base_number, parent.base_address
            self.base_bytes = parent.base_bytes

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = (), **more: Any) -> Any:
        if ufunc is not np.bitwise_xor or method != "__call__" or more or len(out) != 1 or len(inputs) != 2:
            raise UnrecordedError(f"{ufunc.__name__} of an array")
        source, word = inputs
        if isinstance(word, np.ndarray) or source.dtype != out[0].dtype:
            raise UnrecordedError("exclusive or of two arrays, or into another dtype")
        octets = set(np.asarray(word, source.dtype).tobytes())
        if len(octets) != 1:
            raise UnrecordedError("exclusive or with anything but a repeated byte")
        _loops.flip(*_octets(source, out[0]), np.uint8(octets.pop()))
        return out[0]

    def __array_function__(self, function: Any, types: Any, given: Any, named: Any) -> Any:
        if function is not np.copyto or named or len(given) != 2:
            raise UnrecordedError(f"{function.__name__} of an array")
        out, source = given
        if not isinstance(source, Traced) or not isinstance(out, Traced) or source.dtype != out.dtype:
            raise UnrecordedError("a copy other than between traced arrays of one dtype")
        if any(array.strides[-1:] != (array.itemsize,) for array in (source, out)):
            _loops.copy_elements(*(_cube(one, out.shape).view(f"u{out.itemsize}") for one in (source, out)))
        else:
            _loops.copy(*_octets(source, out))
        return None

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(one, slice) or one is None or one is Ellipsis for one in keys):
            raise UnrecordedError("elements by number")
        return super().__getitem__(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self[key].fill(value)

    def fill(self, value: Any) -> None:
        if isinstance(value, np.ndarray) or value != 0:
            raise UnrecordedError("a fill with anything but 0")
        if self.size:
            _loops.clear(*_octets(self))

    def _unrecorded(self, *given: Any, **named: Any) -> Any:
        raise UnrecordedError("elements read by Python")

    __iter__ = __bool__ = __int__ = __float__ = __index__ = __contains__ = tolist = item = _unrecorded
    tobytes = copy = astype = flatten = ravel = any = all = min = max = sum = _unrecorded


def _cube(array: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast a traced array to a shape of up to three dimensions, and view it in three."""
    if array.shape != shape:
        wide = np.broadcast_to(array.view(np.ndarray), shape).view(type(array))
        wide.__array_finalize__(array)  # a view of a plain array does not know its memory
        array = wide
    if array.ndim > _NDIM:
        raise UnrecordedError(f"{array.ndim} dimensions")
    return array[(None,) * (_NDIM - array.ndim)]


def _octets(*arrays: Array) -> list[Array]:
    """View arrays as bytes in three dimensions, broadcast to the shape of the last; their rows must be contiguous."""
    if not all(isinstance(array, Traced) and array.strides[-1:] == (array.itemsize,) for array in arrays):
        raise UnrecordedError("bytes of an array that is not traced or not contiguous")
    shape = arrays[-1].shape
    if all(array.shape == shape and array.flags.c_contiguous for array in arrays):
        return [array.reshape(1, 1, -1).view(np.uint8) for array in arrays]
    return [_cube(array, shape).view(np.uint8) for array in arrays]


class Tape:
    """Loops that were run, in order."""

    def __init__(self) -> None:
        self.bases: list[range] = []  #: addresses of each piece of memory
        self.functions: list[Callable[[bytes], int]] = []  #: machine code of every loop
        self.results: list[int] = []  #: result of every loop
        self.firsts: list[int] = []  #: number of the first word of every loop's arguments
        self.words: list[int] = []  #: arguments of all loops; arrays are filled in later
        self.places: list[int] = []  #: numbers of the words that are arrays
        self.arrays: list[tuple[int, int]] = []  #: number of each array's memory, and its first byte there
        self.forms: list[int] = []  #: numbers of shapes, then of strides, of all arrays
        self.ndims: list[int] = []  #: dimensions of each array
        self.constants: list[Array] = []  #: memory of number -1

    def trace(self, memory: Array) -> Array:
        """Return one more piece of memory, flat and contiguous, for the work that is recorded."""
        traced = memory.view(Traced)
        traced.base_number, traced.base_address, traced.base_bytes = len(self.bases), memory.ctypes.data, memory.nbytes
        self.bases.append(range(memory.ctypes.data, memory.ctypes.data + memory.nbytes))
        return traced

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the loops that this thread runs in this block. Raises UnrecordedError."""
        with watched(self._add):
            yield

    def _add(self, function: Callable[[bytes], int], arguments: Sequence[Any], result: int) -> None:
        self.functions.append(function)
        self.results.append(result)
        self.firsts.append(len(self.words))
        for argument in arguments:
            if isinstance(argument, np.ndarray):
                self.places.append(len(self.words))
                self.arrays.append(self._place(argument))
                self.ndims.append(argument.ndim)
                self.forms += [*argument.shape, *argument.strides]
            self.words.append(0 if isinstance(argument, np.ndarray) else int(argument))

    def _place(self, array: Array) -> tuple[int, int]:
        """Return which memory holds an array, and where it begins there."""
        address = array.ctypes.data
        if not isinstance(array, Traced) or array.base_number is None:
            if any(address in memory for memory in self.bases):
                raise UnrecordedError("traced memory as a plain array, whose address would be the same in every run")
            self.constants.append(array)
            return -1, address
        own = self.bases[array.base_number] if array.base_number < len(self.bases) else range(0)
        if own != range(array.base_address, array.base_address + array.base_bytes):
            raise UnrecordedError("memory that another tape traced, as a cached view may be")
        reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
        first = address - array.base_address
        last = first + sum(one for one in reach if one > 0) + array.itemsize
        if first + sum(one for one in reach if one < 0) < 0 or last > array.base_bytes:
            raise UnrecordedError("a copy of traced memory")
        return array.base_number, first


class Player:
    """Player of a tape for up to `count` pieces of work in one call. One thread uses it."""

    def __init__(self, tape: Tape, count: int) -> None:
        calls, arrays = len(tape.functions), len(tape.arrays)
        self._tape = tape
        self._bases, self._first = (np.array(row, np.int64) for row in zip(*tape.arrays, strict=True))
        # Forms are the shape, then the strides, of one array after the other.
        self._forms = np.array(tape.forms, np.int64)
        shapes = self._forms.ctypes.data + 2 * _WORD_BYTES * (np.cumsum(tape.ndims) - tape.ndims)
        self._interfaces = np.zeros((count, arrays, INTERFACE_WORDS), np.int64)
        self._interfaces[:, :, 3] = shapes
        self._interfaces[:, :, 4] = shapes + _WORD_BYTES * np.array(tape.ndims)
        self._words = np.tile(np.array(tape.words, np.int64), (count, 1))
        self._words[:, tape.places] = _addresses(self._interfaces, arrays)
        self._program = np.empty((count, calls, 2), np.int64)
        code: list[Any] = tape.functions
        self._program[:, :, 0] = [ctypes.cast(function, ctypes.c_void_p).value or 0 for function in code]
        self._program[:, :, 1] = _addresses(self._words, len(tape.words))[:, tape.firsts]
        self._results = np.empty((count, calls), np.int64)
        self._expected = np.array(tape.results, np.int64)
        with code_lock:
            self._run = _runner()

    def play(self, addresses: Array) -> list[bool]:
        """Run the tape for several pieces of work, one after the other.

        Args:
            addresses: int64 `[pieces, bases]`, addresses of all memory, aligned as the recorded memory was.

        Returns:
            Whether each piece went as recorded; if not, what was written for it means nothing.
        """
        count = len(addresses)
        memory = np.concatenate([addresses, np.zeros((count, 1), np.int64)], axis=1)  # constants are number -1
        self._interfaces[:count, :, 5] = memory[:, self._bases] + self._first
        results = self._results[:count]
        given = np.array([self._program.ctypes.data, results.size, results.ctypes.data], np.int64)
        self._run(given.tobytes())
        found: list[bool] = (results == self._expected).all(axis=1).tolist()
        return found


def _addresses(rows: Array, count: int) -> Array:
    """Return the addresses of `count` items in each row of a contiguous array, `[rows, count]`."""
    size = rows[0].nbytes // count
    found: Array = rows.ctypes.data + size * np.arange(len(rows) * count).reshape(len(rows), count)
    return found


@lru_cache(maxsize=1)
def _runner() -> Callable[[bytes], int]:
    """Compile a function that calls loops one after the other. The caller holds `code_lock`.

    The function takes three words: the address of `[calls, 2]` words, each loop's machine code and its arguments; the
    number of calls; and the address of the `[calls]` words that it fills with results.
    """
    module = ir.Module()
    kind = ir.FunctionType(_WORD, [_WORD.as_pointer()])
    function = ir.Function(module, kind, "moeq_play")
    start, body, end = (function.append_basic_block(name) for name in ("start", "body", "end"))
    builder = ir.IRBuilder(start)

    def load(address: Any, place: Any) -> Any:
        return builder.load(builder.gep(address, [place]))

    one, two = ir.Constant(_WORD, 1), ir.Constant(_WORD, 2)
    program, count, results = (load(function.args[0], ir.Constant(_WORD, place)) for place in range(3))
    program, results = (builder.inttoptr(one, _WORD.as_pointer()) for one in (program, results))
    builder.cbranch(builder.icmp_signed(">", count, ir.Constant(_WORD, 0)), body, end)
    builder.position_at_end(body)
    number = builder.phi(_WORD)
    number.add_incoming(ir.Constant(_WORD, 0), start)
    place = builder.mul(number, two)
    called = builder.inttoptr(load(program, place), kind.as_pointer())
    given = builder.inttoptr(load(program, builder.add(place, one)), _WORD.as_pointer())
    builder.store(builder.call(called, [given]), builder.gep(results, [number]))
    following = builder.add(number, one)
    number.add_incoming(following, body)
    builder.cbranch(builder.icmp_signed("<", following, count), body, end)
    builder.position_at_end(end)
    builder.ret(ir.Constant(_WORD, 0))
    compiled = llvm.parse_assembly(str(module))
    compiled.verify()
    engine().add_module(compiled)
    engine().finalize_object()
    return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p)(engine().get_function_address("moeq_play"))
