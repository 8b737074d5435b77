"""A Hub that lies, stalls, floods and redirects: nothing is written outside the cache, nothing waits without end."""

from __future__ import annotations

import json
import os
import shutil
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
from attacks.conftest import tree
from checkpoint.hub_server import SHA, Handler, Hub, serving
from forks import Ended, Starter, starting

#: Imported once, before the first command.
CLIENTS = "import torch, huggingface_hub.file_download, huggingface_hub.hf_api, moeq.checkpoint.hub"

#: Short deadlines, for a command that runs into one.
IMPATIENT = """
from moeq.checkpoint import hub_guard, ranges
hub_guard.ANSWER_SECONDS, hub_guard.SILENCE_SECONDS, ranges._DEADLINE = 0.8, 0.4, 0.8
"""
#: Seconds between the bytes of a Hub that drips, fewer than silence may last, and how many there are: far too many.
DRIP, DRIPS = 0.15, 600

Lie = Callable[["Liar", str, bool], bool]


class Liar(Handler):
    """The loopback Hub, of which one answer is somebody else's."""

    lie: Any
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


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    """One address for all: the client keeps the one that it was started with."""
    with serving(Liar) as found:
        yield found


@pytest.fixture
def hub(server: Hub, checkpoints: Path) -> Callable[[Lie], Hub]:
    """The server, told to lie."""

    def told(lie: Lie) -> Hub:
        Liar.hub = Hub(server.url)
        Liar.hub.add("org/tiny", checkpoints / "gptq-int4-g32-qwen3moe")
        Liar.lie = staticmethod(lie)
        return Liar.hub

    return told


@dataclass(frozen=True)
class Client:
    """Starts commands that talk to the server.

    Attributes:
        home: an empty folder for what they write.
        starter: where they come from.
    """

    home: Path
    starter: Starter

    def ask(self, *argv: object, token: str = "", first: str = "", last: str = "") -> tuple[dict[str, Any], Ended]:
        """The document that a command prints, and how it ended."""
        env = {"HF_TOKEN": token} if token else {}
        ended = self.starter.run(*argv, "--json", seconds=45, env=env, first=first, last=last)
        assert "Traceback" not in ended.err, ended.err
        assert ended.code >= 0, "it was killed"
        return json.loads(ended.out), ended


