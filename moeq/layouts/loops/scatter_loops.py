"""Loops of `moeq.layouts.loops.scatter`, whose `_Tables` describes the arguments.

`sizes` are the first element, and for the outer and then the inner loop: count, elements of a step, words of a step.
"""

from __future__ import annotations

import numpy as np

from moeq.layouts.loops.compiler import loop


@loop
def pack1(source, target, sizes, element, word, field, bits):  # type: ignore[no-untyped-def]
    for a in range(sizes[1]):
        for b in range(sizes[4]):
            s = sizes[0] + a * sizes[2] + b * sizes[5]
            t = a * sizes[3] + b * sizes[6]
            for i in range(len(word)):
                target[t + word[i]] = source[s + element[i]]


@loop
def pack2(source, target, sizes, element, word, field, bits):  # type: ignore[no-untyped-def]
    f1 = field[1]
    for a in range(sizes[1]):
        for b in range(sizes[4]):
            s = sizes[0] + a * sizes[2] + b * sizes[5]
            t = a * sizes[3] + b * sizes[6]
            for i in range(len(word)):
                e = s + element[i]
                target[t + word[i]] = source[e] | source[e + f1] << bits


@loop
def pack4(source, target, sizes, element, word, field, bits):  # type: ignore[no-untyped-def]
    f1, f2, f3 = field[1], field[2], field[3]
    for a in range(sizes[1]):
        for b in range(sizes[4]):
            s = sizes[0] + a * sizes[2] + b * sizes[5]
            t = a * sizes[3] + b * sizes[6]
            for i in range(len(word)):
                e = s + element[i]
                low = np.uint32(source[e]) | np.uint32(source[e + f1]) << np.uint32(bits)
                high = np.uint32(source[e + f2]) | np.uint32(source[e + f3]) << np.uint32(bits)
                target[t + word[i]] = low | high << np.uint32(2 * bits)


@loop
def pack8(source, target, sizes, element, word, field, bits):  # type: ignore[no-untyped-def]
    f1, f2, f3, f4, f5, f6, f7 = field[1], field[2], field[3], field[4], field[5], field[6], field[7]
    for a in range(sizes[1]):
        for b in range(sizes[4]):
            s = sizes[0] + a * sizes[2] + b * sizes[5]
            t = a * sizes[3] + b * sizes[6]
            for i in range(len(word)):
                e = s + element[i]
                v0 = np.uint32(source[e]) | np.uint32(source[e + f1]) << np.uint32(4)
                v1 = np.uint32(source[e + f2]) | np.uint32(source[e + f3]) << np.uint32(4)
                v2 = np.uint32(source[e + f4]) | np.uint32(source[e + f5]) << np.uint32(4)
                v3 = np.uint32(source[e + f6]) | np.uint32(source[e + f7]) << np.uint32(4)
                target[t + word[i]] = (v0 | v1 << np.uint32(8)) | (v2 | v3 << np.uint32(8)) << np.uint32(16)


@loop
def pack_fields(source, target, sizes, element, word, field, bits):  # type: ignore[no-untyped-def]
    for a in range(sizes[1]):
        for b in range(sizes[4]):
            s = sizes[0] + a * sizes[2] + b * sizes[5]
            t = a * sizes[3] + b * sizes[6]
            for i in range(len(word)):
                e = s + element[i]
                value = np.uint32(0)
                for f in range(len(field)):
                    value |= np.uint32(source[e + field[f]]) << np.uint32(f * bits)
                target[t + word[i]] = value


@loop
def unpack1(source, target, sizes, element, word, field, bits, mask):  # type: ignore[no-untyped-def]
    for a in range(sizes[1]):
        for b in range(sizes[4]):
            s = sizes[0] + a * sizes[2] + b * sizes[5]
            t = a * sizes[3] + b * sizes[6]
            for i in range(len(word)):
                target[s + element[i]] = source[t + word[i]]


@loop
def unpack_fields(source, target, sizes, element, word, field, bits, mask):  # type: ignore[no-untyped-def]
    for a in range(sizes[1]):
        for b in range(sizes[4]):
            s = sizes[0] + a * sizes[2] + b * sizes[5]
            t = a * sizes[3] + b * sizes[6]
            for i in range(len(word)):
                e = s + element[i]
                value = np.uint32(source[t + word[i]])
                for f in range(len(field)):
                    target[e + field[f]] = value & np.uint32(mask)
                    value >>= np.uint32(bits)
