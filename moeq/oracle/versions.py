"""Which engines and versions moeq has tables of, and which of them stands for an engine that was asked for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files

from moeq.errors import MoeqError

#: The policy of moeq's built-in kernels: not an engine's tables, see `builtin.py`.
BUILTIN = "moeq"
#: Engines whose tables are here.
ENGINES = ("vllm",)


@lru_cache(1024)  # a verdict asks about two thousand times, a few versions
def release(version: str) -> tuple[int, ...]:
    """A version's numbers. Raises MoeqError `usage.engine-version`."""
    match = re.fullmatch(r"v?(\d+(?:\.\d+)*)(?:[.+-]?(?:post|rc|dev|a|b|cu|cpu|rocm)?\S*)?", version)
    if match is None:
        raise MoeqError("usage.engine-version", f"'{version}' is not a version", "such as 0.33.0")
    return tuple(int(part) for part in match[1].split("."))


@cache
def versions(engine: str) -> tuple[str, ...]:
    """Versions of an engine whose tables are here, oldest first."""
    folder = files("moeq.oracle").joinpath("engines", engine, "tables")
    found = [entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")]
    return tuple(sorted(found, key=release))


def engine_names() -> tuple[str, ...]:
    """Names of the engine policies that are there, `moeq` included."""
    return (BUILTIN, *(f"{name}@{version}" for name in ENGINES for version in versions(name)))


@dataclass(frozen=True)
class EngineChoice:
    """Which tables stand for an engine that was asked for.

    Attributes:
        policy: name of the policy that decides.
        other: where the version asked for lies between two known ones: the newer of them. What it decides is said too.
        notes: how the choice came about, where that is not plain.
    """

    policy: str
    other: str | None = None
    notes: tuple[str, ...] = ()


def choose_engine(asked: str) -> EngineChoice:
    """The policy behind `vllm@0.33.0`, a version between two known ones, a newer one, or `vllm` (the installed one,
    else the newest known). One that is older than all known ones is refused when it is asked for by number.

    Raises:
        MoeqError: `usage.unknown-engine`, `usage.engine-version`.
    """
    name, _, version = asked.partition("@")
    if name not in ENGINES:
        raise MoeqError("usage.unknown-engine", f"no engine is called '{asked}'", f"known: {', '.join(engine_names())}")
    known = versions(name)
    notes: tuple[str, ...] = ()
    if not version:
        installed = installed_version(name)
        version = installed or known[-1]
        what = (
            f"{name} {version} is installed" if installed else f"{name} is not installed: decided as the newest known"
        )
        notes = (f"{what}, {name} {version}" if not installed else what,)
    if version in known:
        return EngineChoice(f"{name}@{version}", None, notes)
    older = [one for one in known if release(one) < release(version)]
    newer = [one for one in known if release(one) > release(version)]
    if asked.partition("@")[2] and not older:
        hint = f"known: {', '.join(known)}"
        raise MoeqError("usage.engine-version", f"{name} {version} is older than all known versions", hint)
    used = older[-1] if older else newer[0]
    other = f"{name}@{newer[0]}" if older and newer else None
    beside = f", beside {newer[0]}" if other else f"; nothing {'newer' if older else 'older'} is known"
    notes += (f"{name} {version} is not known exactly: decided as {used}{beside}",)
    return EngineChoice(f"{name}@{used}", other, notes)


def installed_version(name: str) -> str | None:
    """Version of an engine in this environment, or None. Nothing of it is imported."""
    from importlib.metadata import PackageNotFoundError, version

    for package in (name, f"{name}-cpu"):
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def version_range(asked: str) -> tuple[str, ...]:
    """The known policies from `vllm@A..B`, both ends included.

    Raises:
        MoeqError: `usage.engine-version` for a range that holds fewer than two known versions; `usage.unknown-engine`.
    """
    name, _, ends = asked.partition("@")
    low, _, high = ends.partition("..")
    if name not in ENGINES:
        raise MoeqError("usage.unknown-engine", f"no engine is called '{name}'", f"known: {', '.join(engine_names())}")
    known = versions(name)
    found = tuple(
        f"{name}@{one}" for one in known
        if (not low or release(one) >= release(low)) and (not high or release(one) <= release(high))
    )  # fmt: skip
    if len(found) < 2:
        raise MoeqError(
            "usage.engine-version", f"{asked} holds fewer than two known versions", f"known: {', '.join(known)}"
        )
    return found
