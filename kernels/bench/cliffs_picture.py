"""A picture of `cliffs.py`'s results: time over floor against tokens, a line for each layer.

python kernels/bench/cliffs_picture.py results.json picture.svg
"""

from __future__ import annotations

import colorsys
import json
import math
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 960, 520, 60, 250, 30, 50
MOST = 40.0


def place(tokens: float, ratio: float, last: float) -> tuple[float, float]:
    """Where a point lies, both axes logarithmic."""
    x = LEFT + (WIDTH - LEFT - RIGHT) * math.log2(tokens) / math.log2(last)
    y = HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log(max(1.0, ratio)) / math.log(MOST)
    return round(x, 1), round(y, 1)


def picture(rows: list[dict[str, Any]]) -> str:
    """An SVG document."""
    last = max(row["tokens"] for row in rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12" '
        'font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18">time over floor, cold weights; tokens of a call</text>',
    ]
    for ratio in (1, 1.5, 2, 3, 5, 10, 20, 40):
        _, y = place(1, ratio, last)
        lines.append(f'<path d="M{LEFT} {y}H{WIDTH - RIGHT}" stroke="#ddd"/><text x="8" y="{y + 4}">{ratio} x</text>')
    for power in range(0, int(math.log2(last)) + 1, 2):
        x, _ = place(1 << power, 1, last)
        lines.append(f'<text x="{x - 8}" y="{HEIGHT - BOTTOM + 18}">{1 << power}</text>')
    groups = [list(found) for _, found in groupby(rows, key=lambda row: (row["layer"], row["format"]))]
    for number, found in enumerate(groups):
        red, green, blue = (round(255 * part) for part in colorsys.hls_to_rgb(number / len(groups), 0.42, 0.75))
        colour = f"rgb({red},{green},{blue})"
        points = " ".join("{},{}".format(*place(row["tokens"], row["us"] / row["floor_us"], last)) for row in found)
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
        label = f"{found[0]['layer']} {found[0]['format']}"
        lines.append(f'<text x="{WIDTH - RIGHT + 12}" y="{TOP + 14 + 18 * number}" fill="{colour}">{label}</text>')
    return "\n".join([*lines, "</svg>\n"])


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(picture(json.loads(Path(sys.argv[1]).read_text())["rows"]))
