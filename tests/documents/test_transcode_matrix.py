"""The table of docs/how-to/transcode.md is what `--check-only` says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from moeq.transcode.target_formats import TARGETS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("transcode_matrix", ROOT / "tools" / "pages" / "transcode_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def table(script: ModuleType) -> str:
    return script.PAGE.read_text(encoding="utf-8").split(script.BEGIN)[1].split(script.END)[0]


def test_every_target_and_checkpoint_is_in_the_table(script: ModuleType) -> None:
    text = table(script)
    assert text.splitlines()[0] == "| from | " + " | ".join(f"`{target}`" for target in TARGETS) + " |"
    names = [path.name for path in script.CHECKPOINTS.iterdir() if path.is_dir()]
    assert all(f"| `{name}` |" in text for name in names)
    assert len(text.splitlines()) == 2 + len(names) + len(script.MADE)


@pytest.mark.parametrize("name", ["ct-mxfp4-qwen3moe", "gptq-int4-g32-actorder-qwen3moe"])
def test_rows_are_what_the_command_says(script: ModuleType, name: str) -> None:
    assert script.row(f"`{name}`", script.CHECKPOINTS / name) in table(script).splitlines()


@pytest.mark.slow
def test_the_whole_table_is_fresh(script: ModuleType, tmp_path: Path) -> None:
    assert list(script.rows(tmp_path)) == table(script).splitlines(), "run: python tools/pages/transcode_matrix.py"
