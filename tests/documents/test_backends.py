"""`docs/reference/backends.md` is what the registries say. MOEQ_UPDATE_DOCS=1 rewrites it."""

from __future__ import annotations

import os
from pathlib import Path

from oracle.examples import checkpoints

from pages.backends import DEVICES, backends_page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "backends.md"


def test_backends_page_is_up_to_date() -> None:
    page = backends_page(checkpoints())
    if os.environ.get("MOEQ_UPDATE_DOCS"):
        PAGE.write_text(page, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page, "run: MOEQ_UPDATE_DOCS=1 pytest tests/documents/test_backends.py"


def test_page_has_ten_checkpoints_and_all_devices() -> None:
    page = backends_page(checkpoints())
    assert len(checkpoints()) == 10
    assert all(f"`{example.name}`" in page for example in checkpoints())
    assert all(title in page for title, _, _ in DEVICES)
