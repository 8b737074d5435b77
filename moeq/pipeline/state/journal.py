"""The journals of a conversion: which units are finished, one line each, written after their bytes are on disk.

Every process that records units has a journal of its own: `moeq-journal.jsonl`, or `moeq-journal.<shard>.jsonl` for one
of several shards of the work. Its first line names the job, with the state of the source; a folder's finished units are
those of all its journals together. A torn last line (without a newline) is ignored.

Every line ends with a seal, the BLAKE3 of the first line's seal and of the line: a line that was damaged, edited or
taken from another journal is ignored, and its unit is done again. A seal is no signature: anyone who may write to the
folder can make one.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from moeq.checkpoint.disk import disk_errors, read_at, write_at
from moeq.checkpoint.jsonfile import parse_json
from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError
from moeq.pipeline.state.records import UnitRecord
from moeq.spelling import option
from moeq.typed import read_as

T = TypeVar("T")

JOURNAL_SCHEMA = "moeq.journal/2"
_STEM, _SUFFIX = "moeq-journal", ".jsonl"
_SEAL = b',"seal":"'


@dataclass(frozen=True)
class JobStamp:
    """First line of a journal: the job that it belongs to."""

    job: str  #: digest of the plan
    source: str = ""  #: the source's name as it was given
    identity: str = ""  #: the source's identity (`Source.identity`)
    #: The source's weight files with sizes, times and ids (`moeq.pipeline.state.stamps.source_stamps`).
    files: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    sample: str = ""  #: digest of some of the source's data (`moeq.pipeline.state.stamps.source_sample`)
    version: str = ""  #: moeq's version
    request: Mapping[str, Any] = field(default_factory=dict)  #: source and options (`JobRequest.to_json`)
    place: str | None = None  #: absolute path of a local source; None for a repository
    #: Names of all files that the job writes. Other files in its folder are not moeq's.
    outputs: tuple[str, ...] = ()

    def saw_same_source(self, other: JobStamp) -> bool:
        """Return whether both saw the very same source: the same commit, or the same unchanged files."""
        return self.identity == other.identity and self.files == other.files


@dataclass(frozen=True)
class Replaced:
    """A folder of moeq's that another is about to replace, recorded before anything happens to it."""

    device: int  #: number of the folder's file system
    inode: int  #: inode of the folder
    files: tuple[str, ...]  #: the files of which it consists


@dataclass(frozen=True)
class Journals:
    """All journals of a folder."""

    #: Journal file name to its stamp, for journals whose first line is whole.
    stamps: Mapping[str, JobStamp] = field(default_factory=dict)
    #: Unit id to its record; units with contradictory records are left out.
    records: Mapping[str, UnitRecord] = field(default_factory=dict)
    #: Unit id to the names of journals whose records of it differ.
    contradictions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Unit id to the names of the journals that record it.
    homes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    replaced: Replaced | None = None  #: the folder that this one was about to replace, if there was one
    #: Names of journals whose first line is damaged and could not be told from their seal.
    damaged: tuple[str, ...] = ()

    def of_other_files(self, stamp: JobStamp) -> frozenset[str]:
        """Return units that are known only from journals whose source is not recognised as that of `stamp`."""
        known = {name for name, other in self.stamps.items() if other.saw_same_source(stamp)}
        return frozenset(unit for unit in self.records if known.isdisjoint(self.homes[unit]))


def journal_name(shard: str | None) -> str:
    """Return the file name of the journal of a shard, or of a process that does everything."""
    return f"{_STEM}{'' if shard is None else '.' + shard}{_SUFFIX}"


def shard_of(name: str) -> str | None:
    """Return the shard whose journal has that file name; None for the journal of a process that does everything."""
    return name.removeprefix(_STEM).removesuffix(_SUFFIX).removeprefix(".") or None


def is_journal(name: str) -> bool:
    return name.startswith(_STEM) and name.endswith(_SUFFIX) and "/" not in name


def journal_files(folder: OutputFolder) -> list[str]:
    return [name for name in folder.names() if is_journal(name)]


