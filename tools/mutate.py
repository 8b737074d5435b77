"""Mutation testing: change one place of the code, run the tests that run this place, and see whether one notices.

    python tools/mutate.py moeq/prove moeq/load --count 20 --seed 1

Mutants are drawn with a seed from all places of a folder. Which tests run which lines is recorded once, with all tests
of `make test` (`line_tests.py`); later runs record only test files that changed. Each mutant is tried in a copy of the
tree, so that the working tree stays as it is: first by the tests that run its lines, those of the mirroring file and
fast ones first, then by others that run its file, whose results may come from a cache that an earlier test has filled.
The first failure ends it, and counts if the test passes without the mutant. A mutant that outlives BUDGET seconds of
tests has survived. A table counts every folder. Mutants that cannot be told from the original stand with the reason in
`tools/equivalent_mutants.txt`, and are not drawn. With `--mirrored` nothing is recorded: of the mirroring test folder
the files run that are named like the module or import it, without slow tests; a faster and weaker judge.

mutmut and cosmic-ray do not fit: both make every mutant of a source tree before they run any, draw no sample by a seed,
and import the whole program again for each. Here a process that has imported torch forks for every mutant.
"""

from __future__ import annotations

import argparse
import ast
import copy
import importlib
import importlib.util
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from line_tests import Record, paths_of_tree

ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / "tools" / "equivalent_mutants.txt"

#: Folders that a tree of its own has whole; tests as well, with links to their data.
COPIED = ("moeq", "kernels", "tools", "docs", "examples")

#: Folder of the tree in which tests are recorded, and of which each judge has a copy.
RECORDED = "recorded"

#: Processor seconds of tests that a mutant has to outlive.
BUDGET = 60.0

#: Seconds that tests may take for each that their processor time is limited to.
WAIT = 10.0

#: Tests that compile device code, whose lines coverage does not see: it sees that its files are imported.
COMPILING = "tests/moeq_kernels/test_golden_code.py"

#: What most tests import, and no mutant changes.
IMPORTED = ("numpy", "torch", "pytest", "hypothesis", "safetensors.torch", "huggingface_hub", "typer", "rich", "yaml")

