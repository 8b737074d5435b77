"""Records from JSON: one reader that checks every type and names the place. No torch.

What a manifest, a journal or a server says is read as the dataclass it claims to be. Types are exact: `true` is no
count, `4.0` no integer, and a string is text that can be written again. Unknown fields are left out, so that a later
version may add some.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal, NoReturn, TypeVar, Union, cast

from moeq.errors import MoeqError

T = TypeVar("T")

#: Upper bound of integers: larger ones fit no file offset, and only attackers write them.
_MAX_INTEGER = 1 << 63

#: Deepest nesting that is read: four times that of any document which moeq or the Hub writes.
MAX_DEPTH = 64


def read_as(kind: type[T], value: Any, where: str, code: str = "source.bad-manifest") -> T:
    """Read a value from JSON as an instance of `kind`.

    Args:
        kind: a dataclass, or an annotation that its fields may have: `int`, `float`, `bool`, `str`, `None`, `Any`,
            `Literal`, unions, tuples, lists, mappings with text keys, dataclasses.
        value: the result of a JSON parser.
        where: name of the document in messages.
        code: code of the error.

    Raises:
        MoeqError: `code`, with the place in the document, what is there and what was expected.
    """
    return cast(T, _Reader(where, code).read(kind, value, ""))


def spell_floats(value: Any) -> Any:
    """Spell infinities and NaN, which JSON does not have, as the texts `inf`, `-inf` and `nan`.

    `float` reads them again. Everything else stays as it is, in tables, lists and tuples too.
    """
    if isinstance(value, dict):
        return {key: spell_floats(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [spell_floats(one) for one in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def check_depth(value: Any, where: str, code: str) -> None:
    """Refuse JSON that is nested deeper than MAX_DEPTH: code that walks or writes it would run out of stack.

    Raises:
        MoeqError: `code`.
    """
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise MoeqError(code, f"{where}: brackets are nested more than {MAX_DEPTH} deep")
        groups = (item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list)))
        level = [inner for items in groups for inner in items if isinstance(inner, (dict, list))]


class _Reader:
    def __init__(self, where: str, code: str) -> None:
        self._where = where
        self._code = code

    def read(self, kind: Any, value: Any, place: str) -> Any:
        if kind is Any:
            return value
        if dataclasses.is_dataclass(kind):
            return self._record(cast(type, kind), value, place)
        origin, arguments = typing.get_origin(kind), typing.get_args(kind)
        if origin in (Union, types.UnionType):
            return self._either(arguments, value, place)
        if origin is Literal:
            if any(value == one and type(value) is type(one) for one in arguments):
                return value
            self._refuse(place, value, f"one of {', '.join(map(str, arguments))}")
        if origin in (tuple, list):
            return self._sequence(origin, arguments, value, place)
        if origin is not None and issubclass(origin, Mapping):
            return self._mapping(arguments, value, place)
        return self._plain(kind, value, place)

    def _record(self, kind: type, value: Any, place: str) -> Any:
        if not isinstance(value, dict):
            self._refuse(place, value, "an object")
        found = {}
        for name, annotation, required in _fields(kind):
            if name in value:
                found[name] = self.read(annotation, value[name], f"{place}.{name}")
            elif required:
                raise MoeqError(self._code, f"{self._where}: {_shown(place)} lacks {name!r}")
        return kind(**found)

    def _either(self, kinds: tuple[Any, ...], value: Any, place: str) -> Any:
        if value is None and type(None) in kinds:
            return None
        rest = [kind for kind in kinds if kind is not type(None)]
        for kind in rest[:-1]:
            try:
                return self.read(kind, value, place)
            except MoeqError:
                continue
        return self.read(rest[-1], value, place)

    def _sequence(self, origin: type, kinds: tuple[Any, ...], value: Any, place: str) -> Any:
        if not isinstance(value, (list, tuple)):
            self._refuse(place, value, "a list")
        if origin is list or kinds[1:] == (Ellipsis,):
            kinds = (kinds[0],) * len(value)
        if len(kinds) != len(value):
            self._refuse(place, value, f"{len(kinds)} values")
        return origin(
            self.read(kind, one, f"{place}[{i}]") for i, (kind, one) in enumerate(zip(kinds, value, strict=True))
        )

    def _mapping(self, kinds: tuple[Any, ...], value: Any, place: str) -> dict[Any, Any]:
        if not isinstance(value, dict):
            self._refuse(place, value, "an object")
        key_kind, value_kind = kinds
        found = {}
        for name, one in value.items():
            shown = f"{place}[{ascii(name)[1:-1][:80]}]"
            found[self.read(key_kind, name, shown)] = self.read(value_kind, one, shown)
        return found

    def _plain(self, kind: Any, value: Any, place: str) -> Any:
        if kind is float and type(value) is int:
            value = float(value) if abs(value) < _MAX_INTEGER else value
        if type(value) is not kind:
            self._refuse(place, value, _NAMES.get(kind, getattr(kind, "__name__", str(kind))))
        if kind is int and not -_MAX_INTEGER <= value < _MAX_INTEGER:
            self._refuse(place, value, "a number of 64 bits")
        if kind is str and not _is_text(value):
            self._refuse(place, value, "text")
        return value

    def _refuse(self, place: str, value: Any, expected: str) -> NoReturn:
        raise MoeqError(self._code, f"{self._where}: {_shown(place)} is {brief(value)}, expected {expected}")


_NAMES: dict[Any, str] = {
    int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"
}  # fmt: skip


@lru_cache(maxsize=256)
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    """List name, annotation and whether it is required for every field of a dataclass."""
    hints = typing.get_type_hints(kind)
    return tuple(
        (field.name, hints[field.name], _is_required(field)) for field in dataclasses.fields(kind) if field.init
    )


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _is_text(value: str) -> bool:
    """Return whether text can be written as UTF-8; half of a surrogate pair cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def brief(value: Any) -> str:
    """Shorten any value to printable text for messages."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 200:
        return "a very large number"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return ascii(value)[:60]


def _shown(place: str) -> str:
    return place.removeprefix(".") or "the document"