def read_journals(
    folder: OutputFolder, names: Sequence[str] | None = None, expected: JobStamp | None = None
) -> Journals:
    """Read journals. Lines that cannot be understood are left out: their units are done again.

    Args:
        names: names of the journals; None: all journals of the folder.
        expected: stamp of the job, by which a damaged first line is recognised: its body or its seal is still right.

    Raises MoeqError `environment.planted` where one is no file; OSError if they cannot be read.
    """
    contents = {name: folder.read_file(name) for name in (journal_files(folder) if names is None else names)}
    stamps = {name: stamp for name, content in contents.items() if (stamp := _stamp_of(content)) is not None}
    known = [*([] if expected is None else [expected]), *stamps.values()]
    found: dict[str, dict[str, UnitRecord]] = {}
    replaced: Replaced | None = None
    damaged: list[str] = []
    for name, content in contents.items():
        head, _, rest = content.partition(b"\n")
        if name not in stamps:
            recovered = next((stamp for stamp in known if _was_head_of(head, stamp)), None)
            if recovered is None:
                damaged += [name] if rest else []
                continue
            stamps[name], head = recovered, _head(recovered)
        for row in _rows(head, rest):
            if isinstance(row, dict) and "replaced" in row:
                replaced = _understood(Replaced, row["replaced"]) or replaced
            record = _understood(UnitRecord, row)
            if record is not None:
                # Within one journal the last line counts: the unit was done again because its bytes were lost.
                found.setdefault(record.unit, {})[name] = record
    records, contradictions = {}, {}
    for unit, by_journal in found.items():
        first, *others = by_journal.values()
        if all(other == first for other in others):
            records[unit] = first
        else:
            contradictions[unit] = tuple(by_journal)
    homes = {unit: tuple(by_journal) for unit, by_journal in found.items()}
    return Journals(stamps, records, contradictions, homes, replaced, tuple(damaged))


def require_job(journals: Journals, stamp: JobStamp, where: Path) -> None:
    """Refuse to continue work of another job, or of a source that has changed since.

    Raises MoeqError `source.changed`, `usage.other-job`.
    """
    for name, other in journals.stamps.items():
        if other.source == stamp.source or other.job == stamp.job:
            require_unchanged(other, stamp, where)
        different = differences(other, stamp)
        if different:
            raise MoeqError(
                "usage.other-job",
                f"{where} holds unfinished work of another conversion: {', '.join(different[:6])} ({name})",
                f"finish that one with its own options and version, or start over: {option('force', True)}, or remove "
                "the folder",
            )


def differences(there: JobStamp, here: JobStamp) -> list[str]:
    """List the differences of two jobs in words; empty if there are none."""
    found = []
    if there.identity != here.identity:
        found.append(f"source {there.source} there, {here.source} here")
    if there.version != here.version:
        found.append(f"moeq {there.version} there, {here.version} here")
    old, new = _flat(there.request), _flat(here.request)
    keys = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    found += [f"{key} {old.get(key)!r} there, {new.get(key)!r} here" for key in keys]
    if not found and there.job != here.job:
        found.append(f"plan {there.job[:16]} there, {here.job[:16]} here")
    return found


