"""Every read of a file fails once: EIO, ESTALE, EINTR, a short read, an early end, a wrong bit; for every command.

A short read changes nothing. Whatever else happens is either noticed, with a file's name, or had no effect; then the
same command runs again and is right. Wrong bits are noticed at the latest by a comparison with the source; with
`--reread`, those of tensors are noticed at once. Reads that Python's own file objects make are not covered.
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
from attacks.injection import READ_FAULTS, ReadFault, ReadInjector, count_reads

#: Commands, and the folder that each writes.
COMMANDS = {
    "inspect": None,
    "convert": "out",
    "shard": "out",
    "finalize": "out",
    "verify": None,
    "verify --source": None,
    "restore": "back",
    "transcode": "recoded",
    "diff": None,
    "run-check": None,
}

#: A command may end so after a fault; 70 is a bug and 2 would blame the user.
ENDS = {0, 1, 3, 4, 5}


@dataclass
class Scene:
    """One command, from the same beginning every time."""

    name: str
    home: Path
    beginning: Path
    wanted: dict[str, bytes] | None

    @property
    def source(self) -> Path:
        return self.beginning.parent / "source"

    @property
    def output(self) -> Path | None:
        folder = COMMANDS[self.name]
        return None if folder is None else self.home / folder

    def reset(self) -> None:
        for path in self.home.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        shutil.copytree(self.beginning, self.home, dirs_exist_ok=True, copy_function=shutil.copy2)

    def run(self, prepare: Callable[[], object] = lambda: None, *more: str) -> Answer:
        convert = ["convert", self.source, self.home / "out", "--gpu", "a100", "--workers", "1"]
        words = {
            "inspect": ["inspect", self.source, "--gpu", "a100"],
            "convert": convert,
            "shard": [*convert, "--shard", "0/2"],
            "finalize": ["finalize", self.home / "out"],
            "verify": ["verify", self.home / "done", "--workers", "1"],
            "verify --source": ["verify", self.home / "done", "--source", self.source, "--workers", "1"],
            "restore": ["restore", self.home / "done", self.home / "back", "--workers", "1"],
            "transcode": ["transcode", self.source, self.home / "recoded", "--to", "gptq_v2", "--workers", "1"],
            "diff": ["diff", self.source, self.home / "done"],
            "run-check": ["run-check", self.home / "done", "--digests-only"],
        }[self.name]
        return command(*words, *more, prepare=prepare)

    def check(self, number: int, fault: ReadFault) -> str:
        """Inject one fault; what it came to."""
        self.reset()
        where = (self.name, number, fault)
        answer = self.run(ReadInjector(number, fault).install)
        assert answer.code in ENDS, (where, answer)
        assert "Traceback" not in answer.err
        if fault == "short":
            assert answer.code == 0, (where, answer)
        if answer.code > 1 and fault in ("EIO", "ESTALE"):
            self.names_a_file(answer, where)
        wrong = False
        if answer.code == 0 and self.output is not None and self.name != "shard":
            assert self.wanted is not None
            wrong = contents(self.output) != self.wanted
            assert not wrong or fault == "wrong", (where, "wrong bytes")
            if wrong:
                self.is_told(where)
        if not wrong:
            self.finish(where, fault)
        return "unharmed" if answer.code == 0 and not wrong else "told later" if wrong else "refused"

    def names_a_file(self, answer: Answer, where: object) -> None:
        message = answer.document["error"]["message"]
        folders = (self.source, *(path for path in self.home.iterdir()), self.home)
        names = {path.name for folder in folders if folder.is_dir() for path in (folder, *folder.rglob("*"))}
        assert any(name in message for name in names | {"tensor "}), (where, answer)

    def is_told(self, where: object) -> None:
        """Wrong bits that were read once got into the output: a comparison with the source tells."""
        if self.name == "transcode":
            told = command("diff", self.source, self.output or "")
            same_values = told.code == 0  # then the bits are outside of weights, in a copied file or tensor
            assert same_values or told.code in (1, 4), (where, told)
            return
        assert self.name in ("convert", "finalize"), (where, "only what reads a source once may be wrong")
        told = command("verify", self.output or "", "--source", self.source)
        assert told.code in (1, 4), (where, told)

    def finish(self, where: object, fault: ReadFault) -> None:
        if self.output is None:
            return
        if self.output.exists() and self.wanted is not None and contents(self.output) == self.wanted:
            return
        answer = self.run()
        if fault == "wrong" and answer.error == "source.changed":
            return  # the source was recognised by wrong bits, so that its work is not continued
        assert answer.code == 0, (where, answer)
        if self.name != "shard":
            assert contents(self.output) == self.wanted, where


@pytest.fixture(scope="session")
def scenes(pristine: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Scene]:
    made: dict[str, Scene] = {}

    def scene(name: str) -> Scene:
        if name not in made:
            place = tmp_path_factory.mktemp("reads")
            shutil.copytree(pristine / "source", place / "source")
            (place / "home").mkdir()
            made[name] = begin(name, place)
        return made[name]

    return scene


def begin(name: str, place: Path) -> Scene:
    """Prepare the folder that a command starts from, and what it has to end with."""
    beginning = place / "beginning"
    beginning.mkdir()
    scene = Scene(name, place / "home", beginning, None)
    if name in ("verify", "verify --source", "restore", "diff", "run-check"):
        first = command("convert", scene.source, beginning / "done", "--gpu", "a100", "--workers", "1")
        assert first.code == 0, first
    elif name == "finalize":
        for index in range(2):
            argv = ["convert", scene.source, beginning / "out", "--gpu", "a100", "--shard", f"{index}/2"]
            assert command(*argv).code == 0
    scene.reset()
    answer = scene.run()
    assert answer.code == 0, answer
    if scene.output is not None and name != "shard":
        scene.wanted = contents(scene.output)
    return scene


@pytest.fixture(scope="session")
def reads(scenes: Callable[[str], Scene]) -> Callable[[str], int]:
    found: dict[str, int] = {}

    def count(name: str) -> int:
        if name not in found:
            scene = scenes(name)
            scene.reset()
            found[name] = count_reads(scene.run)
        return found[name]

    return count


@pytest.mark.cover(every=30)
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("fault", READ_FAULTS)
def test_some_read_faults(
    scenes: Callable[[str], Scene], reads: Callable[[str], int], name: str, fault: ReadFault
) -> None:
    """Two of each kind, others for every kind."""
    total = reads(name)
    assert total > 5
    dice = random.Random(f"{name} {fault}")
    for number in dice.sample(range(total), 2):
        scenes(name).check(number, fault)


@pytest.mark.night
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", COMMANDS)
def test_all_read_faults(scenes: Callable[[str], Scene], reads: Callable[[str], int], name: str) -> None:
    """Every read, every fault. With MOEQ_FAULTS=FILE the counts are appended there."""
    found = {"command": name, "reads": reads(name), "unharmed": 0, "refused": 0, "told later": 0}
    for number in range(reads(name)):
        for fault in READ_FAULTS:
            found[scenes(name).check(number, fault)] += 1
    assert found["refused"] > found["reads"]
    if "MOEQ_FAULTS" in os.environ:
        with open(os.environ["MOEQ_FAULTS"], "a") as file:
            file.write(json.dumps(found) + "\n")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convert", "transcode"])
def test_wrong_bytes_are_noticed_with_reread(scenes: Callable[[str], Scene], name: str) -> None:
    """A wrong bit in any read of a tensor: without `--reread` some get into the output, with it none."""
    scene = scenes(name)
    weights = {path.name: path for path in scene.source.glob("*.safetensors")}
    starts = {file: 8 + int.from_bytes(path.read_bytes()[:8], "little") for file, path in weights.items()}

    def is_tensor(fd: int, position: int) -> bool:
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        return path.parent == scene.source and position >= starts.get(path.name, 1 << 62)

    scene.reset()
    total = count_reads(scene.run, is_tensor)
    assert total > 10
    dice = random.Random(name)
    got_in = 0
    for number in dice.sample(range(total // 2, total), 6):  # the first are a sample that recognises the source
        scene.reset()
        assert scene.run(ReadInjector(number, "wrong", is_tensor).install).code in (0, 1, 4)
        assert scene.output is not None
        got_in += scene.output.exists() and contents(scene.output) != scene.wanted
        scene.reset()
        answer = scene.run(ReadInjector(number, "wrong", is_tensor).install, "--reread")
        assert (answer.code, answer.error) == (4, "source.reads-differ"), (number, answer)
        assert not scene.output.exists()
    assert got_in or name == "transcode"  # whose reference path may read again what the fast path declines
    scene.reset()
    assert scene.run(lambda: None, "--reread").code == 0
    assert contents(scene.output or scene.home) == scene.wanted
