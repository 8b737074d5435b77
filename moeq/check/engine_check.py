"""Compare an engine's backends, run on a checkpoint's own experts, with the float32 reference of its source.

Engines round in their own places, so the yardstick is one number: a backend may have twice the error that torch has
on dequantised weights with the same types of activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from moeq.check.comparison import difference, ratio
from moeq.check.inputs import Inputs, make_inputs
from moeq.check.layer_check import LayerCheck, passage
from moeq.check.timing import flush_buffer, timed_us
from moeq.check.whole_layer import Passage
from moeq.checkpoint.manifest import Projection
from moeq.reference.arithmetic import Emulated
from moeq.reference.moe import Linear, rounded

#: Largest error of a backend over that of torch with the same types.
FACTOR = 2.0

#: Function from `x`, `weights` and `ids` to the layer's output.
Implementation = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class EngineBackend:
    """A backend to run."""

    name: str  #: the engine's name of it
    #: Type that it quantises activations to: `int8`, `fp8`, or empty for none; None if torch's error with them is not
    #: known, so that no error is too large.
    activations: str | None
    #: Function that builds a layer, and returns the engine's class of experts and a function that runs the layer.
    build: Callable[[int], tuple[str, Implementation]]
    selected: bool = False  #: whether the engine selects it without being asked


@dataclass(frozen=True)
class BackendResult:
    """Result of one backend on one layer."""

    layer: int  #: layer number
    backend: str  #: the engine's name of the backend
    selected: bool  #: whether the engine selects it without being asked
    experts: str | None = None  #: the engine's class that ran
    error: float | None = None  #: norm of the error over the norm of the reference
    allowed: float | None = None  #: largest error that passes; None if no yardstick covers the activations
    expert: tuple[int, float] | None = None  #: expert with the largest error over its allowed one, and that quotient
    #: Token count to the median time of a call on a GPU, weights read from memory.
    microseconds: Mapping[int, float] | None = None
    refused: str | None = None  #: why it did not run, in the engine's words; None if it ran

    @property
    def wrong(self) -> bool:
        """Whether it ran and its numbers are beyond what is allowed."""
        if self.error is None or self.allowed is None or self.expert is None:
            return False
        return not (self.error <= self.allowed and self.expert[1] <= 1)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for a JSON document."""
        return {**asdict(self), "expert": self.expert and list(self.expert), "wrong": self.wrong}


@dataclass(frozen=True)
class EngineCheckReport:
    """Results of an engine's backends."""

    destination: str  #: the converted checkpoint
    engine: str  #: the engine
    backends: tuple[BackendResult, ...]  #: results, by layer and backend

    @property
    def ok(self) -> bool:
        """Whether some backend ran, and none that ran was wrong."""
        return not any(row.wrong for row in self.backends) and any(row.refused is None for row in self.backends)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document without its schema and `ok`."""
        backends = [row.to_json() for row in self.backends]
        return {"destination": self.destination, "engine": self.engine, "backends": backends}


def check_backends(check: LayerCheck, backends: Iterable[EngineBackend]) -> list[BackendResult]:
    """Run backends on one layer; whatever an engine raises becomes the backend's refusal.

    Args:
        check: the layer; its sample has to hold every expert.
    """
    inputs = make_inputs(check.reference, check.sample, check.k_of("up"), check.dtype, check.seed).to(check.device)
    sums = inputs.weights.sum(1, keepdim=True)  # kernels that route by themselves make weights that sum to 1
    reference = _Reference(check, replace(inputs, weights=inputs.weights / sums))
    return [_checked(check, backend, reference) for backend in backends]


def _checked(check: LayerCheck, backend: EngineBackend, reference: _Reference) -> BackendResult:
    row = BackendResult(check.sample.layer, backend.name, backend.selected)
    inputs = reference.inputs
    try:
        experts, run = backend.build(check.sample.layer)
        output = torch.cat([run(*_part(inputs, part)) for _, part in inputs.runs])
        times = _times(run, inputs) if check.device.type == "cuda" else None
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is the finding
        return replace(row, refused=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    row = replace(row, experts=experts, error=reference.error(output), microseconds=times)
    if backend.activations is None:
        return row
    plain = reference.plain(backend.activations)
    quotients = {
        expert: reference.error(output, index) / (FACTOR * reference.error(plain, index))
        for index, expert in enumerate(check.sample.experts)
        if bool((inputs.ids == index).any())
    }
    worst = max(quotients, key=lambda expert: quotients[expert])
    return replace(row, allowed=FACTOR * reference.error(plain), expert=(worst, quotients[worst]))


def _part(inputs: Inputs, part: slice) -> tuple[Tensor, Tensor, Tensor]:
    return inputs.x[part], inputs.weights[part], inputs.ids[part]


def _times(run: Implementation, inputs: Inputs) -> dict[int, float]:
    """Return the median microseconds by token count of the runs with the router's choices, launches included."""
    flush = flush_buffer(inputs.x.device)
    return {
        one.tokens: timed_us(partial(run, *_part(inputs, part)), flush)
        for one, part in inputs.runs
        if one.routing == "router"
    }


class _Reference:
    """Output `[T, H]` of the layer without rounding, and of torch with rounded activations."""

    def __init__(self, check: LayerCheck, inputs: Inputs) -> None:
        self._check, self.inputs = check, inputs
        self._plain: dict[str, Tensor] = {}

    @cached_property
    def exact(self) -> Tensor:
        """Output in float64 on dequantised weights."""
        return self._sum(lambda x, expert: self._passage("", x, expert).expected)

    def plain(self, kind: str) -> Tensor:
        """Return torch's output with activations of a kind, rounded to the activation dtype."""
        if kind not in self._plain:
            dtype = self._check.dtype

            def output(x: Tensor, expert: Any) -> Tensor:
                through = self._passage(kind, x, expert)
                return rounded(through.plain, dtype).double()

            self._plain[kind] = rounded(self._sum(output), dtype).double()
        return self._plain[kind]

    def error(self, output: Tensor, index: int | None = None) -> float:
        """Return the relative error of an output; with `index`, of the tokens of that expert of the sample."""
        ids = self.inputs.ids
        tokens = torch.ones(len(ids), dtype=torch.bool, device=ids.device) if index is None else (ids == index).any(1)
        exact = self.exact[tokens]
        found = difference(output[tokens][:, : exact.shape[1]], exact)
        return ratio(float(found.square().sum()), float(exact.square().sum()))

    def _sum(self, output: Callable[[Tensor, Any], Tensor]) -> Tensor:
        check, inputs = self._check, self.inputs
        total = torch.zeros(len(inputs.x), check.widths["down"], dtype=torch.float64, device=inputs.x.device)
        for index, number in enumerate(check.sample.experts):
            tokens, slots = torch.where(inputs.ids == index)
            if len(tokens):
                weights = inputs.weights[tokens, slots].double().unsqueeze(1)
                total.index_add_(0, tokens, output(inputs.x[tokens], check.expert(number)) * weights)
        return total

    def _passage(self, kind: str, x: Tensor, expert: Any) -> Passage:
        linears: dict[Projection, Linear | None] = {"gate": expert.gate, "up": expert.up}
        emulate, rows = self._check.emulate, x.float()
        first: dict[str, tuple[Emulated, ...]] = {
            name: emulate(name, rows, linear, kind) for name, linear in linears.items() if linear is not None
        }
        return passage(self._check, kind, x, expert, first)
