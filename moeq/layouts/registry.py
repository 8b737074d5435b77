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
from moeq.layouts.arranged import ArrangedLayout
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


def _classes(module: ModuleType) -> Iterator[type[ArrangedLayout]]:
    for found in vars(module).values():
        layout = isinstance(found, type) and issubclass(found, ArrangedLayout) and "id" in vars(found)
        if layout and found.__module__ == module.__name__:
            yield found


#: Every layout by its id.
LAYOUTS: dict[str, type[ArrangedLayout]] = {kind.id: kind for module in _MODULES for kind in _classes(module)}

#: What cannot be packed offline, and why.
NOT_OFFLINE: dict[str, str] = {
    "Humming, other modes": "native-dequant, packed-K and W4A8 modes depend on the GPU's SM version, the compiler, "
    "tuned configurations and extremes of the local shard",
    "Zen CPU": "the bytes come from an opaque operator of zentorch",
    "CUTLASS W4A8": "its group scales are rounded to E4M3 by an operator of the GPU, which was not tried; the order of "
    "its weights is `n o2 r8, k h2 q4 i4 -> k n r q h o i`, as CUTLASS's own templates say when compiled for a CPU",
    "FP8 x FP8 on a CPU": "only CPUs with AMX-FP8 run it, and on others the engine's operator arranges w13 otherwise",
    "int4 on an Arm CPU": "the bytes come from an operator of PyTorch, which differ with the CPU it was built for",
    "FlashInfer megakernels (MoE-EP)": "they arrange the checkpoint's tensors in code for their GPU",
    "FP8 with a scale each for gate and up, in AITER's and Intel's kernels": "the engine requantises both to the "
    "larger with an operator of the GPU, which was not read",
    "WNA16 emulation": "experts are dequantised to bf16 at load: nothing is packed",
    "Machete": "dense layers only; no MoE kernel reads it",
}


def layout_class(layout_id: str) -> type[ArrangedLayout]:
    """Return the class of that id. Raises MoeqError `usage.unknown-layout`, naming the known ones."""
    if layout_id not in LAYOUTS:
        known = ", ".join(sorted(LAYOUTS))
        raise MoeqError("usage.unknown-layout", f"no layout is called '{layout_id}'", f"known layouts: {known}")
    return LAYOUTS[layout_id]


def get_layout(layout_id: str, *, allow_lossy: bool = False) -> ArrangedLayout:
    """Return the layout of that id; `allow_lossy` lets it pack what it cannot hold exactly (`Layout.losses` counts).

    Raises MoeqError `usage.unknown-layout`, naming the known ones.
    """
    return layout_class(layout_id)(allow_lossy=allow_lossy)
