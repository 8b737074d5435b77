"""The reference of commands, from the parsers themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from moeq.cli.app import COMMANDS, build
from pages.tables import NOTE, cell, table

#: How help names the value of an option by its type.
_VALUES: dict[object, str] = {int: "INTEGER", float: "NUMBER", Path: "PATH"}


def commands_page() -> str:
    """Return the page of all commands: what each does, its arguments, options and examples."""
    summary = table(("command", ""), [(f"[`moeq {name}`](#moeq-{name})", row.help) for name, row in COMMANDS.items()])
    parts = ["# Commands", NOTE, summary, *(_command(name) for name in COMMANDS)]
    return "\n\n".join(parts) + "\n"


def _command(name: str) -> str:
    group: Any = typer.main.get_command(build(name))
    command = group.commands[name]
    rows = [row for param in command.params if (row := _row(param))]
    parts = [f"## moeq {name}", _sentence(command.help or "")]
    if rows:
        parts.append(table(("argument or option", "", "default"), rows))
    parts.append("\n".join(f"    moeq {name} {example}".rstrip() for example in COMMANDS[name].examples))
    return "\n\n".join(parts)


def _sentence(text: str) -> str:
    return cell(text.partition("Raises:")[0])


def _row(param: Any) -> tuple[str, str, str] | None:
    """Describe one parameter, or return None for one that help does not show."""
    if getattr(param, "hidden", False) or param.name == "help":
        return None
    if param.param_type_name == "argument":
        return f"`{param.metavar or param.name.upper()}`", cell(param.help or ""), ""
    flags = ", ".join([*param.opts, *param.secondary_opts])
    value = "" if param.is_flag else f" {param.metavar or _VALUES.get(param.type_descriptor.annotation, 'TEXT')}"
    default = "" if param.default in (None, False, ()) or callable(param.default) else f"`{_shown(param.default)}`"
    return f"`{flags}{value}`", cell(param.help or ""), default


def _shown(default: object) -> str:
    return ",".join(map(str, default)) if isinstance(default, (list, tuple)) else str(default)
