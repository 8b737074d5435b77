"""Mutation testing: change one place of a room, run the room's tests, and see whether they notice.

    python tools/mutate.py moeq/prove moeq/load --count 20 --seed 1

Mutants are drawn with a seed from all places of a folder. Each is tried in a copy of the tree, so that the working tree
stays as it is. The tests run once without a mutant, to learn which of them run which lines; a mutant gets those that
run its line, the fastest first. A table counts the killed and the survivors of every folder, and every survivor is
listed with its place. Mutants that cannot be told from the original stand in `tools/equivalent_mutants.txt`, and are
not drawn.

mutmut and cosmic-ray do not fit: both make every mutant of a source tree before they run any, draw no sample by a seed,
and import the whole program again for each. Here a process that has imported torch forks for every mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.txt"

#: Tests of a folder beside `tests/<folder>`, cheapest first.
MORE_TESTS = {
    "check": ["tests/report/test_check_report.py"],
    "checkpoint": [
        *("tests/attacks/test_wire.py", "tests/attacks/test_names.py", "tests/model"),
    ],
    "layouts": ["tests/pipeline/test_fast_path.py"],
    "load": ["tests/cli/test_warmup.py", "tests/check/test_run_check.py", "tests/engines/test_transformers.py"],
    "model": [
        *("tests/checkpoint", "tests/schemes", "tests/prove/test_diff.py", "tests/prove/test_restore.py"),
        *(f"tests/pipeline/test_{name}.py" for name in ("sharding", "regroup", "mixed")),
    ],
    "oracle": ["tests/cli/test_oracle.py"],
    "prove": ["tests/attacks/test_changes.py"],
    "schemes": ["tests/model"],
}

#: Tests of a part of a room whose own tests are too many.
TESTS = {
    "pipeline/plan": [
        *(
            f"tests/pipeline/test_{name}.py"
            for name in ("plan", "commands", "side_files", "suggestions", "mixed", "sharding")
        ),
        *("tests/transcode/test_advise.py", "tests/oracle/test_expert_names.py", "tests/oracle/test_models.py"),
    ],
}

_COMPARED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
_OPERATED = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift, ast.RShift: ast.LShift, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one place.

    Attributes:
        file: path of the file below the root.
        lines: first and last line.
        at_import: whether the place runs when its module is imported, not when a function is called.
        span: first and last byte of the place, in the file's UTF-8.
        source: the first line, without the spaces around it.
        before: source of the place.
        after: its replacement.
    """

    file: str
    lines: tuple[int, int]
    at_import: bool
    span: tuple[int, int]
    source: str
    before: str
    after: str

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.lines[0]}"

    @property
    def text(self) -> str:
        """Description on one line, the same whatever else is in the file."""
        return f"{self.file}: in `{self.source}`: {self.change}"

    @property
    def change(self) -> str:
        """The change on one line."""
        return f"{' '.join(self.before.split())} -> {' '.join(self.after.split())}"


