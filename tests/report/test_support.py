"""The README's support tables say what the registries say."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq.layouts.registry import LAYOUTS
from moeq.report.support import replace_tables, support_tables
from moeq.schemes.registry import FORMATS

README = Path(__file__).parents[2] / "README.md"


def test_the_readme_is_up_to_date() -> None:
    text = README.read_text(encoding="utf-8")
    assert text == replace_tables(text), "run: python -m moeq.report.support --write README.md"


def test_every_format_and_layout_has_a_row() -> None:
    tables = support_tables()
    for name in (*FORMATS, *LAYOUTS):
        assert f"| `{name}` |" in tables


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="support:begin"):
        replace_tables("nothing here")
