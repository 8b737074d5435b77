"""Commands that list what moeq knows: their text has what their document has."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from load.deployments import convert
from rich.console import Console

import moeq
from moeq.cli import app, backends, explanations, push, run_check
from moeq.cli.app import run
from moeq.errors import MoeqError
from moeq.report import publishing
from moeq.report.inspect_text import checkpoint_facts


@pytest.fixture
def said(capsys) -> Any:
    """Run a command and return what it prints."""

    def output(*argv: str) -> str:
        capsys.readouterr()
        assert run(list(argv)) == 0
        return capsys.readouterr().out

    return output


def test_every_backend_has_a_line_with_all_that_its_row_has(said) -> None:
    rows = json.loads(said("backends", "--json"))["backends"]
    console = Console(file=io.StringIO(), width=2000, highlight=False)
    backends._render(console, rows)
    head, *lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert head.split() == ["family", "backend", "flag", "device", "limits", "layout"]
    assert len(lines) == len(rows)
    last = None
    for line, row in zip(lines, rows, strict=True):
        first = [row["family"]] if row["family"] != last else []
        last = row["family"]
        assert line.split()[: len(first) + 1] == [*first, row["backend"]]
        assert " | ".join(row["devices"]) in line
        assert (row["flag"] or "") in line
        assert "; ".join(row["limits"]) in line
        assert line.rstrip().endswith(", ".join(row["layouts"]) or f"none: {row['no_layout']}")


def test_schemas_are_listed_and_printed(said) -> None:
    rows = json.loads(said("schema", "--json"))["documents"]
    assert [line.split(maxsplit=1) for line in said("schema").splitlines()] == [
        [row["command"], row["schema"]] for row in rows
    ]
    for row in rows[:2]:
        schema = json.loads(said("schema", row["command"]))
        assert schema["title"] == row["schema"]
        assert json.loads(said("schema", row["command"], "--json"))["json_schema"] == schema


def test_a_refusal_of_the_parser_without_a_command() -> None:
    assert app._usage(ValueError()) == "see `moeq COMMAND --help`"


def test_values_are_said_once_in_their_order() -> None:
    assert explanations._distinct(["b", "a", "b"]) == ["b", "a"]


@pytest.mark.parametrize("options", [(), ("--quiet",), ("--json",)])
def test_progress_of_a_push_is_for_people(options, checkpoints: Path, tmp_path: Path, monkeypatch) -> None:
    """The folder is real; nothing is sent."""
    folder = convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out")
    asked: list[bool] = []

    def push_conversion(*given: Any, quiet: bool) -> None:
        asked.append(quiet)
        raise MoeqError("usage.push-name", "nothing is sent")

    monkeypatch.setattr(publishing, "open_push", lambda *given, **named: None)
    monkeypatch.setattr(push, "push_conversion", push_conversion)
    assert run(["push", str(folder), "org/name", *options]) == 2
    assert asked == [bool(options)]


def test_inspect_prints_every_fact(said, checkpoints: Path) -> None:
    source = checkpoints / "ct-w8a8-qwen3moe"
    printed = "".join(said("inspect", str(source), "--gpu", "A100", "--verbose").split())
    for label, text in checkpoint_facts(moeq.open(source).info, True):
        assert "".join(f"{label}{text}".split()) in printed, label


def test_pages_of_a_check_have_a_picture_of_the_layout(checkpoints: Path, tmp_path: Path) -> None:
    folder = convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out")
    matrix, picture = run_check._illustrations(str(folder))
    assert matrix is not None
    assert picture is not None
    assert picture.layout == "marlin-wna16/1"
