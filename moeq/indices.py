"""Check of tensors whose values are used as indices: their dtype and range, once, where they enter moeq.

A damaged or malicious file can hold any number as an index, and compiled loops and kernels would read memory at that
index. Works for torch tensors and numpy arrays, and imports neither.
"""

from __future__ import annotations

from typing import Any

from moeq.errors import MoeqError


def check_indices(values: Any, bound: int, what: str, *, each_once: bool = False) -> None:
    """Check that all values are indices below a bound.

    Args:
        values: tensor or array of any shape.
        bound: indices are 0 .. bound - 1.
        what: what the values are, for the message.
        each_once: every row along the last axis must be a permutation of 0 .. bound - 1.

    Raises:
        MoeqError: `source.bad-data`.
    """
    if str(values.dtype).rpartition(".")[2] not in ("int32", "int64"):
        raise MoeqError("source.bad-data", f"{what} has dtype {values.dtype}; indices are int32 or int64")
    if 0 in values.shape:
        return
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= bound:
        raise MoeqError("source.bad-data", f"{what} ranges from {low} to {high}; indices are 0 to {bound - 1}")
    if each_once and (values.shape[-1] != bound or not _is_permutation(values)):
        raise MoeqError("source.bad-data", f"{what} does not name each of {bound} columns once")


def _is_permutation(values: Any) -> bool:
    """Return whether every row is a permutation. Values are in range, so this holds if no value repeats in a row."""
    ordered = values.copy() if hasattr(values, "copy") else values.clone()
    sorted_rows = ordered.sort(-1)
    ordered = ordered if sorted_rows is None else sorted_rows[0]  # numpy sorts in place
    return bool((ordered[..., 1:] != ordered[..., :-1]).all())
