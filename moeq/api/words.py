"""Errors in Python's words: `force=True` where the command line says `--force`."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from moeq.errors import MoeqError

P = ParamSpec("P")
T = TypeVar("T")

#: Options of the command line that are switched on or off, and what says so in Python.
_SWITCHES = {
    **{name: f"{name.replace('-', '_')}=True" for name in ("force", "force-layout", "skip-unfit", "allow-lossy")},
    **{name: f"{name.replace('-', '_')}=True" for name in ("no-code", "dry-run", "stream-source", "reread", "slow")},
    **{name: f"{name.replace('-', '_')}=True" for name in ("sort-act-order", "check-only", "experts-only", "public")},
    **{name: f"{name}=True" for name in ("batched", "lora", "eplb")},
    "standard": "batched=False",
    "no-lora": "lora=False",
    "no-eplb": "eplb=False",
    "no-digests": "digests=False",
    "digests-only": "kernels=False",
    "fp8-activations": "fp8_activations=True",
}

#: Options that take a value, which follows or is left out.
_VALUES = (
    *("gpu", "tp", "ep", "dp", "dtype", "backend", "engine", "all2all", "quantization", "layout", "regroup", "names"),
    *("to", "revision", "workers", "max-memory", "shard", "executor", "ray-address", "sign", "source", "signed-by"),
    *("layers", "experts", "tokens", "device", "jobs", "seed", "base-model", "package", "env"),
)
_OPTION = re.compile(rf"--({'|'.join(sorted((*_SWITCHES, *_VALUES), key=len, reverse=True))})(?![\w-])(?: (\S+))?")

#: Words after an option in a sentence, as against its value.
_PROSE = re.compile(r"[a-z]{2,}s|is|has|was|and|or|with|if|in|of|on|to|for|where|alone|without|may|can|cannot|\W.*")
_NAMES = re.compile(r"triton|aiter|cutlass|vllm|humming|marlin|emulation")

#: Command lines, which stay as they are.
_SHELL = re.compile(r"(`[^`]*`|\b(?:moeq|vllm|pip|hf|mkdir|minisign) [a-z-]+\b[^;]*)")


def in_python(text: str) -> str:
    """Return a message with the options in it spelled as keywords, `--tp 2` as `tp=2`; command lines stay."""
    parts = _SHELL.split(text)
    return "".join(part if index % 2 else _OPTION.sub(_keyword, part) for index, part in enumerate(parts))


def _keyword(found: re.Match[str]) -> str:
    name, value = found[1], found[2]
    after = "" if value is None else f" {value}"
    if name in _SWITCHES:
        return _SWITCHES[name] + after
    keyword = name.replace("-", "_")
    if value is None:
        return keyword
    bare = value.rstrip(",;:.)")
    if not bare or (_PROSE.fullmatch(bare) and not _NAMES.fullmatch(bare)):
        return keyword + after
    quoted = bare if bare.isdecimal() else repr(bare.strip("'\""))
    return f"{keyword}={quoted}{value[len(bare) :]}"


def speaks_python(function: Callable[P, T]) -> Callable[P, T]:
    """Reword the errors of a function for callers in Python."""

    @wraps(function)
    def reworded(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except MoeqError as error:
            hint = None if error.hint is None else in_python(error.hint)
            raise MoeqError(error.code, in_python(error.message), hint) from error.__cause__

    return reworded
