"""Choose the kernels that run the experts inside an engine: moeq's, or the engine's on the same bytes. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from moeq.errors import MoeqError
from moeq.pipeline.in_memory import Proof

Kernels = Literal["auto", "moeq", "engine"]
Activations = Literal["auto", "fp8"]
KERNELS: tuple[Kernels, ...] = ("auto", "moeq", "engine")

#: Environment variable that applies if the engine's options do not say which kernels.
VARIABLE = "MOEQ_KERNELS"

#: Error codes of an engine's kernels that concern an explicit option, so that no other kernels may replace them.
ASKED_FOR = frozenset({"usage.moe-backend", "environment.marlin-input"})

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """Choice of the kernels that run a layer."""

    own: bool  #: whether they are moeq's kernels, not the engine's
    why: str  #: clause for the log that names the kernels and the reason


@dataclass(frozen=True)
class EngineOptions:
    """Options of moeq inside an engine."""

    kernels: Kernels = "auto"  #: which kernels run converted layers
    prove: Proof = "sample"  #: which experts are proven where a source checkpoint is packed while it is loaded
    #: `fp8` for kernels of moeq that quantise rows of activations to e4m3; `auto` for those of the format.
    activations: Activations = "auto"


#: Options, the environment variable of each, and its values.
_OPTIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "kernels": (VARIABLE, KERNELS),
    "prove": ("MOEQ_PROVE", ("sample", "all")),
    "activations": ("MOEQ_ACTIVATIONS", ("auto", "fp8")),
}


def engine_options(given: Mapping[str, Any] | None) -> EngineOptions:
    """Read the options of moeq inside an engine.

    Args:
        given: the engine's options for moeq: `{"kernels": ..., "prove": ..., "activations": ...}`. Without a key its
            environment variable decides, MOEQ_KERNELS and so on, and without that the default.

    Raises MoeqError `usage.kernels` for any other value, for unknown options, and for e4m3 activations in the engine's
    kernels.
    """
    given = given or {}
    unknown = sorted(map(str, set(given) - set(_OPTIONS)))
    if unknown:
        what = f"moeq has no option {', '.join(unknown)} for engines"
        raise MoeqError("usage.kernels", what, f"the options are {', '.join(_OPTIONS)}")
    found: dict[str, Any] = {}
    for name, (variable, values) in _OPTIONS.items():
        value = given.get(name, os.environ.get(variable) or values[0])
        if value not in values:
            where = f"the option {name}" if name in given else variable
            known = f"{', '.join(values[:-1])} or {values[-1]}"
            raise MoeqError("usage.kernels", f"{where} is {value!r}; it must be {known}")
        found[name] = value
    if found["activations"] == "fp8" and found["kernels"] == "engine":
        raise MoeqError(
            "usage.kernels",
            "activations is fp8, which only moeq's kernels multiply, but kernels is engine",
            "leave out one of the two",
        )
    return EngineOptions(**found)


def result_or_error(check: Callable[[], T]) -> T | MoeqError:
    """Call `check` and return its result, or the MoeqError that it raises."""
    try:
        return check()
    except MoeqError as error:
        return error


def choose(asked: Kernels, own: MoeqError | None, slow: str | None, engine: MoeqError | str) -> Choice:
    """Choose the kernels of one layer.

    Args:
        own: reason why moeq's kernels cannot run the layer, or None.
        slow: reason why moeq's kernels would be those for any GPU (mma.sync, portable) instead of those for this GPU,
            or None.
        engine: reason why the engine's kernels cannot run the layer, or their name.

    Raises MoeqError: the reason, if the kernels that were asked for cannot run the layer; both reasons, if no kernels
    can. Options of the engine count as asked for unless moeq has kernels for this GPU.
    """
    if asked == "moeq" and own is not None:
        raise own
    if asked == "engine" or own is not None:
        if isinstance(engine, MoeqError) and own and asked == "auto":
            raise MoeqError(engine.code, f"{engine.message}; and moeq's kernels: {own.message}", engine.hint)
        if isinstance(engine, MoeqError):
            raise engine
        return Choice(False, f"the engine's {engine}, " + (own.message if own and asked == "auto" else "as asked for"))
    if slow is None:
        return Choice(True, "moeq's kernels for this GPU")
    if asked == "auto":
        if not isinstance(engine, MoeqError):
            return Choice(False, f"the engine's {engine}, since moeq's would be those for any GPU: {slow}")
        if engine.code in ASKED_FOR:
            raise engine
    return Choice(True, f"moeq's kernels for any GPU: {slow}")
