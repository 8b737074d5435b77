"""`moeq selftest` as users call it."""

from __future__ import annotations

import json

import pytest

import moeq
from moeq.check.synthetic import RECIPES
from moeq.cli.app import run
from moeq.pipeline.convert import convert


@pytest.mark.slow
def test_every_format_without_any_checkpoint(capsys) -> None:
    assert run(["selftest", "--json"]) == 0
    formats = json.loads(capsys.readouterr().out)["formats"]
    assert len(formats) == len(RECIPES) == 11
    for document in formats:
        assert document["ok"]
        assert document["false_alarms"] == []
        assert all(result["numeric"] for result in document["results"]), document["destination"]
    names = {result["sabotage"] for document in formats for result in document["results"]}
    assert len(names) == 13, "every kind of damage was possible somewhere"


@pytest.mark.slow
def test_on_a_conversion_of_the_user(checkpoints, tmp_path, capsys) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    convert(source, tmp_path / "out", moeq.Deployment(gpu=moeq.gpu("A100")), layout="marlin-wna16/1", force_layout=True)
    assert run(["selftest", str(tmp_path / "out"), "--seed", "3", "--quiet"]) == 0
    text = capsys.readouterr().out
    assert "one weight, of input feature" in text
    assert text.splitlines()[-1].startswith("ok  6 damages: 6 caught by digest, 6 by the kernels' numbers alone;")
