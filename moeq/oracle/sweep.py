"""Sweeps: verdicts over GPUs x TP x EP, checks of required cells, and the table of a sweep."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from moeq.deploy.deployment import Deployment, Gpu
from moeq.errors import MoeqError
from moeq.oracle.records import Verdict


@dataclass(frozen=True)
class Cell:
    """Verdict on one deployment of a sweep."""

    gpu: str
    tp: int
    ep: int
    verdict: Verdict
    refused: str | None = None  #: why `convert` refuses to write although the engine runs, or None
    loads_in: tuple[str, ...] = ()  #: titles of the loaders for what `convert` writes

    @property
    def name(self) -> str:
        """Name that `--require` uses: `H100/tp8/ep1`."""
        return f"{self.gpu}/tp{self.tp}/ep{self.ep}"

    @property
    def word(self) -> str:
        """Name of the backend that runs, or `-`."""
        return self.verdict.chosen.backend if self.verdict.chosen else "-"


def deployments(base: Deployment, gpus: Sequence[Gpu], tps: Sequence[int], eps: Sequence[int]) -> Iterator[Deployment]:
    """Yield every deployment of GPUs x TP x EP, in that order."""
    for gpu, tp, ep in product(gpus, tps, eps):
        yield replace(base, gpu=gpu, tp=tp, ep=ep, dtype=_dtype(base, gpu))


def _dtype(base: Deployment, gpu: Gpu) -> Any:
    old = gpu.capability is not None and gpu.capability < (8, 0)
    return "fp16" if old and base.dtype == "bf16" else base.dtype


_REQUIRE = re.compile(r"(?P<gpu>[^/=]+)(?:/tp(?P<tp>\d+))?(?:/ep(?P<ep>\d+))?(?:=(?P<backend>\w+))?", re.IGNORECASE)


def required_axes(required: Iterable[str]) -> tuple[list[str], list[int], list[int]]:
    """Return the GPUs, tp and ep that required cells name, which are the default axes of a sweep."""
    found = [match for text in required if (match := _REQUIRE.fullmatch(text.strip()))]
    gpus = dict.fromkeys(match["gpu"] for match in found if match["gpu"].lower() not in ("all", "*"))
    tps = dict.fromkeys(int(match["tp"]) for match in found if match["tp"])
    eps = dict.fromkeys(int(match["ep"]) for match in found if match["ep"])
    return list(gpus), list(tps), list(eps)


def unmet(cells: Iterable[Cell], required: Iterable[str]) -> list[str]:
    """List the faults of required cells: no backend, a backend other than the named one, or no conversion.

    Args:
        required: cells as `GPU[/tpN][/epN][=BACKEND]`; `all` names every GPU.

    Raises:
        MoeqError: `usage.require` for a text that names no cell of the sweep.
    """
    cells, found = list(cells), []
    for text in required:
        match = _REQUIRE.fullmatch(text.strip())
        rows = [cell for cell in cells if match and _named(cell, match)]
        if match is None or not rows:
            raise MoeqError(
                "usage.require",
                f"--require '{text}' names no cell of this sweep",
                "write GPU[/tpN][/epN][=BACKEND] or all, such as H100/tp8=MARLIN",
            )
        wanted = match["backend"]
        for cell in rows:
            if cell.verdict.chosen is None:
                found.append(f"{cell.name}: {cell.verdict.refusal}")
            elif wanted and cell.word != wanted.upper():
                found.append(f"{cell.name}: {cell.word}, not {wanted.upper()}")
            elif cell.refused is not None:
                found.append(f"{cell.name}: {cell.word} runs it, and convert cannot write for it: {cell.refused}")
    return found


def _named(cell: Cell, match: re.Match[str]) -> bool:
    name = match["gpu"].lower()
    return (
        name in ("all", "*", cell.gpu.lower())
        and match["tp"] in (None, str(cell.tp))
        and match["ep"] in (None, str(cell.ep))
    )


def matrix(cells: Sequence[Cell]) -> tuple[list[str], list[list[str]]]:
    """Arrange a sweep as columns and rows: one row per GPU, one column per TP and EP; `*` marks advisories."""
    forms = list(dict.fromkeys((cell.tp, cell.ep) for cell in cells))
    columns = ["GPU", *(f"TP{tp}" + (f" EP{ep}" if ep > 1 else "") for tp, ep in forms)]
    by_key = {(cell.gpu, cell.tp, cell.ep): cell for cell in cells}
    rows = []
    for gpu in dict.fromkeys(cell.gpu for cell in cells):
        row = [by_key[gpu, tp, ep] for tp, ep in forms]
        rows.append([gpu, *(cell.word + ("*" if cell.verdict.advisories and cell.verdict.ok else "") for cell in row)])
    return columns, rows


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table."""
    lines = [f"| {' | '.join(columns)} |", f"|{'|'.join(' --- ' for _ in columns)}|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def matrix_markdown(cells: Sequence[Cell]) -> str:
    """Format a sweep as a Markdown table."""
    return markdown(*matrix(cells))
