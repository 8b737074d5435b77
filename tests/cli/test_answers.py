"""Answers come first, help is where people look for it, and shells complete values."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from gguf_files import write_model

from moeq.cli.app import COMMANDS, run

INT4, GPT_OSS, ACT_ORDER = "gptq-int4-g32-qwen3moe", "mxfp4-gptoss", "gptq-int4-g32-actorder-qwen3moe"


@pytest.fixture(autouse=True)
def here(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoints)


def printed(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> list[str]:
    assert run(list(argv)) == code
    return capsys.readouterr().out.splitlines()


class TestInspect:
    """The answer, the next step, then facts, then the backends that are near."""

    def test_a_checkpoint_that_converts(self, capsys: pytest.CaptureFixture[str]) -> None:
        answer, following, otherwise, *facts = printed(capsys, "inspect", INT4, "--gpu", "A100")
        assert answer == "A100, TP 1, bf16: vLLM 0.33.0 runs MARLIN (W4A16)"
        assert re.search(rf"^  next +moeq convert {INT4} DST --gpu A100 && vllm serve DST$", following)
        assert re.search(rf"^  or +vllm serve {INT4} \(", otherwise)
        assert facts[0].split() == ["checkpoint", INT4]

    def test_a_gguf_file_names_types(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        source = str(write_model(tmp_path / "m.gguf", layers=1, experts=2, down_type="q8_0"))
        lines = printed(capsys, "inspect", source, "--gpu", "A100", code=1)
        types = [" ".join(line.split()[1:]) for line in lines if line.startswith("  types")]
        assert types == ["experts q4_0 2, q8_0 1; the rest q8_0 6, f32 4"]

    def test_a_refusal_ends_with_what_works(self, capsys: pytest.CaptureFixture[str]) -> None:
        answer, following, *_ = printed(capsys, "inspect", ACT_ORDER, "--gpu", "H100", code=1)
        assert "has no backend: act-order" in answer
        assert following.split(maxsplit=1) == ["next", "--engine moeq (moeq's own kernels) works"]

    def test_a_checkpoint_that_is_served_as_it_is(self, capsys: pytest.CaptureFixture[str]) -> None:
        answer, following, *_ = printed(capsys, "inspect", "ct-fp8-block-qwen3moe", "--gpu", "H100")
        assert "runs TRITON (W8A8)" in answer
        assert following.split()[:4] == ["next", "vllm", "serve", "ct-fp8-block-qwen3moe"]

    def test_an_answer_that_is_not_known(self, capsys: pytest.CaptureFixture[str]) -> None:
        argv = "inspect", "ct-mxfp8-qwen3moe", "--gpu", "H100", "--engine", "sglang"
        answer, *_ = printed(capsys, *argv, code=1)
        assert "what SGLang 0.5.23 runs is not known: " in answer

    def test_without_a_gpu(self, capsys: pytest.CaptureFixture[str]) -> None:
        answer, following, *_ = printed(capsys, "inspect", INT4)
        assert answer.startswith("No verdict: no GPU here")
        assert following.split() == ["next", "moeq", "inspect", INT4, "--gpu", "NAME"]

    def test_a_conversion(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        assert run(["convert", INT4, str(tmp_path / "out"), "--gpu", "A100", "--quiet"]) == 0
        capsys.readouterr()
        answer, following, *_ = printed(capsys, "inspect", str(tmp_path / "out"))
        assert answer.startswith("Converted for ")
        assert answer.endswith("marlin-wna16/1")
        assert following.split() == ["next", "vllm", "serve", str(tmp_path / "out")]

    def test_only_near_backends_are_listed(self, capsys: pytest.CaptureFixture[str]) -> None:
        brief = printed(capsys, "inspect", GPT_OSS, "--gpu", "H100")
        whole = printed(capsys, "inspect", GPT_OSS, "--gpu", "H100", "-v")
        assert run(["inspect", GPT_OSS, "--gpu", "H100", "--json"]) == 0
        verdict = json.loads(capsys.readouterr().out)["verdict"]
        others = [row for row in verdict["candidates"] if row["backend"] != verdict["chosen"]["backend"]]
        hidden = [row for row in others if not row["supported"] and "a device" in (row["unlock"] or "a device")]
        listed = {line.split()[0] for line in brief if line.startswith("  ")}
        assert all(row["backend"] not in listed for row in hidden)
        assert all(row["backend"] in listed for row in others if row not in hidden)
        assert all(any(line.split()[:1] == [row["backend"]] for line in whole) for row in others)
        numbers = [int(number) for number in re.findall(r"\d+", brief[-1].partition(":")[0])]
        assert sum(numbers) == len(hidden)
        assert "-v lists" in brief[-1]


class TestHelp:
    """`moeq help`, `-V`, and the usage line of the command that was meant."""

    def test_help_is_a_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert printed(capsys, "help") == printed(capsys, "--help")
        assert printed(capsys, "help", "convert") == printed(capsys, "convert", "--help")

    def test_a_short_option_for_the_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert printed(capsys, "-V") == printed(capsys, "--version")

    @pytest.mark.parametrize(
        ("argv", "usage"),
        [
            (["inspect"], "moeq inspect [OPTIONS] SRC"),
            (["convert", "x"], "moeq convert [OPTIONS] SRC DST"),
            (["inspect", "x", "--nope"], "moeq inspect [OPTIONS] SRC"),
            (["help", "nosuch"], "moeq [OPTIONS] COMMAND"),
        ],
    )
    def test_usage_errors_show_the_usage(self, argv: list[str], usage: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert run(argv) == 2
        assert f"hint: usage: {usage}" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [("backends",), ("gpus",), ("schema",), ("inspect", INT4, "--gpu", "H100")])
def test_piped_output_is_not_padded(argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert [line for line in printed(capsys, *argv) if line != line.rstrip()] == []


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("moeq convert x y --gpu H10", "H100"),
        ("moeq convert x y --backend mar", "marlin"),
        ("moeq convert x y --layout marlin-wna16/", "marlin-wna16/1"),
        ("moeq oracle x --engine vllm@0.33", "vllm@0.33.0"),
        ("moeq transcode x y --to gptq_", "gptq_v2"),
        ("moeq explain usage.oth", "usage.other-job"),
        ("moeq schema insp", "inspect"),
        ("moeq backends wna", "wna16"),
    ],
)
def test_a_shell_completes_values(line: str, value: str) -> None:
    words = line.split()
    env = {**os.environ, "_MOEQ_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
    result = subprocess.run([sys.executable, "-m", "moeq"], capture_output=True, text=True, check=False, env=env)
    assert value in result.stdout.split(), result.stderr


def test_every_command_is_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(printed(capsys, "help"))
    assert all(name in text for name in COMMANDS)


@pytest.mark.parametrize(
    "argv",
    [
        ("verify", INT4),
        ("run-check", INT4),
        ("push", INT4, "org/name"),
        ("restore", INT4, "restored"),
        ("selftest", INT4),
        ("warmup", INT4, "--gpu", "H100"),
    ],
    ids=lambda argv: argv[0],
)
def test_a_source_where_a_conversion_is_needed_has_one_code(
    argv: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*argv, "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["code"] == "usage.not-converted"


@pytest.mark.parametrize("command", ["verify", "run-check", "push", "restore", "selftest", "inspect"])
def test_a_missing_folder_has_one_code(command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = {"push": ["org/name"], "restore": [str(tmp_path / "restored")]}.get(command, [])
    (tmp_path / "out.moeq-partial").mkdir()
    for name, hint in (("nothing", False), ("out", True)):
        assert run([command, str(tmp_path / name), *more, "--json"]) == 4
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["code"] == "source.missing"
        assert ("unfinished work" in (error["hint"] or "")) is hint
