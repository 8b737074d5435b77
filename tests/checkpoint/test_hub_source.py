"""A repository that is opened in this process: its files, ranges of them, streams, samples, and calls that are cut."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint.hub_server import SHA, Behaviour, Hub, serving
from checkpoint.test_hub import with_ballast
from huggingface_hub import constants, errors
from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
from refusing import refuses

from moeq.checkpoint import hub as module
from moeq.checkpoint.hub import HubSource, _sha256, open_repository, without_bars
from moeq.checkpoint.hub_digests import PIECE_BYTES
from moeq.errors import MoeqError

FILE = "model.safetensors"

Open = Callable[..., HubSource]


@pytest.fixture(scope="module", name="hub")
def _hub() -> Iterator[Hub]:
    with serving() as running:
        yield running


@pytest.fixture(scope="module", name="folder")
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose one file has some pieces."""
    folder = with_ballast(tmp_path_factory.mktemp("ballast"), 3 * PIECE_BYTES)
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.json").write_text("{}")
    return folder


@pytest.fixture(name="slept")
def _slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The waits before further attempts, which take no time."""
    found: list[float] = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=found.append))
    return found


@pytest.fixture(name="opened")
def _opened(hub: Hub, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Opens the checkpoint, with a cache of its own; the client reads its settings when it is imported."""
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def opened(**behaviour: Any) -> HubSource:
        repo = hub.add(f"org/{tmp_path.name}", folder, Behaviour(**behaviour))
        del hub.requests[:]
        return HubSource(repo, None)

    return opened


def ranges(hub: Hub) -> list[str | None]:
    """The ranges of weights that were asked for since the headers were read."""
    return [span for method, path, span in hub.requests if path.endswith(FILE) and method == "GET"]


def test_what_a_listing_tells(opened: Open, hub: Hub, folder: Path) -> None:
    source = opened()
    assert (source.revision, source.remote, source.stream) == (SHA, True, None)
    assert source.listed == ("config.json", FILE, "tokenizer/vocab.json")
    assert source.size_of("tokenizer/vocab.json") == 2
    assert source.side_files() == ("config.json",)
    assert ranges(hub) == [f"bytes=0-{(1 << 20) - 1}"]
    with refuses("source.missing-file", f"{source.repo} has no n\\xf6ne"):
        source.path("n\xf6ne")
    source._sizes["unsized"] = None
    with refuses("source.network", f"{source.repo}: the server does not say how large unsized is"):
        source.path("unsized")


def test_small_files_have_limits(opened: Open, folder: Path) -> None:
    source, size = opened(), (folder / "config.json").stat().st_size
    assert source._json("config.json", size, "source.bad-config") == source.config
    text = f"config.json: {size:,} bytes, the limit for this file is {size - 1:,}"
    with refuses("source.too-large", text):
        source._json("config.json", size - 1, "source.bad-config")


def test_a_streamed_file_is_fetched_once_for_its_digests(opened: Open, hub: Hub, folder: Path, tmp_path: Path) -> None:
    """Ranges are then whole pieces, and compared with them."""
    source, data = opened(), (folder / FILE).read_bytes()
    stream = source.stream_into(tmp_path / "stream", tmp_path / "pieces")
    assert (source.stream, stream.held(FILE), stream.covers(FILE)) == (stream, None, True)
    with refuses("bug.not-fetched", f"{FILE} is read before it is fetched", "report this"):
        source.path(FILE)
    spans = [(PIECE_BYTES + 5, 2 * PIECE_BYTES + 7), (0, 1), (len(data) - 3, len(data)), (PIECE_BYTES, 2 * PIECE_BYTES)]
    for start, end in spans:
        assert source.read_bytes(FILE, start, end) == data[start:end]
        assert stream.held(FILE) is None
    last = len(data) // PIECE_BYTES * PIECE_BYTES
    pieces = [(PIECE_BYTES, 3 * PIECE_BYTES), (0, PIECE_BYTES), (last, len(data)), (PIECE_BYTES, 2 * PIECE_BYTES)]
    assert ranges(hub)[1:] == [None, *(f"bytes={start}-{end - 1}" for start, end in pieces)]
    stream.fetch(FILE)
    assert source.path(FILE) == stream.held(FILE) == tmp_path / "stream" / FILE
    assert source.read_bytes(FILE, 5, 9) == data[5:9]
    assert len(ranges(hub)) == 2 + len(spans) + 1


