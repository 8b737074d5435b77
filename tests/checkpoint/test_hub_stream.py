"""Weight files of a repository: fetched once, checked, and removed where they are ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeq.checkpoint.hub_stream import WeightStream
from moeq.errors import MoeqError

SIZES = {"a": 1, "b": 2, "cached": 6}


class Hub:
    """Files that can be downloaded, and the calls that were made."""

    def __init__(self, cache: Path) -> None:
        cache.mkdir()
        (cache / "cached").write_bytes(b"cached")
        self.cache, self.damaged, self.calls = cache, False, list[str]()
        self.contents = {"a": b"1", "b": b"22"}

    def download(self, file: str, folder: Path) -> Path:
        self.calls.append(file)
        (folder / file).write_bytes(self.contents[file])
        return folder / file

    def cached(self, file: str) -> Path | None:
        return self.cache / file if file == "cached" else None

    def check(self, path: Path, file: str) -> None:
        if self.damaged:
            raise MoeqError("source.digest-mismatch", f"{file} is damaged")


@pytest.fixture(name="hub")
def _hub(tmp_path: Path) -> Hub:
    return Hub(tmp_path / "cache")


@pytest.fixture(name="stream")
def _stream(hub: Hub, tmp_path: Path) -> WeightStream:
    return WeightStream(tmp_path / "new" / "folder", SIZES, hub.download, hub.cached, hub.check)


def test_files_are_fetched_once_and_removed(stream: WeightStream, hub: Hub) -> None:
    assert (stream.covers("a"), stream.covers("config.json"), stream.held("a")) == (True, False, None)
    for _ in range(2):
        stream.fetch("a")
    assert hub.calls == ["a"]
    assert stream.held("a") == stream.folder / "a"
    stream.drop("a")
    assert (stream.held("a"), list(stream.folder.iterdir())) == (None, [])
    stream.drop("a")
    stream.fetch("a")
    assert hub.calls == ["a", "a"]
    stream.close()
    assert (stream.folder.exists(), stream.held("a")) == (False, None)
    stream.close()


def test_files_of_the_cache_stay(stream: WeightStream, hub: Hub) -> None:
    stream.fetch("cached")
    assert stream.held("cached") == hub.cache / "cached"
    stream.drop("cached")
    assert (stream.held("cached"), (hub.cache / "cached").exists(), hub.calls) == (None, True, [])


def test_what_an_earlier_run_left(stream: WeightStream) -> None:
    stream.folder.mkdir(parents=True)
    for file in ("a", "b", "other"):
        (stream.folder / file).touch()
    stream.keep_only(["b"])
    assert sorted(path.name for path in stream.folder.iterdir()) == ["b", "other"]


def test_files_of_another_size_and_damaged_ones(stream: WeightStream, hub: Hub) -> None:
    hub.contents["b"] = b"1"
    with pytest.raises(MoeqError, match="b: the repository lists 2 bytes, 1 were fetched") as caught:
        stream.fetch("b")
    assert (caught.value.code, stream.held("b")) == ("source.truncated", None)
    hub.damaged = True
    with pytest.raises(MoeqError, match="a is damaged"):
        stream.fetch("a")
    assert (stream.held("a"), (stream.folder / "a").exists()) == (None, False)
