"""Write a run as Markdown tables."""

from __future__ import annotations

from typing import Any

from bench.peers.contenders import BY_FORMAT
from bench.peers.evaluate import OURS, TARGETS, Cell, gaps, judge, peers_of, scores, time_of


def markdown(run: dict[str, Any]) -> str:
    """Write contenders without a time, targets, scores and every cell."""
    targets = _targets(run) if run.get("routing", "uniform") == "uniform" else []  # targets are for uniform routing
    parts = [*_heading(run), "", *missing(run), "", *targets, "", *_scores(run)]
    for name in dict.fromkeys(cell["format"] for cell in run["cells"]):
        parts += ["", f"## {name}", "", *_cells([cell for cell in run["cells"] if cell["format"] == name])]
    return "\n".join(parts) + "\n"


def missing(run: dict[str, Any]) -> list[str]:
    """Write which contenders have no time in which cells: nothing is claimed against them there."""
    found = gaps(run, BY_FORMAT)
    if not found:
        return ["Every contender was right, and timed, in every cell."]
    rows = ["## Contenders without a time", "", "Nothing is claimed against these contenders in these cells.", ""]
    rows += ["| format | contender | cells | why |", "| --- | --- | --- | --- |"]
    return rows + [f"| {one.format} | {one.contender} | {one.cells} of {one.of} | {_cell(one.why)} |" for one in found]


def _cell(text: str) -> str:
    """Fit a text into a cell of a table."""
    return " ".join(text.replace("|", "/").split())[:300]


def _heading(run: dict[str, Any]) -> list[str]:
    """Write what was run, and what was left out."""
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
