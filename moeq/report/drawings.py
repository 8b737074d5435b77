"""The pictures of an HTML report as shapes with their places; the template draws them as inline SVG.

Colours are CSS classes, so that one picture serves light and dark.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moeq.report.heat import LIMITS, HeatMap

if TYPE_CHECKING:
    from moeq.check.tile_picture import TilePicture

#: Size of a cell of a heat map, and room for labels, in pixels.
_CELL, _LEFT, _TOP = 18, 64, 34

#: Widest heat map before cells shrink, in pixels.
_WIDEST = 960

#: Size of a code of a tile, and of the gap between words, in pixels; codes in a line.
_CODE, _WORD_GAP, _CODES_IN_LINE = 11, 4, 64


class Text(NamedTuple):
    """Words at a place; `kind` is their CSS class."""

    x: str
    y: str
    words: str
    kind: str = "tick"


class Square(NamedTuple):
    """A square in the colour of a level of the heat map; its title is shown while hovering."""

    x: str
    y: str
    size: str
    level: int
    title: str = ""


class Path(NamedTuple):
    """An SVG path and its colour."""

    d: str
    fill: str


@dataclass(frozen=True)
class Drawing:
    """One picture: sizes in pixels, shapes in the order in which they are drawn."""

    width: float
    height: float
    title: str
    texts: tuple[Text, ...] = ()
    cells: tuple[Square, ...] = ()
    paths: tuple[Path, ...] = ()


def heat_drawing(chart: HeatMap) -> Drawing:
    """Draw the errors of a product, layers down and experts across."""
    size = max(3.0, min(_CELL, _WIDEST / max(1, len(chart.experts))))
    columns_apart = next(step for step in (1, 2, 4, 8, 16) if step * size >= 26 or step == 16)
    rows_apart = next(step for step in (1, 2, 4, 8) if step * size >= 12 or step == 8)
    texts = [Text(str(_LEFT), "12", "expert", "axis")]
    for column in range(0, len(chart.experts), columns_apart):
        x = _LEFT + size * (column + 0.5)
        texts.append(Text(f"{x:.1f}", str(_TOP - 6), str(chart.experts[column]), "tick mid"))
    for row in range(0, len(chart.layers), rows_apart):
        y = _TOP + size * row + size / 2 + 4
        texts.append(Text(str(_LEFT - 8), f"{y:.1f}", f"layer {chart.layers[row]}", "tick end"))
    width, height = _LEFT + size * len(chart.experts) + 8, _TOP + size * len(chart.layers) + 8
    title = f"error over bound of {chart.projection}, by layer and expert"
    return Drawing(width, height, title, tuple(texts), tuple(_heat_cells(chart, size)))


def _heat_cells(chart: HeatMap, size: float) -> Iterator[Square]:
    side = f"{size - (1 if size > 6 else 0):.1f}"
    for row, layer in enumerate(chart.layers):
        for column, expert in enumerate(chart.experts):
            level = chart.level(row, column)
            if level is not None:
                title = f"layer {layer} expert {expert}: {chart.values[row][column]:.3g} of the bound"
                yield Square(f"{_LEFT + size * column:.1f}", f"{_TOP + size * row:.1f}", side, level, title)


def heat_legend() -> list[Drawing]:
    """Draw each level of a heat map as a picture of its own, so that a narrow window can wrap them."""
    levels = []
    for level, limit in enumerate((*LIMITS, None)):
        words = f"≤ {limit:g}" if limit is not None else "beyond the bound"
        cell, text = Square("0", "2", "14", level), Text("19", "14", words)
        levels.append(Drawing(34 + 7 * len(words), 20, f"level {level} of the heat map", (text,), (cell,)))
    return levels


def tile_drawing(picture: TilePicture) -> Drawing:
    """Draw a 16 x 64 tile twice: as the matrix has it, and as it lies in memory; a code keeps its colour."""
    per_word = 32 // picture.bits
    memory_x = [24 + _CODE * place + _WORD_GAP * (place // per_word) for place in range(_CODES_IN_LINE)]
    first_y, second_y = 40, 40 + _CODE * 16 + 58
    shades: dict[int, list[str]] = {}
    for k in range(16):
        for n in range(64):
            shades.setdefault(_shade(k, n), []).append(_square(24 + _CODE * n, first_y + _CODE * k))
    for place, (k, n) in enumerate(picture.codes):
        x, y = memory_x[place % _CODES_IN_LINE], second_y + _CODE * (place // _CODES_IN_LINE)
        shades.setdefault(_shade(k, n), []).append(_square(x, y))
    memory = (
        f"in memory, bytes {picture.first_byte} to {picture.last_byte}: {_CODES_IN_LINE} codes a line, {per_word} to a"
    )
    texts = (
        Text("24", "16", "in the matrix: input features 0-15 down, output features 0-63 across", "axis"),
        *(Text(f"{24 + _CODE * n + _CODE / 2:.0f}", str(first_y - 6), str(n), "tick mid") for n in range(0, 64, 8)),
        *(Text("20", str(first_y + _CODE * k + _CODE - 2), str(k), "tick end") for k in range(0, 16, 4)),
        Text("24", str(second_y - 26), f"{memory} 32-bit word, lowest bits first", "axis"),
        Text("24", str(second_y - 8), "colour: output feature; shade: input feature"),
    )
    paths = tuple(Path("".join(squares), _colour(shade)) for shade, squares in sorted(shades.items()))
    height = second_y + _CODE * (len(picture.codes) // _CODES_IN_LINE) + 8
    title = f"where {picture.layout} puts the codes of a tile"
    return Drawing(memory_x[-1] + _CODE + 8, height, title, texts, paths=paths)


def _square(x: float, y: float) -> str:
    side = _CODE - 1
    return f"M{x:g} {y:g}h{side}v{side}h-{side}z"


def _shade(k: int, n: int) -> int:
    """Return the colour number of a code: 16 hues over the output features, 4 shades over the input features."""
    return 4 * (n // 4) + k // 4


def _colour(shade: int) -> str:
    return f"hsl({21 * (shade // 4)} 62% {38 + 13 * (shade % 4)}%)"
