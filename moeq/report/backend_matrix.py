"""Which backends run a checkpoint at which tensor-parallel size: the oracle's answers as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moeq.deploy.deployment import Deployment
    from moeq.model import Checkpoint
    from moeq.oracle.records import Verdict

TP_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True)
class MatrixCell:
    """One backend at one size."""

    state: str  #: `chosen`, `works`, `no`, or `absent` where the engine does not consider the backend
    text: str  #: reasons, for a tooltip


@dataclass(frozen=True)
class BackendMatrix:
    """Backends down, tensor-parallel sizes across."""

    title: str  #: engine and device
    sizes: tuple[int, ...]
    rows: tuple[tuple[str, tuple[MatrixCell, ...]], ...]  #: backend and its cells


def backend_matrix(checkpoint: Checkpoint, deployment: Deployment, sizes: Sequence[int] = TP_SIZES) -> BackendMatrix:
    """Judge every backend at every size, in the engine's order; a backend works if the engine runs it by request."""
    from moeq.pipeline.plan.candidates import confirm_backends
    from moeq.pipeline.plan.layer_verdict import judge_checkpoint

    verdicts = []
    for size in sizes:
        where = replace(deployment, tp=size, ep=1, dp=1, backend="auto")
        verdicts.append(confirm_backends(checkpoint, judge_checkpoint(checkpoint, where, explain=False)))
    names = list(dict.fromkeys(row.backend for verdict in verdicts for row in verdict.candidates))
    rows = tuple((name, tuple(_cell(verdict, name) for verdict in verdicts)) for name in names)
    return BackendMatrix(f"{deployment.engine} on {deployment.gpu.name}", tuple(sizes), rows)


def _cell(verdict: Verdict, backend: str) -> MatrixCell:
    found = next((row for row in verdict.candidates if row.backend == backend), None)
    if found is None:
        return MatrixCell("absent", "not considered")
    if verdict.selected is not None and verdict.selected.backend == backend:
        if verdict.chosen is None:
            return MatrixCell("no", verdict.refusal)
        return MatrixCell("chosen", f"the engine's choice ({found.experts})")
    if found.supported:
        return MatrixCell("works", f"works too, with --moe-backend {found.flag}")
    return MatrixCell("no", "; ".join(reason.text for reason in found.reasons))
