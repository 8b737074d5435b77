"""The pictures of an HTML report as inline SVG. Colours are CSS classes, so that one picture serves light and dark."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from moeq.foreign import in_html
from moeq.report.heat import LIMITS, HeatMap

if TYPE_CHECKING:
    from moeq.check.tile_picture import TilePicture

#: Size of a cell of a heat map, and room for labels, in pixels.
_CELL, _LEFT, _TOP = 18, 64, 34

#: Widest heat map before cells shrink.
_WIDEST = 960


def heat_svg(chart: HeatMap) -> str:
    """Layer x expert map; hovering tells the number."""
    cell = max(3.0, min(_CELL, _WIDEST / max(1, len(chart.experts))))
    width, height = _LEFT + cell * len(chart.experts) + 8, _TOP + cell * len(chart.layers) + 8
    every = next(step for step in (1, 2, 4, 8, 16) if step * cell >= 26 or step == 16)
    parts = [f'<text x="{_LEFT}" y="12" class="axis">expert</text>']
    for column in range(0, len(chart.experts), every):
        x = _LEFT + cell * (column + 0.5)
        parts.append(f'<text x="{x:.1f}" y="{_TOP - 6}" class="tick mid">{chart.experts[column]}</text>')
    rows_every = next(step for step in (1, 2, 4, 8) if step * cell >= 12 or step == 8)
    for row, layer in enumerate(chart.layers):
        y = _TOP + cell * row
        if row % rows_every == 0:
            parts.append(f'<text x="{_LEFT - 8}" y="{y + cell / 2 + 4:.1f}" class="tick end">layer {layer}</text>')
        for column, expert in enumerate(chart.experts):
            level = chart.level(row, column)
            if level is None:
                continue
            value = chart.values[row][column]
            gap = 1 if cell > 6 else 0
            parts.append(
                f'<rect x="{_LEFT + cell * column:.1f}" y="{y:.1f}" width="{cell - gap:.1f}" height="{cell - gap:.1f}" '
                f'class="h{level}"><title>layer {layer} expert {expert}: {value:.3g} of the bound</title></rect>'
            )
    return _svg(width, height, parts, f"error over bound of {chart.projection}, by layer and expert")


def heat_legend() -> str:
    """The levels of a heat map, a picture each, so that a narrow window can wrap them."""
    levels = []
    for level, limit in enumerate((*LIMITS, None)):
        text = f"≤ {limit:g}" if limit is not None else "beyond the bound"
        square = f'<rect x="0" y="2" width="14" height="14" class="h{level}"/>'
        label = f'<text x="19" y="14" class="tick">{text}</text>'
        levels.append(_svg(34 + 7 * len(text), 20, [square, label], f"level {level} of the heat map"))
    return "".join(levels)


def tile_svg(picture: TilePicture) -> str:
    """A 16 x 64 tile twice: as the matrix has it, and as it lies in memory; a code keeps its colour."""
    size, width_codes = 11, 64
    per_word = 32 // picture.bits
    gap = 4
    memory_x = [size * place + gap * (place // per_word) for place in range(width_codes)]
    rows = len(picture.codes) // width_codes
    first_y, second_y = 40, 40 + size * 16 + 58
    groups: dict[int, list[str]] = {}
    for k in range(16):
        for n in range(64):
            groups.setdefault(_shade(k, n), []).append(_square(24 + size * n, first_y + size * k, size - 1))
    for place, (k, n) in enumerate(picture.codes):
        x, y = 24 + memory_x[place % width_codes], second_y + size * (place // width_codes)
        groups.setdefault(_shade(k, n), []).append(_square(x, y, size - 1))
    parts = [
        '<text x="24" y="16" class="axis">in the matrix: input features 0-15 down, output features 0-63 across</text>',
        *(
            f'<text x="{24 + size * n + size / 2:.0f}" y="{first_y - 6}" class="tick mid">{n}</text>'
            for n in range(0, 64, 8)
        ),
        *(f'<text x="20" y="{first_y + size * k + size - 2}" class="tick end">{k}</text>' for k in range(0, 16, 4)),
        f'<text x="24" y="{second_y - 26}" class="axis">in memory, bytes {picture.first_byte} to {picture.last_byte}: '
        f"{width_codes} codes a line, {per_word} to a 32-bit word, lowest bits first</text>",
        f'<text x="24" y="{second_y - 8}" class="tick">colour: output feature; shade: input feature</text>',
        *(f'<path d="{"".join(squares)}" {_fill(shade)}/>' for shade, squares in sorted(groups.items())),
    ]
    width = 24 + memory_x[-1] + size + 8
    return _svg(width, second_y + size * rows + 8, parts, f"where {picture.layout} puts the codes of a tile")


def dot_svg(state: str) -> str:
    """The mark of a cell of the backend table."""
    return f'<svg width="10" height="10" aria-hidden="true"><circle cx="5" cy="5" r="4" class="{state}"/></svg>'


def _square(x: float, y: float, size: float) -> str:
    return f"M{x:g} {y:g}h{size:g}v{size:g}h-{size:g}z"


def _shade(k: int, n: int) -> int:
    """Colour class of a code: 16 hues over the output features, 4 shades over the input features."""
    return 4 * (n // 4) + k // 4


def _fill(shade: int) -> str:
    hue, light = 21 * (shade // 4), 38 + 13 * (shade % 4)
    return f'fill="hsl({hue} 62% {light}%)"'


def _svg(width: float, height: float, parts: Iterable[str], title: str) -> str:
    body = "".join(parts)
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'aria-label="{in_html(title)}">{body}</svg>'
    )
