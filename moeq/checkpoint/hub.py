"""A checkpoint in a Hugging Face repository: configs and headers, read through `huggingface_hub`. Imports no torch.

The revision is resolved to a commit once and everything is read at that commit. Configs and the index go through the
client's cache. Headers are fetched by range requests: opening a terabyte downloads some tens of megabytes. Weight files
are downloaded (through the cache) only when data is asked for; `stream_into` fetches and drops them one by one. Their
bytes are compared with the digests in the repository's listing (`moeq.checkpoint.hub_digests`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moeq.checkpoint.header import Header, TensorEntry, header_length, parse_header
from moeq.checkpoint.hub_digests import PIECE_BYTES, ListedDigests
from moeq.checkpoint.hub_errors import cut_errors, explain, transport_errors
from moeq.checkpoint.hub_guard import Expected, check_commit, guarded
from moeq.checkpoint.hub_stream import WeightStream
from moeq.checkpoint.index import choose_weights
from moeq.checkpoint.jsonfile import MAX_CONFIG_BYTES, MAX_INDEX_BYTES, read_object
from moeq.checkpoint.paths import plain_name
from moeq.checkpoint.ranges import RangeReader
from moeq.checkpoint.source import CONFIG_NAME, SIDE_CONFIGS, LocalSource, Source
from moeq.checkpoint.warning import CheckpointWarning
from moeq.errors import MoeqError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

T = TypeVar("T")

#: First request per weight file, in bytes; most headers of sharded checkpoints fit.
FIRST_RANGE = 1 << 20

#: Upper bound of the headers of all files together, in bytes; the largest published checkpoint needs about 80 MB.
MAX_TOTAL_HEADERS = 512 << 20

#: Largest range of a weight file that one request asks for, in bytes.
MAX_RANGE = 64 << 20

#: Upper bound of what one sample reads of weight files, in bytes; an expert of DeepSeek-V3 in FP8 has 42 MiB.
MAX_SAMPLE = 64 << 20

#: Headers that are fetched at the same time.
_CONCURRENCY = 8

#: Seconds before each further attempt of a call whose connection was closed half-way.
_RETRY_SECONDS = (0.5, 1.0, 2.0)


def looks_like_repository(text: str) -> bool:
    """Return whether `text` has the form `org/name` with letters, digits, `-`, `_` and `.`, and is no other path."""
    parts = text.split("/")
    return len(parts) == 2 and all(
        part
        and part[0].isalnum()
        and part.isascii()
        and part.replace("-", "").replace("_", "").replace(".", "").isalnum()
        for part in parts
    )


def open_repository(repo: str, revision: str | None) -> Source:
    """Open a repository, or its cached copy if `HF_HUB_OFFLINE` is set or (with a warning) the Hub cannot be reached.

    Raises MoeqError `source.gated`, `source.not-found`, `source.revision`, `source.offline`, `source.network`, each
    with the next step; and the errors of header and index validation.
    """
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return HubSource(repo, revision)
    except OfflineModeIsEnabled:
        return _cached(repo, revision)
    except MoeqError as error:
        if error.code != "source.network":
            raise
        return _cached_instead(repo, revision, error)


def _cached_instead(repo: str, revision: str | None, error: MoeqError) -> Source:
    """Open the snapshot in the client's cache. Raises the Hub's error where the snapshot is not complete."""
    try:
        source = _cached(repo, revision)
    except MoeqError:
        raise error from None
    text = f"the Hub cannot be reached; read from the local cache, commit {source.revision}"
    source.warnings.append(CheckpointWarning("hub.cached", text))
    return source


def _cached(repo: str, revision: str | None) -> LocalSource:
    """Open the snapshot in the client's cache, which may be partial: a config without weights."""
    from huggingface_hub import try_to_load_from_cache

    hint = f"unset HF_HUB_OFFLINE, or download the repository first: hf download {repo}"
    config = try_to_load_from_cache(repo, CONFIG_NAME, revision=revision)
    if not isinstance(config, str):
        message = f"{repo} is not in the local cache, and HF_HUB_OFFLINE is set"
        raise MoeqError("source.offline", message, hint)
    folder = Path(config).parent
    try:
        source = LocalSource(folder, repo)
    except MoeqError as error:
        message = f"the cached copy of {repo} is not complete, and HF_HUB_OFFLINE is set: {error.message}"
        raise MoeqError("source.offline", message, hint) from None
    source.revision = folder.name
    return source


