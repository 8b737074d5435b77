"""For every layout: what it holds, as small specs, so that properties can be tested over all of them alike."""

from __future__ import annotations

import math
from collections.abc import Iterator

from moeq.layouts.arranged import ArrangedLayout
from moeq.layouts.registry import LAYOUTS, get_layout
from moeq.matrix import MatrixSpec

#: Layouts whose packing of random data always changes values, or may.
LOSSY_ALWAYS = ("marlin-wna16-int8act/1",)

LAYOUT_IDS = tuple(LAYOUTS)

#: Scale dtype and group size that a layout's random specs take.
_MX = ("e8m0", (32,))
_FLOAT = ("bf16", (32, 64, 0))  # 0: one scale per channel
KINDS: dict[str, tuple[str, tuple[int, ...]]] = {
    "trtllm-mxint4/1": ("bf16", (32,)),
    "aiter-int4/1": ("bf16", (32, 64)),
    "rdna3-int4/1": ("f16", (32, 64)),
    "int8-w8a8/1": ("f32", (0,)),
    "cpu-amx-int8/1": ("bf16", (0,)),
    "marlin-act-order/1": ("f16", (32, 64)),
    "trtllm-nvfp4/1": ("e4m3", (16,)),
    "flashinfer-cutlass-nvfp4/1": ("e4m3", (16,)),
    "cutlass-nvfp4/1": ("e4m3", (16,)),
    "flashinfer-cutedsl-nvfp4/1": ("e4m3", (16,)),
    "b12x-nvfp4/1": ("e4m3", (16,)),
    "b12x-nvfp4-a16/1": ("e4m3", (16,)),
    "flashinfer-b12x-nvfp4/1": ("e4m3", (16,)),
    "marlin-nvfp4/1": ("e4m3", (16,)),
    "marlin-nvfp4-fp16/1": ("e4m3", (16,)),
    "marlin-fp8/1": ("bf16", (128, 0)),
    "marlin-fp8-fp16/1": ("f16", (128, 0)),
    "marlin-mxfp8/1": ("e8m0", (32,)),
    "trtllm-mxfp8/1": ("e8m0", (32,)),
    "deepgemm-mxfp8/1": ("e8m0", (32,)),
    "aiter-mxfp8/1": ("e8m0", (32,)),
    "xpu-mxfp8/1": ("e8m0", (32,)),
    "xpu-fp8-block/1": ("f32", (128,)),
    "xpu-fp8-tensor/1": ("f32", (0,)),
    "cpu-amx-fp8/1": ("f32", (128,)),
    "trtllm-fp8-block/1": ("f32", (128,)),
    "flashinfer-cutlass-fp8-block/1": ("bf16", (128,)),
    "aiter-fp8-block/1": ("f32", (128,)),
    "aiter-fp8-block-fnuz/1": ("f32", (128,)),
    "deepgemm-fp8-sm90/1": ("e8m0", (128,)),
    "deepgemm-fp8-sm100/1": ("e8m0", (128,)),
    "aiter-fp8-channel/1": ("f32", (0,)),
    "aiter-fp8-channel-fnuz/1": ("bf16", (0,)),
    "trtllm-fp8-tensor/1": ("f32", (0,)),
    "flashinfer-cutlass-fp8-tensor/1": ("f32", (0,)),
    "aiter-fp8-tensor/1": ("f32", (0,)),
    "aiter-fp8-tensor-fnuz/1": ("f32", (0,)),
}


def arranged(layout_id: str, *, allow_lossy: bool = False) -> ArrangedLayout:
    layout = get_layout(layout_id, allow_lossy=allow_lossy)
    assert isinstance(layout, ArrangedLayout)
    return layout


def multiples(layout: ArrangedLayout, spec: MatrixSpec) -> tuple[int, int]:
    """Smallest legal (rows per half, columns), found by asking `problems`."""
    n = next(n for n in (1, 2, 4, 8, 16, 32, 64, 128, 256) if not _complains(layout, spec, "layout.n-multiple", n=n))
    k = next(k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if not _complains(layout, spec, "layout.k-multiple", k=k))
    return n, k


def _complains(layout: ArrangedLayout, spec: MatrixSpec, code: str, n: int | None = None, k: int | None = None) -> bool:
    halves = 2 if spec.role == "w13" and spec.gated else 1
    sized = spec.with_sizes(n=None if n is None else halves * n, k=k)
    return any(problem.code == code for problem in layout.problems(sized))


def specs(layout_id: str, *, rows: int = 1, columns: int = 2) -> Iterator[MatrixSpec]:
    """Specs of that layout for both roles, with and without zero points and bias, `rows` x `columns` units large."""
    layout = arranged(layout_id)
    scale, groups = KINDS.get(layout_id, _MX if layout.elements == ("e2m1",) else _FLOAT)
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
