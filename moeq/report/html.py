"""`run-check`'s report as one HTML file: no script, no network, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.foreign import in_html
from moeq.report.heat import heat_maps
from moeq.report.svg import dot_svg, heat_legend, heat_svg, tile_svg

if TYPE_CHECKING:
    from moeq.check.results import CheckReport, ProjectionResult
    from moeq.check.tile_picture import TilePicture
    from moeq.report.backend_matrix import BackendMatrix

#: Mismatches and failing experts that are listed.
MOST_LINES = 200

_WORDS = {"chosen": "chosen", "works": "works", "no": "no", "absent": "–"}

_STYLE = """
:root {
  color-scheme: light dark; --ink: #1d2330; --soft: #5d6675; --page: #ffffff; --card: #f5f6f8; --line: #dfe3e8;
  --good: #15703c; --bad: #b3261e; --goodbg: #e3f4e8; --badbg: #fbe5e3;
  --h0: #eaf1f8; --h1: #d3e4f2; --h2: #b3d1e8; --h3: #8bb8da; --h4: #5f9ac8; --h5: #3d7bb0; --h6: #275c92;
  --h7: #e8a33d; --h8: #c62828;
}
@media (prefers-color-scheme: dark) { :root {
  --ink: #e4e8ee; --soft: #9aa5b4; --page: #14181f; --card: #1c222b; --line: #313946;
  --good: #6fd08f; --bad: #ff8a80; --goodbg: #17341f; --badbg: #43201e;
  --h0: #1e2733; --h1: #223448; --h2: #284560; --h3: #2f5a7f; --h4: #3c76a6; --h5: #5596c8; --h6: #83b9e0;
  --h7: #f0b354; --h8: #ff5247;
} }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, "Segoe UI", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 28px 24px 60px; }
h1 { font-size: 22px; margin: 0 0 12px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 10px; }
h3 { font-size: 14px; margin: 16px 0 4px; color: var(--soft); font-weight: 600; }
p, dl { margin: 0 0 10px; }
.soft { color: var(--soft); }
.verdict { display: inline-block; padding: 2px 12px; border-radius: 12px; font-weight: 600; margin-right: 10px; }
.ok { color: var(--good); } .failed { color: var(--bad); }
.verdict.ok { background: var(--goodbg); } .verdict.failed { background: var(--badbg); }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 18px; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; } .row { display: flex; flex-wrap: wrap; gap: 0 36px; } .row > .scroll { max-width: 100%; }
.legend { display: flex; flex-wrap: wrap; }
td svg { display: inline; vertical-align: -1px; margin-right: 5px; } svg .chosen { fill: var(--good); }
svg .works { fill: none; stroke: var(--good); stroke-width: 2; }
svg .no { fill: var(--line); } svg .absent { fill: none; }
table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: right; padding: 4px 14px 4px 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); font-weight: 600; } td.left, th.left { text-align: left; }
td.chosen { color: var(--good); font-weight: 600; } td.no, td.absent { color: var(--soft); }
.list { background: var(--card); border-left: 3px solid var(--bad); padding: 8px 14px; margin: 0 0 12px; }
.list li { margin: 2px 0 2px 14px; }
ul { margin: 0; padding: 0 0 0 4px; } ul.rules { padding-left: 18px; }
svg { display: block; max-width: none; }
svg text { fill: var(--ink); font: 12px system-ui, "Segoe UI", sans-serif; }
svg .tick { fill: var(--soft); font-size: 11px; }
@media (max-width: 560px) {
  main { padding: 16px 12px 40px; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin: 0 0 8px; }
  h1 { font-size: 18px; } th, td { padding-right: 10px; font-size: 13px; }
}
svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
""" + "\n".join(f"svg .h{level} {{ fill: var(--h{level}); }}" for level in range(9))

_TITLES = (
    "max error",
    "mean error",
    "relative",
    "16-bit torch",
    "tolerance",
    "cosine",
    "error / bound",
    "worst expert",
)


@dataclass(frozen=True)
class Provenance:
    """When, by what and from what a report was made.

    Attributes:
        date: when.
        command: the command line.
        versions: moeq, Python, packages.
        source: name and identity of the checkpoint that was converted.
        experts: experts of every converted layer.
    """

    date: str
    command: str
    versions: str
    source: str
    experts: Mapping[int, int]


def render(
    report: CheckReport,
    matrix: BackendMatrix | None = None,
    picture: TilePicture | None = None,
    *,
    provenance: Provenance | None = None,
) -> str:
    """The page. What is None is left out."""
    sections = [
        _head(report, provenance),
        _failures(report),
        _heat(report),
        _results(report),
        _timings(report),
        _tolerances(report),
        _backends(matrix) if matrix is not None else "",
        _tile(picture) if picture is not None else "",
    ]
    title = in_html(f"moeq run-check: {report.destination}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{_STYLE}</style></head>\n'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _head(report: CheckReport, provenance: Provenance | None) -> str:
    word = "ok" if report.ok else "failed"
    passed = sum(result.passed for result in report.results)
    wrong = len(report.digest_mismatches)
    checked = report.digests_checked
    facts = {
        "reference": report.source or "the converted checkpoint's own logical values",
        "format": report.scheme,
        "layout": f"{report.layout}, for {report.backend}",
        "kernels": f"{report.device}, {report.dtype} activations, seed {report.seed}",
        "digests": f"{checked - wrong} of {checked} as recorded" if checked else "not checked",
        "products": f"{passed} of {len(report.results)} within tolerance" if report.results else "no kernel was run",
        "layers": f"{len(report.layers)} of {report.layers_in_checkpoint} run",
        **_made(report, provenance),
        "time": f"{report.seconds:.1f} s",
    }
    rows = "".join(f"<dt>{name}</dt><dd>{in_html(text)}</dd>" for name, text in facts.items())
    notes = "".join(f'<p class="soft">{in_html(note)}</p>' for note in report.notes)
    return (
        f'<h1><span class="verdict {word}">{word if report.ok else "FAILED"}</span>{in_html(report.destination)}</h1>'
        f"<dl>{rows}</dl>{notes}"
    )


def _made(report: CheckReport, provenance: Provenance | None) -> dict[str, str]:
    """How many experts of how many, and where the page comes from."""
    if provenance is None:
        return {}
    run = sum(len(layer.sample.experts) for layer in report.layers)
    return {
        "experts": f"{run} of {sum(provenance.experts.values())} run",
        "source": provenance.source,
        "made": f"{provenance.date} by {provenance.versions}",
        "command": provenance.command,
    }


def _failures(report: CheckReport) -> str:
    lines = [mismatch.text for mismatch in report.digest_mismatches]
    for result in report.results:
        lines += result.complaints
    for layer in report.layers:
        lines += [f"layer {layer.sample.layer}: {run} gave other bits the second time" for run in layer.unequal]
    if not lines:
        return ""
    more = f"<li>and {len(lines) - MOST_LINES} more</li>" if len(lines) > MOST_LINES else ""
    items = "".join(f"<li>{in_html(line)}</li>" for line in lines[:MOST_LINES])
    return f'<h2>What is wrong</h2><ul class="list">{items}{more}</ul>'


def _heat(report: CheckReport) -> str:
    charts = heat_maps(report)
    if not charts:
        return ""
    maps = "".join(
        f'<div class="scroll"><h3>{in_html(chart.projection)}</h3>{heat_svg(chart)}</div>' for chart in charts
    )
    return (
        "<h2>Error over bound, by layer and expert</h2>"
        '<p class="soft">Largest error of an element divided by what rounding explains for that element; '
        f'above 1 is a failure.</p><div class="legend">{heat_legend()}</div><div class="row">{maps}</div>'
    )


def _results(report: CheckReport) -> str:
    if not report.results:
        return ""
    head = "".join(f"<th>{title}</th>" for title in _TITLES)
    head = f'<th>layer</th><th class="left">product</th><th></th>{head}'
    rows = "".join(_result(result) for result in report.results)
    return f'<h2>Products and layers</h2><div class="scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _result(result: ProjectionResult) -> str:
    numbers = (
        f"{result.max_abs:.2e}", f"{result.mean_abs:.2e}", f"{result.relative:.2e}", f"{result.baseline:.2e}",
        f"{result.tolerance:.2e}", f"{result.cosine:.7f}", f"{result.exceedance:.3g}", str(result.worst.expert),
    )  # fmt: skip
    verdict = ("ok", "ok") if result.passed else ("failed", "FAILED")
    cells = "".join(f"<td>{number}</td>" for number in numbers)
    return (
        f'<tr><td>{result.layer}</td><td class="left">{in_html(result.name)}</td>'
        f'<td class="{verdict[0]}">{verdict[1]}</td>{cells}</tr>'
    )


def _timings(report: CheckReport) -> str:
    rows = []
    for layer in report.layers:
        for timing in layer.timings:
            floor = timing.floor_microseconds
            share = "" if floor is None else f"{100 * floor / timing.microseconds:.0f} %"
            rows.append(
                f'<tr><td>{timing.layer}</td><td class="left">{in_html(timing.run)}</td>'
                f"<td>{timing.microseconds:.1f}</td><td>{timing.gigabytes_per_second:.0f}</td><td>{timing.teraflops:.1f}</td><td>{share}</td></tr>"
            )
    if not rows:
        return ""
    head = '<th>layer</th><th class="left">run</th><th>median µs</th><th>GB/s</th><th>TFLOP/s</th><th>of the floor</th>'
    return f'<h2>Time</h2><div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _tolerances(report: CheckReport) -> str:
    if not report.derivation:
        return ""
    products = [one for one in report.results if one.name != "layer"]
    ways = dict.fromkeys(f"{one.name}: {one.arithmetic}" for one in products)
    return (
        f'<h2>Where the tolerances come from</h2><ul class="rules">{_items(report.derivation)}</ul>'
        f'<h3>Rounding that the kernels were found to use</h3><p class="soft">{in_html("; ".join(ways))}</p>'
    )


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{in_html(line)}</li>" for line in lines)


def _backends(matrix: BackendMatrix) -> str:
    head = '<th class="left">backend</th>' + "".join(f'<th class="left">TP {size}</th>' for size in matrix.sizes)
    rows = []
    for backend, cells in matrix.rows:
        columns = "".join(
            f'<td class="left {cell.state}" title="{in_html(cell.text)}">{dot_svg(cell.state)}{_WORDS[cell.state]}</td>'
            for cell in cells
        )
        rows.append(f'<tr><td class="left">{in_html(backend)}</td>{columns}</tr>')
    return (
        f'<h2>Backends by tensor-parallel size</h2><p class="soft">{in_html(matrix.title)}; hovering tells why not.</p>'
        f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'
    )


def _tile(picture: TilePicture) -> str:
    return f'<h2>Where {in_html(picture.layout)} puts a tile</h2><div class="scroll">{tile_svg(picture)}</div>'
