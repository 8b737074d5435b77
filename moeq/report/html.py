"""`run-check`'s report as one HTML file: no script, no network, light or dark as the reader's system is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeq.foreign import in_html
from moeq.report.drawings import heat_drawing, heat_legend, tile_drawing
from moeq.report.heat import LIMITS, heat_maps

if TYPE_CHECKING:
    from jinja2 import Template

    from moeq.check.results import CheckReport
    from moeq.check.tile_picture import TilePicture
    from moeq.report.backend_matrix import BackendMatrix

#: Upper bound of listed mismatches and failing experts.
MOST_LINES = 200


@dataclass(frozen=True)
class Provenance:
    """When, by what and from what a report was made.

    Attributes:
        date: day and time in UTC.
        command: the command line.
        versions: moeq, Python, packages.
        source: name and identity of the checkpoint that was converted.
        experts: number of experts of every converted layer.
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
    """Render the page, without the sections whose argument is None."""
    products = [one for one in report.results if one.name != "layer"]
    charts = heat_maps(report)
    return template("run_check.html").render(
        report=report,
        facts=_facts(report, provenance),
        failures=_failures(report),
        most_lines=MOST_LINES,
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
        lines += [f"layer {layer.sample.layer}: {run} gave other bits the second time" for run in layer.unequal]
    return lines


def _facts(report: CheckReport, provenance: Provenance | None) -> dict[str, str]:
    passed = sum(result.passed for result in report.results)
    wrong = len(report.digest_mismatches)
    checked = report.digests_checked
    return {
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


def _made(report: CheckReport, provenance: Provenance | None) -> dict[str, str]:
    """Say how many experts of how many were run, and where the page comes from."""
    if provenance is None:
        return {}
    run = sum(len(layer.sample.experts) for layer in report.layers)
    return {
        "experts": f"{run} of {sum(provenance.experts.values())} run",
        "source": provenance.source,
        "made": f"{provenance.date} by {provenance.versions}",
        "command": provenance.command,
    }
