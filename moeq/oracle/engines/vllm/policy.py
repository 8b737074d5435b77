"""Engine policies: one version's extracted tables, combined with what `backends.toml` says about the backends."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from moeq.deploy.deployment import Gpu
from moeq.errors import MoeqError
from moeq.layouts.readers import VLLM, Only
from moeq.layouts.registry import LAYOUTS
from moeq.oracle.devices import nearest_device
from moeq.oracle.engines.vllm.tables import (
    ExpertsClass,
    Search,
    SearchTable,
    experts_class,
    parse_search,
    patched,
    unpacked,
)
from moeq.oracle.records import CandidateReport
from moeq.oracle.versions import BUILTIN, engine_names, release

# ------------------------------------------------------------------------------------------------ backends


@dataclass(frozen=True)
class BackendLayout:
    """Layout that a backend's kernel reads under some conditions, as a layout class declares it in its `readers`."""

    layout: str
    only: Only
    lossy: bool  #: whether the engine changes numbers when it makes this layout; moeq then writes it only on request
    since: str | None  #: first version that reads these bytes, where older versions read other bytes; else None


def _layouts(family: str, backend: str) -> tuple[BackendLayout, ...]:
    """Return the layouts that a backend reads, in the order in which their conditions are tried."""
    found = [
        BackendLayout(layout, reader.only, reader.lossy, reader.since if reader.older_differ else None)
        for layout, kind in LAYOUTS.items()
        if kind.family == family
        for reader in kind.readers
        if isinstance(reader, VLLM) and reader.chosen and reader.backend == backend
    ]
    return tuple(sorted(found, key=_order))


def _order(row: BackendLayout) -> tuple[Any, ...]:
    """Return a sort key: layouts without a condition come after the backend's layouts that have the condition."""
    only = row.only
    return (
        *(only.dtype is None, only.env is None, only.activations is None, only.weights is None, only.weights or ()),
        *(only.devices is None, only.activation is None),
    )


@dataclass(frozen=True)
class Backend:
    """One backend of a family."""

    name: str
    classes: tuple[str, ...]  #: its experts classes in order of trial
    activation_key: str | None = None  #: activation key to ask its classes with; None for the method's key
    flag: str | None = None  #: value of the backend option that selects it, or None
    filters: tuple[str, ...] = ()  #: names of the checks on the whole backend
    layouts: tuple[BackendLayout, ...] = ()  #: what its kernel reads; the first layout whose conditions hold applies
    unread: tuple[Only, ...] = ()  #: conditions under which it reads none of moeq's layouts
    no_layout: str | None = None  #: reason for a missing layout
    as_it_is: bool = False  #: whether it reads the bytes of the checkpoint
    native: bool = False  #: whether it computes in the number types of the checkpoint (see `CandidateReport.native`)


@dataclass(frozen=True)
class Family:
    """One selection function of the engine."""

    name: str
    title: str  #: weights that it serves, in words
    backends: Mapping[str, Backend]  #: name -> backend; backends of the automatic order come first
    searches: Mapping[str, Mapping[str, SearchTable]]  #: device -> requested backend -> its table

    def flags(self, device: str) -> tuple[str, ...]:
        """List the backend names that the option accepts on a device."""
        tables = self.searches.get(device, {}).items()
        return tuple(name for name, table in tables if name != "auto" and not _is_unknown(table))


def _is_unknown(table: SearchTable) -> bool:
    return all(search.endswith("OVERRIDE_UNKNOWN") for search in table.rows.values())


def _searches(blocks: Mapping[str, list[Mapping[str, Any]]]) -> dict[str, dict[str, SearchTable]]:
    found: dict[str, dict[str, SearchTable]] = {}
    for asked, groups in blocks.items():
        for group in groups:
            # A text is a search that no factor changes, or `auto`: the table of the automatic choice.
            row: Mapping[str, Any] = group["table"]
            row = {"rows": {"": row}} if isinstance(row, str) else row
            table = SearchTable(tuple(row.get("by", ())), row.get("same", {}), row["rows"])
            for device in group["devices"]:
                tables = found.setdefault(device, {})
                tables[asked] = tables["auto"] if group["table"] == "auto" else table
    return found


