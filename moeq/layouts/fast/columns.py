"""Loops over the columns of a matrix of codes, and tables for its elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from torch import Tensor

    Array = np.ndarray[Any, Any]


def take(codes: Tensor, order: Tensor, out: Tensor) -> None:
    """`out[:, i] = codes[:, order[i]]`; uint8, `order` int64, each of 0 .. K - 1."""
    take_columns(codes.numpy(), order.numpy(), out.numpy())


def block_sums(codes: Tensor, block: int, out: Tensor) -> None:
    """int32 `[N, K / block]` sums of consecutive uint8 codes."""
    _block_sums(codes.numpy(), block, out.numpy())


def look_up(table: Array, source: Array, out: Array) -> None:
    """`out[n, k] = table[source[n, k]]`: uint8, a table of 256."""
    _look_up(table, source, out)


def all_in(table: Array, source: Array) -> bool:
    """Whether the table (uint8 `[256]`, 0 or 1) has a 1 for every byte of a matrix."""
    return bool(_all_in(table, source))


def without(byte: int, source: Array, out: Array) -> None:
    """`out = source` with 0 in place of a byte: uint8 `[N, K]`, rows contiguous."""
    _without(np.uint8(byte), source, out)


def repeat_columns(source: Array, times: int, out: Array) -> None:
    """`out[:, i] = source[:, i // times]`; the last column may be repeated less often."""
    _repeat_columns(source, times, out)


def repeats_columns(source: Array, times: int, found: Array) -> bool:
    """Whether a matrix is what `repeat_columns` makes."""
    return len(source) == len(found) and bool(_repeats_columns(source, times, found))


@njit(cache=True, nogil=True, boundscheck=False)
def _repeat_columns(source, times, out):  # type: ignore[no-untyped-def]
    for n in range(out.shape[0]):
        for g in range(source.shape[1]):
            element = source[n, g]
            for i in range(g * times, min((g + 1) * times, out.shape[1])):
                out[n, i] = element


@njit(cache=True, nogil=True, boundscheck=False)
def _repeats_columns(source, times, found):  # type: ignore[no-untyped-def]
    wrong = source.shape[1] * times < found.shape[1]
    for n in range(found.shape[0]):
        for g in range(source.shape[1]):
            element = source[n, g]
            for i in range(g * times, min((g + 1) * times, found.shape[1])):
                wrong |= found[n, i] != element
    return not wrong


@njit(cache=True, nogil=True, boundscheck=False)
def _look_up(table, source, out):  # type: ignore[no-untyped-def]
    for n in range(source.shape[0]):
        for k in range(source.shape[1]):
            out[n, k] = table[source[n, k]]


@njit(cache=True, nogil=True, boundscheck=False)
def _without(byte, source, out):  # type: ignore[no-untyped-def]
    for n in range(source.shape[0]):
        row, filled = source[n], out[n]
        for k in range(len(row)):
            filled[k] = np.uint8(0) if row[k] == byte else row[k]


@njit(cache=True, nogil=True, boundscheck=False)
def _all_in(table, source):  # type: ignore[no-untyped-def]
    found = np.uint8(1)
    for n in range(source.shape[0]):
        for k in range(source.shape[1]):
            found &= table[source[n, k]]
    return found == 1


@njit(cache=True, nogil=True)
def take_columns(codes, order, out):  # type: ignore[no-untyped-def]
    """`take` for arrays."""
    for n in range(codes.shape[0]):
        row, filled = codes[n], out[n]
        for i in range(len(order)):
            filled[i] = row[order[i]]


@njit(cache=True, nogil=True)
def _block_sums(codes, block, out):  # type: ignore[no-untyped-def]
    for n in range(out.shape[0]):
        for g in range(out.shape[1]):
            part = codes[n, g * block : (g + 1) * block]
            found = np.uint32(0)
            for j in range(block):
                found += np.uint32(part[j])
            out[n, g] = found
