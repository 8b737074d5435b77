"""Words and numbers, formatted for people."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

#: Width of a line's label in columns, the spaces around it included.
LABEL = 13


def line(console: Console, label: str, text: str | Text, style: str = "", *, width: int = LABEL) -> None:
    """Print a labelled line; where a terminal wraps it, the text continues `width` columns in."""
    from rich.text import Text

    body = Text(text, style=style) if isinstance(text, str) else text
    print_hanging(console, Text.assemble((f"  {label:<{width - 3}} ", "dim"), body), width)


def print_hanging(console: Console, text: Text, indent: int) -> None:
    """Print a line; where it is wrapped, all lines but the first are indented."""
    from rich.text import Text

    room = console.width - indent
    if console.soft_wrap or room < 20:
        console.print(text)
        return
    for number, part in enumerate(text[indent:].wrap(console, room)):
        console.print(Text.assemble(text[:indent] if number == 0 else " " * indent, part))


def print_rest(console: Console, count: int, shown: int, indent: int = 2) -> None:
    """Say how many of `count` things were not printed after the first `shown`, if there are any."""
    if count > shown:
        console.print(f"{' ' * indent}... and {count - shown} more: --json lists them")


def human_bytes(count: int) -> str:
    """Format a byte count with a binary unit: `812 B`, `1.5 KiB`, `15.2 GiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def counted(count: int, noun: str, several: str | None = None) -> str:
    """Format a count with its noun: `1 layer`, `3 layers`; `several` is a plural that does not end in s."""
    return f"{count:,} {noun if count == 1 else several or f'{noun}s'}"


def ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as ranges: `0-3, 7`."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts) or "none"


def human_seconds(seconds: float) -> str:
    """Format a time span: `0.4 s`, `45 s`, `3 min 20 s`, `2 h 05 min`."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
