"""What a check found. Plain frozen records, free of torch, so that reports can render them anywhere."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DigestMismatch:
    """A projection whose bytes no longer hold the values that the manifest recorded.

    Attributes:
        layer: layer index.
        expert: expert id.
        projection: `gate`, `up` or `down`.
        looks_like: where the digest was found instead (`expert 3 gate`), which names a swap; else None.
    """

    layer: int
    expert: int
    projection: str
    looks_like: str | None = None

    @property
    def text(self) -> str:
        """One line for people."""
        swapped = f"; it holds the values of {self.looks_like}" if self.looks_like else ""
        return f"layer {self.layer} expert {self.expert} {self.projection}: not the values recorded{swapped}"


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
        """`33 tokens`, `7 tokens, same experts`."""
        suffix = {"router": "", "same": ", same experts", "spread": ", spread"}[self.routing]
        return f"{self.tokens} token{'s' if self.tokens != 1 else ''}{suffix}"


@dataclass(frozen=True)
class Sample:
    """What of one layer went through the kernels.

    Attributes:
        layer: layer index.
        experts: expert ids.
        runs: calls of the fused layer.
        top_k: experts per token.
        complete: every expert of the layer is in it.
    """

    layer: int
    experts: tuple[int, ...]
    runs: tuple[Run, ...]
    top_k: int
    complete: bool

    @property
    def tokens(self) -> int:
        """Tokens of all runs."""
        return sum(run.tokens for run in self.runs)


@dataclass(frozen=True)
class ExpertError:
    """One expert in one product (or, for `layer`, the tokens that used it).

    Attributes:
        expert: expert id.
        rows: rows compared.
        relative: error norm over reference norm.
        tolerance: largest relative error that passes.
        exceedance: largest error of an element over that element's own bound; above 1 fails.
        element: `(row, output feature)` where that is.
        features: output features with an element beyond its bound.
        looks_like: what the pattern of the error says is wrong, where it says so.
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
        """Within the tolerance of the norm and within the bound of every element."""
        return self.relative <= self.tolerance and self.exceedance <= 1

    @property
    def text(self) -> str:
        """What is wrong, for people."""
        place = f"output feature {self.element[1]}" if self.features <= 1 else f"{self.features} output features"
        size = f"{self.exceedance:.3g} x the bound" if self.exceedance > 1 else f"relative error {self.relative:.2e}"
        return f"expert {self.expert}: {place}, {size}" + (f"; {self.looks_like}" if self.looks_like else "")


@dataclass(frozen=True)
class ProjectionResult:
    """One product (or the whole layer) of one layer, over all runs.

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
        arithmetic: the way of rounding that the kernel was found to use, which the element bounds refer to.
        worst_element: `(row, output feature)` of the largest absolute error.
        worst_run: the run it belongs to (`layer` only), else None.
        experts: every expert that got tokens.
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
        """Largest error of an element over its bound."""
        return max(expert.exceedance for expert in self.experts)

    @property
    def failed(self) -> tuple[ExpertError, ...]:
        """Experts that do not pass."""
        return tuple(expert for expert in self.experts if not expert.passed)

    @property
    def worst(self) -> ExpertError:
        """The expert closest to, or furthest beyond, what it may have."""
        return max(self.experts, key=lambda one: max(one.exceedance, one.relative / one.tolerance))

    @property
    def passed(self) -> bool:
        """Whether the product and every single expert of it are within tolerance."""
        return self.relative <= self.tolerance and not self.failed

    @property
    def complaints(self) -> tuple[str, ...]:
        """What is wrong, a line each; for a whole layer only the worst, since its experts share their tokens."""
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
    """One run of the fused layer on a GPU.

    Attributes:
        layer: layer index.
        run: title of the run.
        microseconds: median of the repeated calls.
        weight_bytes: bytes of packed experts that the run has to read.
        total_bytes: the same with activations.
        flops: multiplications and additions.
        floor_microseconds: the least time that the device's memory and its arithmetic allow, or None where its
            bandwidth is unknown.
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
        """Bytes over time."""
        return self.total_bytes / self.microseconds / 1e3

    @property
    def teraflops(self) -> float:
        """Operations over time."""
        return self.flops / self.microseconds / 1e6


@dataclass(frozen=True)
class LayerReport:
    """Everything about one layer.

    Attributes:
        sample: what went through the kernels.
        results: `gate` (where there is one), `up`, `down`, `layer`.
        repeated: runs that were done twice.
        unequal: titles of runs whose second result differed in any bit.
        timings: on a GPU.
    """

    sample: Sample
    results: tuple[ProjectionResult, ...]
    repeated: int
    unequal: tuple[str, ...]
    timings: tuple[Timing, ...] = ()

    @property
    def ok(self) -> bool:
        """Within tolerance and deterministic."""
        return all(result.passed for result in self.results) and not self.unequal


@dataclass(frozen=True)
class CheckReport:
    """Everything `run-check` found.

    Attributes:
        destination: the converted checkpoint.
        source: whose dequantised weights were the reference, or None where the source was not at hand and the
            converted checkpoint's own logical values were used.
        scheme: title of the scheme.
        layout: layout id.
        backend: backend that the layout is for.
        device: where the kernels ran: `cuda (NVIDIA H200)`, or `cpu (Triton interpreter)`.
        dtype: activation dtype.
        seed: seed of the random tokens.
        digests_checked: projections whose logical digest was recomputed.
        digest_mismatches: those that differ.
        layers: what went through the kernels and what came out.
        layers_in_checkpoint: MoE layers there are.
        derivation: how tolerances come about, a line each.
        seconds: wall time.
        notes: what else is worth saying.
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
    digest_mismatches: tuple[DigestMismatch, ...]
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
        """Nothing differs, everything checked is within tolerance, and something was checked."""
        nothing_wrong = not self.digest_mismatches and all(layer.ok for layer in self.layers)
        return nothing_wrong and bool(self.layers or self.digests_checked)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document; an infinite error (a NaN somewhere) is null, with `passed` false."""
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
    """One kind of damage, and which checks detected it.

    Attributes:
        sabotage: name of the kind of damage.
        place: `expert 2 up`.
        damage: what was done.
        digest: what the digests said, or None where they said nothing.
        numeric: what the kernels' numbers said without any digest, or None where the damage stays below their bound.
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
        """Whether `run-check` as it runs by default would have failed."""
        return self.digest is not None or self.numeric is not None


@dataclass(frozen=True)
class SelftestReport:
    """Every damage done to one converted checkpoint.

    Attributes:
        destination: the converted checkpoint (which stays as it is).
        scheme: title of the scheme.
        layout: layout id.
        device: where the kernels ran.
        layer: the layer whose experts were damaged.
        results: one per damage.
        false_alarms: what was reported at places that were not damaged.
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
        """Every damage caught and nothing else reported."""
        return bool(self.results) and all(result.caught for result in self.results) and not self.false_alarms

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        document: dict[str, Any] = _finite({**asdict(self), "ok": self.ok})
        return document
