"""Keys and signature files: how large they may be, and what is said of files that are none."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
from refusing import refuses

from moeq.pipeline.state.signature import PASSWORD_VARIABLE, Signer, check_signature

minisign = pytest.importorskip("minisign")

LIMIT = 16 * 1024
MANIFEST = b"a manifest"
MAKE = 'minisign -G makes a pair: sign="minisign.key", signed_by="minisign.pub"'


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A secret key, its public key, and a signature of the manifest."""
    made = minisign.KeyPair.generate()
    secret, public, signature = (tmp_path / name for name in ("one.key", "one.pub", "moeq.json.minisig"))
    secret.write_bytes(bytes(made.secret_key))
    public.write_bytes(bytes(made.public_key))
    signature.write_bytes(Signer(secret).sign(MANIFEST))
    return secret, public, signature


def no_key(name: object, error: str = "ParseError") -> str:
    return f"{name} is not a minisign key, or its password is wrong ({error})"


def filled(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes().ljust(size, b"\n"))


def test_a_manifest_and_its_signature(pair: tuple[Path, Path, Path]) -> None:
    _, public, signature = pair
    assert check_signature(MANIFEST, signature, str(public)) == ""
    assert check_signature(MANIFEST, signature, public.read_text().splitlines()[1]) == ""
    assert check_signature(MANIFEST + b".", signature, str(public)).startswith(
        "moeq.json.minisig is not this key's signature of moeq.json ("
    )
    signature.unlink()
    missing = "moeq.json.minisig is missing: the conversion is not signed"
    assert check_signature(MANIFEST, signature, str(public)) == missing


@pytest.mark.parametrize("which", [0, 1, 2])
def test_files_of_more_than_16_kib_are_not_read(which: int, pair: tuple[Path, Path, Path]) -> None:
    secret, public, signature = pair
    use: Callable[[], object] = (
        (lambda: Signer(secret)) if which == 0 else lambda: check_signature(MANIFEST, signature, str(public))
    )
    filled(pair[which], LIMIT)
    with refuses("usage.sign-key", no_key(pair[which]), MAKE) if which != 2 else nullcontext():
        use()  # is read, and no key has lines behind it
    filled(pair[which], LIMIT + 1)
    name = signature.name if which == 2 else str(pair[which])
    with refuses("source.too-large", f"{name}: {LIMIT + 1:,} bytes, the limit for this file is {LIMIT:,}"):
        use()


@pytest.mark.parametrize("content", [b"", b"no key", b"\xff" * 40])
def test_what_is_no_key(content: bytes, pair: tuple[Path, Path, Path]) -> None:
    secret, public, signature = pair
    for path in (secret, public):
        path.write_bytes(content)
    with refuses("usage.sign-key", no_key(secret), MAKE):
        Signer(secret)
    with refuses("usage.sign-key", no_key(public), MAKE):
        check_signature(MANIFEST, signature, str(public))
    with refuses("usage.sign-key", no_key("nokey"), MAKE):
        check_signature(MANIFEST, signature, "nokey")


def test_a_key_with_a_password(pair: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    secret, public, signature = pair
    key = minisign.SecretKey.from_bytes(secret.read_bytes())
    key.encrypt("right", opslimit=minisign.OPSLIMIT // 32, memlimit=minisign.MEMLIMIT // 32)
    secret.write_bytes(bytes(key))
    monkeypatch.delenv(PASSWORD_VARIABLE, raising=False)
    without = f"set {PASSWORD_VARIABLE}, or make a key without one: minisign -G -W"
    with refuses("usage.sign-key", f"{secret} is protected by a password", without):
        Signer(secret)
    monkeypatch.setenv(PASSWORD_VARIABLE, "wrong")
    with refuses("usage.sign-key", no_key(secret, "Error"), MAKE):
        Signer(secret)
    monkeypatch.setenv(PASSWORD_VARIABLE, "right")
    signature.write_bytes(Signer(secret).sign(MANIFEST))
    assert check_signature(MANIFEST, signature, str(public)) == ""
