"""What is pushed is what a conversion consists of: no link, no file of somebody else's, nothing that was changed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.test_push import Hub, running

__all__ = ["running"]

INT4 = "gptq-int4-g32-qwen3moe"
SECRET = b"precious-bytes-of-nobody-elses"


@pytest.fixture(scope="module")
def finished(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from moeq.cli.app import run

    home = tmp_path_factory.mktemp("finished")
    shutil.copytree(checkpoints / INT4, home / "source")
    (home / "source" / "tokenizer.json").write_text("{}")
    (home / "source" / "README.md").write_text("# mine\n")
    assert run(["convert", str(home / "source"), str(home / "out"), "--gpu", "a100", "--quiet"]) == 0
    return home / "out"


def linked(name: str, target: str) -> Callable[[Path, Path], None]:
    def plant(out: Path, victim: Path) -> None:
        (out / name).unlink(missing_ok=True)
        (out / name).symlink_to(target.format(victim=victim))

    plant.__name__ = f"{name} to {target}"
    return plant


def added(name: str) -> Callable[[Path, Path], None]:
    def plant(out: Path, victim: Path) -> None:
        (out / name).write_bytes(SECRET)

    plant.__name__ = f"{name} added"
    return plant


def fifo(out: Path, victim: Path) -> None:
    os.mkfifo(out / "notes.txt")


def fifo_in_place(out: Path, victim: Path) -> None:
    (out / "tokenizer.json").unlink()
    os.mkfifo(out / "tokenizer.json")


def changed(out: Path, victim: Path) -> None:
    (out / "tokenizer.json").write_text("[]")


def weights_cut(out: Path, victim: Path) -> None:
    path = max(out.glob("*.safetensors"))
    os.truncate(path, path.stat().st_size - 8)


def missing(out: Path, victim: Path) -> None:
    (out / "moeq-restore.data").unlink()


def sparse_card(out: Path, victim: Path) -> None:
    with (out / "README.md").open("wb") as file:
        file.truncate(1 << 40)


PLANTS = [
    linked("notes.txt", "{victim}"),
    linked("notes.txt", "/proc/self/environ"),
    linked("notes.txt", "gone"),
    linked("tokenizer.json", "{victim}"),
    linked("tokenizer.json", "/dev/zero"),
    linked("config.json", "{victim}"),
    linked("README.md", "/proc/self/environ"),
    linked("README.md", "{victim}"),
    linked("README.source.md", "{victim}"),
    linked(".gitattributes", "{victim}"),
    linked("moeq.json.minisig", "{victim}"),
    linked("moeq-restore.data", "{victim}"),
    added(".env"),
    added("id_rsa"),
    added("modeling_evil.py"),
    added("model.safetensors"),
    added("pytorch_model.bin"),
    added("moeq-journal.jsonl"),
    fifo,
    fifo_in_place,
    changed,
    weights_cut,
    missing,
    sparse_card,
]


@pytest.mark.cover(every=12)
@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_nothing_else_is_pushed(
    running: Hub, finished: Path, tmp_path: Path, plant: Callable[[Path, Path], None]
) -> None:
    """Somebody who may write to the folder, or who made it, put something there."""
    out, victim = tmp_path / "out", tmp_path / "victim.txt"
    victim.write_bytes(SECRET)
    shutil.copytree(finished, out)
    plant(out, victim)
    sent = dict(running.uploads.sent)
    answer = running.moeq("push", out, "org/planted")
    assert answer.code in (2, 4), answer
    assert "Traceback" not in answer.err
    assert running.uploads.sent == sent, "no large file went before that was found"
    assert not running.uploads.commits.get("org/planted")
    assert SECRET.decode() not in answer.err


@pytest.mark.slow
def test_what_is_pushed_is_listed(running: Hub, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(finished, out)
    answer = running.moeq("push", out, "org/listed")
    assert answer.code == 0, answer
    listed = answer.document["names"]
    assert {"tokenizer.json", "config.json", "moeq.json", "README.md", "README.source.md"} <= set(listed)
    assert set(json.loads((out / "moeq.json").read_text())["files"]) <= set(listed)
    assert "tokenizer.json" in answer.err, "before anything is sent"
