"""int8 weights and int8 activations in vLLM's Triton kernel: the checkpoint's own order.

`weight` int8 `[N, K]` (the signed value: code minus 128), `scale` float32 `[N, 1]`, `bias` as stored. w13 is gate rows,
then up rows. Source: vLLM 0.33.0, `compressed_tensors_moe` (W8A8 int8).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.layouts.arranged import STORED_DTYPE, ArrangedLayout, Part
from moeq.layouts.arrangement import Arrangement
from moeq.layouts.base import Problem
from moeq.layouts.mxfp4 import IDENTITY_SCALE
from moeq.matrix import MatrixSpec

if TYPE_CHECKING:
    pass

_BYTES = Arrangement("n, k -> n k")


class Int8W8A8(ArrangedLayout):
    """Identity (see the module)."""

    id = "int8-w8a8/1"
    title = "int8 W8A8 Triton"
    source = "vLLM 0.33.0"
    elements = ("int8",)
    schemes = "int8 with one scale per channel, activations quantised per token"
    arch = "any GPU with Triton"
    slicing = "N by 1, K by 1"
    scale_dtypes = ("f16", "bf16", "f32")

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        parts = {
            "weight": Part("codes", _BYTES, (spec.n, spec.k), "I8", 8, flip=0x80),
            "scale": Part("scales", IDENTITY_SCALE, (spec.n, 1), "F32", 32, group=spec.group_size),
        }
        if spec.bias_dtype is not None:
            dtype = STORED_DTYPE[spec.bias_dtype]
            parts["bias"] = Part("bias", IDENTITY_SCALE, (spec.n,), dtype, 32 if dtype == "F32" else 16)
        return parts

    def problems(self, spec: MatrixSpec) -> list[Problem]:
        found = super().problems(spec)
        if spec.num_groups > 1:
            message = f"groups of {spec.group_size}; its kernel reads one scale per channel"
            found.append(Problem("layout.group-size", message))
        return found
