"""Regenerate every generated page and block: `python tools/pages/generate.py`.

python tools/pages/generate.py              # all of them; about two minutes, mostly README's demo and the matrix
python tools/pages/generate.py --quick      # all but those that run commands
python tools/pages/generate.py --check      # writes nothing; exit code 1 where a page is not up to date
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

if __name__ == "__main__":
    HERE = Path(__file__).parents[2]
    sys.path[:0] = [str(HERE / name) for name in ("tools", "tests", "kernels", ".")]

from pages import demo, documents, errors, import_graph, results, support, terminal, transcode_matrix, update_matrix
from pages.backends import backends_page
from pages.commands import commands_page
from pages.python_api import python_page
from pages.tables import DOCS, ROOT, replace_block
from pages.vllm_models import models_page

README = ROOT / "README.md"
REFERENCE = DOCS / "reference"

#: Columns of README's table of served models: numbers of users, and prompt tokens a second.
COLUMNS = ("c = 1", "c = 8", "c = 32", "c = 128", "prefill")


def _backends() -> str:
    from oracle.examples import checkpoints

    return backends_page(checkpoints())


def _accuracy() -> str:
    from oracle.differential import agree

    return agree.page(agree.load())


#: Whole pages by what makes them.
PAGES: Mapping[Path, Callable[[], str]] = {
    REFERENCE / "commands.md": commands_page,
    REFERENCE / "python.md": python_page,
    REFERENCE / "formats.md": support.formats_page,
    REFERENCE / "layouts.md": support.layouts_page,
    REFERENCE / "backends.md": _backends,
    REFERENCE / "documents.md": documents.documents_page,
    REFERENCE / "errors.md": errors.errors_page,
    REFERENCE / "oracle-accuracy.md": _accuracy,
    REFERENCE / "update-matrix.md": update_matrix.matrix_page,
    REFERENCE / "tested.md": results.tested_page,
    REFERENCE / "vllm-models.md": models_page,
    DOCS / "explanation" / "architecture.svg": lambda: import_graph.draw(import_graph.area_graph()),
}

#: Blocks between markers in pages that are written by hand.
BLOCKS: Mapping[tuple[Path, str], Callable[[], str]] = {
    (README, "support"): support.summary,
    (README, "serving"): lambda: results.serving(("c = 1", "c = 32", "c = 128", "prefill"), brief=True),
    (README, "kernels"): lambda: results.kernels(("int4", "mxfp4", "w8a8"), brief=True),
    (DOCS / "explanation" / "oracle.md", "rank"): results.ranking_errors,
    (DOCS / "how-to" / "sglang.md", "models"): support.sglang_models,
    (REFERENCE / "performance.md", "serving"): lambda: results.serving(COLUMNS),
    (REFERENCE / "performance.md", "steps"): results.steps,
    (REFERENCE / "performance.md", "kernels"): results.kernels,
    (REFERENCE / "performance.md", "loading"): results.loading,
    (REFERENCE / "performance.md", "starting"): results.starting,
    (REFERENCE / "performance.md", "converting"): results.converting,
}

#: What runs commands or transcodes every test checkpoint, and takes a minute each.
SLOW_PAGES: Mapping[Path, Callable[[], str]] = {
    REFERENCE / "transcode-matrix.md": transcode_matrix.matrix_page,
    DOCS / "terminal.svg": terminal.recording,
}
SLOW_BLOCKS: Mapping[tuple[Path, str], Callable[[], str]] = {(README, "demo"): demo.transcript}


def generate(
    pages: Mapping[Path, Callable[[], str]], blocks: Mapping[tuple[Path, str], Callable[[], str]]
) -> dict[Path, str]:
    """Return what the pages should hold, by their paths."""
    found = {path: make() for path, make in pages.items()}
    for (path, name), make in blocks.items():
        before = found.get(path) or path.read_text(encoding="utf-8")
        found[path] = replace_block(before, name, make(), "\n" if path == README else "\n\n")
    return found


def main() -> int:
    """Write the pages, or say which are not up to date."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="leave out what runs commands")
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    pages = dict(PAGES) if options.quick else {**PAGES, **SLOW_PAGES}
    blocks = dict(BLOCKS) if options.quick else {**BLOCKS, **SLOW_BLOCKS}
    stale = {
        path: text
        for path, text in generate(pages, blocks).items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    }
    for path, text in stale.items():
        sys.stdout.write(f"{'not up to date' if options.check else 'wrote'}: {path.relative_to(ROOT)}\n")
        if not options.check:
            path.write_text(text, encoding="utf-8")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
