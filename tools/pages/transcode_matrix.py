"""Write the table of targets: every small checkpoint to every target, by `moeq transcode --check-only`.

It takes about a minute. Sources of which tests/data has no checkpoint are transcoded from another one.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from moeq.errors import MoeqError
from moeq.transcode.target_formats import TARGETS
from moeq.transcode.transcode import check, transcode

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "how-to" / "transcode.md"
CHECKPOINTS = ROOT / "tests" / "data" / "checkpoints"
BEGIN, END = "<!-- matrix: python tools/pages/transcode_matrix.py -->\n", "<!-- end of matrix -->"

#: Sources that are made here: name, from which checkpoint, to which target.
MADE = (
    ("fp8 blocks of MXFP4", "ct-mxfp4-qwen3moe", "fp8"),
    ("NVFP4 of ModelOpt", "ct-mxfp4-qwen3moe", "nvfp4"),
    ("NVFP4 of compressed-tensors", "ct-mxfp4-qwen3moe", "nvfp4-compressed-tensors"),
)

#: How cells say why something is refused.
REASONS = {"usage.target": "–", "usage.act-order": "order", "answer.zero-points": "zeros"}


def rows(folder: Path) -> Iterator[str]:
    """Lines of the table. `folder` is for sources that are made."""
    yield "| from | " + " | ".join(f"`{target}`" for target in TARGETS) + " |"
    yield "| --- |" + " --- |" * len(TARGETS)
    for path in sorted(path for path in CHECKPOINTS.iterdir() if path.is_dir()):
        yield row(f"`{path.name}`", path)
    for name, source, target in MADE:
        transcode(CHECKPOINTS / source, folder / name, target)
        yield row(name, folder / name)


def row(title: str, source: Path) -> str:
    """One source to every target."""
    return f"| {title} | " + " | ".join(cell(source, target) for target in TARGETS) + " |"


def cell(source: Path, target: str) -> str:
    """`exact`; how many blocks are not, and the largest relative change of a projection; or why it is refused."""
    try:
        found = check(source, target)
    except MoeqError as error:
        return REASONS[error.code]
    if found.exact:
        return "exact"
    blocks, worst = sum(loss.blocks for loss in found.losses), max(loss.relative for loss in found.losses)
    return f"{blocks:,} blocks, {worst:.1e}"


def page(text: str, table: str) -> str:
    """The page with this table in its place."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + table + END + rest.split(END)[1]


def main() -> int:
    """Write the page."""
    with tempfile.TemporaryDirectory() as folder:
        table = "".join(f"{line}\n" for line in rows(Path(folder)))
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), table), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
