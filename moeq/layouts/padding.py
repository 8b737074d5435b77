"""Rounding sizes up to what a layout needs, before packing, with the cost known beforehand.

Gate and up are padded separately, with zero rows after each half, and w2 is padded along K. Padding consists of zero
codes, zero scales and zero zero points, unless the layout's rule says otherwise (`PaddingRule`).
A zero code is not the value zero, but it never counts: with groups, the padded scales are zero; with one scale per
channel, the padded columns of w2 meet activations that are zero because the padded rows of w13 have zero scales and
biases. Source of the rule: vLLM 0.33.0, `marlin_moe_padded_intermediate` and the MXFP4 size rounding of its oracle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.layouts.base import PaddingRule
from moeq.layouts.layout import Layout
from moeq.matrix import SCALE_BITS, MatrixSpec, QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PaddingPlan:
    """Padding of the two matrices of an expert."""

    rule: PaddingRule  #: the layout's rule
    w13: MatrixSpec  #: padded spec of w13 (n counts both halves)
    w2: MatrixSpec  #: padded spec of w2
    original_w13: MatrixSpec  #: spec before padding
    original_w2: MatrixSpec  #: spec before padding

    @property
    def extra_bytes(self) -> int:
        """Bytes that padding adds to one expert: codes, scales, zero points and biases."""
        padded, plain = (self.w13, self.w2), (self.original_w13, self.original_w2)
        return sum(logical_bytes(spec) for spec in padded) - sum(logical_bytes(spec) for spec in plain)

    @property
    def changes(self) -> bool:
        """Whether anything is padded."""
        return self.extra_bytes > 0

    def pad(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Return the padded matrix, or the matrix itself where its size stays.

        Raises MoeqError `usage.padding-act-order` where act-order columns would have to be padded.
        """
        before, after = self._specs(matrix.spec)
        if before == after:
            return matrix
        if matrix.group_index is not None and before.k != after.k:
            raise MoeqError(
                "usage.padding-act-order",
                f"{before.role} has act-order, so K = {before.k} cannot be padded to {after.k}",
                "re-quantise with desc_act=False",
            )
        code = before.symmetric_zero if self.rule.midpoint and before.symmetric else 0
        padded = _resized(matrix, after, code)
        if not self.rule.same_scale or before.num_groups > 1:
            return padded
        row_scales = _extended(matrix.scales[:, 0], before.halves, after.n)
        return replace(padded, scales=row_scales.unsqueeze(1))

    def unpad(self, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Invert `pad` exactly."""
        before, after = self._specs(matrix.spec)
        return matrix if before == after else _resized(matrix, before)

    def _specs(self, spec: MatrixSpec) -> tuple[MatrixSpec, MatrixSpec]:
        return (self.original_w2, self.w2) if spec.role == "w2" else (self.original_w13, self.w13)


def plan_padding(layout: Layout, w13: MatrixSpec, w2: MatrixSpec) -> PaddingPlan:
    """Plan how a layout pads an expert whose w13 and w2 have these specs.

    The caller checks `layout.problems` of the padded specs; here sizes are only rounded.
    """
    rule = layout.padding
    size = rule.padded(w2.k, w2.group_size if w2.num_groups > 1 else None, gated=w13.gated)
    hidden = -(-w2.n // rule.hidden) * rule.hidden
    return PaddingPlan(
        rule=rule,
        w13=w13.with_sizes(n=w13.halves * size, k=hidden),
        w2=w2.with_sizes(n=hidden, k=size),
        original_w13=w13,
        original_w2=w2,
    )


def logical_bytes(spec: MatrixSpec) -> int:
    """Return the bytes of the numbers of a matrix, tightly packed: codes, scales, zero points, bias."""
    per_group = SCALE_BITS[spec.scale_dtype] + (0 if spec.symmetric else spec.bits)
    bits = spec.n * (spec.k * spec.bits + spec.num_groups * per_group)
    return bits // 8 + spec.n * (SCALE_BITS[spec.bias_dtype] // 8 if spec.bias_dtype else 0)


def _resized(matrix: QuantizedMatrix, spec: MatrixSpec, code: int = 0) -> QuantizedMatrix:
    """Crop or pad the matrix to the sizes of `spec`, each half of a gated w13 separately.

    Added codes are `code`; added scales, zero points and biases are zero, and added global scales repeat the last one.
    """
    halves = spec.halves

    def resize(tensor: Tensor, columns: int | None, fill: int = 0) -> Tensor:
        old = tensor.reshape(halves, matrix.spec.n // halves, *tensor.shape[1:])
        shape = [halves, spec.n // halves] + ([] if columns is None else [columns])
        new = tensor.new_zeros(shape) if tensor.element_size() > 1 else _zero_bytes(tensor, shape)
        part = tuple(slice(0, min(sizes)) for sizes in zip(old.shape, new.shape, strict=True))
        if fill:
            new.fill_(fill)
        new[part] = old[part]
        return new.flatten(0, 1)

    return replace(
        matrix,
        spec=spec,
        codes=resize(matrix.codes, spec.k, code),
        scales=resize(matrix.scales, spec.num_groups),
        zeros=None if matrix.zeros is None else resize(matrix.zeros, spec.num_groups),
        bias=None if matrix.bias is None else resize(matrix.bias, None),
        global_scale=None if matrix.global_scale is None else _extended(matrix.global_scale, halves, spec.n),
    )


def _extended(scales: Tensor, halves: int, rows: int) -> Tensor:
    """Resize scales `[N]`, one for each row: added rows take the scale of the last row of their half."""
    old = scales.reshape(halves, -1)
    if rows // halves <= old.shape[1]:
        return old[:, : rows // halves].flatten()
    new = old[:, -1:].repeat(1, rows // halves)
    new[:, : old.shape[1]] = old
    return new.flatten()


def _zero_bytes(tensor: Tensor, shape: list[int]) -> Tensor:
    """Return zeros of a one-byte dtype; torch cannot fill every float8 type directly."""
    import torch

    return torch.zeros(shape, dtype=torch.uint8).view(tensor.dtype)
