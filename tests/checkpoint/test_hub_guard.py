"""What is refused of one answer of a Hub, before the client sees it: commits, ETags, encodings, sizes, floods."""

from __future__ import annotations

import time
from collections.abc import Iterator
from importlib import import_module

import pytest
from huggingface_hub import get_session

from moeq.checkpoint import hub_guard
from moeq.checkpoint.hub_guard import MAX_ANSWER_BYTES, Expected, check_commit, guarded, within
from moeq.errors import MoeqError

http = import_module(type(get_session()).__module__.partition(".")[0])  # httpx, or httpx2

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Body(http.SyncByteStream):  # type: ignore[misc, name-defined]
    """A body of some chunks."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes = sizes

    def __iter__(self) -> Iterator[bytes]:
        return (bytes(size) for size in self.sizes)


def looked_at(size: int | None, method: str, status: int, headers: dict[str, str], chunks: list[int]) -> int:
    """Look at an answer as the hook does, and return how many bytes of its body are let through."""
    request = http.Request(method, "http://hub")
    response = http.Response(status, headers=headers, request=request, stream=Body(chunks))

    def read() -> int:
        hub_guard._check(response)
        return sum(map(len, response.stream))

    return guarded(Expected("org/tiny: file", size), read)


LARGE = str(MAX_ANSWER_BYTES)
PASSED = [
    (None, "GET", 200, {"content-length": LARGE, "etag": 'W/"abc-1"', "x-repo-commit": COMMIT}, [5, 6]),
    (700, "GET", 200, {"content-length": "700", "x-linked-size": "700", "content-encoding": " Identity"}, [700]),
    (700, "HEAD", 302, {"content-length": "9999", "x-linked-etag": '"a.b_c"', "content-encoding": "gzip"}, []),
    (700, "GET", 404, {"content-length": "9999"}, [9999]),
    (700, "GET", 416, {}, [1 << 19, 1 << 19]),
    (3 << 20, "GET", 200, {"content-encoding": ""}, [1 << 20] * 3),
]
REFUSED = [
    (None, "GET", 200, {"content-length": str(MAX_ANSWER_BYTES + 1)}, [], "announces"),
    (700, "GET", 200, {"content-length": "701"}, [], "announces '701' bytes, 700 were expected"),
    (700, "HEAD", 302, {"x-linked-size": "701"}, [], "announces"),
    (700, "GET", 200, {"content-length": "+7"}, [], "announces"),
    (1 << 62, "GET", 200, {"content-length": "1" * 19}, [], "announces"),
    (700, "GET", 200, {"content-encoding": "br"}, [], "compressed its answer"),
    (700, "HEAD", 302, {"etag": '"a/b"'}, [], "ETag"),
    (700, "HEAD", 302, {"x-linked-etag": '".."'}, [], "ETag"),
    (700, "HEAD", 302, {"x-repo-commit": "main"}, [], "not a commit hash"),
    (700, "GET", 200, {}, [1 << 20, 1], "sends more than 1,048,576 bytes"),
    (3 << 20, "GET", 200, {}, [3 << 20, 1], "sends more than 3,145,728 bytes"),
]


@pytest.mark.parametrize(("size", "method", "status", "headers", "chunks"), PASSED)
def test_answers_that_pass(size, method, status, headers, chunks) -> None:
    assert looked_at(size, method, status, headers, chunks) == sum(chunks)


@pytest.mark.parametrize(("size", "method", "status", "headers", "chunks", "why"), REFUSED)
def test_answers_that_are_refused(size, method, status, headers, chunks, why) -> None:
    with pytest.raises(MoeqError, match=why) as caught:
        looked_at(size, method, status, headers, chunks)
    assert caught.value.code == ("source.too-large" if "bytes" in why or why == "announces" else "source.network")


def test_other_users_of_the_client_are_left_alone() -> None:
    response = http.Response(200, headers={"etag": '"a/b"'}, request=http.Request("GET", "http://hub"))
    hub_guard._check(response)
    request = http.Request("GET", "http://hub", headers={"Accept-Encoding": "gzip"})
    hub_guard._ask_plainly(request)
    assert request.headers["Accept-Encoding"] == "gzip"
    guarded(Expected("org/tiny"), lambda: hub_guard._ask_plainly(request))
    assert request.headers["Accept-Encoding"] == "identity"


def test_headers_are_cleaned() -> None:
    raw = [("X-HF-Warning", "topic;  \x1b[2Jcareful\n"), ("X-Other", "a\x07b"), ("X-Plain", "as it is")]
    response = http.Response(200, headers=[(name, value.encode("latin-1")) for name, value in raw])
    hub_guard._clean(response)
    assert all(value.isprintable() for value in response.headers.values())
    assert response.headers["x-hf-warning"].startswith("topic; ")
    assert response.headers["x-hf-warning"].endswith("careful")
    assert response.headers["x-plain"] == "as it is"


@pytest.mark.parametrize("commit", ["a" * 7, "0" * 64, COMMIT])
def test_commits(commit) -> None:
    assert check_commit(commit, "org/tiny") == commit


@pytest.mark.parametrize("commit", ["a" * 6, "0" * 65, "main", "A" * 40, f"{COMMIT}/..", f"{COMMIT}\n", None, 7])
def test_what_is_no_commit(commit) -> None:
    with pytest.raises(MoeqError, match="not a commit hash"):
        check_commit(commit, "org/tiny")


@pytest.mark.parametrize("error", [TypeError("x"), KeyError("x")])
def test_a_client_that_stumbles_blames_the_answer(error) -> None:
    def action() -> None:
        raise error

    with pytest.raises(MoeqError, match=f"cannot read the server's answer \\({type(error).__name__}\\)"):
        guarded(Expected("org/tiny"), action)


@pytest.mark.parametrize("error", [MemoryError(), MoeqError("source.missing", "gone"), http.ConnectError("no")])
def test_errors_that_say_what_happened_are_passed_on(error) -> None:
    def action() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        guarded(Expected("org/tiny"), action)
    assert caught.value is error


def test_a_deadline() -> None:
    assert within(60, lambda: "answer", "org/tiny") == "answer"
    with pytest.raises(MoeqError, match="org/tiny: no answer from the server within 0 s"):
        within(0.05, lambda: time.sleep(20), "org/tiny")
