"""The journals of a conversion: which units are finished, one line each, written after their bytes are on disk.

Every process that records units has a journal of its own: `moeq-journal.jsonl`, or `moeq-journal.<share>.jsonl` for one
of several shares of the work. Its first line names the job, with the state of the source; a folder's finished units are
those of all its journals together. A last line that was torn (no newline) is as if it had not been written.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moeq.checkpoint.writer import disk_errors, write_at
from moeq.errors import MoeqError
from moeq.pipeline.state.records import UnitRecord, to_line

JOURNAL_SCHEMA = "moeq.journal/1"
_STEM, _SUFFIX = "moeq-journal", ".jsonl"


@dataclass(frozen=True)
class JobStamp:
    """What a journal belongs to.

    Attributes:
        job: digest of the plan.
        source: the source as it was named.
        identity: its identity (`Source.identity`).
        files: its weight files with size and time of last change (`moeq.pipeline.state.job.source_stamps`).
        version: moeq's version.
        request: what was asked for (`JobRequest.to_json`).
        place: absolute path of a local source; None for a repository.
    """

    job: str
    source: str = ""
    identity: str = ""
    files: Mapping[str, list[int]] = field(default_factory=dict)
    version: str = ""
    request: Mapping[str, Any] = field(default_factory=dict)
    place: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> JobStamp:
        """From `to_json`. Raises KeyError, TypeError, ValueError or AttributeError for anything else."""
        texts = {name: str(row[name]) for name in ("job", "source", "identity", "version")}
        place = None if row["place"] is None else str(row["place"])
        return cls(**texts, files=dict(row["files"]), request=dict(row["request"]), place=place)


@dataclass(frozen=True)
class Journals:
    """All journals of a folder.

    Attributes:
        stamps: journal file name to what it belongs to, for those whose first line is whole.
        records: unit id to its record; units that journals contradict each other about are not in here.
        contradictions: unit id to the names of journals whose records of it differ.
    """

    stamps: Mapping[str, JobStamp]
    records: Mapping[str, UnitRecord]
    contradictions: Mapping[str, tuple[str, ...]]


def journal_name(share: str | None) -> str:
    """File name of the journal of a share, or of a process that does everything."""
    return f"{_STEM}{'' if share is None else '.' + share}{_SUFFIX}"


def share_of(name: str) -> str | None:
    """The share whose journal has that file name; None for the journal of a process that does everything."""
    return name.removeprefix(_STEM).removesuffix(_SUFFIX).removeprefix(".") or None


def is_journal(name: str) -> bool:
    """Whether a file name is that of a journal."""
    return name.startswith(_STEM) and name.endswith(_SUFFIX)


def journal_files(folder: Path) -> list[Path]:
    """The journals of a folder."""
    return sorted(folder.glob(f"{_STEM}*{_SUFFIX}"))


def read_journals(folder: Path) -> Journals:
    """Read every journal of a folder. What cannot be understood is left out: such units are done again."""
    stamps: dict[str, JobStamp] = {}
    found: dict[str, dict[str, UnitRecord]] = {}
    for path in journal_files(folder):
        rows = _rows(path)
        stamp = _stamp(rows[0]) if rows else None
        if stamp is None:
            continue
        stamps[path.name] = stamp
        for record in map(_record, rows[1:]):
            if record is not None:
                # Within one journal the last line counts: the unit was done again because its bytes were lost.
                found.setdefault(record.unit, {})[path.name] = record
    records, contradictions = {}, {}
    for unit, by_journal in found.items():
        first, *others = by_journal.values()
        if all(other == first for other in others):
            records[unit] = first
        else:
            contradictions[unit] = tuple(by_journal)
    return Journals(stamps, records, contradictions)


def require_job(journals: Journals, stamp: JobStamp, where: Path) -> None:
    """Refuse to continue work of another job, or of a source that has changed since.

    Raises:
        MoeqError: `source.changed`, `usage.other-job`.
    """
    for name, other in journals.stamps.items():
        if other.source == stamp.source or other.job == stamp.job:
            require_unchanged(other, stamp, where)
        different = differences(other, stamp)
        if different:
            raise MoeqError(
                "usage.other-job",
                f"{where} holds unfinished work of another conversion: {', '.join(different[:6])} ({name})",
                "finish that one with its own options and version, or start over: --force, or remove the folder",
            )


def differences(there: JobStamp, here: JobStamp) -> list[str]:
    """In what two jobs differ, in words; empty where they do not."""
    found = []
    if there.identity != here.identity:
        found.append(f"source {there.source} there, {here.source} here")
    if there.version != here.version:
        found.append(f"moeq {there.version} there, {here.version} here")
    asked, asking = _flat(there.request), _flat(here.request)
    keys = [key for key in dict.fromkeys((*asked, *asking)) if asked.get(key) != asking.get(key)]
    found += [f"{key} {asked.get(key)!r} there, {asking.get(key)!r} here" for key in keys]
    if not found and there.job != here.job:
        found.append(f"plan {there.job[:16]} there, {here.job[:16]} here")
    return found


def _flat(request: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options under dotted names, as JSON has them. How the source was spelled is no difference."""
    found: dict[str, Any] = {}
    for key, value in request.items():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{prefix}{key}."))
        elif prefix or key != "src":
            found[prefix + key] = json.loads(json.dumps(value))
    return found


