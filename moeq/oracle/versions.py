"""Engine versions that moeq has tables of, and the choice of tables for a requested version."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files

from packaging.version import InvalidVersion, Version

from moeq.errors import MoeqError

#: Engine name of moeq's own kernels, which need no tables.
BUILTIN = "moeq"
#: Engines with extracted tables.
ENGINES = ("vllm",)
#: Release -> release with the same decisions: the packages differ in one draft model only (`qwen3_dspark.py`).
SAME_DECISIONS = {("vllm", "0.27.0"): "0.27.1"}


@lru_cache(1024)  # one verdict asks about two thousand times for a few versions
def release(version: str) -> tuple[int, ...]:
    """Return the release numbers of a version, without suffixes. Raise MoeqError `usage.engine-version`."""
    try:
        return Version(version).release
    except InvalidVersion:
        raise MoeqError(
            "usage.engine-version", f"'{version}' is not a version", "name a version such as 0.33.0"
        ) from None


@cache
def versions(engine: str) -> tuple[str, ...]:
    """List the versions of an engine that have tables, oldest first."""
    folder = files("moeq.oracle").joinpath("engines", engine, "tables")
    found = [entry.name.removesuffix(".json") for entry in folder.iterdir() if entry.name.endswith(".json")]
    return tuple(sorted(found, key=release))


def engine_names() -> tuple[str, ...]:
    """List all names of engine versions: `moeq`, and `engine@version` for every version with tables."""
    return (BUILTIN, *(f"{name}@{version}" for name in ENGINES for version in versions(name)))


def _known(engine: str, asked: str) -> tuple[str, ...]:
    """Return the versions of an engine. Raise MoeqError `usage.unknown-engine`, with the name that was asked for."""
    if engine not in ENGINES:
        raise MoeqError("usage.unknown-engine", f"no engine is called '{asked}'", f"known: {', '.join(engine_names())}")
    return versions(engine)


@dataclass(frozen=True)
class EngineChoice:
    """Tables that represent a requested engine version."""

    policy: str  #: name of the version that decides, `vllm@0.33.0`
    #: Newer neighbour of a requested version between two known ones; its decision is reported as well.
    other: str | None = None
    notes: tuple[str, ...] = ()  #: sentences about the choice, if it is not obvious


def choose_engine(asked: str) -> EngineChoice:
    """Choose the tables for `vllm@VERSION`; plain `vllm` means the installed version, else the newest known one.

    A version between two known ones gets the older one's tables, and a version newer than all gets the newest tables. A
    version older than all known ones is refused if it is requested by number.
    Raises MoeqError `usage.unknown-engine`, `usage.engine-version`.
    """
    name, _, version = asked.partition("@")
    known = _known(name, asked)
    notes: tuple[str, ...] = ()
    if not version:
        installed = installed_version(name)
        version = installed or known[-1]
        newest = f"{name} is not installed: decided as the newest known, {name} {version}"
        notes = (f"{name} {version} is installed" if installed else newest,)
    same = SAME_DECISIONS.get((name, version))
    if same is not None:
        return EngineChoice(f"{name}@{same}", None, (*notes, f"{name} {version} decides as {same} does"))
    if version in known:
        return EngineChoice(f"{name}@{version}", None, notes)
    older = [one for one in known if release(one) <= release(version)]
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
    """Return the version of an engine in this environment, or None. The engine is not imported."""
    for package in (name, f"{name}-cpu"):
        try:
            return version(package).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def version_range(asked: str) -> tuple[str, ...]:
    """List the known versions in `vllm@A..B`, both ends included.

    Raises MoeqError `usage.engine-version` if the range has fewer than two known versions; `usage.unknown-engine`.
    """
    name, _, ends = asked.partition("@")
    low, _, high = ends.partition("..")
    known = _known(name, name)
    found = tuple(
        f"{name}@{one}" for one in known
        if (not low or release(one) >= release(low)) and (not high or release(one) <= release(high))
    )  # fmt: skip
    if len(found) < 2:
        raise MoeqError(
            "usage.engine-version", f"{asked} holds fewer than two known versions", f"known: {', '.join(known)}"
        )
    return found
