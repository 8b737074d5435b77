"""Results of `run-check` and of its self-test as plain records, without torch, for the reports."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from moeq.digest import DigestDifference
from moeq.shown import Shown


@dataclass(frozen=True)
class Run:
    """One call of the fused layer.

    Attributes:
        tokens: token count.
        routing: `router` (the model's own rule), `same` (all tokens to the same experts) or `spread` (every sampled
            expert in turn: only where the others would leave one with too few tokens).
    """

    tokens: int
    routing: str = "router"

    @property
    def title(self) -> str:
        """Title for people: `33 tokens`, `7 tokens, same experts`."""
        suffix = {"router": "", "same": ", same experts", "spread": ", spread"}[self.routing]
        return f"{self.tokens} token{'s' if self.tokens != 1 else ''}{suffix}"


@dataclass(frozen=True)
class Sample:
    """Part of one layer that goes through the kernels.

    Attributes:
        layer: layer index.
        experts: expert ids.
        runs: calls of the fused layer.
        top_k: experts per token.
        complete: the sample holds every expert of the layer.
    """

    layer: int
    experts: tuple[int, ...]
    runs: tuple[Run, ...]
    top_k: int
    complete: bool

    @property
    def tokens(self) -> int:
        """Token count of all runs."""
        return sum(run.tokens for run in self.runs)


@dataclass(frozen=True)
class ExpertError:
    """Error of one expert in one product (or, for `layer`, of the tokens that used it).

    Attributes:
        expert: expert id.
        rows: rows compared.
        relative: error norm over reference norm.
        tolerance: largest relative error that passes.
        exceedance: largest error of an element over that element's own bound; above 1 fails.
        element: `(row, output feature)` of that error.
        features: number of output features with an element beyond its bound.
        looks_like: likely cause by the pattern of the error, or None.
    """

    expert: int
    rows: int
    relative: float
    tolerance: float
    exceedance: float
    element: tuple[int, int]
    features: int = 0
    looks_like: str | None = None

    @property
    def passed(self) -> bool:
        """Whether the norm is within its tolerance and every element within its bound."""
        return self.relative <= self.tolerance and self.exceedance <= 1

    @property
    def text(self) -> str:
        """Description of the error for people."""
        place = f"output feature {self.element[1]}" if self.features <= 1 else f"{self.features} output features"
        size = f"{self.exceedance:.3g} x the bound" if self.exceedance > 1 else f"relative error {self.relative:.2e}"
        return f"expert {self.expert}: {place}, {size}" + (f"; {self.looks_like}" if self.looks_like else "")


@dataclass(frozen=True)
class ProjectionResult:
    """Result of one product of a layer, or of the whole layer, over all runs.

    Attributes:
        layer: layer index.
        name: `gate`, `up`, `down`, or `layer` for the fused layer from input to output.
        k: length of the sums.
        max_abs: largest absolute error against the reference.
        mean_abs: mean absolute error.
        relative: error norm over reference norm.
        cosine: cosine similarity with the reference.
        baseline: relative error of the same computation in 16-bit torch on dequantised weights.
        tolerance: largest relative error that passes.
        arithmetic: way of rounding that the kernel was found to use, to which the element bounds refer.
        worst_element: `(row, output feature)` of the largest absolute error.
        worst_run: title of the run of that error (`layer` only), or None.
        experts: errors of every expert that got tokens.
    """

    layer: int
    name: str
    k: int
    max_abs: float
    mean_abs: float
    relative: float
    cosine: float
    baseline: float
    tolerance: float
    arithmetic: str
    worst_element: tuple[int, int]
    worst_run: str | None
    experts: tuple[ExpertError, ...]

    @property
    def exceedance(self) -> float:
        """Largest error of an element over its bound; above 1 fails."""
        return max(expert.exceedance for expert in self.experts)

    @property
    def failed(self) -> tuple[ExpertError, ...]:
        """Experts that do not pass."""
        return tuple(expert for expert in self.experts if not expert.passed)

    @property
    def worst(self) -> ExpertError:
        """Expert that is closest to its limits, or furthest beyond them."""
        return max(self.experts, key=lambda one: max(one.exceedance, one.relative / one.tolerance))

    @property
    def passed(self) -> bool:
        """Whether the product and each of its experts are within tolerance."""
        return self.relative <= self.tolerance and not self.failed

    @property
    def complaints(self) -> tuple[str, ...]:
        """Errors for people, one a line; of a whole layer only the worst, since its experts share their tokens."""
        if self.passed:
            return ()
        if self.name == "layer":
            where = f" ({self.worst_run})" if self.worst_run else ""
            return (f"layer {self.layer}, whole: tokens of {self.worst.text}{where}",)
        norm = f"relative error {self.relative:.2e}, tolerance {self.tolerance:.2e}"
        return tuple(f"layer {self.layer} {self.name} {one.text}" for one in self.failed) or (
            f"layer {self.layer} {self.name}: {norm}",
        )


@dataclass(frozen=True)
class Timing:
    """Time of one run of the fused layer on a GPU.

    Attributes:
        layer: layer index.
        run: title of the run.
        microseconds: median of the repeated calls.
        weight_bytes: bytes of packed experts that the run has to read.
        total_bytes: bytes of these experts and of activations.
        flops: multiplications and additions.
        floor_microseconds: shortest time that the device's bandwidth and arithmetic allow; None for unknown devices.
    """

    layer: int
    run: str
    microseconds: float
    weight_bytes: int
    total_bytes: int
    flops: int
    floor_microseconds: float | None = None

    @property
    def gigabytes_per_second(self) -> float:
        """Memory throughput."""
        return self.total_bytes / self.microseconds / 1e3

    @property
    def teraflops(self) -> float:
        """Arithmetic throughput."""
        return self.flops / self.microseconds / 1e6


@dataclass(frozen=True)
class LayerReport:
    """Results of one layer.

    Attributes:
        sample: part of the layer that went through the kernels.
        results: `gate` (if there is one), `up`, `down`, `layer`.
        repeated: number of runs that were done twice.
        unequal: titles of runs whose second result differed in any bit.
        timings: times of the runs on a GPU; empty on a CPU.
    """

    sample: Sample
    results: tuple[ProjectionResult, ...]
    repeated: int
    unequal: tuple[str, ...]
    timings: tuple[Timing, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether all results are within tolerance and the runs deterministic."""
        return all(result.passed for result in self.results) and not self.unequal