#: What tests of an engine import, where PYTHONPATH has it: twenty seconds that no mutant has to spend again.
ENGINE = ("vllm.model_executor.layers.fused_moe.routed_experts", "vllm.model_executor.model_loader.default_loader")

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
        statement: first and last line of the statement around it, without the statements inside.
        at_import: whether the place runs when its module is imported, not when a function is called.
        span: first and last byte of the place, in the file's UTF-8.
        source: the first line, without the spaces around it.
        before: source of the place.
        after: its replacement.
    """

    file: str
    lines: tuple[int, int]
    statement: tuple[int, int]
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
    statements = [_own_lines(one) for one in ast.walk(tree) if isinstance(one, ast.stmt)]
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
            name = path.relative_to(ROOT).as_posix()
            around = max(one for one in statements if one[0] <= lines[0])
            yield Mutant(name, lines, around, not inside, (first, last), source, before, after)


def _own_lines(node: ast.stmt) -> tuple[int, int]:
    body = getattr(node, "body", None)
    return node.lineno, max(node.lineno, body[0].lineno - 1 if body else node.end_lineno or 0)


def _places(tree: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield what runs and may matter: not type checkers' parts, annotations, texts, and what `zip` asserts."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.JoinedStr):
            continue
        if isinstance(node, ast.keyword) and node.arg == "strict" and ast.unparse(node.value) == "True":
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


def equivalents() -> dict[str, str]:
    """Return the texts of equivalent mutants, with the comment above each."""
    found, reason = {}, ""
    for line in EQUIVALENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            reason = line.strip("# ")
        elif line:
            found[line] = reason
    return found


def draw(folder: Path, count: int, seed: int) -> list[Mutant]:
    """Draw mutants of a folder or file; equal seeds draw equal mutants of equal files."""
    known, files = equivalents(), [folder] if folder.is_file() else sorted(folder.rglob("*.py"))
    found = [one for path in files for one in mutants(path) if one.text not in known]
    return random.Random(f"{seed} {folder.relative_to(ROOT)}").sample(found, min(count, len(found)))


def copied_tree(target: Path, root: Path = ROOT) -> None:
    """Copy what is imported and tested to a folder, which gets links to large data."""
    for name in COPIED:
        shutil.copytree(root / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "tests").mkdir()
    for path in (root / "tests").iterdir():
        if path.name == "data":
            (target / "tests" / "data").symlink_to(path)
        elif path.is_dir():
            shutil.copytree(path, target / "tests" / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(path, target / "tests")
    for path in root.iterdir():
        if path.is_file():
            shutil.copy(path, target)


def found_tests(paths: list[Path]) -> list[Path]:
    """Return the test files among files and in folders, absolute and sorted."""
    found = ([path] if path.is_file() else path.rglob("test_*.py") for path in map(Path.resolve, paths))
    return sorted({file for files in found for file in files})


def rounds_of_tests(record: Record, mutant: Mutant) -> Iterator[dict[str, float]]:
    """Yield the tests to try one after the other: a few that are likely to notice, then all within the budget."""
    files = [mutant.file, *_callers(mutant.file)]
    anywhere = {name: seconds for file in files for name, seconds in record.tests_of(file).items()}
    exact = record.tests_of(mutant.file, range(mutant.lines[0], mutant.lines[1] + 1))
    exact = exact or record.tests_of(mutant.file, range(mutant.statement[0], mutant.statement[1] + 1))
    path = Path(mutant.file)
    # A test may look at a constant, a signature or what a function made during the import, and run no line of the file.
    if mutant.at_import or not exact:
        mirror = Path("tests", path.parts[1]).as_posix() + "/"
        anywhere |= {name: seconds for name, seconds in record.tests.items() if name.startswith(mirror)}
    if mutant.at_import or len(files) > 1:
        exact = anywhere
    if "/device/" in mutant.file:
        exact = exact | {name: seconds for name, seconds in anywhere.items() if name.startswith(COMPILING)}

    def cost(name: str) -> float:
        test = Path(name.partition("::")[0])
        named = path.stem.removesuffix("_loops") in test.stem or name.startswith(COMPILING)
        near = 1 if named else 3 if path.parts[1] in test.parts else 9
        return near * (0.02 + record.tests[name])

    order = sorted(exact, key=cost) + sorted((one for one in anywhere if one not in exact), key=cost)
    rest, first, seconds = BUDGET, [], 0.0
    for place, name in enumerate(order):
        seconds += record.tests[name]
        if place == 0 or (place < 40 and seconds < 3):
            first.append(name)
        elif seconds > rest:
            order = order[:place]
            break
    for part in (first, order[len(first) :]):
        if part:
            yield {name: record.tests[name] for name in part}


def mirrored_files(file: str) -> list[str]:
    """Return the test files that mirror a module, else those that mirror its users, else all of its folder."""
    users = sorted(one for one in (ROOT / Path(file).parts[0]).rglob("*.py") if _imports(one, file))
    for files in ([file], [one.relative_to(ROOT).as_posix() for one in users]):
        if found := [test for one in files for test in _named_or_importing(one)]:
            return list(dict.fromkeys(found))
    return [one.relative_to(ROOT).as_posix() for one in _mirror(file)]


def _mirror(file: str) -> list[Path]:
    return sorted((ROOT / "tests" / Path(file).parts[1]).rglob("test_*.py"))


def _named_or_importing(file: str) -> list[str]:
    every, name = _mirror(file), Path(file).stem.removesuffix("_loops")
    found = [one for one in every if name in one.stem] + [one for one in every if _imports(one, file)]
    return [one.relative_to(ROOT).as_posix() for one in found]


def _imports(path: Path, file: str) -> bool:
    module = file.removeprefix("kernels/").removesuffix(".py").replace("/", ".")
    package, _, name = module.rpartition(".")
    words = rf"\b{re.escape(module)}\b|from {re.escape(package)} import .*\b{name}\b"
    return re.search(words, path.read_text()) is not None


def _callers(file: str) -> list[str]:
    """Return the files whose tests reach compiled loops, which coverage does not see."""
    if "@loop" not in (text := (ROOT / file).read_text()) and "@intrinsic" not in text:
        return []
    name = file.removesuffix(".py").replace("/", ".")
    users = [one for one in (ROOT / "moeq").rglob("*.py") if name in one.read_text()]
    found = [one.relative_to(ROOT).as_posix() for one in users]
    return [*found, *(inner for one in found for inner in _callers(one))]


@dataclass(eq=False)  # pytest keeps plugins in sets
class Failures:
    """Plugin of pytest that keeps the first test that fails, or the file that cannot be collected."""

    found: list[str] = field(default_factory=list)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self.found.append(report.nodeid)

    pytest_collectreport = pytest_runtest_logreport


def first_failure(tree: Path, tests: dict[str, float], marker: str = "slow or not slow") -> str | None:
    """Run tests in a fork, in a tree, and return the first that fails: "" if none can be named, None if all pass."""
    named = tree / ".first-failure"
    named.write_text("")
    limit = 60 + int(10 * sum(tests.values()))  # beyond: an endless loop
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
        os.chdir(tree)
        silent = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(silent, fd)
        sys.path[:] = [str(tree), str(tree / "kernels"), *filter(_is_elsewhere, sys.path)]
        os.environ["PYTHONPATH"] = paths_of_tree(tree)
        import pytest

        plugin = Failures()
        settings = ["-x", "-q", "-p", "no:cacheprovider", "-n", "0", "-m", marker]
        status = pytest.main([*settings, *tests], [plugin])
        named.write_text("".join(plugin.found[:1]))
        os._exit(int(status != pytest.ExitCode.OK))
    return named.read_text() if _status(child, time.monotonic() + WAIT * limit) else None


def _status(child: int, until: float) -> int:
    """Return the exit status of a process, which is killed at that time: threads that wait for each other never end."""
    while (ended := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(0.02)
    return ended[1]


def _is_elsewhere(entry: str) -> bool:
    """Say whether an entry of sys.path stays: a virtual environment or an engine may lie in the repository as well."""
    path = Path(entry)
    return path != ROOT and not any(path.is_relative_to(ROOT / name) for name in (*COPIED, "tests"))


class Judge:
    """Tries mutants in a tree of its own."""

    def __init__(self, record: Record | None, folder: str) -> None:
        self.record = record
        self.marker = "not slow" if record is None else "slow or not slow"
        self.sound: dict[str, bool] = {}
        self.tree, recorded = Path(tempfile.mkdtemp(dir=folder)), Path(folder) / RECORDED
        copied_tree(self.tree, recorded if recorded.exists() else ROOT)  # the repository may have changed since
        self.writes = 0

    def killer(self, mutant: Mutant) -> str | None:
        """Return the test that notices a mutant; None if it survives."""
        mirrored = [dict.fromkeys(mirrored_files(mutant.file), 6.0)]  # in one process: most time goes into imports
        for tests in mirrored if self.record is None else rounds_of_tests(self.record, mutant):
            while tests := {name: seconds for name, seconds in tests.items() if self.sound.get(name, True)}:
                killer = self._killer(mutant, tests)
                if killer is None:
                    break
                if not killer:  # the limit of time, or a process that died
                    if first_failure(self.tree, tests, self.marker) is None:
                        return "no test ended"
                    break
                if self._is_sound(killer):
                    return killer
                self.sound[killer if killer in tests else killer.partition("::")[0]] = False
        return None

    def _killer(self, mutant: Mutant, tests: dict[str, float]) -> str | None:
        path = self.tree / mutant.file
        raw, times = path.read_bytes(), path.stat().st_mtime_ns
        first, last = mutant.span
        try:
            path.write_bytes(raw[:first] + mutant.after.encode() + raw[last:])
            self.writes += 1  # bytecode of another mutant must not pass for that of this one
            os.utime(path, (self.writes, self.writes))
            return first_failure(self.tree, tests, self.marker)
        finally:
            path.write_bytes(raw)
            os.utime(path, ns=(times, times))

    def _is_sound(self, test: str) -> bool:
        if test not in self.sound:
            seconds = self.record.tests.get(test, 1.0) if self.record else 6.0
            self.sound[test] = first_failure(self.tree, {test: seconds}, self.marker) is None
        return self.sound[test]


_judges: list[Judge] = []


def _begin(record: Record | None, folder: str) -> None:
    _judges.append(Judge(record, folder))


def _judged(mutant: Mutant) -> tuple[Mutant, str | None]:
    return mutant, _judges[0].killer(mutant)


def main() -> int:
    """Try mutants and print the table; the exit code is 1 if fewer than `--least` percent of any folder are killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--count", type=int, default=20, help="mutants of each folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=0, help="percentage of killed mutants that is enough")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="mutants at the same time")
    parser.add_argument("--record", type=Path, default=ROOT / ".mutate" / "lines.json", help="file of recorded lines")
    parser.add_argument("--only", nargs="*", help="mutants of these places alone, such as moeq/prove/diff.py:247")
    parser.add_argument("--tests", nargs="*", type=Path, default=[ROOT / "tests"], help="tests to record, else all")
    parser.add_argument(
        "--slow", action="store_true", help="record slow tests as well: most of the kernels' device code"
    )
    parser.add_argument("--mirrored", action="store_true", help="record nothing, run the mirroring test files alone")
    parser.add_argument("--list", action="store_true", help="only list the mutants that are drawn")
    asked = parser.parse_args()
    drawn = {
        str(name): [one for one in draw((ROOT / name).resolve(), 1 << 30 if asked.only else asked.count, asked.seed)]
        for name in asked.folders
    }
    if asked.only:
        drawn = {name: [one for one in found if one.place in asked.only] for name, found in drawn.items()}
    if asked.list:
        print(*(f"{one.place}: {one.change}" for found in drawn.values() for one in found), sep="\n")
        return 0

    rows = []
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        record = None if asked.mirrored else Record.read(asked.record)
        if record is not None:
            tree = Path(folder) / RECORDED
            copied_tree(tree)
            for failed in record.update(ROOT, tree, asked.jobs, found_tests(asked.tests), asked.slow):
                print(*(f"{one} fails without a mutant, and judges none" for one in failed), sep="\n", file=sys.stderr)
                record.write(asked.record)
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # without it or a GPU the engine switches Triton off
        for name in (*IMPORTED, *(ENGINE if importlib.util.find_spec("vllm") else ())):
            importlib.import_module(name)
        with get_context("fork").Pool(asked.jobs, _begin, (record, folder)) as pool:
            for name, found in drawn.items():
                killed = 0
                for mutant, killer in pool.imap_unordered(_judged, found):
                    killed += killer is not None
                    said = f"killed    {mutant.place}" if killer is not None else f"survived  {mutant.place}"
                    print(f"{said}: {mutant.change}{f'  [{killer}]' if killer else ''}", flush=True)
                rows.append((name, len(found), killed))
    print(f"\nseed {asked.seed}\n\n| folder | mutants | killed | survived | % |\n| --- | --: | --: | --: | --: |")
    for name, count, killed in rows:
        print(f"| {name} | {count} | {killed} | {count - killed} | {100 * killed / max(count, 1):.0f} |")
    return int(any(killed < count * asked.least / 100 for _, count, killed in rows))


if __name__ == "__main__":
    sys.exit(main())
