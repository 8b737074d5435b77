"""Upload a finished conversion to the Hub: weight files first, then one commit that makes everything visible.

Until that commit the repository stays unchanged, so that no half-pushed conversion can be loaded. Weight files that the
Hub already has are not sent again: the same command continues a failed push.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from blake3 import blake3

from moeq.checkpoint.disk import closing_fd
from moeq.checkpoint.files import SeenFiles
from moeq.checkpoint.header import raw_header
from moeq.checkpoint.hub import looks_like_repository, without_bars
from moeq.checkpoint.hub_errors import first_line, transport_errors
from moeq.checkpoint.jsonfile import MAX_CONFIG_BYTES
from moeq.checkpoint.manifest import MANIFEST_NAME, FileDigest, Manifest
from moeq.errors import MoeqError
from moeq.pipeline.events import Advance
from moeq.pipeline.plan.side_files import CARD, HUB_SETTINGS, SIGNATURE_NAME, SOURCE_CARD
from moeq.pipeline.state.records import open_file_digest
from moeq.version import __version__

if TYPE_CHECKING:
    from huggingface_hub import HfApi

#: Endings of weight files, which are uploaded before the commit.
_WEIGHTS = (".safetensors", ".data")
_MAX_NAME = 96  # characters, by the Hub's rule

#: Model cards, which users may change: a push writes moeq's card and keeps theirs under the second name.
_CARDS = (CARD, SOURCE_CARD)


@dataclass(frozen=True)
class PushTarget:
    """A repository that this machine's token may write to."""

    repo: str  #: `org/name`
    files: frozenset[str]  #: paths of the files in it


@dataclass(frozen=True)
class Upload:
    """Files of a conversion's folder that are pushed."""

    folder: Path  #: the conversion
    contents: Mapping[str, Path | bytes]  #: file name to its bytes, or to its path if it is large
    card: bytes | None  #: the source's model card, if there is one
    seen: SeenFiles  #: state of the files when they were checked; they must not change

    @property
    def size(self) -> int:
        return sum(map(_size, self.contents.values()))


@dataclass(frozen=True)
class Pushed:
    """Result of a push."""

    repo: str  #: `org/name`
    url: str  #: page of the repository
    commit: str  #: commit that holds the conversion
    files: int  #: count of files in the commit
    size: int  #: bytes of these files
    removed: tuple[str, ...]  #: files of an earlier push that the commit removed
    names: tuple[str, ...] = ()  #: names of the files


def check_name(repo: str) -> None:
    """Refuse names that no repository can have. Raises MoeqError `usage.push-name`."""
    name = repo.rpartition("/")[2]
    good = looks_like_repository(repo) and len(repo) <= _MAX_NAME
    if not good or "--" in repo or ".." in repo or name.endswith((".git", ".", "-")):
        raise MoeqError(
            "usage.push-name",
            f"{repo!r} is no name of a repository on the Hub",
            "name it as org/name: letters, digits, '-', '_' and '.', at most 96 in all",
        )


def open_target(repo: str, *, private: bool = True) -> PushTarget:
    """Make sure, before hours of work, that a repository can be pushed to; create it (`private` or not) if missing.

    Raises MoeqError `usage.push-name`; `environment.hub-token` without a token or with one that cannot write;
    `environment.hub` if the Hub cannot be reached; `usage.push-target` if the repository holds weights that moeq did
    not write.
    """
    check_name(repo)
    api = _api()
    with _explained(repo):
        _check_token(api, repo)
        api.create_repo(repo, private=private, exist_ok=True)
        api.auth_check(repo, write=True)
        files = frozenset(file.rfilename for file in api.model_info(repo).siblings or [])
    foreign = sorted(name for name in files if name.endswith((".safetensors", ".bin", ".gguf")))
    if foreign and MANIFEST_NAME not in files:
        raise MoeqError(
            "usage.push-target",
            f"{repo} holds weights that moeq did not write: {', '.join(foreign[:3])}",
            "push to a repository of its own, such as " + repo + "-moeq",
        )
    return PushTarget(repo, files)


