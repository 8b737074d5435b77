"""Links, pipes and devices: none is written through, none is copied, none makes a command wait or fill memory."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.conftest import Place, command, contents, tree
from attacks.test_folders import interrupt

#: What a conversion writes into its work folder.
WRITTEN = [
    "config.json",
    "model.safetensors.index.json",
    "moeq.json",
    "moeq-restore.data",
    "moeq-journal.jsonl",
    "quantize_config.json",
    "model-00001-of-00003.safetensors",
    "model-00002-of-00003.safetensors",
]


def link(path: Path, victim: Path) -> None:
    path.symlink_to(victim)


def hard_link(path: Path, victim: Path) -> None:
    os.link(victim, path)


def dangling(path: Path, victim: Path) -> None:
    path.symlink_to(victim.parent / "made-by-moeq")


def pipe(path: Path, victim: Path) -> None:
    os.mkfifo(path)


def folder(path: Path, victim: Path) -> None:
    path.mkdir()


PLANTS = [link, hard_link, dangling, pipe, folder]


@pytest.mark.cover(every=14)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_what_is_planted_in_a_work_folder_is_not_written_through(
    place: Place, name: str, plant: Callable[[Path, Path], None]
) -> None:
    """Work of ours was interrupted, then somebody who may write there put something in the place of a file."""
    interrupt(place)
    (place.partial / name).unlink(missing_ok=True)
    plant(place.partial / name, place.victim)
    before = place.strangers()
    answer = place.convert()
    assert place.strangers() == before
    if name == "moeq.json" and plant is not folder:  # written under another name and moved here: replaced, not opened
        assert answer.code == 0, answer
        assert not (place.out / name).is_symlink()
        assert command("verify", place.out, "--source", place.source).code == 0
    else:
        assert answer.code in (2, 3), answer
        assert not place.out.exists()


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_with_a_link_and_nothing_else(place: Place, name: str, force: bool) -> None:
    place.partial.mkdir()
    (place.partial / name).symlink_to(place.victim)
    before = place.strangers()
    answer = place.convert(*(["--force"] if force else []))
    assert answer.code in (2, 3), answer
    assert place.strangers() == before


def test_a_link_in_the_place_of_a_folder_for_the_work(place: Place) -> None:
    """Into which a repository's files would be fetched, and from which they would be removed."""
    from moeq.errors import MoeqError
    from moeq.pipeline.state.folder import WorkFolder
    from moeq.pipeline.state.journal import JobStamp

    interrupt(place)
    (place.partial / "moeq-work.source").symlink_to(place.photos)
    before = place.strangers()
    with pytest.raises(MoeqError) as caught:
        WorkFolder(place.out, JobStamp("x")).work("source")
    assert caught.value.code == "environment.planted"
    assert place.convert().code in (0, 2, 3)
    assert place.strangers() == before


@pytest.mark.cover(every=4)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder away")
@pytest.mark.parametrize("argv", [["convert"], ["convert", "--force"], ["convert", "--shard", "0/2"], ["restore"]])
def test_a_work_folder_of_another_user(converted_place: Place, argv: list[str]) -> None:
    place = converted_place
    if argv[0] == "restore":
        words = ["restore", place.out, place.home / "new"]
    else:
        words = ["convert", place.source, place.home / "new", "--gpu", "a100", *argv[1:]]
    theirs = place.home / "new.moeq-partial"
    theirs.mkdir()
    os.chown(theirs, 4321, 4321)
    answer = command(*words)
    assert (answer.code, answer.error) == (2, "usage.foreign-folder"), answer
    assert list(theirs.iterdir()) == []


#: Targets of links in a source that are not the source's to give.
OUTSIDE = [
    "/proc/self/environ",
    "/proc/self/maps",
    "/proc/self/cwd/pyproject.toml",
    "/etc/shadow",
    "/etc/passwd",
    "../theirs/victim.txt",
    "{home}/theirs/victim.txt",
    "sub/../../theirs/victim.txt",
    "chain",
    "/proc/self/fd/0",
    "../blobs/{sha}",
    "../../theirs/blobs/{sha}",
]


