"""Every parameter of every command: how it is spelled, its default, its limits, whether a shell completes its values.

PYTHONPATH=.:kernels:tests python tests/cli/test_parameters.py    (writes what they are now; read what changed)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import typer

from moeq.cli.app import COMMANDS

PATH = Path(__file__).parents[1] / "data" / "parameters.txt"
FACTS = ("metavar", "min", "max", "show_default", "rich_help_panel")


def lines() -> Iterator[str]:
    for name, row in COMMANDS.items():
        signature = inspect.signature(import_module(row.module).command, eval_str=True)
        for parameter in signature.parameters.values():
            infos = [one for one in getattr(parameter.annotation, "__metadata__", ()) if hasattr(one, "param_decls")]
            if parameter.annotation is not typer.Context:
                yield " ".join(
                    (
                        name,
                        _spelling(parameter, infos),
                        "needed" if parameter.default is parameter.empty else f"default={parameter.default!r}",
                        *_facts(infos),
                    )
                )


def _spelling(parameter: inspect.Parameter, infos: list[object]) -> str:
    names = [
        one for info in infos for one in (getattr(info, "default", None), *(getattr(info, "param_decls", ()) or ()))
    ]
    return "/".join(one for one in names if isinstance(one, str)) or parameter.name


def _facts(infos: list[object]) -> Iterator[str]:
    for info in infos:
        found = {name: getattr(info, name, None) for name in FACTS}
        yield from (f"{name}={value!r}" for name, value in found.items() if value != (name == "show_default" or None))
        completed = getattr(info, "autocompletion", None)
        yield from [] if completed is None else [f"completed={completed.__name__}"]


def test_parameters_are_as_they_were() -> None:
    assert list(lines()) == PATH.read_text(encoding="utf-8").splitlines()


if __name__ == "__main__":
    PATH.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
