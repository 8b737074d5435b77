"""Signatures of conversions in minisign's format: they prove who wrote a folder; digests prove only that it is intact.

`moeq.json` holds a digest of every other file, so its signature (`moeq.json.minisig`, Ed25519) covers the folder. Keys
are those of minisign; `minisign -Vm moeq.json -p moeq.pub` checks the same file.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from moeq.checkpoint.files import read_regular
from moeq.checkpoint.manifest import MANIFEST_NAME
from moeq.errors import MoeqError
from moeq.pipeline.plan.side_files import SIGNATURE_NAME
from moeq.spelling import option

if TYPE_CHECKING:
    from minisign import PublicKey, SecretKey

#: Environment variable with the password of an encrypted key; a prompt would stop a script.
PASSWORD_VARIABLE = "MOEQ_SIGN_PASSWORD"

#: Largest key or signature file, in bytes.
_MAX_BYTES = 16 << 10


class Signer:
    """A secret key that is checked when it is opened, so that signing does not fail after hours of work.

    Raises MoeqError `environment.no-minisign`, `usage.sign-key`.
    """

    def __init__(self, key: Path) -> None:
        self._key = _secret_key(key)

    def sign(self, manifest: bytes) -> bytes:
        """Return the content of the signature file of a manifest."""
        return bytes(self._key.sign(manifest, trusted_comment="file:moeq.json"))


def check_signature(manifest: bytes, signature: Path, key: str) -> str:
    """Return a sentence about what is wrong with a manifest's signature; an empty text if `key` has signed it.

    `key` is a minisign public key: a file, or the key itself. Raises MoeqError `environment.no-minisign`,
    `usage.sign-key`.
    """
    public = _public_key(key)
    from minisign import Error, Signature

    if not signature.exists():
        return f"{SIGNATURE_NAME} is missing: the conversion is not signed"
    try:
        found = Signature.from_bytes(read_regular(signature, SIGNATURE_NAME, _MAX_BYTES))
        public.verify(manifest, found)
    except (Error, ValueError) as error:
        return f"{SIGNATURE_NAME} is not this key's signature of {MANIFEST_NAME} ({error or type(error).__name__})"
    return ""


def _secret_key(path: Path) -> SecretKey:
    _require_minisign()
    from minisign import SecretKey

    try:
        key = SecretKey.from_bytes(read_regular(path, str(path), _MAX_BYTES))
        if key.is_encrypted():
            password = os.environ.get(PASSWORD_VARIABLE)
            if password is None:
                raise MoeqError(
                    "usage.sign-key",
                    f"{path} is protected by a password",
                    f"set {PASSWORD_VARIABLE}, or make a key without one: minisign -G -W",
                )
            key.decrypt(password)
    except ValueError as error:
        raise _bad_key(path, error) from None
    return key


def _public_key(key: str) -> PublicKey:
    _require_minisign()
    from minisign import PublicKey

    path = Path(key)
    try:
        if len(key) < 1000 and path.is_file():
            return PublicKey.from_bytes(read_regular(path, key, _MAX_BYTES))
        return PublicKey.from_base64(key)
    except ValueError as error:
        raise _bad_key(key, error) from None


def _bad_key(key: str | Path, error: ValueError) -> MoeqError:
    detail = f"{str(key)[:200]} is not a minisign key, or its password is wrong ({type(error).__name__})"
    pair = f"{option('sign', 'minisign.key')}, {option('signed_by', 'minisign.pub')}"
    return MoeqError("usage.sign-key", detail, f"minisign -G makes a pair: {pair}")


def _require_minisign() -> None:
    try:
        import minisign  # noqa: F401
    except ImportError:
        raise MoeqError(
            "environment.no-minisign", "signatures need the package py-minisign", "pip install py-minisign"
        ) from None
