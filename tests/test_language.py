"""Docstrings are whole sentences that are understood without their neighbours; ruff's D rules see to their form."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: Openings that leave out their noun, or that need the line above.
OPENING = re.compile(
    r"(Of|That of|Those of|As (of|an?|the)|The same for|Such|It|This|Nothing|All but)\b", re.IGNORECASE
)
#: `name: text`, a line of an `Args:` or `Attributes:` block, and the text of a comment `#: text`, which stands above or
#: beside a name.
DESCRIBED = re.compile(r"^\s+\*{0,2}\w+(?:, \*{0,2}\w+)*(?: \([^)]*\))?: (?P<text>\S.*)")
COMMENT = re.compile(r"^\s*#: (?P<text>\S.*)")
BESIDE = re.compile(r"^\s*\w+: .*\S  #: (?P<text>\S.*)")
SECTION = re.compile(r"^\s*(Args|Attributes|Returns|Yields|Raises):\s*$")


def sources() -> list[Path]:
    return sorted([*(ROOT / "moeq").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")])


def faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) of each docstring or attribute line that opens without its noun, or is no docstring."""
    for line, docstring in docstrings(ast.parse(text)):
        yield from docstring_faults(line, docstring)
    previous = ""
    for line, words in enumerate(text.splitlines(), 1):
        comment = COMMENT.match(words) or BESIDE.match(words)
        if comment and not COMMENT.match(previous) and OPENING.match(comment["text"]):
            yield line, comment["text"]
        previous = words


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, text) of the docstrings of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not isinstance(
            node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        ):
            continue
        for before, statement in zip([None, *body], body, strict=False):
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str) and (before is None or isinstance(before, ast.Assign | ast.AnnAssign)):
                    yield statement.lineno, text


def docstring_faults(line: int, docstring: str) -> Iterator[tuple[int, str]]:
    lines = docstring.splitlines()
    first = next((words.strip() for words in lines if words.strip()), "")
    if OPENING.match(first):
        yield line, first
    if "See the module." in docstring:
        yield line, "See the module."
    inside = False
    for number, words in enumerate(lines):
        described = DESCRIBED.match(words)
        inside = bool(SECTION.match(words)) or (inside and (not words.strip() or words.startswith(" ")))
        if inside and described and OPENING.match(described["text"]):
            yield line + number, words.strip()


@pytest.mark.slow
def test_no_docstring_opens_without_its_noun() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in sources()
        for line, sentence in faults(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    "text",
    [
        '"""Of a tile."""',
        'def f():\n    """As of a quantised one."""',
        'class Tile:\n    """See the module."""',
        'class Tile:\n    """A tile.\n\n    Attributes:\n        tokens: of a tile at most (32 or 64)\n    """',
        'def f(dtype):\n    """Do it.\n\n    Args:\n        dtype (str): As a scale of of `g`.\n    """',
        'class Tile:\n    tokens: int\n    """Those of a whole tile."""',
        "#: Nothing larger fits.\nLIMIT = 3",
        "class Tile:\n    tokens: int = 8  #: of a tile at most (32 or 64)",
    ],
)
def test_openings_are_found(text: str) -> None:
    assert len([*faults(text)]) == 1


@pytest.mark.parametrize(
    "text",
    [
        '"""Items of a list."""',
        'class Tile:\n    """Rows and columns.\n\n    Attributes:\n        tokens: token rows per tile\n    """',
        'def f():\n    """Return the offset.\n\n    Whatever comes next: of no interest here.\n    """',
        "#: The limit of a file,\n#: of which there are many.\nLIMIT = 3",
        "class Tile:\n    tokens: int = 8  #: token rows per tile",
    ],
)
def test_other_openings_are_not(text: str) -> None:
    assert [*faults(text)] == []


@pytest.mark.parametrize("package", ["moeq", "moeq_kernels"])
def test_public_modules_follow_the_google_convention(package: str) -> None:
    face = import_module(package)
    modules = {package, *(target.partition(":")[0] for target in face._PUBLIC.values())}
    found = [Path(str(spec.origin)) for spec in map(find_spec, sorted(modules)) if spec]
    assert len(found) == len(modules)
    files = [str(path) for path in found]
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=D", "--ignore=D105,D107"]
    convention = ["--config", 'lint.pydocstyle.convention = "google"', "--output-format=concise"]
    result = subprocess.run([*command, *convention, *files], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
