"""An engine policy: families, backends, experts classes, priorities and gates, read from a data file.

Adding an engine version is adding a file `engines/<engine>-<version>.toml`; nothing here knows a backend by name.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from moeq.deploy.deployment import Gpu
from moeq.errors import MoeqError

# AMD architectures by the property that rules ask for. fp8 and OAI-Triton support follow the architecture family.
_ROCM_GROUPS: dict[str, tuple[str, ...]] = {
    "fp8": ("gfx942", "gfx950", "gfx1250", "gfx1200", "gfx1201"),
    "triton": ("gfx90a", "gfx942", "gfx950", "gfx1250", "gfx1100", "gfx1101", "gfx1200", "gfx1201"),
    "cdna4": ("gfx950", "gfx1250"),
}


@dataclass(frozen=True)
class DeviceTerm:
    """One alternative of a device condition, such as `cuda 9.0..12.x`. Platform first, always.

    A bare capability comparison would be meaningless on ROCm, where gfx90a reads as (9, 0) like a Hopper.
    """

    text: str
    platform: str
    low: tuple[int, int] | None = None
    high: tuple[int, int] | None = None
    archs: tuple[str, ...] = ()

    def admits(self, gpu: Gpu) -> bool:
        """Whether the device is one of these."""
        if gpu.platform != self.platform:
            return False
        if self.archs:
            return gpu.arch in self.archs
        capability = gpu.capability or (0, 0)
        return (self.low is None or capability >= self.low) and (self.high is None or capability <= self.high)


@cache
def device_term(text: str) -> DeviceTerm:
    """Parse a device condition. Raises MoeqError `bug.policy` for one that cannot be read."""
    platform, _, detail = text.partition(" ")
    if not detail:
        return DeviceTerm(text, platform)
    if platform == "rocm":
        return DeviceTerm(text, platform, archs=_ROCM_GROUPS.get(detail, (detail,)))
    if platform != "cuda":
        return DeviceTerm(text, platform, archs=(detail,))
    low, _, high = detail.partition("..")
    try:
        if low.endswith("+"):
            return DeviceTerm(text, platform, _version(low[:-1], 0), None)
        return DeviceTerm(text, platform, _version(low, 0), _version(high or low, 99))
    except ValueError:
        raise MoeqError("bug.policy", f"device condition '{text}' cannot be read") from None


def _version(text: str, minor: int) -> tuple[int, int]:
    """`9.0` is (9, 0); `10.x` is (10, minor)."""
    major, _, rest = text.partition(".")
    return (int(major), minor if rest == "x" else int(rest))


@dataclass(frozen=True)
class Pair:
    """A supported pair of weight and activation keys, as patterns, perhaps on some devices only."""

    weight: str
    activation: str
    device: DeviceTerm | None

    def admits(self, weight: str, activation: str, gpu: Gpu) -> bool:
        """Whether this pair covers the keys on that device."""
        return (
            (self.device is None or self.device.admits(gpu))
            and fnmatchcase(weight, self.weight)
            and fnmatchcase(activation, self.activation)
        )


def _pair(text: str) -> Pair:
    keys, _, device = text.partition("@")
    weight, _, activation = keys.strip().partition("|")
    return Pair(weight, activation, device_term(device.strip()) if device else None)


@dataclass(frozen=True)
class ExpertsClass:
    """What one experts class can run: the values of its predicates. Field order follows the order of evaluation."""

    name: str
    devices: tuple[DeviceTerm, ...]
    packages: tuple[str, ...] = ()
    env: tuple[tuple[str, str], ...] = ()
    no_act_and_mul: bool = False
    activations: tuple[str, ...] = ()
    pairs: tuple[Pair, ...] = ()
    parallel: tuple[str, ...] = ()
    hash_routing: bool = False
    monolithic: bool = False
    routing: tuple[str, ...] | None = None
    fp32_logits: tuple[str, ...] | None = None
    format: str = "standard"
    batch_invariant: bool = False
    lora: bool = False
    gemm_type: str | None = None
    max_padded_experts: int | None = None
    max_experts: int | None = None
    hidden_multiple: int = 1
    intermediate_multiple: int = 1
    dtypes: tuple[str, ...] | None = None
    asserted_dtypes: tuple[str, ...] | None = None
    min_top_k: int = 1
    no_bias: bool = False
    clamps: bool = False
    ignores_lora: bool = False
    drops_bias: bool = False
    drops_zero_points: bool = False
    drops_scaling: bool = False


@dataclass(frozen=True)
class LayoutChoice:
    """A layout that a backend's kernel reads under some conditions; one left out holds for all.

    Attributes:
        layout: layout id, or None where no layout matches these conditions.
        when: device.
        activation: activation function (some change the order of gate and up rows).
        dtype: activation dtype.
        env: environment variable and value.
        configs: config classes.
        max_tp: largest tensor-parallel size.
    """

    layout: str | None
    when: DeviceTerm | None = None
    activation: str | None = None
    dtype: str | None = None
    env: tuple[str, str] | None = None
    configs: tuple[str, ...] | None = None
    max_tp: int | None = None


def _layout_choice(row: dict[str, Any]) -> LayoutChoice:
    name, _, value = row.get("env", "").partition("=")
    return LayoutChoice(
        layout=row["layout"] or None,
        when=device_term(row["when"]) if "when" in row else None,
        activation=row.get("activation"),
        dtype=row.get("dtype"),
        env=(name, value) if name else None,
        configs=tuple(row["configs"]) if "configs" in row else None,
        max_tp=row.get("max_tp"),
    )


@dataclass(frozen=True)
class Backend:
    """A backend of a family: classes in order of trial and what the engine calls it."""

    name: str
    classes: tuple[str, ...]
    forced_classes: tuple[str, ...] = ()
    lora_classes: tuple[str, ...] = ()
    flag: str | None = None
    filters: tuple[str, ...] = ()
    activation_key: str | None = None
    layout: str | None = None
    layouts: tuple[LayoutChoice, ...] = ()
    no_layout: str | None = None
    round: str = "none"


@dataclass(frozen=True)
class Family:
    """One selection function of the engine."""

    name: str
    title: str
    order: dict[str, tuple[str, ...]]
    moves: tuple[dict[str, Any], ...]
    backends: dict[str, Backend]
    overrides: dict[str, tuple[str, ...]]
    options: dict[str, Any] = field(default_factory=dict)

    def option(self, name: str, default: Any = None) -> Any:
        """A family-specific switch of the data file."""
        return self.options.get(name, default)


@dataclass(frozen=True)
class EnginePolicy:
    """Everything a data file says."""

    engine: str
    version: str
    backend_flag: str
    families: dict[str, Family]
    classes: dict[str, ExpertsClass]
    packages: dict[str, dict[str, bool]]
    gates: dict[str, Any]
    advisories: tuple[dict[str, Any], ...]

    @property
    def name(self) -> str:
        """`engine@version`."""
        return f"{self.engine}@{self.version}"


_LISTS = ("packages", "parallel", "dtypes", "asserted_dtypes")


def _expand(value: Any, sets: dict[str, list[str]]) -> tuple[str, ...] | None:
    if value is None or value == "any":
        return None
    return tuple(sets[value]) if isinstance(value, str) else tuple(value)


def _class(name: str, table: dict[str, Any], raw: dict[str, Any]) -> ExpertsClass:
    row = dict(table[name])
    while "like" in row:
        base = dict(table[row.pop("like")])
        row = {**base, **row}
    row["devices"] = tuple(device_term(text) for text in row["devices"])
    row["pairs"] = tuple(_pair(text) for text in row.get("pairs", ()))
    row["env"] = tuple(sorted(row.get("env", {}).items()))
    row["activations"] = _expand(row.get("activations", []), raw["activation_sets"]) or ()
    row["routing"] = _expand(row.get("routing"), raw["routing_sets"])
    row["fp32_logits"] = tuple(row["fp32_logits"]) if "fp32_logits" in row else None
    row.update({key: tuple(row[key]) for key in _LISTS if key in row})
    return ExpertsClass(name=name, **row)


def _backend(name: str, row: dict[str, Any]) -> Backend:
    row = dict(row)
    layouts = tuple(_layout_choice(item) for item in row.pop("layouts", ()))
    lists = {key: tuple(value) for key, value in row.items() if isinstance(value, list)}
    return Backend(name=name, layouts=layouts, **{**row, **lists})


_FAMILY_KEYS = ("title", "order", "moves", "backends", "overrides", "like")


def _family(name: str, table: dict[str, Any]) -> Family:
    row = dict(table[name])
    if "like" in row:
        base = table[row["like"]]
        row = {**base, **row}
    backends = {key: _backend(key, value) for key, value in row["backends"].items()}
    overrides = row.get("overrides")
    if overrides is None:
        batched = set(row.get("batched_overrides", {}).values())
        overrides = {b.flag: [b.name] for b in backends.values() if b.flag and b.name not in batched}
    return Family(
        name=name,
        title=row["title"],
        order={key: tuple(value) for key, value in row["order"].items()},
        moves=tuple(row.get("moves", ())),
        backends=backends,
        overrides={key: tuple(value) for key, value in overrides.items()},
        options={key: value for key, value in row.items() if key not in _FAMILY_KEYS},
    )


def build_policy(raw: dict[str, Any]) -> EnginePolicy:
    """The policy that a parsed data file describes."""
    return EnginePolicy(
        engine=raw["engine"],
        version=raw["version"],
        backend_flag=raw["backend_flag"],
        families={name: _family(name, raw["families"]) for name in raw["families"]},
        classes={name: _class(name, raw["classes"], raw) for name in raw["classes"]},
        packages=raw["packages"],
        gates=raw["gates"],
        advisories=tuple(raw.get("advisories", ())),
    )


def engine_names() -> tuple[str, ...]:
    """Names of the engine policies that are there, `moeq` included."""
    folder = files("moeq.oracle").joinpath("engines")
    found = (entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))
    return tuple(sorted("@".join(name.split("-", 1)) for name in found))


@cache
def load_policy(engine: str) -> EnginePolicy:
    """The policy called `engine@version`.

    Raises:
        MoeqError: `usage.unknown-engine`, naming the known ones.
    """
    if engine not in engine_names() or engine == "moeq":
        known = ", ".join(engine_names())
        raise MoeqError("usage.unknown-engine", f"no engine policy is called '{engine}'", f"known: {known}")
    path = files("moeq.oracle").joinpath("engines", engine.replace("@", "-") + ".toml")
    return build_policy(tomllib.loads(path.read_text(encoding="utf-8")))
