"""Kill a conversion again and again, damage what it left, go on, and compare every byte with an undisturbed run.

    python examples/bench/torture.py [--kills 200] [--seed 0] [--model small --format gptq --layout ID --layers 6]

Four kinds of death, all by SIGKILL, each followed by the same conversion on what was left:

* at a random instant within the time that a conversion takes;
* before every single operation on the file system that Python reports to audit hooks (opening for writing, renaming,
  removing, truncating), one after the other;
* at a random instant with a power cut simulated: tails of output files are cut off, zeroed or filled with old bytes,
  files vanish, the journal's last line is torn;
* of single shards of a conversion in three shards at once, and of the process that finalises them, also before every
  single operation of it.

After every death nothing may look finished that is not: a folder with the final name is complete, and what is left of
the work either cannot be opened as a conversion or is complete as well. Processes are forks of one that has everything
loaded, so that deaths fall into the conversion and not into imports.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import checkpoint_formats
import make_checkpoint

import moeq
from moeq.pipeline.state.folder import PARTIAL_SUFFIX

#: What changes the file system, of the events that Python's audit hooks see.
CHANGES = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "shutil.rmtree", "shutil.copyfile"}


@dataclass
class Tally:
    """What happened.

    Attributes:
        kills: processes killed before they were done.
        late: deaths after the final folder was in place.
        outlived: processes that finished before their death came.
        damages: files damaged as by a power cut.
        rounds: conversions brought to an end and compared.
        resumed: units that runs found finished by an earlier one.
        points: operations before which a process was killed.
    """

    kills: int = 0
    late: int = 0
    outlived: int = 0
    damages: int = 0
    rounds: int = 0
    resumed: int = 0
    points: int = 0


class Torture:
    """One source, one layout, one place to convert to."""

    def __init__(self, source: Path, layout: str, folder: Path, seed: int) -> None:
        self.source, self.layout = source, layout
        self.folder = folder
        self.out = folder / "out"
        self.partial = folder / ("out" + PARTIAL_SUFFIX)
        self.random = random.Random(seed)
        self.tally = Tally()
        # The first run loads and compiles everything; the second tells how long one takes.
        self.convert()
        shutil.rmtree(self.out)
        started = time.monotonic()
        self.convert()
        self.seconds = time.monotonic() - started
        self.wanted = content(self.out)
        shutil.rmtree(self.out)

    def convert(self, shard: str | None = None) -> int:
        """Run to the end in this process; units that were found finished."""
        deployment = moeq.Deployment(gpu=moeq.gpu("H100"))
        done = moeq.convert(
            self.source, self.out, deployment, layout=self.layout, force_layout=True, workers=2, shard=shard
        )
        return done.resumed_units

    def finalize(self) -> None:
        """Publish shards, in this process."""
        moeq.finalize(self.out, workers=2)

    def fork(self, work: Callable[[], object], prepare: Callable[[], None] = lambda: None) -> int:
        """Do work in a process of its own. It ends with 0, or with 70 and a traceback."""
        child = os.fork()
        if child:
            return child
        code = 70
        try:
            prepare()
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - this process ends here, whatever it was
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stderr.flush()
            os._exit(code)

    def kill_some_time(self, work: Callable[[], object]) -> bool:
        """Start, wait, kill; whether it died of that."""
        child = self.fork(work)
        time.sleep(self.random.uniform(0, 1.1 * self.seconds))
        os.kill(child, signal.SIGKILL)
        return self.reap(child)

    def reap(self, child: int) -> bool:
        """Wait for a process; whether it was killed. Counts it, and checks what it left."""
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        if not killed and os.waitstatus_to_exitcode(status) != 0:
            raise SystemExit(f"a conversion failed by itself: status {status}")
        if killed:
            self.tally.kills += 1
            self.tally.late += self.out.exists()
        else:
            self.tally.outlived += 1
        self.check_looks()
        return killed

    def check_looks(self) -> None:
        """Check that no unfinished folder looks finished."""
        if self.out.exists():
            self.compare(self.out)
        if self.partial.exists() and opens(self.partial):
            have = content(self.partial)
            wrong = [name for name, data in self.wanted.items() if have.get(name) != data]
            if wrong:
                raise SystemExit(f"{self.partial} opens as a conversion and is not complete: {wrong}")

    def compare(self, folder: Path) -> None:
        have = content(folder)
        if have != self.wanted:
            wrong = sorted(name for name in have.keys() | self.wanted.keys() if have.get(name) != self.wanted.get(name))
            raise SystemExit(f"{folder} is not what an undisturbed run writes: {wrong}")

    def finish(self) -> None:
        """Bring the conversion to its end in this process, compare, start over."""
        if not self.out.exists():
            self.tally.resumed += self.convert()
        self.compare(self.out)
        if self.partial.exists():
            raise SystemExit(f"{self.partial} was left behind")
        shutil.rmtree(self.out)
        self.tally.rounds += 1

    def at_random_instants(self, kills: int, *, power: bool = False) -> None:
        """Kill until there were that many; up to four deaths on one folder before it is finished."""
        wanted = self.tally.kills + kills
        while self.tally.kills < wanted:
            for _ in range(self.random.randint(1, 4)):
                self.kill_some_time(self.convert)
                if self.out.exists():
                    break
                if power:
                    self.cut_power()
            self.finish()

    def at_every_change(self, step: int = 1) -> None:
        """Kill before the first operation on the file system, then before the second, and so on to the last."""
        number = 0
        while self.dies_before(number, self.convert):
            self.finish()
            number += step
        self.finish()

    def dies_before(self, number: int, work: Callable[[], object]) -> bool:
        """Whether there was a change of that number before which the work could die."""
        died = self.reap(self.fork(work, lambda: die_before(number, self.folder)))
        self.tally.points += died
        return died

    def in_shards(self, kills: int, count: int = 3) -> None:
        """Kill shards that work at once, and the process that finalises them."""
        wanted = self.tally.kills + kills
        while self.tally.kills < wanted:
            self.do_shards(count, deadly=True)
            while not self.out.exists():
                self.kill_some_time(self.finalize)
            self.finish()

    def do_shards(self, count: int, *, deadly: bool) -> None:
        """All shards, at once and again until each has come to its end; with `deadly` one of them dies each time."""
        left = {f"{index}/{count}" for index in range(count)}
        while left:
            children = {self.fork(lambda shard=shard: self.convert(shard)): shard for shard in sorted(left)}
            if deadly and self.random.random() < 0.8:
                time.sleep(self.random.uniform(0, self.seconds * len(children)))
                os.kill(self.random.choice(list(children)), signal.SIGKILL)
            left = {shard for child, shard in children.items() if self.reap(child)}

    def at_every_change_of_finalize(self, step: int = 1) -> None:
        """Kill before each change that publishing makes."""
        number, died = 0, True
        while died:
            self.do_shards(2, deadly=False)
            died = self.dies_before(number, self.finalize)
            if not self.out.exists():
                self.finalize()
            self.finish()
            number += step

    def cut_power(self) -> None:
        """Damage what lies in the work folder: what was not synced may be lost, zeroed or old after a power cut."""
        files = sorted(path for path in self.partial.glob("*") if path.is_file()) if self.partial.exists() else []
        for path in files:
            size, kind = path.stat().st_size, self.random.choice(("cut", "zero", "old", "none", "none", "gone"))
            at = self.random.randint(0, size)
            if path.suffix == ".jsonl":
                # Its first line is on disk before any other file is made.
                first = path.read_bytes().find(b"\n") + 1
                os.truncate(path, self.random.randint(max(first, size - 400), size))
            elif kind == "cut":
                os.truncate(path, at)
            elif kind == "gone":
                path.unlink()
            elif kind != "none":
                with path.open("r+b") as file:
                    file.seek(at)
                    count = min(size - at, 1 << 20)
                    file.write(bytes(count) if kind == "zero" else self.random.randbytes(count))
            else:
                continue
            self.tally.damages += 1


def die_before(number: int, folder: Path) -> None:
    """Make this process kill itself before its n-th change below `folder`."""
    left = number

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event == "open":
            path, _, flags = arguments
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            # Names without a folder are opened from the descriptor of one.
            changes = writes and ("/" not in str(path) or str(path).startswith(str(folder)))
        else:
            # What is named by a descriptor, or relative to one, is below the folder as well.
            changes = event in CHANGES
        if changes:
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1

    sys.addaudithook(hook)


def opens(folder: Path) -> bool:
    """Whether moeq takes a folder for a finished conversion."""
    try:
        return moeq.open(folder).kind == "converted"
    except moeq.MoeqError:
        return False


def content(folder: Path) -> dict[str, bytes]:
    """Every file's bytes."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200, help="deaths at random instants [200]")
    parser.add_argument("--power-cuts", type=int, default=60, help="deaths with damage after them [60]")
    parser.add_argument("--shard-kills", type=int, default=60, help="deaths of shards and of finalize [60]")
    parser.add_argument("--step", type=int, default=1, help="every how many operations one dies before it [1]; 0: none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=make_checkpoint.MODELS, default="small")
    parser.add_argument("--format", choices=checkpoint_formats.FORMATS, default="gptq")
    parser.add_argument("--layout", default="marlin-wna16/1")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where to work [the temporary folder]")
    options = parser.parse_args()

    import torch

    torch.set_num_threads(1)  # a pool of threads would not survive a fork
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        source, size = Path(scratch) / "source", make_checkpoint.Size(options.layers, shard_bytes=1 << 20)
        make_checkpoint.write_checkpoint(
            source, make_checkpoint.MODELS[options.model], options.format, size, seed=options.seed
        )
        torture = Torture(source, options.layout, Path(scratch), options.seed)
        started = time.monotonic()
        torture.at_random_instants(options.kills)
        torture.at_random_instants(options.power_cuts, power=True)
        torture.in_shards(options.shard_kills)
        if options.step:
            torture.at_every_change(options.step)
            torture.at_every_change_of_finalize(options.step)
        found = {"seed": options.seed, "one_run": torture.seconds, "seconds": time.monotonic() - started}
        print(json.dumps({"schema": "moeq.torture/1", **found, **asdict(torture.tally)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
