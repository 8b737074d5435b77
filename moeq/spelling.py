"""How messages spell options: `--tp 2` for a shell, `tp=2` for Python.

A message is made where the fault is, which knows neither who asked nor how. It names an option by `option`, with the
keyword and the value of Python; the command line says once that messages go to a shell. No torch.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING: Any = object()

#: Options of the command line that are not called like the keyword whose value they set.
_SHELL_NAMES = {("batched", False): "--standard", ("kernels", False): "--digests-only"}

_shell = False


def for_shell() -> bool:
    """Return whether options are spelled for a shell, so that another process can be told."""
    return _shell


@contextmanager
def spelled(*, for_shell: bool) -> Iterator[None]:
    """Spell options as the command line takes them, or as keywords of Python (the default), in this whole process."""
    global _shell
    before, _shell = _shell, for_shell
    try:
        yield
    finally:
        _shell = before


def option(keyword: str, value: Any = _MISSING) -> str:
    """Return an option as the caller would type it.

    Args:
        keyword: name of the option in Python, such as `max_memory`.
        value: its value in Python: a bool for a switch, a dict for `package` and `env`; left out to name the option.
    """
    return _in_shell(keyword, value) if _shell else _in_python(keyword, value)


def together(options: Iterable[str]) -> str:
    """Return several options as the caller would type them behind each other."""
    return (" " if _shell else ", ").join(options)


def _in_python(keyword: str, value: Any) -> str:
    if value is _MISSING:
        return keyword
    return f'{keyword}="{value}"' if isinstance(value, str) else f"{keyword}={value!r}"


def _in_shell(keyword: str, value: Any) -> str:
    name = f"--{keyword.replace('_', '-')}"
    if value is _MISSING or value is True:
        return name
    if value is False:
        return _SHELL_NAMES.get((keyword, value), f"--no-{keyword.replace('_', '-')}")
    return f"{name} {shlex.quote(str(value))}"
