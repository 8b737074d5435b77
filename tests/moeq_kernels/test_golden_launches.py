"""Plans, launches and workspaces of many layers are those that were measured (`support.golden_launches`)."""

from __future__ import annotations

import json

import pytest
from support.golden_launches import FILE, PARTS


@pytest.mark.parametrize("part", PARTS)
def test_what_runs_is_what_was_measured(part: str) -> None:
    kept, found = json.loads(FILE.read_text())[part], PARTS[part]()
    assert list(found) == list(kept)
    for name, row in found.items():
        times = row.pop("times", [])
        assert times == pytest.approx(kept[name].pop("times", []), rel=1e-8), name
        assert row == kept[name], name
