"""Bound the error of e4m3 activations in a layer, computed exactly with quantised and with unquantised rows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moeq.check.comparison import EXPERT_FACTOR, Totals, ratio
from moeq.check.results import ExpertError, ProjectionResult
from moeq.check.whole_layer import Combine
from moeq.load.kernel_experts import prepared_layer
from moeq.reference.arithmetic import quantize_rows_e4m3
from moeq.reference.moe import Expert, rounded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from moeq.check.inputs import Inputs
    from moeq.load.packed_sample import PackedPart
    from moeq_kernels import PackedExperts

#: Largest relative error of a layer. Rounding normal tokens and intermediate rows to e4m3 costs about 4.5 %.
LIMIT = 0.08
RULE = (
    f"e4m3 loss: rows quantised to e4m3, all else exact, against unquantised rows: relative error at most {LIMIT} "
    f"({EXPERT_FACTOR} x for a single expert)"
)


class ActivationLoss:
    """Outputs of a layer with e4m3 rows and with unquantised rows, summed expert by expert, on the source's weights.

    Args:
        dtype: activation dtype, to which hidden rows are rounded before they are quantised.
        groups: count of features that share a scale, in input rows and in hidden rows.
    """

    def __init__(self, inputs: Inputs, width: int, dtype: torch.dtype, groups: tuple[int, int]) -> None:
        self._inputs, self._dtype, self._groups = inputs, dtype, groups
        shape = (inputs.x.shape[0], width)
        self._exact, self._quantised = (
            torch.zeros(shape, dtype=torch.float64, device=inputs.x.device) for _ in range(2)
        )
        self._experts: list[ExpertError] = []

    def add(self, number: int, expert: Expert, combine: Combine, tokens: Tensor, slots: Tensor) -> None:
        """Add the part of one expert, for `tokens` that have it in `slots`."""
        x = self._inputs.x[tokens]
        exact = expert.down.exact(_first(x.double(), expert, combine))
        hidden = rounded(_first(_e4m3(x, self._groups[0]), expert, combine), self._dtype)
        quantised = expert.down.exact(_e4m3(hidden, self._groups[1]))
        error = (quantised - exact).abs()
        row, column = divmod(int(error.argmax()), error.shape[1])
        relative = ratio(float(error.square().sum()), float(exact.square().sum()))
        most = EXPERT_FACTOR * LIMIT
        place = (int(tokens[row]), column)
        self._experts.append(ExpertError(number, len(tokens), relative, most, relative / most, place))
        weights = self._inputs.weights[tokens, slots].double().unsqueeze(1)
        self._exact.index_add_(0, tokens, exact * weights)
        self._quantised.index_add_(0, tokens, quantised * weights)

    def result(self, layer: int, k: int) -> ProjectionResult:
        """Return the result. At least one expert must have been added."""
        totals = Totals()
        rows = torch.arange(self._exact.shape[0])
        totals.add(self._quantised, self._exact, self._exact, torch.zeros_like(self._exact), rows)
        made = totals.result(layer, "e4m3 loss", k, "e4m3 rows against unquantised ones", tuple(self._experts))
        return replace(made, tolerance=LIMIT)


def require_prepared(parts: Sequence[PackedPart]) -> None:
    """Raise MoeqError `answer.no-kernel` if a Hopper GPU would not multiply these experts with e4m3 activations."""
    from moeq_kernels.hopper.w4a8.w4a8_launches import ready
    from moeq_kernels.records import PackedMatrix

    def without_data(matrix: PackedMatrix) -> PackedMatrix:
        held: dict[str, Any] = {one.name: getattr(matrix, one.name) for one in fields(matrix)}
        changed: dict[str, Any] = {name: one.to("meta") for name, one in held.items() if isinstance(one, Tensor)}
        return replace(matrix, **changed)

    for part in parts:
        experts: PackedExperts = part.experts.quantising("fp8")
        planned = replace(experts, w13=without_data(experts.w13), w2=without_data(experts.w2))
        prepared_layer(planned, top_k=1, max_tokens=1, gpu="H100")
        ready(experts)  # refuses scales that are too far apart


def _first(x: Tensor, expert: Expert, combine: Combine) -> Tensor:
    return combine(None if expert.gate is None else expert.gate.exact(x), expert.up.exact(x))


def _e4m3(x: Tensor, group: int) -> Tensor:
    """Quantise rows to e4m3 and back."""
    codes, scale = quantize_rows_e4m3(x, group)
    return codes.double() * scale.double().repeat_interleave(group, dim=1)[:, : x.shape[1]]
