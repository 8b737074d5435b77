"""Draw which folders of moeq import which, as docs/explanation/architecture.svg.

Every folder is a box, above everything that it imports; the folders of `pipeline` are boxes of their own. Imports
inside functions count, imports for type checkers do not. An arrow that follows from two others is left out, and so are
the modules in `LEFT_OUT`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "explanation" / "architecture.svg"

#: Plain records that nearly everything imports; and the front door, which imports the rest when it is asked for it.
LEFT_OUT = {"moeq", "moeq.errors", "moeq.matrix", "moeq.version", "moeq.pipeline.events"}

#: Folders whose subfolders are boxes of their own.
SPLIT = {"pipeline"}

Graph = Mapping[str, set[str]]

_WIDTH, _HEIGHT, _GAP, _ROW, _MARGIN = 118, 34, 18, 84, 20


def modules() -> dict[str, Path]:
    """Every module of moeq and moeq_kernels by its dotted name; packages by theirs."""
    found = {}
    for base, package in ((ROOT, "moeq"), (ROOT / "kernels", "moeq_kernels")):
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@dataclass(frozen=True)
class Imports:
    """A statement that imports.

    Attributes:
        node: the statement.
        inside: it is in a function, which runs later.
        typing: only type checkers see it.
    """

    node: ast.Import | ast.ImportFrom
    inside: bool
    typing: bool


@cache
def imports_of(path: Path) -> tuple[Imports, ...]:
    """The statements of a file that import. Expressions, most of a file, are not looked into."""
    return tuple(_imports(ast.parse(path.read_text(encoding="utf-8")), False, False))


def _imports(above: ast.AST, inside: bool, typing: bool) -> Iterator[Imports]:
    checked = isinstance(above, ast.If) and "TYPE_CHECKING" in ast.unparse(above.test)
    for field in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(above, field, ()):
            hidden = typing or (checked and field == "body")
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield Imports(node, inside, hidden)
            else:
                function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                yield from _imports(node, inside or function, hidden)


def imported(path: Path, known: Collection[str], *, typing: bool = False) -> Iterator[str]:
    """The known modules that a file imports, anywhere; with `typing`, for type checkers as well."""
    for found in imports_of(path):
        if found.typing and not typing:
            continue
        node = found.node
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if full in known or node.module in known:
                    yield full if full in known else node.module


def module_graph(*, typing: bool = False) -> dict[str, set[str]]:
    """Module to the modules that it imports."""
    known = modules()
    return {name: set(imported(path, known, typing=typing)) - {name} for name, path in known.items()}


def area(module: str) -> str:
    """The box that a module is in."""
    first, *rest = module.split(".")
    if first == "moeq_kernels":
        return first
    split = rest[0] in SPLIT and len(rest) > 1 and (ROOT / "moeq" / rest[0] / rest[1]).is_dir()
    return "/".join(rest[:2]) if split else rest[0]


def area_graph() -> dict[str, set[str]]:
    """Box to the boxes that it imports."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, targets in module_graph().items():
        if module not in LEFT_OUT:
            found[area(module)] |= {area(target) for target in targets - LEFT_OUT} - {area(module)}
    return dict(found)


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that import each other, directly or by way of others."""
    reach = {node: reachable(graph, node) for node in graph}
    rings = {frozenset(other for other in reach[node] if node in reach[other]) for node in graph}
    return sorted(sorted(ring) for ring in rings if len(ring) > 1)


def reachable(graph: Graph, start: str) -> set[str]:
    """Everything that a node imports, directly or not; itself only where it is in a circle."""
    found: set[str] = set()
    waiting = [*graph.get(start, ())]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += graph.get(node, ())
    return found


def levels(graph: Graph) -> dict[str, int]:
    """Node to its level: 0 for what imports nothing, else one above the highest that it imports."""
    if circles(graph):
        raise ValueError(f"circular imports: {circles(graph)}")
    found: dict[str, int] = {}

    def level(node: str) -> int:
        if node not in found:
            found[node] = max((level(target) + 1 for target in graph[node]), default=0)
        return found[node]

    for node in graph:
        level(node)
    return found


def reduced(graph: Graph) -> dict[str, set[str]]:
    """The graph without arrows that follow from others."""
    return {
        node: {target for target in targets if not any(target in reachable(graph, via) for via in targets - {target})}
        for node, targets in graph.items()
    }


def places(graph: Graph) -> dict[str, tuple[float, float]]:
    """Centre of every box: rows by level, and in a row as near as may be to what it imports."""
    level = levels(graph)
    step = _WIDTH + _GAP
    found: dict[str, tuple[float, float]] = {}
    for number in range(max(level.values()) + 1):
        y = _MARGIN + _HEIGHT / 2 + (max(level.values()) - number) * _ROW
        wanted = {
            node: sum(found[target][0] for target in graph[node]) / max(len(graph[node]), 1)
            for node in sorted(graph)
            if level[node] == number
        }
        row = sorted(wanted, key=lambda node: wanted[node])
        xs: list[float] = []
        for node in row:
            xs.append(max(wanted[node], xs[-1] + step) if xs else wanted[node])
        shift = sum(wanted[node] - x for node, x in zip(row, xs, strict=True)) / len(row)
        found |= {node: (x + shift, y) for node, x in zip(row, xs, strict=True)}
    left = min(x for x, _ in found.values()) - _WIDTH / 2 - _MARGIN
    return {node: (x - left, y) for node, (x, y) in found.items()}


def draw(graph: Graph) -> str:
    """The picture."""
    arrows = reduced(graph)
    at = places(arrows)
    width = max(x for x, _ in at.values()) + _WIDTH / 2 + _MARGIN
    height = max(y for _, y in at.values()) + _HEIGHT / 2 + _MARGIN
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#7d8590"/></marker></defs>',
    ]
    for node in sorted(arrows):
        for target in sorted(arrows[node]):
            (x1, y1), (x2, y2) = at[node], at[target]
            y1, y2 = y1 + _HEIGHT / 2, y2 - _HEIGHT / 2
            bend = (y2 - y1) / 2
            path = f"M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}"
            lines.append(f'<path d="{path}" fill="none" stroke="#7d8590" marker-end="url(#tip)"/>')
    for node, (x, y) in sorted(at.items()):
        fill = "#ddf4ff" if node.startswith(("pipeline", "moeq_kernels")) else "#f6f8fa"
        lines.append(
            f'<rect x="{x - _WIDTH / 2:g}" y="{y - _HEIGHT / 2:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" '
            f'fill="{fill}" stroke="#57606a"/>'
        )
        lines.append(f'<text x="{x:g}" y="{y + 5:g}" text-anchor="middle" font-size="14">{node}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"
