"""A console that prints every string as one literal line: markup and escape sequences in it mean nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moeq.foreign import plain


class Screen(Console):
    """Rich's console, with text sanitised by `moeq.foreign`.

    A string or `Text` that is printed is one line, whatever is in it; style comes from `Text` alone, never from markup
    in a string. The same holds for cells of tables.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print sanitised text."""
        super().print(*map(_literal, objects), **options)


def _literal(shown: Any) -> Any:
    if isinstance(shown, str):
        return Text(plain(shown))
    if isinstance(shown, Text):
        return _literal_text(shown)
    if isinstance(shown, Table):
        shown.title = _literal(shown.title)
        for column in shown.columns:
            column.header, column._cells = _literal(column.header), [_literal(cell) for cell in column._cells]
    return shown


def _literal_text(text: Text) -> Text:
    """Return text with every span sanitised; text that is plain already is returned as it is."""
    if plain(text.plain) == text.plain:
        return text
    ends = sorted({0, len(text), *(end for span in text.spans for end in (span.start, span.end))})
    pieces = [text[start:end] for start, end in pairwise(ends)]
    literal = Text(style=text.style)
    for piece in pieces:
        literal.append(plain(piece.plain), style=piece.spans[0].style if piece.spans else None)
    return literal
