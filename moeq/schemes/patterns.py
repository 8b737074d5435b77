"""Regular expressions from untrusted configs: compiled and matched within limits.

Python's engine backtracks and cannot be interrupted, so a pattern is judged before it runs. Repeated groups that can
match one text in several ways (`(a+)+`, `(a|aa)*`) take exponential time and are refused. Any other pattern takes about
as many steps as there are ways to place its repeats in the name. That number is computed before every match and has an
upper bound, and all matches together have a time budget.
"""

from __future__ import annotations

import re
import time
from math import comb
from typing import NoReturn

from moeq.errors import MoeqError

#: Seconds that all rules of a checkpoint together may spend on matching names.
_BUDGET_SECONDS = 5.0

#: Largest number of steps that one match may take in the worst case (a few tenths of a second).
_MAX_STEPS = 20_000_000

#: Longest pattern, in characters.
_MAX_PATTERN = 4096

#: Repeats (`*`, `+`, `{2,5}`) whose character is not escaped.
_REPEAT = re.compile(r"(?<!\\)(?:[*+]|\{\d*,\d*\})")
#: Optional items (`?`), but not an escaped `?`, a lazy repeat (`*?`) or a special group (`(?:`).
_OPTIONAL = re.compile(r"(?<![\\*+?}(])\?")

#: Syntax that lets a group match one text in several ways.
_AMBIGUOUS = re.compile(r"[|*+?{]")


class Patterns:
    """The patterns of one config; `where` is its file and key, for messages."""

    def __init__(self, where: str) -> None:
        self.where = where
        self._spent = 0.0
        self._ways: dict[str, tuple[int, int]] = {}

    def compile(self, text: str) -> re.Pattern[str]:
        """Compile a pattern within bounds. Raises MoeqError `source.bad-pattern` naming it."""
        if len(text) > _MAX_PATTERN or any(_AMBIGUOUS.search(group) for group in _repeated_groups(text)):
            self._unbounded(text)
        # Repeats at the very end take the rest of the name and never backtrack.
        inner = re.sub(r"(?:\.[*+])+\$?$", "", text)
        self._ways[text] = (len(_REPEAT.findall(inner)), len(_OPTIONAL.findall(inner)))
        try:
            return re.compile(text)
        except (re.error, RecursionError, OverflowError) as error:
            message = f"{self.where}: pattern {text[:120]!a} is not valid: {error}"
            raise MoeqError("source.bad-pattern", message) from error

    def compile_valid(self, text: str) -> re.Pattern[str] | None:
        """Compile a pattern within bounds; None if it is no regular expression."""
        try:
            return self.compile(text)
        except MoeqError as error:
            if isinstance(error.__cause__, re.error):
                return None
            raise

    def matches(self, pattern: re.Pattern[str], name: str, *, anywhere: bool = False) -> bool:
        """Return whether a pattern of `compile` matches at the start of `name`, or anywhere in it."""
        repeats, optionals = self._ways[pattern.pattern]
        placed = repeats + (1 if anywhere else 0)
        if comb(len(name) + placed, placed) << min(optionals, 64) > _MAX_STEPS:
            self._unbounded(pattern.pattern)
        started = time.perf_counter()
        found = (pattern.search if anywhere else pattern.match)(name) is not None
        self._spent += time.perf_counter() - started
        if self._spent > _BUDGET_SECONDS:
            shown = ascii(pattern.pattern[:120])
            raise MoeqError("source.bad-pattern", f"{self.where}: matching takes too long, last pattern {shown}")
        return found

    def _unbounded(self, text: str) -> NoReturn:
        shown = ascii(text[:120])
        raise MoeqError("source.bad-pattern", f"{self.where}: pattern {shown} could take unbounded time to match")


def _repeated_groups(text: str) -> list[str]:
    """Return the contents of the groups that a repeat follows."""
    found: list[str] = []
    opened: list[int] = []
    position, in_class = 0, False
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character == "(":
            opened.append(position + 1)
        elif character == ")" and opened:
            start = opened.pop()
            if text[position + 1 : position + 2] in ("*", "+", "{"):
                found.append(re.sub(r"^\?[:=!]", "", text[start:position]))
        position += 1
    return found
