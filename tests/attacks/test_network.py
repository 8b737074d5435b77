"""A Hub that lies, stalls, floods and redirects: nothing is written outside the cache, nothing waits without end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks.conftest import tree
from checkpoint.hub_server import SHA, Handler, Hub, serving

#: Runs one command with short deadlines; the client reads its settings when it is imported.
PROGRAM = """
import sys
from moeq.checkpoint import hub_guard, ranges
hub_guard.ANSWER_SECONDS, hub_guard.SILENCE_SECONDS, ranges._DEADLINE = 6.0, 2.0, 6.0
from moeq.cli.app import run
sys.exit(run(sys.argv[1:]))
"""

Lie = Callable[["Liar", str, bool], bool]


class Liar(Handler):
    """The loopback Hub, of which one answer is somebody else's."""

    lie: Lie
    path_of: str = ""

    def _file(self, repo: str, revision: str, name: str, body: bool) -> None:
        self.path_of = name
        if not type(self).lie(self, "file", body):
            super()._file(repo, revision, name, body)

    def _model(self, repo: str, revision: str, body: bool) -> None:
        if not type(self).lie(self, "model", body):
            super()._model(repo, revision, body)

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True


@pytest.fixture
def hub(checkpoints: Path) -> Iterator[Callable[[Lie], Hub]]:
    """A server that tells a lie."""
    running: list[Any] = []

    def start(lie: Lie) -> Hub:
        kind = type("OneLiar", (Liar,), {"lie": staticmethod(lie)})
        context = serving(kind)
        found = context.__enter__()
        running.append(context)
        found.add("org/tiny", checkpoints / "gptq-int4-g32-qwen3moe")
        return found

    yield start
    for context in running:
        context.__exit__(None, None, None)