def _family(
    name: str, blocks: Mapping[str, list[Mapping[str, Any]]], known: Mapping[str, Any], *, checked: bool
) -> Family:
    row = known.get(name, {})
    like = row.get("like", name)
    row = {**known.get(like, {}), **row}
    searches = _searches(blocks)
    # A name that selects one backend takes precedence over a name that several share.
    flags: dict[str, str] = {}
    classes: dict[str, dict[str, None]] = {}
    keys: dict[str, str | None] = {}
    for _, asked, search in sorted(_all_searches(searches), key=lambda item: item[0]):
        for attempt in (*search.attempts, *([search.unchecked] if search.unchecked else [])):
            classes.setdefault(attempt.backend, {}).setdefault(attempt.experts)
            keys.setdefault(attempt.backend, attempt.activation)
            if asked != "auto":
                flags.setdefault(attempt.backend, asked)
    backends = {}
    for backend, names in classes.items():
        rows = row.get("backends", {})
        facts = dict(rows.get(backend, {}))
        same = facts.pop("like", backend)  # name of the backend whose layouts this one reads
        facts = {"no_layout": row.get("no_layout")} | (rows.get(same, {}) if same != backend else {}) | facts
        filters = tuple(facts.pop("filters", ()))
        facts["filters"] = filters if checked else ()
        facts["unread"] = tuple(Only(**conditions) for conditions in facts.pop("unread", ()))
        layouts = _layouts(like, same)
        backends[backend] = Backend(backend, tuple(names), keys[backend], flags.get(backend), layouts=layouts, **facts)
    return Family(name, row.get("title", name), backends, searches)


def _all_searches(searches: Mapping[str, Mapping[str, SearchTable]]) -> Iterator[tuple[int, str, Search]]:
    """Yield (rank, request, search) of every distinct search; the rank is 0 for `auto`, else the number of backends."""
    # Devices share tables and rows share texts: ten thousand rows hold about a hundred searches.
    tables = {(asked, id(row)): row for rows in searches.values() for asked, row in rows.items()}
    for asked, text in dict.fromkeys((asked, text) for (asked, _), row in tables.items() for text in row.rows.values()):
        search = parse_search(text)
        yield 0 if asked == "auto" else len({attempt.backend for attempt in search.attempts}), asked, search


# ------------------------------------------------------------------------------------------------ policies


@dataclass(frozen=True)
class EnginePolicy:
    """All knowledge about one version of an engine."""

    engine: str
    version: str
    digest: str  #: hex digest of the engine's package that the tables were extracted from
    backend_flag: str  #: engine's option that requests a backend
    families: Mapping[str, Family]
    classes: Mapping[str, ExpertsClass]
    devices: tuple[str, ...]
    packages: Mapping[str, Mapping[str, bool]]  #: platform -> optional packages that its build brings
    #: Device -> declared kind -> method named by the user ("" for none) -> method in force.
    names: Mapping[str, Mapping[str, Mapping[str, str]]]
    limits: Mapping[str, Mapping[str, Any]]  #: method -> minimum capability and accepted dtypes
    #: Device -> MXFP4 backend -> activation ("" for all others) -> multiples of (hidden, intermediate).
    rounding: Mapping[str, Mapping[str, Mapping[str, tuple[int, int]]]]
    overrides: tuple[str, ...]  #: every value of the backend option
    all2all: tuple[str, ...]  #: every all-to-all kind
    activations: tuple[str, ...]  #: every activation function that the version has
    no_converter: tuple[Mapping[str, Any], ...]  #: pairs of config class and backend whose converter raises
    advisories: tuple[Mapping[str, Any], ...]  #: known defects of the engine, with the versions that have them
    _nearest: dict[Gpu, str | None] = field(default_factory=dict, compare=False)

    @property
    def name(self) -> str:
        """Name `engine@version`."""
        return f"{self.engine}@{self.version}"

    @cached_property
    def release(self) -> tuple[int, ...]:
        """Version as numbers: (0, 33, 0)."""
        return release(self.version)

    def since(self, version: str) -> bool:
        """Tell whether this version is the given one or a newer one."""
        return self.release >= release(version)

    def class_of(self, row: CandidateReport | None) -> ExpertsClass | None:
        """Return the experts class that a backend runs; None if the engine's method runs a kernel without a class."""
        if row is None or row.experts is None:
            return None
        # Two classes have the name that CPU_INT4 runs: its class is the one for 8-bit activations.
        return self.classes.get(f"W4A8:{row.experts}" if row.backend == "CPU_INT4" else row.experts)

    def device(self, gpu: Gpu) -> str | None:
        """Return the device of the tables that represents a GPU, or None."""
        if gpu not in self._nearest:
            self._nearest[gpu] = nearest_device(gpu, dict.fromkeys(self.devices))
        return self._nearest[gpu]


