"""`moeq warmup`: kernels on disk before anything runs, for a GPU that is not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from load.deployments import convert

from moeq.cli.app import run
from moeq.report.schemas import load_schema


def folder(checkpoints: Path, tmp_path: Path, **deployment: object) -> str:
    return str(convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", **deployment))


@pytest.mark.slow
def test_it_compiles_once_and_names_the_kinds_of_layers(checkpoints, tmp_path) -> None:
    """In a process of its own: here kernels are interpreted."""
    cache = tmp_path / "cache"
    environment = {**os.environ, "MOEQ_KERNEL_CACHE": str(cache), "PYTHONPATH": os.pathsep.join(sys.path)}
    del environment["TRITON_INTERPRET"]
    options = ["--gpu", "H200", "--max-tokens", "1", "--json"]
    script = "from moeq.cli.app import main; main()"
    command = [sys.executable, "-c", script, "warmup", folder(checkpoints, tmp_path), *options]
    first, again = (json.loads(subprocess.check_output(command, env=environment, text=True)) for _ in range(2))
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
    """In a process of its own, as above."""
    (tmp_path / "file").touch()
    environment = {**os.environ, "MOEQ_KERNEL_CACHE": str(tmp_path / "file"), "PYTHONPATH": os.pathsep.join(sys.path)}
    del environment["TRITON_INTERPRET"]
    command = [sys.executable, "-m", "moeq", "warmup", folder(checkpoints, tmp_path), "--gpu", "H200", "--max-tokens=1"]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == 3
    assert f"compiled for nothing: {tmp_path / 'file'} cannot be written" in done.stderr
