"""Cheap checks of decoded data: scales have to be finite."""

from __future__ import annotations

from moeq.errors import MoeqError
from moeq.matrix import QuantizedMatrix
from moeq.schemes.dequantize import scale_values


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
