"""For every layout: what it holds, as small specs, so that properties can be tested over all of them alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from moeq.layouts.layout import Layout
from moeq.layouts.registry import LAYOUTS, get_layout
from moeq.matrix import MatrixSpec

#: Layouts whose packing of random data always changes values, or may.
LOSSY_ALWAYS = ("marlin-wna16-int8act/1",)

LAYOUT_IDS = tuple(LAYOUTS)

#: Scale dtype and group sizes of random specs (0: one scale per channel), where they differ from what a layout says.
KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "rdna3-int4/1": ("f16", (32, 64)),
    "cpu-amx-int8/1": ("bf16", (0,)),
    "marlin-act-order/1": ("f16", (32, 64)),
    "marlin-fp8/1": ("bf16", (128, 0)),
    "marlin-fp8-fp16/1": ("f16", (128, 0)),
    "flashinfer-cutlass-fp8-block/1": ("bf16", (128,)),
    "aiter-fp8-channel-fnuz/1": ("bf16", (0,)),
}


def kinds(layout: Layout) -> tuple[str, tuple[int, ...]]:
    """The widest of the float scales that a layout holds, and every group size that it does not refuse."""
    held = layout.scale_dtypes
    scale = next((one for one in ("e4m3", "e8m0", "f32", "bf16") if one in held), held[0])
    groups = (*(layout.group_sizes or (32, 64)), *((0,) if layout.channelwise else ()))
    spec = MatrixSpec(role="w2", n=4096, k=4096, element=layout.elements[0], group_size=64, scale_dtype=scale)
    spec = replace(spec, act_order=layout.act_order)
    refused = {
        group
        for group in groups
        for problem in layout.problems(replace(spec, group_size=group or spec.k))
        if problem.code == "layout.group-size"
    }
    return scale, tuple(group for group in groups if group not in refused)


def multiples(layout: Layout, spec: MatrixSpec) -> tuple[int, int]:
    """Smallest legal (rows per half, columns), found by asking `problems`."""
    n = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if not _complains(layout, spec, "layout.n-multiple", n=n))
    k = next(k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if not _complains(layout, spec, "layout.k-multiple", k=k))
    return n, k


def _complains(layout: Layout, spec: MatrixSpec, code: str, n: int | None = None, k: int | None = None) -> bool:
    halves = 2 if spec.role == "w13" and spec.gated else 1
    sized = spec.with_sizes(n=None if n is None else halves * n, k=k)
    return any(problem.code == code for problem in layout.problems(sized))


def specs(layout_id: str, *, rows: int = 1, columns: int = 2) -> Iterator[MatrixSpec]:
    """Specs of that layout for both roles, with and without zero points and bias, `rows` x `columns` units large."""
    layout = get_layout(layout_id)
    scale, groups = KINDS.get(layout_id) or kinds(layout)
    for element in layout.elements:
        for group in groups:
            for role in ("w13", "w2"):
                for extras in (False, True):
                    base = MatrixSpec(
                        role=role,  # type: ignore[arg-type]
                        n=4096,
                        k=4096,
                        element=element,
                        group_size=group or 4096,
                        scale_dtype=scale,
                        symmetric=not (extras and layout.zero_points),
                        act_order=layout.act_order,
                        bias_dtype="bf16" if extras and layout.biased else None,
                    )
                    n, k = multiples(layout, base)
                    k = math.lcm(k, group or 1) * columns
                    yield base.with_sizes(n=n * rows * (2 if role == "w13" else 1), k=k)