def test_a_cached_file_is_no_obstacle_to_a_stream(opened: Open, folder: Path, tmp_path: Path) -> None:
    """It was hashed when it was opened, before anybody asked for digests of its pieces; damaged ones are made anew."""
    source, data = opened(), (folder / FILE).read_bytes()
    assert source.read_bytes(FILE, 5, 9) == data[5:9]
    pieces = tmp_path / "pieces"
    source.stream_into(tmp_path / "stream", pieces)
    assert source.read_bytes(FILE, 5, 9) == data[5:9]
    (pieces / hashlib.sha256(data).hexdigest()).write_bytes(b"short")
    assert source.read_bytes(FILE, 5, 9) == data[5:9]
    assert not (tmp_path / "stream").exists()


def test_a_streamed_range_is_compared_where_there_are_digests(opened: Open, hub: Hub, folder: Path, tmp_path) -> None:
    data = (folder / FILE).read_bytes()
    source = opened(flips=len(data) - 1, flips_files=False)
    source.stream_into(tmp_path / "stream", tmp_path / "pieces")
    assert source.read_bytes(FILE, 5, 9) == data[5:9]
    with pytest.raises(MoeqError, match=f"{FILE}, read as a range, is not what the Hub lists") as caught:
        source.read_bytes(FILE, len(data) - 2, len(data))
    assert caught.value.code == "source.digest-mismatch"
    source = opened(lists_digests=False)
    source.stream_into(tmp_path / "stream", tmp_path / "none")
    assert source.read_bytes(FILE, PIECE_BYTES - 2, PIECE_BYTES + 2) == data[PIECE_BYTES - 2 : PIECE_BYTES + 2]
    assert ranges(hub)[1:] == [f"bytes={PIECE_BYTES - 2}-{PIECE_BYTES + 1}"]


def test_a_streamed_file_that_is_damaged(opened: Open, tmp_path: Path) -> None:
    source = opened(flips=-1)
    stream = source.stream_into(tmp_path / "stream", tmp_path / "pieces")
    with pytest.raises(MoeqError, match=f"{FILE} is not what the Hub lists"):
        stream.fetch(FILE)


def test_samples_are_read_once_and_bounded(opened: Open, hub: Hub, folder: Path, monkeypatch) -> None:
    source, data = opened(), (folder / FILE).read_bytes()
    monkeypatch.setattr(module, "MAX_SAMPLE", 10)
    with source.sampled():
        with source.sampled():
            first = source.read_bytes(FILE, 20, 26)
        first[0] ^= 255  # what a reader does with its bytes is its own affair
        assert source.read_bytes(FILE, 20, 26) == data[20:26]
        assert source.read_bytes(FILE, 30, 34) == data[30:34]
        with refuses("source.too-large", f"{source.repo}: a sample of its weights is larger than 10 bytes"):
            source.read_bytes(FILE, 40, 41)
    assert ranges(hub)[1:] == ["bytes=20-25", "bytes=30-33"]
    with source.sampled():
        source.read_bytes(FILE, 20, 26)
    assert ranges(hub)[3:] == ["bytes=20-25"]
    assert source.read_bytes(FILE, 0, 50) == data[:50]
    assert ranges(hub)[4:] == [None]
    with source.sampled():
        assert source.read_bytes(FILE, 0, 50) == data[:50]
    assert len(ranges(hub)) == 5


def test_long_ranges_are_asked_for_in_parts(opened: Open, hub: Hub, folder: Path, monkeypatch) -> None:
    source, data = opened(), (folder / FILE).read_bytes()
    monkeypatch.setattr(module, "MAX_RANGE", 1000)
    entry = source.entry("ballast")._replace(start=100, end=2101)
    assert source.peek(entry) == data[100:2101]
    assert ranges(hub)[1:] == ["bytes=100-1099", "bytes=1100-2099", "bytes=2100-2100"]
    with refuses("source.truncated", f"{FILE}: ended before byte {len(data) + 1:,} while being read"):
        source._read_ranges(FILE, len(data) - 1, len(data) + 1)


