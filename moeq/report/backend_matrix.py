"""Which backends run a checkpoint at which tensor-parallel size: the oracle's answers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeq.deploy.deployment import Deployment
    from moeq.oracle.records import CandidateReport, MoeShape, Verdict
    from moeq.schemes.base import Scheme

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class MatrixCell:
    """One backend at one size.

    Attributes:
        state: `chosen`, `works`, `no`, or `absent` where the engine does not even consider it.
        text: reasons, for a tooltip.
    """

    state: str
    text: str


@dataclass(frozen=True)
class BackendMatrix:
    """Backends down, tensor-parallel sizes across.

    Attributes:
        title: engine and device.
        sizes: tensor-parallel sizes.
        rows: backend and its cells.
    """

    title: str
    sizes: tuple[int, ...]
    rows: tuple[tuple[str, tuple[MatrixCell, ...]], ...]


def backend_matrix(
    scheme: Scheme, shape: MoeShape, deployment: Deployment, sizes: Sequence[int] = TP_SIZES
) -> BackendMatrix:
    """Ask the oracle at every size; backends in the engine's order."""
    from moeq.oracle.decide import judge

    verdicts = [judge(scheme, shape, replace(deployment, tp=size, backend="auto"), explain=False) for size in sizes]
    names = list(dict.fromkeys(row.backend for verdict in verdicts for row in verdict.candidates))
    rows = tuple((name, tuple(_cell(verdict, name) for verdict in verdicts)) for name in names)
    return BackendMatrix(f"{deployment.engine} on {deployment.gpu.name}", tuple(sizes), rows)


def _cell(verdict: Verdict, backend: str) -> MatrixCell:
    found = next((row for row in verdict.candidates if row.backend == backend), None)
    if found is None:
        return MatrixCell("absent", "not considered")
    if verdict.chosen is not None and verdict.chosen.backend == backend:
        return MatrixCell("chosen", f"the engine's choice ({found.experts})")
    return (
        MatrixCell("works", "would work, comes later in the engine's order")
        if found.supported
        else MatrixCell("no", _why(found))
    )


def _why(found: CandidateReport) -> str:
    return "; ".join(reason.text for reason in found.reasons)
