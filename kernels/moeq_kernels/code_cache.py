"""Private folders of machine code: the only way in which native code is kept on disk, and run from there.

A folder is used if nobody but this user can have put anything into it: its path is absolute, every folder on the way
belongs to this user or to root and is not open to everybody, and what moeq creates is no link, belongs to this user and
has mode 0700. Files in it are regular and belong to this user. Everything else is left alone: code is then compiled in
memory, and one line of warning says why.

Whoever sets the variables that name a folder (MOEQ_KERNEL_CACHE, NUMBA_CACHE_DIR, XDG_CACHE_HOME, HOME) chooses where
code is kept, not what is run.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe that somebody put there waits for nothing

logger = logging.getLogger(__name__)


class CodeCache:
    """An open folder that only this user can read or change.

    Attributes:
        path: path of the folder when it was opened, for messages.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self._fd = fd

    def names(self) -> list[str]:
        """List the files of the folder."""
        with suppress(OSError):
            return sorted(os.listdir(self._fd))
        return []

    def read(self, name: str) -> bytes | None:
        """Read a file; None if it is missing or others can change it."""
        with suppress(OSError):
            fd = os.open(name, os.O_RDONLY | _FILE, dir_fd=self._fd)
            with open(fd, "rb") as file:
                found = os.fstat(fd)
                own = found.st_uid == os.getuid() and found.st_nlink == 1 and not found.st_mode & 0o022
                return file.read() if own and stat.S_ISREG(found.st_mode) else None
        return None

    def write(self, name: str, content: bytes) -> bool:
        """Write a file at once, also beside other writers; returns whether it is kept."""
        temporary = f".{name[:100]}.{secrets.token_hex(8)}"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FILE, 0o600, dir_fd=self._fd)
            try:
                with open(fd, "wb") as file:
                    file.write(content)
                os.rename(temporary, name, src_dir_fd=self._fd, dst_dir_fd=self._fd)
            except BaseException:  # an interruption as well
                with suppress(OSError):
                    os.unlink(temporary, dir_fd=self._fd)
                raise
        except OSError:
            return False
        return True


class _UnusableError(Exception):
    """Error for a folder that cannot be used; the message is the reason."""


def user_cache(*parts: str, variable: str | None = None) -> CodeCache | None:
    """Open a folder below the user's cache folder (XDG_CACHE_HOME, else `~/.cache`), or below that of a variable.

    Args:
        parts: folders below it, which are created.
        variable: name of an environment variable. Where it is set, one folder is created below the folder that it
            names, called like `parts` with dashes between them.

    Returns:
        None, after one line of warning, where the folder cannot be used.
    """
    if variable is not None and (given := os.environ.get(variable)):
        return _open_once(given, ("-".join(parts),), variable)
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # the XDG Base Directory Specification ignores relative paths
        home = os.path.join(os.path.expanduser("~"), ".cache")
    return _open_once(home, parts, "HOME")


def given_cache(variable: str) -> CodeCache | None:
    """Open the folder that an environment variable names; None, after one line of warning, where it cannot be used."""
    given = os.environ[variable]
    above, name = os.path.split(given.rstrip("/"))
    return _open_once(above, (name,), variable)


@lru_cache(maxsize=64)
def _open_once(base: str, parts: tuple[str, ...], variable: str) -> CodeCache | None:
    path = Path(base, *parts)
    try:
        if not os.path.isabs(base):
            raise _UnusableError(f"{variable} names no absolute path")
        return CodeCache(path, _open(Path(base), parts))
    except _UnusableError as error:
        reason = str(error)
    except OSError as error:
        reason = f"{error.strerror}: {path}"
    logger.warning("moeq: machine code is not kept but compiled in memory by every process: %s", ascii(reason)[1:-1])
    return None


def _open(base: Path, parts: tuple[str, ...]) -> int:
    """Open a folder below `base`, creating what is missing. Raises OSError, _UnusableError."""
    while not os.path.lexists(base):
        base, parts = base.parent, (base.name, *parts)
    real = base.resolve()
    for folder in dict.fromkeys((*reversed(base.parents), base, *reversed(real.parents), real)):
        _require_safe(folder)
    fd = os.open(real, _FOLDER)
    path = base
    for number, part in enumerate(parts, 1):
        path /= part
        try:
            with suppress(FileExistsError):
                os.mkdir(part, 0o700, dir_fd=fd)
            try:
                inner = os.open(part, _FOLDER, dir_fd=fd)
            except OSError:
                if stat.S_ISLNK(os.stat(part, dir_fd=fd, follow_symlinks=False).st_mode):
                    raise _UnusableError(f"{path} is a link") from None
                raise
        finally:
            os.close(fd)
        fd = inner
        try:
            _require_own(path, os.fstat(fd), forbidden=0o077 if number == len(parts) else 0o022)
        except BaseException:
            os.close(fd)
            raise
    return fd


def _require_safe(path: Path) -> None:
    """Refuse a folder, or a link to one, that another user made or may exchange. Raises OSError, _UnusableError."""
    found = path.lstat()
    if found.st_uid not in (0, os.getuid()):
        raise _UnusableError(f"{path} belongs to user {found.st_uid}")
    sticky = found.st_mode & stat.S_ISVTX
    if stat.S_ISDIR(found.st_mode) and found.st_mode & 0o002 and not sticky:
        raise _UnusableError(f"{path} can be written by everybody")


def _require_own(path: Path, found: os.stat_result, forbidden: int) -> None:
    """Refuse a folder of another user, or one whose mode has forbidden bits. Raises _UnusableError."""
    if found.st_uid != os.getuid():
        raise _UnusableError(f"{path} belongs to user {found.st_uid}")
    if found.st_mode & forbidden:
        raise _UnusableError(f"{path} has mode {found.st_mode & 0o777:04o}; chmod 700 makes it usable")
