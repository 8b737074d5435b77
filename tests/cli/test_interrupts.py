"""Ctrl-C and SIGTERM at instants where Python hides them: exit code 130 and one line, or death by the signal."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pipeline.interrupts import default_interrupts

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert

TOLD = "error: interrupted\n"

#: `moeq gpus` (or what follows) with a command that is interrupted where `{body}` says.
SCRIPT = """
import signal, sys, time
from moeq.errors import MoeqError
from moeq.__main__ import main
import moeq.cli.app as app

def interrupt():
    signal.raise_signal(signal.{name})

def parser(name):
    def command(**given):
{body}
    return command

app.parser = parser
sys.argv = ["moeq", "gpus", *sys.argv[1:]]
main()
"""

# Each of them raises something else than KeyboardInterrupt in at least one supported Python, or nothing at all.
DISGUISES = {
    "as it is": "interrupt()",
    "a descriptor's name": """
class Field:
    def __set_name__(self, owner, name):
        interrupt()
type("Owner", (), {"field": Field()})
""",
    "an import in C": """
try:
    interrupt()
except BaseException:
    raise ImportError("numpy._core.multiarray failed to import")
""",
    "a package that seems to be missing": """
try:
    interrupt()
except BaseException:
    raise MoeqError("environment.missing", "numba is not installed", "pip install numba")
""",
    "a finaliser": """
class Held:
    def __del__(self):
        interrupt()
Held()
time.sleep(20)
raise RuntimeError("the interrupt was lost")
""",
    "a subprocess that ends Python": """
try:
    interrupt()
except BaseException:
    raise SystemExit(3)
""",
}


def python(script: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
        preexec_fn=default_interrupts,
    )


def interrupted(body: str, *words: str, name: str = "SIGINT") -> subprocess.CompletedProcess[str]:
    indented = "\n".join(" " * 8 + line for line in body.strip().splitlines())
    return python(SCRIPT.format(body=indented, name=name), *words)


@pytest.mark.cover(every=12)
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
@pytest.mark.parametrize("where", DISGUISES)
def test_an_interrupt_in_disguise(where: str, name: str) -> None:
    done = interrupted(DISGUISES[where], name=name)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", TOLD)


def test_the_document_says_it_too() -> None:
    done = interrupted(DISGUISES["an import in C"], "--json")
    assert (done.returncode, done.stderr) == (130, TOLD)
    assert json.loads(done.stdout)["error"]["code"] == "interrupted.signal"


def test_after_the_answer_there_is_no_second_document() -> None:
    done = interrupted('given["obj"].answer({"rows": []}, None); interrupt()', "--json")
    assert (done.returncode, done.stderr) == (130, TOLD)
    assert json.loads(done.stdout) == {"schema": "moeq.gpus/1", "ok": True, "rows": []}


def test_the_line_imports_nothing() -> None:
    """What was being imported may be left in a state that cannot be imported again, or only with a warning."""
    done = interrupted('sys.modules["rich.text"] = sys.modules["moeq.cli.screen"] = None; interrupt()')
    assert (done.returncode, done.stderr) == (130, TOLD)


def test_a_second_one_while_the_first_is_told() -> None:
    body = "app.Output.failure = lambda *_, **__: interrupt(); interrupt()"
    done = interrupted(body)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_what_failed_before_is_no_interrupt() -> None:
    done = interrupted('raise RuntimeError("nobody thought of it")')
    assert done.returncode == 70
    assert "RuntimeError: nobody thought of it" in done.stderr


@pytest.mark.parametrize("module", ["moeq.cli.app", "typer", "moeq.errors"])
def test_while_the_command_is_imported(module: str) -> None:
    script = f"""
import signal, sys
from moeq.__main__ import main

class Finder:
    def find_spec(name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Finder)
sys.argv = ["moeq", "gpus"]
main()
"""
    done = python(script)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_stays_ignored_where_the_parent_ignores_it() -> None:
    """`nohup`, and jobs that a shell without job control puts into the background."""
    script = "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SCRIPT
    body = '        interrupt(); given["obj"].answer({"rows": []}, None)'
    done = python(script.format(body=body, name="SIGINT"), "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["ok"]


def test_a_process_that_waits_at_its_end() -> None:
    """After the answer, while Python ends, the signal ends it: no traceback of a module that was being cleared."""
    script = """
import atexit, sys, time
from moeq.__main__ import main
atexit.register(lambda: (print("ending", flush=True), time.sleep(20)))
sys.argv = ["moeq", "--version"]
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_interrupts,
    )
    assert process.stdout is not None
    while process.stdout.readline() != "ending\n":
        assert process.poll() is None
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=15)
    assert (process.returncode, stderr) == (-signal.SIGINT, "")


def processes_of(session: int, words: str) -> list[int]:
    """Processes of a session whose command line holds these words."""
    listed = subprocess.run(
        ["ps", "ww", "-s", str(session), "-o", "pid=,stat=,args="], capture_output=True, text=True, check=False
    ).stdout.splitlines()
    rows = [line.split(None, 2) for line in listed]
    return [int(row[0]) for row in rows if not row[1].startswith("Z") and words in row[2]]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ps of procps")
@pytest.mark.parametrize("to_all", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["Ctrl-C", "SIGTERM"])
def test_processes_that_check_layers_end_as_well(checkpoints: Path, tmp_path: Path, to_all: bool) -> None:
    """A terminal interrupts all processes, which are at their imports here; a scheduler may end the first alone."""
    source, out = checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out"
    convert(source, out, Deployment(gpu=parse_gpu("A100")), workers=1)
    words = ["run-check", str(out), "--source", str(source), "--jobs", "2", "--quiet"]
    process = subprocess.Popen(
        [sys.executable, "-c", "from moeq.__main__ import main; main()", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=default_interrupts,
        start_new_session=True,
    )
    while len(processes_of(process.pid, "spawn_main")) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    if to_all:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=100)
    assert (process.returncode, stderr) == (130, TOLD)
    assert not processes_of(process.pid, "spawn_main")
