"""A run ends where the wire brings other bytes than the Hub lists: flipped bits, exchanged files, cut connections."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.hub_server import Behaviour, Hub, serving

from moeq.model import open as open_checkpoint

NAME = "gptq-int4-g32-qwen3moe"
STREAMED = ["--stream-source"]


@pytest.fixture(scope="module")
def hub() -> Iterator[Hub]:
    with serving() as running:
        yield running


Ran = tuple[int, dict[str, Any]]
Run = Callable[..., Ran]


@pytest.fixture
def run(hub: Hub, tmp_path: Path) -> Run:
    """A command in a process of its own, with an empty cache of the client's: exit code and document."""

    def ran(*words: object) -> Ran:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "TRANSFORMERS_"))}
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        command = [sys.executable, "-c", "from moeq.cli.app import main; main()", *map(str, words), "--json"]
        environment = {**inherited, **settings, "HF_HUB_DISABLE_XET": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, json.loads(done.stdout)

    return ran


def convert(run: Run, repo: str, tmp_path: Path, *more: str) -> Ran:
    return run("convert", repo, tmp_path / "out", "--gpu", "a100", *more)


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [[], STREAMED])
def test_a_right_copy_converts(hub, run, checkpoints, tmp_path, streamed) -> None:
    repo = hub.add("org/right", checkpoints / NAME, Behaviour(cuts_first=1))
    code, document = convert(run, repo, tmp_path, *streamed)
    assert code == 0, document
    assert not list(tmp_path.glob("*partial*"))


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("streamed", [[], STREAMED])
@pytest.mark.parametrize("tensor", ["model.layers.1.mlp.experts.2.up_proj.scales", "lm_head.weight"])
def test_a_bit_that_is_flipped_on_the_way(hub, run, checkpoints, tmp_path, tensor, streamed) -> None:
    """A flipped bit in an expert or in a copied file is refused: the digest differs from the listing."""
    entry = open_checkpoint(checkpoints / NAME).source.entry(tensor)
    repo = hub.add("org/flipped", checkpoints / NAME, Behaviour(flips=entry.end - 1))
    code, document = convert(run, repo, tmp_path, *streamed)
    assert (code, document["error"]["code"]) == (4, "source.digest-mismatch")
    assert "org/flipped: model.safetensors is not what the Hub lists" in document["error"]["message"]
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_wrong_copy_is_fetched_again(hub, run, checkpoints, tmp_path) -> None:
    repo = hub.add("org/again", checkpoints / NAME, Behaviour(flips=-1))
    assert convert(run, repo, tmp_path, *STREAMED)[0] == 4
    hub.behaviours[repo] = Behaviour()
    assert convert(run, repo, tmp_path, *STREAMED)[0] == 0


@pytest.mark.slow
def test_a_wrong_copy_in_the_clients_cache_is_named(hub, run, checkpoints, tmp_path) -> None:
    """As it lies there, it is taken for good whenever it is asked for."""
    repo = hub.add("org/cached", checkpoints / NAME, Behaviour(flips=-1))
    convert(run, repo, tmp_path)
    hub.behaviours[repo] = Behaviour()
    for streamed in ([], STREAMED):
        code, document = convert(run, repo, tmp_path, *streamed)
        assert (code, document["error"]["code"]) == (4, "source.digest-mismatch")
    hint = convert(run, repo, tmp_path)[1]["error"]["hint"]
    Path(hint.removeprefix("remove ").partition(", and ")[0]).unlink()
    assert convert(run, repo, tmp_path)[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [[], STREAMED])
def test_a_flipped_bit_in_a_header(hub, run, checkpoints, tmp_path, streamed) -> None:
    """Headers are read as ranges, before there is anything to compare them with."""
    raw = (checkpoints / NAME / "model.safetensors").read_bytes()
    place = raw.index(b'"format":"pt"') + len(b'"format":"p')
    repo = hub.add("org/header", checkpoints / NAME, Behaviour(flips=place, flips_files=False))
    assert run("inspect", repo)[0] == 0, "the header is a good one all the same"
    code, document = convert(run, repo, tmp_path, *streamed)
    assert (code, document["error"]["code"]) == (4, "source.digest-mismatch")
    assert "its header" in document["error"]["message"]