def mutants(path: Path) -> Iterator[Mutant]:
    """Yield all mutants of a file, in order."""
    raw = path.read_bytes()
    starts = [0]
    for line in raw.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    tree = ast.parse(raw)
    functions = [one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
    bodies = [(one.body[0].lineno, one.end_lineno or 0) for one in functions]
    for node in _places(tree):
        first = starts[node.lineno - 1] + node.col_offset
        last = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
        before = raw[first:last].decode()
        for changed in _changes(node):
            text = ast.unparse(ast.fix_missing_locations(changed))
            after = f"({text})" if isinstance(node, ast.expr) else text
            lines = (node.lineno, node.end_lineno or node.lineno)
            source = raw.splitlines()[node.lineno - 1].decode().strip()
            inside = any(start <= lines[0] <= end for start, end in bodies)
            yield Mutant(path.relative_to(ROOT).as_posix(), lines, not inside, (first, last), source, before, after)


def _places(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield statements and expressions that run, without those for type checkers, annotations and texts."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for inner in [*node.args.defaults, *(one for one in node.args.kw_defaults if one), *node.body]:
                yield from _places(ast.Module([ast.Expr(inner)] if isinstance(inner, ast.expr) else [inner], []))
            continue
        if isinstance(node, ast.ClassDef):
            yield from _places(ast.Module(node.body, []))
            continue
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                yield from _places(ast.Module([ast.Expr(node.value)], []))
            continue
        if isinstance(node, ast.expr | ast.stmt) and hasattr(node, "lineno"):
            yield node
        yield from _places(node)


def _changes(node: ast.expr | ast.stmt) -> Iterator[ast.AST]:
    """Yield the replacements of a node."""
    changed = copy.deepcopy(node)
    if isinstance(changed, ast.Compare) and type(changed.ops[0]) in _COMPARED:
        changed.ops[0] = _COMPARED[type(changed.ops[0])]()
        yield changed
    elif isinstance(changed, ast.BinOp) and type(changed.op) in _OPERATED and not _is_text(changed):
        changed.op = _OPERATED[type(changed.op)]()
        yield changed
    elif isinstance(changed, ast.BoolOp):
        changed.op = ast.Or() if isinstance(changed.op, ast.And) else ast.And()
        yield changed
    elif isinstance(changed, ast.UnaryOp) and isinstance(changed.op, ast.Not):
        yield changed.operand
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, bool):
        yield ast.Constant(not changed.value)
    elif isinstance(changed, ast.Constant) and isinstance(changed.value, int):
        yield ast.Constant(changed.value + 1)
    elif isinstance(changed, ast.IfExp):
        yield changed.orelse
        yield changed.body
    elif isinstance(changed, ast.Return) and changed.value is not None and not _is_none(changed.value):
        yield ast.Return(ast.Constant(None))
    elif isinstance(changed, ast.Raise) or (isinstance(changed, ast.Expr) and isinstance(changed.value, ast.Call)):
        yield ast.Pass()
    elif isinstance(changed, ast.Continue):
        yield ast.Break()


def _is_text(node: ast.BinOp) -> bool:
    sides = (node.left, node.right)
    return any(isinstance(one, ast.JoinedStr) or isinstance(getattr(one, "value", 0), str) for one in sides)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def draw(folder: Path, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of a folder; equal seeds draw equal mutants of equal files."""
    known = set(EQUIVALENT.read_text(encoding="utf-8").splitlines()) if EQUIVALENT.exists() else set()
    found = [one for path in sorted(folder.rglob("*.py")) for one in mutants(path) if one.text not in known]
    return random.Random(f"{seed} {folder.relative_to(ROOT)}").sample(found, min(count, len(found)))


def tests_of(folder: Path) -> list[str]:
    """Return the tests of a folder: those of TESTS, or else those of the same name and what MORE_TESTS adds."""
    parts = folder.relative_to(ROOT).parts
    if (inner := "/".join(parts[1:])) in TESTS:
        return TESTS[inner]
    room = parts[1] if len(parts) > 1 else parts[0]
    own = [f"tests/{room}"] if (ROOT / "tests" / room).is_dir() else []
    return own + MORE_TESTS.get(room, [])


def copied_tree(target: Path) -> None:
    """Copy what is imported and tested to a folder, which gets links to large data."""
    for name in ("moeq", "kernels", "tools", "docs", "examples"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "tests").mkdir()
    for path in (ROOT / "tests").iterdir():
        if path.name == "data":
            (target / "tests" / "data").symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, target / "tests" / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, target / "tests")
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, target)


class Recorder:
    """Plugin of pytest that records the lines that every test runs, and the seconds that it takes."""

    def __init__(self, tree: Path) -> None:
        import coverage

        self.tree = tree
        self.seconds: dict[str, float] = {}
        self.coverage = coverage.Coverage(data_file=None, source=[str(tree / "moeq")])
        self.coverage.start()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.coverage.switch_context(nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        data = self.coverage.get_data()
        lines = {
            Path(file).relative_to(self.tree).as_posix(): data.contexts_by_lineno(file)
            for file in data.measured_files()
        }
        (self.tree / "lines.json").write_text(json.dumps([lines, self.seconds]))


def tests_of_lines(tree: Path, mutant: Mutant) -> list[str]:
    """Return the tests that run a mutant's lines, or any line of its file if imports run it, the fastest first."""
    lines, seconds = json.loads((tree / "lines.json").read_text())
    of_file = lines.get(mutant.file, {})
    wanted = of_file if mutant.at_import else map(str, range(mutant.lines[0], mutant.lines[1] + 1))
    found = {name for line in wanted for name in of_file.get(line, [])} - {""}
    return sorted(found, key=lambda name: seconds.get(name, 0.0))


def outcome(tree: Path, tests: list[str], seconds: float, *, record: bool = False) -> str:
    """Run tests in a fork, in a tree, up to the first failure: `passed`, `failed` or `timeout`."""
    child = os.fork()
    if child == 0:
        os.setsid()
        os.chdir(tree)
        silent = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(silent, fd)
        sys.path[:] = [str(tree), str(tree / "kernels"), *(one for one in sys.path if not one.startswith(str(ROOT)))]
        os.environ["PYTHONPATH"] = f"{tree}:{tree / 'kernels'}"
        import pytest

        plugins = [Recorder(tree)] if record else []
        status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-n", "0", *tests], plugins)
        os._exit(0 if status in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED) else 1)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed"
        time.sleep(0.1)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return "timeout"


def survives(tree: Path, mutant: Mutant, seconds: float) -> bool:
    """Return whether the tests pass although a file of the tree is changed."""
    path, tests = tree / mutant.file, tests_of_lines(tree, mutant)
    if not tests:
        return True
    raw = path.read_bytes()
    first, last = mutant.span
    path.write_bytes(raw[:first] + mutant.after.encode() + raw[last:])
    try:
        return outcome(tree, tests, seconds) == "passed"
    finally:
        path.write_bytes(raw)


def main() -> int:
    """Try mutants and print the table; the exit code is 1 if fewer than `--least` percent of any folder are killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=20, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=900, help="time for one mutant; more counts as killed")
    parser.add_argument("--least", type=float, default=0, help="percentage of killed mutants that is enough")
    parser.add_argument("--list", action="store_true", help="only list the mutants that are drawn")
    parser.add_argument("--tests", nargs="*", help="tests to run instead of the folder's")
    asked = parser.parse_args()
    import numpy  # noqa: F401  # imported once, before the forks
    import pytest  # noqa: F401
    import torch  # noqa: F401

    rows = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        tree = Path(folder)
        copied_tree(tree)
        for name in asked.folders:
            drawn = draw((ROOT / name).resolve(), asked.count, asked.seed)
            tests = asked.tests or tests_of((ROOT / name).resolve())
            if asked.list:
                print(*(f"{one.place}: {one.change}" for one in drawn), sep="\n")
                continue
            if outcome(tree, tests, asked.seconds * 4, record=True) != "passed":
                print(f"{name}: its tests do not pass without a mutant: {' '.join(tests)}", file=sys.stderr)
                return 2
            killed = 0
            for mutant in drawn:
                alive = survives(tree, mutant, asked.seconds)
                killed += not alive
                print(
                    f"{'survived' if alive else 'killed  '}  {mutant.place}: {mutant.change}",
                    flush=True,
                )
            rows.append((str(name), len(drawn), killed))
    if asked.list:
        return 0
    print(
        f"\nseed {asked.seed}\n\n| folder | mutants | killed | survived | killed % |\n| --- | --: | --: | --: | --: |"
    )
    for name, count, killed in rows:
        print(f"| {name} | {count} | {killed} | {count - killed} | {100 * killed / max(count, 1):.0f} |")
    return int(any(killed < count * asked.least / 100 for _, count, killed in rows))


if __name__ == "__main__":
    sys.exit(main())
