"""Kill commands that write, thousands of times, and look at what each death leaves: `make crash`.

    python tests/attacks/kills.py [--kills 10000] [--seed 1] [--results FILE]

Each command is a fork of this process that has everything loaded, on a checkpoint of 0.6 MB in memory, so that a death
costs a fraction of a second. It dies by SIGKILL: at a random instant, right before a random call that changes files,
right after it, or in the middle of a write. Up to ten deaths, of whatever commands belong together, happen to one
folder before it is brought to its end. After every single one:

* a folder with the final name holds the whole result, or the one that was there before, byte for byte;
* the work folder does not open as a conversion unless it is complete;
* source, input and files of somebody else's are untouched;
* nothing lies beside them but the work folder, the folder that gives way, and journals.

At the end the same commands finish what is left; the result is that of an undisturbed run, and nothing else remains.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

import torch  # noqa: E402
from attacks.conftest import Answer, command, contents, tree  # noqa: E402 - the path above
from attacks.injection import Injector, count_changes  # noqa: E402

from moeq.cli.app import run  # noqa: E402

CHECKPOINT = ROOT / "tests" / "data" / "checkpoints" / "gptq-int4-g32-qwen3moe"

#: Exit codes of a command that found its work done by an earlier one, or left to do by another.
_DONE = (0, 1, 2)

Words = tuple[object, ...]


@dataclass(frozen=True)
class Play:
    """Commands that write one result together.

    Attributes:
        acts: any of these may die, in any order.
        last: brings whatever is left to the end.
        old: whether there is a result already, which gives way.
    """

    acts: tuple[str, ...]
    last: str
    old: bool = False


PLAYS = {
    "convert": Play(("convert",), "convert"),
    "convert --force": Play(("convert --force",), "convert --force", old=True),
    "shards": Play(("shard 0", "shard 1", "finalize"), "convert"),
    "finalize": Play(("shard 0", "shard 1", "finalize", "finalize"), "finalize"),
    "finalize --force": Play(("finalize --force",), "finalize --force", old=True),
    "restore": Play(("restore",), "restore"),
    "transcode": Play(("transcode",), "transcode"),
    "transcode --force": Play(("transcode --force",), "transcode --force", old=True),
}


class Broken(AssertionError):
    """A death left something that it must not leave."""


class Theatre:
    """A folder with a source, its conversion, and somebody else's files; commands work beside them.

    Attributes:
        tally: what happened, by name.
    """

    def __init__(self, home: Path, seed: int) -> None:
        self.home, self.stage = home, home / "stage"
        self.dice = random.Random(seed)
        self.tally: Counter[str] = Counter()
        shutil.copytree(CHECKPOINT, home / "source")
        (home / "theirs").mkdir()
        (home / "theirs" / "thesis.tex").write_text("years of work")
        self.stage.mkdir()
        self.out = self.stage / "out"
        self.wanted: dict[str, dict[str, bytes]] = {}
        self.seconds: dict[str, float] = {}
        self.changes: dict[str, int] = {}
        self.before: dict[str, tuple[object, ...]] = {}
        self._rehearse()
        # A fork that counts or moves all objects of this process would do little else.
        gc.disable()
        gc.freeze = gc.unfreeze = lambda: None
        gc.get_freeze_count = lambda: 0

    def words(self, act: str) -> Words:
        source, name = self.home / "source", act.split(" ")[0]
        force = ("--force",) if act.endswith("--force") else ()
        if name == "restore":
            return ("restore", self.home / "done", self.out)
        if name == "transcode":
            return ("transcode", source, self.out, "--to", "compressed-tensors", "--workers", "1", *force)
        if name == "finalize":
            return ("finalize", self.out, *force)
        shard = ("--shard", f"{act[-1]}/2") if name == "shard" else ()
        return ("convert", source, self.out, "--gpu", "a100", "--workers", "1", *shard, *force)

    def start(self, act: str, **options: object) -> Answer:
        return command(*self.words(act), **options)  # type: ignore[arg-type]

    def _rehearse(self) -> None:
        """Every command undisturbed: its result, how long it takes, how many changes it makes."""
        self._load("convert")
        shutil.move(self.out, self.home / "done")
        done = contents(self.home / "done")
        self.before = tree(self.home / "source", self.home / "theirs", self.home / "done")
        for act in sorted({act for play in PLAYS.values() for act in (*play.acts, play.last)}):
            for measured in (None, False, True):
                if act.startswith("finalize"):
                    self._must(self.start("shard 0"))
                    self._must(self.start("shard 1"))
                if measured is None:
                    self._load(act)
                elif measured:
                    self.changes[act] = count_changes(lambda prepare, act=act: self.start(act, prepare=prepare))
                else:
                    self.seconds[act] = self._must(self.start(act)).seconds
                if act.startswith(("transcode", "restore")):
                    self.wanted[act.split(" ")[0]] = contents(self.out)
                elif self.out.exists() and contents(self.out) != done:
                    raise Broken(f"{act} gives another result")
                self._clear()
        if self.wanted["restore"] != contents(self.home / "source"):
            raise Broken("restore gives something else than the source")
        self.wanted["convert"] = done

    def _load(self, act: str) -> None:
        """Run a command in this process, so that its forks have everything loaded."""
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            code = run([*map(str, self.words(act)), "--json"])
        if code != 0:
            raise Broken(f"an undisturbed {act} failed: exit code {code}")

    def _must(self, answer: Answer) -> Answer:
        if answer.code != 0:
            raise Broken(f"an undisturbed run failed: {answer}")
        return answer

    def _clear(self) -> None:
        shutil.rmtree(self.stage)
        self.stage.mkdir()

    def play(self, name: str) -> None:
        """One round: deaths, then the end."""
        play = PLAYS[name]
        wanted = self.wanted[name.split(" ")[0] if name.split(" ")[0] in self.wanted else "convert"]
        if name == "finalize --force":  # shards refuse to begin where there is a result
            self._must(self.start("shard 0"))
            self._must(self.start("shard 1"))
        old = self._older(wanted) if play.old else None
        for _ in range(self.dice.randint(1, 10)):
            act = self.dice.choice(play.acts)
            how = self._kill(act)
            self.tally[how] += 1
            self._look(f"{name}: {act}, {how}", wanted, old)
            if how in ("instant", "before", "after", "within"):
                self.tally["kills"] += 1
                self.tally[f"kills of {name}"] += 1
                self.tally["kills when the result stood"] += self.out.exists() and contents(self.out) == wanted
        self._finish(name, play, wanted, old)
        self.tally["rounds"] += 1
        self._clear()

    def _older(self, wanted: dict[str, bytes]) -> dict[str, bytes]:
        """Put an earlier result in the place of the new one."""
        self.out.mkdir()
        for file, data in wanted.items():
            (self.out / file).write_bytes(data)
        changed = "generation_config.json" if "generation_config.json" in wanted else "config.json"
        (self.out / changed).write_bytes(b"{}")  # an older one
        return contents(self.out)

    def _kill(self, act: str) -> str:
        """Start a command and kill it; what came of it."""
        if self.dice.random() < 0.5:
            answer = self.start(act, seconds=self.dice.uniform(0, 1.1 * self.seconds[act]))
            return "instant" if answer.code == 137 else self._ended(act, answer)
        fault = self.dice.choice(("kill", "kill after"))
        number = self.dice.randrange(self.changes[act])
        answer = self.start(act, prepare=Injector(number, fault).install)
        if answer.code != -9:
            return self._ended(act, answer)
        return "before" if fault == "kill" else "after"  # of a write: in its middle

    def _ended(self, act: str, answer: Answer) -> str:
        if answer.code not in _DONE or "Traceback" in answer.err:
            raise Broken(f"{act} ended by itself: {answer}")
        return "outlived" if answer.code == 0 else "had nothing to do"

    def _look(self, when: str, wanted: dict[str, bytes], old: dict[str, bytes] | None) -> None:
        """What a death left."""
        if self.out.exists():
            have = contents(self.out)
            if have not in (wanted, old):
                raise Broken(f"{when}: half a result: {differences(have, wanted)}")
        partial = self.stage / "out.moeq-partial"
        if (partial / "moeq.json").exists() and opens(partial):
            have = contents(partial)
            missing = [name for name, data in wanted.items() if have.get(name) != data]
            if missing:
                raise Broken(f"{when}: the work folder opens as a conversion and lacks {missing}")
        strange = [path.name for path in self.stage.iterdir() if not is_known(path.name)]
        if strange:
            raise Broken(f"{when}: {strange} lies about")
        if tree(self.home / "source", self.home / "theirs", self.home / "done") != self.before:
            raise Broken(f"{when}: files of somebody else's were touched")

    def _finish(self, name: str, play: Play, wanted: dict[str, bytes], old: dict[str, bytes] | None) -> None:
        for act in (*(("shard 0", "shard 1") if play.last == "finalize" else ()), play.last):
            answer = self.start(act)
            if answer.code not in (0, 2) or (answer.code == 2 and not self.out.exists()):
                raise Broken(f"{name}: what was left cannot be finished: {act}: {answer}")
        if contents(self.out) != wanted:
            raise Broken(f"{name}: another result: {differences(contents(self.out), wanted)}")
        left = [path.name for path in self.stage.iterdir() if path.name != "out"]
        if left:
            raise Broken(f"{name}: {left} remains")


def is_known(name: str) -> bool:
    """Whether a name beside the result is one that moeq uses while it works."""
    return name in ("out", "out.moeq-partial", "out.moeq-old") or name.startswith("out.moeq-partial.moeq-journal")


def differences(have: dict[str, bytes], wanted: dict[str, bytes]) -> list[str]:
    return sorted(name for name in have.keys() | wanted.keys() if have.get(name) != wanted.get(name))


def opens(folder: Path) -> bool:
    import moeq

    try:
        return moeq.open(folder).kind == "converted"
    except moeq.MoeqError:
        return False


def rounds(dice: random.Random) -> Iterator[str]:
    """Names of plays, each as often as the others."""
    while True:
        names = list(PLAYS)
        dice.shuffle(names)
        yield from names


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, help="stop then, however many there were")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, help="write the counts there as well, after every 500 deaths")
    parser.add_argument("--folder", type=Path, help="where to work [memory, else the temporary folder]")
    options = parser.parse_args()
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    started = time.monotonic()
    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    with tempfile.TemporaryDirectory(prefix="moeq-kills-", dir=options.folder or memory) as scratch:
        theatre = Theatre(Path(scratch), options.seed)

        def counts() -> str:
            found = {"schema": "moeq.kills/1", "seed": options.seed, "seconds": round(time.monotonic() - started, 1)}
            return json.dumps({**found, "broken": 0, **dict(sorted(theatre.tally.items()))}, indent=2) + "\n"

        shown = 0
        for name in rounds(theatre.dice):
            ended = options.seconds is not None and time.monotonic() - started > options.seconds
            if ended or theatre.tally["kills"] >= options.kills:
                break
            theatre.play(name)
            if options.results and theatre.tally["kills"] - shown >= 500:
                shown = theatre.tally["kills"]
                options.results.write_text(counts())
        print(counts(), end="")
        if options.results:
            options.results.write_text(counts())
    return 0


if __name__ == "__main__":
    sys.exit(main())
