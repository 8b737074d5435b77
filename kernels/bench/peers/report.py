"""A run as Markdown tables and as a picture (SVG, written here: no plotting library is needed)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from html import escape
from typing import Any

from bench.peers.contenders import CONTENDERS
from bench.peers.evaluate import OURS, TARGETS, Cell, judge, peers_of, scores, time_of

#: Line colours, told apart also by those who see few colours; ours is drawn thicker.
COLOURS = {
    OURS: "#d62728",
    "humming": "#1f77b4",
    "marlin": "#2ca02c",
    "vllm-triton": "#9467bd",
    "triton_kernels": "#ff7f0e",
    "triton_kernels-own-routing": "#8c564b",
    "vllm-cutlass": "#17becf",
    "vllm-cutlass-w4a8": "#7f7f7f",
    "deep_gemm": "#bcbd22",
    "flashinfer": "#e377c2",
    "flashinfer-fp8": "#f7b6d2",
    "turbomind": "#98df8a",
}


def markdown(run: dict[str, Any]) -> str:
    """Verdicts, scores and every cell."""
    targets = _targets(run) if run.get("routing", "uniform") == "uniform" else []  # they are for uniform routing
    parts = [*_heading(run), "", *targets, "", *_scores(run)]
    for name in dict.fromkeys(cell["format"] for cell in run["cells"]):
        parts += ["", f"## {name}", "", *_cells([cell for cell in run["cells"] if cell["format"] == name])]
    parts += ["", "## Not timed", "", *(f"* {name}: {reason}." for name, reason in not_timed(run))]
    return "\n".join(parts) + "\n"


def not_timed(run: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Contenders without a single time in the run, so that nothing is claimed against them, and why."""
    for name in CONTENDERS:
        rows = [cell["contenders"][name] for cell in run["cells"] if name in cell["contenders"]]
        if not any("cold" in row for row in rows):
            absent = run.get("contenders", {}).get(name, {}).get("absent")
            failed = next((row.get("reason") or row["status"] for row in rows), "took part in no cell")
            yield name, str(absent or failed)


def _heading(run: dict[str, Any]) -> list[str]:
    """What was run, and what was not."""
    versions = {name: v for row in run.get("contenders", {}).values() for name, v in row["versions"].items()}
    shown = ", ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    cells = f"{len(run['cells'])} cells"
    rows = [f"# Side by side: {run['device']}, {run['date']}", "", f"{cells}; {shown or 'no versions recorded'}."]
    routing = run.get("routing", "uniform")
    routed = "" if routing == "uniform" else f"routing: {routing}; "
    rows += [f"Microseconds, cold weights (`hot`: ours, warm); {routed}{run.get('side_by_side', 'one run')}.", ""]
    rows += [f"* {note}" for note in run.get("notes", ())]
    for gone in run.get("left_out", ()):
        rows.append(
            f"* Left out for time: {gone['format']} {gone['shape']}, M = {', '.join(map(str, gone['tokens']))}."
        )
    return rows


def _targets(run: dict[str, Any]) -> list[str]:
    rows = ["## Targets", "", "| regime | target | reached | figure | misses |", "| --- | --- | --- | --- | --- |"]
    words = {True: "yes", False: "**no**", None: "–"}
    for target in TARGETS:
        verdict = judge(target, run)
        shown = "; ".join(f"{miss.where} {miss.value:.2f}" for miss in verdict.misses[:6])
        more = f"; {len(verdict.misses) - 6} more" if len(verdict.misses) > 6 else ""
        reached = words[verdict.reached] if verdict.cells != 1 else "– (one cell)"
        rows.append(f"| {target.regime} | {target.wanted} | {reached} | {verdict.said} | {shown}{more} |")
    return rows


def _scores(run: dict[str, Any]) -> list[str]:
    rows = ["## Against each peer", "", "| format | peer | cells | won | time of the peer over ours, geometric mean |"]
    rows.append("| --- | --- | --- | --- | --- |")
    return rows + [f"| {s.format} | {s.peer} | {s.cells} | {s.won} | {s.mean:.2f} |" for s in scores(run)]


def _cells(cells: list[Cell]) -> list[str]:
    names = [OURS, *peers_of(cells)]
    head = ["shape", "M", "floor"]
    for name in names:
        head += [name, "hot"] if name == OURS else [name]
    rows = ["| " + " | ".join([*head, "floor / ours", "best peer / ours"]) + " |", "| --- " * (len(head) + 2) + "|"]
    for cell in sorted(cells, key=lambda one: (one["shape"], one["tokens"])):
        ours = time_of(cell, OURS)
        row = [cell["shape"], str(cell["tokens"]), f"{cell['floor_us']:.1f}"]
        for name in names:
            row.append(_shown(cell, name))
            if name == OURS:
                hot = time_of(cell, OURS, "hot")
                row.append("–" if hot is None else f"{hot:.1f}")
        others = [found for name in names[1:] if (found := time_of(cell, name)) is not None]
        row.append("–" if ours is None else f"{cell['floor_us'] / ours:.2f}")
        row.append("–" if ours is None or not others else f"{min(others) / ours:.2f}")
        rows.append("| " + " | ".join(row) + " |")
    return rows


