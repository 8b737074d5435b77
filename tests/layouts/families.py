"""Layouts by what they hold, so that a test of a format takes in a new layout without naming it."""

from __future__ import annotations

from collections.abc import Callable

from moeq.layouts.fp8 import Fp8Layout
from moeq.layouts.layout import Layout
from moeq.layouts.registry import LAYOUTS

#: A base class, or what tells whether a layout belongs.
Family = type[Layout] | Callable[[type[Layout]], bool]


def layouts_of(*families: Family) -> set[str]:
    """The ids of all layouts of these families."""
    return {name for name, kind in LAYOUTS.items() if any(_belongs(kind, family) for family in families)}


def fp8_scope(scope: str) -> Family:
    """FP8 layouts with one scale per block, channel or tensor."""
    return lambda kind: issubclass(kind, Fp8Layout) and kind.scope == scope


def _belongs(kind: type[Layout], family: Family) -> bool:
    return issubclass(kind, family) if isinstance(family, type) else family(kind)
