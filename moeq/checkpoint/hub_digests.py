"""Compare files of a repository with the SHA-256 in its listing. Imports no torch.

Proxies, mirrors and caches may hand on damaged files. A file on disk is hashed whole when it is first opened. A range
of a file that is no longer on disk is compared with the digests of its pieces, which were stored when the whole file
was hashed.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from blake3 import blake3

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.files import FileState, open_regular, read_regular, state_of
from moeq.errors import MoeqError

#: Bytes of a piece, and of its digest.
PIECE_BYTES, _DIGEST_BYTES = 64 << 10, 32

_CHUNK = 64 * PIECE_BYTES

_AGAIN = "try again; if it comes back, look at HF_ENDPOINT and at proxies"


class ListedDigests:
    """Digests of a repository's files from its listing: file name to SHA-256 in hex."""

    def __init__(self, repo: str, sha256: Mapping[str, str]) -> None:
        self._repo = repo
        self._sha256 = dict(sha256)
        self._headers: dict[str, tuple[int, bytes]] = {}
        self._checked: dict[str, FileState] = {}
        self._locks = {file: threading.Lock() for file in self._sha256}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_locks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state | {"_locks": {file: threading.Lock() for file in state["_sha256"]}}

    def covers(self, file: str) -> bool:
        """Return whether the listing has a digest of a file."""
        return file in self._sha256

    def expect_header(self, file: str, raw: bytes) -> None:
        """Remember a header that was read as a range; `check` compares it with the whole file later."""
        self._headers[file] = len(raw), hashlib.sha256(raw).digest()

    def check(self, path: Path, file: str, pieces: Path | None = None) -> None:
        """Hash a file on disk and compare it with the listing, unless the same file was hashed before.

        Args:
            pieces: folder that gets the digests of the file's pieces (see `pieces_of`), or None.

        Raises:
            MoeqError: `source.digest-mismatch`; as `open_regular`.
        """
        if file not in self._sha256:
            return
        with self._locks[file], closing_fd(open_regular(path, file)) as fd:
            try:
                state = state_of(fd)
                unknown = pieces is not None and self.pieces_of(file, state.size, pieces) is None
                if unknown or self._checked.get(file) != state:
                    self._compare(fd, path, file, pieces)
                    self._checked[file] = state
            except OSError as error:
                raise MoeqError("source.unreadable", f"{file}: {error.strerror or error}") from error

    def _compare(self, fd: int, path: Path, file: str, pieces: Path | None) -> None:
        digest, found, position = hashlib.sha256(), bytearray(), 0
        while chunk := os.pread(fd, _CHUNK, position):
            digest.update(chunk)
            if pieces is not None:
                found += b"".join(_piece_digests(chunk))
            position += len(chunk)
        if digest.hexdigest() != self._sha256[file]:
            raise self._mismatch(file, _AGAIN if pieces is not None else f"remove {path.resolve()}, and {_AGAIN}")
        length, header = self._headers.get(file, (0, b""))
        if length and hashlib.sha256(os.pread(fd, length, 0)).digest() != header:
            raise self._mismatch(f"{file}, its header", _AGAIN)
        if pieces is not None:
            pieces.mkdir(exist_ok=True)
            temporary = pieces / f"{self._sha256[file]}.{os.getpid()}"
            temporary.write_bytes(found)
            temporary.replace(pieces / self._sha256[file])

    def pieces_of(self, file: str, size: int, pieces: Path) -> bytes | None:
        """Return the stored digests of a file's pieces, joined; None where the file was not hashed yet."""
        count = -(-size // PIECE_BYTES) * _DIGEST_BYTES
        with suppress(MoeqError):
            found = read_regular(pieces / self._sha256[file], file, count)
            return found if len(found) == count else None
        return None

    def require_pieces(self, data: bytes | bytearray, first: int, known: bytes, file: str) -> None:
        """Compare whole pieces, from piece `first` on, with digests. Raises MoeqError `source.digest-mismatch`."""
        found = b"".join(_piece_digests(data))
        if found != known[first * _DIGEST_BYTES :][: len(found)]:
            raise self._mismatch(f"{file}, read as a range,", _AGAIN)

    def _mismatch(self, what: str, hint: str) -> MoeqError:
        detail = f"{self._repo}: {what} is not what the Hub lists: its SHA-256 differs, so it was changed on the way"
        return MoeqError("source.digest-mismatch", detail, hint)


def _piece_digests(data: bytes | bytearray) -> list[bytes]:
    view = memoryview(data)
    return [blake3(view[start : start + PIECE_BYTES]).digest() for start in range(0, len(data), PIECE_BYTES)]