def require_unchanged(then: JobStamp, now: JobStamp, where: Path) -> None:
    """Refuse to go on where the source is not what it was. Raises MoeqError `source.changed`."""
    if then.identity != now.identity:
        raise _changed(where, now.source, "its config or its tensors are not what they were")
    if then.place != now.place:
        return  # a copy somewhere else (on the disk of another machine, say), which has times of its own
    for file, state in then.files.items():
        if file in now.files and list(now.files[file]) != list(state):
            raise _changed(where, now.source, f"{file} was written to after the conversion had begun", _COPIES)


#: Copies on several machines may lie at the same path.
_COPIES = "; if these are copies on several machines, give their files equal times (rsync -a, cp -p)"


def _changed(where: Path, source: str, detail: str, more: str = "") -> MoeqError:
    return MoeqError(
        "source.changed",
        f"{source} has changed since {where} was begun: {detail}",
        "a mix of both would be worthless; start over: --force, or remove the folder" + more,
    )


class Journal:
    """One process's journal, open for appending and locked against a second process with the same share.

    Args:
        folder: folder of the conversion.
        stamp: the job.
        share: name of the share of the work, or None for all of it.

    Raises:
        MoeqError: `usage.running` where another process holds it; `resources.disk-full`, `environment.write`.
    """

    def __init__(self, folder: Path, stamp: JobStamp, share: str | None = None) -> None:
        self.path = folder / journal_name(share)
        self._fd = -1
        try:
            with disk_errors(self.path):
                self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
                self._lock()
                self._end = self._whole_lines(stamp)
        except BaseException:
            self.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise MoeqError(
                "usage.running",
                f"another process is working on {self.path.parent}",
                "wait for it; several processes can share the work with --shard",
            ) from None
        except OSError:
            return  # file systems without locks: two processes would write the same bytes

    def _whole_lines(self, stamp: JobStamp) -> int:
        """Cut off a torn last line; begin with the stamp where nothing is left. Returns where to go on."""
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if not whole or _stamp(_parse(whole.split(b"\n", 1)[0])) is None:
            whole = to_line({"schema": JOURNAL_SCHEMA, **stamp.to_json()})
            os.ftruncate(self._fd, 0)
            write_at(self._fd, whole, 0)
            os.fsync(self._fd)
        elif len(whole) < len(content):
            os.ftruncate(self._fd, len(whole))
        return len(whole)

    def add(self, records: Iterable[UnitRecord]) -> None:
        """Record finished units; on disk when this returns. Raises MoeqError `resources.disk-full`."""
        lines = b"".join(to_line(record.to_json()) for record in records)
        with disk_errors(self.path, len(lines)):
            write_at(self._fd, lines, self._end)
            os.fsync(self._fd)
        self._end += len(lines)

    def close(self) -> None:
        """Close and unlock it."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _rows(path: Path) -> list[Any]:
    """The lines of a journal that can be read, without a torn last one."""
    try:
        *lines, _torn = path.read_bytes().split(b"\n")
    except OSError:
        return []
    return [row for row in map(_parse, lines) if row is not None]


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _stamp(row: Any) -> JobStamp | None:
    if not isinstance(row, dict) or row.get("schema") != JOURNAL_SCHEMA:
        return None
    try:
        return JobStamp.from_json(row)
    except (KeyError, TypeError, ValueError):
        return None


def _record(row: Any) -> UnitRecord | None:
    try:
        return UnitRecord.from_json(row)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
