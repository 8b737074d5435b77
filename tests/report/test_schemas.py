"""Schemas of JSON documents: one per command, valid, and the documents fit them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from moeq.cli.app import COMMANDS, run
from moeq.errors import MoeqError
from moeq.report.schemas import load_schema, schema_names

INT4 = "gptq-int4-g32-qwen3moe"


def test_every_command_has_a_schema() -> None:
    assert set(schema_names()) == set(COMMANDS)
    for name in COMMANDS:
        assert load_schema(name)["title"] == f"moeq.{name}/1"


@pytest.mark.parametrize("name", schema_names())
def test_schemas_are_schemas(name: str) -> None:
    Draft202012Validator.check_schema(load_schema(name))


def answer(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    run([*map(str, argv), "--json"])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    Draft202012Validator(load_schema(str(argv[0]))).validate(document)
    return document


def test_documents_fit(checkpoints, tmp_path, capsys) -> None:
    source, out = checkpoints / INT4, tmp_path / "out"
    assert answer(capsys, "inspect", source, "--gpu", "H100", "--tp", "2")["ok"]
    assert answer(capsys, "oracle", source, "--gpu", "H100,A100", "--tp", "1,16")["ok"]
    assert not answer(capsys, "oracle", source, "--gpu", "H100", "--tp", "16")["ok"]
    assert not answer(capsys, "plan", source, "--gpu", "H100", "--tp", "16")["ok"]
    assert answer(capsys, "convert", source, out, "--gpu", "A100", "--quiet")["ok"]
    for command in ("inspect", "doctor", "verify"):
        assert answer(capsys, command, out)["ok"]
    assert answer(capsys, "doctor", source, "--gpu", "A100")["ok"]
    assert not answer(capsys, "doctor", tmp_path / "nowhere")["ok"]
    for argv in (("gpus",), ("backends",), ("explain",), ("schema",), ("schema", "inspect"), ("doctor",)):
        assert answer(capsys, *argv)["ok"]


def test_a_field_of_another_type_is_found() -> None:
    schema = load_schema("gpus")
    wrong = {"schema": "moeq.gpus/1", "ok": True, "gpus": "H100", "found_here": None}
    assert not Draft202012Validator(schema).is_valid(wrong)


def test_an_unknown_document() -> None:
    with pytest.raises(MoeqError, match="no document is called 'nothing'") as caught:
        load_schema("nothing")
    assert caught.value.exit_code == 2
