"""A check's report in every form: text, JUnit, HTML with its pictures."""

from __future__ import annotations

import io
import itertools
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree as ET

import pytest
from rich.console import Console

from moeq.check.engine_check import BackendResult
from moeq.check.results import (
    CheckReport,
    ExpertError,
    LayerReport,
    ProjectionResult,
    Run,
    SabotageResult,
    Sample,
    SelftestReport,
    Timing,
)
from moeq.check.tile_picture import tile_picture
from moeq.digest import DigestDifference
from moeq.matrix import MatrixSpec
from moeq.report import check_text, html, junit
from moeq.report.backend_matrix import BackendMatrix, MatrixCell
from moeq.report.heat import LIMITS, HeatMap, heat_map, heat_maps
from moeq.report.html import heat_drawing, heat_legend, tile_drawing

INT4 = MatrixSpec("w2", 256, 128, "int4", 32, "f16")

#: Places (k, n) of Marlin's first eight codes in memory.
MARLIN = [(0, 0), (8, 0), (0, 8), (8, 8), (1, 0), (9, 0), (1, 8), (9, 8)]


def expert(number: int, exceedance: float, looks_like: str | None = None) -> ExpertError:
    features = 1 if exceedance > 1 else 0
    return ExpertError(number, 9, 1e-3, 2e-3, exceedance, (3, 44), features, looks_like)


def result(layer: int, name: str, *experts: ExpertError) -> ProjectionResult:
    run = "7 tokens" if name == "layer" else None
    return ProjectionResult(
        layer, name, 256, 0.5, 0.1, 1e-3, 0.99999, 1e-3, 1.2e-3, "weights rounded to bfloat16", (3, 44), run, experts
    )


def report(*, damaged: bool = False) -> CheckReport:
    layers = []
    for number in (0, 5):
        wrong = damaged and number == 5
        worst = expert(2, 857.0, "looks like one weight, of input feature 47") if wrong else expert(2, 0.3)
        results = (
            result(number, "up", expert(0, 0.001), expert(2, 0.06)),
            result(number, "down", expert(0, 0.15), worst),
            result(number, "layer", expert(0, 0.2), expert(2, 0.2)),
        )
        sample = Sample(number, (0, 2), (Run(1), Run(7, "same")), 2, False)
        layers.append(LayerReport(sample, results, 1, ("1 token",) if wrong else ()))
    mismatches = (DigestDifference(5, 2, "down", "expert 0 <down>"),) if damaged else ()
    return CheckReport(
        "out & <more>", "source", "gptq int4 g32 sym", "marlin-wna16/1", "MARLIN", "cpu (Triton interpreter)", "bf16",
        0, 24, mismatches, tuple(layers), 6, ("norm: a rule", "up: another | rule"), 1.5, ("a note",),
    )  # fmt: skip


def text_of(render, *arguments) -> str:  # type: ignore[no-untyped-def]
    console = Console(file=io.StringIO(), width=200, highlight=False)
    render(console, *arguments)
    found: str = console.file.getvalue()  # type: ignore[attr-defined]
    return found


def test_heat_maps_are_per_product_and_the_worst_is_shown() -> None:
    charts = heat_maps(report())
    assert [chart.projection for chart in charts] == ["up", "down"]
    chart = heat_map(report())
    assert chart is not None
    assert (chart.projection, chart.layers, chart.experts) == ("down", (0, 5), (0, 2))
    assert chart.values == ((0.15, 0.3), (0.15, 0.3))
    assert [chart.level(0, 0), chart.level(0, 1)] == [4, 5]
    damaged = heat_map(report(damaged=True))
    assert damaged is not None
    assert damaged.level(1, 1) == len(LIMITS)