@pytest.mark.cover(every=12)
@pytest.mark.parametrize("name", ["notes.txt", "tokenizer.json", "quantize_config.json", "config.json", "README.md"])
@pytest.mark.parametrize("target", OUTSIDE)
def test_a_link_out_of_the_source_is_not_copied(place: Place, name: str, target: str) -> None:
    sha = "0123456789abcdef" * 4
    for blobs in (place.home / "blobs", place.home / "theirs" / "blobs"):
        blobs.mkdir()
        (blobs / sha).write_bytes(b"{}")
    (place.source / "sub").mkdir()
    (place.source / "chain").symlink_to(place.victim)
    path = place.source / name
    if path.exists():  # what a config holds can be read, so that only the link is wrong
        shutil.copy(path, place.victim)
        path.unlink()
    path.symlink_to(target.format(home=place.home, sha=sha))
    before = tree(place.home)
    answer = place.convert()
    assert answer.code == 4, answer
    assert tree(place.home) == before
    assert "precious" not in answer.out + answer.err


def test_links_within_the_source_and_into_the_hubs_cache(place: Place, tmp_path: Path) -> None:
    """A folder of the client's cache is made of links into its own blobs; conversion and restoring take it as it is."""
    wanted = contents(place.source)
    cache = tmp_path / "cache" / "models--org--name"
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    for number, (name, data) in enumerate(wanted.items()):
        blob = cache / "blobs" / f"{number:064x}"
        blob.write_bytes(data)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    assert command("convert", snapshot, place.out, "--gpu", "a100").code == 0
    assert command("restore", place.out, place.home / "back").code == 0
    assert contents(place.home / "back") == wanted


# Pipes, devices and sockets in the place of every file that a command reads.
def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def tty(path: Path) -> None:
    path.symlink_to("/dev/tty")


def fifo(path: Path) -> None:
    os.mkfifo(path)


def bound_socket(path: Path) -> None:
    place = os.open(path.parent, os.O_RDONLY)
    try:
        socket.socket(socket.AF_UNIX).bind(f"/proc/self/fd/{place}/{path.name}")
    finally:
        os.close(place)


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def directory(path: Path) -> None:
    path.mkdir()


ODD = [zero, tty, fifo, bound_socket, loop, directory]
COMMANDS = {
    "inspect source": ("source", ["inspect", "source"]),
    "inspect": ("out", ["inspect", "out"]),
    "verify": ("out", ["verify", "out"]),
    "verify with source": ("out", ["verify", "out", "--source", "source"]),
    "restore": ("out", ["restore", "out", "back"]),
    "convert": ("source", ["convert", "source", "new", "--gpu", "a100"]),
    "diff": ("out", ["diff", "out", "source"]),
}
READ = {
    "source": ["config.json", "quantize_config.json", "model.safetensors", "README.md", "tokenizer.json"],
    "out": ["moeq.json", "config.json", "README.md", "moeq-restore.data", "model.safetensors.index.json"],
}
CASES = [(name, file) for name, (where, _) in COMMANDS.items() for file in READ[where]]


@pytest.mark.cover(every=53)
@pytest.mark.parametrize("odd", ODD, ids=lambda odd: odd.__name__)
@pytest.mark.parametrize(("name", "file"), CASES, ids=lambda value: str(value))
def test_nothing_waits_for_a_pipe_or_reads_a_device(
    converted_place: Place, name: str, file: str, odd: Callable[[Path], None]
) -> None:
    place = converted_place
    where, argv = COMMANDS[name]
    path = place.home / where / file
    path.unlink(missing_ok=True)
    odd(path)
    words = [place.home / word if word in ("source", "out", "back", "new") else word for word in argv]
    answer = command(*words, seconds=15)
    assert answer.code in (0, 1, 2, 4), answer
    assert "Traceback" not in answer.err
    assert not (place.home / "new.moeq-partial").exists()
    assert not (place.home / "back.moeq-partial").exists()
