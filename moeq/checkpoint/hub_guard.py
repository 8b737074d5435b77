"""Limits on a Hub's answers: headers that become paths, sizes and waiting time. Servers and mirrors are not trusted.

The client makes file names from the ETag and commit headers (huggingface_hub 2.4.0 and older: `blobs/<etag>`, wherever
that leads), trusts the sizes that the server sends, and waits without end where no timeout is given. While moeq asks, a
hook on the client's session checks every answer before the client sees it.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from moeq.errors import MoeqError
from moeq.foreign import plain

T = TypeVar("T")

#: Upper bound of the seconds for a whole small answer, and for a pause in which the server sends nothing.
ANSWER_SECONDS, SILENCE_SECONDS = 60.0, 20.0

#: Bytes per second of a download below which it is given up.
MIN_BYTES_PER_SECOND = 64 << 10

#: Largest answer of the Hub's interface that is read; listings of the largest repositories have some megabytes.
MAX_ANSWER_BYTES = 256 << 20

#: ETags are digests on the Hub and words on other servers, never paths.
_ETAG = re.compile(r"[0-9A-Za-z_-][0-9A-Za-z._-]{0,199}")
_COMMIT = re.compile(r"[0-9a-f]{7,64}")


@dataclass(frozen=True)
class Expected:
    """Answer that moeq expects from the Hub."""

    what: str  #: name of the answer in messages
    size: int | None = None  #: bytes of the file; None for an answer that is no file


_EXPECTED: ContextVar[Expected | None] = ContextVar("moeq_expected", default=None)


def check_commit(commit: object, repo: str) -> str:
    """Return a commit if it is a hash, since it becomes part of a path. Raises MoeqError `source.network`."""
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise MoeqError("source.network", f"{repo}: the server's commit {ascii(commit)[:80]} is not a commit hash")
    return commit


def guarded(expected: Expected, action: Callable[[], T]) -> T:
    """Call the Hub's client with a deadline, check every answer before the client sees it, and return the result.

    Raises MoeqError `source.network` for hostile or silent servers, `source.too-large` for more bytes than expected.
    """
    seconds = ANSWER_SECONDS if expected.size is None else 2 * ANSWER_SECONDS + expected.size / MIN_BYTES_PER_SECOND

    def call() -> T:
        _watch_session()
        _EXPECTED.set(expected)
        try:
            return action()
        except Exception as error:
            if _is_deliberate(error):
                raise
            # The client takes types and keys for granted: TypeError, KeyError, JSONDecodeError, ...
            what = f"{expected.what}: the Hub's client cannot read the server's answer"
            raise MoeqError("source.network", f"{what} ({type(error).__name__})", "try again later") from error

    return within(seconds, call, expected.what)


def _is_deliberate(error: Exception) -> bool:
    """Return whether an error was raised on purpose, rather than by the client's failure to parse an answer."""
    from moeq.checkpoint.hub_errors import transport_errors

    ours = (MoeqError, MemoryError, *transport_errors())
    return isinstance(error, ours) or type(error).__module__.startswith("huggingface_hub")


def within(seconds: float, action: Callable[[], T], what: str) -> T:
    """Call `action`, which may wait for a server, and return its result, or give up after some seconds.

    An action that still waits then stays in a thread, which does not keep the process from ending.
    Raises MoeqError `source.network` after that time; and the errors of `action`.
    """
    found: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(action())
        except BaseException as error:  # noqa: BLE001 - raised again where it belongs
            raised.append(error)

    thread = threading.Thread(target=copy_context().run, args=(run,), daemon=True)
    thread.start()
    until = time.monotonic() + seconds
    while thread.is_alive() and (left := until - time.monotonic()) > 0:
        thread.join(min(left, 1.0))
    if raised:
        raise raised[0]
    if not found:
        raise MoeqError(
            "source.network", f"{what}: no answer from the server within {seconds:.0f} s", "try again later"
        )
    return found[0]


def _watch_session() -> None:
    from huggingface_hub import get_session

    session = get_session()
    hooks = session.event_hooks
    if _check not in hooks["response"]:
        asked, answered = [*hooks["request"], _ask_plainly], [_clean, _check, *hooks["response"]]
        session.event_hooks = {**hooks, "request": asked, "response": answered}


def _ask_plainly(request: Any) -> None:
    """Ask for uncompressed answers (a hook on the session): compressed ones can expand a thousandfold."""
    if _EXPECTED.get() is not None:
        request.headers["Accept-Encoding"] = "identity"


def _clean(response: Any) -> None:
    """Strip control characters from headers, some of which the client prints (a hook on the session)."""
    headers = response.headers
    for name in {*headers}:
        values = headers.get_list(name)
        if name.lower() == "x-hf-warning":  # `topic; message`: the client prints a line that begins with the message
            values = [
                f"{topic}; {plain(message.strip())}" for topic, _, message in (one.partition(";") for one in values)
            ]
        if name.lower() == "x-hf-warning" or not all(value.isprintable() for value in values):
            headers[name] = plain(" ".join(values), 1000)


def _check(response: Any) -> None:
    """Refuse an answer that the client should not see (a hook on the session). Raises MoeqError."""
    expected = _EXPECTED.get()
    if expected is None:
        return
    headers, what = response.headers, expected.what
    for name in ("etag", "x-linked-etag"):
        value = headers.get(name)
        if value is not None and not _ETAG.fullmatch(value.removeprefix("W/").strip('"')):
            raise MoeqError("source.network", f"{what}: the server's ETag {ascii(value)[:80]} is not valid")
    if headers.get("x-repo-commit") is not None:
        check_commit(headers["x-repo-commit"], what)
    encoding = headers.get("content-encoding", "identity")
    if response.status_code == 200 and encoding.strip().lower() not in ("", "identity"):
        message = f"{what}: the server compressed its answer ({ascii(encoding)[:40]}) although asked not to"
        raise MoeqError("source.network", message)
    limit = MAX_ANSWER_BYTES if expected.size is None else expected.size
    _check_size(headers.get("x-linked-size"), limit, what)
    if response.status_code == 200:
        _check_size(headers.get("content-length"), limit, what)
    if response.request.method == "GET":
        response.stream = _limited(response, max(limit, 1 << 20), what)  # an error page may be longer than a file


def _check_size(value: str | None, limit: int, what: str) -> None:
    if value is not None and (not value.isascii() or not value.isdigit() or len(value) > 18 or int(value) > limit):
        raise MoeqError(
            "source.too-large", f"{what}: the server announces {ascii(value)[:40]} bytes, {limit:,} were expected"
        )


def _limited(response: Any, limit: int, what: str) -> Any:
    """Wrap the body of an answer, which may not be longer than `limit` bytes."""
    library = import_module(type(response).__module__.partition(".")[0])
    inner = response.stream

    class Limited(library.SyncByteStream):  # type: ignore[misc, name-defined]
        def __iter__(self) -> Iterator[bytes]:
            left = limit
            for chunk in inner:
                left -= len(chunk)
                if left < 0:
                    raise MoeqError("source.too-large", f"{what}: the server sends more than {limit:,} bytes")
                yield chunk

        def close(self) -> None:
            inner.close()

    return Limited()
