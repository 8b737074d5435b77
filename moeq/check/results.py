"""Results of `run-check` and of its self-test as plain records, without torch, for the reports."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from moeq.digest import DigestDifference
from moeq.display import DisplayedRecord


@dataclass(frozen=True)
class Run:
    """One call of the fused layer."""

    tokens: int  #: token count
    #: `router` (the model's own rule), `same` (all tokens to the same experts) or `spread` (every sampled expert in
    #: turn; this run is made only if the other runs leave an expert with too few tokens).
    routing: str = "router"

    @property
    def title(self) -> str:
        """Title for people: `33 tokens`, `7 tokens, same experts`."""
        suffix = {"router": "", "same": ", same experts", "spread": ", spread"}[self.routing]
        return f"{self.tokens} token{'s' if self.tokens != 1 else ''}{suffix}"


@dataclass(frozen=True)
class Sample:
    """Part of one layer that goes through the kernels."""

    layer: int  #: layer index
    experts: tuple[int, ...]  #: expert ids
    runs: tuple[Run, ...]  #: calls of the fused layer
    top_k: int  #: experts per token
    complete: bool  #: the sample holds every expert of the layer

    @property
    def tokens(self) -> int:
        """Sum of the token counts of all runs."""
        return sum(run.tokens for run in self.runs)


@dataclass(frozen=True)
class ExpertError:
    """Error of one expert in one product (or, for `layer`, of the tokens that used it)."""

    expert: int  #: expert id
    rows: int  #: rows compared
    relative: float  #: error norm over reference norm
    tolerance: float  #: largest relative error that passes
    exceedance: float  #: largest error of an element over that element's own bound; above 1 fails
    element: tuple[int, int]  #: `(row, output feature)` of that error
    features: int = 0  #: number of output features with an element beyond its bound
    looks_like: str | None = None  #: likely cause by the pattern of the error, or None

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
    """Result of one product of a layer, or of the whole layer, over all runs."""

    layer: int  #: layer index
    name: str  #: `gate`, `up`, `down`, or `layer` for the fused layer from input to output
    k: int  #: number of products in each sum
    max_abs: float  #: largest absolute error against the reference
    mean_abs: float  #: mean absolute error
    relative: float  #: error norm over reference norm
    cosine: float  #: cosine similarity with the reference
    baseline: float  #: relative error of the same computation in 16-bit torch on dequantised weights
    tolerance: float  #: largest relative error that passes
    arithmetic: str  #: way of rounding that the kernel was found to use; the element bounds hold for this way
    worst_element: tuple[int, int]  #: `(row, output feature)` of the largest absolute error
    worst_run: str | None  #: title of the run of that error (`layer` only), or None
    experts: tuple[ExpertError, ...]  #: errors of every expert that got tokens

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
        """Error messages, one for each expert; a fused layer names only the worst, since its experts share tokens."""
        if self.passed:
            return ()
        if self.name == "layer":
            where = f" ({self.worst_run})" if self.worst_run else ""
            return (f"layer {self.layer}, fused layer: tokens of {self.worst.text}{where}",)
        if self.failed:
            return tuple(f"layer {self.layer} {self.name} {expert.text}" for expert in self.failed)
        norm = f"relative error {self.relative:.2e}, tolerance {self.tolerance:.2e}"
        return (f"layer {self.layer} {self.name}: {norm}",)


@dataclass(frozen=True)
class Timing:
    """Time of one run of the fused layer on a GPU."""

    layer: int  #: layer index
    run: str  #: title of the run
    microseconds: float  #: median of the repeated calls
    weight_bytes: int  #: bytes of packed experts that the run has to read
    total_bytes: int  #: bytes of these experts and of activations
    flops: int  #: multiplications and additions
    #: Shortest time that the device's bandwidth and arithmetic allow; None for unknown devices.
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
    """Results of one layer."""

    sample: Sample  #: part of the layer that went through the kernels
    results: tuple[ProjectionResult, ...]  #: `gate` (if there is one), `up`, `down`, `layer`
    repeated: int  #: number of runs that were done twice
    unequal: tuple[str, ...]  #: titles of runs whose second result differed in any bit
    timings: tuple[Timing, ...] = ()  #: times of the runs on a GPU; empty on a CPU

    @property
    def unequal_runs(self) -> list[str]:
        """Sentences for people about runs that did not repeat."""
        return [f"layer {self.sample.layer}: {run} gave other bits the second time" for run in self.unequal]

    @property
    def ok(self) -> bool:
        """Whether all results are within tolerance and the runs deterministic."""
        return all(result.passed for result in self.results) and not self.unequal


@dataclass(frozen=True, repr=False)
class CheckReport(DisplayedRecord):
    """Results of `run-check`."""

    destination: str  #: the converted checkpoint
    #: Checkpoint whose dequantised weights were the reference; None where the reference used the converted checkpoint's
    #: own logical values.
    source: str | None
    scheme: str  #: title of the scheme
    layout: str  #: layout id
    backend: str  #: backend that the layout is for
    device: str  #: device of the kernels: `cuda (NVIDIA H200)`, or `cpu (Triton interpreter)`
    dtype: str  #: activation dtype
    seed: int  #: seed of the random tokens
    digests_checked: int  #: projections whose logical digest was recomputed
    digest_mismatches: tuple[DigestDifference, ...]  #: projections whose digest differs from the manifest's
    layers: tuple[LayerReport, ...]  #: results of the layers that went through the kernels
    layers_in_checkpoint: int  #: number of MoE layers of the checkpoint
    derivation: tuple[str, ...]  #: derivations of the tolerances, one a line
    seconds: float  #: wall time
    notes: tuple[str, ...] = field(default=())  #: remarks for people

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
    """Outcome of one kind of damage: which checks detected it."""

    sabotage: str  #: name of the kind of damage
    place: str  #: `expert 2 up`
    damage: str  #: description of the damage
    digest: str | None  #: what the digests reported; None if they did not detect the damage
    numeric: str | None  #: what the kernels' numbers reported; None if the damage stays below their bound
    exceedance: float = 0.0  #: largest error of an element over that element's own bound
    data: bool = True  #: whether data was damaged; False for a wrong call, which no digest can see

    @property
    def caught(self) -> bool:
        """Whether `run-check` with its default options would have failed."""
        return self.digest is not None or self.numeric is not None


@dataclass(frozen=True)
class SelftestReport:
    """Results of the self-test on one converted checkpoint."""

    destination: str  #: the converted checkpoint, which is not changed
    scheme: str  #: title of the scheme
    layout: str  #: layout id
    device: str  #: device of the kernels
    layer: int  #: the layer whose experts were damaged
    results: tuple[SabotageResult, ...]  #: outcome of every damage
    false_alarms: tuple[str, ...] = ()  #: reports about places that were not damaged

    @property
    def ok(self) -> bool:
        """Whether every damage was caught, and no undamaged place was reported."""
        return bool(self.results) and all(result.caught for result in self.results) and not self.false_alarms

    def to_json(self) -> dict[str, Any]:
        """Convert to plain values for JSON."""
        document: dict[str, Any] = _finite({**asdict(self), "ok": self.ok})
        return document
