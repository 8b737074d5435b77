"""The mutation tool: what it changes, which tests it chooses, and that its list of equivalents is of today's code."""

from __future__ import annotations

import sys
from pathlib import Path

import mutate
from line_tests import Record, paths_of_tree

SOURCE = '''"""Text."""
LIMIT = 3


def f(a: int = 1, *, b: bool = True) -> int:
    """Text."""
    for one in zip([a], [b], strict=True):
        if a < LIMIT and not b:
            raise ValueError(f"{a + 1}")
        print(
            one,
        )
    return a
'''


def test_what_is_changed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    path = tmp_path / "moeq" / "a.py"
    path.parent.mkdir()
    path.write_text(SOURCE)
    found = list(mutate.mutants(path))
    assert sorted((one.lines[0], one.change, one.at_import) for one in found) == [
        (2, "3 -> (4)", True),
        (5, "1 -> (2)", True),
        (5, "True -> (False)", True),
        (8, "a < LIMIT -> (a <= LIMIT)", False),
        (8, "a < LIMIT and not b -> (a < LIMIT or not b)", False),
        (8, "not b -> (b)", False),
        (9, 'raise ValueError(f"{a + 1}") -> pass', False),
        (10, "print( one, ) -> pass", False),
        (13, "return a -> return None", False),
    ]
    assert {one.statement for one in found if one.lines[0] == 8} == {(8, 8)}
    assert {one.statement for one in found if one.lines[0] == 10} == {(10, 12)}
    assert mutate.draw(path.parent, 4, 7) == mutate.draw(path.parent, 4, 7) != mutate.draw(path.parent, 4, 8)
    assert len(mutate.draw(path, 100, 7)) == 9


def test_which_tests_are_tried(tmp_path: Path, monkeypatch) -> None:
    """Tests of the line come first, then all of the mirroring folder for code that may run at import."""
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    path = tmp_path / "moeq" / "part" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    names = ("tests/part/test_a.py::line", "tests/part/test_a.py::file", "tests/part/test_b.py::looks", "tests/x.py::x")
    record = Record(tests=dict.fromkeys(names, 1.0), lines={"moeq/part/a.py": {8: [0], 13: [1]}})
    found = {one.lines[0]: [*mutate.rounds_of_tests(record, one)] for one in mutate.mutants(path)}
    tried = {line: [name for tests in rounds for name in tests] for line, rounds in found.items()}
    assert tried[8] == [names[0], names[1]]
    assert tried[13] == [names[1], names[0]]
    assert tried[5] == tried[2] == [names[0], names[1], names[2]]
    assert tried[9] == tried[10] == tried[2], "no test runs the line: a module may call its function"


def test_what_compiles_device_code_is_tried_first_after_cheaper_tests(tmp_path: Path, monkeypatch) -> None:
    """Coverage sees that its file is imported, not which lines are compiled."""
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    path = tmp_path / "kernels" / "moeq_kernels" / "device" / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text(SOURCE)
    compiles = f"{mutate.COMPILING}::test[part]"
    record = Record(
        tests={"tests/x.py::x": 0.5, "tests/moeq_kernels/test_c.py::c": 90.0, compiles: 3.0, "tests/x.py::y": 0.1},
        lines={"kernels/moeq_kernels/device/a.py": {2: [1, 2, 3], 13: [0, 3]}},
    )
    found = {one.lines[0]: [*mutate.rounds_of_tests(record, one)] for one in mutate.mutants(path)}
    assert [name for tests in found[13] for name in tests] == ["tests/x.py::y", compiles, "tests/x.py::x"]


def test_an_engine_stays_on_the_path_of_a_tree(tmp_path: Path, monkeypatch) -> None:
    """Also one that lies in the repository, as `make engines` has it; the repository's own folders do not."""
    monkeypatch.setenv("PYTHONPATH", "/engine")
    assert paths_of_tree(tmp_path, "tools") == f"{tmp_path}:{tmp_path}/kernels:{tmp_path}/tools:/engine"
    monkeypatch.delenv("PYTHONPATH")
    assert paths_of_tree(tmp_path) == f"{tmp_path}:{tmp_path}/kernels"
    (tmp_path / "test_path.py").write_text(
        "import sys\n\n\ndef test() -> None:\n    assert '/engine' in sys.path\n"
        f"    assert {str(mutate.ROOT / '.engines')!r} in sys.path\n    assert {str(mutate.ROOT)!r} not in sys.path\n"
        f"    assert {str(mutate.ROOT / 'tools')!r} not in sys.path\n"
    )
    found = ["/engine", *(str(mutate.ROOT / one) for one in (".engines", "", "tools", "kernels", "tests/engines"))]
    monkeypatch.setattr(sys, "path", [*sys.path, *found])
    assert mutate.first_failure(tmp_path, {"test_path.py": 1.0}) is None


def test_a_failure_names_the_test_or_the_file_that_cannot_be_collected(tmp_path: Path) -> None:
    tests = {"test_right.py": "True", "test_wrong.py": "False", "test_broken.py": "True\nimport no"}
    for name, said in tests.items():
        (tmp_path / name).write_text(f"def test() -> None:\n    assert {said}\n")
    found = [mutate.first_failure(tmp_path, {name: 1.0}) for name in tests]
    assert found == [None, "test_wrong.py::test", "test_broken.py"]


def test_tests_that_wait_forever_are_ended(tmp_path: Path, monkeypatch) -> None:
    """As threads do that a mutant lets wait for each other, which takes no processor time."""
    monkeypatch.setattr(mutate, "WAIT", 0.01)
    (tmp_path / "test_wait.py").write_text("import threading\n\n\ndef test() -> None:\n    threading.Event().wait()\n")
    assert mutate.first_failure(tmp_path, {"test_wait.py": 1.0}) == ""


def test_lines_move_with_their_tests(tmp_path: Path) -> None:
    for folder in ("moeq", "tests"):
        (tmp_path / folder).mkdir()
    path, tests = tmp_path / "moeq" / "a.py", tmp_path / "tests" / "test_a.py"
    path.write_text("zero\none\ntwo\nthree\n")
    tests.write_text("")
    record = Record(tests={"tests/test_a.py::one": 1.0, "tests/test_b.py::two": 2.0})
    assert list(record.update(tmp_path, tmp_path, 1, [])) == []
    record.lines = {"moeq/a.py": {2: [0], 3: [1], 4: [0, 1]}, "moeq/template.html": {1: [0]}}
    record.test_files = {"tests/test_a.py": "old", "tests/test_b.py": "same"}
    record.write(tmp_path / "lines.json")
    path.write_text("new\nzero\none\n2\nthree\n")
    record = Record.read(tmp_path / "lines.json")
    assert list(record.update(tmp_path, tmp_path, 1, [])) == []
    assert record.tests_of("moeq/a.py", range(3, 4)) == {"tests/test_a.py::one": 1.0}
    assert set(record.tests_of("moeq/a.py", range(4, 5))) == {"tests/test_a.py::one", "tests/test_b.py::two"}
    assert record.tests_of("moeq/a.py", range(1, 2)) == {}
    assert set(record.tests_of("moeq/a.py")) == {"tests/test_a.py::one", "tests/test_b.py::two"}


def test_equivalent_mutants_are_of_this_code_and_have_reasons() -> None:
    for text, reason in mutate.equivalents().items():
        assert reason, text
        path = mutate.ROOT / text.partition(":")[0]
        assert text in {one.text for one in mutate.mutants(path)}, text
