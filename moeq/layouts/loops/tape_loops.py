"""Loops of `moeq.layouts.loops.tape`, in place of numpy's copies, fills and flipped bits."""

from __future__ import annotations

import numpy as np

from moeq.layouts.loops.compiler import loop
from moeq.layouts.loops.vectors import load, store, zeros


@loop
def copy(source, out):  # type: ignore[no-untyped-def]
    """Copy rows of bytes; each row is contiguous."""
    width = out.shape[2]
    for a in range(out.shape[0]):
        for b in range(out.shape[1]):
            row, filled = source[a, b], out[a, b]
            for k in range(0, width - 63, 64):
                store(filled, k, load(row, k))
            for k in range(width // 64 * 64, width):
                filled[k] = row[k]


@loop
def copy_elements(source, out):  # type: ignore[no-untyped-def]
    for a in range(out.shape[0]):
        for b in range(out.shape[1]):
            for k in range(out.shape[2]):
                out[a, b, k] = source[a, b, k]


@loop
def clear(out):  # type: ignore[no-untyped-def]
    width = out.shape[2]
    for a in range(out.shape[0]):
        for b in range(out.shape[1]):
            filled = out[a, b]
            for k in range(0, width - 63, 64):
                store(filled, k, zeros())
            for k in range(width // 64 * 64, width):
                filled[k] = np.uint8(0)


@loop
def flip(source, out, byte):  # type: ignore[no-untyped-def]
    for a in range(out.shape[0]):
        for b in range(out.shape[1]):
            row, filled = source[a, b], out[a, b]
            for k in range(len(filled)):
                filled[k] = row[k] ^ byte
