"""Which tests run which lines of moeq and its kernels: recorded with coverage, kept in a file.

As a plugin of pytest (`-p line_tests`) the module records; coverage starts before anything imports moeq, and goes on in
forked processes and in the commands that tests start. `Record` reads what was recorded, and follows changed sources.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from hashlib import sha256
from itertools import groupby
from pathlib import Path
from typing import Any

#: Where the plugin writes, for processes that record.
FOLDER = "MOEQ_LINES"

#: The test that runs, for coverage of the processes that it starts.
_TEST = "MOEQ_LINES_TEST"

#: Arguments of pytest that run slow tests as well.
SLOW = ("-m", "slow or not slow")

#: Folders whose lines are recorded.
_SOURCES = ("moeq", "kernels/moeq_kernels")

_SETTINGS = """[run]
data_file = {folder}/coverage
parallel = true
source =
    {tree}/moeq
    {tree}/kernels/moeq_kernels
context = ${{MOEQ_LINES_TEST}}
patch = fork, _exit
disable_warnings = no-data-collected, module-not-imported, module-not-measured, couldnt-parse
"""


@dataclass
class Record:
    """Tests of lines.

    Attributes:
        sources: text of every file that the lines are of.
        test_files: digest of every test file that was recorded.
        tests: processor seconds of every test that passed, by its id.
        lines: tests of every line that runs, as positions in `tests`, by file.
    """

    sources: dict[str, str] = field(default_factory=dict)
    test_files: dict[str, str] = field(default_factory=dict)
    tests: dict[str, float] = field(default_factory=dict)
    lines: dict[str, dict[int, list[int]]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Record:
        """Read a record from a file; an empty one where there is none."""
        if not path.exists():
            return cls()
        found = cls(**json.loads(path.read_text()))
        found.lines = {file: {int(line): ids for line, ids in of.items()} for file, of in found.lines.items()}
        return found

    def write(self, path: Path) -> None:
        """Write the record to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(vars(self)))

    def update(
        self, root: Path, tree: Path, jobs: int, test_files: Sequence[Path], slow: bool = False
    ) -> Iterator[list[str]]:
        """Record test files that are new or changed, in a copy of the repository, and yield after every folder.

        Args:
            slow: whether their slow tests run as well.

        Yields:
            tests of the folder that fail there.
        """
        self._follow_sources(root)
        now = {one.relative_to(root).as_posix(): _digest(one) for one in test_files}
        self._forget({file for file, digest in self.test_files.items() if now.get(file, digest) != digest})
        changed = sorted(file for file in now if file not in self.test_files)
        for _, files in groupby(changed, lambda file: Path(file).parent):
            found = list(files)
            failed = self._record(tree, found, jobs, slow)
            self.test_files |= {file: now[file] for file in found}
            yield failed

    def tests_of(self, file: str, lines: range | None = None) -> dict[str, float]:
        """Return the tests that run any of the lines of a file, or any line at all, with their seconds."""
        of_file = self.lines.get(file, {})
        names = list(self.tests.items())
        return dict(names[i] for line in (of_file if lines is None else lines) for i in of_file.get(line, ()))

    def _follow_sources(self, root: Path) -> None:
        """Move lines to where they are now; lines that changed get the tests of those that they replace."""
        found = (one for name in _SOURCES for one in (root / name).rglob("*.py"))
        now = {one.relative_to(root).as_posix(): one.read_text() for one in found}
        for file in [file for file in self.lines if self.sources.get(file) != now.get(file)]:
            before, old, new = self.lines.pop(file), self.sources[file].splitlines(), now.get(file, "").splitlines()
            moved: dict[int, set[int]] = {}
            for kind, start, stop, at, end in SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
                for offset in range(end - at):
                    came_from = [start + offset] if kind == "equal" else range(max(0, start - 1), stop + 1)
                    moved[at + offset + 1] = {i for line in came_from for i in before.get(line + 1, ())}
            self.lines[file] = {line: sorted(ids) for line, ids in moved.items() if ids}
        self.sources = now

    def _forget(self, test_files: set[str]) -> None:
        self.test_files = {file: digest for file, digest in self.test_files.items() if file not in test_files}
        kept = [i for i, name in enumerate(self.tests) if name.partition("::")[0] not in test_files]
        places = {old: new for new, old in enumerate(kept)}
        self.tests = {name: seconds for i, (name, seconds) in enumerate(self.tests.items()) if i in places}
        self.lines = {
            file: {line: [places[i] for i in ids if i in places] for line, ids in of.items()}
            for file, of in self.lines.items()
        }

    def _record(self, tree: Path, test_files: list[str], jobs: int, slow: bool) -> list[str]:
        import coverage

        with tempfile.TemporaryDirectory(prefix="lines-") as name:
            folder = Path(name)
            settings = folder / "settings"
            settings.write_text(_SETTINGS.format(folder=folder, tree=tree))
            variables = {
                FOLDER: name,
                _TEST: "",
                "COVERAGE_PROCESS_START": str(settings),
                "PYTHONPATH": paths_of_tree(tree, "tools"),
            }
            command = ["-m", "pytest", "-q", "-p", "line_tests", "-p", "no:cacheprovider", "-n", str(jobs)]
            with (folder / "pytest.log").open("w") as log:
                command = [sys.executable, *command, "--dist", "worksteal", *(SLOW if slow else ()), *test_files]
                done = subprocess.run(command, cwd=tree, env={**os.environ, **variables}, stdout=log, stderr=log)
            outcomes: dict[str, list[Any]] = {}
            for path in folder.glob("*.outcomes"):
                outcomes |= json.loads(path.read_text())
            if not outcomes and done.returncode not in (0, 5):  # 5: all are skipped, as where an engine is missing
                raise SystemExit(f"no test ran:\n{(folder / 'pytest.log').read_text()[-2000:]}")
            passed = {name: seconds for name, (seconds, outcome) in outcomes.items() if outcome == "passed"}
            self.tests |= passed
            ids = {name: i for i, name in enumerate(self.tests)}
            both = coverage.Coverage(config_file=str(settings))
            both.combine([name])
            data = both.get_data()
            for file in filter(lambda file: file.endswith(".py"), data.measured_files()):  # templates are measured too
                of_file = self.lines.setdefault(Path(file).relative_to(tree).as_posix(), {})
                for line, contexts in data.contexts_by_lineno(file).items():
                    found = {ids[one] for one in contexts if one in passed}
                    of_file[line] = sorted({*of_file.get(line, ()), *found})
            return sorted(name for name, (_, outcome) in outcomes.items() if outcome == "failed")