def test_text_says_everything_and_ends_with_the_verdict() -> None:
    text = text_of(check_text.render, report())
    assert (
        text.splitlines()[-1] == "ok  6 of 6 products within tolerance, 2 of 2 repeated runs equal bit for bit, 1.5 s"
    )
    assert "4 of 6 layers were not run" in text
    heads = {one.split()[0]: one.split(maxsplit=1)[1] for one in text.splitlines() if len(one.split()) > 1}
    assert text.startswith("out & <more> against source\n")
    assert heads["what"] == "gptq int4 g32 sym, layout marlin-wna16/1, for MARLIN"
    assert heads["kernels"] == "cpu (Triton interpreter), bf16 activations, seed 0"
    assert heads["digests"] == "24 of 24 projections hold the values recorded in moeq.json"
    assert heads["sample"].startswith("layer 5: sampled experts 0, 2; top 2; 1 token")
    assert heads["note"] == "a note"
    alone = text_of(check_text.render, replace(report(), source=None, digests_checked=0))
    assert "out & <more> against its own logical values" in alone
    assert "not checked (" in alone
    assert "up: another | rule" in text
    assert re.search(r"0 \|=\+\|", text), "the heat map of down"
    rows = [one.split()[:2] for one in text.splitlines() if re.match(r" *[05] +(up|down|layer) ", one)]
    assert rows == [[layer, name] for layer in "05" for name in ("up", "down", "layer")]


def test_narrow_tables_leave_out_columns_in_the_order_of_their_ranks() -> None:
    titles = ["worst expert", "error / bound", "tolerance", "16-bit torch", "relative", "mean error", "max error"]
    shown = []
    for width in range(110, 20, -1):
        columns = [str(column.header) for column in check_text._table(report(), width).columns]
        found = [title for title in titles if title in columns]
        shown += [found] if found not in shown else []
    left_out = [set(more) - set(fewer) for more, fewer in itertools.pairwise(shown)]
    assert left_out == [{"mean error"}, {"relative"}, {"16-bit torch"}, {"worst expert"}, {"tolerance"}]


def test_backends_of_an_engine_each_have_an_answer() -> None:
    ran = BackendResult(0, "MARLIN", True, "MarlinExperts", 0.001, 0.002, (3, 0.5), {1: 10.4, 64: 99.6})
    rows = [
        ran,
        replace(ran, backend="TRITON", selected=False, error=0.003, expert=(2, 1.5), microseconds=None),
        replace(ran, backend="HUMMING", selected=False, allowed=None, microseconds=None),
        BackendResult(0, "CUTLASS", False, refused="no [kernel] here"),
    ]
    lines = text_of(check_text.render_backends, rows).splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [
        ["0", "MARLIN (selected)", "MarlinExperts", "right", "1.00e-03", "2.00e-03", "10 us", "100 us"],
        ["0", "TRITON", "MarlinExperts", "WRONG", "3.00e-03", "2.00e-03", "-", "-"],
        ["0", "HUMMING", "MarlinExperts", "not judged", "1.00e-03", "-", "-", "-"],
        ["0", "CUTLASS", "-", "refused", "-", "-", "-", "-"],
    ]
    assert "1 tokens ┃ 64 tokens" in lines[1]
    assert [line.strip() for line in lines[-3:-1]] == [
        "layer 0  TRITON: expert 2 has 1.5 x its allowed error",
        "layer 0  CUTLASS: no [kernel] here",
    ]


def test_text_names_what_is_wrong() -> None:
    text = text_of(check_text.render, report(damaged=True))
    assert text.splitlines()[-1].startswith("FAILED  5 of 6")
    assert (
        "layer 5 down expert 2: output feature 44, 857 x the bound; looks like one weight, of input feature 47" in text
    )
    assert "layer 5: 1 token gave other bits the second time" in text
    assert re.search(r"5 \|=X\|", text)


def test_junit_has_a_case_per_product_and_failures_say_why() -> None:
    root = ET.fromstring(junit.render(report(damaged=True)))
    assert (root.get("tests"), root.get("failures")) == ("10", "4")
    cases = {(case.get("classname"), case.get("name")): case for case in root.iter("testcase")}
    failure = cases["moeq.kernels.layer5", "down"].find("failure")
    assert failure is not None
    assert "857 x the bound" in str(failure.text)
    assert cases["moeq.kernels.layer5", "up"].find("failure") is None
    clean = ET.fromstring(junit.render(report()))
    assert clean.get("failures") == "0"
    assert [suite.get("name") for suite in clean] == ["digests", "kernels", "repeats"]


