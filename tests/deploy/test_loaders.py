"""What is said about loaders, held against the loaders' own code (read, not imported: engines are not installed)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import moeq
from moeq.deploy import loaders

ENGINES = Path(loaders.__file__).parents[1] / "engines"


def assigned(path: Path, name: str) -> ast.expr:
    """The value that a module assigns to a name."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            assert node.value is not None  # type: ignore[union-attr]
            return node.value  # type: ignore[union-attr]
    raise AssertionError(f"{path} assigns no {name}")


def test_versions_of_vllm() -> None:
    assert ast.literal_eval(assigned(ENGINES / "vllm" / "plugin.py", "ENGINES")) == loaders.VLLM_VERSIONS


def test_layouts_that_vllms_kernels_read() -> None:
    table = assigned(ENGINES / "vllm" / "backends.py", "BACKENDS")
    assert isinstance(table, ast.Dict)
    named = {ast.literal_eval(key) for key in table.keys if key is not None}
    assert named | {"marlin-act-order/1"} == set(loaders.VLLM_LAYOUTS)


def test_models_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    models = Path(transformers.__file__).parent / "models"
    for name in loaders.TRANSFORMERS_MODELS:
        assert "@use_experts_implementation" in (models / name / f"modeling_{name}.py").read_text(encoding="utf-8")
    oldest = ast.literal_eval(assigned(ENGINES / "transformers_versions.py", "OLDEST"))
    assert ".".join(map(str, oldest)) == loaders.TRANSFORMERS_OLDEST


@pytest.mark.slow
def test_plain_transformers_stops_at_a_conversion(checkpoints: Path, tmp_path: Path) -> None:
    """In a process of its own: here the loader may have been imported by another test."""
    pytest.importorskip("transformers")
    name = "gptq-int4-g32-qwen3moe"
    moeq.convert(checkpoints / name, tmp_path / "out", moeq.Deployment(gpu=moeq.gpu("A100")))
    program = (
        "import sys\nfrom transformers import AutoConfig, AutoModelForCausalLM\n"
        "config = AutoConfig.from_pretrained(sys.argv[1])\nAutoModelForCausalLM.from_config(config)"
    )
    run = [sys.executable, "-c", program, str(tmp_path / "out")]
    plain = subprocess.run(run, capture_output=True, text=True, check=False)
    assert plain.returncode != 0
    assert loaders.TRANSFORMERS_GUARD in plain.stderr.splitlines()[-1]
    run[2] = f"import moeq.engines.transformers\n{program}"
    loaded = subprocess.run(run, capture_output=True, text=True, check=False)
    assert loaded.returncode == 0, loaded.stderr
