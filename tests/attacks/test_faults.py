"""Every change of a file fails once: then the folder is what it was, can be continued, or is finished and right.

As SQLite's crash tests do it: the n-th call that changes a file returns an error, is cut short, or is the last before
the process dies; then the same command runs again. `make crash` runs all of them, here a few of each kind run.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from attacks.conftest import Answer, command, contents
from attacks.injection import FAULTS, Fault, Injector, count_changes

Prepare = Callable[[], object]

COMMANDS = ("convert", "convert --force", "shard", "finalize", "restore")

#: What a command may end with after a fault: done all the same, disk full, cannot write, or killed.
ENDS = {0, 3, 5, -9}


@dataclass
class Scene:
    """One command, from the same beginning every time.

    Attributes:
        name: of the command.
        home: where it works.
        wanted: what its output holds in the end.
        old: what its output holds before.
    """

    name: str
    home: Path
    beginning: Path
    wanted: dict[str, bytes]
    old: dict[str, bytes] | None

    @property
    def output(self) -> Path:
        return self.home / ("back" if self.name == "restore" else "out")

    def reset(self) -> None:
        for path in self.home.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.beginning, self.home, dirs_exist_ok=True, copy_function=shutil.copy2)

    def run(self, prepare: Prepare = lambda: None) -> Answer:
        source = self.beginning.parent / "source"
        convert = ["convert", source, self.home / "out", "--gpu", "a100", "--workers", "1"]
        words = {
            "convert": convert,
            "convert --force": [*convert, "--force"],
            "shard": [*convert, "--shard", "0/2"],
            "finalize": ["finalize", self.home / "out"],
            "restore": ["restore", self.home / "done", self.home / "back"],
        }[self.name]
        return command(*words, prepare=prepare)

    def finish(self) -> None:
        """Bring what is left of the work to its end, whoever has to do it."""
        finished = self.output.exists() and contents(self.output) == self.wanted
        answer = self.run()
        # A source that was restored is no output of moeq: it is refused, after what was left beside it is removed.
        done = answer.code == 2 and (finished if self.name == "restore" else "already" in answer.err)
        assert answer.code == 0 or done, answer
        if self.name == "shard" and not self.output.exists():
            other = Scene("convert", self.home, self.beginning, self.wanted, None).run()
            assert other.code == 0, other

    def check(self, number: int, fault: Fault) -> str:
        """Inject one fault; what it came to."""
        self.reset()
        answer = self.run(Injector(number, fault).install)
        assert answer.code in ENDS, (self.name, number, fault, answer)
        assert "Traceback" not in answer.err
        had = contents(self.output) if self.output.exists() else None
        if had is not None:
            assert had in (self.wanted, self.old), (self.name, number, fault, "half an output")
        if answer.code == 0 and self.name != "shard":
            assert had == self.wanted, (self.name, number, fault)
        self.finish()
        assert contents(self.output) == self.wanted, (self.name, number, fault)
        left = {path.name for path in self.home.iterdir()} - {"out", "back", "done"}
        assert not left, (self.name, number, fault, left)
        return "unharmed" if answer.code == 0 else "killed" if answer.code < 0 else "refused"


@pytest.fixture(scope="session")
def scenes(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    made: dict[str, Scene] = {}

    def scene(name: str) -> Scene:
        if name not in made:
            place = tmp_path_factory.mktemp("faults")
            shutil.copytree(pristine / "source", place / "source")
            (place / "beginning").mkdir()
            (place / "home").mkdir()
            made[name] = begin(name, place)
        return made[name]

    return scene


def begin(name: str, place: Path) -> Scene:
    """Prepare the folder that a command starts from, and what it has to end with."""
    first = Scene("convert", place / "home", place / "beginning", {}, None)
    assert first.run().code == 0
    converted = contents(first.output)
    beginning, old, wanted = place / "beginning", None, converted
    if name == "restore":
        shutil.copytree(first.output, beginning / "done")
        wanted = contents(place / "source")
    elif name == "convert --force":
        shutil.copytree(first.output, beginning / "out")
        (beginning / "out" / "quantize_config.json").write_bytes(b"{}")  # an older one
        old = contents(beginning / "out")
    elif name == "finalize":
        for index in range(2):
            argv = ["convert", place / "source", beginning / "out", "--gpu", "a100", "--shard", f"{index}/2"]
            assert command(*argv).code == 0
    shutil.rmtree(first.output)
    return Scene(name, place / "home", beginning, wanted, old)


@pytest.fixture(scope="session")
def changes(scenes: Callable[[str], Scene]) -> Callable[[str], int]:
    found: dict[str, int] = {}

    def count(name: str) -> int:
        if name not in found:
            scene = scenes(name)
            scene.reset()
            found[name] = count_changes(scene.run)
        return found[name]

    return count


@pytest.mark.cover(every=30)
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("fault", FAULTS)
def test_some_faults(
    scenes: Callable[[str], Scene], changes: Callable[[str], int], name: str, fault: Fault, turn: int
) -> None:
    """Three of each kind, others for every kind."""
    total = changes(name)
    assert total > 20
    dice = random.Random(f"{name} {fault}")
    scenes(name).check(dice.sample(range(total), 3)[turn], fault)


@pytest.mark.night
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", COMMANDS)
def test_all_faults(scenes: Callable[[str], Scene], changes: Callable[[str], int], name: str) -> None:
    """Every change, every fault. With MOEQ_FAULTS=FILE the counts are appended there."""
    found = {"command": name, "changes": changes(name), "injected": 0, "unharmed": 0, "refused": 0, "killed": 0}
    for number in range(changes(name)):
        for fault in FAULTS:
            found["injected"] += 1
            found[scenes(name).check(number, fault)] += 1
    assert found["killed"] > found["changes"] / 2
    if "MOEQ_FAULTS" in os.environ:
        with open(os.environ["MOEQ_FAULTS"], "a") as file:
            file.write(json.dumps(found) + "\n")
