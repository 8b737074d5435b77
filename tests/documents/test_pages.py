"""Pages for readers: their links, paths, commands and numbers are right, and their text is short."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from moeq.cli.app import COMMANDS, build, run
from pages import generate, results
from pages.tables import DOCS, ROOT

GENERATED = (*generate.PAGES, *generate.SLOW_PAGES)
WRITTEN = sorted({path for path in DOCS.rglob("*.md") if path not in GENERATED})
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *WRITTEN]
EVERYTHING = [*PAGES, *(path for path in GENERATED if path.suffix == ".md")]

#: Matches a line that is not running text: a table, a heading, an item, code, a marker.
_NO_TEXT = re.compile(r"\||#|\s*[*\d]|    |!!!|<!--|:::")


def lines_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines outside fenced code, with their numbers."""
    fenced = False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            fenced = not fenced
        elif not fenced:
            yield number, line


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_lines_are_short(path: Path) -> None:
    assert [number for number, line in lines_of(path) if len(line) > 120 and not line.startswith("|")] == []


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_paragraphs_have_at_most_five_lines(path: Path) -> None:
    length, long = 0, []
    for number, line in lines_of(path):
        length = length + 1 if line.strip() and not _NO_TEXT.match(line) else 0
        if length == 6:
            long.append(number)
    assert long == []


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_a_page_has_at_most_1500_words(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for _, name in generate.BLOCKS:
        text = re.sub(rf"<!-- {name}:begin -->.*?<!-- {name}:end -->", "", text, flags=re.DOTALL)
    assert len(text.split()) <= 1500


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) < 120


@pytest.mark.parametrize("path", EVERYTHING, ids=named)
def test_links_lead_somewhere(path: Path) -> None:
    """Anchors too; `mkdocs build --strict` checks those of pages with API."""
    for link in re.findall(r"(?<!`)\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page, as both GitHub and Python-Markdown make them."""
    titles = [
        line.lstrip("#").strip() for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("#")
    ]
    return {re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def test_every_page_is_in_the_menu() -> None:
    menu = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert set(menu) == pages
    assert yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]


@pytest.mark.parametrize("path", PAGES, ids=named)
def test_paths_in_pages_exist(path: Path) -> None:
    """Names in capitals are placeholders."""
    text = path.read_text(encoding="utf-8")
    for found in re.findall(r"`((?:moeq|kernels|tests|docs|tools|examples)/[\w./-]+)`", text):
        assert (ROOT / found).exists() or re.search(r"/[A-Z]+\b", found), found


# ------------------------------------------------------------------------------------------------ commands


def commands_in(path: Path) -> Iterator[str]:
    """Yield every `moeq ...` command of a page: lines of code, and code within text."""
    text = path.read_text(encoding="utf-8")
    code = [line.strip() for line in text.splitlines() if re.match(r"(    |\$ )", line)]
    code += re.findall(r"`(moeq [^`\n]+)`", text)
    for line in code:
        command = line.removeprefix("$ ").partition("   ")[0].partition(" #")[0].partition(" > ")[0]
        if re.match(r"moeq [a-z]", command) and "|" not in command:
            yield command.rstrip(":,.;")


def options_of(name: str) -> set[str]:
    group: Any = typer.main.get_command(build(name))
    return {flag for param in group.commands[name].params for flag in (*param.opts, *param.secondary_opts)} | {"--help"}


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("path", PAGES, ids=named)
def test_commands_are_ones_that_moeq_takes(path: Path) -> None:
    for command in commands_in(path):
        words = shlex.split(command)
        assert words[1] in COMMANDS, command
        asked = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        assert asked <= options_of(words[1]), command


def test_commands_are_found() -> None:
    assert sum(len(list(commands_in(path))) for path in PAGES) > 80


def test_readme_shows_the_commands() -> None:
    """Commands that README does not show are one link away."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {"inspect", "oracle", "convert", "run-check", "warmup", "explain"} <= {
        command.split()[1] for command in commands_in(ROOT / "README.md")
    }
    assert "docs/reference/commands.md" in readme


def test_readme_names_what_can_be_installed() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"[{extra}]" in readme for extra in ("kernels", "transformers", "ray", "sign"))


# ------------------------------------------------------------------------------------------------ what pages claim


def test_the_journey_to_a_reason(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    command = next(one for one in commands_in(ROOT / "README.md") if "actorder" in one)
    assert run(shlex.split(command)[1:]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    shown = [
        line.strip().removeprefix("# ") for line in readme.splitlines() if re.match(r"    # (verdict|nearest)", line)
    ]
    assert len(shown) == 2
    assert all(" ".join(line.split()) in printed for line in shown)


def test_the_journey_to_a_gate(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    command = next(one for one in commands_in(ROOT / "README.md") if "--require" in one)
    assert run(shlex.split(command)[1:]) == 0


def test_load_times_in_readme_are_measured() -> None:
    """A ninth: four layers of Qwen3-30B-A3B on an H200."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = [
        row
        for _, found in results.runs()
        if str(found.get("schema", "")).startswith("moeq.startup/") and "H200" in found["device"]
        for row in found["rows"]
        if row["model"] == "qwen3-30b-a3b"
    ]
    total = {(row.get("road") or row.get("loader"), row["cold"]): row["median"]["total"] for row in rows}
    ours, engine = total["plug-in", False], total["engine", False]
    assert f"in {ours:.2f} s instead of {engine:.2f} s" in readme
    assert round(engine / ours) == 9
    assert f"{total['plug-in', True] / total['engine', True]:.1f} x from a disk" in readme


def test_the_example_of_a_refusal_is_what_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    source = "tests/data/checkpoints/gptq-int4-g32-actorder-qwen3moe"
    assert run(["oracle", source, "--gpu", "H100"]) == 1
    printed = capsys.readouterr().out.replace(source, "SRC")
    page = (DOCS / "how-to" / "debug-a-refusal.md").read_text(encoding="utf-8")
    shown = page.partition("```console\n")[2].partition("```")[0].splitlines()
    assert all(" ".join(line.split()) in " ".join(printed.split()) for line in shown)


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "site" / "search" / "search_index.json").stat().st_size > 10_000
    assert "fused_moe" in (tmp_path / "site" / "reference" / "python" / "index.html").read_text(encoding="utf-8")
