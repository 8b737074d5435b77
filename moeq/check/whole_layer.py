"""Compare the fused layer end to end with the reference, with a bound on the accumulated rounding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moeq.check.comparison import EXPERT_FACTOR, Totals, difference, ratio, tolerance
from moeq.check.inputs import Inputs
from moeq.check.results import ExpertError, ProjectionResult
from moeq.reference.arithmetic import (
    CONFIDENCE,
    UNIT,
    Emulated,
    emulate_16bit,
    emulate_fp8,
    emulate_int8,
    quantize_rows,
    quantize_rows_e4m3,
)
from moeq.reference.moe import Expert, rounded

#: Function that combines gate (or None) and up.
Combine = Callable[[Tensor | None, Tensor], Tensor]

#: Largest number of int8 or e4m3 codes of a hidden row that may round to the other neighbour (chance below 1e-3 each).
FLIPPED_CODES = 4


@dataclass(frozen=True)
class Passage:
    """Outputs of one expert for its tokens, in float64."""

    expected: Tensor  #: `[T, H]`, computed without rounding, except that int8 and fp8 activations are quantised
    plain: Tensor  #: `[T, H]`, computed as plain 16-bit torch does
    variance: Tensor  #: `[T, H]`, square of the standard error of all roundings
    extra: Tensor  #: `[T, H]`, bound of errors that do not average out


def pass_16bit(
    x: Tensor, expert: Expert, first: dict[str, tuple[Emulated, ...]], combine: Combine, dtype: torch.dtype
) -> Passage:
    """Compute one expert in 16-bit arithmetic: weights, hidden rows and down weights round once, independently."""
    unit = UNIT[dtype]
    # `emulate_16bit` gives products with rounded weights first, and with weights that are not rounded last.
    exact, plain = ({name: ways[at].value for name, ways in first.items()} for at in (-1, 0))
    hidden = combine(exact.get("gate"), exact["up"])
    variance = (unit * hidden).square()
    for name, linear in (("gate", expert.gate), ("up", expert.up)):
        if linear is not None:
            spread = unit * (x.double().square() @ linear.weight.double().square().T).sqrt()
            moved = [combine(*_moved(exact, name, sign * spread)) for sign in (1, -1)]
            variance += torch.maximum(*((one - hidden).abs() for one in moved)).square()
    variance += (unit * hidden).square()  # rounding of the down weights
    down = expert.down.exact(hidden)
    plain_hidden = rounded(combine(plain.get("gate"), plain["up"]), dtype)
    plain_down = emulate_16bit(plain_hidden, expert.down, dtype)[0]
    return Passage(down, plain_down.value, variance @ expert.down.weight.double().square().T, plain_down.bound)


def pass_int8(
    x: Tensor, expert: Expert, first: dict[str, tuple[Emulated, ...]], combine: Combine, dtype: torch.dtype
) -> Passage:
    """Compute one expert with int8 activations: the hidden rows are rounded to `dtype`, then quantised."""
    values = {name: ways[0].value for name, ways in first.items()}
    hidden = rounded(combine(values.get("gate"), values["up"]), dtype)
    down = emulate_int8(hidden, expert.down)[0]
    step = quantize_rows(hidden)[1].double() + 2 * UNIT[dtype] * hidden.double().abs().amax(dim=1, keepdim=True)
    flips = FLIPPED_CODES * step * expert.down.weight.double().abs().amax(dim=1)
    return Passage(down.value, down.value, torch.zeros_like(down.value), down.bound + flips)


def pass_fp8(
    x: Tensor,
    expert: Expert,
    first: dict[str, tuple[Emulated, ...]],
    combine: Combine,
    dtype: torch.dtype,
    *,
    group: int,
    tensor_cores: bool,
) -> Passage:
    """Compute one expert with e4m3 activations: the hidden rows are rounded to `dtype`, then quantised in groups.

    A code that rounds to the other neighbour changes by at most 32, since the largest code is 448.
    """
    values = {name: ways[0].value for name, ways in first.items()}
    hidden = rounded(combine(values.get("gate"), values["up"]), dtype)
    product = emulate_fp8(hidden, expert.down, group, tensor_cores=tensor_cores)[0]
    scale = quantize_rows_e4m3(hidden, group)[1].double().amax(dim=1, keepdim=True)
    step = 32 * scale + 2 * UNIT[dtype] * hidden.double().abs().amax(dim=1, keepdim=True)
    flips = FLIPPED_CODES * step * expert.down.weight.double().abs().amax(dim=1)
    # The error of gate and up against their emulation reaches the hidden rows as well.
    moved = sum((ways[0].bound for ways in first.values()), torch.zeros_like(values["up"]))
    spread = (moved.square() @ expert.down.weight.double().square().T).sqrt() * CONFIDENCE
    return Passage(product.value, product.value, torch.zeros_like(product.value), product.bound + flips + spread)


def _moved(values: dict[str, Tensor], name: str, by: Tensor) -> tuple[Tensor | None, Tensor]:
    moved = {**values, name: values[name] + by}
    return moved.get("gate"), moved["up"]


class LayerComparison:
    """Sum of the experts' passages, which is compared with the output of the kernels."""

    def __init__(self, inputs: Inputs, width: int, dtype: torch.dtype) -> None:
        shape = (inputs.x.shape[0], width)
        self._inputs, self._dtype = inputs, dtype
        self._expected, self._plain, self._variance, self._extra = (
            torch.zeros(shape, dtype=torch.float64, device=inputs.x.device) for _ in range(4)
        )

    def add(self, passage: Passage, tokens: Tensor, slots: Tensor) -> None:
        """Add one expert's part of the output."""
        weights = self._inputs.weights[tokens, slots].double().unsqueeze(1)
        self._expected.index_add_(0, tokens, passage.expected * weights)
        self._plain.index_add_(0, tokens, passage.plain * weights)
        self._variance.index_add_(0, tokens, passage.variance * weights.square())
        self._extra.index_add_(0, tokens, passage.extra * weights.abs())

    def result(self, layer: int, actual: Tensor, experts: tuple[int, ...], k: int) -> ProjectionResult:
        """Compare the kernels' output `[T, H]` with the sum of the experts, and return the result."""
        plain = rounded(self._plain, self._dtype).double()
        bound = CONFIDENCE * self._variance.sqrt() + self._extra + UNIT[self._dtype] * self._expected.abs()
        bound += torch.finfo(torch.float16).tiny * 2.0**-10 if self._dtype == torch.float16 else 2.0**-120
        exceedance = difference(actual, self._expected) / bound
        totals = Totals()
        # The floor is zero: element bounds assume larger roundings than the measured baseline has.
        totals.add(actual, self._expected, plain, torch.zeros_like(bound), torch.arange(actual.shape[0]))
        found = [
            self._expert(index, expert, actual, plain, exceedance)
            for index, expert in enumerate(experts)
            if bool((self._inputs.ids == index).any())
        ]
        worst_run = self._inputs.run_of(totals.worst[0])
        return totals.result(layer, "layer", k, "all roundings together", tuple(found), worst_run)

    def _expert(self, index: int, expert: int, actual: Tensor, plain: Tensor, exceedance: Tensor) -> ExpertError:
        tokens = torch.where((self._inputs.ids == index).any(dim=1))[0]
        error, loss = (difference(one[tokens], self._expected[tokens]).square().sum() for one in (actual, plain))
        norm = float(self._expected[tokens].square().sum())
        place = int(exceedance[tokens].argmax())
        row, column = divmod(place, exceedance.shape[1])
        return ExpertError(
            expert=expert,
            rows=len(tokens),
            relative=ratio(float(error), norm),
            tolerance=tolerance(ratio(float(loss), norm), 0.0, EXPERT_FACTOR),
            exceedance=float(exceedance[tokens[row], column]),
            element=(int(tokens[row]), column),
            features=int((exceedance[tokens] > 1).any(dim=0).sum()),
        )
