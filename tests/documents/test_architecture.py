"""docs/explanation/architecture.md and its picture say what the code is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from pages import import_graph as graph

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def areas() -> dict[str, set[str]]:
    return graph.area_graph()


def test_no_module_imports_itself_by_way_of_others() -> None:
    """Inside functions and for type checkers neither: whoever reads one module need not know the other."""
    assert graph.circles(graph.module_graph(typing=True)) == []


def test_circles_are_found() -> None:
    assert graph.circles({"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set()}) == [["a", "b", "c"]]
    with pytest.raises(ValueError, match="circular"):
        graph.levels({"a": {"b"}, "b": {"a"}})


@pytest.mark.slow
def test_the_picture_is_up_to_date(areas: dict[str, set[str]]) -> None:
    drawn = graph.draw(areas)
    assert graph.PICTURE.read_text(encoding="utf-8") == drawn, "run: python tools/pages/import_graph.py"


def test_an_arrow_that_follows_from_others_is_left_out() -> None:
    assert graph.reduced({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {"a": {"b"}, "b": {"c"}, "c": set()}


def test_every_folder_has_a_line(areas: dict[str, set[str]]) -> None:
    table = PAGE.partition("## Folders")[2].partition("##")[0]
    for box in areas:
        folder = box if box == "moeq_kernels" else f"moeq/{box}"
        assert re.search(rf"`(kernels/)?{folder}(\.py)?`", table), (
            f"{folder} has no line in docs/explanation/architecture.md"
        )


def test_every_path_on_the_page_exists() -> None:
    paths = re.findall(r"`((?:moeq|kernels|tests|docs)/[\w./-]+)`", PAGE)
    assert len(paths) > 40
    assert [path for path in paths if not (ROOT / path).exists()] == []
    short = re.findall(r"`((?:pipeline|oracle|check|load|deploy|schemes)/[\w./-]+)`", PAGE)
    assert len(short) > 10
    assert [path for path in short if not (ROOT / "moeq" / path).exists()] == []


#: Classes whose name engines look for.
_NAMED_BY_ENGINES = {"MoeqConfig", "MoeqMoEMethod"}


def test_a_class_name_means_one_thing() -> None:
    """Private names are a module's own affair."""
    homes: dict[str, list[str]] = {}
    for path in sorted((ROOT / "moeq").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(str(path.relative_to(ROOT)))
    twice = {name: found for name, found in homes.items() if len(found) > 1 and name not in _NAMED_BY_ENGINES}
    assert twice == {}
