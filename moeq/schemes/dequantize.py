"""Dequantisation: the one definition of the numbers that codes, scales and zero points of a matrix stand for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix

if TYPE_CHECKING:
    from torch import Tensor

#: Values of the OCP Microscaling FP4 codes (E2M1): bit 3 is the sign.
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantize(matrix: QuantizedMatrix) -> Tensor:
    """Compute the exact product `scale * (code - zero)`, rounded once: float32 `[N, K]`.

    With 16-bit scales, every product fits float32 exactly (11 scale bits times 8 code bits). With float32 scales, the
    product is rounded once. With a second-level scale, the product is computed in float64 and rounded to float32.
    """
    import torch

    numbers = code_values(matrix)
    if matrix.zeros is not None:
        numbers -= _per_column(matrix, matrix.zeros.to(torch.float32))
    scales = _per_column(matrix, scale_values(matrix))
    if matrix.global_scale is None:
        return numbers.mul_(scales)
    product = numbers.double() * scales.double() * matrix.global_scale.double().unsqueeze(1)
    return product.float()


def code_values(matrix: QuantizedMatrix) -> Tensor:
    """Return codes as numbers, float32 `[N, K]`; integers without stored zeros are relative to the symmetric zero."""
    import torch

    spec = matrix.spec
    if matrix.codes.is_floating_point():
        return matrix.codes.to(torch.float32, copy=True)
    if spec.element == "e2m1":
        return torch.tensor(E2M1_VALUES)[matrix.codes.int()]
    if spec.element in ("e4m3", "e5m2"):
        kind = torch.float8_e4m3fn if spec.element == "e4m3" else torch.float8_e5m2
        return matrix.codes.contiguous().view(kind).float()
    offset = spec.symmetric_zero if matrix.zeros is None else 0
    return matrix.codes.float() - offset


def scale_values(matrix: QuantizedMatrix) -> Tensor:
    """Return scales as numbers, float32 `[N, G]`."""
    return e8m0_values(matrix.scales) if matrix.spec.scale_dtype == "e8m0" else matrix.scales.float()


def e8m0_values(exponents: Tensor) -> Tensor:
    """Return float32 values `2**(e - 127)` of OCP E8M0 bytes; 255 is NaN, 0 is the subnormal `2**-127`."""
    import torch

    bits = exponents.to(torch.int32) << 23
    bits = torch.where(exponents == 0, torch.full_like(bits, 1 << 22), bits)
    values = bits.view(torch.float32)
    return torch.where(exponents == 255, torch.full_like(values, float("nan")), values)


def _per_column(matrix: QuantizedMatrix, per_group: Tensor) -> Tensor:
    """Return values per group, `[N, G]`, for every column: `[N, K]`."""
    spec = matrix.spec
    if matrix.group_index is not None:
        return per_group[:, matrix.group_index.long()]
    return per_group.repeat_interleave(spec.group_size, dim=1)[:, : spec.k]


def check_matrix(matrix: QuantizedMatrix, where: str) -> None:
    """Refuse scales that are NaN or infinite. Raises MoeqError `source.bad-data` naming the first."""
    import torch

    bad = ~torch.isfinite(scale_values(matrix))
    if bool(bad.any()):
        row, group = (int(index) for index in bad.nonzero()[0])
        value = matrix.scales[row, group].item()
        detail = f"{where}: {int(bad.sum())} scales are not finite, first row {row} group {group}: {value}"
        raise MoeqError("source.bad-data", detail, "the checkpoint is damaged or its quantisation diverged")
    if matrix.global_scale is not None and not bool(torch.isfinite(matrix.global_scale).all()):
        raise MoeqError("source.bad-data", f"{where}: the global scale is not finite")
