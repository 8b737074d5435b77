"""One version's extracted tables, read back as records: experts classes, and the order in which backends are tried.

`tools/extract.py` writes the files in `tables/`; `tools/vllm_tables/storing.py` describes their form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

Tables = dict[str, Any]

# ------------------------------------------------------------------------------------------------ the stored form


def patched(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table with changes applied (the inverse of `vllm_tables.storing.changes`).

    A change to None removes a key, a table changes a table, and any other value replaces the old one.
    """
    found = dict(table)
    for key, value in changes.items():
        if value is None:
            found.pop(key, None)
        else:
            nested = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = patched(found[key], value) if nested else value
    return found


def unpacked(stored: Mapping[str, Any]) -> Tables:
    """Expand stored tables. A search still has no row where a shorter key's row is equal; `names` is by device."""

    def devices(listed: str) -> list[str]:
        return list(stored["devices"]) if listed == "*" else listed.split(" ")

    names: dict[str, dict[str, dict[str, str]]] = {device: {} for device in stored["devices"]}
    for kind, groups in stored["names"].items():
        for listed, row in groups.items():
            for device in devices(listed):
                names[device][kind] = _unpack_names(row, stored["users"])
    classes = {
        name: {**row, "blocks": [{"devices": devices(key), "variants": rows} for key, rows in row["blocks"].items()]}
        for name, row in stored["classes"].items()
    }
    found = {
        **stored,
        "names": [{"devices": [device], "value": value} for device, value in names.items()],
        "classes": classes,
        "families": {name: _unpack_family(row, devices) for name, row in stored["families"].items()},
        "rounding": [{"devices": devices(listed), "value": value} for listed, value in stored["rounding"].items()],
    }
    del found["users"]
    return found


def _unpack_names(row: Mapping[str, Any], users: list[str]) -> dict[str, str]:
    return {
        user: user if method == "=" else method
        for method, listed in row.items()
        for user in (users if listed == "*" else listed)
    }


def _unpack_family(stored: Mapping[str, Any], devices: Callable[[str], list[str]]) -> dict[str, list[Tables]]:
    searches = {name: " ".join(words) for name, words in stored["searches"].items()}

    def table(row: Any) -> Any:
        if isinstance(row, str):
            return searches.get(row, row)
        return {**row, "rows": {key: searches.get(name, name) for key, name in row["rows"].items()}}

    return {
        asked: [{"devices": devices(listed), "table": table(row)} for listed, row in groups.items()]
        for together, groups in stored["tables"].items()
        for asked in together.split(" ")
    }


def longest_prefix(key: tuple[str, ...], rows: Mapping[tuple[str, ...], Any]) -> tuple[str, ...]:
    """Return the longest prefix of a key that has a row."""
    while key and key not in rows:
        key = key[:-1]
    return key


# ------------------------------------------------------------------------------------------------ experts classes


@dataclass(frozen=True)
class Variant:
    """Conditions under which a class accepts some pairs of keys on some devices: one row of the extracted table."""

    pairs: frozenset[tuple[str, str]]  #: accepted `(weight key, activation key)`; activation `*` is any
    activations: tuple[str, ...]  #: accepted activation functions
    parallel: frozenset[str]  #: accepted parallel forms, as `Case.parallel_form` names them
    routing: tuple[str, ...] | None = None  #: routing methods; None for all
    #: Routing methods that take fp32 router logits; None for all of `routing`.
    fp32_logits: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] = ()  #: accepted activation dtypes
    lora: bool = False  #: whether adapters on experts are accepted
    bias: bool = True  #: whether expert biases are accepted
    limit: tuple[str, ...] | None = None  #: activation functions that may have a clamp; None for all
    hidden: int | None = 1  #: divisor that the hidden size must have
    intermediate: int | None = 1  #: divisor that the intermediate size per rank must have
    intermediate_by: tuple[tuple[str, int], ...] = ()  #: activation functions with another such divisor
    max_experts: int | None = None  #: largest number of experts; None without a limit
    min_top_k: int | None = 1  #: smallest number of experts per token
    hash_routing: bool = True  #: whether experts may be chosen by token id
    decomposed: bool = True  #: whether the router may stay outside the kernel
    batch_invariant: bool = False  #: whether results do not depend on the batch
    packages: tuple[str, ...] = ()  #: optional packages that the class needs
    #: Environment variables that the class depends on, each with the accepted values (None: unset).
    env: tuple[tuple[str, tuple[str | None, ...]], ...] = ()

    def admits(self, weight: str, activation: str) -> bool:
        """Return whether the variant accepts a pair of weight and activation keys."""
        return (weight, activation) in self.pairs or (weight, "*") in self.pairs


def _variant(row: Mapping[str, Any], forms: tuple[str, ...]) -> Variant:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
    values["pairs"] = frozenset(_pair(text) for text in row["pairs"])
    refused = frozenset(row["parallel"].get("not", ()))
    values["parallel"] = frozenset(row["parallel"].get("only", ())) or frozenset(forms) - refused
    values["intermediate_by"] = tuple(row.get("intermediate_by", {}).items())
    values["env"] = tuple((name, tuple(allowed)) for name, allowed in row.get("env", {}).items())
    return Variant(**values)


