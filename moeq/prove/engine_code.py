"""Run functions of an installed engine on a CPU, without importing the engine.

Importing an engine loads its CUDA libraries. The few functions that move weights around are therefore taken out of the
installed source files and run in a namespace of their own. No code of the engine is part of moeq.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeq.errors import MoeqError

_VERSION = re.compile(r"""^__version__\s*=\s*(?:version\s*=\s*)?['"]([^'"]+)['"]""", re.MULTILINE)


@dataclass(frozen=True)
class EngineCode:
    """Source files of an engine.

    Attributes:
        root: folder of the package (`.../vllm`).
        version: its version.
    """

    root: Path
    version: str

    def load(self, file: str, names: Iterable[str], namespace: dict[str, Any]) -> None:
        """Define functions and constants of one file in a namespace.

        Args:
            file: path below the package.
            names: functions and constants to define.
            namespace: namespace to define them in, which has to hold everything that the functions use.

        Raises:
            MoeqError: `environment.engine-code` for a missing file or name.
        """
        path, wanted = self.root / file, set(names)
        try:
            tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        except (OSError, SyntaxError) as error:
            raise self._missing(f"{path}: {error}") from None
        taken = [node for node in tree.body if _name(node) in wanted]
        missing = wanted - {_name(node) for node in taken}
        if missing:
            raise self._missing(f"{path} does not define {', '.join(sorted(missing))}")
        for node in taken:
            if isinstance(node, ast.FunctionDef):
                _strip(node)
        exec(compile(ast.Module(taken, []), str(path), "exec"), namespace)

    def _missing(self, detail: str) -> MoeqError:
        return MoeqError(
            "environment.engine-code", f"vLLM {self.version}: {detail}", "parity knows the files of vLLM 0.33.0"
        )


def find_engine(site: Path | None = None) -> EngineCode:
    """Find vLLM's source files below `site`, or where Python finds the package.

    Raises:
        MoeqError: `environment.no-engine`, with what to install.
    """
    if site is not None:
        root: Path | None = site / "vllm"
    else:
        spec = importlib.util.find_spec("vllm")
        root = Path(spec.origin).parent if spec is not None and spec.origin else None
    if root is None or not (root / "model_executor").is_dir():
        where = "is not installed here" if site is None else f"is not below {site}"
        raise MoeqError(
            "environment.no-engine",
            f"vLLM {where}; parity compares with the engine's own code",
            "pip install vllm==0.33.0, or without its dependencies: pip download --no-deps vllm==0.33.0, unpack the "
            "wheel (it is a zip file), and name that folder with --site",
        )
    try:
        text = (root / "_version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = _VERSION.search(text)
    return EngineCode(root, found[1] if found else "of unknown version")


def _name(node: ast.stmt) -> str | None:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def _strip(function: ast.FunctionDef) -> None:
    """Drop decorators and annotations, which name classes that are not loaded and have no effect here."""
    function.decorator_list = []
    function.returns = None
    arguments = function.args
    for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        argument.annotation = None
