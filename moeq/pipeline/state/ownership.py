"""Ownership of folders: what moeq may write into, replace or remove, and what belongs to someone else."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from moeq.checkpoint.jsonfile import read_object
from moeq.checkpoint.manifest import MANIFEST_NAME, MAX_MANIFEST_BYTES
from moeq.checkpoint.outputs import OutputFolder
from moeq.checkpoint.paths import safe_names
from moeq.errors import MoeqError, listed
from moeq.pipeline.state.journal import Journals, is_journal

#: Prefix of work files, which are never published.
WORK_PREFIX = "moeq-work."


def require_apart(sources: Iterable[Path], folders: Iterable[Path]) -> None:
    """Refuse output folders that are a source, hold one or lie in one, by any path, link or mount.

    The output `folders` need not exist yet. Raises MoeqError `usage.destination-is-source`.
    """
    source_chains = [(source, _above(source)) for source in sources]
    for folder in folders:
        chain = _above(folder)
        for source, source_chain in source_chains:
            inside = source_chain[0] is not None and source_chain[0] in chain
            holds = chain[0] is not None and chain[0] in source_chain
            if inside or holds:
                what = "is, or holds, the source itself" if holds else "is in the source"
                raise MoeqError("usage.destination-is-source", f"{folder} {what} ({source})", "name another folder")


def _above(path: Path) -> list[tuple[int, int] | None]:
    """List (device, inode) of a folder and of all folders above it; None for folders that do not exist yet."""
    real = Path(os.path.realpath(path))
    return [_identity(one) for one in (real, *real.parents)]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except OSError:
        return None
    return info.st_dev, info.st_ino


def finished_files(folder: Path, marker: str) -> set[str]:
    """Return the files of a finished output of moeq, as the marker lists them.

    Raises MoeqError `source.*` if the folder is no finished output.
    """
    files = read_object(folder / marker, marker, MAX_MANIFEST_BYTES, "source.bad-manifest").get("files")
    if not isinstance(files, (dict, list)) or not files:
        raise MoeqError("source.bad-manifest", f"{folder / marker} does not list the files of the output")
    return {marker, f"{marker}.minisig", *safe_names((name for name in files if name != marker), marker)}


def is_work(name: str) -> bool:
    """Return whether a name in a work folder is that of a journal or another work file."""
    return is_journal(name) or name.startswith(WORK_PREFIX)


def require_no_strangers(folder: OutputFolder, files: Collection[str], what: str, *, work: bool = True) -> None:
    """Refuse a folder that holds any file that is not in `files`; `work`: journals and work files are allowed, too.

    Raises MoeqError `usage.foreign-files` with the names; `what` completes a sentence about the folder.
    """
    found = [name for name in folder.names() if name not in files and not (work and is_work(name))]
    if found:
        shown = listed((ascii(name)[1:-1] for name in found), 8)
        raise MoeqError(
            "usage.foreign-files",
            f"{folder.path} {what}, and holds files that moeq did not write: {shown}",
            "move them away, or name another folder; moeq removes only files that a conversion wrote here",
        )


def require_ours(parent: OutputFolder, name: str, *, fresh: bool) -> OutputFolder:
    """Open a work folder; refuse a link, a file, and another user's folder.

    `fresh`: this process has just created it. Raises MoeqError `usage.foreign-folder`, `environment.write`; OSError if
    it cannot be opened.
    """
    info, path = parent.status(name), parent.path / name
    if info is None or not stat.S_ISDIR(info.st_mode):
        raise _foreign(path, "is a link or not a folder")
    found = OutputFolder(path, parent.fd)
    try:
        owner = os.fstat(found.fd).st_uid
        if not fresh and not _is_us(parent, owner):
            raise _foreign(path, f"belongs to another user (number {owner})")
    except BaseException:
        found.close()
        raise
    return found


def require_own_file(folder: OutputFolder, name: str) -> None:
    """Refuse a link, and a file of another user, who may have put it into a folder that many may write to.

    Raises MoeqError `usage.foreign-folder`.
    """
    info = folder.status(name)
    if info is not None and not (stat.S_ISREG(info.st_mode) and _is_us(folder, info.st_uid)):
        raise _foreign(folder.path / name, "is a link, or belongs to another user")


def _is_us(folder: OutputFolder, owner: int) -> bool:
    return owner == os.geteuid() or owner == folder.owner_of_new_files()


def require_journals(folder: OutputFolder, journals: Journals) -> None:
    """Refuse a folder that holds any file that is not moeq's unfinished work.

    Raises MoeqError `usage.foreign-folder`, `usage.foreign-files`.
    """
    if journals.stamps:
        known = {name for stamp in journals.stamps.values() for name in stamp.outputs}
        require_no_strangers(folder, known, "holds work of moeq's")
    elif journals.damaged:
        raise damaged_journal(folder.path, journals.damaged[0])
    elif any(not is_journal(name) for name in folder.names()):
        # Moeq syncs a journal to disk before it creates any other file.
        raise _foreign(folder.path, "holds files, but no journal of moeq that lists them")


def damaged_journal(folder: Path, name: str) -> MoeqError:
    """Return the error for a journal whose first line, which names its job, is damaged."""
    return MoeqError(
        "usage.unreadable-journal",
        f"the first line of {folder / name} is damaged: nothing says which job the files there belong to",
        "repeat the command that began this work, with the same options; or remove the folder and start over",
    )


def remove_files(folder: OutputFolder, files: Iterable[str]) -> None:
    """Remove files of moeq, the manifest last: as long as it is there, moeq owns the rest. Raises OSError."""
    for name in sorted(files, key=lambda name: name == MANIFEST_NAME):
        folder.remove(name)


def remove_work(folder: OutputFolder) -> None:
    """Remove all work files except journals. Raises OSError."""
    for name in {name.split("/")[0] for name in folder.names() if name.startswith(WORK_PREFIX)}:
        folder.remove_folder(name)


def _foreign(path: Path, what: str) -> MoeqError:
    return MoeqError(
        "usage.foreign-folder",
        f"{path} {what}; moeq needs this path for its work files",
        "move it away, or name another destination; moeq removes only files that a conversion wrote here",
    )
