"""Each promise of docs/explanation/threat-model.md names a test that there is."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_promises_name_tests() -> None:
    text = (ROOT / "docs" / "explanation" / "threat-model.md").read_text()
    promises = [line for line in text.splitlines() if line.startswith("|") and " | `test_" in line]
    assert len(promises) >= 15
    for line in promises:
        home = ""
        for named in re.findall(r"`([^`]*)`", line.rpartition(" | ")[2]):
            if named.startswith("make "):
                assert f"\n{named.removeprefix('make ')}:" in (ROOT / "Makefile").read_text()
                continue
            file, _, test = named.partition("::")
            home = file or home
            source = (ROOT / "tests" / "attacks" / home).read_text()
            assert not test or re.search(rf"(def|class) {test}\b", source), named


def test_security_points_there() -> None:
    assert "docs/explanation/threat-model.md" in (ROOT / "SECURITY.md").read_text()
