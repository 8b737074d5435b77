"""Loops of `moeq.layouts.loops.columns`."""

from __future__ import annotations

import numpy as np

from moeq.layouts.loops.compiler import loop


@loop
def repeat_columns(source, times, out):  # type: ignore[no-untyped-def]
    for n in range(out.shape[0]):
        for g in range(source.shape[1]):
            element = source[n, g]
            for i in range(g * times, min((g + 1) * times, out.shape[1])):
                out[n, i] = element


@loop
def holds_repeated_columns(source, times, found):  # type: ignore[no-untyped-def]
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
def look_up_rows(table, source, times, out):  # type: ignore[no-untyped-def]
    for n in range(source.shape[0]):
        for row in range(n * times, (n + 1) * times):
            for k in range(source.shape[1]):
                out[row, k] = table[source[n, k]]


@loop
def copy_without(byte, source, out):  # type: ignore[no-untyped-def]
    for n in range(source.shape[0]):
        row, filled = source[n], out[n]
        for k in range(len(row)):
            filled[k] = np.uint8(0) if row[k] == byte else row[k]


#: Highest bits of four bytes, and all other bits.
_HIGH, _LOW = np.uint32(0x80808080), np.uint32(0x7F7F7F7F)


@loop
def _negative(word):  # type: ignore[no-untyped-def]
    """Return the highest bit of every byte that is 0x80.

    Every other byte differs from 0x80 in some bit, which stays set or carries into the highest one.
    """
    other = word ^ _HIGH
    return np.uint32(~(((other & _LOW) + _LOW) | other | _LOW))


@loop
def _four_flags(word):  # type: ignore[no-untyped-def]
    """Return four bits, of which bit i says that byte i is 0x80."""
    return ((_negative(word) >> np.uint32(7)) * np.uint32(0x01020408)) >> np.uint32(24) & np.uint32(0xF)


@loop
def negative_zeros(words, out):  # type: ignore[no-untyped-def]
    for n in range(out.shape[0]):
        for k in range(out.shape[1]):
            high = _four_flags(words[n, 2 * k + 1])
            out[n, k] = np.uint8(_four_flags(words[n, 2 * k]) | high << np.uint32(4))


@loop
def are_negative_zeros(words, flags):  # type: ignore[no-untyped-def]
    wrong = np.uint32(0)
    for n in range(flags.shape[0]):
        for k in range(flags.shape[1]):
            high = _four_flags(words[n, 2 * k + 1])
            wrong |= (_four_flags(words[n, 2 * k]) | high << np.uint32(4)) ^ np.uint32(flags[n, k])
    return wrong == 0


@loop
def lacks_negative_zeros(words, found):  # type: ignore[no-untyped-def]
    wrong = np.uint32(0)
    for n in range(words.shape[0]):
        for k in range(words.shape[1]):
            wrong |= (words[n, k] ^ _negative(words[n, k])) ^ found[n, k]
    return wrong == 0


@loop
def add_negative_zeros(flags, words):  # type: ignore[no-untyped-def]
    for n in range(flags.shape[0]):
        for k in range(flags.shape[1]):
            for half in range(2):
                four = np.uint32(flags[n, k]) >> np.uint32(4 * half) & np.uint32(0xF)
                spread = (four * np.uint32(0x00204081)) & np.uint32(0x01010101)
                words[n, 2 * k + half] |= spread << np.uint32(7)


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
def holds_taken_columns(source, places, found):  # type: ignore[no-untyped-def]
    wrong = False
    for n in range(source.shape[0]):
        row, read = source[n], found[n]
        for i in range(len(places)):
            wrong |= read[places[i]] != row[i]
    return not wrong


@loop
def take_codes(source, order, bits, out):  # type: ignore[no-untyped-def]
    fields, shift = (8, 3) if bits == 4 else (4, 2)
    mask = np.uint32((1 << bits) - 1)
    for word in range(out.shape[0]):
        filled = out[word]
        for field in range(fields):
            place = order[word * fields + field]
            row, right = source[place >> shift], np.uint32((place & (fields - 1)) * bits)
            left = np.uint32(field * bits)
            if field == 0:
                for n in range(len(filled)):
                    filled[n] = row[n] >> right & mask
            else:
                for n in range(len(filled)):
                    filled[n] |= (row[n] >> right & mask) << left


@loop
def holds_taken_codes(source, places, bits, found):  # type: ignore[no-untyped-def]
    shift, last = (3, 7) if bits == 4 else (2, 3)
    mask, wrong = np.uint32((1 << bits) - 1), np.uint32(0)
    for k in range(len(places)):
        place = places[k]
        row, read = source[k >> shift], found[place >> shift]
        right, there = np.uint32((k & last) * bits), np.uint32((place & last) * bits)
        for n in range(len(row)):
            wrong |= (row[n] >> right ^ read[n] >> there) & mask
    return wrong == 0


@loop
def block_sums(codes, block, out):  # type: ignore[no-untyped-def]
    for n in range(out.shape[0]):
        for g in range(out.shape[1]):
            part = codes[n, g * block : (g + 1) * block]
            found = np.uint32(0)
            for j in range(block):
                found += np.uint32(part[j])
            out[n, g] = found
