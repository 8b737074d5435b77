"""The matrix in `docs/how-to/bitsandbytes-hqq-torchao.md` is what `moeq transcode --check-only` says of vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
from orphan_files import WRITERS, vectors

from moeq.errors import MoeqError
from moeq.transcode.transcode import check

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "bitsandbytes-hqq-torchao.md"
COLUMNS = ("compressed-tensors", "gptq", "gptq_v2", "fp8", "bf16", "fp16", "fp32")
ROWS = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]


def outcome(source: Path, target: str) -> str:
    try:
        return "exact" if check(source, target, workers=1).exact else "rounded"
    except MoeqError as error:
        if error.code != "usage.target":
            raise
        return "–"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS)
def test_rows(row: str, tmp_path: Path) -> None:
    method, name = row.split("`")[1].split()
    source = WRITERS[method](tmp_path / "source", vectors(method)[name])
    assert row == f"| `{method} {name}` | {' | '.join(outcome(source, target) for target in COLUMNS)} |"


def test_there_are_rows_of_every_method() -> None:
    assert {row.split("`")[1].split()[0] for row in ROWS} == set(WRITERS)
