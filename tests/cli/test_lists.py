"""Commands that list what moeq knows: their text has what their document has."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from moeq.cli import app, backends, explanations
from moeq.cli.app import run


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
