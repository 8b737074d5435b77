"""int4 and int8 for vLLM's own Triton kernels, in the order of rows and columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.layouts.arrangement import Arrangement
from moeq.layouts.layout import Layout
from moeq.layouts.mxfp4 import IDENTITY, IDENTITY_SCALE, bias_as, scale_as
from moeq.layouts.parts import Part
from moeq.layouts.readers import MOEQ, VLLM
from moeq.matrix import MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


_ZERO_PAIRS = Arrangement("n p2, g -> n g | p")


class TritonWNA16(Layout):
    """WNA16: the `moe_wna16` loader, and the TRITON backend of the WNA16 oracle.

    `weight` uint8 `[N, K / 2]`, even k in the low nibble (int8: `[N, K]`, offset by 128); `scale` `[N, G]` as stored;
    `zero` uint8 `[N / 2, G]`, even n in the low nibble (int8: `[N, G]`), absent where symmetric. No bias.

    GPTQ v1 files can mean a zero point of 16 (stored 15), which no nibble holds. vLLM's loader adds 1 to whole bytes,
    so the 16 carries into the neighbouring row's zero point. Both are then wrong, so packing refuses; where loss is
    allowed, the bytes are vLLM's. Source: vLLM 0.33.0, `moe_wna16.py`.
    """

    id = "triton-wna16/1"
    title = "Triton WNA16"
    readers = (VLLM("TRITON", "triton"), MOEQ("TRITON"))
    source = "vLLM 0.33.0"
    elements = ("int4", "int8")
    schemes = "int4 and int8, symmetric or with zero points"
    arch = "any GPU with Triton"
    slicing = "N by 1 (2 with int4 zero points), K by whole groups"
    lossy = "zero points above the largest code wrap around and carry into their neighbour"
    zero_points = True
    biased = False
    rearranges = True  # zero points of a source that go beyond the largest code take the reference path

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        four = spec.bits == 4
        shape = (spec.n, spec.k // 2 if four else spec.k)
        parts = {"weight": Part("codes", IDENTITY if four else IDENTITY_SCALE, shape, "U8", spec.bits)}
        parts["scale"] = scale_as(spec, IDENTITY_SCALE, (spec.n, spec.num_groups))
        if not spec.symmetric:
            shape = (spec.n // 2 if four else spec.n, spec.num_groups)
            order = _ZERO_PAIRS if four else IDENTITY_SCALE
            parts["zero"] = Part("zeros", order, shape, "U8", spec.bits, group=spec.group_size)
        return parts

    def losses(self, matrix: QuantizedMatrix) -> int:
        return 0 if matrix.zeros is None else int((matrix.zeros.int() >= 1 << matrix.spec.bits).sum())

    def check_values(self, matrix: QuantizedMatrix) -> None:
        if not self.allow_lossy:
            super().check_values(matrix)

    def encode(self, name: str, matrix: QuantizedMatrix) -> Tensor:
        if name != "zero" or matrix.zeros is None or not self.losses(matrix):
            return super().encode(name, matrix)
        import torch

        zeros = matrix.zeros.clone()
        if matrix.spec.bits == 4:
            zeros[1::2] += zeros[0::2] >> 4
        return (zeros & ((1 << matrix.spec.bits) - 1)).to(torch.uint8)


class Int8W8A8(Layout):
    """int8 weights and int8 activations.

    `weight` int8 `[N, K]` (the signed value: code minus 128), `scale` float32 `[N, 1]`, `bias` as stored. w13 is gate
    rows, then up rows. Source: vLLM 0.33.0, `compressed_tensors_moe` (W8A8 int8).
    """

    id = "int8-w8a8/1"
    title = "int8 W8A8 Triton"
    readers = (VLLM("TRITON", "triton"), MOEQ("TRITON"))
    source = "vLLM 0.33.0"
    family = "int8"
    grouped = False
    elements = ("int8",)
    schemes = "int8 with one scale per channel, activations quantised per token"
    arch = "any GPU with Triton"
    slicing = "N by 1, K by 1"
    scale_dtypes = ("f16", "bf16", "f32")

    def parts(self, spec: MatrixSpec) -> dict[str, Part]:
        return {
            "weight": Part("codes", IDENTITY_SCALE, (spec.n, spec.k), "I8", 8, flip=0x80),
            "scale": Part("scales", IDENTITY_SCALE, (spec.n, 1), "F32", 32, group=spec.group_size),
            **bias_as(spec, IDENTITY_SCALE),
        }
