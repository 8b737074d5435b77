"""The notebook in examples/: every cell runs, in order, and what it shows has a table where records do."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = json.loads((ROOT / "examples" / "notebook.ipynb").read_text(encoding="utf-8"))


def executed(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell as IPython does; return the value of its last expression."""
    tree = ast.parse(source)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "cell", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "cell", "eval"), names)


@pytest.mark.slow
def test_every_cell_runs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("triton")
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    shown = []
    for cell in NOTEBOOK["cells"]:
        assert cell["cell_type"] == "markdown" or cell["outputs"] == []
        if cell["cell_type"] == "code":
            value = executed("".join(cell["source"]), names)
            shown.append(type(value).__name__)
            if hasattr(value, "_repr_html_"):
                assert value._repr_html_().startswith('<div class="moeq">')
            assert "\n" not in repr(value) or type(value).__name__ == "Tensor"
    assert [name for name in shown if name[0].isupper() and name not in ("NoneType", "Tensor")] == [
        *("Checkpoint", "Verdict", "Job", "Conversion", "CheckReport")
    ]
    assert "force=True replaces it" in capsys.readouterr().out
