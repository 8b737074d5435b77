"""Loops over the columns of a matrix of codes, and tables for its elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from moeq.layouts.fast.native import Loops

if TYPE_CHECKING:
    from torch import Tensor

    Array = np.ndarray[Any, Any]

_loops = Loops("moeq.layouts.fast.columns_loops")


def take(codes: Tensor, order: Tensor, out: Tensor) -> None:
    """`out[:, i] = codes[:, order[i]]`; uint8, `order` int64, each of 0 .. K - 1."""
    _loops.take_columns(codes.numpy(), order.numpy(), out.numpy())


def block_sums(codes: Tensor, block: int, out: Tensor) -> None:
    """int32 `[N, K / block]` sums of consecutive uint8 codes."""
    _loops.block_sums(codes.numpy(), block, out.numpy())


def look_up(table: Array, source: Array, out: Array) -> None:
    """`out[n, k] = table[source[n, k]]`: uint8, a table of 256."""
    _loops.look_up(table, source, out)


def all_in(table: Array, source: Array) -> bool:
    """Whether the table (uint8 `[256]`, 0 or 1) has a 1 for every byte of a matrix."""
    return bool(_loops.all_in(table, source))


def without(byte: int, source: Array, out: Array) -> None:
    """`out = source` with 0 in place of a byte: uint8 `[N, K]`, rows contiguous."""
    _loops.without(np.uint8(byte), source, out)


def repeat_columns(source: Array, times: int, out: Array) -> None:
    """`out[:, i] = source[:, i // times]`; the last column may be repeated less often."""
    _loops.repeat_columns(source, times, out)


def repeats_columns(source: Array, times: int, found: Array) -> bool:
    """Whether a matrix is what `repeat_columns` makes."""
    return len(source) == len(found) and bool(_loops.repeats_columns(source, times, found))
