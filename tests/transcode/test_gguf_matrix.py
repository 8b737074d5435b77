"""The matrix of GGUF types and targets in `docs/how-to/gguf.md` is what `moeq transcode --check-only` says."""

from __future__ import annotations

from pathlib import Path

import pytest
from gguf_files import write_model

from moeq.errors import MoeqError
from moeq.schemes.gguf_blocks import CODED, FLOATS
from moeq.transcode.target_formats import TARGETS
from moeq.transcode.transcode import check

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "gguf.md"

#: Targets of the matrix; the others take no GGUF, or the same types as one of these.
COLUMNS = ("compressed-tensors", "gptq", "nvfp4", "fp8", "bf16", "fp16", "fp32")


def outcome(source: Path, target: str) -> str:
    """Say what becomes of random blocks: the experts alone are looked at."""
    try:
        found = check(source, target, workers=1)
    except MoeqError as error:
        if error.code not in ("usage.target", "usage.names"):
            raise
        return "–"
    losses = [loss for loss in found.losses if ".experts." in loss.module]
    return "exact" if not losses else "rounded"


def row(kind: str, folder: Path) -> str:
    source = write_model(folder / "m.gguf", layers=1, experts=1, expert_type=kind, other_type="f32")
    return f"| `{kind}` | {' | '.join(outcome(source, target) for target in COLUMNS)} |"


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*CODED, *FLOATS])
def test_rows(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    assert row(kind, tmp_path) in PAGE.read_text().splitlines()


def test_every_type_has_a_row() -> None:
    lines = PAGE.read_text().splitlines()
    assert [line.split("`")[1] for line in lines if line.startswith("| `")] == [*CODED, *FLOATS]
    assert set(COLUMNS) < TARGETS.keys()
