"""The command line at a terminal of 60, 80 and 140 columns, in pipes that close, on disks that are full."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

import moeq
from moeq.check.results import CheckReport
from moeq.check.run_check import CheckOptions, run_check
from moeq.report.check_text import render

COMMAND = [sys.executable, "-c", "from moeq.cli.app import main; main()"]
INT4 = "gptq-int4-g32-qwen3moe"
STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def at_terminal(columns: int, *argv: object) -> tuple[int, list[str]]:
    """Exit code and lines (without styles) of a command whose stdout and stderr are a terminal of that width."""
    main, other = pty.openpty()
    env = {**os.environ, "COLUMNS": str(columns), "LINES": "50", "TERM": "xterm-256color"}
    process = subprocess.Popen([*COMMAND, *map(str, argv)], stdout=other, stderr=other, env=env)
    os.close(other)
    data = b""
    while True:
        try:
            piece = os.read(main, 65536)
        except OSError:  # Linux says so when the last writer is gone
            break
        if not piece:
            break
        data += piece
    os.close(main)
    return process.wait(), STYLES.sub("", data.decode()).replace("\r", "").splitlines()


@pytest.mark.cover(every=3)
@pytest.mark.parametrize("columns", [60, 80, 140])
def test_lines_fit_and_wrapped_ones_are_indented(
    columns: int, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(checkpoints)  # a path cannot be wrapped: where the tests lie would decide its length
    code, lines = at_terminal(columns, "inspect", INT4, "--gpu", "H100")
    assert code == 0
    assert max(len(line) for line in lines) <= columns
    for line in lines[1:]:
        assert re.match(r"  \S", line) or line.startswith(" " * 13), line


@pytest.mark.slow
def test_a_sweep_wraps_names_of_backends(checkpoints: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(checkpoints)
    _, lines = at_terminal(60, "oracle", "mxfp4-gptoss", "--gpu", "H100,B200", "--tp", "1,2")
    assert max(map(len, lines)) <= 60
    assert "…" not in "".join(lines)


@pytest.fixture(scope="module")
def proof(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> CheckReport:
    out = tmp_path_factory.mktemp("proof") / "out"
    moeq.convert(checkpoints / INT4, out, moeq.Deployment(gpu=moeq.gpu("A100")))
    return run_check(out, options=CheckOptions(layers=[0], tokens=[3]))


@pytest.mark.slow
@pytest.mark.parametrize(("columns", "more"), [(60, False), (80, False), (140, True)])
def test_the_proof_keeps_its_exponents(columns: int, more: bool, proof: CheckReport) -> None:
    text = StringIO()
    render(Console(file=text, width=columns, force_terminal=True, color_system=None), proof)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in text.getvalue()
    (row,) = (line for line in lines if line.split()[:2] == ["0", "gate"])
    assert re.search(r"\d\.\d\de-\d\d", row)
    assert row.rstrip().endswith("ok")
    assert ("mean error" in text.getvalue()) is more


def piped(redirection: str, *argv: object) -> subprocess.CompletedProcess[str]:
    """A command with its streams redirected by a shell."""
    words = " ".join(f"'{word}'" for word in [*COMMAND, *map(str, argv)] if "\n" not in str(word))
    words = words.replace("'" + COMMAND[2] + "'", '"' + COMMAND[2] + '"')
    script = f"set -o pipefail; {words} {redirection}"
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)


@pytest.mark.cover(every=10)
@pytest.mark.parametrize("redirection", ["| head -1", ">&-", "> /dev/full", ">&- 2>&-", "2>&-"])
@pytest.mark.parametrize(("tp", "code"), [(1, 0), (16, 1)])
def test_streams_that_end_early(redirection: str, tp: int, code: int, checkpoints: Path) -> None:
    result = piped(redirection, "oracle", checkpoints / INT4, "--gpu", "H100", "--tp", tp)
    assert result.returncode == code
    assert "Traceback" not in result.stderr
    assert "Exception ignored" not in result.stderr
    assert "error" not in result.stderr


@pytest.mark.cover(every=12)
@pytest.mark.parametrize("redirection", ["| head -1", ">&-", "> /dev/full"])
@pytest.mark.parametrize("argv", [[], ["--help"], ["convert", "--help"], ["--version"]])
def test_help_that_nobody_reads(redirection: str, argv: list[str]) -> None:
    result = piped(redirection, *argv)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("loaded", ["json", "triton"])
def test_triton_finds_its_objects_collected_at_the_end(loaded: str) -> None:
    """Frozen objects stay, and triton 3.9 (nanobind) prints 30 lines about those of its own that do."""
    pytest.importorskip(loaded)
    program = f"import atexit, gc, {loaded}; atexit.register(lambda: print(gc.get_freeze_count() > 0)); {COMMAND[2]}"
    found = subprocess.run([sys.executable, "-c", program, "--version"], capture_output=True, text=True, check=False)
    assert found.stdout.split()[-1] == str(loaded != "triton")


def test_bare_moeq_prints_help() -> None:
    result = subprocess.run(COMMAND, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
    assert "inspect" in result.stdout


def test_a_shell_completes_commands_and_options() -> None:
    def completed(line: str) -> str:
        words = line.split(" ")
        env = {**os.environ, "_MOEQ_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        return subprocess.run(COMMAND, capture_output=True, text=True, check=False, env=env).stdout

    assert "inspect" in completed("moeq ins").split()
    assert "--tp" in completed("moeq convert --t").split()
    assert "--require" in completed("moeq oracle --r").split()


def test_completion_is_shown() -> None:
    env = {**os.environ, "SHELL": "/bin/bash", "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    result = subprocess.run(
        [*COMMAND, "--show-completion", "bash"], capture_output=True, text=True, check=False, env=env
    )
    assert "_MOEQ_COMPLETE" in result.stdout, result.stderr


@pytest.mark.slow
def test_a_misspelt_backend_is_usage(checkpoints: Path, tmp_path: Path) -> None:
    for argv in (["inspect"], ["oracle"], ["plan"], ["convert", "--dry-run"]):
        words = [argv[0], checkpoints / INT4, *([tmp_path / "out"] if argv[0] == "convert" else []), *argv[1:]]
        line = [*COMMAND, *map(str, words), "--gpu", "H100", "--backend", "marlim"]
        assert subprocess.run(line, capture_output=True, text=True, check=False).returncode == 2


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp437"])
def test_an_encoding_without_arrows_and_boxes(encoding: str, checkpoints: Path) -> None:
    """Nothing is left out for a character that the locale does not have."""

    def answer(name: str) -> tuple[int, str]:
        command = [*COMMAND, "oracle", str(checkpoints / INT4), "--gpu", "A100,H100", "--tp", "1,2"]
        done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": name}, capture_output=True, check=False)
        return done.returncode, done.stdout.decode(name)

    code, text = answer(encoding)
    wanted, whole = answer("utf-8")
    assert "┏" in whole
    assert (code, len(text.splitlines())) == (wanted, len(whole.splitlines()))
    assert re.findall(r"\w{4,}", text.encode().decode("unicode_escape")) == re.findall(r"\w{4,}", whole)