def ask(hub: Hub, home: Path, *argv: object, seconds: float = 45, token: str = "") -> tuple[int, dict[str, Any], float]:
    """Run one command against it; exit code, document, seconds."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home / "hub"), "NO_PROXY": "*", "HF_HUB_DISABLE_XET": "1"}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, argv), "--json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=seconds,
        env={**inherited, **ours, **({"HF_TOKEN": token} if token else {})},
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, json.loads(done.stdout), time.monotonic() - begun


ETAGS = ["../../../../escaped", "/tmp/moeq-escaped", "a/b", "..", "a\\b", "x" * 5000, "%2e%2e%2fx"]


@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag"])
@pytest.mark.parametrize("etag", ETAGS, ids=range(len(ETAGS)))
def test_a_hostile_etag(hub: Callable[[Lie], Hub], tmp_path: Path, header: str, etag: str) -> None:
    """huggingface_hub 2.4.0 makes a path of it."""

    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what != "file" or body:
            return False
        headers = {"ETag": '"abc"', header: f'"{etag}"', "X-Repo-Commit": SHA, "Content-Length": "10"}
        handler.head(200, headers)
        return True

    before = tree(tmp_path)
    code, document, _ = ask(hub(lie), tmp_path, "inspect", "org/tiny")
    assert code == 4, document
    made = {Path(name).relative_to(tmp_path).parts[0] for name in tree(tmp_path).keys() - before.keys()}
    assert made <= {"hub"}
    assert not list((tmp_path / "hub").rglob("*escaped*"))
    assert not Path("/tmp/moeq-escaped").exists()


@pytest.mark.parametrize("commit", ["../../../escaped", "/tmp/moeq-escaped", "main", "", "0" * 200, "g" * 40])
@pytest.mark.parametrize("where", ["listing", "header"])
def test_a_hostile_commit(hub: Callable[[Lie], Hub], tmp_path: Path, commit: str, where: str) -> None:
    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what == "model" and where == "listing":
            document = {"id": "org/tiny", "sha": commit, "siblings": [{"rfilename": "config.json", "size": 10}]}
            handler._send(200, json.dumps(document).encode(), body, {"Content-Type": "application/json"})
            return True
        if what == "file" and where == "header" and not body:
            handler.head(200, {"ETag": '"abc"', "X-Repo-Commit": commit, "Content-Length": "10"})
            return True
        return False

    code, document, _ = ask(hub(lie), tmp_path, "inspect", "org/tiny")
    assert code == 4, document
    assert not list(tmp_path.rglob("*escaped*"))
    assert not Path("/tmp/moeq-escaped").exists()


@pytest.mark.parametrize("announced", ["true", "huge", "none", "chunked"])
def test_a_file_that_does_not_end(hub: Callable[[Lie], Hub], tmp_path: Path, announced: str) -> None:
    """Listed with a few bytes; the disk is not filled with what comes."""
    sent = [0]

    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what != "file" or handler.path_of != "config.json":
            return False
        length = {"true": "700", "huge": str(1 << 44)}.get(announced)
        headers = {"ETag": '"abc"', "X-Repo-Commit": SHA}
        if length and not (body and announced == "true"):
            headers["Content-Length"] = length
        if body and announced == "chunked":
            headers["Transfer-Encoding"] = "chunked"
        handler.head(200, headers)
        if body:
            block = b" " * (1 << 20)
            framed = b"100000\r\n" + block + b"\r\n" if announced == "chunked" else block
            try:
                while sent[0] < 1 << 33:
                    handler.wfile.write(framed)
                    sent[0] += len(block)
            except OSError:
                pass
        return True

    code, document, _ = ask(hub(lie), tmp_path, "inspect", "org/tiny")
    assert code == 4, document
    assert sent[0] < 256 << 20
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 16 << 20


STALLS = [f"{when} {what}" for when in ("before", "within") for what in ("the listing", "a file", "a range")]


@pytest.mark.parametrize("drip", [False, True])
@pytest.mark.parametrize("stall", STALLS)
def test_a_hub_that_goes_silent(hub: Callable[[Lie], Hub], tmp_path: Path, stall: str, drip: bool) -> None:
    """It takes the connection and says nothing more, or a byte now and then."""
    released = threading.Event()

    def lie(handler: Liar, what: str, body: bool) -> bool:
        ranged = handler.headers.get("Range") is not None
        kind = "listing" if what == "model" else "range" if ranged else "file"
        if kind != stall.split()[-1] or not body:
            return False
        if stall.startswith("within"):
            headers = {"Content-Length": "700", "ETag": '"abc"', "X-Repo-Commit": SHA}
            if ranged:
                headers |= {"Content-Range": "bytes 0-699/700"}
            handler.head(206 if ranged else 200, headers)
        for _ in range(300):
            if released.wait(0.3):
                break
            if drip:
                try:
                    handler.wfile.write(b" " if stall.startswith("within") else b"H")
                    handler.wfile.flush()
                except OSError:
                    break
        return True

    try:
        code, document, seconds = ask(hub(lie), tmp_path, "inspect", "org/tiny")
    finally:
        released.set()
    assert code == 4, document
    assert document["error"]["code"] == "source.network"
    assert seconds < 40


NAMES = ["../../evil.json", "/etc/cron.d/evil", "a/../../evil", "evil\x1b[2J.json", "C:\\evil", "moeq-journal.jsonl"]


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_in_a_listing(hub: Callable[[Lie], Hub], tmp_path: Path, checkpoints: Path, name: str) -> None:
    folder = checkpoints / "gptq-int4-g32-qwen3moe"

    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what != "model":
            return False
        files = [{"rfilename": path.name, "size": path.stat().st_size} for path in folder.iterdir()]
        document = {"id": "org/tiny", "sha": SHA, "siblings": [*files, {"rfilename": name, "size": 10}]}
        handler._send(200, json.dumps(document).encode(), body, {"Content-Type": "application/json"})
        return True

    code, document, _ = ask(hub(lie), tmp_path, "convert", "org/tiny", tmp_path / "out", "--gpu", "a100")
    if "/" in name and not name.startswith(("/", "..")):
        assert code in (0, 4)  # in a folder of the repository, which nothing reads
    else:
        assert code in (0, 4), document
    assert not [path for path in tmp_path.rglob("*evil*")]
    assert not [path for path in tmp_path.rglob("moeq-journal*")]
    assert not Path("/etc/cron.d/evil").exists()


@pytest.mark.parametrize("of", ["file", "range"])
def test_a_redirect_to_another_host_drops_the_token(hub: Callable[[Lie], Hub], tmp_path: Path, of: str) -> None:
    """As the Hub redirects large files to other hosts. They get the request, and no token."""
    seen: list[str | None] = []

    class Elsewhere(Handler):
        def do_GET(self) -> None:
            seen.append(self.headers.get("Authorization"))
            self._send(404, b"{}", body=True)

        do_HEAD = do_GET

    with serving(Elsewhere) as other:
        target = other.url.replace("127.0.0.1", "localhost")

        def lie(handler: Liar, what: str, body: bool) -> bool:
            ranged = handler.headers.get("Range") is not None
            if what != "file" or (of == "range") != ranged:
                return False
            headers = {"Location": f"{target}/x", "ETag": '"abc"', "X-Repo-Commit": SHA, "Content-Length": "0"}
            handler.head(302, {**headers, "X-Linked-Size": "700", "X-Linked-Etag": '"abc"'})
            return True

        server = hub(lie)
        code, document, _ = ask(server, tmp_path, "inspect", "org/tiny", token="hf_secret_token")
    assert code == 4, document
    assert any("hf_secret_token" in value for value in server.authorizations), "it is sent to the Hub itself"
    assert seen
    assert set(seen) == {None}