def _pair(text: str) -> tuple[str, str]:
    weight, _, activation = text.partition("|")
    return weight, activation


@dataclass(frozen=True)
class ExpertsClass:
    """One experts class: its conditions by device, and the inputs that it silently drops."""

    name: str  #: class name, with the prefix `W4A8:` for the second of two classes with one name
    format: str  #: activation format, `standard` or `batched`
    monolithic: bool  #: whether it does its own routing
    gemm_type: str | None  #: Humming's GEMM type; None for others
    variants: Mapping[str, tuple[Variant, ...]]  #: device -> variants
    ignores_lora: bool = False  #: whether adapters are silently ignored
    drops_bias: bool = False  #: whether biases are silently dropped
    drops_zero_points: bool = False  #: whether stored zero points are silently dropped
    drops_scaling: bool = False  #: whether the routed scaling factor and the clamp are silently dropped
    asserted_dtypes: tuple[str, ...] | None = None  #: dtypes that are asserted when the kernel is made
    shard_multiple: int = 1  #: divisor of a rank's intermediate size that selection itself requires
    #: Whether the class refuses tokens that the model's class has split over tensor-parallel ranks.
    whole_sequences: bool = False

    @property
    def short(self) -> str:
        """Engine's own name of the class."""
        return self.name.rpartition(":")[2]


def experts_class(name: str, row: Mapping[str, Any], forms: tuple[str, ...], flags: Mapping[str, Any]) -> ExpertsClass:
    """Build a class from its row in the extracted tables and its `flags` in backends.toml."""
    variants: dict[str, tuple[Variant, ...]] = {}
    for block in row["blocks"]:
        made = tuple(_variant(item, forms) for item in block["variants"])
        variants.update({device: made for device in block["devices"]})
    asserted = {"asserted_dtypes": tuple(flags["asserted_dtypes"])} if "asserted_dtypes" in flags else {}
    return ExpertsClass(name, row["format"], row["monolithic"], row["gemm_type"], variants, **{**flags, **asserted})


# ------------------------------------------------------------------------------------------------ the order of trial


@dataclass(frozen=True)
class Attempt:
    """One candidate of a search: a class of a backend, and the activation key to ask it with (None: the method's key).

    `reported` is the backend in the engine's log, if that is not the one that runs.
    """

    backend: str
    experts: str
    activation: str | None = None
    reported: str | None = None


@dataclass(frozen=True)
class Search:
    """Candidates of a selection function in order, and what follows if none of them fits: an error or a last one."""

    attempts: tuple[Attempt, ...]
    error: tuple[str, str] | None = None  #: exception type and kind of error at the end, or None
    unchecked: Attempt | None = None  #: candidate that is taken at the end without asking its class, or None


@cache
def parse_search(text: str) -> Search:
    """Parse a search of the tables: `BACKEND/Class@key ... !Error:KIND` or `... =BACKEND~REPORTED/Class`."""
    *words, end = text.split(" ")
    attempts = tuple(_attempt(word) for word in words)
    if end.startswith("="):
        return Search(attempts, None, _attempt(end[1:]))
    error, _, kind = end[1:].partition(":")
    return Search(attempts, (error, kind))


def _attempt(text: str) -> Attempt:
    backend, _, rest = text.partition("/")
    experts, _, key = rest.partition("@")
    backend, _, reported = backend.partition("~")
    return Attempt(backend, experts, key or None, reported or None)


@dataclass(frozen=True)
class SearchTable:
    """Searches for one requested backend on a device, by the factors of a case that change the search."""

    factors: tuple[str, ...]  #: names of the factors, in the order of a row's key
    same: Mapping[str, Mapping[str, str]]  #: factor -> value -> value that represents it
    #: `factor=value,...` without the usual values -> search; a missing key has the search of its longest prefix.
    rows: Mapping[str, str]

    @cached_property
    def known(self) -> frozenset[str]:
        """Every `factor=value` that changes a search."""
        return frozenset(word for key in self.rows for word in key.split(",") if word)

    @cached_property
    def usual(self) -> Search:
        """Search of a case in which no factor has an unusual value."""
        return parse_search(self.rows[""])

    def word(self, factor: str, value: str) -> str | None:
        """Return the part of a row's key for a factor's value; None if the value changes nothing."""
        word = f"{factor}={self.same.get(factor, {}).get(value, value)}"
        return word if word in self.known else None

    @cached_property
    def _by_words(self) -> Mapping[tuple[str, ...], str]:
        return {tuple(key.split(",")) if key else (): search for key, search in self.rows.items()}

    def search(self, words: tuple[str, ...]) -> str:
        """Look up the search of a case by its words, in the order of the factors."""
        return self._by_words[longest_prefix(words, self._by_words)]
