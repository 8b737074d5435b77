"""Copies of transposed matrices in compiled loops: numpy's slow down threefold where rows are a power of two apart."""

from __future__ import annotations

import numpy as np

from moeq.layouts.loops.native import Array, Loops

_loops = Loops("moeq.layouts.loops.transpose_loops")


def copy(source: Array, out: Array) -> None:
    """Copy `source` to `out`, both `[rows, columns]` of one dtype, with any strides."""
    if not source.flags.f_contiguous or source.flags.c_contiguous:
        np.copyto(out, source)
    elif source.itemsize == 4 and out.strides[1] == 4:
        _loops.copy_transposed_words(source.T.view(np.uint32), out.view(np.uint32))
    else:
        _loops.copy_transposed(source.T, out)


def copy_any(source: Array, out: Array) -> None:
    """Copy as `copy` does, where `out` as well may be the transpose of contiguous rows, or some rows of that."""
    if out.strides[0] == out.itemsize != out.strides[1]:
        source, out = source.T, out.T
    copy(source, out)
