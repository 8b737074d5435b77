"""What a check found. Plain frozen records, free of torch, so that reports can render them anywhere."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DigestMismatch:
    """A projection whose bytes no longer mean what the manifest recorded.

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
class Sample:
    """What of one layer went through the kernels.

    Attributes:
        layer: layer index.
        experts: expert ids.
        tokens: token counts, one run each.
        top_k: experts per token.
        complete: every expert of the layer is in it.
    """

    layer: int
    experts: tuple[int, ...]
    tokens: tuple[int, ...]
    top_k: int
    complete: bool


@dataclass(frozen=True)
class ProjectionResult:
    """One product (or the whole layer) of one layer, over all token counts.

    Attributes:
        layer: layer index.
        name: `gate`, `up`, `down`, or `layer` for the fused layer from input to output.
        max_abs: largest absolute error.
        mean_abs: mean absolute error.
        relative: error norm over reference norm.
        cosine: cosine similarity with the reference.
        baseline: relative error of the same product in 16-bit torch on dequantised weights.
        tolerance: largest relative error that passes.
        worst_expert: expert with the largest error relative to its own tolerance.
        worst_expert_relative: its relative error.
        worst_expert_tolerance: what that expert may have at most.
        worst_element: `(row, column)` of the largest absolute error.
    """

    layer: int
    name: str
    max_abs: float
    mean_abs: float
    relative: float
    cosine: float
    baseline: float
    tolerance: float
    worst_expert: int
    worst_expert_relative: float
    worst_expert_tolerance: float
    worst_element: tuple[int, ...]

    @property
    def passed(self) -> bool:
        """Whether the product and every single expert of it are within tolerance."""
        return self.relative <= self.tolerance and self.worst_expert_relative <= self.worst_expert_tolerance


@dataclass(frozen=True)
class CheckReport:
    """Everything `run-check` found.

    Attributes:
        destination: the converted checkpoint.
        source: whose dequantised weights were the reference, or None where the source was not at hand and the
            converted checkpoint's own logical values were used.
        device: where the kernels ran: `cuda:0 NVIDIA H200`, or `cpu (Triton interpreter)`.
        dtype: activation dtype.
        seed: seed of the random tokens.
        digests_checked: projections whose logical digest was recomputed.
        digest_mismatches: those that differ.
        samples: what went through the kernels, per layer.
        layers_in_checkpoint: MoE layers there are.
        results: per layer and projection.
        tolerance_rule: how tolerances were derived, in one sentence.
        seconds: wall time.
    """

    destination: str
    source: str | None
    device: str
    dtype: str
    seed: int
    digests_checked: int
    digest_mismatches: tuple[DigestMismatch, ...]
    samples: tuple[Sample, ...]
    layers_in_checkpoint: int
    results: tuple[ProjectionResult, ...]
    tolerance_rule: str
    seconds: float
    notes: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """Nothing differs, everything checked is within tolerance, and something was checked."""
        nothing_wrong = not self.digest_mismatches and all(result.passed for result in self.results)
        return nothing_wrong and bool(self.results or self.digests_checked)

    def to_json(self) -> dict[str, Any]:
        """Plain values for a JSON document."""
        document = asdict(self)
        for entry, result in zip(document["results"], self.results, strict=True):
            entry["passed"] = result.passed
        for entry, mismatch in zip(document["digest_mismatches"], self.digest_mismatches, strict=True):
            entry["text"] = mismatch.text
        return document