def test_calls_are_made_again_where_they_are_cut(opened: Open, slept: list[float]) -> None:
    from moeq.checkpoint.hub_errors import cut_errors

    source, cut = opened(), cut_errors()[0]("half-way")
    raised: list[Exception] = [cut, cut]

    def action() -> str:
        if raised:
            raise raised.pop()
        return "answer"

    assert source._call(action) == "answer"
    assert slept == [0.5, 1.0]
    raised += [cut] * 9
    with refuses("source.network", f"{source.repo}: a.json: the download failed: half-way"):
        source._call(action, file="a.json")
    assert (slept, len(raised)) == ([0.5, 1.0, 0.5, 1.0, 2.0], 5)
    raised[:] = [OSError("no")]
    with pytest.raises(MoeqError, match="the Hub cannot be reached: no"):
        source._call(action)
    raised[:] = [errors.OfflineModeIsEnabled("offline")]
    with pytest.raises(errors.OfflineModeIsEnabled):
        source._call(action)
    assert len(slept) == 5


def test_the_cached_copy_where_the_hub_is_away(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    source = opened()
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MoeqError, match="no such folder here, and the Hub cannot be reached") as caught:
        open_repository(source.repo, None)  # without weights in the cache
    assert caught.value.code == "source.network"
    source.path(FILE)
    found = open_repository(source.repo, None)
    assert (found.revision, found.remote, len(found.tensors)) == (SHA, False, len(source.tensors))
    assert [(one.code, one.message) for one in found.warnings] == [
        ("hub.cached", f"the Hub cannot be reached; read from the local cache, commit {SHA}")
    ]


def test_headers_by_one_request_or_two() -> None:
    """The first takes what fits; a file of another size than the listing's is refused."""
    asked: list[tuple[int, int]] = []
    length = (1 << 20) + 100
    data = length.to_bytes(8, "little") + b"{" + b" " * (length - 1) + b"data"

    def read(url: str, file: str, start: int, stop: int) -> tuple[bytes, int]:
        asked.append((start, stop))
        return data[start:stop], len(data)

    reader: Any = SimpleNamespace(read=read)
    assert module._fetch_header(reader, "url", "file", len(data)) == (data[:-4], len(data))
    assert asked == [(0, 1 << 20), (1 << 20, 8 + length)]
    length = (1 << 20) - 8
    data = length.to_bytes(8, "little") + b"{" + b" " * (length - 1)
    assert module._fetch_header(reader, "url", "file", None) == (data, len(data))
    assert asked[2:] == [(0, 1 << 20)]
    text = "file: the repository lists 1,048,577 bytes, the server sends a file of 1,048,576"
    with refuses("source.changed", text, "the repository changed meanwhile; try again"):
        module._fetch_header(reader, "url", "file", len(data) + 1)


def test_a_file_of_another_size_than_listed(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1000))
    module._require_size(tmp_path / "file", module.Expected("org/tiny: file", 1000))
    with refuses("source.changed", "org/tiny: file: 1,001 bytes are listed, 1,000 were received"):
        module._require_size(tmp_path / "file", module.Expected("org/tiny: file", 1001))


@pytest.mark.parametrize(
    ("digest", "found"),
    [(None, {}), ("a" * 64, {"a": "a" * 64}), ("a" * 63, None), ("A" * 64, None), ("a" * 65, None), (7, None)],
)
def test_digests_of_a_listing_are_possible(digest: object, found: dict[str, str] | None) -> None:
    rows = [
        SimpleNamespace(rfilename="b", lfs=None),
        SimpleNamespace(rfilename="a", lfs=SimpleNamespace(sha256=digest)),
    ]
    listing: Any = SimpleNamespace(siblings=rows)
    if found is not None:
        assert _sha256("org/tiny", listing) == found
        return
    text = f"org/tiny: the server lists {digest!r} as the SHA-256 of 'a'"
    with refuses("source.network", text, "try again later"):
        _sha256("org/tiny", listing)


def test_bars_are_off_for_small_files() -> None:
    before = are_progress_bars_disabled()
    try:
        enable_progress_bars()
        with without_bars():
            assert are_progress_bars_disabled()
        assert not are_progress_bars_disabled()
        disable_progress_bars()
        with without_bars():
            pass
        assert are_progress_bars_disabled()
    finally:
        (disable_progress_bars if before else enable_progress_bars)()
