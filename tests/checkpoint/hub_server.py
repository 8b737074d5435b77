"""A loopback server that speaks as much of the Hub's protocol as the real client needs for reading a repository.

Repositories are folders; odd ones are made by naming a `Behaviour`. Every request is logged, so that tests can say
what was *not* read.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

SHA = "0123456789abcdef0123456789abcdef01234567"
#: An older commit, with the same files.
OLDER = "89abcdef0123456789abcdef0123456789abcdef"


@dataclass
class Behaviour:
    """How one repository misbehaves."""

    status: int = 200
    error_code: str | None = None
    ignores_ranges: bool = False
    busy_first: int = 0
    wrong_range: bool = False
    lists_size: int | None = None
    resolve_status: int | None = None
    drops_connection: bool = False
    cuts_first: int = 0
    """Answers with weights that end half-way, before the others are whole."""
    flips: int | None = None
    """Byte of the weights of which one bit is sent wrongly."""
    flips_ranges: bool = True
    flips_files: bool = True
    exchanges: bool = False
    """Whether every range has another ETag."""
    lists_digests: bool = True
    lists_sha256: object = None
    moves: bool = False


@dataclass
class Hub:
    """State of the server."""

    url: str
    folders: dict[str, Path] = field(default_factory=dict)
    behaviours: dict[str, Behaviour] = field(default_factory=dict)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    bytes_sent: int = 0
    authorizations: set[str] = field(default_factory=set)

    def add(self, repo: str, folder: Path, behaviour: Behaviour | None = None) -> str:
        self.folders[repo] = folder
        self.behaviours[repo] = behaviour or Behaviour()
        return repo


def _commit(revision: str) -> str:
    return SHA if revision == "main" else revision


@contextmanager
def serving(handler: type[Handler] | None = None) -> Iterator[Hub]:
    """A running server on a free loopback port."""
    handler = handler or Handler
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub = Hub(f"http://127.0.0.1:{server.server_port}")
    handler.hub = hub
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.headers.get("Authorization"):
            self.hub.authorizations.add(self.headers["Authorization"])
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and parts[4:5] == ["tree"]:
            self._tree(f"{parts[2]}/{parts[3]}", body)
        elif parts[:2] == ["api", "models"]:
            self._model(f"{parts[2]}/{parts[3]}", parts[5] if len(parts) > 5 else "main", body)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._file(f"{parts[0]}/{parts[1]}", parts[3], "/".join(parts[4:]), body)
        else:
            self._send(404, b"{}", body)

    def _model(self, repo: str, revision: str, body: bool) -> None:
        behaviour = self.hub.behaviours.get(repo, Behaviour(404, "RepoNotFound"))
        if behaviour.status != 200:
            self._send(behaviour.status, b'{"error": "no"}', body, {"X-Error-Code": behaviour.error_code or ""})
            return
        if revision not in ("main", SHA, OLDER):
            self._send(404, b'{"error": "no"}', body, {"X-Error-Code": "RevisionNotFound"})
            return
        folder = self.hub.folders[repo]
        siblings: list[dict[str, object]] = [
            {"rfilename": str(file.relative_to(folder)), "size": behaviour.lists_size or file.stat().st_size}
            for file in sorted(folder.rglob("*"))
            if file.is_file()
        ]
        for sibling in siblings if behaviour.lists_digests else []:
            if str(sibling["rfilename"]).endswith(".safetensors"):
                digest: object = hashlib.sha256((folder / str(sibling["rfilename"])).read_bytes()).hexdigest()
                digest = digest if behaviour.lists_sha256 is None else behaviour.lists_sha256
                sibling["lfs"] = {"sha256": digest, "size": sibling["size"], "pointerSize": 135}
        document = {"id": repo, "modelId": repo, "siblings": siblings, "tags": [], "private": False}
        document["sha"] = _commit(revision)
        self._send(200, json.dumps(document).encode(), body, {"Content-Type": "application/json"})

    def _tree(self, repo: str, body: bool) -> None:
        files = sorted(file for file in self.hub.folders[repo].iterdir() if file.is_file())
        rows = [{"type": "file", "path": file.name, "oid": SHA, "size": file.stat().st_size} for file in files]
        self._send(200, json.dumps(rows).encode(), body, {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str, body: bool) -> None:
        behaviour = self.hub.behaviours.get(repo, Behaviour(404, "RepoNotFound"))
        weights = name.endswith((".safetensors", ".gguf"))
        if weights and behaviour.busy_first > 0:
            behaviour.busy_first -= 1
            self._send(429, b"busy", body, {"Retry-After": "0"})
            return
        if weights and behaviour.resolve_status:
            self._send(behaviour.resolve_status, b"<html>proxy</html>", body)
            return
        path = self.hub.folders[repo] / name
        if not path.is_file():
            self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
            return
        data = path.read_bytes()
        ranged = bool(weights and self.headers.get("Range") and not behaviour.ignores_ranges)
        if weights and behaviour.flips is not None and (behaviour.flips_ranges if ranged else behaviour.flips_files):
            wrong = bytearray(data)
            wrong[behaviour.flips] ^= 1
            data = bytes(wrong)
        if weights and body and behaviour.cuts_first > 0:
            behaviour.cuts_first -= 1
            self._cut(data, ranged)
            return
        headers = {"ETag": f'"{abs(hash((name, len(data)))):x}"', "Accept-Ranges": "bytes"}
        moved = behaviour.moves and revision == "main"
        headers["X-Repo-Commit"] = OLDER if moved else _commit(revision)
        if behaviour.exchanges and ranged:
            headers["ETag"] = f'"{len(self.hub.requests):x}"'
        wanted = self.headers.get("Range")
        if weights and wanted and not behaviour.ignores_ranges:
            self._range(data, wanted, headers, body, behaviour)
        else:
            self._send(200, data, body, headers)

    def _cut(self, data: bytes, ranged: bool) -> None:
        """Announce an answer, send half of it, and hang up."""
        start, stop = 0, len(data)
        if ranged:
            first, _, last = self.headers["Range"].removeprefix("bytes=").partition("-")
            start, stop = int(first), min(int(last) + 1, len(data))
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
        self.send_header("Content-Length", str(stop - start))
        self.end_headers()
        self.wfile.write(data[start : (start + stop) // 2])
        self.close_connection = True

    def _range(self, data: bytes, wanted: str, headers: dict[str, str], body: bool, behaviour: Behaviour) -> None:
        first, _, last = wanted.removeprefix("bytes=").partition("-")
        start, stop = int(first), min(int(last) + 1, len(data))
        if behaviour.drops_connection:
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(data)}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.write(data[start : start + 10])
            self.close_connection = True
            return
        shown = start + 7 if behaviour.wrong_range else start
        self._send(206, data[start:stop], body, {**headers, "Content-Range": f"bytes {shown}-{stop - 1}/{len(data)}"})

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if body:
            try:
                self.wfile.write(data)
                self.hub.bytes_sent += len(data)
            except (BrokenPipeError, ConnectionResetError):
                # The client hung up on a body it did not ask for.
                self.close_connection = True
