"""Conversion of real GPTQ checkpoints, from files to files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import moeq
from moeq.checkpoint.manifest import read_manifest
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.digest import logical_digest
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.pipeline.events import Event
from moeq.pipeline.run import workers

A100 = Deployment(gpu=parse_gpu("A100"))
CONVERTIBLE = ["gptq-int4-g32-qwen3moe", "gptq-int4-g128-mixtral", "gptq-int8-g64-qwen3moe"]


def sha256_of_values(values: torch.Tensor) -> str:
    values = torch.where(values == 0, torch.zeros_like(values), values)  # -0.0 is written 0.0
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                yield name, file.get_tensor(name)


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("converted")
    for name in CONVERTIBLE:
        convert(checkpoints / name, out / name, A100)
    return {name: out / name for name in CONVERTIBLE}


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("name", CONVERTIBLE)
def test_converted_weights_mean_what_the_source_meant(name, converted, expected) -> None:
    checkpoint = moeq.open(converted[name])
    assert checkpoint.kind == "converted"
    for key, want in expected[name].items():
        _, layer, _, expert, projection = key.split(".")
        values = checkpoint.dequantize(int(layer), int(expert), projection)
        assert list(values.shape) == want["shape"]
        assert sha256_of_values(values) == want["sha256"], key


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_everything_else_is_unchanged(name, converted, checkpoints) -> None:
    source = dict(tensors(checkpoints / name))
    result = dict(tensors(converted[name]))
    kept = {key for key in source if ".experts." not in key}
    assert kept == {key for key in result if ".experts." not in key}
    for key in kept:
        assert source[key].dtype == result[key].dtype
        assert torch.equal(source[key], result[key]), key
    side = (checkpoints / name / "quantize_config.json").read_bytes()
    assert (converted[name] / "quantize_config.json").read_bytes() == side


def test_the_stacks_are_what_the_contract_says(converted) -> None:
    result = dict(tensors(converted["gptq-int4-g32-qwen3moe"]))
    prefix = "model.layers.0.mlp.experts"
    shapes = {key.removeprefix(prefix + "."): list(t.shape) for key, t in result.items() if key.startswith(prefix)}
    assert shapes == {
        "w13_weight": [4, 256 // 16, 256 * 2],
        "w13_scale": [4, 256 // 32, 256],
        "w2_weight": [4, 128 // 16, 256 * 2],
        "w2_scale": [4, 128 // 32, 256],
    }
    assert result[f"{prefix}.w13_weight"].dtype == torch.int32
    assert result[f"{prefix}.w13_scale"].dtype == torch.float16


def test_index_and_config(converted, checkpoints) -> None:
    name = "gptq-int4-g128-mixtral"
    index = json.loads((converted[name] / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for _, t in tensors(converted[name]))
    for file in set(index["weight_map"].values()):
        with safe_open(converted[name] / file, "pt") as opened:
            assert set(opened.keys()) == {key for key, home in index["weight_map"].items() if home == file}
    config = json.loads((converted[name] / "config.json").read_text())
    original = json.loads((checkpoints / name / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "moeq"
    assert config["quantization_config"]["original"] == original["quantization_config"]
    # The guard that makes plain transformers stop instead of inventing experts.
    assert config.pop("experts_implementation").startswith("moeq")
    assert {k: v for k, v in config.items() if k != "quantization_config"} == {
        k: v for k, v in original.items() if k != "quantization_config"
    }


def test_the_manifest_digests_are_those_of_the_source(converted, checkpoints) -> None:
    name = "gptq-int8-g64-qwen3moe"
    manifest, source = read_manifest(converted[name]), moeq.open(checkpoints / name)
    assert manifest.source.identity == source.source.identity()
    assert [entry.layer for entry in manifest.layers] == [0, 1]
    for entry in manifest.layers:
        for projection, digests in entry.digests.items():
            assert list(digests) == [logical_digest(source.matrix(entry.layer, e, projection)) for e in range(4)]
        assert len({d for digests in entry.digests.values() for d in digests}) == 12


def test_act_order_is_refused_with_the_reason(checkpoints, tmp_path) -> None:
    with pytest.raises(MoeqError, match=r"desc_act|act-order") as caught:
        convert(checkpoints / "gptq-int4-g32-actorder-qwen3moe", tmp_path / "out", A100)
    assert caught.value.exit_code == ExitCode.NO
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_writes_nothing_and_tells_the_true_sizes(checkpoints, converted, tmp_path) -> None:
    name = "gptq-int4-g32-qwen3moe"
    conversion = convert(checkpoints / name, tmp_path / "out", A100, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    sizes = {path.name: path.stat().st_size for path in converted[name].glob("*.safetensors")}
    assert {file.name for file in conversion.plan.files} == set(sizes)
    for file in conversion.plan.files:
        assert 0 < sizes[file.name] - file.data_bytes < 64 * 1024  # the header
    assert conversion.plan.bytes_out == conversion.plan.expert_bytes_out + conversion.plan.rest_bytes


class TestDestination:
    name = "gptq-int4-g128-mixtral"

    def test_an_existing_conversion_needs_force(self, checkpoints, tmp_path) -> None:
        convert(checkpoints / self.name, tmp_path / "out", A100)
        before = content(tmp_path / "out")
        other = Deployment(gpu=parse_gpu("H100"))
        with pytest.raises(MoeqError, match=r"already holds a conversion, .*gpu\.name 'A100' there") as caught:
            convert(checkpoints / self.name, tmp_path / "out", other)
        assert caught.value.exit_code == ExitCode.USAGE
        assert "force=True" in (caught.value.hint or "")
        assert content(tmp_path / "out") == before
        convert(checkpoints / self.name, tmp_path / "out", A100, force=True)
        assert content(tmp_path / "out") == before, "the same job gives the same bytes"
        assert [path.name for path in tmp_path.iterdir()] == ["out"]

    def test_what_moeq_did_not_write_is_never_replaced(self, checkpoints, tmp_path) -> None:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "thesis.tex").write_text("precious")
        with pytest.raises(MoeqError, match="not an output of moeq"):
            convert(checkpoints / self.name, tmp_path / "out", A100, force=True)
        assert content(tmp_path) == {"out/thesis.tex": b"precious"}

    def test_an_empty_folder_is_fine(self, checkpoints, tmp_path) -> None:
        (tmp_path / "out").mkdir()
        convert(checkpoints / self.name, tmp_path / "out", A100)
        assert moeq.open(tmp_path / "out").kind == "converted"

    @pytest.mark.parametrize("inside", ["", "..", "deeper"])
    def test_the_source_is_never_the_destination(self, checkpoints, tmp_path, inside) -> None:
        source = tmp_path / "parent" / "source"
        shutil.copytree(checkpoints / self.name, source)
        before = content(tmp_path)
        with pytest.raises(MoeqError) as caught:
            convert(source, source / inside, A100, force=True)
        assert caught.value.exit_code == ExitCode.USAGE
        assert content(tmp_path) == before

    def test_a_missing_parent_is_named(self, checkpoints, tmp_path) -> None:
        with pytest.raises(MoeqError, match="does not exist") as caught:
            convert(checkpoints / self.name, tmp_path / "no" / "such" / "out", A100)
        assert "mkdir -p" in (caught.value.hint or "")

    def test_a_conversion_is_not_a_source(self, checkpoints, tmp_path) -> None:
        convert(checkpoints / self.name, tmp_path / "out", A100)
        with pytest.raises(MoeqError, match="itself an output"):
            convert(tmp_path / "out", tmp_path / "again", A100)


@pytest.mark.parametrize("damage", ["missing shard", "truncated", "no config", "no folder"])
def test_a_damaged_source_leaves_nothing_behind(damage, checkpoints, tmp_path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g128-mixtral", source)
    weights = source / "model.safetensors"
    if damage == "missing shard":
        index = {"metadata": {}, "weight_map": {"model.norm.weight": "model-00002-of-00002.safetensors"}}
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
        weights.unlink()
    elif damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    elif damage == "no config":
        (source / "config.json").unlink()
    else:
        shutil.rmtree(source)
    with pytest.raises(MoeqError) as caught:
        convert(source, tmp_path / "out", A100)
    assert caught.value.exit_code == ExitCode.SOURCE
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("out")]


def test_a_source_that_shrinks_while_being_read_leaves_nothing_behind(checkpoints, tmp_path) -> None:
    source = tmp_path / "source"
    shutil.copytree(checkpoints / "gptq-int4-g32-qwen3moe", source)

    def shrink(event: Event) -> None:
        with (source / "model.safetensors").open("r+b") as file:
            file.truncate(200_000)

    with pytest.raises(MoeqError) as caught:
        convert(source, tmp_path / "out", A100, progress=shrink)
    assert caught.value.exit_code == ExitCode.SOURCE
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("breaks", [False, True])
def test_files_and_threads_of_a_run_end_with_it(breaks, converted, checkpoints, tmp_path, monkeypatch) -> None:
    def broken(job: object, unit: object) -> None:
        raise RuntimeError("no worker")

    before = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    if breaks:
        monkeypatch.setattr(workers, "worker_of", broken)
    with pytest.raises(RuntimeError) if breaks else nullcontext():
        convert(checkpoints / CONVERTIBLE[0], tmp_path / "out", A100)
    assert (set(threading.enumerate()), len(os.listdir("/proc/self/fd"))) == before


def test_a_failure_is_told_before_the_run_ends(checkpoints, tmp_path, monkeypatch) -> None:
    """However late: the other threads end as soon as one has failed, and must not end the run before it says why."""

    class Late(workers._Failed):
        def __init__(self, error: BaseException) -> None:
            time.sleep(0.2)
            super().__init__(error)

    source = Path(shutil.copytree(checkpoints / CONVERTIBLE[0], tmp_path / "source"))
    entry = moeq.open(source).source.entry("model.layers.0.mlp.experts.1.down_proj.scales")
    with (source / entry.file).open("r+b") as file:
        file.seek(entry.start)
        file.write(b"\xff\x7f")  # a NaN in float16
    monkeypatch.setattr(workers, "_Failed", Late)
    with pytest.raises(MoeqError) as caught:
        convert(source, tmp_path / "out", A100)
    assert caught.value.code == "source.bad-data"
