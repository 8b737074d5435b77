"""Conversions that were tampered with, manifest and all: what verify says, with the source and without it."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path

import pytest
from attacks.running import moeq_command
from attacks.tampering import CONSISTENT, TAMPERING, manifest_of, write_manifest
from attacks.tampering_sealed import SEALED, sealed

from moeq.cli.app import run

__all__ = ["moeq_command"]

SOURCES = ("gptq-int4-g32-qwen3moe", "mxfp4-gptoss")


@pytest.fixture(scope="module", params=SOURCES)
def pair(
    request: pytest.FixtureRequest, checkpoints: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A source and its conversion."""
    out = tmp_path_factory.mktemp("tampered") / "out"
    assert run(["convert", str(checkpoints / request.param), str(out), "--gpu", "a100", "--quiet"]) == 0
    return checkpoints / request.param, out


@pytest.fixture
def source(pair: tuple[Path, Path]) -> Path:
    return pair[0]


@pytest.fixture
def out(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(pair[1], tmp_path / "out"))


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("tamper", SEALED, ids=lambda tamper: tamper.__name__)
def test_sealed_again_with_the_source(tamper, out, source, moeq_command) -> None:
    tamper(out)
    answer = moeq_command("verify", out, "--source", source, "--json")
    assert answer.code in (1, 4), answer.out
    assert answer.document["ok"] is False


@pytest.mark.cover(every=16)
@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_with_the_source(tamper, slow, out, source, moeq_command) -> None:
    tamper(out)
    answer = moeq_command("verify", out, "--source", source, "--json", *(["--slow"] if slow else []))
    assert answer.code in (1, 4), answer.out
    assert answer.document["ok"] is False


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("tamper", TAMPERING, ids=lambda tamper: tamper.__name__)
def test_without_the_source(tamper, out, moeq_command) -> None:
    """What the digests in the manifest tell; what they cannot tell is said."""
    tamper(out)
    answer = moeq_command("verify", out, "--json")
    if tamper in CONSISTENT:
        assert answer.code != 0 or any("integrity" in note for note in answer.document["notes"])
    else:
        assert answer.code in (1, 4), answer.out


@pytest.mark.cover(every=2)
def test_untouched(out, source, moeq_command) -> None:
    for argv in ((), ("--source", source), ("--source", source, "--slow")):
        answer = moeq_command("verify", out, "--json", *argv)
        assert (answer.code, answer.document["mismatches"]) == (0, [])


@pytest.mark.slow
def test_a_flipped_bit_anywhere(out, source, moeq_command) -> None:
    """In every file, at random: the digests in the manifest see it, and so does the source."""
    dice = random.Random(7)
    for path in sorted(out.iterdir()):
        original = path.read_bytes()
        for _ in range(6 if path.suffix != ".json" else 3):
            at = dice.randrange(len(original))
            path.write_bytes(original[:at] + bytes([original[at] ^ 1 << dice.randrange(8)]) + original[at + 1 :])
            if path.name != "moeq.json":
                answer = moeq_command("verify", out)
                assert answer.code in (1, 4), (path.name, at)
                if not json_equal(original, path.read_bytes()):
                    assert moeq_command("verify", out, "--source", source).code in (1, 4), (path.name, at)
        path.write_bytes(original)


def json_equal(one: bytes, other: bytes) -> bool:
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False


@pytest.mark.cover(every=2)
def test_every_file_missing(out, source, moeq_command) -> None:
    for path in sorted(out.iterdir()):
        original = path.read_bytes()
        path.unlink()
        for argv in ((), ("--source", source)):
            assert moeq_command("verify", out, *argv).code in (1, 2, 4), path.name
        path.write_bytes(original)


@pytest.mark.cover(every=2)
def test_what_is_not_known_is_listed(out, source, moeq_command) -> None:
    """Files that a Hub adds do no harm, and verify says that it knows nothing of them."""
    (out / ".gitattributes").write_text("* filter=lfs\n")
    os.mkdir(out / ".cache")
    (out / ".cache" / "x.py").write_text("x")
    for argv in ((), ("--source", source)):
        answer = moeq_command("verify", out, "--json", *argv)
        assert answer.code == 0, answer.out
        assert answer.document["unproven"] == [".cache/", ".gitattributes"]
    shown = moeq_command("verify", out).out
    assert all(f"unproven  {name}" in shown for name in (".cache/", ".gitattributes"))


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("name", ["moeq.json", "config.json", "model.safetensors.index.json", "weights"])
@pytest.mark.parametrize("with_source", [False, True])
def test_a_folder_that_changes_while_it_is_verified(name, with_source, out, source) -> None:
    """What was looked at is exchanged for something else, with its size and its time put back."""
    from moeq.errors import MoeqError
    from moeq.prove.verify import verify

    path = min(out.glob("*.safetensors")) if name == "weights" else out / name
    info, raw = path.stat(), path.read_bytes()
    changed: list[bool] = []

    def progress(done: int, total: int, label: str) -> None:
        if not changed:
            changed.append(True)
            path.write_bytes(raw[:-2] + b" \n")
            os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))

    try:
        found = verify(out, source if with_source else None, workers=1, progress=progress)
    except MoeqError as error:
        code = int(error.exit_code)
    else:
        code = int(not found.ok)
    assert changed
    assert code in (1, 4)


def test_an_old_manifest_says_what_is_not_covered(out, moeq_command) -> None:
    manifest = manifest_of(out)
    del manifest["files"]
    write_manifest(out, {**manifest, "schema": "moeq.manifest/1"})
    answer = moeq_command("verify", out)
    assert answer.code == 0
    assert "without --source only the experts were checked" in answer.out


@pytest.mark.cover(every=2)
def test_without_the_source_the_digests_are_trusted(out, source, moeq_command) -> None:
    """Digests of values that are not those of the bytes: verify says what it compared, and --slow compares these."""
    manifest = manifest_of(out)
    manifest["layers"][0]["digests"]["up"][1] = "0" * 64
    sealed(out, manifest)
    answer = moeq_command("verify", out)
    assert answer.code == 0
    said = " ".join(answer.out.split())
    assert "verified: every byte is as moeq.json records it" in said
    assert "digests of the experts' values were not: --slow decodes" in said
    assert "the digests in moeq.json themselves were trusted" in said
    for argv in (("--slow",), ("--source", source)):
        answer = moeq_command("verify", out, "--json", *argv)
        assert answer.code == 1
        assert [row["name"] for row in answer.document["mismatches"]] == ["layer 0 expert 1 up"], argv
