"""Layouts by id. Importing this needs no torch, so that the oracle and `inspect` can name layouts."""

from __future__ import annotations

from importlib import import_module

from moeq.errors import MoeqError
from moeq.layouts.base import Layout

#: layout id -> "module:class", imported on first use.
LAYOUTS: dict[str, str] = {
    "marlin-wna16/1": "moeq.layouts.marlin_wna16:MarlinWNA16",
}


def get_layout(layout_id: str, *, allow_lossy: bool = False) -> Layout:
    """The layout of that id. Raises MoeqError `usage.unknown-layout`, naming the known ones."""
    if layout_id not in LAYOUTS:
        known = ", ".join(sorted(LAYOUTS))
        raise MoeqError("usage.unknown-layout", f"no layout is called '{layout_id}'", f"known layouts: {known}")
    module, _, name = LAYOUTS[layout_id].partition(":")
    layout: Layout = getattr(import_module(module), name)(allow_lossy=allow_lossy)
    return layout
