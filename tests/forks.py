"""Commands in processes of their own that share one start: a process that has imported everything forks for each.

For settings that libraries read when they are imported: all commands of one starter have the same.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

STARTER = """
import json, os, signal, sys
{before}
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from moeq.cli.app import main, run

for argv in {rehearsal}:
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert run(argv) == 0, argv

def command(ask):
    signal.alarm(ask["seconds"])
    for number, path in ((1, ask["out"]), (2, ask["err"])):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    os.environ.update(ask["env"])
    sys.argv = ["moeq", *ask["argv"]]
    exec(ask["first"])
    try:
        main()
    except SystemExit as end:
        return end.code or 0
    finally:
        exec(ask["last"])

for line in sys.stdin:
    child = os.fork()
    if not child:
        code = 70
        try:
            code = command(json.loads(line))
        except BaseException:
            sys.excepthook(*sys.exc_info())
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended: exit code (negative: the signal), what it printed, seconds."""

    code: int
    out: str
    err: str
    seconds: float


@dataclass(frozen=True)
class Starter:
    """A process that starts commands.

    Attributes:
        process: it.
        folder: where the commands' output goes.
    """

    process: subprocess.Popen[str]
    folder: Path

    def run(
        self, *argv: object, seconds: int, env: Mapping[str, str] | None = None, first: str = "", last: str = ""
    ) -> Ended:
        """Run one command line; it is killed after so many seconds.

        Args:
            argv: the words after `moeq`.
            seconds: how long it may take.
            env: variables on top of the starter's.
            first: statements before the command, in its process.
            last: statements after it.
        """
        out, err = self.folder / "stdout", self.folder / "stderr"
        ask = {"argv": [*map(str, argv)], "seconds": seconds, "env": dict(env or {}), "first": first, "last": last}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        begun = time.monotonic()
        self.process.stdin.write(json.dumps({**ask, "out": str(out), "err": str(err)}) + "\n")
        self.process.stdin.flush()
        code = int(self.process.stdout.readline())
        return Ended(code, out.read_text(), err.read_text(), time.monotonic() - begun)


@contextmanager
def starting(
    folder: Path, env: Mapping[str, str], before: str = "", rehearsal: Sequence[Sequence[object]] = ()
) -> Iterator[Starter]:
    """A starter.

    Args:
        folder: where it may write.
        env: its variables.
        before: statements that it begins with.
        rehearsal: command lines that it runs first, so that what they import is there. They may not start threads.
    """
    lines = [[*map(str, argv)] for argv in rehearsal]
    process = subprocess.Popen(
        [sys.executable, "-c", STARTER.format(before=before, rehearsal=lines)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=dict(env),
    )
    try:
        yield Starter(process, folder)
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)
