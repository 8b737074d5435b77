"""Layouts by id. Importing them needs no torch, so the oracle can describe them."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

from moeq.errors import MoeqError
from moeq.layouts import (
    aiter,
    b12x,
    cpu_amx,
    cutlass,
    deepgemm,
    flashinfer,
    humming,
    moeq,
    rdna3,
    triton_kernels,
    vllm_triton,
    xpu,
)
from moeq.layouts.layout import Layout
from moeq.layouts.marlin import fp8, mxfp4, nvfp4, wna16

#: One module for each library that owns bytes (Marlin: for each element type).
_MODULES: tuple[ModuleType, ...] = (
    wna16,
    mxfp4,
    moeq,
    nvfp4,
    fp8,
    flashinfer,
    cutlass,
    b12x,
    deepgemm,
    aiter,
    triton_kernels,
    vllm_triton,
    cpu_amx,
    rdna3,
    xpu,
    humming,
)


def _classes(module: ModuleType) -> Iterator[type[Layout]]:
    for found in vars(module).values():
        layout = isinstance(found, type) and issubclass(found, Layout) and "id" in vars(found)
        if layout and found.__module__ == module.__name__:
            yield found


#: Every layout by its id.
LAYOUTS: dict[str, type[Layout]] = {kind.id: kind for module in _MODULES for kind in _classes(module)}


def layout_class(layout_id: str) -> type[Layout]:
    """Return the class of that id. Raises MoeqError `usage.unknown-layout`, naming the known ones."""
    if layout_id not in LAYOUTS:
        known = ", ".join(sorted(LAYOUTS))
        raise MoeqError("usage.unknown-layout", f"no layout is called '{layout_id}'", f"known layouts: {known}")
    return LAYOUTS[layout_id]


def get_layout(layout_id: str, *, allow_lossy: bool = False) -> Layout:
    """Return the layout of that id; `allow_lossy` lets it pack what it cannot hold exactly (`Layout.losses` counts).

    Raises MoeqError `usage.unknown-layout`, naming the known ones.
    """
    return layout_class(layout_id)(allow_lossy=allow_lossy)
