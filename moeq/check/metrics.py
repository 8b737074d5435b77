"""How far two tensors are apart, and where they are furthest apart."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ErrorStats:
    """Difference between a computed tensor and its reference.

    Attributes:
        max_abs: largest absolute difference.
        mean_abs: mean absolute difference.
        relative: Frobenius norm of the difference over that of the reference.
        cosine: cosine similarity of the two as vectors.
        worst: index of the largest absolute difference.
        worst_actual: the computed value there.
        worst_expected: the reference there.
        count: elements compared.
    """

    max_abs: float
    mean_abs: float
    relative: float
    cosine: float
    worst: tuple[int, ...]
    worst_actual: float
    worst_expected: float
    count: int


def compare(actual: Tensor, expected: Tensor) -> ErrorStats:
    """Compare in float64. Values that are not finite count as infinitely wrong unless both are the same.

    Raises:
        ValueError: the shapes differ, or there is nothing to compare (a check of nothing must not pass).
    """
    if actual.shape != expected.shape:
        raise ValueError(f"shapes differ: {tuple(actual.shape)} and {tuple(expected.shape)}")
    if actual.numel() == 0:
        raise ValueError("nothing to compare: the tensors are empty")
    actual, expected = actual.detach().cpu().double(), expected.detach().cpu().double()
    difference = (actual - expected).abs()
    difference = torch.where(actual == expected, torch.zeros_like(difference), difference)
    difference = torch.where(difference.isnan(), torch.full_like(difference, float("inf")), difference)
    flat = int(difference.argmax())
    worst = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), difference.shape))
    reference_norm = float(expected.norm())
    error_norm = float(difference.norm())
    return ErrorStats(
        max_abs=float(difference.flatten()[flat]),
        mean_abs=float(difference.mean()),
        relative=error_norm / reference_norm if reference_norm else (0.0 if error_norm == 0 else float("inf")),
        cosine=_cosine(actual, expected),
        worst=worst,
        worst_actual=float(actual.flatten()[flat]),
        worst_expected=float(expected.flatten()[flat]),
        count=actual.numel(),
    )


def _cosine(actual: Tensor, expected: Tensor) -> float:
    norms = float(actual.norm()) * float(expected.norm())
    if norms == 0:
        return 1.0 if torch.equal(actual, expected) else 0.0
    value = float((actual * expected).sum()) / norms
    return value if value == value else 0.0