#: A checkpoint of which `restore` needs this tensor as it is.
KEEPS, KEPT = "ct-fp8-tensor-qwen3moe", "model.layers.0.mlp.experts.0.down_proj.input_scale"


@pytest.mark.slow
def test_a_flipped_bit_in_a_range_of_a_file_that_is_gone(hub, run, checkpoints, tmp_path) -> None:
    """What `restore` needs of a streamed source is read as a range, when the file is not on disk any more."""
    entry = open_checkpoint(checkpoints / KEEPS).source.entry(KEPT)
    repo = hub.add("org/range", checkpoints / KEEPS, Behaviour(flips=entry.end - 1, flips_files=False))
    code, document = convert(run, repo, tmp_path, *STREAMED)
    assert (code, document["error"]["code"]) == (4, "source.digest-mismatch")
    assert "read as a range" in document["error"]["message"]
    hub.behaviours[repo] = Behaviour()
    code, document = convert(run, repo, tmp_path, *STREAMED)
    assert (code, KEPT in document["kept_for_restore"]) == (0, True)


@pytest.mark.slow
def test_shards_leave_what_ranges_are_compared_with(hub, run, checkpoints, tmp_path) -> None:
    """`finalize` reads ranges only, of files that the shards have hashed and dropped."""
    repo = hub.add("org/shards", checkpoints / KEEPS)
    for shard in ("0/2", "1/2"):
        assert convert(run, repo, tmp_path, "--shard", shard, *STREAMED)[0] == 0
    entry = open_checkpoint(checkpoints / KEEPS).source.entry(KEPT)
    hub.behaviours[repo] = Behaviour(flips=entry.end - 1, flips_files=False)
    code, document = run("finalize", tmp_path / "out")
    assert (code, document["error"]["code"]) == (4, "source.digest-mismatch")
    hub.behaviours[repo], since = Behaviour(), len(hub.requests)
    assert run("finalize", tmp_path / "out")[0] == 0
    weights = [wanted for method, path, wanted in hub.requests[since:] if path.endswith(".safetensors")]
    assert all(weights), "ranges, and no whole file"
    assert not [path for path in (tmp_path / "out").iterdir() if path.name.startswith("moeq-work")]


@pytest.mark.slow
def test_a_file_that_is_exchanged_between_two_ranges(hub, run, checkpoints, tmp_path) -> None:
    repo = hub.add("org/exchanged", checkpoints / KEEPS, Behaviour(exchanges=True, lists_digests=False))
    code, document = convert(run, repo, tmp_path, *STREAMED)
    assert (code, document["error"]["code"]) == (4, "source.changed")
    assert "ETag" in document["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("repository", ["org/cut-header", "org/cut-file"])
def test_a_connection_that_ends_half_way_is_asked_again(hub, run, checkpoints, tmp_path, repository) -> None:
    repo = hub.add(repository, checkpoints / NAME, Behaviour(cuts_first=3))
    command = ("inspect", repo) if "header" in repository else ("convert", repo, tmp_path / "out", "--gpu", "a100")
    assert run(*command)[0] == 0
    assert hub.behaviours[repo].cuts_first == 0


@pytest.mark.slow
def test_one_that_always_ends_half_way_names_what_failed(hub, run, checkpoints) -> None:
    repo = hub.add("org/always-cut", checkpoints / NAME, Behaviour(cuts_first=1000))
    code, document = run("inspect", repo)
    error = document["error"]
    assert (code, error["code"]) == (4, "source.network")
    assert "model.safetensors: the connection was closed after" in error["message"]
    assert "folder" not in error["message"]


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("digest", ["", "0" * 63, "../../etc/passwd", 7, "G" * 64])
def test_a_listing_with_an_impossible_digest(hub, run, checkpoints, digest) -> None:
    repo = hub.add("org/listing", checkpoints / NAME, Behaviour(lists_sha256=digest))
    code, document = run("inspect", repo)
    assert (code, document["error"]["code"]) == (4, "source.network")
