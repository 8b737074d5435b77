"""Byte ranges of remote files, read defensively.

Servers ignore ranges, stall, hang up half-way, answer with error pages, and exchange files between two ranges.
"""

from __future__ import annotations

import re
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from moeq.checkpoint import hub_guard
from moeq.checkpoint.hub_errors import cut_errors
from moeq.checkpoint.hub_guard import within
from moeq.errors import MoeqError

#: HTTP statuses after which the range is asked for again.
_RETRY = frozenset({408, 425, 429, 500, 502, 503, 504})
#: Attempts at one range.
_ATTEMPTS = 4

#: Seconds before the second attempt, and longest wait that a server can ask for.
_FIRST_WAIT, _LONGEST_WAIT = 0.5, 10.0

#: Seconds that one range may take in all; a server that drips bytes is given up.
_DEADLINE = 120.0

_CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


class RangeReader:
    """Reads ranges with the Hub client's session (its proxies, certificates and redirects).

    Args:
        headers: HTTP headers of every request.
        budget: upper bound of the bytes that are read in all.
        etags: ETags of earlier ranges by file name, to which new ones are added; a file whose ETag changes is refused.
    """

    def __init__(self, headers: dict[str, str], budget: int, etags: dict[str, str] | None = None) -> None:
        self._headers = headers
        self._left = budget
        self._etags = {} if etags is None else etags
        self._lock = threading.Lock()

    def read(self, url: str, file: str, start: int, stop: int) -> tuple[bytes, int]:
        """Return bytes `[start, stop)` of a file (fewer at its end), and the size of the whole file in bytes.

        Raises MoeqError `source.network` for servers that refuse or misbehave, `source.too-large` beyond the budget,
        `source.changed` if the file was exchanged since an earlier range.
        """
        wait, why = _FIRST_WAIT, ""
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(min(wait, _LONGEST_WAIT))
                wait *= 2
            outcome = within(_DEADLINE, lambda: self._attempt(url, file, start, stop), file)
            if not isinstance(outcome, _Busy):
                return outcome
            why, wait = outcome.why, wait if outcome.wait is None else outcome.wait
        raise MoeqError("source.network", f"{file}: {why} {_ATTEMPTS} times", "try again later")

    def _attempt(self, url: str, file: str, start: int, stop: int) -> tuple[bytes, int] | _Busy:
        from huggingface_hub import get_session
        from huggingface_hub.utils import hf_raise_for_status

        headers = {**self._headers, "Range": f"bytes={start}-{stop - 1}", "Accept-Encoding": "identity"}
        timeout = hub_guard.SILENCE_SECONDS
        try:
            with get_session().stream("GET", url, headers=headers, follow_redirects=True, timeout=timeout) as response:
                if response.status_code in _RETRY:
                    why = f"the server answered HTTP {response.status_code}"
                    return _Busy(why, _seconds(response.headers.get("retry-after")))
                if response.status_code not in (200, 206):
                    response.read()
                    hf_raise_for_status(response)
                    raise MoeqError("source.network", f"{file}: the server answered HTTP {response.status_code}")
                return self._body(response, file, start, stop)
        except cut_errors():
            return _Busy("the connection was closed before the answer", None)

    def _body(self, response: Any, file: str, start: int, stop: int) -> tuple[bytes, int] | _Busy:
        is_whole = response.status_code == 200
        first, total = (0, _length(response, file)) if is_whole else _content_range(response, file)
        if first != (0 if is_whole else start):
            raise MoeqError("source.network", f"{file}: asked for bytes from {start:,}, the server sent from {first:,}")
        self._require_same(response, file)
        # A server that ignores ranges sends everything from the start: skip, take what is needed, and hang up.
        wanted = min(stop, total) - first
        data = bytearray()
        begun = time.monotonic()
        with suppress(*cut_errors()):
            for chunk in response.iter_bytes():
                self._spend(len(chunk), file)
                data += chunk
                if len(data) >= wanted:
                    break
                if time.monotonic() - begun > _DEADLINE:
                    detail = f"{file}: the server is too slow ({len(data):,} bytes in {_DEADLINE:g} s)"
                    raise MoeqError("source.network", detail)
        if len(data) < wanted:
            self._spend(-len(data), file)  # the next attempt reads these bytes again
            return _Busy(f"the connection was closed after {len(data):,} of {wanted:,} bytes", None)
        return bytes(data[start - first : wanted]), total

    def _require_same(self, response: Any, file: str) -> None:
        """Refuse a file that was exchanged since an earlier range of it. Raises MoeqError `source.changed`."""
        etag = response.headers.get("etag", "").removeprefix("W/").strip('"')
        with self._lock:
            known = self._etags.setdefault(file, etag) if etag else ""
        if known != etag:
            detail = (
                f"{file} changed between two ranges: its ETag was {ascii(known)[:80]}, now it is {ascii(etag)[:80]}"
            )
            raise MoeqError("source.changed", detail, "the server exchanged the file; try again")

    def _spend(self, count: int, file: str) -> None:
        with self._lock:
            self._left -= count
            if self._left < 0:
                raise MoeqError(
                    "source.too-large", f"{file}: the headers of this checkpoint are larger than any known one"
                )


@dataclass(frozen=True)
class _Busy:
    """Outcome of an attempt after which the range has to be asked for again."""

    why: str  #: reason, for messages
    wait: float | None  #: seconds that the server asks to wait, or None


def _seconds(value: str | None) -> float | None:
    return float(value) if value and value.isascii() and value.isdigit() and len(value) < 6 else None


def _content_range(response: Any, file: str) -> tuple[int, int]:
    """Return the first byte of the range that was sent, and the size of the whole file."""
    found = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
    if found is None or int(found[2]) < int(found[1]):
        shown = ascii(response.headers.get("content-range"))[:80]
        raise MoeqError(
            "source.network", f"{file}: the server sent a range without saying which (Content-Range {shown})"
        )
    return int(found[1]), int(found[3])


def _length(response: Any, file: str) -> int:
    value = response.headers.get("content-length", "")
    if not value.isdigit() or len(value) > 18:
        raise MoeqError("source.network", f"{file}: the server ignores ranges and does not say how long the file is")
    return int(value)
