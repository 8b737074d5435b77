"""Data flows one way (the contracts in pyproject.toml), and what must start fast imports no torch."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grimp
import pytest

from pages.import_graph import imports_of

ROOT = Path(__file__).parents[1]
CHECKPOINT = "tests/data/checkpoints/gptq-int4-g32-qwen3moe"

# Areas where torch may be imported at module level; elsewhere only inside functions.
TORCH_AT_TOP = {"reference", "check", "layouts"}
# ... but not in these, which the oracle and `inspect` load.
TORCH_FREE_MODULES = {"moeq/layouts/__init__.py", "moeq/layouts/base.py", "moeq/layouts/registry.py"}
# Loaders inside engines, which have imported torch long before: only entry points and tests import them.
INSIDE_ENGINES = {
    f"moeq/engines/{name}.py"
    for name in (
        "transformers",
        "experts_module",
        "experts_source",
        "packed_method",
        "vllm/config",
        "vllm/experts_method",
        "vllm/own_experts",
        "vllm/backends",
        "vllm/cpu_experts",
        "vllm/float_experts",
        "vllm/mxfp4_experts",
        "vllm/engine_experts",
        "vllm/one_layer",
        "vllm/router",
        "sglang/config",
    )
}


def modules() -> Iterator[tuple[str, Path]]:
    for path in sorted((ROOT / "moeq").rglob("*.py")):
        parts = path.relative_to(ROOT / "moeq").with_suffix("").parts
        yield ("" if parts == ("__init__",) else parts[0]), path


def imports(path: Path) -> Iterator[tuple[str, bool, int]]:
    """(imported module, at module level and at run time, line)."""
    for found in imports_of(path):
        top = not (found.inside or found.typing)
        if isinstance(found.node, ast.Import):
            yield from ((alias.name, top, found.node.lineno) for alias in found.node.names)
        else:
            assert found.node.level == 0, f"{path}: relative import"
            yield found.node.module or "", top, found.node.lineno


def test_contracts_are_kept() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_nothing_enters_by_the_front_door() -> None:
    graph = grimp.build_graph("moeq", cache_dir=None)
    importers = graph.find_modules_that_directly_import("moeq")
    assert [name for name in importers if not name.startswith("moeq.cli.")] == []
    assert graph.find_modules_directly_imported_by("moeq.__main__") == {"moeq.cli.app"}


def test_torch_is_imported_inside_functions_where_it_must_be() -> None:
    wrong = []
    for area, path in modules():
        relative = str(path.relative_to(ROOT))
        if (area in TORCH_AT_TOP and relative not in TORCH_FREE_MODULES) or relative in INSIDE_ENGINES:
            continue
        wrong += [
            f"{relative}:{line}" for name, top, line in imports(path) if top and name.partition(".")[0] == "torch"
        ]
    assert not wrong, wrong


def test_only_loaders_inside_engines_import_one_another_at_the_top() -> None:
    inside = {relative.removesuffix(".py").replace("/", ".") for relative in INSIDE_ENGINES}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for _, path in modules()
        if str(path.relative_to(ROOT)) not in INSIDE_ENGINES
        for name, top, line in imports(path)
        if top and name in inside
    ]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "code",
    [
        "import moeq",
        "import moeq.oracle.judge",
        "import moeq.layouts.registry",
    ],
)
def test_no_torch_is_loaded(code: str) -> None:
    program = f"{code}\nimport sys; sys.exit(3 if 'torch' in sys.modules or 'triton' in sys.modules else 0)"
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr or result.stdout


#: What makes up most of a start where it is imported.
HEAVY = ("numba", "torch", "triton", "huggingface_hub", "transformers", "ray")


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["inspect", CHECKPOINT, "--gpu", "a100"],
        ["oracle", CHECKPOINT, "--gpu", "a100"],
        ["convert", "--help"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported_to_look(arguments: list[str]) -> None:
    assert imported(arguments) == []


@pytest.mark.slow
def test_nothing_heavy_is_imported_to_work(tmp_path: Path) -> None:
    """Once the loops are compiled, which the first run of each command does."""
    for turn in ("first", "second"):
        converted, transcoded = str(tmp_path / f"{turn}-converted"), str(tmp_path / f"{turn}-transcoded")
        for arguments in (
            ["convert", CHECKPOINT, converted, "--gpu", "a100"],
            ["verify", converted, "--source", CHECKPOINT],
            ["transcode", CHECKPOINT, transcoded, "--to", "compressed-tensors"],
        ):
            assert set(imported(arguments)) <= ({"numba"} if turn == "first" else set()), arguments


def imported(arguments: list[str]) -> list[str]:
    """Heavy modules that a command imports, with compiled loops for matrices of any size."""
    program = f"""
import sys
import moeq.layouts.words, moeq.cli.app
moeq.layouts.words.COMPILED_FROM = 0
assert moeq.cli.app.run({arguments!r}) == 0
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return list(ast.literal_eval(result.stderr.strip().rpartition("\n")[2]))
