"""NVFP4: E2M1 codes, one E4M3 scale per 16 of them, one float32 scale per tensor.

Tensors: compressed-tensors `weight_packed` U8 `[N, K / 2]`, `weight_scale` F8_E4M3 `[N, K / 16]`,
`weight_global_scale` F32, which divides; ModelOpt `weight`, `weight_scale`, `weight_scale_2` F32, which multiplies and
is the reciprocal. `input_global_scale` and `input_scale` are for 4-bit activations; weight-only files lack them.
Checked against compressed-tensors 0.17 to 0.20 and nvidia-modelopt 0.47.

Llama 4 stores its stacked experts transposed. ModelOpt transposes them, quantises, and transposes codes and scales
back: `weight` U8 `[K / 2, N]` with the two codes of a byte along K, `weight_scale` `[K / 16, N]`
(`maybe_transpose_expert_weight_dimensions`; `Llama4Model.load_weights` in vLLM transposes both again).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.schemes.base import ScaleKey, Scheme
from moeq.schemes.bits import nibble_codes, pack_nibbles
from moeq.schemes.declared import Declared
from moeq.schemes.format import Context, Described, Encoding, FastView, Format, PartRoles, Parts, PartSig, matrices
from moeq.schemes.mxfp4 import fp4_spec

if TYPE_CHECKING:
    from torch import Tensor


#: Descriptions of plain and of transposed matrices; a scheme has one of them as its `packing`.
_BY_ROWS = "two codes per byte along K, low nibble first"
_BY_COLUMNS = "two codes per byte along K, low nibble first, rows and columns exchanged"


class Nvfp4(Format):
    """NVFP4 weights with the part names of compressed-tensors or of ModelOpt."""

    id = "nvfp4"
    title = "NVFP4: E2M1 codes, E4M3 scales per 16, float32 scale per tensor"
    parts: ClassVar[PartRoles] = {
        "weight_packed": "codes",
        "weight": "codes",
        "weight_scale": "scale",
        "weight_global_scale": "scale2",
        "weight_scale_2": "scale2",
        "input_global_scale": "other",
        "input_scale": "other",
        "bias": "bias",
    }
    fast_view = FastView(divisors=("weight_global_scale",))
    bijective = ("codes", "scale")

    def matches(self, parts: Parts, declared: Declared | None) -> bool:
        found = matrices(parts, **{self.name_of("codes", parts): ("U8",), "weight_scale": ("F8_E4M3",)})
        return found is not None and not parts.keys().isdisjoint(_GLOBAL)

    def out_features(self, parts: Parts) -> int:
        return parts[self.name_of("codes", parts)].shape[1 if self._is_transposed(parts) else 0]

    def describe(self, parts: Parts, context: Context) -> Described:
        for part in parts.keys() & set(_GLOBAL):
            if math.prod(parts[part].shape) != 1:
                context.refuse(f"{part} has shape {list(parts[part].shape)}, expected one number")
        transposed = self._is_transposed(parts)
        upright = {
            part: sig._replace(shape=sig.shape[::-1]) if transposed and part in _MATRICES else sig
            for part, sig in parts.items()
        }
        spec = fp4_spec(upright, context, self.name_of("codes", parts), "weight_scale", 16, "e4m3")
        encoding = Encoding(
            "u8-packed",
            _BY_COLUMNS if transposed else _BY_ROWS,
            group_shape=(1, 16),
            scale2=ScaleKey("f32", "tensor", (-1, -1)),
        )
        return self._described(spec, context.declared, encoding)

    def unpack(self, parts: Mapping[str, Tensor], spec: MatrixSpec, scheme: Scheme) -> QuantizedMatrix:
        weight, scales = parts[self.name_of("codes", parts)], parts["weight_scale"]
        if scheme.packing == _BY_COLUMNS:
            weight, scales = _transposed(weight), _transposed(scales)
        return QuantizedMatrix(
            spec=spec,
            codes=nibble_codes(weight),
            scales=scales.contiguous(),
            global_scale=_multiplier(parts).expand(spec.n).contiguous(),
            bias=parts.get("bias"),
        )

    def repack(self, matrix: QuantizedMatrix, part: str, sig: PartSig, scheme: Scheme) -> Tensor | None:
        if part in _MATRICES:
            found = matrix.scales if part == "weight_scale" else pack_nibbles(matrix.codes)
            return _transposed(found) if scheme.packing == _BY_COLUMNS else found
        if matrix.global_scale is None or self.parts.get(part) != "scale2":
            return None
        multiplier = matrix.global_scale[:1].float()
        stored = multiplier if part == "weight_scale_2" else multiplier.new_tensor([divisor_of(float(multiplier))])
        return stored.reshape(sig.shape)

    def _is_transposed(self, parts: Parts) -> bool:
        """Return whether matrices are stored transposed: then one scale per 8 bytes lies along the first axis."""
        weight, scale = parts[self.name_of("codes", parts)].shape, parts["weight_scale"].shape
        return scale == (weight[0] // 8, weight[1])

    def fast_view_of(self, scheme: Scheme) -> FastView | None:
        """Return no view of transposed matrices, whose words of eight codes along K are not contiguous."""
        return None if scheme.packing == _BY_COLUMNS else self.fast_view

    def is_bijective(self, part: str, spec: MatrixSpec) -> bool:
        # A stored divisor is not determined: several float32 divisors may have the same reciprocal.
        return super().is_bijective(part, spec) or part == "weight_scale_2"


#: Parts that are matrices.
_MATRICES = ("weight_packed", "weight", "weight_scale")


def _transposed(matrix: Tensor) -> Tensor:
    """Transpose a matrix of bytes, keeping its dtype."""
    import torch

    return matrix.view(torch.uint8).t().contiguous().view(matrix.dtype)


#: Parts that hold the second-level scale.
_GLOBAL = ("weight_global_scale", "weight_scale_2")


def _multiplier(parts: Mapping[str, Tensor]) -> Tensor:
    """Return the second-level scale as a multiplier, float32 `[1]`: a divisor's reciprocal as vLLM 0.33 forms it."""
    if "weight_scale_2" in parts:
        return parts["weight_scale_2"].float().reshape(1)
    divisor = parts["weight_global_scale"].double().reshape(1)
    if not bool(divisor > 0):
        raise MoeqError("source.bad-data", f"weight_global_scale is {float(divisor)}, expected a positive number")
    return (1 / divisor).float()


def divisor_of(multiplier: float) -> float:
    """Return the float32 divisor that compressed-tensors stores for a multiplier; readers compute 1 / divisor.

    The result is the first of the reciprocal and its two neighbours whose own float32 reciprocal is the multiplier, or
    the reciprocal if there is none.
    """
    import numpy as np

    wanted = np.float32(multiplier)
    with np.errstate(divide="ignore", over="ignore"):
        nearest = np.float32(1 / np.float64(wanted))
        steps = (nearest, np.nextafter(nearest, nearest * 2), np.nextafter(nearest, nearest / 2))
        return float(next((divisor for divisor in steps if np.float32(1) / divisor == wanted), nearest))
