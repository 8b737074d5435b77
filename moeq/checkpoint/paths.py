"""Names read from files: the one check that each has to pass before it is used as a path.

Indices, manifests, restore data, journals and repository listings come from strangers. A name is accepted if it is a
plain relative path on every system: nothing absolute, no `..`, nothing that a terminal, a shell or Windows reads as
something else. An accepted name is returned unchanged, so that a restored folder has the names of its source.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Iterable

from moeq.errors import MoeqError

#: Largest part of a path on common file systems, and largest whole name, in bytes.
_PART_BYTES, _NAME_BYTES = 255, 1024

#: Names of devices on Windows, with any extension.
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³])\s*(\..*)?", re.IGNORECASE | re.DOTALL)

#: Prefixes of moeq's own files, in the form that `folded` returns.
_OWN = ("moeq-", "moeq.json")

#: Prefixes of files that exist only while moeq works; no other file may have one, not even for a while.
_WORK = ("moeq-work", "moeq-journal")

#: The file that makes a folder a conversion.
_MANIFEST = "moeq.json"


def plain_name(name: object, where: str) -> str:
    """Check a name that may be joined to a folder to read it, and return it.

    Raises MoeqError `source.unsafe-path` for anything but a plain relative path.
    """
    problem = _problem(name)
    if problem is not None or not isinstance(name, str):
        raise MoeqError("source.unsafe-path", f"{where}: file {ascii(name)[:200]} {problem}")
    return name


def safe_name(name: object, where: str) -> str:
    """Check a name that may be joined to a folder to write it, and return it.

    Raises MoeqError as `plain_name`; `source.reserved-name` for the name of a manifest, or of a file that moeq keeps
    while it works.
    """
    name = plain_name(name, where)
    if folded(name).startswith(_WORK) or folded(name).split("/")[0] == _MANIFEST:
        raise MoeqError(
            "source.reserved-name",
            f"{where}: file {ascii(name)[:200]} has a name that only moeq's own files may have",
            "rename the file",
        )
    return name


def _problem(name: object) -> str | None:
    """Say why a name is refused, or return None."""
    if not isinstance(name, str) or not name or not name.isprintable():
        return "is not a file name"
    parts = name.split("/")
    if name.startswith("/") or "\\" in name or ":" in name or any(part in ("", ".", "..") for part in parts):
        return "leads out of the folder or is not a plain relative path"
    if any(part[-1] in ". " or _DEVICE.fullmatch(part) for part in parts):
        return "is not a file name on every system"
    if len(os.fsencode(name)) > _NAME_BYTES or any(len(os.fsencode(part)) > _PART_BYTES for part in parts):
        return f"is longer than {_PART_BYTES} bytes, or {_NAME_BYTES} with its folders"
    return None


def safe_names(names: Iterable[object], where: str) -> tuple[str, ...]:
    """Check several names as `safe_name` does; none may be another's folder, or equal another where case is ignored.

    Raises MoeqError `source.unsafe-path`, `source.reserved-name`.
    """
    found = tuple(safe_name(name, where) for name in names)
    homes = require_distinct(found, where)
    for key, name in homes.items():
        parts = key.split("/")
        inside = next((up for n in range(1, len(parts)) if (up := "/".join(parts[:n])) in homes), None)
        if inside is not None:
            message = f"{where}: {ascii(homes[inside])[:200]} is both a file and the folder of {ascii(name)[:200]}"
            raise MoeqError("source.unsafe-path", message)
    return found


def require_distinct(names: Iterable[str], where: str) -> dict[str, str]:
    """Refuse two names that mean one file where case is ignored; return folded form -> name.

    Raises MoeqError `source.unsafe-path`.
    """
    homes: dict[str, str] = {}
    for name in names:
        other = homes.setdefault(folded(name), name)
        if other != name:
            raise MoeqError(
                "source.unsafe-path",
                f"{where}: {ascii(other)[:200]} and {ascii(name)[:200]} are one file on systems that ignore case",
                "rename one of them",
            )
    return homes


def is_usable(name: str) -> bool:
    """Return whether a file can have this name on every system."""
    return _problem(name) is None


def is_own(name: str) -> bool:
    """Return whether a file of moeq's own has this name, or has it where case is ignored."""
    return folded(name).startswith(_OWN)


def folded(name: str) -> str:
    """Return a name as file systems compare it that ignore case and Unicode's ways to write a letter."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())