def gather(folder: Path, manifest: Manifest) -> Upload:
    """Gather the files of a conversion, and check all of them against its manifest before anything is sent.

    Raises MoeqError `usage.foreign-files` for files that moeq did not write; `source.link` for links out of the folder;
    `source.missing-file`, `source.not-a-file`, `source.too-large`, `source.digest-mismatch` if files are not those that
    were written.
    """
    with os.scandir(folder) as entries:
        names = sorted(entry.name for entry in entries if not entry.is_dir(follow_symlinks=False))
    seen, recorded = SeenFiles(folder, str(folder)), manifest.files
    if recorded is not None:
        _require_files(folder, names, recorded)
    for name in names:
        seen.require_inside(name)
    contents = {name: _content(seen, folder, name, recorded) for name in names if name != SIGNATURE_NAME}
    # A folder that was itself downloaded after a push has the source's card under its second name.
    cards = [name for name in (SOURCE_CARD, CARD) if name in contents]
    return Upload(folder, contents, seen.read(cards[0], MAX_CONFIG_BYTES) if cards else None, seen)


def _require_files(folder: Path, names: Sequence[str], recorded: Mapping[str, FileDigest]) -> None:
    """Require all files that the manifest lists, and no others except those that the Hub or a signature adds."""
    known = {*recorded, MANIFEST_NAME, SIGNATURE_NAME, CARD, SOURCE_CARD, HUB_SETTINGS}
    strangers = [name for name in names if name not in known]
    if strangers:
        shown = ", ".join(ascii(name)[1:-1][:100] for name in strangers[:8])
        raise MoeqError(
            "usage.foreign-files",
            f"{folder} holds files that {MANIFEST_NAME} does not list: {shown}",
            "move them away: only the files of a conversion are pushed",
        )
    absent = [name for name in recorded if name not in names]
    if absent:
        raise MoeqError("source.missing-file", f"{folder} lacks {ascii(absent[0])[1:-1]}", "convert the source again")


def _content(seen: SeenFiles, folder: Path, name: str, recorded: Mapping[str, FileDigest] | None) -> Path | bytes:
    """Return a file as it is pushed, after comparing it with the manifest; weights are compared by header and size."""
    wanted = (recorded or {}).get(name)
    with closing_fd(seen.open(name)) as fd:
        size = os.fstat(fd).st_size
        if wanted is not None and size != wanted.bytes and name not in _CARDS:
            raise _changed_file(name)
        if size <= MAX_CONFIG_BYTES and not name.endswith(_WEIGHTS):
            raw = seen.read(name, MAX_CONFIG_BYTES)
            content: Path | bytes = raw
            found = FileDigest(len(raw), blake3(raw).hexdigest())
        else:
            content = folder / name
            if (wanted is None or name in _CARDS) and not name.endswith(_WEIGHTS):
                raise MoeqError("source.too-large", f"{name}: {size:,} bytes, the limit is {MAX_CONFIG_BYTES:,}")
            if wanted is not None and wanted.tensors:
                found = FileDigest(size, blake3(raw_header(fd, name)).hexdigest(), wanted.tensors)
            else:
                found = open_file_digest(fd)
    if wanted is not None and found != wanted and name not in _CARDS:
        raise _changed_file(name)
    return content


def _changed_file(name: str) -> MoeqError:
    return MoeqError(
        "source.digest-mismatch", f"{name} is not the file that was written", "moeq verify lists every difference"
    )


def _size(content: Path | bytes) -> int:
    return len(content) if isinstance(content, bytes) else content.stat().st_size