def _flat(request: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten nested options to dotted names, as JSON has them. The spelling of the source does not count."""
    found: dict[str, Any] = {}
    for key, value in request.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}."))
        elif prefix or key != "src":
            found[prefix + key] = json.loads(json.dumps(value))
    return found


def require_unchanged(then: JobStamp, now: JobStamp, where: Path) -> None:
    """Refuse to go on if the source has changed. Raises MoeqError `source.changed`.

    Files that were only moved or copied are not refused here: units that were made of them are made again and compared
    (`Journals.of_other_files`).
    """
    if then.identity != now.identity:
        raise changed(where, now.source, "its config or its tensors are not what they were")
    if then.place == now.place:
        for file, (size, modified, *_) in then.files.items():
            if file in now.files and now.files[file][:2] != (size, modified):
                raise changed(where, now.source, f"{file} was written to after the conversion had begun", _COPIES)
    if then.sample != now.sample:
        raise changed(where, now.source, "its weights are not what they were")


def require_untouched(then: JobStamp, now: JobStamp, where: Path) -> None:
    """Refuse to publish if the source was touched in any way while it was converted.

    Raises MoeqError `source.changed`.
    """
    require_unchanged(then, now, where)
    if not then.saw_same_source(now):
        raise changed(where, now.source, "its files were replaced while they were converted")


#: Hint for copies on several machines, which may lie at the same path.
_COPIES = "; if these are copies on several machines, give their files equal times (rsync -a, cp -p)"


def changed(where: Path, source: str, detail: str, more: str = "") -> MoeqError:
    """Make the error for a source that has changed since finished units were made of it."""
    return MoeqError(
        "source.changed",
        f"{source} has changed since {where} was begun: {detail}",
        f"the output would mix both; start over: {option('force', True)}, or remove the folder" + more,
    )


class Journal:
    """One process's journal, open for appending and locked against a second process with the same shard.

    Raises MoeqError `usage.running` if another process holds it; `resources.disk-full`, `environment.write`,
    `environment.planted`.
    """

    def __init__(self, folder: OutputFolder, stamp: JobStamp, shard: str | None = None) -> None:
        self.name = journal_name(shard)
        self._path = folder.path / self.name
        self._fd = -1
        try:
            with disk_errors(self._path):
                self._fd = folder.open(self.name, os.O_RDWR | os.O_CREAT)
                require_lock(self._fd, folder.path)
                self._end = self._whole_lines(stamp)
                folder.sync()
        except BaseException:
            self.close()
            raise

    def _whole_lines(self, stamp: JobStamp) -> int:
        """Mend a damaged first line, cut off a torn last one, begin an empty journal; return the size in bytes."""
        found = bytearray(os.fstat(self._fd).st_size)
        content = bytes(found[: read_at(self._fd, memoryview(found), 0)])
        whole = content[: content.rfind(b"\n") + 1]
        head = whole.partition(b"\n")[0]
        if _stamp_of(whole) is None:
            recovered = _was_head_of(head, stamp)
            head = _head(stamp)
            if not recovered:
                whole = head + b"\n"
                os.ftruncate(self._fd, 0)
            write_at(self._fd, head + b"\n", 0)
            os.fsync(self._fd)
        if len(whole) < len(content):
            os.ftruncate(self._fd, len(whole))
        self._seal = _seal_of(head)
        return len(whole)

    def add(self, records: Iterable[UnitRecord]) -> None:
        """Record finished units on disk, synced. Raises MoeqError `resources.disk-full`."""
        self._append(b"".join(_sealed(record.to_json(), self._seal) for record in records))

    def add_replaced(self, replaced: Replaced) -> None:
        """Record which folder is about to be replaced. Raises MoeqError `resources.disk-full`."""
        self._append(_sealed({"replaced": asdict(replaced)}, self._seal))

    def _append(self, lines: bytes) -> None:
        with disk_errors(self._path, len(lines)):
            write_at(self._fd, lines, self._end)
            os.fsync(self._fd)
        self._end += len(lines)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def require_lock(fd: int, where: Path, *, exclusive: bool = True) -> None:
    """Lock an open file or folder until it is closed. Raises MoeqError `usage.running` if another process has it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
    except BlockingIOError:
        raise MoeqError(
            "usage.running",
            f"another process is working on {where}",
            f"wait for it; several processes can share the work with {option('shard')}",
        ) from None
    except OSError:
        return  # file systems without locks: two processes would write the same bytes


def _rows(head: bytes, rest: bytes) -> list[Any]:
    """Parse the lines after a journal's first, without a torn last one; None for lines with a wrong seal."""
    *lines, _torn = rest.split(b"\n")
    return [_parse(line, _seal_of(head)) for line in lines]


def _stamp_of(content: bytes) -> JobStamp | None:
    """Parse the first line of a journal; None if it is torn or damaged."""
    head, newline, _ = content.partition(b"\n")
    row = _parse(head, b"") if newline else None
    return _understood(JobStamp, row) if isinstance(row, dict) and row.get("schema") == JOURNAL_SCHEMA else None


def _head(stamp: JobStamp) -> bytes:
    """Make the first line of a job's journal, without its newline."""
    return _sealed({"schema": JOURNAL_SCHEMA, **asdict(stamp)}, b"")[:-1]


def _was_head_of(head: bytes, stamp: JobStamp) -> bool:
    """Return whether a damaged first line was that of a job: its body or its seal is still right."""
    whole = _head(stamp)
    same_body = head.rpartition(_SEAL)[0] == whole.rpartition(_SEAL)[0]
    return len(head) == len(whole) and (same_body or _seal_of(head) == _seal_of(whole))


def _sealed(row: Mapping[str, Any], first: bytes) -> bytes:
    """Make one line of a journal whose first line has the seal `first`."""
    body = json.dumps(row, separators=(",", ":")).encode()[:-1]
    return body + _SEAL + blake3(first + body).hexdigest().encode() + b'"}\n'


def _seal_of(line: bytes) -> bytes:
    """Return the seal that a line carries."""
    return line.rstrip().rpartition(_SEAL)[2].removesuffix(b'"}')


def _parse(line: bytes, first: bytes) -> Any:
    """Parse a line of a journal whose first line has the seal `first`; None if it is damaged."""
    body = line.rpartition(_SEAL)[0]
    if blake3(first + body).hexdigest().encode() != _seal_of(line):
        return None
    try:
        return parse_json(line, "journal", "source.bad-journal")
    except MoeqError:
        return None


def _understood(kind: type[T], row: Any) -> T | None:
    """Read a row as a record; None if it is no such record."""
    try:
        return read_as(kind, row, "journal", "source.bad-journal")
    except MoeqError:
        return None
