"""The benchmark against `cp` and against the script of a user: it runs, and its contenders write the same tensors."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
from bench_scripts import convert_speed, make_checkpoint, measuring, naive_convert, transcode_speed

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert

CASES = [
    ("tiny", "gptq", "marlin-wna16/1"),
    ("tiny", "awq", "marlin-wna16/1"),
    ("tiny", "ct-int4", "marlin-wna16/1"),
    ("tiny", "w8a8", "int8-w8a8/1"),
    ("tiny-oss", "mxfp4", "marlin-mxfp4/1"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "kind", "layout"), CASES)
def test_the_naive_script_writes_the_same_tensors(model: str, kind: str, layout: str, tmp_path: Path) -> None:
    """Two independent packers: plain torch in a script, and moeq's layouts."""
    source, ours, theirs = tmp_path / "source", tmp_path / "ours", tmp_path / "theirs"
    make_checkpoint.write_checkpoint(source, make_checkpoint.MODELS[model], kind)
    convert(source, ours, Deployment(gpu=parse_gpu("H100")), layout=layout, force_layout=True)
    naive_convert.main(source, theirs)
    assert convert_speed.differences(ours, theirs) == []
    path, start, *_ = convert_speed.tensors(theirs)["model.layers.0.mlp.experts.w13_weight"]
    data = bytearray(path.read_bytes())
    data[start] ^= 1
    path.write_bytes(data)
    assert convert_speed.differences(ours, theirs) == ["model.layers.0.mlp.experts.w13_weight"]


@pytest.mark.slow
def test_the_benchmark_measures_every_contender(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = convert_speed.Case("tiny", "gptq", 0.002, "marlin-wna16/1")
    monkeypatch.setitem(convert_speed.CASES, "tiny", case)
    monkeypatch.setattr(measuring, "SETTLE_SECONDS", 0)
    options = argparse.Namespace(gib=0.002, repeat=1, workers=2, cache="warm", naive=True)
    row = convert_speed.run_case("tiny", options, tmp_path)
    assert row["same_bytes_as_naive"] is True
    assert list(row["results"]) == ["cp", "convert", "naive"]
    for figures in row["results"].values():
        assert figures["wall"] > 0
        assert figures["peak"] > 1 << 20
        assert figures["bytes"] > 1 << 19
    assert row["results"]["naive"]["peak"] > 100 << 20, "torch alone is larger"
    assert row["results"]["cp"]["wall_to_cp"] == 1
    convert_speed.show(row)
    assert "convert and naive wrote the same tensors" in capsys.readouterr().out
    assert convert_speed.table([row]).count("|") == 3 * 7
    json.dumps(row, allow_nan=False)
    assert not list(tmp_path.glob("*/")), "nothing is left but logs"


@pytest.mark.slow
def test_the_benchmark_of_transcoding_measures_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = transcode_speed.Case("tiny-oss", "mxfp4", 0.002, ("fp8",))
    monkeypatch.setitem(transcode_speed.CASES, "tiny", case)
    monkeypatch.setattr(measuring, "SETTLE_SECONDS", 0)
    arguments = ["transcode_speed.py", "--case", "tiny", "--gib", "0.002", "--repeat", "1", "--cache", "warm"]
    monkeypatch.setattr("sys.argv", [*arguments, "--json", str(tmp_path / "found.json"), "--folder", str(tmp_path)])
    assert transcode_speed.main() == 0
    assert "tiny-oss mxfp4 to fp8" in capsys.readouterr().out
    document = json.loads((tmp_path / "found.json").read_text())
    (row,) = document["cases"]
    assert document["schema"] == "moeq.transcode-speed/1"
    assert row["bytes"]["transcode"] > row["bytes"]["cp"] > 1 << 19
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]
