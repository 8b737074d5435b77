"""`moeq warmup`: kernels on disk before anything runs, for a GPU that is not here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jsonschema import Draft202012Validator
from load.deployments import convert

from moeq.cli.app import run
from moeq.deploy.gpus import parse_gpu
from moeq.report.schemas import load_schema
from moeq_kernels import PreparedLayer, Warmed


def folder(checkpoints: Path, tmp_path: Path, **deployment: object) -> str:
    return str(convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", **deployment))


def started(options: list[str], cache: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """`moeq warmup` in a process of its own: here kernels are interpreted."""
    environment = {**os.environ, "MOEQ_KERNEL_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path), **variables}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", "from moeq.cli.app import main; main()", "warmup", *options]
    return subprocess.run(command, env=environment, text=True, capture_output=True, check=False)


@pytest.mark.slow
def test_it_compiles_once_and_names_the_kinds_of_layers(checkpoints, tmp_path) -> None:
    cache = tmp_path / "cache"
    options = [folder(checkpoints, tmp_path), "--gpu", "H200", "--max-tokens", "1", "--json"]
    first, again = (json.loads(started(options, cache).stdout) for _ in range(2))
    Draft202012Validator(load_schema("warmup")).validate(first)
    assert first["kernels"] == first["compiled"] == again["kernels"] > 0
    assert again["compiled"] == 0
    assert list(cache.iterdir())
    assert [kind["layers"] for kind in first["kinds"]] == [[0, 1]]
    assert "hopper-w8a8 kernels" in first["kinds"][0]["what"]


def test_the_interpreter_has_nothing_to_compile(checkpoints, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert run(["warmup", folder(checkpoints, tmp_path), "--gpu", "H200"]) == 3
    assert "TRITON_INTERPRET is set" in capsys.readouterr().err


@pytest.mark.parametrize(("options", "code"), [(["--gpu", "H900"], 2), (["--gpu", "H200", "--tp", "0"], 2)])
def test_refusals(options, code, checkpoints, tmp_path, capsys) -> None:
    assert run(["warmup", folder(checkpoints, tmp_path), *options]) == code
    assert "error: " in capsys.readouterr().err


def test_a_source_is_no_conversion(checkpoints, capsys) -> None:
    assert run(["warmup", str(checkpoints / "ct-w8a8-qwen3moe"), "--gpu", "H200"]) == 2
    assert "moeq convert" in capsys.readouterr().err


def compiling(monkeypatch) -> None:
    """Only in words: here kernels are interpreted, and nothing is compiled."""
    monkeypatch.setattr("moeq_kernels.interpreter.active", lambda: False)


def test_amd_gpus_compile_while_they_serve(checkpoints, tmp_path, monkeypatch, capsys) -> None:
    compiling(monkeypatch)
    assert run(["warmup", folder(checkpoints, tmp_path), "--gpu", "gfx942"]) == 3
    assert "MI300X is an AMD GPU: Triton compiles its kernels when they are first called" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_is_said(checkpoints, tmp_path) -> None:
    (tmp_path / "file").touch()
    done = started([folder(checkpoints, tmp_path), "--gpu", "H200", "--max-tokens=1"], tmp_path / "file")
    assert done.returncode == 3
    assert "compiled for nothing: the folder for them cannot be used" in done.stderr
    assert f"compiled in memory by every process: Not a directory: {tmp_path / 'file'}" in done.stderr


@pytest.fixture
def prepared(monkeypatch) -> list[PreparedLayer]:
    """The layers that would be compiled for."""
    compiling(monkeypatch)
    found: list[PreparedLayer] = []

    def warmup(layers) -> Warmed:
        found.extend(layers)
        return Warmed(0, 0, 0.0)

    monkeypatch.setattr("moeq_kernels.warmup", warmup)
    return found


def sizes(layer: PreparedLayer) -> tuple[int, int, int, bool]:
    problem = layer.problem
    return problem.experts, problem.intermediate, layer.max_tokens, problem.mapped


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("converted", "options", "wanted"),
    [
        ({}, [], {(4, 128, 16384, False)}),
        ({"tp": 2}, [], {(4, 64, 16384, False)}),
        ({"tp": 2}, ["--tp", "1"], {(4, 128, 16384, False)}),
        # With a map of experts for vLLM, without one for SGLang.
        ({"tp": 2}, ["--ep", "2"], {(2, 128, 32768, mapped) for mapped in (True, False)}),
        # Experts are whole, as in an engine.
        ({}, ["--tp", "2", "--ep", "2"], {(2, 128, 16384, mapped) for mapped in (True, False)}),
        # Ranks hold 2, 1 and 1 of 4.
        ({}, ["--ep", "3"], {(held, 128, 49152, mapped) for held in (2, 1) for mapped in (True, False)}),
        ({}, ["--dp", "2"], {(4, 64, 32768, False)}),
    ],
)
def test_ranks_are_those_of_an_engine(converted, options, wanted, checkpoints, tmp_path, prepared) -> None:
    assert run(["warmup", folder(checkpoints, tmp_path, **converted), "--gpu", "H200", *options]) == 0
    assert {sizes(layer) for layer in prepared} == wanted


def test_activations_are_those_of_the_conversion(checkpoints, tmp_path, prepared) -> None:
    converted = folder(checkpoints, tmp_path, dtype="fp16")
    assert run(["warmup", converted, "--gpu", "H200"]) == 0
    assert run(["warmup", converted, "--gpu", "H200", "--dtype", "bf16"]) == 0
    assert [layer.problem.dtype for layer in prepared] == [torch.float16, torch.bfloat16]


def test_a_deploy_file_may_name_the_gpu(checkpoints, tmp_path, prepared) -> None:
    (tmp_path / "deploy.toml").write_text('gpu = "H20"\nep = 2\n')
    assert run(["warmup", folder(checkpoints, tmp_path), "--deploy", str(tmp_path / "deploy.toml")]) == 0
    assert {(layer.problem.gpu.name, layer.problem.experts) for layer in prepared} == {("H20", 2)}


def test_a_gpu_that_torch_does_not_find(checkpoints, tmp_path, prepared, monkeypatch, capsys) -> None:
    """The driver's tools find one, and torch was built for a CPU."""
    monkeypatch.setattr("moeq.deploy.options.detect_gpu", lambda: parse_gpu("H200"))
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert run(["warmup", folder(checkpoints, tmp_path)]) == 3
    assert "this torch finds no GPU" in capsys.readouterr().err


