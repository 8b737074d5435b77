"""`moeq transcode` as a command: exit codes, one document, one line for what does not fit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from moeq.cli.app import run
from moeq.errors import ExitCode


@pytest.fixture
def source(checkpoints: Path) -> str:
    return str(checkpoints / "ct-int4-g128-qwen3moe")


def test_exact_is_exit_0(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["transcode", source, str(tmp_path / "out"), "--to", "gptq_v2", "-q"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "  content   experts of 2 layers, 0 other quantised modules; " in text
    assert "  proof     exact: 24 of 24 projections equal in every value" in text
    assert (tmp_path / "out" / "quantize_config.json").is_file()


def test_what_is_not_exact_is_exit_1_and_counted(source: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["transcode", source, "--to", "bf16", "--check-only", "--json"]) == ExitCode.NO
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "moeq.transcode/1"
    assert document["ok"] is document["exact"] is document["written"] is False
    assert len(document["differences"]) == document["projections"] == 24


def test_allowed_losses_are_exit_0_and_told(source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out")
    assert run(["transcode", source, out, "--to", "bf16", "-q"]) == ExitCode.NO
    assert "--allow-lossy" in capsys.readouterr().err
    assert run(["transcode", source, out, "--to", "bf16", "--allow-lossy", "-q"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert "  proof     not exact: 0 of 24 projections equal in every value" in text
    assert "... and 4 more: --json lists them" in text


@pytest.mark.parametrize("options", [[], ["--check-only"]])
def test_side_files_that_are_left_out_are_told(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    shutil.copytree(source, tmp_path / "made")
    (tmp_path / "made" / "CON").write_text("a device on other systems")
    (tmp_path / "made" / "tokenizer.json").write_text("{}")
    where = [] if options else [str(tmp_path / "out")]
    assert run(["transcode", str(tmp_path / "made"), *where, "--to", "gptq", "-q", *options]) == ExitCode.OK
    assert "these files are left out, since not every system allows such names: 'CON'" in capsys.readouterr().err
    assert options or ((tmp_path / "out" / "tokenizer.json").is_file() and not (tmp_path / "out" / "CON").exists())


def test_activations_that_are_no_longer_quantised_are_told(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = str(checkpoints / "ct-w8a8-qwen3moe")
    assert run(["transcode", source, "--to", "compressed-tensors", "--check-only", "-q"]) == ExitCode.OK
    assert "int8 activations, the result is weight-only" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ([], "--to is missing"),
        (["--to", "gguf", "--check-only"], "no format is called 'gguf'"),
        (["--to", "gptq"], "DST is missing"),
        (["--to", "gptq", "--names", "x", "--check-only"], "--names 'x' is none of"),
        (["--to", "gptq", "--regroup", "48", "--check-only"], "128 / 48 = 2.66667"),
        (["--to", "gptq", "--regroup", "0", "--check-only"], "--regroup"),
        (["--to", "fp8", "--regroup", "32", "--check-only"], "--regroup is for integer codes"),
        (["--to", "nvfp4", "--check-only"], "stores MXFP4, NVFP4, but not packed integers"),
    ],
)
def test_what_does_not_fit_is_one_line(
    source: str, capsys: pytest.CaptureFixture[str], options: list[str], text: str
) -> None:
    assert run(["transcode", source, *options, "-q"]) == ExitCode.USAGE
    errors = capsys.readouterr().err
    assert text in errors
    assert len([line for line in errors.splitlines() if line.startswith("error:")]) == 1


def test_too_little_memory_is_said_with_the_arithmetic(
    source: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "out")
    for size, shown in (("50MB", "48 MiB"), ("1M", "0.954 MiB"), ("10kB", "0.00954 MiB")):
        assert run(["transcode", source, out, "--to", "gptq", "--max-memory", size, "-q"]) == ExitCode.RESOURCES
        said = " ".join(capsys.readouterr().err.split())
        assert "MiB for the process" in said
        assert f"more than the {shown} of --max-memory" in said
