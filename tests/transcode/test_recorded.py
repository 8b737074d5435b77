"""What is written today is what the real libraries have read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transcode.record import NAMES, RECORD, digests


@pytest.mark.cover(every=9)
@pytest.mark.parametrize("name", NAMES)
def test_bytes_have_been_in_the_libraries_hands(tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()
    recorded = json.loads(RECORD.read_text())["digests"]
    expected = {key: value for key, value in recorded.items() if key.startswith(f"{name} -> ")}
    assert expected
    found = digests([name], tmp_path)
    assert found == expected, "read by no library yet: run python tests/transcode/record.py where all are installed"