class HubSource(Source):
    """A repository read over the network."""

    remote = True

    def __init__(self, repo: str, revision: str | None) -> None:
        self._list(repo, revision)
        self._load([name for name in self._sizes if "/" not in name])

    def _list(self, repo: str, revision: str | None) -> None:
        """Resolve the revision and list the files."""
        self.repo = repo
        self.revision: str | None = None
        self._asked = revision
        self.stream: WeightStream | None = None
        self._sample: dict[tuple[str, int, int], bytearray] | None = None
        info = self._call(lambda: self._model_info(revision), Expected(repo))
        self.revision = check_commit(info.sha, repo)
        self._sizes = _sizes(repo, info)
        self._digests = ListedDigests(repo, _sha256(repo, info))
        self._etags: dict[str, str] = {}
        self._pieces: Path | None = None

    def _load(self, top: list[str]) -> None:
        """Read configs and headers of the files of the top folder."""
        repo = self.repo
        config = self._config(top)
        sides = {side: self._json(side, MAX_CONFIG_BYTES, "source.bad-config") for side in SIDE_CONFIGS if side in top}
        super().__init__(repo, config, sides, self.revision)
        weights = choose_weights(top, lambda name: self._json(name, MAX_INDEX_BYTES, "source.bad-index"), repo)
        missing = [file for file in weights.files if file not in self._sizes]
        if missing:
            detail = f"{len(missing)} of {len(weights.files)} files named by {weights.index} are not in {repo}"
            raise MoeqError("source.missing-shard", f"{detail}: {', '.join(missing[:5])}")
        self._take(weights, self._headers(weights.files), top)

    def stream_into(self, folder: Path, pieces: Path) -> WeightStream:
        """Keep weight files on disk only while the returned stream holds them.

        Ranges of a file that is not on disk are read by requests; `path` refuses such a file.

        Args:
            pieces: folder for the digests of the files' pieces, which check ranges of files that are no longer on disk.
                Several streams may share it, and it outlives them.
        """
        sizes = {file.name: file.size for file in self.files}
        self._pieces = pieces
        self.stream = WeightStream(folder, sizes, self._download, self._find_cached, self._check)
        return self.stream

    def _check(self, path: Path, file: str) -> None:
        self._digests.check(path, file, self._pieces)

    def path(self, file: str) -> Path:
        from huggingface_hub import hf_hub_download

        if self.stream is not None and self.stream.covers(file):
            held = self.stream.held(file)
            if held is None:
                raise MoeqError("bug.not-fetched", f"{file} is read before it is fetched", "report this")
            return held
        # Asking for the config by branch makes the cache remember the branch, so that it opens offline later.
        revision = self._asked if file == CONFIG_NAME else self.revision
        plain_name(file, self.repo)
        expected = self._expected(file)
        path = Path(self._call(lambda: hf_hub_download(self.repo, file, revision=revision), expected, file))
        _require_size(path, expected)
        if file == CONFIG_NAME and path.parent.name != self.revision:
            detail = f"{self.repo} moved from commit {self.revision} to {path.parent.name} while it was being read"
            raise MoeqError("source.changed", detail, "try again")
        self._digests.check(path, file)
        return path

    @property
    def listed(self) -> tuple[str, ...]:
        """Names of all files of the repository, with the files in folders."""
        return tuple(self._sizes)

    def size_of(self, file: str) -> int:
        size = self._sizes.get(file)
        return super().size_of(file) if size is None else size

    @contextmanager
    def sampled(self) -> Iterator[None]:
        """Read ranges of weight files by requests, each range once, `MAX_SAMPLE` bytes in all.

        Reading more raises MoeqError `source.too-large`. Ranges are not compared with digests, which are of whole
        files. Contexts may be nested: the outermost one keeps the bytes.
        """
        if self._sample is not None:
            yield
            return
        self._sample = {}
        try:
            yield
        finally:
            self._sample = None

    def _read_sample(self, sample: dict[tuple[str, int, int], bytearray], file: str, start: int, end: int) -> bytearray:
        place = file, start, end
        if place not in sample:
            if sum(map(len, sample.values())) + end - start > MAX_SAMPLE:
                message = f"{self.repo}: a sample of its weights is larger than {MAX_SAMPLE:,} bytes"
                raise MoeqError("source.too-large", message)
            sample[place] = self._read_ranges(file, start, end)
        return bytearray(sample[place])

    def read_bytes(self, file: str, start: int, end: int) -> bytearray:
        if self._sample is not None and self._find_cached(file) is None:
            return self._read_sample(self._sample, file, start, end)
        if self.stream is None or not self.stream.covers(file) or self.stream.held(file) is not None:
            return super().read_bytes(file, start, end)
        if not self._digests.covers(file):
            return self._read_ranges(file, start, end)
        known = self._known_pieces(file)
        first, last = start // PIECE_BYTES, -(-end // PIECE_BYTES)
        data = self._read_ranges(file, first * PIECE_BYTES, min(last * PIECE_BYTES, self.size_of(file)))
        self._digests.require_pieces(data, first, known, file)
        return data[start - first * PIECE_BYTES : end - first * PIECE_BYTES]

    def peek(self, entry: TensorEntry) -> bytes:
        return bytes(self._read_ranges(entry.file, entry.start, entry.end))

    def _known_pieces(self, file: str) -> bytes:
        """Return the digests of a file's pieces; fetch and drop the file if it has none yet."""
        assert self.stream is not None
        assert self._pieces is not None
        known = self._digests.pieces_of(file, self.size_of(file), self._pieces)
        if known is None:
            self.stream.fetch(file)
            self.stream.drop(file)
            known = self._digests.pieces_of(file, self.size_of(file), self._pieces)
        if known is None:
            raise MoeqError("environment.write", f"digests of {file} cannot be kept in {self._pieces}")
        return known

    def _read_ranges(self, file: str, start: int, end: int) -> bytearray:
        """Read bytes of a file that is not on disk."""
        return self._call(lambda: self._ranges(file, start, end), file=file)

    def _ranges(self, file: str, start: int, end: int) -> bytearray:
        data, reader = bytearray(), self._reader(end - start + FIRST_RANGE)
        for first in range(start, end, MAX_RANGE):
            part, _ = reader.read(self._url(file), file, first, min(first + MAX_RANGE, end))
            data += part
        if len(data) != end - start:
            raise MoeqError("source.truncated", f"{file}: ended before byte {end:,} while being read")
        return data

    def _download(self, file: str, folder: Path) -> Path:
        from huggingface_hub import hf_hub_download

        expected = self._expected(plain_name(file, self.repo))
        with without_bars():
            action = partial(hf_hub_download, self.repo, file, revision=self.revision, local_dir=folder)
            return Path(self._call(action, expected, file))

    def _expected(self, file: str) -> Expected:
        """Return the repository's entry of a file. Raises MoeqError `source.missing-file`, `source.network`."""
        if file not in self._sizes:
            raise MoeqError("source.missing-file", f"{self.repo} has no {ascii(file)[1:-1][:200]}")
        size = self._sizes[file]
        if size is None:
            raise MoeqError("source.network", f"{self.repo}: the server does not say how large {file} is")
        return Expected(f"{self.repo}: {file}", size)

    def _find_cached(self, file: str) -> Path | None:
        from huggingface_hub import try_to_load_from_cache

        path = try_to_load_from_cache(self.repo, file, revision=self.revision)
        return Path(path) if isinstance(path, str) else None

    def _reader(self, budget: int) -> RangeReader:
        from huggingface_hub.utils import build_hf_headers

        return RangeReader(build_hf_headers(library_name="moeq"), budget, self._etags)

    def _url(self, file: str) -> str:
        from huggingface_hub import hf_hub_url

        url: str = hf_hub_url(self.repo, file, revision=self.revision)
        return url

    def _model_info(self, revision: str | None) -> ModelInfo:
        from huggingface_hub import HfApi

        return HfApi(library_name="moeq").model_info(self.repo, revision=revision, files_metadata=True)

    def _config(self, top: list[str]) -> dict[str, Any]:
        for name in (CONFIG_NAME, "params.json"):
            if name in top:
                return self._json(name, MAX_CONFIG_BYTES, "source.bad-config")
        raise MoeqError("source.no-config", f"{self.repo} has no {CONFIG_NAME}", "name a repository of a model")

    def _json(self, file: str, limit: int, code: str) -> dict[str, Any]:
        size = self._sizes.get(file)
        if size is not None and size > limit:
            raise MoeqError("source.too-large", f"{file}: {size:,} bytes, the limit for this file is {limit:,}")
        with without_bars():
            path = self.path(file)
        return read_object(path, file, limit, code)

    def _headers(self, files: tuple[str, ...]) -> list[Header]:
        reader = self._reader(MAX_TOTAL_HEADERS)

        def fetch(file: str) -> Header:
            url, size = self._url(file), self._sizes[file]
            raw, total = self._call(lambda: _fetch_header(reader, url, file, size), file=file)
            self._digests.expect_header(file, raw)
            return parse_header(raw[8:], file, total)

        with ThreadPoolExecutor(_CONCURRENCY) as pool:
            return list(pool.map(fetch, files))

    def _call(self, action: Callable[[], T], expected: Expected | None = None, file: str | None = None) -> T:
        """Run a client call, repeat it where its connection is closed half-way, and turn its errors into MoeqErrors.

        Args:
            expected: the answer that is accepted; None for ranges, which are checked where they are read.
            file: the file that is read; None for the repository's listing.
        """
        from huggingface_hub.errors import (
            HfHubHTTPError,
            HFValidationError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
        )

        waits = iter(_RETRY_SECONDS)
        while True:
            try:
                return action() if expected is None else guarded(expected, action)
            except OfflineModeIsEnabled:
                raise
            except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, *transport_errors()) as error:
                wait = next(waits, None)
                if wait is None or not isinstance(error, cut_errors()):
                    raise explain(error, self.repo, self._asked, file) from None
            time.sleep(wait)


