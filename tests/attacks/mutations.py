"""Wrong types in JSON: every value of a document replaced by values of every other kind, removed, or nested."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

#: One of every kind, and the ends of each.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 7, 1 << 31, 1 << 40, 1 << 63, 10**30, 1.5, -0.0, 1e308, float("inf"),
    "", "x", "4", "\x00", "\ud800", "../x", "a" * 5000, [], [1], [[]], [None], ["x"], {}, {"a": 1}, {"": None},
)  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = (), most: int = 4) -> Iterator[tuple[Any, ...]]:
    """Where a document has values. Of long lists and tables only some: the rest is alike."""
    items = list(document.items()) if isinstance(document, dict) else list(enumerate(document))
    for key, value in items if len(items) <= 40 else items[:most]:
        yield (*path, key)
        if isinstance(value, (dict, list)):
            held = value[:most] if isinstance(value, list) else value
            yield from places(held, (*path, key), most)


def with_value(document: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with another value at a place; the value is removed where it is `REMOVED`."""
    changed = copy.deepcopy(document)
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    if value is REMOVED:
        del holder[path[-1]]
    else:
        holder[path[-1]] = value
    return changed


REMOVED = object()


def mutations(document: Any, skip: Callable[[tuple[Any, ...]], bool] = lambda path: False) -> list[tuple[Any, ...]]:
    """Every `(path, value)`."""
    return [(path, value) for path in places(document) if not skip(path) for value in (*VALUES, REMOVED)]


def sample(found: list[tuple[Any, ...]], count: int, seed: int) -> list[tuple[Any, ...]]:
    """Some of them, the same every time."""
    return random.Random(seed).sample(found, min(count, len(found)))


def nested(depth: int) -> Any:
    """Brackets in brackets."""
    value: Any = 1
    for number in range(depth):
        value = [value] if number % 2 else {"a": value}
    return value
