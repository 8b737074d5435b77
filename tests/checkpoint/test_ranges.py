"""Reading ranges from servers that ask for patience."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import ClassVar

import pytest
from checkpoint.test_hub_guard import Body, http
from huggingface_hub.errors import HfHubHTTPError
from refusing import refuses

from moeq.checkpoint import ranges
from moeq.checkpoint.ranges import RangeReader
from moeq.errors import MoeqError


class Busy(BaseHTTPRequestHandler):
    """Answers 503 with the values of Retry-After that are left (None: without one), then with bytes."""

    waits: ClassVar[list[str | None]] = []
    etags: ClassVar[list[str | None]] = []
    statuses: ClassVar[list[int]] = []  # 0 hangs up

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        if self.statuses:
            if status := self.statuses.pop(0):
                self.send_error(status)
            self.close_connection = True
            return
        body = b"" if self.waits else b"bytes"
        self.send_response(503 if self.waits else 206)
        if self.waits:
            if (wait := self.waits.pop(0)) is not None:
                self.send_header("Retry-After", wait)
        else:
            self.send_header("Content-Range", "bytes 0-4/9")
            if self.etags and (etag := self.etags.pop(0)) is not None:
                self.send_header("ETag", etag)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Busy)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/file"
    server.shutdown()
    server.server_close()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits between attempts, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(ranges.time, "sleep", found.append)
    return found


@pytest.mark.parametrize(
    ("waits", "expected"),
    [
        ([None, None, None], [0.5, 1.0, 2.0]),
        (["7"], [7.0]),
        (["3", None], [3.0, 6.0]),
        (["0", "1"], [0.0, 1.0]),
        (["99"], [10.0]),
        (["99999"], [10.0]),
        (["100000", "soon", "-3"], [0.5, 1.0, 2.0]),
        (["", "\u0663"], [0.5, 1.0]),
    ],
)
def test_the_server_says_how_long_to_wait(waits, expected, url, slept, monkeypatch) -> None:
    monkeypatch.setattr(Busy, "waits", list(waits))
    assert RangeReader({}, 1 << 20).read(url, "file", 0, 5) == (b"bytes", 9)
    assert slept == expected


def test_patience_ends(url, slept, monkeypatch) -> None:
    monkeypatch.setattr(Busy, "waits", ["2"] * 9)
    with pytest.raises(MoeqError, match="answered HTTP 503 4 times") as caught:
        RangeReader({}, 1 << 20).read(url, "file", 0, 5)
    assert caught.value.code == "source.network"
    assert slept == [2.0] * 3


@pytest.mark.parametrize(
    ("etags", "refused"),
    [
        (['"a"', '"a"'], False),
        (['W/"a"', '"a"'], False),  # a proxy that compresses makes it weak
        ([None, '"a"', None, '"a"'], False),  # not every server of a cluster sends one
        ([None, '"a"', '"b"'], True),
        (['"a"', None, '"b"'], True),
    ],
)
def test_an_etag_that_changes_ends_the_run(etags, refused, url, monkeypatch) -> None:
    monkeypatch.setattr(Busy, "etags", list(etags))
    reader = RangeReader({}, 1 << 20)
    for _ in etags[1:]:
        reader.read(url, "file", 0, 5)
    if not refused:
        reader.read(url, "file", 0, 5)
        return
    with pytest.raises(MoeqError, match="file changed between two ranges: its ETag was 'a', now it is 'b'") as caught:
        reader.read(url, "file", 0, 5)
    assert caught.value.code == "source.changed"
    assert reader.read(url, "another", 0, 5) == (b"bytes", 9)


def test_no_more_bytes_than_the_budget(url) -> None:
    reader = RangeReader({}, 5)
    assert reader.read(url, "file", 0, 5) == (b"bytes", 9)
    with pytest.raises(MoeqError, match="larger than any known one") as caught:
        reader.read(url, "file", 0, 5)
    assert caught.value.code == "source.too-large"


def test_bytes_of_a_cut_answer_do_not_count(url) -> None:
    reader = RangeReader({}, 5)
    cut = http.Response(206, headers={"content-range": "bytes 0-4/9"}, content=b"byt")
    assert "closed after 3 of 5 bytes" in str(reader._body(cut, "file", 0, 5))
    assert reader.read(url, "file", 0, 5) == (b"bytes", 9)


def test_a_server_that_sends_another_range(url) -> None:
    with pytest.raises(MoeqError, match="asked for bytes from 2, the server sent from 0") as caught:
        RangeReader({}, 1 << 20).read(url, "file", 2, 5)
    assert caught.value.code == "source.network"


def test_servers_that_refuse_or_hang_up(url, slept, monkeypatch) -> None:
    monkeypatch.setattr(Busy, "statuses", [0, 0])
    assert RangeReader({}, 1 << 20).read(url, "file", 0, 5) == (b"bytes", 9)
    assert slept == [0.5, 1.0]
    monkeypatch.setattr(Busy, "statuses", [0] * 4)
    with refuses("source.network", "file: the connection was closed before the answer 4 times", "try again later"):
        RangeReader({}, 1 << 20).read(url, "file", 0, 5)
    monkeypatch.setattr(Busy, "statuses", [300, 404])
    with refuses("source.network", "file: the server answered HTTP 300"):
        RangeReader({}, 1 << 20).read(url, "file", 0, 5)
    with pytest.raises(HfHubHTTPError, match="404"):
        RangeReader({}, 1 << 20).read(url, "file", 0, 5)
    assert len(slept) == 5
    monkeypatch.setattr(Busy, "statuses", [200])
    found, total = RangeReader({}, 1 << 20).read(url, "file", 1, 6)  # the range was ignored
    assert (found, total > 6) == (b"!DOCT", True)


def test_a_server_that_drips(monkeypatch) -> None:
    """It may take its time for the last bytes."""
    monkeypatch.setattr(ranges, "_DEADLINE", 0)
    for sizes in ([2, 1, 2], [5]):
        response = http.Response(206, headers={"content-range": "bytes 0-4/9"}, stream=Body(sizes))
        reader = RangeReader({}, 5)
        if len(sizes) == 1:
            assert reader._body(response, "file", 0, 5) == (bytes(5), 9)
            continue
        with refuses("source.network", "file: the server is too slow (2 bytes in 0 s)"):
            reader._body(response, "file", 0, 5)


def test_whole_files_where_ranges_are_ignored() -> None:
    response = http.Response(200, headers={"content-length": "9"}, content=b"012345678")
    assert RangeReader({}, 9)._body(response, "file", 3, 5) == (b"34", 9)
    response = http.Response(200, headers={"content-length": "9"}, content=b"012345678")
    assert RangeReader({}, 9)._body(response, "file", 3, 50) == (b"345678", 9)


@pytest.mark.parametrize("shown", [None, "bytes */9", "bytes 5-4/9", "bytes 0-4/*", "x" * 90, "bytes 0-4/" + "9" * 19])
def test_ranges_that_a_server_does_not_name(shown: str | None) -> None:
    response = http.Response(206, headers={} if shown is None else {"content-range": shown})
    text = f"file: the server sent a range without saying which (Content-Range {ascii(shown)[:80]})"
    with refuses("source.network", text):
        ranges._content_range(response, "file")
    equal = http.Response(206, headers={"content-range": "bytes 4-4/" + "9" * 18})
    assert ranges._content_range(equal, "file") == (4, int("9" * 18))


@pytest.mark.parametrize("length", ["", "-1", "9" * 19, "9" * 18])
def test_lengths_that_a_server_does_not_say(length: str) -> None:
    response = http.Response(200, headers={"content-length": length})
    if length == "9" * 18:
        assert ranges._length(response, "file") == int(length)
        return
    with refuses("source.network", "file: the server ignores ranges and does not say how long the file is"):
        ranges._length(response, "file")


@pytest.mark.parametrize("status", [408, 425, 429, 500, 501, 502, 503, 504, 505])
def test_answers_after_which_a_range_is_asked_for_again(status: int, url, slept, monkeypatch) -> None:
    monkeypatch.setattr(Busy, "statuses", [status])
    if status in (501, 505):
        with pytest.raises(HfHubHTTPError, match=str(status)):
            RangeReader({}, 1 << 20).read(url, "file", 0, 5)
        return
    assert RangeReader({}, 1 << 20).read(url, "file", 0, 5) == (b"bytes", 9)
    assert slept == [0.5]