def _shown(cell: Cell, name: str) -> str:
    found = time_of(cell, name)
    return f"{found:.1f}" if found is not None else str(cell["contenders"].get(name, {}).get("status", "–"))


#: A panel of the picture: its size and the room around it, in pixels.
_WIDE, _HIGH, _LEFT, _TOP, _GAP = 260, 190, 46, 54, 58


def picture(run: dict[str, Any]) -> str:
    """Time over floor by tokens: a row of panels a format, a column a shape; both axes logarithmic."""
    formats = list(dict.fromkeys(cell["format"] for cell in run["cells"]))
    shapes = list(dict.fromkeys(cell["shape"] for cell in run["cells"]))
    parts = [_legend(run)]
    for row, fmt in enumerate(formats):
        for column, shape in enumerate(shapes):
            cells = [cell for cell in run["cells"] if (cell["format"], cell["shape"]) == (fmt, shape)]
            if cells:
                left, top = _LEFT + column * (_WIDE + _GAP), _TOP + row * (_HIGH + _GAP)
                parts.append(f'<g transform="translate({left} {top})">{_panel(f"{fmt}, {shape}", cells)}</g>')
    width = _LEFT + len(shapes) * (_WIDE + _GAP)
    height = _TOP + len(formats) * (_HIGH + _GAP)
    style = "text{font:11px sans-serif;fill:#333}.t{font-weight:bold}.g{stroke:#ddd}"
    style += ".end{text-anchor:end}.mid{text-anchor:middle}"
    title = "Time of a whole MoE layer over its floor, by tokens; cold weights"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">'
        f"<style>{style}</style><title>{title}</title>"
        f'<rect width="{width}" height="{height}" fill="#fff"/>'
        f'<text x="{_LEFT}" y="16" class="t">{title}, {escape(run["device"])}, {escape(run["date"])}</text>'
        + "".join(parts)
        + "</svg>\n"
    )


def _legend(run: dict[str, Any]) -> str:
    parts, x = [], _LEFT
    for name in [OURS, *peers_of(run["cells"])]:
        colour = COLOURS.get(name, "#777")
        parts.append(
            f'<rect x="{x}" y="25" width="14" height="4" fill="{colour}"/><text x="{x + 18}" y="31">{name}</text>'
        )
        x += 34 + 7 * len(name)
    return "".join(parts)


def _panel(title: str, cells: list[Cell]) -> str:
    """Lines of all contenders; points carry their numbers as tooltips."""
    tokens = [cell["tokens"] for cell in cells]
    ratios = [value for cell in cells for value in _ratios(cell).values()]
    low, high = math.log2(min(tokens)), math.log2(max(max(tokens), min(tokens) + 1))
    top = math.log(max([*ratios, 2.0]) * 1.1)

    def x(count: int) -> float:
        return _WIDE * (math.log2(count) - low) / (high - low)

    def y(ratio: float) -> float:
        return _HIGH * (1 - math.log(max(ratio, 1.0)) / top)

    parts = [f'<text y="-6" class="t">{escape(title)}</text>']
    for step in (1, 1.5, 2, 3, 5, 10, 20, 50, 100):
        if math.log(step) <= top:
            parts.append(f'<line x2="{_WIDE}" y1="{y(step):.1f}" y2="{y(step):.1f}" class="g"/>')
            parts.append(f'<text x="-5" y="{y(step) + 4:.1f}" class="end">{step:g}</text>')
    most = max(tokens)
    shown = [n for n in sorted(set(tokens)) if n == most or (math.log2(n) % 2 == 0 and 4 * n <= most)]
    parts += [f'<text x="{x(count):.1f}" y="{_HIGH + 15}" class="mid">{count}</text>' for count in shown]
    for name in [*peers_of(cells), OURS]:
        points = [(cell, _ratios(cell)[name]) for cell in sorted(cells, key=_tokens) if name in _ratios(cell)]
        parts.append(_curve(name, [(x(cell["tokens"]), y(ratio), _tip(name, cell, ratio)) for cell, ratio in points]))
    return "".join(parts)


def _curve(name: str, points: Iterable[tuple[float, float, str]]) -> str:
    points = list(points)
    colour, width = COLOURS.get(name, "#777"), 2.5 if name == OURS else 1.3
    line = " ".join(f"{px:.1f},{py:.1f}" for px, py, _ in points)
    dots = "".join(
        f'<circle cx="{px:.1f}" cy="{py:.1f}" r="2.4" fill="{colour}"><title>{escape(tip)}</title></circle>'
        for px, py, tip in points
    )
    return f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="{width}"/>{dots}'


def _ratios(cell: Cell) -> dict[str, float]:
    found = ((name, time_of(cell, name)) for name in cell["contenders"])
    return {name: value / cell["floor_us"] for name, value in found if value is not None}


def _tip(name: str, cell: Cell, ratio: float) -> str:
    return f"{name}, {cell['tokens']} tokens: {ratio * cell['floor_us']:.1f} us, {ratio:.2f} x the floor"


def _tokens(cell: Cell) -> int:
    return int(cell["tokens"])
