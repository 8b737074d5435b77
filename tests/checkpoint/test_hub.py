"""Repositories: the real Hub client against a real HTTP server on loopback.

The client reads its settings when it is imported, so it runs in processes of its own with `HF_ENDPOINT` set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orphan_files
import pytest
from checkpoint.hub_server import OLDER, SHA, Behaviour, Hub, serving
from gguf_files import write_model

from moeq.checkpoint.hub import _sizes, looks_like_repository
from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint

CHECKPOINTS = Path(__file__).parents[1] / "data" / "checkpoints"

CLIENT = """
import json, sys
import moeq
from moeq.checkpoint import hub, ranges
hub._RETRY_SECONDS, ranges._FIRST_WAIT = (0.01, 0.02, 0.04), 0.01  # as many attempts, sooner
for line in sys.stdin:
    ask = json.loads(line)
    try:
        checkpoint = moeq.open(ask["repo"], revision=ask.get("revision"))
        answer = {"info": checkpoint.info.to_json(), "tensors": len(checkpoint.source.tensors)}
        answer["torch"] = "torch" in sys.modules
        if ask.get("read"):
            answer["sum"] = float(checkpoint.dequantize(0, 1, "up").sum())
    except moeq.MoeqError as error:
        answer = {"code": error.code, "message": error.message, "hint": error.hint, "exit": int(error.exit_code)}
    print(json.dumps(answer), flush=True)