@dataclass(frozen=True, repr=False)
class CheckReport(Shown):
    """Results of `run-check`.

    Attributes:
        destination: the converted checkpoint.
        source: checkpoint whose dequantised weights were the reference; None without it, when the reference used the
            converted checkpoint's own logical values.
        scheme: title of the scheme.
        layout: layout id.
        backend: backend that the layout is for.
        device: device of the kernels: `cuda (NVIDIA H200)`, or `cpu (Triton interpreter)`.
        dtype: activation dtype.
        seed: seed of the random tokens.
        digests_checked: projections whose logical digest was recomputed.
        digest_mismatches: projections whose digest differs from the manifest's.
        layers: results of the layers that went through the kernels.
        layers_in_checkpoint: number of MoE layers of the checkpoint.
        derivation: derivations of the tolerances, one a line.
        seconds: wall time.
        notes: remarks for people.
    """

    destination: str
    source: str | None
    scheme: str
    layout: str
    backend: str
    device: str
    dtype: str
    seed: int
    digests_checked: int
    digest_mismatches: tuple[DigestDifference, ...]
    layers: tuple[LayerReport, ...]
    layers_in_checkpoint: int
    derivation: tuple[str, ...]
    seconds: float
    notes: tuple[str, ...] = field(default=())

    @property
    def results(self) -> tuple[ProjectionResult, ...]:
        """Results of all layers."""
        return tuple(result for layer in self.layers for result in layer.results)

    @property
    def ok(self) -> bool:
        """Whether something was checked, no digest differs, and every layer is within tolerance."""
        nothing_wrong = not self.digest_mismatches and all(layer.ok for layer in self.layers)
        return nothing_wrong and bool(self.layers or self.digests_checked)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values for JSON; an infinite error (a NaN somewhere) is null, with `passed` false."""
        document = asdict(self)
        for entry, layer in zip(document["layers"], self.layers, strict=True):
            entry["ok"] = layer.ok
            for found, result in zip(entry["results"], layer.results, strict=True):
                found.update(passed=result.passed, exceedance=result.exceedance)
        for entry, mismatch in zip(document["digest_mismatches"], self.digest_mismatches, strict=True):
            entry["text"] = mismatch.text
        cleaned: dict[str, Any] = _finite(document)
        return cleaned


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True)
class SabotageResult:
    """Outcome of one kind of damage: which checks detected it.

    Attributes:
        sabotage: name of the kind of damage.
        place: `expert 2 up`.
        damage: description of the damage.
        digest: report of the digests, or None.
        numeric: report of the kernels' numbers without digests; None if the damage stays below their bound.
        exceedance: error over bound.
        data: whether data was damaged; False for a wrong call, which no digest can see.
    """

    sabotage: str
    place: str
    damage: str
    digest: str | None
    numeric: str | None
    exceedance: float = 0.0
    data: bool = True

    @property
    def caught(self) -> bool:
        """Whether `run-check` with its default options would have failed."""
        return self.digest is not None or self.numeric is not None


@dataclass(frozen=True)
class SelftestReport:
    """Results of the self-test on one converted checkpoint.

    Attributes:
        destination: the converted checkpoint, which is not changed.
        scheme: title of the scheme.
        layout: layout id.
        device: device of the kernels.
        layer: the layer whose experts were damaged.
        results: outcome of every damage.
        false_alarms: reports about places that were not damaged.
    """

    destination: str
    scheme: str
    layout: str
    device: str
    layer: int
    results: tuple[SabotageResult, ...]
    false_alarms: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every damage was caught and no other place reported."""
        return bool(self.results) and all(result.caught for result in self.results) and not self.false_alarms

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        document: dict[str, Any] = _finite({**asdict(self), "ok": self.ok})
        return document
