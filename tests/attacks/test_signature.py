"""Signatures: who wrote a conversion, by keys of minisign. Keys are made here and forgotten."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
from attacks.running import moeq_command
from refusing import refuses

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.convert import convert
from moeq.pipeline.finalize import finalize
from moeq.pipeline.state.signature import Signer

minisign = pytest.importorskip("minisign")

__all__ = ["moeq_command"]

SOURCE = "gptq-int4-g32-qwen3moe"


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, Path]:
    """Secret and public key files."""
    return make_keys(tmp_path, "one")


def make_keys(folder: Path, name: str, password: str | None = None) -> tuple[Path, Path]:
    pair = minisign.KeyPair.generate()
    secret, public = folder / f"{name}.key", folder / f"{name}.pub"
    public.write_bytes(bytes(pair.public_key))
    if password is not None:
        pair.secret_key.encrypt(password, opslimit=minisign.OPSLIMIT // 32, memlimit=minisign.MEMLIMIT // 32)
    secret.write_bytes(bytes(pair.secret_key))
    return secret, public


@pytest.fixture
def signed(keys, checkpoints, tmp_path, moeq_command) -> Path:
    out = tmp_path / "out"
    assert moeq_command("convert", checkpoints / SOURCE, out, "--gpu", "a100", "--sign", keys[0]).code == 0
    return out


def test_signed_and_verified(signed, keys, moeq_command) -> None:
    answer = moeq_command("verify", signed, "--signed-by", keys[1], "--json")
    assert (answer.code, answer.document["signed"], answer.document["unproven"]) == (0, True, [])
    assert answer.document["notes"] == []
    text = keys[1].read_text().splitlines()[1]
    assert moeq_command("verify", signed, "--signed-by", text).code == 0, "the key itself"
    plain = moeq_command("verify", signed, "--json")
    assert (plain.code, plain.document["signed"]) == (0, None)
    assert plain.document["unproven"] == ["moeq.json.minisig"]
    assert any("origin" in note for note in plain.document["notes"])


def test_another_key(signed, tmp_path, moeq_command) -> None:
    answer = moeq_command("verify", signed, "--signed-by", make_keys(tmp_path, "two")[1], "--json")
    assert (answer.code, answer.document["signed"]) == (1, False)


def test_a_manifest_changed_after_signing(signed, keys, moeq_command) -> None:
    """Digests and all: consistent, and not the signer's."""
    document = json.loads((signed / "moeq.json").read_text())
    (signed / "moeq.json").write_text(json.dumps(document))
    assert moeq_command("verify", signed).code == 0
    assert moeq_command("verify", signed, "--signed-by", keys[1]).code == 1


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("damage", ["gone", "empty", "noise", "another", "truncated", "huge"])
def test_damaged_signatures(damage, signed, keys, tmp_path, checkpoints, moeq_command) -> None:
    path = signed / "moeq.json.minisig"
    raw = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "another":
        shutil.copy(path, tmp_path / "kept")
        other = make_keys(tmp_path, "two")[0]
        assert moeq_command("convert", checkpoints / SOURCE, tmp_path / "o", "--gpu", "a100", "--sign", other).code == 0
        shutil.copy(tmp_path / "o" / "moeq.json.minisig", path)
    else:
        path.write_bytes({"empty": b"", "noise": b"\xff" * 300, "truncated": raw[:100], "huge": raw * 10_000}[damage])
    assert moeq_command("verify", signed, "--signed-by", keys[1]).code in (1, 4)


def test_keys_that_are_none(signed, checkpoints, tmp_path, moeq_command) -> None:
    (tmp_path / "bad").write_text("untrusted comment: x\nRWQ=\n")
    for key in (tmp_path / "bad", tmp_path / "missing", "not a key", "x" * 5000):
        assert moeq_command("verify", signed, "--signed-by", key).code == 2
    for key in (tmp_path / "bad", tmp_path / "missing"):
        answer = moeq_command("convert", checkpoints / SOURCE, tmp_path / "new", "--gpu", "a100", "--sign", key)
        assert answer.code in (2, 4)
        assert not (tmp_path / "new").exists()
        assert not (tmp_path / "new.moeq-partial").exists(), "found before any work"


def test_a_key_with_a_password(checkpoints, tmp_path, moeq_command, monkeypatch) -> None:
    secret, public = make_keys(tmp_path, "locked", "open sesame")
    argv = ("convert", checkpoints / SOURCE, tmp_path / "out", "--gpu", "a100", "--sign", secret)
    assert moeq_command(*argv).code == 2
    monkeypatch.setenv("MOEQ_SIGN_PASSWORD", "hunter22")
    refused = moeq_command(*argv)
    assert refused.code == 2
    assert "hunter22" not in refused.err
    monkeypatch.setenv("MOEQ_SIGN_PASSWORD", "open sesame")
    assert moeq_command(*argv).code == 0
    assert moeq_command("verify", tmp_path / "out", "--signed-by", public).code == 0


@pytest.mark.slow
def test_finalize_signs(keys, checkpoints, tmp_path, moeq_command) -> None:
    out = tmp_path / "out"
    for shard in ("0/2", "1/2"):
        assert moeq_command("convert", checkpoints / SOURCE, out, "--gpu", "a100", "--shard", shard).code == 0
    assert moeq_command("finalize", out, "--sign", keys[0]).code == 0
    assert moeq_command("verify", out, "--signed-by", keys[1], "--source", checkpoints / SOURCE).code == 0


def test_a_signature_is_not_restored(signed, keys, checkpoints, tmp_path, moeq_command) -> None:
    assert moeq_command("restore", signed, tmp_path / "back").code == 0
    assert {path.name for path in (tmp_path / "back").iterdir()} == {
        path.name for path in (checkpoints / SOURCE).iterdir()
    }


def test_a_finished_conversion_is_signed_later(keys, checkpoints, tmp_path) -> None:
    """By `convert` or `finalize` of the same job, and not by a dry run."""
    out = tmp_path / "out"
    where = Deployment(gpu=parse_gpu("A100"))
    convert(checkpoints / SOURCE, out, where)
    path = out / "moeq.json.minisig"
    assert convert(checkpoints / SOURCE, out, where, sign=keys[0], dry_run=True).already_done
    assert not path.exists()
    for again in (lambda: convert(checkpoints / SOURCE, out, where, sign=keys[0]), lambda: finalize(out, sign=keys[0])):
        assert again().already_done
        minisign.PublicKey.from_file(keys[1]).verify(
            (out / "moeq.json").read_bytes(), minisign.Signature.from_file(path)
        )
        path.unlink()


def test_signing_without_the_package(keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "minisign", None)
    for key in keys:
        with refuses("environment.no-minisign", "signatures need the package py-minisign", "pip install py-minisign"):
            Signer(key)
