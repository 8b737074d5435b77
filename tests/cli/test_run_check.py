"""`moeq run-check` as users and CI call it."""

from __future__ import annotations

import json
import re
import sys
from html import unescape
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import moeq
from moeq.cli.app import run
from moeq.cli.run_check import numbers
from moeq.deploy.detect import environment
from moeq.pipeline.convert import convert

NAME = "ct-mxfp4-qwen3moe"
QUICK = ["--layers", "0", "--tokens", "3", "--quiet"]


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("run-check") / "out"
    convert(checkpoints / NAME, out, moeq.Deployment(gpu=moeq.gpu("H100")), layout="marlin-mxfp4/1", force_layout=True)
    return str(out)


@pytest.mark.slow
def test_every_report_of_a_good_conversion(converted, tmp_path, capsys) -> None:
    files = ["--html", str(tmp_path / "r.html"), "--junit", str(tmp_path / "r.xml")]
    assert run(["run-check", converted, *QUICK, *files, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "moeq.run-check/1"
    assert document["ok"] is True
    (layer,) = document["layers"]
    assert [entry["name"] for entry in layer["results"]] == ["gate", "up", "down", "layer"]
    assert all(entry["passed"] and entry["exceedance"] < 1 for entry in layer["results"])
    assert len(layer["results"][0]["experts"]) == 4
    page = (tmp_path / "r.html").read_text()
    assert "Backends by tensor-parallel size" in page
    assert "MARLIN" in page
    assert "Where marlin-mxfp4/1 puts a tile" in page
    assert ET.parse(tmp_path / "r.xml").getroot().get("failures") == "0"


@pytest.mark.slow
def test_a_damaged_conversion_exits_with_one(converted, tmp_path, capsys) -> None:
    entry = moeq.open(converted).source.tensors["model.layers.0.mlp.experts.w2_scale"]
    path = Path(converted) / entry.file
    original = path.read_bytes()
    try:
        path.write_bytes(original[: entry.start] + bytes([original[entry.start] ^ 1]) + original[entry.start + 1 :])
        assert run(["run-check", converted, *QUICK, "--junit", str(tmp_path / "r.xml")]) == 1
    finally:
        path.write_bytes(original)
    text = capsys.readouterr().out
    assert "layer 0 expert 0 down: not the values recorded" in text
    assert "looks like the scale of group" in text
    assert text.splitlines()[-1].startswith("FAILED")
    assert int(ET.parse(tmp_path / "r.xml").getroot().get("failures", "0")) >= 3


def test_digests_only(converted, capsys) -> None:
    assert run(["run-check", converted, "--digests-only", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["digests_checked"], document["layers"]) == (24, [])


def test_a_page_says_by_what_and_from_what_it_was_made(converted, tmp_path, capsys, monkeypatch) -> None:
    asked = ["run-check", converted, "--digests-only", "--html", str(tmp_path / "r.html")]
    monkeypatch.setattr(sys, "argv", ["moeq", *asked])
    assert run(asked) == 0
    capsys.readouterr()
    page, source = unescape((tmp_path / "r.html").read_text()), moeq.open(converted).manifest.source
    facts = environment()
    assert f"moeq {' '.join(asked)}" in page
    assert f"{source.name}, identity {source.identity}" in page
    assert re.search(rf"\d{{4}}-\d\d-\d\d \d\d:\d\d UTC by moeq {re.escape(facts['moeq'])}; ", page)
    assert facts["packages"] in page
    assert "0 of 8 run" in page, "four experts in each of two layers"


def test_a_report_that_cannot_be_written(converted, tmp_path, capsys) -> None:
    assert run(["run-check", converted, "--digests-only", "--html", str(tmp_path / "no" / "r.html")]) == 3
    assert "no/r.html" in capsys.readouterr().err


def test_a_layout_without_a_kernel_is_an_answer(checkpoints, tmp_path, capsys) -> None:
    out = tmp_path / "out"
    layout = "cpu-amx-mxfp4/1"
    convert(checkpoints / NAME, out, moeq.Deployment(gpu=moeq.gpu("H100")), layout=layout, force_layout=True)
    assert run(["run-check", str(out), "--quiet"]) == 1
    error = capsys.readouterr().err
    assert f"no kernel that reads e2m1 weights in layout {layout}" in error
    assert "--digests-only" in error
    assert run(["run-check", str(out), "--digests-only", "--quiet"]) == 0


def test_a_dtype_without_a_kernel_is_an_answer(checkpoints, tmp_path, capsys) -> None:
    deployment = moeq.Deployment(gpu=moeq.gpu("A100"), dtype="fp16")
    convert(checkpoints / NAME, tmp_path / "out", deployment, layout="marlin-mxfp4/1", force_layout=True)
    assert run(["run-check", str(tmp_path / "out"), *QUICK]) == 1
    assert "x is float16" in capsys.readouterr().err


def test_numbers() -> None:
    assert numbers("layers", "0,3,5-7") == [0, 3, 5, 6, 7]
    assert numbers("layers", None) is None
    with pytest.raises(moeq.MoeqError, match="is not a number"):
        numbers("layers", "0,x")
