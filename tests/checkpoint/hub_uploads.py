"""The loopback Hub, extended by what the real client needs for writing: repositories, large files, commits.

Every uploaded byte is checked: a large file must have the digest it was announced with, and a commit may only name
large files that have arrived.
"""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml
from checkpoint.hub_server import SHA, Handler, Hub, serving

#: Token to what it may do.
ROLES = {"hf_write": "write", "hf_read": "read", "hf_fine": "fineGrained"}
#: Namespaces that the write token may write to; the fine-grained one may write nothing.
NAMESPACES = ("tester", "org")


@dataclass
class Uploads:
    """State beside that of the reading side.

    Attributes:
        root: folder of the repositories.
        blobs: large files that have arrived, by sha256.
        sent: how often each was sent.
        visibility: of each repository, as it was created.
        commits: first lines of commits, per repository.
        refuse_after: large files that are accepted before the server fails; None for all.
    """

    root: Path
    blobs: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    visibility: dict[str, str] = field(default_factory=dict)
    commits: dict[str, list[str]] = field(default_factory=dict)
    refuse_after: int | None = None


@contextmanager
def serving_uploads() -> Iterator[tuple[Hub, Uploads]]:
    """A running server that takes uploads."""
    root = Path(tempfile.mkdtemp())
    uploads = Uploads(root)
    UploadHandler.uploads = uploads
    try:
        with serving(UploadHandler) as hub:
            yield hub, uploads
    finally:
        shutil.rmtree(root)


class UploadHandler(Handler):
    uploads: Uploads

    def do_GET(self) -> None:
        parts = self._parts()
        if parts == ["api", "whoami-v2"]:
            self._whoami()
        elif parts[-2:] == ["auth-check", "write"]:
            self._json(200 if self._may_write(f"{parts[2]}/{parts[3]}") else 403, {})
        else:
            super().do_GET()

    def do_POST(self) -> None:
        parts, body = self._parts(), self._body()
        self.hub.requests.append((self.command, "/" + "/".join(parts), None))
        if parts == ["api", "repos", "create"]:
            self._create(json.loads(body))
        elif parts == ["api", "validate-yaml"]:
            front = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            errors = [] if isinstance(front.get("tags"), list) else [{"message": "tags must be a list"}]
            self._json(400 if errors else 200, {"errors": errors, "warnings": []})
        elif parts[:2] == ["api", "models"] and parts[4:5] in (["preupload"], ["commit"]):
            repo = f"{parts[2]}/{parts[3]}"
            if not self._may_write(repo):
                self._json(403, {"error": "forbidden"})
            elif parts[4] == "preupload":
                self._preupload(json.loads(body))
            else:
                self._commit(repo, [json.loads(line) for line in body.splitlines()])
        elif parts[-2:] == ["objects", "batch"]:
            self._batch(json.loads(body))
        elif parts[0] == "verify":
            found = json.loads(body)
            self._json(200 if len(self.uploads.blobs.get(found["oid"], b"")) == found["size"] else 404, {})
        else:
            self._json(404, {})

    def do_PUT(self) -> None:
        oid, data = self._parts()[1], self._body()
        limit = self.uploads.refuse_after
        if limit is not None and len(self.uploads.blobs) >= limit:
            self._json(400, {"error": "the store is closed"})
            return
        self.uploads.sent[oid] = self.uploads.sent.get(oid, 0) + 1
        if hashlib.sha256(data).hexdigest() != oid:
            self._json(422, {"error": "other bytes than announced"})
            return
        self.uploads.blobs[oid] = data
        self._json(200, {})

    def _parts(self) -> list[str]:
        return unquote(urlsplit(self.path).path).strip("/").split("/")

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _json(self, status: int, document: dict[str, Any]) -> None:
        self._send(status, json.dumps(document).encode(), True, {"Content-Type": "application/json"})

    def _role(self) -> str | None:
        return ROLES.get((self.headers.get("Authorization") or "").removeprefix("Bearer "))

    def _may_write(self, repo: str) -> bool:
        return self._role() == "write" and repo.partition("/")[0] in NAMESPACES

    def _whoami(self) -> None:
        role = self._role()
        if role is None:
            self._json(401, {"error": "Invalid credentials"})
        else:
            self._json(200, {"type": "user", "name": "tester", "auth": {"accessToken": {"role": role}}, "orgs": []})

    def _create(self, asked: dict[str, Any]) -> None:
        repo = f"{asked['organization']}/{asked['name']}"
        if not self._may_write(repo):
            self._json(403, {"error": "forbidden"})
        elif repo in self.hub.folders:
            self._json(409, {"error": "exists", "url": f"{self.hub.url}/{repo}"})
        else:
            folder = self.uploads.root / repo
            folder.mkdir(parents=True)
            self.hub.add(repo, folder)
            private = asked.get("private", asked.get("visibility") == "private")
            self.uploads.visibility[repo] = "private" if private else "public"
            self._json(200, {"url": f"{self.hub.url}/{repo}"})

    def _preupload(self, asked: dict[str, Any]) -> None:
        large = (".safetensors", ".data")
        files = [
            {"path": one["path"], "uploadMode": "lfs" if one["path"].endswith(large) else "regular"}
            for one in asked["files"]
        ]
        self._json(200, {"files": [{**one, "shouldIgnore": False} for one in files], "commitOid": SHA})

    def _batch(self, asked: dict[str, Any]) -> None:
        objects = []
        for one in asked["objects"]:
            oid = one["oid"]
            actions = {"upload": {"href": f"{self.hub.url}/store/{oid}"}, "verify": {"href": f"{self.hub.url}/verify"}}
            objects.append(one if oid in self.uploads.blobs else {**one, "actions": actions})
        self._json(200, {"transfer": "basic", "objects": objects})

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        folder = self.hub.folders[repo]
        missing = [
            line["value"]["path"]
            for line in lines
            if line["key"] == "lfsFile" and line["value"]["oid"] not in self.uploads.blobs
        ]
        if missing:
            self._json(400, {"error": f"never uploaded: {missing}"})
            return
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.uploads.commits.setdefault(repo, []).append(value["summary"])
            elif line["key"] == "file":
                (folder / value["path"]).write_bytes(base64.b64decode(value["content"]))
            elif line["key"] == "lfsFile":
                (folder / value["path"]).write_bytes(self.uploads.blobs[value["oid"]])
            elif line["key"] == "deletedFile":
                (folder / value["path"]).unlink()
        self._json(200, {"success": True, "commitOid": SHA, "commitUrl": f"{self.hub.url}/{repo}/commit/{SHA}"})