class Page(HTMLParser):
    """Collects tags, and checks that they are closed in order."""

    void = frozenset({"meta", "rect", "circle", "path", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.attributes: list[tuple[str, str | None]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += attrs
        if tag not in self.void or (tag == "rect" and not self.get_starttag_text().endswith("/>")):  # type: ignore[union-attr]
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.count[tag] = self.count.get(tag, 0) + 1
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("damaged", [False, True])
def test_html_is_well_formed_and_self_contained(damaged: bool) -> None:
    cells = (MatrixCell("chosen", "the choice"), MatrixCell("no", 'needs "more"'))
    matrix = BackendMatrix("vllm on H100", (1, 2), (("MARLIN", cells),))
    text = html.render(report(damaged=damaged), matrix, tile_picture("marlin-wna16/1", INT4))
    page = Page(text)
    assert page.open == []
    assert not {name for name, _ in page.attributes} & {"src", "href", "onclick"}
    assert not {"script", "link", "img"} & set(page.count)
    assert "http" not in text, "nothing is fetched"
    levels = len(LIMITS) + 1
    assert page.count["svg"] == levels + 2 + 2 + 1, "legend, two heat maps, two marks, the tile"
    assert "out &amp; &lt;more&gt;" in text
    assert "prefers-color-scheme: dark" in text
    assert ("What is wrong" in text) == damaged
    assert ("expert 0 &lt;down&gt;" in text) == damaged


def test_html_lists_200_failures() -> None:
    many = tuple(DigestDifference(5, number, "down", f"expert {number} is wrong") for number in range(201))
    page = html.render(replace(report(), digest_mismatches=many[:200]))
    assert ("expert 199 is wrong" in page, "more</li>" in page) == (True, False)
    page = html.render(replace(report(), digest_mismatches=many))
    assert ("expert 200 is wrong" in page, "<li>and 1 more</li>" in page) == (False, True)


def test_html_shows_times_where_there_are_some() -> None:
    layer = report().layers[0]
    timing = Timing(0, "33 tokens", 50.0, 10**6, 2 * 10**8, 5 * 10**9, 40.0)
    timed = replace(report(), layers=(replace(layer, timings=(timing,)),))
    text = html.render(timed)
    assert "<td>50.0</td><td>4000</td><td>100.0</td><td>80 %</td>" in text
    assert re.search(r"50\.0 +4000 +100\.0 +80 %", text_of(check_text.render, timed))


@pytest.mark.parametrize(
    ("layout", "spec", "first"),
    [
        ("marlin-wna16/1", INT4, MARLIN),
        ("marlin-act-order/1", replace(INT4, act_order=True), MARLIN),
        ("triton-wna16/1", INT4, [(k, 0) for k in range(8)]),
        ("int8-w8a8/1", MatrixSpec("w2", 256, 128, "int8", 128, "bf16"), [(k, 0) for k in range(8)]),
    ],
)
def test_the_tile_picture_shows_where_codes_lie(layout, spec, first) -> None:
    picture = tile_picture(layout, spec)
    assert picture is not None
    assert list(picture.codes[:8]) == first
    assert sorted(picture.codes) == [(k, n) for k in range(16) for n in range(64)]
    assert sum(path.d.count("z") for path in tile_drawing(picture).paths) == 2 * 1024


def squares(path: str) -> set[tuple[float, float]]:
    found = {tuple(map(float, place.split())) for place in re.findall(r"M([\d.]+ [\d.]+)h", path)}
    return {(x, y) for x, y in found}


def test_colours_and_labels_of_the_tile_picture() -> None:
    """A colour is 4 x 4 codes of the matrix, and as many places in memory; labels stand at their rows and columns."""
    drawing = tile_drawing(tile_picture("marlin-wna16/1", INT4))
    assert len(drawing.paths) == len({path.fill for path in drawing.paths}) == 64
    texts = {(text.kind, text.words): (float(text.x), float(text.y)) for text in drawing.texts}
    matrix = {place for path in drawing.paths for place in sorted(squares(path.d), key=lambda at: at[1])[:16]}
    columns, rows = sorted({x for x, _ in matrix}), sorted({y for _, y in matrix})
    memory = {place for path in drawing.paths for place in squares(path.d)} - matrix
    assert len(memory) == 1024, "no two squares lie upon each other"
    assert (
        min(columns) == min(x for x, _ in memory) == {x for (kind, _), (x, _) in texts.items() if kind == "axis"}.pop()
    )
    assert (len(columns), len(rows)) == (64, 16)
    side = columns[1] - columns[0]
    for number in range(0, 64, 8):
        x, y = texts["tick mid", str(number)]
        assert (columns[number] <= x <= columns[number] + side, y < rows[0]) == (True, True)
    for number in range(0, 16, 4):
        x, y = texts["tick end", str(number)]
        assert (y, x < columns[0]) == (rows[number] + side - 2, True)
    assert [words for kind, words in texts if kind == "tick end"] == ["0", "4", "8", "12"]
    for path in drawing.paths:
        held = squares(path.d)
        assert len(held) == 32
        found = {(columns.index(x), rows.index(y)) for x, y in held & matrix}
        n, k = (min(place) // 4 * 4 for place in zip(*found, strict=True))
        assert found == {(n + i, k + j) for i in range(4) for j in range(4)}
        assert all(0 < x < drawing.width and 0 < y < drawing.height for x, y in held)
    hues = [re.match(r"hsl\((\d+) \d+% (\d+)%\)", path.fill).groups() for path in drawing.paths]
    assert (len({hue for hue, _ in hues}), len({light for _, light in hues})) == (16, 4)


def test_labels_of_a_heat_map_stand_at_their_cells() -> None:
    experts = [expert(number, number / 200) for number in range(60)]
    layers = [replace(report().layers[0], results=(result(layer, "up", *experts),)) for layer in range(12)]
    chart = heat_map(replace(report(), layers=tuple(layers)))
    assert chart is not None
    few = heat_drawing(replace(chart, experts=chart.experts[:3]))
    assert (few.cells[0].x, few.cells[0].y, few.cells[0].size) == ("64.0", "34.0", "17.0")  # widest: 18 with the gap
    assert (few.cells[1].x, few.width, few.height) == ("82.0", 64 + 3 * 18 + 8, 34 + 12 * 18 + 8)
    drawing = heat_drawing(chart)
    assert len(drawing.cells) == 12 * 60
    place = {tuple(re.findall(r"\d+", cell.title)[:2]): (float(cell.x), float(cell.y)) for cell in drawing.cells}
    side = float(drawing.cells[0].size) + 1
    ticks = [text for text in drawing.texts if text.kind != "axis"]
    for text in ticks:
        x, y = float(text.x), float(text.y)
        if text.words.startswith("layer "):
            top = place[text.words[6:], "0"][1]
            assert (top + side / 2 < y < top + side, x < place["0", "0"][0]) == (True, True)
        else:
            left = place["0", text.words][0]
            assert (x == pytest.approx(left + side / 2, abs=0.1), y < place["0", "0"][1]) == (True, True)
    assert sum(text.words.startswith("layer ") for text in ticks) == 12
    columns = [int(text.words) for text in ticks if not text.words.startswith("layer ")]
    assert columns == list(range(0, 60, 2))
    assert all(x + side < drawing.width and y + side < drawing.height for x, y in place.values())
    assert [len(one.cells) for one in heat_legend()] == [1] * (len(LIMITS) + 1)
    for one in heat_legend():  # seven pixels a letter, and as much space after the words as the cell is wide
        assert (one.width, one.height) == (int(one.texts[0].x) + 7 * len(one.texts[0].words) + 15, 20)
    assert [one.texts[0].words for one in heat_legend()][-2:] == ["≤ 1", "beyond the bound"]


@pytest.mark.parametrize(("experts", "apart"), [(30, 2), (74, 4), (128, 4), (256, 8), (384, 16)])
def test_numbers_of_experts_do_not_touch(experts: int, apart: int) -> None:
    results = (result(0, "up", *(expert(number, 0.5) for number in range(experts))),)
    chart = heat_map(replace(report(), layers=(replace(report().layers[0], results=results),)))
    assert chart is not None
    texts = [text for text in heat_drawing(chart).texts if text.words.isdigit()]
    assert [int(text.words) for text in texts] == list(range(0, experts, apart))
    assert all(float(right.x) - float(left.x) >= 26 for left, right in itertools.pairwise(texts))


def test_layouts_that_mix_the_bits_of_codes_have_no_picture() -> None:
    assert tile_picture("triton-kernels-hopper/1", MatrixSpec("w2", 256, 128, "e2m1", 32, "e8m0")) is None


def test_selftest_report_counts_levels_apart() -> None:
    results = (
        SabotageResult("flip a code", "expert 0 up", "a bit", "layer 0 ...", "expert 0: output feature 3", 800.0),
        SabotageResult("sign of a zero", "expert 1 up", "a bit", "layer 0 ...", None, 0.02),
        SabotageResult("swap topk arguments", "the call", "ids", None, "refused: topk_weights is int64", data=False),
    )
    one = SelftestReport("some/where", "gptq", "marlin-wna16/1", "cpu", 0, results)
    text = text_of(check_text.render_selftest, [one])
    assert "2 damages: 2 caught by digest, 1 by the kernels' numbers alone; 1 of 1 swapped calls refused" in text
    assert "below the bound (0.02 of it)" in text
    assert text.splitlines()[-1].startswith("ok")
    table = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["flip a code", "expert 0 up", "a bit", "caught", "expert 0: output feature 3"] in table
    assert ["sign of a zero", "expert 1 up", "a bit", "caught", "below the bound (0.02 of it)"] in table
    assert ["swap topk arguments", "the call", "ids", "refused: topk_weights is int64"] in table
    missed = (replace(results[0], digest=None), replace(results[2], numeric=None))
    text = text_of(check_text.render_selftest, [replace(one, results=missed)])
    table = [re.split(r" {2,}", line.strip()) for line in text.splitlines()]
    assert ["flip a code", "expert 0 up", "a bit", "missed", "expert 0: output feature 3"] in table
    assert ["swap topk arguments", "the call", "ids", "accepted"] in table
    alarmed = replace(one, false_alarms=("layer 0 expert 3 gate: not the values recorded",))
    assert not alarmed.ok
    assert "false alarm: layer 0 expert 3" in text_of(check_text.render_selftest, [alarmed])


def test_every_level_of_a_heat_map_has_a_colour() -> None:
    levels = re.findall(r"svg \.h(\d+) \{", html.render(report()))
    assert levels == [str(level) for level in range(len(LIMITS) + 1)]


@pytest.mark.parametrize(
    ("experts", "columns", "rows"),
    [(3, 2, 1), (73, 2, 1), (80, 4, 1), (81, 4, 2), (160, 8, 2), (161, 8, 4), (320, 16, 4), (900, 16, 4)],
)
def test_labels_of_narrow_cells_leave_room_for_each_other(experts: int, columns: int, rows: int) -> None:
    """Powers of two, at least 26 pixels apart along an axis of experts and 12 along that of layers."""
    chart = HeatMap("up", tuple(range(20)), tuple(range(experts)), ((0.5,) * experts,) * 20)
    ticks = [text for text in heat_drawing(chart).texts if text.kind != "axis"]
    numbers = [int(text.words) for text in ticks if text.kind == "tick mid"]
    layers = [text.words for text in ticks if text.kind == "tick end"]
    assert numbers == list(range(0, experts, columns))
    assert layers == [f"layer {number}" for number in range(0, 20, rows)]
