"""The generated documents say what the registries say."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq.layouts.registry import LAYOUTS
from moeq.schemes.registry import FORMATS
from pages.support import documents, formats_page, layouts_page, replace_summary, summary

ROOT = Path(__file__).parents[2]
PAGES = documents(ROOT)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_documents_are_up_to_date(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "run: python tools/pages/support.py --write"


def test_every_format_and_layout_is_named() -> None:
    for name in FORMATS:
        assert f"| `{name}` |" in formats_page()
        assert f"`{name}`" in summary() or name in ("unquantized", "foreign")
    for name in LAYOUTS:
        assert f"| `{name}` |" in layouts_page()
        assert f"`{name.partition('/')[0]}`" in summary()


def test_a_text_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="support:begin"):
        replace_summary("nothing here")
