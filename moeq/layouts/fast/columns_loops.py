"""The loops of `moeq.layouts.fast.columns`."""

from __future__ import annotations

import numpy as np

from moeq.layouts.fast.compiler import loop


@loop
def repeat_columns(source, times, out):  # type: ignore[no-untyped-def]
    for n in range(out.shape[0]):
        for g in range(source.shape[1]):
            element = source[n, g]
            for i in range(g * times, min((g + 1) * times, out.shape[1])):
                out[n, i] = element


@loop
def repeats_columns(source, times, found):  # type: ignore[no-untyped-def]
    wrong = source.shape[1] * times < found.shape[1]
    for n in range(found.shape[0]):
        for g in range(source.shape[1]):
            element = source[n, g]
            for i in range(g * times, min((g + 1) * times, found.shape[1])):
                wrong |= found[n, i] != element
    return not wrong


@loop
def look_up(table, source, out):  # type: ignore[no-untyped-def]
    for n in range(source.shape[0]):
        for k in range(source.shape[1]):
            out[n, k] = table[source[n, k]]


@loop
def without(byte, source, out):  # type: ignore[no-untyped-def]
    for n in range(source.shape[0]):
        row, filled = source[n], out[n]
        for k in range(len(row)):
            filled[k] = np.uint8(0) if row[k] == byte else row[k]


@loop
def all_in(table, source):  # type: ignore[no-untyped-def]
    found = np.uint8(1)
    for n in range(source.shape[0]):
        for k in range(source.shape[1]):
            found &= table[source[n, k]]
    return found == 1


@loop
def take_columns(codes, order, out):  # type: ignore[no-untyped-def]
    for n in range(codes.shape[0]):
        row, filled = codes[n], out[n]
        for i in range(len(order)):
            filled[i] = row[order[i]]


@loop
def block_sums(codes, block, out):  # type: ignore[no-untyped-def]
    for n in range(out.shape[0]):
        for g in range(out.shape[1]):
            part = codes[n, g * block : (g + 1) * block]
            found = np.uint32(0)
            for j in range(block):
                found += np.uint32(part[j])
            out[n, g] = found