@pytest.fixture(scope="module")
def starter(server: Hub, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    folder, tiny = tmp_path_factory.mktemp("network"), checkpoints / "gptq-int4-g32-qwen3moe"
    rehearsal = [["inspect", tiny], ["convert", tiny, folder / "out", "--gpu", "a100", "--dry-run"]]
    (folder / "home").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    cache = str(folder / "home" / "hub")
    ours = {"HF_ENDPOINT": server.url, "HF_HOME": cache, "NO_PROXY": "*", "HF_HUB_DISABLE_XET": "1"}
    with starting(folder, {**inherited, **ours}, CLIENTS, rehearsal) as found:
        yield found


@pytest.fixture
def client(starter: Starter) -> Client:
    home = starter.folder / "home"
    shutil.rmtree(home)
    home.mkdir()
    return Client(home, starter)


ETAGS = ["../../../../escaped", "/tmp/moeq-escaped", "a/b", "..", "a\\b", "x" * 5000, "%2e%2e%2fx"]


@pytest.mark.cover(every=7)
@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag"])
@pytest.mark.parametrize("etag", ETAGS, ids=range(len(ETAGS)))
def test_a_hostile_etag(hub: Callable[[Lie], Hub], client: Client, header: str, etag: str) -> None:
    """huggingface_hub 2.4.0 makes a path of it."""

    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what != "file" or body:
            return False
        headers = {"ETag": '"abc"', header: f'"{etag}"', "X-Repo-Commit": SHA, "Content-Length": "10"}
        handler.head(200, headers)
        return True

    before = tree(client.home)
    hub(lie)
    document, ended = client.ask("inspect", "org/tiny")
    assert ended.code == 4, document
    made = {Path(name).relative_to(client.home).parts[0] for name in tree(client.home).keys() - before.keys()}
    assert made <= {"hub"}
    assert not list((client.home / "hub").rglob("*escaped*"))
    assert not Path("/tmp/moeq-escaped").exists()


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("commit", ["../../../escaped", "/tmp/moeq-escaped", "main", "", "0" * 200, "g" * 40])
@pytest.mark.parametrize("where", ["listing", "header"])
def test_a_hostile_commit(hub: Callable[[Lie], Hub], client: Client, commit: str, where: str) -> None:
    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what == "model" and where == "listing":
            document = {"id": "org/tiny", "sha": commit, "siblings": [{"rfilename": "config.json", "size": 10}]}
            handler._send(200, json.dumps(document).encode(), body, {"Content-Type": "application/json"})
            return True
        if what == "file" and where == "header" and not body:
            handler.head(200, {"ETag": '"abc"', "X-Repo-Commit": commit, "Content-Length": "10"})
            return True
        return False

    hub(lie)
    document, ended = client.ask("inspect", "org/tiny")
    assert ended.code == 4, document
    assert not list(client.home.rglob("*escaped*"))
    assert not Path("/tmp/moeq-escaped").exists()


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("announced", ["true", "huge", "none", "chunked"])
def test_a_file_that_does_not_end(hub: Callable[[Lie], Hub], client: Client, announced: str) -> None:
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

    hub(lie)
    document, ended = client.ask("inspect", "org/tiny")
    assert ended.code == 4, document
    assert sent[0] < 256 << 20
    assert sum(path.stat().st_size for path in client.home.rglob("*") if path.is_file()) < 16 << 20


STALLS = [f"{when} {what}" for when in ("before", "within") for what in ("the listing", "a file", "a range")]


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("drip", [False, True])
@pytest.mark.parametrize("stall", STALLS)
def test_a_hub_that_goes_silent(hub: Callable[[Lie], Hub], client: Client, stall: str, drip: bool) -> None:
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
        for _ in range(DRIPS):
            if released.wait(DRIP):
                break
            if drip:
                try:
                    handler.wfile.write(b" " if stall.startswith("within") else b"H")
                    handler.wfile.flush()
                except OSError:
                    break
        return True

    try:
        hub(lie)
        document, ended = client.ask("inspect", "org/tiny", first=IMPATIENT)
    finally:
        released.set()
    assert ended.code == 4, document
    assert document["error"]["code"] == "source.network"
    assert ended.seconds < 40


NAMES = ["../../evil.json", "/etc/cron.d/evil", "a/../../evil", "evil\x1b[2J.json", "C:\\evil", "moeq-journal.jsonl"]


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_in_a_listing(hub: Callable[[Lie], Hub], client: Client, checkpoints: Path, name: str) -> None:
    folder = checkpoints / "gptq-int4-g32-qwen3moe"

    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what != "model":
            return False
        files = [{"rfilename": path.name, "size": path.stat().st_size} for path in folder.iterdir()]
        document = {"id": "org/tiny", "sha": SHA, "siblings": [*files, {"rfilename": name, "size": 10}]}
        handler._send(200, json.dumps(document).encode(), body, {"Content-Type": "application/json"})
        return True

    hub(lie)
    document, ended = client.ask("convert", "org/tiny", client.home / "out", "--gpu", "a100")
    if "/" in name and not name.startswith(("/", "..")):
        assert ended.code in (0, 4)  # in a folder of the repository, which nothing reads
    else:
        assert ended.code in (0, 4), document
    assert not [path for path in client.home.rglob("*evil*")]
    assert not [path for path in client.home.rglob("moeq-journal*")]
    assert not Path("/etc/cron.d/evil").exists()


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("of", ["file", "range"])
def test_a_redirect_to_another_host_drops_the_token(hub: Callable[[Lie], Hub], client: Client, of: str) -> None:
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
        document, ended = client.ask("inspect", "org/tiny", token="hf_secret_token")
    assert ended.code == 4, document
    assert any("hf_secret_token" in value for value in server.authorizations), "it is sent to the Hub itself"
    assert seen
    assert set(seen) == {None}


def listing(handler: Liar, body: bool, document: object) -> bool:
    handler._send(200, json.dumps(document).encode(), body, {"Content-Type": "application/json"})
    return True


GOOD = {"id": "org/tiny", "sha": SHA, "siblings": [{"rfilename": "config.json", "size": 10}]}
ONE = {"rfilename": "config.json", "size": 10}

#: Answers to "what is in this repository" that are none.
LISTINGS: tuple[object, ...] = (
    None,
    [],
    "x",
    7,
    {},
    {"id": "org/tiny"},
    {**GOOD, "sha": None},
    {**GOOD, "sha": 7},
    {**GOOD, "sha": [SHA]},
    {**GOOD, "siblings": None},
    {**GOOD, "siblings": "config.json"},
    {**GOOD, "siblings": {"rfilename": "config.json"}},
    {**GOOD, "siblings": [None]},
    {**GOOD, "siblings": [[]]},
    {**GOOD, "siblings": [{}]},
    {**GOOD, "siblings": [{"rfilename": 7, "size": 1}]},
    {**GOOD, "siblings": [{"rfilename": None, "size": 1}]},
    {**GOOD, "siblings": [{"rfilename": ["config.json"], "size": 1}]},
    {**GOOD, "siblings": [{"rfilename": "\ud800", "size": 1}, ONE]},
    {**GOOD, "siblings": [{**ONE, "size": "10"}]},
    {**GOOD, "siblings": [{**ONE, "size": -1}]},
    {**GOOD, "siblings": [{**ONE, "size": 1.5}]},
    {**GOOD, "siblings": [{**ONE, "size": True}]},
    {**GOOD, "siblings": [{**ONE, "size": 1 << 80}]},
    {**GOOD, "siblings": [{**ONE, "size": None}]},
    {**GOOD, "siblings": [{**ONE, "lfs": "x"}]},
    {**GOOD, "siblings": [{**ONE, "lfs": {"size": "x", "sha256": 7, "pointerSize": []}}]},
    {**GOOD, "siblings": [ONE, {**ONE, "size": 3}]},
    {**GOOD, "siblings": [{"rfilename": "config.json/x", "size": 1}, ONE]},
    {**GOOD, "siblings": [ONE, {"rfilename": "model.safetensors", "size": 1 << 62}]},
    {**GOOD, "createdAt": 7, "lastModified": [], "cardData": "x", "tags": 3, "config": [], "gguf": 1},
    {**GOOD, "cardData": {"eval_results": [1], "model-index": "x", "base_model": {"a": 1}}, "transformersInfo": 7},
)


@pytest.mark.slow
def test_listings_that_are_none(hub: Callable[[Lie], Hub], client: Client) -> None:
    """Wrong types are the server's fault, never moeq's."""
    current: list[object] = []

    def lie(handler: Liar, what: str, body: bool) -> bool:
        return what == "model" and listing(handler, body, current[0])

    hub(lie)
    for document in LISTINGS:
        current[:] = [document]
        answer, ended = client.ask("inspect", "org/tiny")
        assert ended.code == 4, (document, answer)


@cache
def bomb(encoding: str) -> bytes:
    """Half a megabyte that unfolds to half a gigabyte."""
    blank, count, gzip = b" " * (1 << 20), 512, encoding == "gzip"
    packer = zlib.compressobj(9, zlib.DEFLATED, 31 if gzip else 15)
    first, block = (packer.compress(blank) + packer.flush(zlib.Z_FULL_FLUSH) for _ in range(2))
    checksum = zlib.crc32 if gzip else zlib.adler32
    total = reduce(lambda found, _: checksum(blank, found), range(count), checksum(b""))
    end = struct.pack("<II", total, count << 20) if gzip else struct.pack(">I", total)
    return first + block * (count - 1) + b"\x03\x00" + end


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("of", ["listing", "file", "range"])
@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_small_answer_that_unfolds(hub: Callable[[Lie], Hub], client: Client, of: str, encoding: str) -> None:
    """Half a megabyte on the wire, half a gigabyte in memory or on the disk."""

    def lie(handler: Liar, what: str, body: bool) -> bool:
        ranged = handler.headers.get("Range") is not None
        kind = "listing" if what == "model" else "range" if ranged else "file"
        if kind != of:
            return False
        headers = {
            "Content-Encoding": encoding,
            "Content-Length": str(len(bomb(encoding))),
            "ETag": '"abc"',
            "X-Repo-Commit": SHA,
        }
        if ranged:
            headers["Content-Range"] = "bytes 0-1048575/1048576"
        if kind == "file" and not body:
            headers["Content-Length"] = "700"
        handler.head(206 if ranged else 200, headers)
        if body:
            with suppress(OSError):
                handler.wfile.write(bomb(encoding))
        return True

    hub(lie)
    document, ended = client.ask(
        "inspect",
        "org/tiny",
        first="import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 20, 64 << 20))",
        # `ru_maxrss` would include the memory of the process that started it.
        last="print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0], file=sys.stderr)",
    )
    assert ended.code == 4, document
    assert int(ended.err.split()[-1]) < 400 << 10, "KiB"
    assert sum(path.stat().st_size for path in client.home.rglob("*") if path.is_file()) < 16 << 20


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("location", ["file:///etc/passwd", "//evil", "/x", "ftp://localhost/x", "data:,x", "\x7f", ""])
def test_redirects_that_lead_nowhere(hub: Callable[[Lie], Hub], client: Client, location: str) -> None:
    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what != "file":
            return False
        headers = {"Location": location or handler.path, "ETag": '"abc"', "X-Repo-Commit": SHA, "Content-Length": "0"}
        handler.head(302, headers)
        return True

    hub(lie)
    document, ended = client.ask("inspect", "org/tiny", token="hf_secret_token")
    assert ended.code == 4, document
    assert ended.seconds < 40
    assert not [path for path in client.home.rglob("*") if path.is_file() and b"root:" in path.read_bytes()]


def test_what_a_hub_says_in_headers_is_no_command(hub: Callable[[Lie], Hub], client: Client) -> None:
    """Warnings and errors that the client passes on."""

    def lie(handler: Liar, what: str, body: bool) -> bool:
        if what != "model":
            return False
        said = "topic; ::error::owned; \x1b[2J::error::owned \x9b31m"
        handler.head(200, {"X-HF-Warning": said, "X-Error-Message": said, "X-Request-Id": said, "Content-Length": "2"})
        if body:
            handler.wfile.write(b"{}")
        return True

    hub(lie)
    document, ended = client.ask("inspect", "org/tiny")
    assert ended.code == 4, document
    assert "\x1b" not in ended.err
    assert "\x9b" not in ended.err
    assert not [line for line in ended.err.splitlines() if line.lstrip().startswith("::")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["additional_chat_templates/default.jinja", "original/consolidated.safetensors", "a.py"]
)
def test_files_of_a_pushed_conversion_that_nothing_knows(
    hub: Callable[[Lie], Hub], client: Client, checkpoints: Path, name: str
) -> None:
    """Also in folders of a repository, into which moeq does not look and transformers does."""
    from moeq.cli.app import run

    out = client.home / "out"
    assert run(["convert", str(checkpoints / "gptq-int4-g32-qwen3moe"), str(out), "--gpu", "a100", "--quiet"]) == 0
    server = hub(lambda handler, what, body: False)
    server.add("org/done", out)
    document, ended = client.ask("verify", "org/done")
    assert ended.code == 0, document
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_bytes(b"evil")
    document, ended = client.ask("verify", "org/done")
    assert ended.code == 1, document
    assert [row["name"] for row in document["mismatches"]] == [name]
