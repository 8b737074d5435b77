"""Translate errors of the Hub's client into MoeqErrors that say what happened and what to do next."""

from __future__ import annotations

import errno
from importlib import import_module
from typing import Any

from moeq.errors import MoeqError
from moeq.spelling import option


def _library() -> Any:
    """Return the client's HTTP library (httpx before 2.0, httpx2 since)."""
    from huggingface_hub import get_session

    return import_module(type(get_session()).__module__.partition(".")[0])


def transport_errors() -> tuple[type[Exception], ...]:
    """Return the network errors of the client's HTTP library."""
    library = _library()
    return (library.HTTPError, library.InvalidURL, library.StreamError, OSError)


def cut_errors() -> tuple[type[Exception], ...]:
    """Return the error types of a connection that ends half-way, after which a second attempt may succeed."""
    library = _library()
    return (library.RemoteProtocolError, library.ReadError, library.WriteError)


def explain(error: Exception, repo: str, revision: str | None, file: str | None = None) -> MoeqError:
    """Return the MoeqError for an error of the client; without a `file`, the repository could not be opened."""
    from huggingface_hub import errors

    what = repo if file is None else f"{repo}: {file}"
    no_folder = "no such folder here, and " if file is None else ""

    # Most specific first: a gated repository is a RepositoryNotFoundError as well.
    table: tuple[tuple[type[Exception], str, str, str | None], ...] = (
        (
            errors.GatedRepoError,
            "source.gated",
            f"{repo} is gated: access has to be granted to your account",
            f"accept the licence at https://huggingface.co/{repo}, then `hf auth login` or set HF_TOKEN",
        ),
        (
            errors.RepositoryNotFoundError,
            "source.not-found",
            f"{what}: {no_folder}no repository of that name on the Hub that your token can read",
            "check the spelling (org/name); for a private repository `hf auth login` or set HF_TOKEN",
        ),
        (
            errors.RevisionNotFoundError,
            "source.revision",
            f"{repo} has no revision {revision!r}",
            f"leave out {option('revision')} for the default branch, or name a branch, tag or commit",
        ),
        (errors.EntryNotFoundError, "source.missing-file", f"{what}: {first_line(error)}", None),
        (
            errors.HFValidationError,
            "source.not-found",
            f"{repo!r} is neither a folder here nor a valid repository name",
            "name a folder, or a repository as org/name",
        ),
    )
    for kind, code, message, hint in table:
        if isinstance(error, kind):
            return MoeqError(code, message, hint)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return MoeqError("resources.disk-full", f"{what}: no space to download: {error}", "free some space")
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        hint = "`hf auth login` or set HF_TOKEN to a token with read access"
        return MoeqError("source.gated", f"{what}: the Hub refuses access (HTTP {status})", hint)
    if status is not None:
        return MoeqError("source.network", f"{what}: the Hub answered HTTP {status}", "try again later")
    hint = "check the network, a proxy (HTTPS_PROXY) or a mirror (HF_ENDPOINT); downloaded repositories open as folders"
    failed = f"{no_folder}the Hub cannot be reached" if file is None else "the download failed"
    return MoeqError("source.network", f"{what}: {failed}: {first_line(error)}", hint)


def first_line(error: BaseException) -> str:
    """Return the first line of an error of the client, escaped to ASCII because it may quote a hostile answer."""
    lines = str(error).splitlines()
    return ascii(lines[0][:200])[1:-1] if lines else type(error).__name__
