"""Loops over the columns of a matrix of codes, and tables for its elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moeq.indices import check_indices
from moeq.layouts.loops.native import Loops

if TYPE_CHECKING:
    from torch import Tensor

    Array = np.ndarray[Any, Any]

_loops = Loops("moeq.layouts.loops.columns_loops")


def take(codes: Tensor, order: Tensor, out: Tensor) -> None:
    """Set `out[:, i] = codes[:, order[i]]`; uint8, `order` int64, each of 0 .. K - 1."""
    take_elements(codes.numpy(), order.numpy(), out.numpy())


def take_elements(source: Array, order: Array, out: Array) -> None:
    """Set `out[:, i] = source[:, order[i]]`; matrices of one dtype, `order` int64, each of 0 .. K - 1."""
    check_indices(order, source.shape[1], "order of columns")
    _loops.take_columns(source, order, out)


def holds_taken_elements(source: Array, places: Array, found: Array) -> bool:
    """Return whether `found[:, places[i]] == source[:, i]` for every i."""
    check_indices(places, found.shape[1], "places of columns")
    return bool(_loops.holds_taken_columns(source, places, found))


def take_codes(source: Array, order: Array, bits: int, out: Array) -> None:
    """Put codes of 4 or 8 bits into another order along K.

    `source` and `out` are uint32 `[K * bits / 32, N]`, the first code of a word in its lowest bits, and `order` int64
    `[K]`, the source of each code, each of 0 .. K - 1.
    """
    check_indices(order, len(source) * 32 // bits, "order of codes")
    _loops.take_codes(source, order, bits, out)


def holds_taken_codes(source: Array, places: Array, bits: int, found: Array) -> bool:
    """Return whether code `places[k]` of `found` is code k of `source`, for every k. Arguments as for `take_codes`."""
    check_indices(places, len(found) * 32 // bits, "places of codes")
    return bool(_loops.holds_taken_codes(source, places, bits, found))


def block_sums(codes: Tensor, block: int, out: Tensor) -> None:
    """Fill `out`, int32 `[N, K / block]`, with sums of consecutive uint8 codes."""
    _loops.block_sums(codes.numpy(), block, out.numpy())


def look_up(table: Array, source: Array, out: Array) -> None:
    """Set `out[n, k] = table[source[n, k]]`; uint8, a table of 256."""
    _loops.look_up(table, source, out)


def look_up_rows(table: Array, source: Array, times: int, out: Array) -> None:
    """Set `out[n, k] = table[source[n // times, k]]`; the table has a number for every element there can be."""
    _loops.look_up_rows(table, source, times, out)


def all_in(table: Array, source: Array) -> bool:
    """Return whether the table (uint8, 0 or 1 for every possible element) has a 1 for each element of a matrix."""
    return bool(_loops.all_in(table, source))


def negative_zeros(words: Array, out: Array) -> None:
    """Mark the bytes that are 0x80: bit i of `out[n, k]` stands for byte `8 k + i` of row n.

    Args:
        words: uint32 `[N, 2 K]`, the first byte in the lowest bits.
        out: uint8 `[N, K]`.
    """
    _loops.negative_zeros(words, out)


def are_negative_zeros(words: Array, flags: Array) -> bool:
    """Return whether the flags are what `negative_zeros` makes of the words."""
    return bool(_loops.are_negative_zeros(words, flags))


def add_negative_zeros(flags: Array, words: Array) -> None:
    """Set the highest bit of the bytes that the flags mark. Arguments as for `negative_zeros`."""
    _loops.add_negative_zeros(flags, words)


def copy_without(byte: int, source: Array, out: Array) -> None:
    """Copy `source` to `out` with 0 in place of a byte: uint8 `[N, K]`, rows contiguous."""
    _loops.copy_without(np.uint8(byte), source, out)


def lacks_negative_zeros(words: Array, found: Array) -> bool:
    """Return whether `found` is the words with 0 in place of the bytes that are 0x80; uint32 matrices."""
    return bool(_loops.lacks_negative_zeros(words, found))


def repeat_columns(source: Array, times: int, out: Array) -> None:
    """Set `out[:, i] = source[:, i // times]`; the last column may be repeated less often."""
    _loops.repeat_columns(source, times, out)


def holds_repeated_columns(source: Array, times: int, found: Array) -> bool:
    """Return whether a matrix is what `repeat_columns` makes."""
    return len(source) == len(found) and bool(_loops.holds_repeated_columns(source, times, found))
