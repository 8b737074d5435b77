"""Every decision vector, reproduced by the `vllm@0.33.0` policy."""

from __future__ import annotations

from typing import Any

import pytest
from oracle.rows import compare, load, outcome_of

DATA = load()
EXECUTED = [row for row in DATA["vectors"] if row["entry"].startswith(("hf:", "oracle:"))]


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("row", EXECUTED, ids=[row["id"] for row in EXECUTED])
def test_row_is_reproduced(row: dict[str, Any]) -> None:
    assert compare(row, outcome_of(row, DATA["platforms"])) == []
