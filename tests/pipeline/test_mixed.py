"""Checkpoints whose layers differ: each layer by itself, refused by name, or copied unchanged when asked."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from pipeline.mixing import content, rewritten, with_layer_of, with_plain_layer
from safetensors.torch import load_file

import moeq
from moeq.checkpoint.manifest import read_manifest
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.prove.diff import diff
from moeq.prove.restore import restore
from moeq.prove.verify import verify

INT4, INT8 = "gptq-int4-g32-qwen3moe", "gptq-int8-g64-qwen3moe"
EIGHT_BITS = {"bits": 8, "group_size": 64}
A100 = Deployment(gpu=parse_gpu("A100"))


@pytest.fixture
def two_widths(checkpoints: Path, tmp_path: Path) -> Path:
    """int4 in layer 0, int8 in layer 1."""
    rules = {"dynamic": {r"+:.*layers\.1\.mlp\.experts.*": EIGHT_BITS}}
    return rewritten(checkpoints / INT4, tmp_path / "source", with_layer_of(checkpoints / INT8, 1), rules)


@pytest.fixture
def half_plain(checkpoints: Path, tmp_path: Path) -> Path:
    """int4 in layer 0, bf16 in layer 1."""
    rules = {"dynamic": {r"-:.*layers\.1\.mlp\.experts.*": {}}}
    return rewritten(checkpoints / INT4, tmp_path / "source", with_plain_layer(1), rules)


def assert_back(source: Path, out: Path, tmp_path: Path) -> None:
    found = verify(out, source)
    assert found.ok, found.mismatches
    restore(out, tmp_path / "back")
    assert content(tmp_path / "back") == content(source)
    assert diff(source, out).equal


@pytest.mark.slow
def test_layers_of_two_widths(two_widths, checkpoints, tmp_path) -> None:
    conversion = convert(two_widths, tmp_path / "out", A100, layout="marlin-wna16/1", force_layout=True)
    assert [entry.matrices["w2"].spec.bits for entry in conversion.manifest.layers] == [4, 8]
    converted = moeq.open(tmp_path / "out")
    for layer, name in ((0, INT4), (1, INT8)):
        source = moeq.open(checkpoints / name)
        assert torch.equal(converted.dequantize(layer, 3, "gate"), source.dequantize(layer, 3, "gate"))
    assert_back(two_widths, tmp_path / "out", tmp_path)


def test_a_layer_that_does_not_fit_is_refused_by_name(two_widths, tmp_path) -> None:
    with pytest.raises(MoeqError, match=r"layer 1 does not fit layout rdna3-int4/1: .*int8") as caught:
        convert(two_widths, tmp_path / "out", A100, layout="rdna3-int4/1", force_layout=True)
    assert caught.value.exit_code == ExitCode.USAGE
    assert "skip_unfit=True" in caught.value.hint
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.slow
def test_or_copied_unchanged_when_asked(two_widths, tmp_path) -> None:
    conversion = convert(two_widths, tmp_path / "out", A100, layout="rdna3-int4/1", force_layout=True, skip_unfit=True)
    assert [entry.layer for entry in conversion.manifest.layers] == [0]
    (copied,) = read_manifest(tmp_path / "out").copied
    assert copied.layer == 1
    assert "int8" in copied.reason
    before, after = load_file(two_widths / "model.safetensors"), {}
    for path in (tmp_path / "out").glob("*.safetensors"):
        after.update(load_file(path))
    copies = [name for name in before if ".layers.1.mlp.experts." in name]
    assert len(copies) == 4 * 3 * 4
    assert all(torch.equal(before[name], after[name]) for name in copies)
    assert_back(two_widths, tmp_path / "out", tmp_path)


def test_where_nothing_fits_skipping_does_not_help(checkpoints, tmp_path) -> None:
    with pytest.raises(MoeqError, match="layer 0 does not fit layout mxfp4-identity/1"):
        convert(
            checkpoints / INT4, tmp_path / "out", A100, layout="mxfp4-identity/1", force_layout=True, skip_unfit=True
        )
    assert list(tmp_path.iterdir()) == []


def test_layers_that_are_not_quantised_are_copied_and_recorded(half_plain, tmp_path) -> None:
    conversion = convert(half_plain, tmp_path / "out", A100)
    assert [entry.layer for entry in conversion.manifest.layers] == [0]
    assert [(row.layer, row.reason) for row in conversion.manifest.copied] == [(1, "its experts are not quantised")]
    assert_back(half_plain, tmp_path / "out", tmp_path)


@pytest.mark.slow
def test_experts_of_two_schemes_in_one_layer_are_refused_by_name(checkpoints, tmp_path) -> None:
    rules = {"dynamic": {r"+:.*layers\.1\.mlp\.experts\.3\..*": EIGHT_BITS}}
    change = with_layer_of(checkpoints / INT8, 1, experts=(3,))
    source = rewritten(checkpoints / INT4, tmp_path / "source", change, rules)
    with pytest.raises(
        MoeqError, match=r"layer 1 cannot be stacked: w13 of expert 0 is int4 g32 .* of expert 3 int8 g64"
    ):
        convert(source, tmp_path / "out", A100)
    conversion = convert(source, tmp_path / "out", A100, skip_unfit=True)
    assert [row.layer for row in conversion.manifest.copied] == [1]
    assert_back(source, tmp_path / "out", tmp_path)


def test_a_forced_layout_that_no_backend_reads_here_stands_for_itself(checkpoints, tmp_path) -> None:
    source = checkpoints / "ct-mxfp4-qwen3moe"
    manifest = convert(source, tmp_path / "out", A100, layout="deepgemm-mxfp4/1", force_layout=True).manifest
    assert manifest.backend == "deepgemm-mxfp4/1"
    document = json.loads((tmp_path / "out" / "moeq.json").read_text())
    assert document["layers"][0]["layout"] == "deepgemm-mxfp4/1"


def test_an_unknown_layout(checkpoints, tmp_path) -> None:
    with pytest.raises(MoeqError, match="no layout is called 'marlin'") as caught:
        convert(checkpoints / INT4, tmp_path / "out", A100, layout="marlin")
    assert caught.value.exit_code == ExitCode.USAGE
    assert "marlin-wna16/1" in caught.value.hint
