"""`run-check`'s report as one HTML file: no script, no network, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from moeq.foreign import in_html
from moeq.report.heat import LIMITS, HeatMap, heat_maps

if TYPE_CHECKING:
    from jinja2 import Template

    from moeq.check.results import CheckReport
    from moeq.check.tile_picture import TilePicture
    from moeq.report.backend_matrix import BackendMatrix


#: Upper bound of listed mismatches and failing experts.
MAX_LINES = 200


@dataclass(frozen=True)
class Provenance:
    """Origin of a report: its time, versions and checkpoint."""

    date: str
    command: str
    versions: str  #: moeq, Python, packages
    source: str  #: name and identity of the checkpoint that was converted
    experts: Mapping[int, int]  #: number of experts of every converted layer


def render(
    report: CheckReport,
    matrix: BackendMatrix | None = None,
    picture: TilePicture | None = None,
    *,
    provenance: Provenance | None = None,
) -> str:
    """Render the page, without the sections whose argument is None."""
    products = [one for one in report.results if one.name != "layer"]
    charts = heat_maps(report)
    return template("run_check.html").render(
        report=report,
        facts=_facts(report, provenance),
        failures=_failures(report),
        max_lines=MAX_LINES,
        levels=len(LIMITS) + 1,
        legend=heat_legend(),
        maps=[(chart.projection, heat_drawing(chart)) for chart in charts],
        timings=[timing for layer in report.layers for timing in layer.timings],
        roundings=list(dict.fromkeys(f"{one.name}: {one.arithmetic}" for one in products)),
        matrix=matrix,
        picture=picture,
        tile=picture and tile_drawing(picture),
    )


def template(name: str) -> Template:
    """Return a template of this package, which escapes whatever is not marked as HTML."""
    from jinja2 import Environment, PackageLoader
    from markupsafe import Markup

    def escaped(value: object) -> object:
        return value if hasattr(value, "__html__") else Markup(in_html(value))

    environment = Environment(
        loader=PackageLoader("moeq.report"), autoescape=True, finalize=escaped, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template(name)


def _failures(report: CheckReport) -> list[str]:
    lines = [mismatch.text for mismatch in report.digest_mismatches]
    lines += [text for result in report.results for text in result.complaints]
    for layer in report.layers:
        lines += layer.unequal_runs
    return lines


def _facts(report: CheckReport, provenance: Provenance | None) -> dict[str, str]:
    passed = sum(result.passed for result in report.results)
    num_wrong = len(report.digest_mismatches)
    checked = report.digests_checked
    return {
        "reference": report.source or "the converted checkpoint's own logical values",
        "format": report.scheme,
        "layout": f"{report.layout}, for {report.backend}",
        "kernels": f"{report.device}, {report.dtype} activations, seed {report.seed}",
        "digests": f"{checked - num_wrong} of {checked} as recorded" if checked else "not checked",
        "products": f"{passed} of {len(report.results)} within tolerance" if report.results else "no kernel was run",
        "layers": f"{len(report.layers)} of {report.layers_in_checkpoint} run",
        **_made(report, provenance),
        "time": f"{report.seconds:.1f} s",
    }


def _made(report: CheckReport, provenance: Provenance | None) -> dict[str, str]:
    """Say how many of all experts were run, and where the page comes from."""
    if provenance is None:
        return {}
    num_run = sum(len(layer.sample.experts) for layer in report.layers)
    return {
        "experts": f"{num_run} of {sum(provenance.experts.values())} run",
        "source": provenance.source,
        "made": f"{provenance.date} by {provenance.versions}",
        "command": provenance.command,
    }


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
    columns_apart = next(step for step in (2, 4, 8, 16) if step * size >= 26)
    rows_apart = next(step for step in (1, 2, 4) if step * size >= 12)
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
    paths = tuple(
        Path("".join(squares), f"hsl({21 * (shade // 4)} 62% {38 + 13 * (shade % 4)}%)")
        for shade, squares in sorted(shades.items())
    )
    height = second_y + _CODE * (len(picture.codes) // _CODES_IN_LINE) + 8
    title = f"where {picture.layout} puts the codes of a tile"
    return Drawing(memory_x[-1] + _CODE + 8, height, title, texts, paths=paths)


def _square(x: float, y: float) -> str:
    side = _CODE - 1
    return f"M{x:g} {y:g}h{side}v{side}h-{side}z"


def _shade(k: int, n: int) -> int:
    """Return the colour number of a code: 16 hues over the output features, 4 shades over the input features."""
    return 4 * (n // 4) + k // 4
