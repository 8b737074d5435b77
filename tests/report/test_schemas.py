"""Schemas of JSON documents: one per command, valid, and the documents fit them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pipeline.mixing import Tensors, rewritten, with_plain_layer

from moeq.cli.app import COMMANDS, run
from moeq.errors import MoeqError
from moeq.report.schemas import load_schema, schema_names

INT4 = "gptq-int4-g32-qwen3moe"


def test_every_command_has_a_schema() -> None:
    assert set(schema_names()) == set(COMMANDS)
    for name in COMMANDS:
        assert load_schema(name)["title"] == f"moeq.{name}/1"


@pytest.mark.cover(every=4)
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
    assert answer(capsys, "oracle", source, "--gpu", "H100", "--rank")["rankings"][0]["reason"]
    assert not answer(capsys, "oracle", source, "--gpu", "H100", "--tp", "16")["ok"]
    assert not answer(capsys, "plan", source, "--gpu", "H100", "--tp", "16")["ok"]
    assert answer(capsys, "convert", source, out, "--gpu", "A100", "--quiet")["ok"]
    for command in ("inspect", "doctor", "verify"):
        assert answer(capsys, command, out)["ok"]
    assert answer(capsys, "doctor", source, "--gpu", "A100")["ok"]
    assert not answer(capsys, "doctor", tmp_path / "nowhere")["ok"]
    for argv in (("gpus",), ("backends",), ("explain",), ("schema",), ("schema", "inspect"), ("doctor",)):
        assert answer(capsys, *argv)["ok"]


def test_differences_that_are_no_numbers_fit(checkpoints, tmp_path, capsys) -> None:
    """Infinite where shapes differ, where a number became infinite, and where it became none; JSON has neither."""
    found = answer(capsys, "diff", checkpoints / "ct-fp8-block-qwen3moe", checkpoints / "mxfp4-gptoss")
    assert {row["max_abs"] for row in found["differing"]} == {"inf"}
    assert {row["first"] for row in found["differing"]} == {None}

    source = rewritten(checkpoints / INT4, tmp_path / "plain", with_plain_layer(1))
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    for value in ("inf", "-inf", "nan"):
        other = rewritten(source, tmp_path / value, lambda tensors, value=value: with_number(tensors, name, value))
        for left, right in ((source, other), (other, source)):
            found = answer(capsys, "diff", left, right, "--experts-only")
            (row,) = found["differing"]
            assert (row["max_abs"], row["relative"]) == ("inf", "inf")
            assert row["first"]["left" if left == other else "right"] == value


def with_number(tensors: Tensors, name: str, value: str) -> Tensors:
    """Another number in a tensor."""
    changed = tensors[name].clone()
    changed[7, 3] = float(value)
    return tensors | {name: changed}


def test_a_field_of_another_type_is_found() -> None:
    schema = load_schema("gpus")
    wrong = {"schema": "moeq.gpus/1", "ok": True, "gpus": "H100", "found_here": None}
    assert not Draft202012Validator(schema).is_valid(wrong)


def test_an_unknown_document() -> None:
    with pytest.raises(MoeqError, match="no document is called 'nothing'") as caught:
        load_schema("nothing")
    assert caught.value.exit_code == 2
