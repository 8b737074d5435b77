"""The declarations of a quantisation config about a module, in any dialect. Imports no torch.

Headers decide what is quantised; the config decides what headers cannot tell (symmetry, zero-point convention,
act-order, activation quantisation) and is checked against them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from moeq.errors import MoeqError
from moeq.schemes.base import QuantKey


@dataclass(frozen=True)
class Declared:
    """The quantisation that a config declares for one module."""

    method: str
    #: The method's own format name (`gptq_v2`, `gemm`, `pack-quantized`, `auto_round:auto_gptq`, ...).
    variant: str = ""
    bits: int | None = None  #: bits of a weight, if declared
    group_size: int | None = None  #: weights along `K` per scale; -1 is one per channel; None where not declared
    symmetric: bool | None = None  #: whether there are no zero points; None where not declared
    act_order: bool = False  #: whether columns are reordered by activation size
    #: Granularity by name (`group`, `channel`, `tensor`, `block`), where the dialect has it.
    strategy: str | None = None
    block: tuple[int, int] | None = None  #: rows and columns of weights that share a scale, where declared
    activation: QuantKey | None = None  #: type to which activations are to be quantised
    writer: str | None = None  #: name and version of the tool that wrote the checkpoint, where the config has them
    rule: str = "quantization_config"  #: config entry that decided, for messages

    def overridden(self, **fields: Any) -> Declared:
        """Return the declaration with the given `fields`, except fields that are None."""
        return replace(self, **{name: value for name, value in fields.items() if value is not None})


@dataclass(frozen=True)
class Declaration:
    """A whole quantisation config."""

    method: str
    origin: str  #: file and key it was found under
    default: Declared | None  #: declaration where no rule says otherwise; None where nothing is quantised by default
    #: Returns the declaration of a module by its name, or None if the config leaves the module unquantised.
    resolve: Callable[[str], Declared | None]
    per_expert: bool = False  #: whether rules may single out experts, so that each has to be looked up
    #: Reason why nothing declared this way can be converted (rotations, sparsity, ...), or None.
    refusal: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Fields:
    """Typed look-ups in a quantisation config; every error names the key, the value and the place.

    Python's `bool` is an `int` and many configs come from hand-edited JSON, so types are checked exactly.
    """

    table: Mapping[str, Any]
    where: str

    def integer(self, *keys: str, low: int = -1, high: int = 1 << 20) -> int | None:
        """Return the first of `keys` that is not null, as an exact integer in range."""
        for key, value in self._present(keys):
            if type(value) is not int or not low <= value <= high:
                raise self.refuse(key, value, f"expected a whole number from {low} to {high}")
            return value
        return None

    def flag(self, *keys: str) -> bool | None:
        """Return the first of `keys` that is not null, as a boolean."""
        for key, value in self._present(keys):
            if not isinstance(value, bool):
                raise self.refuse(key, value, "expected true or false")
            return value
        return None

    def text(self, *keys: str) -> str | None:
        """Return the first of `keys` that is not null, as a string in lower case."""
        for key, value in self._present(keys):
            if not isinstance(value, str) or len(value) > 200 or not value.isprintable():
                raise self.refuse(key, value, "expected a name")
            return value.lower()
        return None

    def names(self, *keys: str) -> list[str]:
        """Return the first of `keys` that is not null, as a list of strings; one string with commas is a list, too."""
        for key, value in self._present(keys):
            items = value.split(",") if isinstance(value, str) else value
            if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
                raise self.refuse(key, value, "expected a list of names")
            return [item.strip() for item in items]
        return []

    def table_of(self, *keys: str) -> dict[str, Any]:
        """Return the first of `keys` that is not null, as an object."""
        for key, value in self._present(keys):
            if not isinstance(value, dict):
                raise self.refuse(key, value, "expected an object")
            return value
        return {}

    def block(self, *keys: str) -> tuple[int, int] | None:
        """Return the first of `keys` that is not null, as `[rows, columns]` of a block (also spelled `128x128`)."""
        for key, value in self._present(keys):
            if isinstance(value, str):
                value = [int(size) if size.isdecimal() else size for size in value.split("x")]
            if not isinstance(value, list) or len(value) != 2 or not all(_is_size(item) for item in value):
                raise self.refuse(key, value, "expected two positive whole numbers, rows and columns of a block")
            return value[0], value[1]
        return None

    def refuse(self, key: str, value: object, expected: str) -> MoeqError:
        """Return the MoeqError `source.bad-config` for a value that is not as expected."""
        return MoeqError("source.bad-config", f"{self.where}: {key} is {ascii(value)[:80]}, {expected}")

    def _present(self, keys: Sequence[str]) -> Iterator[tuple[str, Any]]:
        for key in keys:
            value = self.table.get(key)
            if value is not None:
                yield key, value


def _is_size(value: object) -> bool:
    return type(value) is int and 0 < value <= 1 << 20


def group_size(fields: Fields, *keys: str) -> int | None:
    """Return a group size: positive, or -1 for one scale per channel; None where not declared."""
    value = fields.integer(*keys)
    if value == 0:
        raise fields.refuse(keys[0], 0, "expected -1 or a positive number of weights")
    return value


def names_module(entry: str, module: str) -> bool:
    """Return whether an exclusion names a module: exactly, by an enclosing module, or with a wildcard."""
    return module == entry or module.startswith(f"{entry}.") or ("*" in entry and fnmatchcase(module, f"{entry}*"))


def declared_unless(
    fields: Fields, skipped: Sequence[str], declared: Declared, experts: Declared | None = None
) -> Declaration:
    """Return a config that declares nothing for `skipped`, `experts` (if given) for experts, else `declared`."""

    def resolve(module: str) -> Declared | None:
        if any(names_module(entry, module) for entry in skipped):
            return None
        return experts if experts and ".experts" in module else declared

    return Declaration(declared.method, fields.where, declared, resolve, raw=fields.table)
