"""Sanitising untrusted text: names and values from checkpoints, manifests and servers, before they are shown.

A terminal acts on escape sequences, a log's reader on lines that begin with `::`, a browser on markup, and direction
marks show a name as another. Everything that is shown or written for people goes through one of these; JSON documents
escape by themselves.
"""

from __future__ import annotations

import html
import re
from typing import Any

#: Longest text that is shown of one value.
MAX_CHARACTERS = 10_000

#: Text that GitHub's runner takes for a command: `::` where a line begins, `##[` anywhere.
_COMMAND = re.compile(r"^(\s*)::|##\[")

#: Characters with a meaning within a line of Markdown or in a table, and text that becomes a link without any mark.
_MARKDOWN = re.compile(r"[\\`*_\[\]|~$]")
_LINKS = re.compile(r"(?i)\b(https?|ftp|mailto):|\b(www)\.")

#: Characters that are not printable, but harmless in a block of text.
_LAYOUT = {"\n", "\t"}


def plain(text: object, most: int = MAX_CHARACTERS) -> str:
    """Write text as one line in which every character is what it looks like.

    Control characters (C0, C1), line ends, direction marks, invisible and unassigned characters and halves of surrogate
    pairs are written out (`\\x1b`, `\\u202e`); so is what a workflow's log would take for a command.
    """
    line = str(text)
    if not line.isprintable():
        line = "".join(char if char.isprintable() else escape(char) for char in line[: most + 1])
    if len(line) > most:
        line = line[:most] + " ..."
    return _COMMAND.sub(_defused, line)


def in_html(text: object) -> str:
    """Escape text for an HTML element or a quoted attribute."""
    return html.escape(plain(text))


def in_xml(text: str) -> str:
    """Write out characters that XML cannot hold; whoever builds the tree escapes markup."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() or char in _LAYOUT else escape(char) for char in text)


def in_markdown(text: object) -> str:
    """Escape text for a Markdown paragraph, heading or table cell: it draws nothing and links nowhere."""
    escaped = _MARKDOWN.sub(r"\\\g<0>", plain(text)).replace("&", "&amp;").replace("<", "&lt;")
    return _LINKS.sub(lambda found: f"{found[1]}&#58;" if found[1] else f"{found[2]}&#46;", escaped)


def in_code(text: object) -> str:
    """Wrap text in backticks for Markdown, table cells included; no character of it can end the code span."""
    return f"`{plain(text).replace('`', chr(39)).replace('|', chr(92) + '|')}`"


def in_data(value: Any) -> Any:
    """Return plain values for YAML with `plain` applied to every text."""
    if isinstance(value, str):
        return plain(value)
    if isinstance(value, dict):
        return {plain(key): in_data(one) for key, one in value.items()}
    return [in_data(one) for one in value] if isinstance(value, (list, tuple)) else value


def escape(char: str) -> str:
    """Spell one character as Python does: `\\n`, `\\x1b`, `\\u202e`."""
    return ascii(char)[1:-1]


def _defused(found: re.Match[str]) -> str:
    return f"{found[1]}\\x3a:" if found[1] is not None else "#\\x23["
