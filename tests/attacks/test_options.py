"""Files that options name, and commands that are rarely thought of: nothing hangs, floods, or ends as a bug."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.conftest import Place, command, contents, tree
from attacks.mutations import nested


def fifo(path: Path) -> None:
    os.mkfifo(path)


def zero(path: Path) -> None:
    path.symlink_to("/dev/zero")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def folder(path: Path) -> None:
    path.mkdir()


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 42)


def holding(data: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(data)

    write.__name__ = ascii(data[:12])
    return write


BAD = [
    fifo,
    zero,
    loop,
    folder,
    sparse,
    holding(b""),
    holding(b"\x00" * 100),
    holding(b"\xff\xfe{}"),
    holding(b"\xef\xbb\xbf{}"),
    holding(b"[]"),
    holding(b"null"),
    holding(b'{"schema": "moeq.plan/1", "digest": NaN}'),
    holding(b'{"schema": "moeq.plan/1", "digest": "x", "digest": "y"}'),
    holding(b'{"schema": "moeq.plan/1", "digest": "\\ud800"}'),
    holding(b'{"schema": "moeq.plan/1", "digest": "x", "request": ' + json.dumps(nested(60)).encode() + b"}"),
    holding(b'{"schema": "moeq.plan/1", "digest": "x", "request": ' + b"[" * 5000 + b"]" * 5000 + b"}"),
    holding(b'{"schema": "moeq.plan/1", "digest": "x", "request": {"src": 7, "deployment": []}}'),
    holding(b"9" * 100_000),
    holding(b"untrusted comment: \x1b[2J\nRWQ=\n"),
    holding(b"untrusted comment: x\n" + b"A" * 5000 + b"\n"),
]


@pytest.mark.cover(every=12)
@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
@pytest.mark.parametrize("option", ["--plan", "--sign", "--signed-by", "finalize --sign"])
def test_files_that_options_read(converted_place: Place, option: str, bad: Callable[[Path], None]) -> None:
    place = converted_place
    given = place.home / "given"
    bad(given)
    new = place.home / "new"
    if option == "--signed-by":
        words: list[object] = ["verify", place.out, option, given]
    elif option == "finalize --sign":
        words = ["finalize", new, "--sign", given]
    else:
        words = ["convert", place.source, new, "--gpu", "a100", option, given]
    answer = command(*words, seconds=20)
    assert answer.code in (2, 4), answer
    assert "Traceback" not in answer.err
    assert "\x1b" not in answer.err
    assert not new.exists()
    assert not (place.home / "new.moeq-partial").exists(), "found before any work"


def full(path: Path) -> None:
    path.symlink_to("/dev/full")


def below_a_file(path: Path) -> None:
    path.symlink_to("theirs/victim.txt/x")


UNWRITABLE = [folder, loop, full, below_a_file]


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("bad", UNWRITABLE, ids=lambda bad: bad.__name__)
@pytest.mark.parametrize("option", ["plan -o", "--events", "--html", "--junit"])
def test_files_that_options_write(converted_place: Place, option: str, bad: Callable[[Path], None]) -> None:
    """What cannot be written is said; the answer stands in the exit code of work that went on."""
    place = converted_place
    given = place.home / "given"
    bad(given)
    before = place.strangers()
    words: dict[str, list[object]] = {
        "plan -o": ["plan", place.source, "--gpu", "a100", "-o", given],
        "--events": ["convert", place.source, place.home / "new", "--gpu", "a100", "--events", given],
        "--html": ["run-check", place.out, "--digests-only", "--html", given],
        "--junit": ["run-check", place.out, "--digests-only", "--junit", given],
    }
    answer = command(*words[option], seconds=30)
    assert answer.code in (0, 2, 3, 5), answer
    assert answer.code or bad is full, "a full disk does not end a conversion whose log it holds up"
    assert "Traceback" not in answer.err
    assert place.strangers() == before


#: Commands of which one file is not what it seems; where, and what they read.
RARE = {
    "transcode": ("source", ["transcode", "source", "new", "--to", "compressed-tensors"]),
    "transcode --check-only": ("source", ["transcode", "source", "--to", "compressed-tensors", "--check-only"]),
    "plan": ("source", ["plan", "source", "--gpu", "a100"]),
    "oracle": ("source", ["oracle", "source", "--gpu", "a100"]),
    "warmup": ("out", ["warmup", "out"]),
    "run-check": ("out", ["run-check", "out", "--digests-only"]),
    "diff": ("out", ["diff", "out", "source"]),
    "push": ("out", ["push", "out", "org/name"]),
}
READ = {
    "source": ["config.json", "quantize_config.json", "model.safetensors", "tokenizer.json"],
    "out": ["moeq.json", "config.json", "model-00001-of-00003.safetensors", "model.safetensors.index.json"],
}
CASES = [(name, file) for name, (where, _) in RARE.items() for file in READ[where]]


@pytest.mark.cover(every=11)
@pytest.mark.parametrize(("name", "file"), CASES, ids=str)
def test_commands_rarely_thought_of(converted_place: Place, name: str, file: str) -> None:
    """Pipes, devices, floods and nonsense in the place of each file that they read."""
    place = converted_place
    where, argv = RARE[name]
    path = place.home / where / file
    kept = path.read_bytes() if path.exists() else b"{}"
    before = place.strangers()[str(place.victim)]
    deep = b'{"a":' * 3000 + b"1" + b"}" * 3000
    for bad in (fifo, zero, loop, sparse, holding(b"\xff"), holding(deep), holding(kept[: len(kept) // 2])):
        path.unlink(missing_ok=True)
        bad(path)
        words = [place.home / word if word in ("source", "out", "new") else word for word in argv]
        answer = command(*words, seconds=20)
        assert answer.code in (0, 1, 2, 3, 4), (bad.__name__, answer)
        assert answer.code or (name, file) not in _NEEDED, bad.__name__
        assert "Traceback" not in answer.err
        assert not (place.home / "new.moeq-partial").exists(), bad.__name__
        shutil.rmtree(place.home / "new", ignore_errors=True)
    assert place.strangers()[str(place.victim)] == before


#: What a command cannot do without.
_NEEDED = {
    (name, file) for name in ("transcode", "plan", "oracle") for file in ("config.json", "model.safetensors")
} | {(name, "moeq.json") for name in ("warmup", "run-check", "push")}


@pytest.mark.slow
def test_a_transcoding_leaves_strangers_alone(place: Place) -> None:
    """The folders of `convert`'s attacks, for the other command that makes a folder."""
    words = ["transcode", place.source, place.out, "--to", "compressed-tensors"]
    assert command(*words).code == 0
    wanted = contents(place.out)
    (place.out / "photo.jpg").write_bytes(b"precious")
    before = tree(place.out)
    assert command(*words, "--force").code == 2
    assert tree(place.out) == before
    (place.out / "photo.jpg").unlink()
    assert command(*words, "--force").code == 0
    assert contents(place.out) == wanted
    assert command("convert", place.source, place.out, "--gpu", "a100", "--force").code == 2, "another command's output"
    assert contents(place.out) == wanted
    (place.source / "notes.txt").symlink_to(place.victim)
    answer = command("transcode", place.source, place.home / "new", "--to", "compressed-tensors")
    assert (answer.code, answer.error) == (4, "source.link")


@pytest.mark.parametrize("when", [1, 3])
def test_weights_that_change_under_a_transcoding(place: Place, when: int) -> None:
    """In place, with size and time put back: what is published would be of neither."""
    from moeq.errors import MoeqError
    from moeq.pipeline.events import Event, UnitFinished
    from moeq.transcode.transcode import transcode

    path = place.source / "model.safetensors"
    seen: list[Event] = []

    def progress(event: Event) -> None:
        if isinstance(event, UnitFinished):
            seen.append(event)
            if len(seen) == when:
                info, raw = path.stat(), bytearray(path.read_bytes())
                raw[-1000] ^= 1
                with path.open("r+b") as file:
                    file.write(raw)
                os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    with pytest.raises(MoeqError) as caught:
        transcode(place.source, place.out, "compressed-tensors", workers=1, progress=progress)
    assert caught.value.code == "source.changed"
    assert not place.out.exists()