"""

Ask = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as running:
        yield running


def client(hub_url: str, cache: Path, **settings: str) -> Iterator[Ask]:
    """One process with the client in it; call it with a question, get its answer."""
    ours = {"HF_ENDPOINT": hub_url, "HF_HOME": str(cache), "HF_HUB_CACHE": str(cache / "hub"), "NO_PROXY": "127.0.0.1"}
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**inherited, **ours, **settings},
    )
    assert process.stdin
    assert process.stdout
    stdin, stdout = process.stdin, process.stdout

    def ask(repo: str, **more: Any) -> dict[str, Any]:
        stdin.write(json.dumps({"repo": repo, **more}) + "\n")
        stdin.flush()
        answer: dict[str, Any] = json.loads(stdout.readline())
        return answer

    yield ask
    stdin.close()
    process.wait(20)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub-cache")


@pytest.fixture(scope="module")
def ask(hub: Hub, cache: Path) -> Iterator[Ask]:
    yield from client(hub.url, cache, HF_TOKEN="hf_test_token")


def test_headers_are_read_without_the_weights(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    """Padding makes the file larger than the first range, so that reading all of it would show."""
    folder = with_ballast(tmp_path, 3 << 20)
    repo = hub.add("org/large", folder)
    before = hub.bytes_sent
    answer = ask(repo)
    assert answer["info"]["schemes"][0]["title"] == "gptq int4 g32 sym"
    assert answer["info"]["revision"] == SHA
    assert not answer["torch"]
    assert hub.bytes_sent - before < (1 << 20) + 20_000
    assert "Bearer hf_test_token" in hub.authorizations
    weights = [path for _, path, _ in hub.requests if "/org/large/" in path and path.endswith(".safetensors")]
    assert weights
    assert all(f"/resolve/{SHA}/" in path for path in weights), "headers are read at the commit found first"


def with_ballast(folder: Path, size: int) -> Path:
    """The small GPTQ checkpoint with one large tensor more at the end."""
    source = CHECKPOINTS / "gptq-int4-g32-qwen3moe"
    data = (source / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    header["ballast"] = {"dtype": "U8", "shape": [size], "data_offsets": [len(body), len(body) + size]}
    raw = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + body + bytes(size))
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    return folder


@pytest.mark.cover(every=2)
@pytest.mark.parametrize(("method", "name"), [("bitsandbytes", "nf4-bfloat16"), ("hqq", "4-bit-axis1-g8-bfloat16")])
def test_sizes_that_are_no_headers_take_few_requests(
    hub: Hub, ask: Ask, tmp_path: Path, method: str, name: str
) -> None:
    """One matrix of each name and shape is asked for its sizes; the data of all others is compared with them."""
    import moeq

    folder = orphan_files.WRITERS[method](tmp_path / method, orphan_files.vectors(method)[name])
    repo = hub.add(f"org/{method}", folder)
    before = len(hub.requests)
    answer = ask(repo)
    weights = [path for _, path, _ in hub.requests[before:] if path.endswith(".safetensors")]
    assert len(weights) < 1 + 5 * 4 + 5
    local = moeq.open(folder)
    assert answer["info"]["schemes"] == json.loads(json.dumps(local.info.to_json()))["schemes"]
    assert ask(repo, read=True)["sum"] == float(local.dequantize(0, 1, "up").sum())
    files = {path.partition("/resolve/")[2] for _, path, _ in hub.requests[before:] if "/resolve/" in path}
    assert "model.safetensors" in {file.rpartition("/")[2] for file in files}
    assert {file for file in files if not file.startswith(SHA)} == {"main/config.json"}, "else a branch may have moved"


def test_sharded_repository_equals_the_folder(hub: Hub, ask: Ask) -> None:
    import moeq

    answer = ask(hub.add("org/sharded", CHECKPOINTS / "mxfp4-gptoss"))
    local = json.loads(json.dumps(moeq.open(CHECKPOINTS / "mxfp4-gptoss").info.to_json()))
    different = {key for key in local if local[key] != answer["info"][key]}
    assert different == {"name", "revision"}


def test_data_is_downloaded_when_asked_for(hub: Hub, ask: Ask) -> None:
    import moeq

    name = "awq-int4-g32-qwen3moe"
    answer = ask(hub.add("org/data", CHECKPOINTS / name), read=True)
    assert answer["sum"] == float(moeq.open(CHECKPOINTS / name).dequantize(0, 1, "up").sum())


def test_header_longer_than_the_first_range(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    folder = with_ballast(tmp_path, 16)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    padded = data[8 : 8 + length] + b" " * (2 << 20)
    path.write_bytes(len(padded).to_bytes(8, "little") + padded + data[8 + length :])
    answer = ask(hub.add("org/long-header", folder))
    assert answer["info"]["num_experts"] == 4


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("behaviour", "code", "hint"),
    [
        pytest.param(Behaviour(403, "GatedRepo"), "source.gated", "licence", id="01-gated"),
        pytest.param(Behaviour(401, "RepoNotFound"), "source.not-found", "TOKEN", id="01-private"),
        pytest.param(Behaviour(404, "RepoNotFound"), "source.not-found", "spelling", id="02-typo"),
        pytest.param(Behaviour(wrong_range=True), "source.network", None, id="54-wrong-content-range"),
        pytest.param(Behaviour(drops_connection=True), "source.network", None, id="54-connection-dropped"),
        pytest.param(Behaviour(resolve_status=410), "source.network", None, id="54-client-error"),
        pytest.param(Behaviour(busy_first=99), "source.network", None, id="54-always-busy"),
        pytest.param(Behaviour(lists_size=1234), "source.changed", "again", id="56-changed-meanwhile"),
    ],
)
def test_refusals(hub: Hub, ask: Ask, behaviour: Behaviour, code: str, hint: str | None) -> None:
    repo = hub.add(f"org/refused-{code.partition('.')[2]}-{id(behaviour)}", CHECKPOINTS / "mxfp4-gptoss", behaviour)
    answer = ask(repo)
    assert answer.get("code") == code, answer
    assert answer["exit"] == 4
    assert "\n" not in answer["message"]
    if hint:
        assert hint in answer["hint"]


def test_case_02_wrong_revision(hub: Hub, ask: Ask) -> None:
    repo = hub.add("org/revision", CHECKPOINTS / "mxfp4-gptoss")
    answer = ask(repo, revision="no-such-branch")
    assert (answer["code"], answer["exit"]) == ("source.revision", 4)
    assert "no-such-branch" in answer["message"]


def test_case_54_server_that_ignores_ranges(hub: Hub, ask: Ask) -> None:
    answer = ask(hub.add("org/whole", CHECKPOINTS / "mxfp4-gptoss", Behaviour(ignores_ranges=True)))
    assert answer["info"]["num_experts"] == 4


def test_case_54_server_that_is_busy_at_first(hub: Hub, ask: Ask) -> None:
    answer = ask(hub.add("org/busy", CHECKPOINTS / "mxfp4-gptoss", Behaviour(busy_first=2)))
    assert answer["info"]["num_experts"] == 4


def test_missing_config_and_missing_shard(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    for file in (CHECKPOINTS / "mxfp4-gptoss").iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    answer = ask(hub.add("org/partial", tmp_path))
    assert answer["code"] == "source.missing-shard"
    (tmp_path / "config.json").unlink()
    assert ask(hub.add("org/no-config", tmp_path))["code"] == "source.no-config"


def test_case_55_offline(hub: Hub, cache: Path, ask: Ask) -> None:
    """Offline, a downloaded repository opens from the cache, anything else says which setting is in the way."""
    ask(hub.add("org/cached", CHECKPOINTS / "ct-w8a8-qwen3moe"), read=True)
    ask(hub.add("org/headers-only", CHECKPOINTS / "mxfp4-gptoss"))
    offline = client("http://127.0.0.1:9", cache, HF_HUB_OFFLINE="1")
    ask_offline = next(offline)
    assert ask_offline("org/cached")["info"]["revision"] == SHA
    for repo in ("org/never-seen", "org/headers-only"):
        answer = ask_offline(repo)
        assert (answer["code"], answer["exit"]) == ("source.offline", 4)
        assert "HF_HUB_OFFLINE" in answer["message"]
    next(offline, None)


@pytest.mark.slow
def test_case_55_no_network_and_a_cached_copy(hub: Hub, cache: Path, ask: Ask) -> None:
    """Without any setting: the cached copy is read, and that is said; what is not there whole stays a network error."""
    ask(hub.add("org/kept", CHECKPOINTS / "ct-w8a8-qwen3moe"), read=True)
    ask(hub.add("org/only-headers", CHECKPOINTS / "mxfp4-gptoss"))
    cut_off = client("http://127.0.0.1:9", cache)
    ask_cut_off = next(cut_off)
    answer = ask_cut_off("org/kept")
    assert answer["info"]["revision"] == SHA
    assert [row["code"] for row in answer["info"]["warnings"]][-1] == "hub.cached"
    assert ask_cut_off("org/only-headers")["code"] == "source.network"
    next(cut_off, None)


def test_no_network(tmp_path: Path) -> None:
    unreachable = client("http://127.0.0.1:9", tmp_path)
    answer = next(unreachable)("org/name")
    assert (answer["code"], answer["exit"]) == ("source.network", 4)
    assert "HTTPS_PROXY" in answer["hint"]
    next(unreachable, None)


@pytest.mark.parametrize("text", ["org/name", "Qwen/Qwen3-30B-A3B-GPTQ-Int4", "a/b.c_d"])
def test_repository_names(text: str) -> None:
    assert looks_like_repository(text)


@pytest.mark.parametrize("text", ["name", "./org/name", "/org/name", "a/b/c", "org/", "../x", "örg/n", "~/x"])
def test_other_texts_are_paths(text: str) -> None:
    assert not looks_like_repository(text)


def test_a_branch_that_moves_while_it_is_opened(hub, ask) -> None:
    """The listing is of one commit, the config of the next."""
    repo = hub.add("org/moving", CHECKPOINTS / "gptq-int4-g32-qwen3moe", Behaviour(moves=True))
    answer = ask(repo)
    assert answer["code"] == "source.changed"
    assert f"moved from commit {SHA} to {OLDER} while it was being read" in answer["message"]
    assert "tensors" in ask(repo, revision=SHA)


@pytest.mark.slow
def test_a_repository_of_gguf_files(hub: Hub, ask: Ask, tmp_path: Path) -> None:
    """One file is named among several; its header alone is read until data is asked for."""
    folder = tmp_path / "gguf"
    (folder / "Q8_0").mkdir(parents=True)
    write_model(folder / "m-Q4_0.gguf")
    write_model(folder / "Q8_0" / "m-Q8_0.gguf", expert_type="q8_0")
    repo = hub.add("org/gguf", folder)
    several = ask(repo)
    assert several["code"] == "usage.several-models"
    assert "m-Q4_0.gguf" in several["message"]
    sent = hub.bytes_sent
    found = ask(f"{repo}/Q8_0/m-Q8_0.gguf")
    assert found["info"]["schemes"][0]["title"] == "gguf q8_0"
    assert hub.bytes_sent - sent < 1_200_000  # one first range
    local = open_checkpoint(folder / "m-Q4_0.gguf")
    read = ask(f"{repo}/m-Q4_0.gguf", read=True)
    assert read["sum"] == float(local.dequantize(0, 1, "up").sum())
    assert ask(f"{repo}/none.gguf")["code"] == "source.missing-file"


@pytest.mark.parametrize(
    ("size", "taken"), [(None, True), (0, True), ((1 << 60) - 1, True), (1 << 60, False), (-1, False)]
)
def test_sizes_of_a_listing_are_possible(size: int | None, taken: bool) -> None:
    listing: Any = SimpleNamespace(siblings=[SimpleNamespace(rfilename="a", size=size)])
    with nullcontext() if taken else pytest.raises(MoeqError, match="the server lists the file 'a' of"):
        assert _sizes("org/tiny", listing) == {"a": size}
