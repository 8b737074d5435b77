"""Byte weights, FP8 as a rule, under three kinds of scales.

Per output channel or per tensor: `weight` F8_E4M3 `[N, K]`, `weight_scale` `[N, 1]`, `[N]` or one number; static
activations add `input_scale`. Written by compressed-tensors `float-quantized`, ModelOpt FP8, Quark and FBGEMM. A scale
per tensor is repeated for every row of the logical matrix, so that gate and up keep their own.

Per block of rows and columns: `weight` F8_E4M3 (SGLang also I8) `[N, K]` and `weight_scale_inv` (DeepSeek, Qwen, GLM,
MiniMax), `weight_scale` (compressed-tensors; ModelOpt's FP8_PB_WO as `[rows, 1, columns, 1]`) or `scale` (DeepSeek-V4)
`[ceil(N / 128), ceil(K / 128)]`, F32, BF16 or exponent bytes. Despite the name `_inv`, the scale multiplies. Edge
blocks may be partial. The config may declare blocks of another size (`weight_block_size`, `block_structure`).

MXFP8: `weight` F8_E4M3 `[N, K]`, `weight_scale` U8 `[N, K / 32]` exponents. Written by compressed-tensors
`mxfp8-quantized` (0.19) and ModelOpt 0.47.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import Scheme
from moeq.schemes.declared import Declared
from moeq.schemes.format import Context, Described, Encoding, FastView, Format, PartRoles, Parts, PartSig, matrices

if TYPE_CHECKING:
    from torch import Tensor


class Fp8(Format):
    """FP8 weights, scales per channel or per tensor."""

    id = "fp8"
    title = "FP8 (E4M3): one scale per output channel or tensor"
    parts: ClassVar[PartRoles] = {"weight": "codes", "weight_scale": "scale", "input_scale": "other", "bias": "bias"}
    fast_view = FastView(repeated_scales=True)
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get("weight_scale")
        if weight is None or scale is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
            return False
        # A single block has one scale as well.
        if scale.shape == (1, 1) and declared is not None and declared.strategy == "block":
            return False
        return scale.shape in ((weight.shape[0], 1), (weight.shape[0],), (1,), (1, 1), ())

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        context.expect_input_features(k)
        per_channel = parts["weight_scale"].shape in ((n, 1), (n,))
        spec = context.spec(
            parts, n, k, element="e4m3", group_size=k, scale_dtype=context.float_name(parts, "weight_scale")
        )
        encoding = Encoding(
            "f8",
            "one byte per code",
            granularity="channel" if per_channel else "tensor",
            group_shape=(1, -1) if per_channel else (-1, -1),
        )
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        scales = parts["weight_scale"].reshape(-1, 1).expand(spec.n, 1).contiguous()
        return QuantizedMatrix(spec, parts["weight"].view(torch.uint8), scales, bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "weight":
            return matrix.codes.contiguous().view(torch.float8_e4m3fn)
        if part != "weight_scale":
            return None
        per_channel = scheme.weight.scale.granularity == "channel"
        return (matrix.scales if per_channel else matrix.scales[:1]).reshape(sig.shape)


#: Rows and columns of a block where the config says nothing.
_BLOCK = (128, 128)


class Fp8Block(Format):
    """Byte weights with block scales."""

    id = "fp8-block"
    title = "FP8 (E4M3): one scale per block, 128 x 128 as a rule"
    parts: ClassVar[PartRoles] = {
        "weight": "codes",
        "weight_scale_inv": "scale",
        "weight_scale": "scale",
        "scale": "scale",
        "input_scale": "other",
        "bias": "bias",
    }
    fast_view = FastView(repeated_scales=True)
    bijective = ("codes", "scale")

    def refusal_of(self, scheme: Scheme) -> str | None:
        if scheme.weight.dtype != "int8":
            return None
        return "no layout holds int8 weights in blocks; SGLang, which has them, reads them as they are"

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        weight, scale = parts.get("weight"), parts.get(self.name_of("scale", parts))
        if weight is None or scale is None or weight.dtype not in ("F8_E4M3", "I8"):
            return False
        blocks = len(scale.shape) == 2 or (len(scale.shape) == 4 and scale.shape[1::2] == (1, 1))
        return len(weight.shape) == 2 and blocks

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        name = self.name_of("scale", parts)
        context.expect_input_features(k)
        rows, columns = context.declared.block or _BLOCK
        found = parts[name].shape
        expected = (-(-n // rows), -(-k // columns))
        blocks = found[::2] if len(found) == 4 else found
        if blocks != expected:
            detail = f"{name} is {list(found)}, blocks of {rows} x {columns} need {list(expected)}"
            context.refuse(detail, f"weight is [{n}, {k}]")
        integer = parts["weight"].dtype == "I8"
        size = min(columns, k)
        scale_dtype = context.float_name(parts, name, ("F32", "BF16", "F16", "F8_E8M0", "U8"))
        spec = context.spec(parts, n, k, "int8" if integer else "e4m3", size, scale_dtype)
        storage = "i8" if integer else "f8"
        encoding = Encoding(storage, "one byte per code", granularity="block", group_shape=(rows, columns))
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        blocks = parts[self.name_of("scale", parts)].reshape(-1, spec.num_groups)
        blocks = blocks.view(torch.uint8) if spec.scale_dtype == "e8m0" else blocks
        scales = blocks.repeat_interleave(scheme.weight.scale.group_shape[0], dim=0)[: spec.n].contiguous()
        codes = parts["weight"].view(torch.uint8)
        return QuantizedMatrix(spec, codes ^ 0x80 if spec.integer else codes, scales, bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "weight":
            codes = matrix.codes.contiguous()
            return (codes ^ 0x80).view(torch.int8) if matrix.spec.integer else codes.view(torch.float8_e4m3fn)
        if self.parts.get(part) != "scale":
            return None
        return matrix.scales[:: scheme.weight.scale.group_shape[0]].contiguous().reshape(sig.shape)


class Mxfp8(Format):
    """OCP MXFP8 weights."""

    id = "mxfp8"
    title = "MXFP8: E4M3 codes, exponent bytes per 32"
    parts: ClassVar[PartRoles] = {"weight": "codes", "weight_scale": "scale", "bias": "bias"}
    fast_view = FastView()
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, weight=("F8_E4M3",), weight_scale=("U8", "F8_E8M0"))
        return found is not None and found[0].shape[0] == found[1].shape[0]

    def describe(self, parts: Parts, context: Context) -> Described:
        n, k = parts["weight"].shape
        if parts["weight_scale"].shape != (n, -(-k // 32)):
            found = list(parts["weight_scale"].shape)
            context.refuse(f"weight_scale is {found}, expected {[n, -(-k // 32)]} (one per 32 codes)")
        spec = context.spec(parts, n, k, element="e4m3", group_size=32, scale_dtype="e8m0")
        encoding = Encoding("f8", "one byte per code", group_shape=(1, 32))
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        import torch

        codes = parts["weight"].view(torch.uint8)
        exponents = parts["weight_scale"].contiguous().view(torch.uint8)
        return QuantizedMatrix(spec, codes, exponents, bias=parts.get("bias"))

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        import torch

        if part == "weight":
            return matrix.codes.contiguous().view(torch.float8_e4m3fn)
        return matrix.scales if part == "weight_scale" else None