def with_config(source: Path, folder: Path, **keys: object) -> Path:
    """A copy of a checkpoint whose config says something else."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


def activation_of(source: Path, keys: dict[str, object], tmp_path: Path) -> int:
    changed = with_config(source, tmp_path / "source", **keys)
    return run(["warmup", str(convert(changed, tmp_path / "out", "int8-w8a8/1")), "--gpu", "H200"])


def test_the_activation_is_the_engines(checkpoints, tmp_path, prepared) -> None:
    """Gemma's name for it; and a clamp, which vLLM hands to its experts."""
    for i, keys in enumerate(({"hidden_act": "gelu_pytorch_tanh"}, {"swiglu_limit": 7.0})):
        (tmp_path / str(i)).mkdir()
        assert activation_of(checkpoints / "ct-w8a8-qwen3moe", keys, tmp_path / str(i)) == 0
    found = [(layer.problem.epilogue.activation, layer.problem.epilogue.limit) for layer in prepared]
    assert found == [("gelu_tanh", 0.0), ("silu", 7.0)]


def test_an_activation_without_kernels_is_an_answer(checkpoints, tmp_path, prepared, capsys) -> None:
    assert activation_of(checkpoints / "ct-w8a8-qwen3moe", {"hidden_act": "mish"}, tmp_path) == 1
    assert "unknown activation 'mish'" in capsys.readouterr().err