def push(
    upload: Upload,
    target: PushTarget,
    replaced: Mapping[str, bytes],
    *,
    message: str,
    progress: Advance | None = None,
) -> Pushed:
    """Upload a conversion; its folder is not changed.

    `replaced` are files that the repository gets with other content than the folder's, or that the folder lacks.

    Raises MoeqError `environment.hub-upload`, `environment.hub-token`, `source.changed`. The repository is unchanged
    then, and the same call continues the upload.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    tell, api = progress or (lambda done, total, label: None), _api()
    contents: dict[str, Path | bytes] = {**upload.contents, **replaced}
    sizes = {name: _size(one) for name, one in contents.items()}
    total, done = sum(sizes.values()), 0
    additions = []
    replaceable = (*_WEIGHTS, SIGNATURE_NAME)
    removed = tuple(sorted(name for name in target.files - contents.keys() if name.endswith(replaceable)))
    with _explained(target.repo, upload.folder), without_bars():
        for name, one in contents.items():
            tell(done, total, name)
            addition = CommitOperationAdd(name, one)  # some versions of the client read the whole file here
            additions.append(addition)
            if name.endswith(_WEIGHTS):
                api.preupload_lfs_files(target.repo, [addition])
            done += sizes[name]
        operations = [*additions, *map(CommitOperationDelete, removed)]
        tell(done, total, "commit")
        upload.seen.require_unchanged()
        commit = api.create_commit(target.repo, operations, commit_message=message)
    url = f"{api.endpoint}/{target.repo}"
    return Pushed(target.repo, url, str(commit.oid), len(contents), total, removed, tuple(sorted(contents)))


def base_model_of(manifest: Manifest) -> str | None:
    """Return the source's repository if it was read from the Hub, else None."""
    name = manifest.source.name
    return name if manifest.source.revision and looks_like_repository(name) else None


def published_manifest(manifest: Manifest, base_model: str | None, replaced: Mapping[str, bytes]) -> bytes:
    """Make the `moeq.json` that is pushed: without paths of this machine, with digests of the replaced files.

    A source that has no repository (`base_model`) is named by the last part of its path.
    """
    name = base_model or Path(manifest.source.name).name
    source = replace(manifest.source, name=name)
    files = manifest.files
    if files is not None:
        files = {**files, **{name: FileDigest(len(raw), blake3(raw).hexdigest()) for name, raw in replaced.items()}}
    document = replace(manifest, source=source, model={**manifest.model, "name": name}, files=files).to_json()
    return (json.dumps(document, indent=2) + "\n").encode()


def _api() -> HfApi:
    from huggingface_hub import HfApi

    return HfApi(library_name="moeq", library_version=__version__)


def _check_token(api: HfApi, repo: str) -> None:
    """Refuse a missing token, and one whose role is to read only."""
    from huggingface_hub import get_token

    hint = "`hf auth login`, or set HF_TOKEN to a token with write access (https://huggingface.co/settings/tokens)"
    if not get_token():
        raise MoeqError("environment.hub-token", f"pushing to {repo} needs a token of the Hub, and there is none", hint)
    who: dict[str, Any] = api.whoami()
    role = who.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        name = who.get("name", "your account")
        raise MoeqError("environment.hub-token", f"the token of {name} can only read; {repo} cannot be pushed to", hint)


@contextmanager
def _explained(repo: str, folder: Path | None = None) -> Iterator[None]:
    """Turn errors of the client into MoeqErrors. `folder`: the finished conversion that can be pushed again."""
    from huggingface_hub.errors import HfHubHTTPError

    again = f"; {folder} is finished and kept: repeat with `moeq push {quote(str(folder))} {repo}`" if folder else ""
    try:
        yield
    except MoeqError:
        raise
    except (HfHubHTTPError, *transport_errors(), ValueError, RuntimeError) as error:
        # The client raises RuntimeError and ValueError for failed uploads, with the true error as the cause.
        cause = error.__cause__ or error
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status in (401, 403):
            raise MoeqError(
                "environment.hub-token",
                f"the Hub does not let this token write to {repo} (HTTP {status})",
                "check org and name, and that the token has write access: https://huggingface.co/settings/tokens"
                + again,
            ) from None
        reason = f"HTTP {status}" if status else first_line(cause)
        code = "environment.hub-upload" if folder else "environment.hub"
        raise MoeqError(code, f"{repo}: the Hub could not be written to: {reason}", "try again" + again) from None
