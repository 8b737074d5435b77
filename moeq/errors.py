"""The one exception users see, and what each kind of failure means to the shell.

Every expected failure is a `MoeqError` with a stable dotted code such as `source.truncated`. The part before the
dot is the kind, and the kind alone decides the exit code: scripts branch on the number, people read the message,
and no two places can disagree about what a kind means.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable
from enum import IntEnum

from moeq.spelling import option


class ExitCode(IntEnum):
    """Process exit codes of the `moeq` command (a stable contract)."""

    OK = 0
    NO = 1
    USAGE = 2
    ENVIRONMENT = 3
    SOURCE = 4
    RESOURCES = 5
    UNKNOWN = 6  # moeq does not know what the engine decides
    BUG = 70
    INTERRUPTED = 130


EXIT_CODES: dict[str, ExitCode] = {
    "answer": ExitCode.NO,  # it ran fine and the answer is no: no backend, mismatch, beyond tolerance
    "usage": ExitCode.USAGE,  # the request makes no sense: bad option, output exists, options that contradict
    "environment": ExitCode.ENVIRONMENT,  # this machine lacks something: a package, a GPU, a permission
    "source": ExitCode.SOURCE,  # the checkpoint is missing, gated, corrupt, incomplete or of an unknown format
    "resources": ExitCode.RESOURCES,  # out of disk or over the memory ceiling; partial work is kept
    "interrupted": ExitCode.INTERRUPTED,
    "bug": ExitCode.BUG,
}


class MoeqError(Exception):
    """An expected failure, worded for the person who has to act on it.

    Args:
        code: `kind.detail`, where kind is a key of `EXIT_CODES`. Stable: scripts may match on it.
        message: what is wrong, where, with the numbers.
        hint: the nearest thing that works, or None where there is none.
    """

    def __init__(self, code: str, message: str, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.hint = hint
        if hint is not None:
            self.add_note(f"nearest: {hint}")  # tracebacks are all that an engine's log has of it
        self.exit_code = EXIT_CODES[code.partition(".")[0]]

    def __reduce__(self) -> tuple[type[MoeqError], tuple[str, str, str | None]]:
        # The default would rebuild from `args` alone and fail; errors must cross process boundaries.
        return (type(self), (self.code, self.message, self.hint))


def listed(items: Iterable[object], limit: int = 5, separator: str = ", ") -> str:
    """Name the first `limit` items, and say how many more there are."""
    names = list(items)
    shown = separator.join(map(str, names[:limit]))
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit:,} more"


def as_moeq_error(error: BaseException) -> MoeqError:
    """Turn any exception into what users are shown: an interruption, what the machine lacks, or else a bug."""
    if isinstance(error, MoeqError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return MoeqError("interrupted.signal", "interrupted")
    lacking = _lacking(error)
    if lacking is not None:
        return lacking
    return MoeqError(
        "bug.unexpected",
        f"moeq failed unexpectedly: {type(error).__name__}: {error}",
        "this is a bug in moeq; run again with MOEQ_DEBUG=1 for the traceback and report it",
    )


#: Messages of libraries that raise no MemoryError when memory or threads run out: torch, the loader of shared
#: libraries, and C modules that set no exception.
_NO_MEMORY = (
    *("can't allocate memory", "not enough memory", "cannot allocate memory", "can't start new thread"),
    *("failed to map segment from shared object", "error return without exception set"),
)


def limit_error(error: BaseException) -> MoeqError | None:
    """Return the error for a limit of the process that was reached, whichever file happened to meet it; else None."""
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EMFILE or number == errno.ENFILE:
        return MoeqError(
            "resources.open-files",
            f"too many files are open: {os.strerror(number)}; what was finished is kept",
            f"a higher limit (ulimit -n 1024), or fewer {option('workers')}",
        )
    # The loader of shared libraries raises an OSError without a number.
    foreign = isinstance(error, (RuntimeError, ImportError, SystemError, OSError)) and number is None
    no_memory = foreign and any(text in str(error).lower() for text in _NO_MEMORY)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or no_memory:
        hint = f"fewer {option('workers')}, a higher limit, or a machine with more memory"
        return MoeqError("resources.memory", "memory ran out; what was finished is kept", hint)
    return None


def _lacking(error: BaseException) -> MoeqError | None:
    """Return the error for what the machine lacks or its file system refused, or None."""
    number = error.errno if isinstance(error, OSError) else None
    limit = limit_error(error)
    if limit is not None or number is None:
        return limit
    where = f" ({error.filename})" if isinstance(error, OSError) and error.filename else ""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return MoeqError("resources.disk-full", f"the disk is full{where}", "free some space and run it again")
    return MoeqError("environment.io", f"{os.strerror(number)}{where}", "check the path, its permissions and the disk")