def paths_of_tree(tree: Path, *others: str) -> str:
    """Return PYTHONPATH for a copied tree: its folders come first, and what was there, such as an engine's, stays."""
    found = [tree, tree / "kernels", *(tree / one for one in others), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(str(one) for one in found if str(one))


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def _digest(path: Path) -> str:
    return sha256(path.read_bytes()).hexdigest()


class Recorder:
    """Plugin that tells coverage which test runs, and keeps each test's processor seconds and outcome."""

    def __init__(self, folder: Path) -> None:
        import coverage

        self.folder = folder
        self.outcomes: dict[str, list[Any]] = {}
        self.coverage = coverage.Coverage.current()  # started by COVERAGE_PROCESS_START
        os.register_at_fork(after_in_child=lambda: coverage.Coverage.current().switch_context(os.environ[_TEST]))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        os.environ[_TEST] = nodeid
        self.coverage.switch_context(nodeid)
        self.outcomes[nodeid] = [-_processor_seconds(), "passed"]

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed":
            self.outcomes[report.nodeid][1] = report.outcome

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.outcomes[nodeid][0] += _processor_seconds()

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        self.coverage.save()
        (self.folder / f"{os.getpid()}.outcomes").write_text(json.dumps(self.outcomes))


if FOLDER in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    recorder = Recorder(Path(os.environ[FOLDER]))

    def pytest_configure(config: Any) -> None:
        """Register the recorder, in the processes of pytest-xdist that run tests."""
        config.pluginmanager.register(recorder, "line-recorder")
