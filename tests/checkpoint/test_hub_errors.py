"""Errors of the Hub's client in moeq's words: what failed, and what to do."""

from __future__ import annotations

import errno
from importlib import import_module

import pytest
from huggingface_hub import errors, get_session

from moeq.checkpoint.hub_errors import explain

http = import_module(type(get_session()).__module__.partition(".")[0])  # httpx, or httpx2
REQUEST = http.Request("GET", "https://huggingface.co")
NOWHERE = http.Response(404, request=REQUEST)


def answered(status: int) -> Exception:
    response = http.Response(status, request=REQUEST)
    return http.HTTPStatusError("no", request=REQUEST, response=response)


@pytest.mark.parametrize(
    ("error", "file", "code", "text"),
    [
        (errors.GatedRepoError("", response=NOWHERE), None, "source.gated",
         "org/name is gated: access has to be granted"),
        (errors.RepositoryNotFoundError("", response=NOWHERE), None, "source.not-found",
         "org/name: no such folder here, and no repository of that name"),
        (errors.RepositoryNotFoundError("", response=NOWHERE), "a.json", "source.not-found",
         "org/name: a.json: no repository of that name"),
        (errors.RevisionNotFoundError("", response=NOWHERE), None, "source.revision", "org/name has no revision 'v2'"),
        (errors.EntryNotFoundError("gone\nmore"), "a.json", "source.missing-file", "org/name: a.json: gone"),
        (OSError(errno.ENOSPC, "full"), "a.json", "resources.disk-full", "org/name: a.json: no space to download"),
        (answered(401), None, "source.gated", "org/name: the Hub refuses access (HTTP 401)"),
        (answered(403), None, "source.gated", "org/name: the Hub refuses access (HTTP 403)"),
        (answered(500), "a.json", "source.network", "org/name: a.json: the Hub answered HTTP 500"),
        (OSError("cut"), "a.json", "source.network", "org/name: a.json: the download failed: cut"),
        (OSError(), None, "source.network",
         "org/name: no such folder here, and the Hub cannot be reached: OSError"),
    ],
)  # fmt: skip
def test_what_failed_is_named(error: Exception, file: str | None, code: str, text: str) -> None:
    found = explain(error, "org/name", "v2", file)
    assert found.code == code
    assert found.message.startswith(text)
    assert "more" not in found.message
