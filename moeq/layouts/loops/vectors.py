"""Vectors in numba: eight 64-bit words that permutations and masks work on at once, in registers.

numba has no vectors, and compilers turn loops into vector operations only where nothing changes places. Each function
here is an operation of LLVM, and one instruction on a processor with 512-bit registers. Bytes are numbered as they lie
in memory, little-endian.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from moeq.layouts.loops.compiler import loop

#: 64-bit words of a vector.
LANES = 8

_WORDS, _HALVES, _BYTES = (ir.VectorType(ir.IntType(bits), 512 // bits) for bits in (64, 32, 8))
_QUAD = ir.VectorType(ir.IntType(64), 4)


class Vector(types.Type):  # type: ignore[misc]
    """Type of eight 64-bit words."""

    def __init__(self) -> None:
        super().__init__(name="moeq.vector")


_vector = Vector()


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, _WORDS)


def _pointer(context: Any, builder: Any, types_: Any, values: Any, kind: Any) -> Any:
    """Return the address of `array[index]`, the first two of the values."""
    array = context.make_array(types_[0])(context, builder, values[0])
    index = context.cast(builder, values[1], types_[1], types.intp)
    return builder.bitcast(builder.gep(array.data, [index]), kind.as_pointer())


def _indices(lanes: tuple[int, ...]) -> ir.Constant:
    return ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), lanes)


@intrinsic
def load(typing, array, index):  # type: ignore[no-untyped-def]
    """Load 64 bytes of a one-dimensional contiguous array from `array[index]` on."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        pointer = _pointer(context, builder, signature.args, values, _WORDS)
        return builder.load(pointer, align=array.dtype.bitwidth // 8)

    return _vector(array, index), generate


@intrinsic
def load_two(typing, first, second, index):  # type: ignore[no-untyped-def]
    """Load 32 bytes from `first[index]` on, then 32 bytes from `second[index]` on."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        halves = []
        for array in (0, 1):
            pair = [signature.args[array], signature.args[2]], [values[array], values[2]]
            halves.append(builder.load(_pointer(context, builder, *pair, _QUAD), align=first.dtype.bitwidth // 8))
        return builder.shuffle_vector(*halves, _indices(tuple(range(LANES))))

    return _vector(first, second, index), generate


@intrinsic
def store(typing, array, index, vector):  # type: ignore[no-untyped-def]
    """Store 64 bytes at `array[index]`."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        pointer = _pointer(context, builder, signature.args, values, _WORDS)
        builder.store(values[2], pointer, align=array.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(array, index, vector), generate


@intrinsic
def store_two(typing, first, second, index, vector):  # type: ignore[no-untyped-def]
    """Store 32 bytes at `first[index]` and 32 bytes at `second[index]`."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        for array in (0, 1):
            pair = [signature.args[array], signature.args[2]], [values[array], values[2]]
            half = builder.shuffle_vector(values[3], values[3], _indices(tuple(range(4 * array, 4 * array + 4))))
            builder.store(half, _pointer(context, builder, *pair, _QUAD), align=first.dtype.bitwidth // 8)
        return context.get_dummy_value()

    return types.void(first, second, index, vector), generate


@intrinsic
def look_up(typing, table, octets, index):  # type: ignore[no-untyped-def]
    """Return sixteen 32-bit words of a table of sixteen, by the 4-bit codes in eight bytes from `octets[index]` on.

    Where a processor can permute words by a register, LLVM makes one instruction of the sixteen single look-ups.
    """

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        narrow, lane = ir.VectorType(ir.IntType(8), LANES), ir.IntType(32)
        octet = builder.load(_pointer(context, builder, signature.args[1:], values[1:], narrow), align=1)
        low = builder.zext(octet, ir.VectorType(lane, LANES))
        high = builder.lshr(low, ir.Constant(low.type, [4] * LANES))
        both = builder.shuffle_vector(
            low, high, _indices(tuple(n + LANES * odd for n in range(LANES) for odd in (0, 1)))
        )
        codes = builder.and_(both, ir.Constant(both.type, [15] * 2 * LANES))
        words, found = builder.bitcast(values[0], _HALVES), ir.Constant(_HALVES, ir.Undefined)
        for n in range(2 * LANES):
            word = builder.extract_element(words, builder.extract_element(codes, lane(n)))
            found = builder.insert_element(found, word, lane(n))
        return builder.bitcast(found, _WORDS)

    return _vector(table, octets, index), generate


@intrinsic
def zeros(typing):  # type: ignore[no-untyped-def]
    """Return eight zeros."""
    return _vector(), lambda context, builder, signature, values: ir.Constant(_WORDS, [0] * LANES)


@intrinsic
def is_blank(typing, vector):  # type: ignore[no-untyped-def]
    """Return whether no bit is set."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        wide = ir.IntType(512)
        return builder.icmp_unsigned("==", builder.bitcast(values[0], wide), ir.Constant(wide, 0))

    return types.boolean(vector), generate


def _permutation(kind: ir.VectorType, lanes: tuple[int, ...]) -> Callable[..., Any]:
    @intrinsic
    def permuted(typing, first, second):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
            cast = [builder.bitcast(value, kind) for value in values]
            return builder.bitcast(builder.shuffle_vector(*cast, _indices(lanes)), _WORDS)

        return _vector(first, second), generate

    return permuted  # type: ignore[no-any-return]


def pick_words(*lanes: int) -> Callable[..., Any]:
    """Return a function of two vectors that picks eight of their sixteen words."""
    return _permutation(_WORDS, lanes)


def pick_halves(*lanes: int) -> Callable[..., Any]:
    """Return a function of two vectors that picks sixteen of their thirty-two 32-bit words."""
    return _permutation(_HALVES, lanes)


def pick_bytes(*lanes: int) -> Callable[..., Any]:
    """Return a function of two vectors that picks 64 of their 128 bytes."""
    return _permutation(_BYTES, lanes)


def permute_bits(steps: tuple[tuple[int, int], ...]) -> Callable[..., Any]:
    """Return a function that permutes the bits of each 32-bit word by the steps of a `BitPermutation`."""

    @intrinsic
    def permuted(typing, vector):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
            def each(number: int) -> ir.Constant:
                return ir.Constant(_HALVES, [number] * _HALVES.count)

            words, result = builder.bitcast(values[0], _HALVES), each(0)
            for shift, mask in steps:
                moved = builder.shl(words, each(shift)) if shift >= 0 else builder.lshr(words, each(-shift))
                result = builder.or_(result, builder.and_(moved, each(mask)))
            return builder.bitcast(result, _WORDS)

        return _vector(vector), generate

    return permuted  # type: ignore[no-any-return]


def _define(function: Callable[..., Any], name: str) -> None:
    """Define an operator between vectors, or between a vector and a word that stands for eight equal ones."""

    @intrinsic
    def with_vector(typing, left, right):  # type: ignore[no-untyped-def]
        return _vector(left, right), lambda context, builder, signature, values: getattr(builder, name)(*values)

    @intrinsic
    def with_word(typing, left, right):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
            word = context.cast(builder, values[1], signature.args[1], types.uint64)
            single = builder.insert_element(ir.Constant(_WORDS, ir.Undefined), word, ir.IntType(32)(0))
            return getattr(builder, name)(values[0], builder.shuffle_vector(single, single, _indices((0,) * LANES)))

        return _vector(left, right), generate

    @overload(function)
    def operation(left, right):  # type: ignore[no-untyped-def]
        if isinstance(left, Vector) and isinstance(right, Vector):
            return lambda left, right: with_vector(left, right)
        if isinstance(left, Vector) and isinstance(right, types.Integer):
            return lambda left, right: with_word(left, right)
        return None


_define(operator.and_, "and_")
_define(operator.or_, "or_")
_define(operator.xor, "xor")
_define(operator.lshift, "shl")
_define(operator.rshift, "lshr")

#: Interleave the 32-bit words of two vectors: of their first halves, and of their second halves.
zip_low = pick_halves(*(lane + 16 * which for lane in range(8) for which in range(2)))
zip_high = pick_halves(*(8 + lane + 16 * which for lane in range(8) for which in range(2)))

_ones_0, _ones_1 = pick_words(0, 8, 2, 10, 4, 12, 6, 14), pick_words(1, 9, 3, 11, 5, 13, 7, 15)
_twos_0, _twos_1 = pick_words(0, 1, 8, 9, 4, 5, 12, 13), pick_words(2, 3, 10, 11, 6, 7, 14, 15)
_fours_0, _fours_1 = pick_words(0, 1, 2, 3, 8, 9, 10, 11), pick_words(4, 5, 6, 7, 12, 13, 14, 15)


@loop
def transposed(a, b, c, d, e, f, g, h):  # type: ignore[no-untyped-def]
    """Transpose eight vectors into vectors of the first words, of the second words, ..."""
    a, b, c, d = _ones_0(a, b), _ones_1(a, b), _ones_0(c, d), _ones_1(c, d)
    e, f, g, h = _ones_0(e, f), _ones_1(e, f), _ones_0(g, h), _ones_1(g, h)
    a, b, c, d = _twos_0(a, c), _twos_0(b, d), _twos_1(a, c), _twos_1(b, d)
    e, f, g, h = _twos_0(e, g), _twos_0(f, h), _twos_1(e, g), _twos_1(f, h)
    low = _fours_0(a, e), _fours_0(b, f), _fours_0(c, g), _fours_0(d, h)
    return (*low, _fours_1(a, e), _fours_1(b, f), _fours_1(c, g), _fours_1(d, h))


@loop
def load_square(rows, n, k):  # type: ignore[no-untyped-def]
    """Load the transpose of `rows[n : n + 8, k : k + 8]`, whose rows are contiguous: a vector for each k."""
    first = load(rows[n], k), load(rows[n + 1], k), load(rows[n + 2], k), load(rows[n + 3], k)
    second = load(rows[n + 4], k), load(rows[n + 5], k), load(rows[n + 6], k), load(rows[n + 7], k)
    return transposed(*first, *second)


@loop
def store_each(rows, n, k, vectors):  # type: ignore[no-untyped-def]
    """Store eight vectors to `rows[n : n + 8]`, from column k on."""
    store(rows[n], k, vectors[0])
    store(rows[n + 1], k, vectors[1])
    store(rows[n + 2], k, vectors[2])
    store(rows[n + 3], k, vectors[3])
    store(rows[n + 4], k, vectors[4])
    store(rows[n + 5], k, vectors[5])
    store(rows[n + 6], k, vectors[6])
    store(rows[n + 7], k, vectors[7])
