"""Name the likely cause of an error from its pattern.

The error of an output feature with one wrong weight, scale, zero point or bias is a multiple of a known vector over the
tokens, and two dozen tokens tell these vectors apart. Whether a check passes does not depend on the diagnosis.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.check.comparison import difference
from moeq.reference.arithmetic import Emulated

#: Least number of tokens by which one vector can be told from another.
MIN_ROWS = 4

#: Share of an error's norm that a cause must explain.
EXPLAINED = 0.98

#: Largest number of output features that are diagnosed one by one.
MAX_DIAGNOSED_FEATURES = 3


@dataclass(frozen=True)
class Evidence:
    """One expert's product, with its inputs."""

    x: Tensor  #: `[T, K]` input rows
    weight: Tensor  #: `[N, K]` dequantised weights of the reference
    groups: Tensor  #: int `[K]`, group of each input feature
    actual: Tensor  #: `[T, N]`, result of the kernels
    emulated: Emulated  #: expected result and its bounds


def diagnose(evidence: Evidence, others: Iterable[tuple[str, Iterable[Emulated]]]) -> str | None:
    """Return the likely cause in words, or None.

    Args:
        others: (name of other weights, such as `expert 3 up`, products of the same rows with these weights).
    """
    exceedance = difference(evidence.actual, evidence.emulated.value) / evidence.emulated.bound
    wrong = torch.where((exceedance > 1).any(dim=0))[0]
    if len(wrong) > evidence.weight.shape[0] // 4:
        for title, ways in others:
            if any(_agrees(evidence.actual, way) for way in ways):
                return f"it computes {title}"
    worst = wrong[exceedance.amax(dim=0)[wrong].argsort(descending=True)][:MAX_DIAGNOSED_FEATURES].tolist()
    found = {feature: cause for feature in worst if (cause := _cause(evidence, feature))}
    if len(wrong) == 1 and found:
        return f"looks like {found[worst[0]]}"
    causes = [f"output feature {feature}: {cause}" for feature, cause in found.items()]
    if not causes:
        return f"output features {_span(wrong.tolist())}" if 1 < len(wrong) < evidence.weight.shape[0] else None
    rest = f" and {len(wrong) - len(causes)} more features" if len(wrong) > len(causes) else ""
    return "looks like " + "; ".join(causes) + rest


def _agrees(actual: Tensor, way: Emulated) -> bool:
    return actual.shape == way.value.shape and bool((difference(actual, way.value) <= way.bound).all())


def _cause(evidence: Evidence, feature: int) -> str | None:
    """Return the cause whose vector over the tokens explains the error of one output feature; None if none fits."""
    error = evidence.actual[:, feature].double() - evidence.emulated.value[:, feature]
    if len(error) < MIN_ROWS or not bool(error.isfinite().all()):
        return None
    noise = float((evidence.emulated.bound[:, feature].norm() / error.norm()) ** 2)
    x, weight = evidence.x.double(), evidence.weight[feature].double()
    count = int(evidence.groups.max()) + 1
    spread = torch.nn.functional.one_hot(evidence.groups.long(), count).double()
    found: list[tuple[float, str]] = []
    # On a tie the first cause wins: single weights, then scales, zero points and the bias.
    for vectors, text in (
        (x, "one weight, of input feature {at}"),
        ((x * weight) @ spread, "the scale of group {at}"),
        (x @ spread, "the zero point of group {at}"),
        (torch.ones_like(x[:, :1]), "its bias"),
    ):
        norms = vectors.square().sum(dim=0).clamp_min(1e-300)
        explained = (error @ vectors).square() / norms / error.square().sum()
        at = int(explained.argmax())
        found.append((float(explained[at]), text.format(at=at)))
    best, text = max(found, key=lambda one: one[0])
    return text if best >= EXPLAINED and noise < 0.25 else None


def _span(numbers: list[int]) -> str:
    """Spell two or more ascending numbers as `0-15` or `3, 17, 40 ...`."""
    if numbers[-1] - numbers[0] + 1 == len(numbers):
        return f"{numbers[0]}-{numbers[-1]}"
    return ", ".join(map(str, numbers[:6])) + (" ..." if len(numbers) > 6 else "")
