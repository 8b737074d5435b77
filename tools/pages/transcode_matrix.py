"""Write the table of targets: every small checkpoint to every target, by `moeq transcode --check-only`.

It takes about a minute. Sources of which tests/data has no checkpoint are transcoded from another one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from moeq.errors import MoeqError
from moeq.transcode.target_formats import ENGINE_TARGETS
from moeq.transcode.transcode import check, transcode
from pages.tables import DOCS, NOTE, ROOT

PAGE = DOCS / "reference" / "transcode-matrix.md"
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"

#: Sources that are made here: name, from which checkpoint, to which target.
MADE = (
    ("fp8 blocks of MXFP4", "ct-mxfp4-qwen3moe", "fp8"),
    ("NVFP4 of ModelOpt", "ct-mxfp4-qwen3moe", "nvfp4"),
    ("NVFP4 of compressed-tensors", "ct-mxfp4-qwen3moe", "nvfp4-compressed-tensors"),
)

#: How cells say why something is refused.
REASONS = {"usage.target": "–", "usage.act-order": "order", "answer.zero-points": "zeros"}


def rows(folder: Path) -> Iterator[str]:
    """Yield the lines of the table. `folder` is for sources that are made."""
    yield "| from | " + " | ".join(f"`{target}`" for target in ENGINE_TARGETS) + " |"
    yield "| --- |" + " --- |" * len(ENGINE_TARGETS)
    for path in sorted(path for path in CHECKPOINTS.iterdir() if path.is_dir()):
        yield row(f"`{path.name}`", path)
    for name, source, target in MADE:
        transcode(CHECKPOINTS / source, folder / name, target)
        yield row(name, folder / name)


def row(title: str, source: Path) -> str:
    """Return one source to every target."""
    return f"| {title} | " + " | ".join(cell(source, target) for target in ENGINE_TARGETS) + " |"


def cell(source: Path, target: str) -> str:
    """Return `exact`, or how many blocks are not with the largest relative change, or why it is refused."""
    try:
        found = check(source, target)
    except MoeqError as error:
        return REASONS[error.code]
    if found.exact:
        return "exact"
    blocks, worst = sum(loss.blocks for loss in found.losses), max(loss.relative for loss in found.losses)
    return f"{blocks:,} blocks, {worst:.1e}"


def matrix_page() -> str:
    """Return docs/reference/transcode-matrix.md."""
    intro = (
        "What `moeq transcode SRC --to TARGET --check-only` says of every checkpoint of the tests. `N blocks, x`: so\n"
        "many blocks are not exact, and x is the largest change of a projection relative to its norm; writing them\n"
        "takes `--allow-lossy`. `–`: the target does not store such weights. `order`: columns in activation order.\n"
        "`zeros`: zero points of 0."
    )
    with tempfile.TemporaryDirectory() as folder:
        lines = "\n".join(rows(Path(folder)))
    return "\n\n".join(["# Every checkpoint to every target", NOTE, intro, lines]) + "\n"