def _blocks(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Turn rows of `{"devices": [...], "value": ...}` into device -> value."""
    return {device: row["value"] for row in rows for device in row["devices"]}


def build_policy(tables: Mapping[str, Any], known: Mapping[str, Any]) -> EnginePolicy:
    """Build the policy from a version's extracted tables and from backends.toml (`known`)."""
    forms, flags = tuple(tables["forms"]), known["classes"]
    checked = release(tables["version"]) >= release(known["filters_since"])
    families = {
        name: _family(name, blocks, known["families"], checked=checked) for name, blocks in tables["families"].items()
    }
    classes = {name: experts_class(name, row, forms, flags.get(name, {})) for name, row in tables["classes"].items()}
    # Some classes are tried and run on none of the devices.
    named = {name for family in families.values() for backend in family.backends.values() for name in backend.classes}
    classes.update({name: ExpertsClass(name, "standard", False, None, {}) for name in sorted(named - set(classes))})
    return EnginePolicy(
        engine=tables["engine"],
        version=tables["version"],
        digest=tables["digest"],
        backend_flag=known["backend_flag"],
        families=families,
        classes=classes,
        devices=tuple(tables["devices"]),
        packages=known["packages"],
        names=_blocks(tables["names"]),
        limits=tables["limits"],
        rounding=_blocks(tables["rounding"]),
        overrides=tuple(tables["overrides"]),
        all2all=tuple(tables["all2all"]),
        activations=_activations(classes),
        no_converter=tuple(known["no_converter"]),
        advisories=tuple(known["advisories"]),
    )


def _activations(classes: Mapping[str, ExpertsClass]) -> tuple[str, ...]:
    variants = (item for row in classes.values() for items in row.variants.values() for item in items)
    return tuple(sorted({name for item in variants for name in item.activations} | {"relu2"}))  # no class has relu2


@cache
def backend_facts(engine: str) -> dict[str, Any]:
    """Load the engine's `backends.toml`: facts about classes and backends, converters that raise, and advisories."""
    return tomllib.loads(files("moeq.oracle").joinpath("engines", engine, "backends.toml").read_text(encoding="utf-8"))


@cache
def load_policy(engine: str) -> EnginePolicy:
    """Load the policy called `engine@version`. Raises MoeqError `usage.unknown-engine`, naming the known ones."""
    if engine not in engine_names() or engine == BUILTIN:
        known = ", ".join(engine_names())
        raise MoeqError("usage.unknown-engine", f"no engine policy is called '{engine}'", f"known: {known}")
    name, _, version = engine.partition("@")
    folder = files("moeq.oracle").joinpath("engines", name)
    return build_policy(unpacked(_stored(folder.joinpath("tables"), version)), backend_facts(name))


def _stored(folder: Traversable, version: str) -> dict[str, Any]:
    """Read a version's stored tables, which may be stored as changes from the tables of a close release."""
    stored: dict[str, Any] = json.loads(folder.joinpath(f"{version}.json").read_text(encoding="utf-8"))
    return patched(_stored(folder, stored["like"]), stored["changes"]) if "like" in stored else stored
