"""Every error code in the code, with the messages it is raised with as patterns."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from moeq.errors import EXIT_CODES

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "moeq", ROOT / "kernels" / "moeq_kernels", ROOT / "tools")
CODE = re.compile(rf"({'|'.join(EXIT_CODES)})\.[a-z0-9]+(-[a-z0-9]+)*")

#: How a code begins that a module spells out.
BEGINNING = re.compile(rf"[\"']({'|'.join(EXIT_CODES)})\.")

#: Texts that look like a code and are none: the name of a field of `moeq.json`.
NO_CODES = {"source.files"}


def codes_in(tree: ast.AST) -> Iterator[tuple[str, ast.Constant | ast.JoinedStr]]:
    """Yield every code that a module spells out, and for `f"usage.{axis}"` the text with a star."""
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            if CODE.fullmatch(node.value) and node.value not in NO_CODES:
                yield node.value, node
        elif isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
            if CODE.fullmatch(text.replace("*", "x")):
                yield text, node


def pattern(node: ast.expr, function: ast.AST) -> str:
    """Return a regular expression of the texts an expression gives; `.*` stands for what is not known."""
    match node:
        case ast.Constant(value=str() as text):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(pattern(part, function) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return pattern(left, function) + pattern(right, function)
        case ast.IfExp(body=body, orelse=other):
            return f"(?:{pattern(body, function)}|{pattern(other, function)})"
        case ast.Name(id=name):
            return _assigned(name, function)
        case _:
            return ".*"


def _assigned(name: str, function: ast.AST) -> str:
    """Return the texts of a local name: one of what the function assigns to it."""
    values = [
        node.value
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and any(isinstance(to, ast.Name) and to.id == name for to in node.targets)
    ]
    texts = [value for value in values if isinstance(value, (ast.Constant, ast.JoinedStr, ast.IfExp, ast.BinOp))]
    known = texts and len(texts) == len(values)
    return f"(?:{'|'.join(pattern(text, ast.Module([], [])) for text in texts)})" if known else ".*"


def functions(tree: ast.AST) -> Iterator[tuple[ast.AST, list[ast.Call]]]:
    """Yield every function with the errors that are made in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            calls = [
                call
                for call in ast.walk(node)
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "MoeqError"
            ]
            yield node, calls


def raised() -> dict[str, list[str]]:
    """Return every code with the patterns of its messages: `.*` wherever one is not spelled out beside it."""
    found: dict[str, list[str]] = defaultdict(list)
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if not BEGINNING.search(text):
                continue
            tree = ast.parse(text)
            messages = {
                id(call.args[0]): pattern(call.args[1], function)
                for function, calls in functions(tree)
                for call in calls
                if len(call.args) > 1
            }
            for code, node in codes_in(tree):
                found[code].append(messages.get(id(node), ".*"))
    return dict(found)
