"""The oracle's answers as one HTML page: backends by GPU and size, with every reason; no script, no network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moeq.deploy.deployment import Deployment, Gpu
from moeq.model import Checkpoint
from moeq.report.backend_matrix import BackendMatrix, MatrixCell, backend_matrix
from moeq.report.html import template
from moeq.report.inspect_text import checkpoint_facts
from moeq.report.verdict_text import deployment_text, engine_text

#: Words for the states of a cell.
_WORDS = {"chosen": "chosen", "works": "works", "no": "no", "absent": "–"}


@dataclass(frozen=True)
class Column:
    """One deployment of the page."""

    gpu: int  #: number of its GPU, from 0, which the filter shows or hides
    name: str
    size: int
    chosen: str  #: backend that the engine runs there, or `none`


#: Devices that the page of `inspect` compares with the one that was asked about.
DEVICES = ("A100", "H100", "B200", "MI300X")


def render(checkpoint: Checkpoint, deployment: Deployment, gpus: Sequence[Gpu], sizes: Sequence[int]) -> str:
    """Render the page. Raises MoeqError as `moeq.pipeline.plan.layer_verdict.judge_checkpoint`."""
    tables = [backend_matrix(checkpoint, replace(deployment, gpu=gpu), sizes) for gpu in gpus]
    return template("oracle.html").render(
        name=checkpoint.source.name,
        engine=engine_text(deployment.engine),
        options=", ".join(deployment_text(replace(deployment, tp=1, ep=1, dp=1)).split(", ")[2:]),
        facts=[(label, str(text)) for label, text in checkpoint_facts(checkpoint.info, verbose=True)],
        gpus=[gpu.name for gpu in gpus],
        columns=_columns(gpus, tables),
        rows=_rows(tables),
        words=_WORDS,
        levels=0,
    )


def _columns(gpus: Sequence[Gpu], tables: Sequence[BackendMatrix]) -> list[Column]:
    found = []
    for number, (gpu, table) in enumerate(zip(gpus, tables, strict=True)):
        for index, size in enumerate(table.sizes):
            chosen = [backend for backend, cells in table.rows if cells[index].state == "chosen"]
            found.append(Column(number, gpu.name, size, ", ".join(chosen) or "none"))
    return found


def _rows(tables: Sequence[BackendMatrix]) -> list[tuple[str, list[tuple[int, MatrixCell]]]]:
    """Return every backend with the number of the GPU and the cell of every column; those that run come first."""
    by_name = [dict(table.rows) for table in tables]
    names = list(dict.fromkeys(name for table in tables for name, _ in table.rows))
    absent, width = MatrixCell("absent", "not considered"), len(tables[0].sizes)
    states = ("chosen", "works", "no", "absent")
    rows = [
        (name, [(gpu, cell) for gpu, rows in enumerate(by_name) for cell in rows.get(name, [absent] * width)])
        for name in names
    ]
    return sorted(rows, key=lambda row: min(states.index(cell.state) for _, cell in row[1]))
