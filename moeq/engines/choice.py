"""Which kernels run the experts inside an engine: moeq's own, or the engine's on the same bytes. No torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from moeq.errors import MoeqError

Kernels = Literal["auto", "moeq", "engine"]
KERNELS: tuple[Kernels, ...] = ("auto", "moeq", "engine")

#: Read where the engine's own options say nothing.
VARIABLE = "MOEQ_KERNELS"

#: Errors of an engine's kernels that mean: what was asked for by name cannot be had. No other kernels are the answer.
ASKED_FOR = frozenset({"usage.moe-backend", "environment.marlin-input"})

T = TypeVar("T")


@dataclass(frozen=True)
class Choice:
    """Which kernels run a layer.

    Attributes:
        own: moeq's kernels; else the engine's.
        why: one clause that says what they are, for the log.
    """

    own: bool
    why: str


def asked_kernels(options: Mapping[str, Any] | None) -> Kernels:
    """`auto`, `moeq` or `engine`.

    Args:
        options: the engine's options for moeq: `{"kernels": ...}`; without that key the environment variable
            MOEQ_KERNELS is read, and without that it is `auto`.

    Raises:
        MoeqError: `usage.kernels` for any other value, and for options that there are not.
    """
    unknown = sorted(map(str, set(options or {}) - {"kernels"}))
    if unknown:
        what = f"moeq has no option {', '.join(unknown)} for engines"
        raise MoeqError("usage.kernels", what, "the one there is: kernels")
    where = "the option kernels" if options and "kernels" in options else VARIABLE
    found = (options or {}).get("kernels", os.environ.get(VARIABLE) or "auto")
    if found not in KERNELS:
        raise MoeqError("usage.kernels", f"{where} is {found!r}; it must be {', '.join(KERNELS[:-1])} or {KERNELS[-1]}")
    return cast(Kernels, found)


def outcome(check: Callable[[], T]) -> T | MoeqError:
    """What `check` returns, or the MoeqError that it raises: a reason, until nothing else is left."""
    try:
        return check()
    except MoeqError as error:
        return error


def choose(asked: Kernels, own: MoeqError | None, slow: str | None, engine: MoeqError | str) -> Choice:
    """Decide for one layer.

    Args:
        asked: what was asked for.
        own: why moeq's kernels cannot run it, or None.
        slow: why they would be those for any GPU (mma.sync, portable) instead of those made for this one, or None.
        engine: why the engine's cannot run it, or their name.

    Raises:
        MoeqError: the reason, where what was asked for cannot be had; both reasons, where nothing runs the layer.
            Options of the engine count as asked for while none of moeq's kernels is for this GPU.
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


__all__ = ["KERNELS", "VARIABLE", "Choice", "Kernels", "asked_kernels", "choose", "outcome"]
