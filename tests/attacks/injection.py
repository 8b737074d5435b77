"""Faults of the file system, injected into a process: one call fails, is cut short, or is the last.

Every call by which Python changes files is counted, whatever part of the program makes it; the count of an undisturbed
run says how many faults there are to inject.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
from collections.abc import Callable
from typing import Any, Literal

from moeq.checkpoint import disk

Fault = Literal["ENOSPC", "EIO", "EINTR", "short", "kill", "kill after"]
FAULTS: tuple[Fault, ...] = ("ENOSPC", "EIO", "EINTR", "short", "kill", "kill after")

#: Calls that change files or bring them to disk.
CALLS = ("open", "pwrite", "ftruncate", "fsync", "fdatasync", "rename", "unlink", "rmdir", "mkdir", "copy_file_range")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


class Injector:
    """Counts changes of files in this process, and makes one of them fail.

    Args:
        number: which one, from 0; None: none.
        fault: how.
        report: called with the number of changes so far, after each.
    """

    def __init__(self, number: int | None, fault: Fault = "EIO", report: Callable[[int], object] | None = None) -> None:
        self.number, self.fault, self.report = number, fault, report
        self.count = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        """From now on."""
        for name in CALLS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        library, real = disk.libc(), disk.libc().fallocate

        def fallocate(*arguments: Any) -> int:
            if not self._due():
                return int(real(*arguments))
            if self.fault in ("kill", "kill after"):
                self._die()
            ctypes.set_errno(getattr(errno, self.fault, errno.EIO))
            return -1

        library.fallocate = fallocate  # type: ignore[method-assign]

    def _due(self) -> bool:
        with self._lock:
            due = self.count == self.number
            self.count += 1
            if self.report:
                self.report(self.count)
            return due

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **words: Any) -> Any:
            if name == "open" and not arguments[1] & _WRITES:
                return real(*arguments, **words)
            if not self._due():
                return real(*arguments, **words)
            return self._fail(name, real, arguments, words)

        return call

    def _fail(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], words: dict[str, Any]) -> Any:
        if self.fault in ("short", "kill after") and name == "pwrite":
            fd, data, position = arguments
            done = real(fd, memoryview(data)[: max(len(data) // 2, 1)], position)
            return done if self.fault == "short" else self._die()
        if self.fault == "short":
            return real(*arguments, **words)
        if self.fault == "kill after":
            real(*arguments, **words)
        if self.fault in ("kill", "kill after"):
            self._die()
        number = getattr(errno, self.fault)
        raise OSError(number, os.strerror(number))

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()


ReadFault = Literal["EIO", "ESTALE", "EINTR", "short", "end", "wrong"]
READ_FAULTS: tuple[ReadFault, ...] = ("EIO", "ESTALE", "EINTR", "short", "end", "wrong")

#: Calls that read files, and the argument that says where.
READS = ("open", "pread", "preadv", "copy_file_range")


class ReadInjector:
    """Counts reads of files in this process, and makes one of them fail, end early, or return a wrong bit.

    Args:
        number: which one, from 0; None: none.
        fault: how.
        counts: whether a read of an open file at a position counts; None: all do, and opening for reading does.
        report: called after each.
    """

    def __init__(
        self,
        number: int | None,
        fault: ReadFault = "EIO",
        counts: Callable[[int, int], bool] | None = None,
        report: Callable[[], object] | None = None,
    ) -> None:
        self.number, self.fault, self.counts, self.report = number, fault, counts, report
        self.count = 0
        self._lock = threading.Lock()

    def install(self) -> None:
        """From now on."""
        for name in READS:
            setattr(os, name, self._wrapped(name, getattr(os, name)))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **words: Any) -> Any:
            if name == "open":
                due = not arguments[1] & _WRITES and self.counts is None and self._due()
            else:
                position = arguments[3] if name == "copy_file_range" else arguments[2]
                due = (self.counts is None or self.counts(arguments[0], position)) and self._due()
            return self._fail(name, real, arguments, words) if due else real(*arguments, **words)

        return call

    def _due(self) -> bool:
        with self._lock:
            due = self.count == self.number
            self.count += 1
            if self.report:
                self.report()
            return due

    def _fail(self, name: str, real: Callable[..., Any], arguments: tuple[Any, ...], words: dict[str, Any]) -> Any:
        if self.fault in ("EIO", "ESTALE", "EINTR"):
            number = getattr(errno, self.fault)
            raise OSError(number, os.strerror(number))
        if name in ("open", "copy_file_range"):
            return real(*arguments, **words)
        if self.fault == "end":
            return b"" if name == "pread" else 0
        if name == "pread":
            found = bytearray(real(*arguments, **words))
            if self.fault == "short":
                return bytes(found[: max(len(found) // 2, 1)])
            if found:
                found[len(found) // 2] ^= 1
            return bytes(found)
        fd, (view,), position = arguments
        if self.fault == "short":
            return real(fd, [view[: max(len(view) // 2, 1)]], position)
        got = real(fd, [view], position)
        if got:
            view[got // 2] ^= 1
        return got


def count_reads(run: Callable[[Callable[[], None]], object], counts: Callable[[int, int], bool] | None = None) -> int:
    """How many reads a run makes that is not disturbed."""
    return _counted(run, lambda report: ReadInjector(None, counts=counts, report=report).install())


def count_changes(run: Callable[[Callable[[], None]], object]) -> int:
    """How many changes a run makes that is not disturbed. `run` is given what has to be called in its process."""
    return _counted(run, lambda report: Injector(None, report=lambda count: report()).install())


def _counted(run: Callable[[Callable[[], None]], object], install: Callable[[Callable[[], object]], None]) -> int:
    reading, writing = os.pipe()
    found = bytearray()

    def drain() -> None:
        while chunk := os.read(reading, 1 << 16):
            found.extend(chunk)

    thread = threading.Thread(target=drain)
    thread.start()
    run(lambda: install(lambda: os.write(writing, b".")))
    os.close(writing)
    thread.join()
    os.close(reading)
    return len(found)