def _sizes(repo: str, info: ModelInfo) -> dict[str, int | None]:
    """Return the bytes of every file of a repository. Raises MoeqError `source.network` for an impossible listing."""
    found: dict[str, int | None] = {}
    for file in info.siblings or []:
        name, size = file.rfilename, file.size
        if not isinstance(name, str) or not (size is None or (type(size) is int and 0 <= size < 1 << 60)):
            message = f"{repo}: the server lists the file {ascii(name)[:80]} of {ascii(size)[:40]} bytes"
            raise MoeqError("source.network", message, "try again later")
        found[name] = size
    return found


def _sha256(repo: str, info: ModelInfo) -> dict[str, str]:
    """Return the SHA-256 of every large file. Raises MoeqError `source.network` for an impossible listing."""
    found: dict[str, str] = {}
    for file in info.siblings or []:
        digest = getattr(file.lfs, "sha256", None)
        if digest is None:
            continue
        if not isinstance(digest, str) or not re.fullmatch("[0-9a-f]{64}", digest):
            message = f"{repo}: the server lists {ascii(digest)[:80]} as the SHA-256 of {ascii(file.rfilename)[:80]}"
            raise MoeqError("source.network", message, "try again later")
        found[file.rfilename] = digest
    return found


def _fetch_header(reader: RangeReader, url: str, file: str, size: int | None) -> tuple[bytes, int]:
    """Return the first bytes of a remote file, up to its data, and its size; a long header takes a second request."""
    first, total = reader.read(url, file, 0, FIRST_RANGE)
    if size is not None and total != size:
        detail = f"{file}: the repository lists {size:,} bytes, the server sends a file of {total:,}"
        raise MoeqError("source.changed", detail, "the repository changed meanwhile; try again")
    length = header_length(first[:64], file, total)
    raw = first[: 8 + length]
    if len(raw) < 8 + length:
        rest, _ = reader.read(url, file, len(first), 8 + length)
        raw += rest
    return raw, total


def _require_size(path: Path, expected: Expected) -> None:
    """Refuse a file that is not as large as the repository's listing says. Raises MoeqError `source.changed`."""
    size = path.stat().st_size
    if size != expected.size:
        detail = f"{expected.what}: {expected.size:,} bytes are listed, {size:,} were received"
        raise MoeqError(
            "source.changed", detail, "the repository changed meanwhile, or its listing is wrong; try again"
        )


@contextmanager
def without_bars() -> Iterator[None]:
    """Turn off the client's progress bars: small files need none, and moeq shows its own for streamed files."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
