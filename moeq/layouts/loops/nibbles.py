"""Rewrite arrangements for larger elements, which loops move faster: bytes of two codes, or neighbours moved as one."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from moeq.layouts.arrangement import Arrangement


@lru_cache(maxsize=64)
def for_bytes(arrangement: Arrangement) -> Arrangement | None:
    """Return the arrangement for byte columns, if a word keeps each even and odd code together in one byte."""
    last = arrangement.columns[-1]
    if not arrangement.fields or last.radix != 2 or arrangement.fields[-1] != replace(last, radix=0):
        return None
    left, _, right = arrangement.pattern.partition("->")
    words, _, fields = right.partition("|")
    kept = fields.rstrip().rpartition(" ")[0].strip()
    return Arrangement(f"{left.rstrip().rpartition(' ')[0]} ->{words.rstrip()}" + (f" | {kept}" if kept else ""))


@lru_cache(maxsize=64)
def for_lanes(arrangement: Arrangement) -> tuple[Arrangement, int] | None:
    """Return the arrangement for 2 or 4 neighbouring codes taken as one, and that number, if the codes stay neighbours.

    The two codes of a byte come from different places then, so whole lanes of bytes are shifted and merged at once.
    """
    last, word = arrangement.columns[-1], arrangement.words[-1]
    if arrangement.fields_per_word != 2 or last.radix not in (2, 4) or word != replace(last, radix=0):
        return None
    left, _, right = arrangement.pattern.partition("->")
    words, _, fields = right.partition("|")
    return Arrangement(
        f"{left.rstrip().rpartition(' ')[0]} ->{words.rstrip().rpartition(' ')[0]} |{fields}"
    ), last.radix


@lru_cache(maxsize=256)
def for_words(arrangement: Arrangement, columns: int, width: int) -> tuple[Arrangement, int]:
    """Return the arrangement for runs of elements that stay neighbours, and the bytes that can be moved as one."""
    last, word = arrangement.columns[-1], arrangement.words[-1]
    if arrangement.fields or word != replace(last, radix=0):
        return arrangement, width
    run = width * (last.radix or columns // arrangement.column_multiple)
    wide = next(size for size in (8, 4, 2, 1) if size == width or (size > width and run % size == 0))
    if not last.radix or wide == width:
        return arrangement, wide
    left, _, right = arrangement.pattern.partition("->")
    kept = left.rstrip().rpartition(" ")[0]
    return Arrangement(f"{kept} {last.name}{last.radix * width // wide} ->{right}"), wide
