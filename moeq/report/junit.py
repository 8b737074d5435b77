"""`run-check`'s report as JUnit XML, which CI systems show as tests."""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

from moeq.foreign import in_xml

if TYPE_CHECKING:
    from collections.abc import Iterable

    from moeq.check.results import CheckReport

#: Class name, name, and the reason of a failure or None.
_Case = tuple[str, str, str | None]


def render(report: CheckReport) -> str:
    """Write the XML document: a suite for digests, one for products and layers, one for repeated runs."""
    root = ET.Element("testsuites", name="moeq run-check", time=f"{report.seconds:.3f}")
    for name, cases in (("digests", _digests(report)), ("kernels", _kernels(report)), ("repeats", _repeats(report))):
        _suite(root, name, list(cases))
    for attribute in ("tests", "failures"):
        root.set(attribute, str(sum(int(suite.get(attribute, "0")) for suite in root)))
    ET.indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _suite(root: ET.Element, name: str, cases: list[_Case]) -> None:
    failures = sum(why is not None for _, _, why in cases)
    suite = ET.SubElement(root, "testsuite", name=name, tests=str(len(cases)), failures=str(failures), errors="0")
    for classname, title, why in cases:
        case = ET.SubElement(suite, "testcase", classname=f"moeq.{name}.{classname}", name=in_xml(title))
        if why is not None:
            ET.SubElement(case, "failure", message=in_xml(why.splitlines()[0])).text = in_xml(why)


def _digests(report: CheckReport) -> Iterable[_Case]:
    if not report.digests_checked:
        return
    complaints: dict[int, list[str]] = {}
    for mismatch in report.digest_mismatches:
        complaints.setdefault(mismatch.layer, []).append(mismatch.text)
    yield (
        "all",
        f"{report.digests_checked} projections",
        None if not complaints else f"{len(report.digest_mismatches)} differ",
    )
    for layer, texts in complaints.items():
        yield f"layer{layer}", "logical digests", "\n".join(texts)


def _kernels(report: CheckReport) -> Iterable[_Case]:
    for result in report.results:
        head = f"relative error {result.relative:.3g}, tolerance {result.tolerance:.3g}"
        why = None if result.passed else "\n".join([head, *result.complaints])
        yield f"layer{result.layer}", result.name, why


def _repeats(report: CheckReport) -> Iterable[_Case]:
    for layer in report.layers:
        why = f"other bits the second time: {', '.join(layer.unequal)}" if layer.unequal else None
        yield f"layer{layer.sample.layer}", f"{layer.repeated} runs repeated", why
