"""The driver of a GPU session, with commands of our own in place of the steps, and every step rehearsed."""

from __future__ import annotations

import json
import sys
import tarfile
import time
from pathlib import Path

import pytest

from bench import gpu_session, session_steps
from bench.gpu_session import MARKS, TUNING, Session, conduct, packer, verdict, words
from bench.session_steps import STEPS, Step, table

LOG = "python -c \"import os, sys; open('{out}/ran', 'a').write('%s ' + os.environ['CUDA_VISIBLE_DEVICES'] + chr(10))\""


def step(name: str, code: int = 0, **options: object) -> Step:
    ends = f'; sys.exit({code})"' if code else '"'
    return Step(name, options.pop("minutes", 1), LOG[:-1] % name + ends, "", **options)  # type: ignore[arg-type]


def session(folder: Path, steps: list[Step], gpus: list[str], seconds: float = 600) -> Session:
    folder.mkdir(exist_ok=True)
    return Session(folder, time.monotonic() + seconds, gpus, list(steps))


def ran(folder: Path) -> list[list[str]]:
    return [line.split() for line in (folder / "ran").read_text().splitlines()]


def test_steps_run_in_order_and_are_written_down(tmp_path: Path) -> None:
    made = session(tmp_path, [step("one"), step("two", 3), step("three")], ["5"])
    conduct(made)
    assert ran(tmp_path) == [["one", "5"], ["two", "5"], ["three", "5"]]
    found = json.loads((tmp_path / "session.json").read_text())["steps"]
    assert {name: (row["status"], row["code"]) for name, row in found.items()} == {
        "one": ("done", 0), "two": ("failed", 3), "three": ("done", 0),
    }  # fmt: skip


def test_what_failed_takes_those_after_it_along(tmp_path: Path) -> None:
    made = session(tmp_path, [step("one", 1), step("two", after=("one",)), step("three", after=("two",))], ["0"])
    conduct(made)
    assert [name for name, _ in ran(tmp_path)] == ["one"]
    assert made.steps["two"]["reason"] == "one did not end well"
    assert made.steps["three"]["status"] == "left out"


def test_two_gpus_share_the_steps_and_come_together_for_those_of_two(tmp_path: Path) -> None:
    steps = [step("pair", gpus=2), *(step(f"s{number}") for number in range(4))]
    conduct(session(tmp_path, steps, ["0", "1"]))
    found = ran(tmp_path)
    assert {gpu for _, gpu in found[:-1]} <= {"0", "1"}
    assert sorted(name for name, _ in found) == ["pair", "s0", "s1", "s2", "s3"]
    assert found[-1] == ["pair", "0,1"]


def test_a_step_for_two_gpus_is_left_out_on_one(tmp_path: Path) -> None:
    made = session(tmp_path, [step("pair", gpus=2)], ["0"])
    conduct(made)
    assert made.steps["pair"]["reason"] == "it needs 2 GPUs, 1 are here"


def test_nothing_begins_that_would_not_end_in_time(tmp_path: Path) -> None:
    made = session(tmp_path, [step("long", minutes=9), step("short", minutes=1)], ["0"], 120)
    conduct(made)
    assert [name for name, _ in ran(tmp_path)] == ["short"]
    assert "minutes were left" in made.steps["long"]["reason"]


def test_a_step_that_outlasts_its_time_is_stopped_with_all_that_it_started(tmp_path: Path) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(60)'])"
    begin = time.monotonic()
    made = session(tmp_path, [Step("slow", 0.01, f'python -c "{child}"', "")], ["0"], 30)
    conduct(made)
    assert made.steps["slow"]["status"] == "cut off"
    assert time.monotonic() - begin < 20


def test_a_missing_module_is_said(tmp_path: Path) -> None:
    made = session(tmp_path, [step("one", module="no_such_module")], ["0"])
    conduct(made)
    assert made.steps["one"]["reason"] == "no_such_module is not installed"


def test_results_are_packed_after_every_step(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    made = session(folder, [step("one")], ["0"])
    made.saved = packer(tmp_path / "results.tar.gz")
    conduct(made)
    with tarfile.open(tmp_path / "results.tar.gz") as packed:
        assert set(packed.getnames()) == {"one.log", "ran", "session.json"}


def test_words_go_before_those_of_a_server() -> None:
    one = Step("one", 1, "python a.py --out {out}/x -- --tensor-parallel-size 2", "")
    assert words(one, Path("r"), "--layers 1") == [
        sys.executable, "a.py", "--out", "r/x", "--layers", "1", "--", "--tensor-parallel-size", "2",
    ]  # fmt: skip


def test_only_asking_for_a_gpu_is_a_good_end() -> None:
    assert verdict(0, "") == ""
    assert verdict(1, "Traceback\nAssertionError: Torch not compiled with CUDA enabled") == ""
    assert verdict(2, "usage: serve.py\nerror: unrecognized arguments: --rounds") != ""
    assert verdict(1, "TypeError: random_experts() missing 1 required positional argument") != ""
    assert verdict(1, "ModuleNotFoundError: No module named 'vllm'", "vllm") == ""
    assert verdict(1, "ModuleNotFoundError: No module named 'vllm'") != ""
    assert verdict(None, "") != ""


def test_the_table_in_the_log_is_that_of_the_steps() -> None:
    text = TUNING.read_text()
    assert text.split(MARKS[0])[1].split(MARKS[1])[0].strip().splitlines() == table()


def test_steps_follow_what_they_need_and_have_names_of_their_own() -> None:
    names = [one.name for one in STEPS]
    assert len(set(names)) == len(names)
    for number, one in enumerate(STEPS):
        assert set(one.after) <= set(names[:number])
        assert one.minutes * 60 + gpu_session.RESERVE < 9.5 * 60


@pytest.mark.slow
@pytest.mark.parametrize("name", [one.name for one in session_steps.STEPS])
def test_every_command_runs_up_to_where_it_asks_for_a_gpu(name: str) -> None:
    assert gpu_session.rehearse([one for one in STEPS if one.name == name], 300) == 0
