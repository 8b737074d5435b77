"""What is gathered for a push, and how the Hub's refusals are told; nothing is sent."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from blake3 import blake3

from moeq.checkpoint.jsonfile import MAX_CONFIG_BYTES
from moeq.checkpoint.manifest import MANIFEST_NAME, FileDigest, read_manifest
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import MoeqError
from moeq.pipeline import push
from moeq.pipeline.convert import convert

INT4 = "gptq-int4-g32-qwen3moe"


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("push")
    shutil.copytree(checkpoints / INT4, home / "source")
    (home / "source" / "README.md").write_text("# mine\n")
    convert(home / "source", home / "out", Deployment(gpu=parse_gpu("A100")))
    return home / "out"


@pytest.fixture
def out(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "out"))


def gathered(out: Path) -> push.Upload:
    return push.gather(out, read_manifest(out))


def refused(out: Path, code: str, said: str) -> None:
    with pytest.raises(MoeqError, match=said) as caught:
        gathered(out)
    assert caught.value.code == code


def test_small_files_are_read_and_weights_are_named(out: Path) -> None:
    (out / "folder").mkdir()
    (out / "moeq.json.minisig").write_text("a signature of the manifest as it is here")
    found = gathered(out)
    weights = {path.name for path in out.iterdir() if path.suffix in (".safetensors", ".data")}
    assert weights
    names = {path.name for path in out.iterdir() if path.is_file()} - {"moeq.json.minisig"}
    assert found.contents.keys() == names
    for name, content in found.contents.items():
        assert content == (out / name if name in weights else (out / name).read_bytes())
    assert found.size == sum((out / name).stat().st_size for name in names)
    assert found.card == b"# mine\n"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_file_that_was_changed_is_refused(name: str, out: Path) -> None:
    raw = (out / name).read_bytes()
    for damaged in (raw + b" ", raw[:-1], raw.replace(b'"', b"'", 1)):
        (out / name).write_bytes(damaged)
        refused(out, "source.digest-mismatch", f"^{name} is not the file that was written")


def test_weights_are_compared_by_header_and_size(out: Path) -> None:
    (path, *_) = sorted(out.glob("*.safetensors"))
    raw = path.read_bytes()
    path.write_bytes(raw[:-1])
    refused(out, "source.digest-mismatch", f"^{path.name} is not the file")
    path.write_bytes(raw.replace(b"shape", b"Shape", 1))
    refused(out, "source.digest-mismatch", f"^{path.name} is not the file")
    path.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))  # what `moeq verify` is for
    assert gathered(out).contents[path.name] == path


def test_cards_may_be_changed_and_be_no_larger_than_others(out: Path) -> None:
    (out / "README.md").write_text("# another")
    assert gathered(out).contents["README.md"] == b"# another"
    (out / "README.md").write_bytes(b" " * MAX_CONFIG_BYTES)
    assert len(gathered(out).contents["README.md"]) == MAX_CONFIG_BYTES  # type: ignore[arg-type]
    (out / "README.md").write_bytes(b" " * (MAX_CONFIG_BYTES + 1))
    limit = f"{MAX_CONFIG_BYTES:,}"
    refused(out, "source.too-large", f"^README.md: {MAX_CONFIG_BYTES + 1:,} bytes, the limit is {limit}")


def test_the_card_of_the_source_is_that_under_its_second_name(out: Path) -> None:
    (out / "README.source.md").write_text("# the source's")
    found = gathered(out)
    assert found.card == b"# the source's"
    (out / "README.source.md").unlink()
    assert gathered(out).card == b"# mine\n"


def test_foreign_and_missing_files_are_refused(out: Path) -> None:
    for number in range(9):
        (out / f"x{number}\u202e").write_text("")
    shown = ", ".join(rf"x{number}\\u202e" for number in range(8))
    refused(out, "usage.foreign-files", rf"does not list: {shown}$|does not list: {shown}\n")
    for number in range(9):
        (out / f"x{number}\u202e").unlink()
    (out / "config.json").unlink()
    refused(out, "source.missing-file", "lacks config.json")


def test_the_manifest_that_is_pushed_names_no_path_of_this_machine(converted: Path) -> None:
    manifest = read_manifest(converted)
    card = b"# made by moeq"
    document = json.loads(push.published_manifest(manifest, None, {"README.md": card}))
    assert (document["source"]["name"], document["model"]["name"]) == ("source", "source")
    assert document["files"]["README.md"] == {"bytes": len(card), "blake3": blake3(card).hexdigest(), "tensors": {}}
    assert str(converted.parent) not in json.dumps(document)
    (home := converted.parent / "pushed").mkdir()
    (home / MANIFEST_NAME).write_bytes(push.published_manifest(manifest, "org/tiny", {}))
    again = read_manifest(home)
    assert again.intact
    assert (again.source.name, again.files) == ("org/tiny", manifest.files)
    assert isinstance(again.files["config.json"], FileDigest)  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "revision", "base"), [("org/tiny", "abc", "org/tiny"), ("org/tiny", None, None), ("/a/b/c", "abc", None)]
)
def test_a_source_of_the_hub_is_the_base_model(name: str, revision: str | None, base: str | None) -> None:
    manifest: Any = SimpleNamespace(source=SimpleNamespace(name=name, revision=revision))
    assert push.base_model_of(manifest) == base


@pytest.mark.parametrize(
    ("who", "said"),
    [
        ({"name": "me", "auth": {"accessToken": {"role": "read"}}}, "the token of me can only read; org/x cannot be"),
        ({"auth": {"accessToken": {"role": "read"}}}, "the token of your account can only read"),
        ({"auth": {"accessToken": {"role": "write"}}}, None),
        ({"auth": {"accessToken": {"role": "fineGrained"}}}, None),
        ({"name": "me"}, None),
        (None, "pushing to org/x needs a token of the Hub, and there is none"),
    ],
)
def test_tokens_that_cannot_write(who: dict[str, Any] | None, said: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None if who is None else "hf_x")
    api: Any = SimpleNamespace(whoami=lambda: who)
    if said is None:
        push._check_token(api, "org/x")
        return
    with pytest.raises(MoeqError, match=said) as caught:
        push._check_token(api, "org/x")
    assert caught.value.code == "environment.hub-token"
    assert "hf auth login" in str(caught.value.hint)


class Refusal(ValueError):
    """An error of the client, with the server's status."""

    def __init__(self, status: int) -> None:
        super().__init__("the first line\nthe second")
        self.response = SimpleNamespace(status_code=status)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (Refusal(401), "environment.hub-token", "the Hub does not let this token write to org/x (HTTP 401)"),
        (Refusal(403), "environment.hub-token", "the Hub does not let this token write to org/x (HTTP 403)"),
        (Refusal(500), "environment.hub", "org/x: the Hub could not be written to: HTTP 500"),
        (RuntimeError("no\nway"), "environment.hub", "org/x: the Hub could not be written to: no"),
        (MoeqError("usage.tp", "mine"), "usage.tp", "mine"),
    ],
)
def test_errors_of_the_client_are_told(error: Exception, code: str, said: str) -> None:
    with pytest.raises(MoeqError) as caught, push._explained("org/x"):
        raise error
    assert (caught.value.code, caught.value.message) == (code, said)
    assert "moeq push" not in str(caught.value.hint)
    if code == "usage.tp":
        return
    outer = RuntimeError("failed to upload")
    outer.__cause__ = error
    with pytest.raises(MoeqError) as caught, push._explained("org/x", Path("/a b")):
        raise outer
    assert caught.value.message == said
    assert caught.value.code == ("environment.hub-upload" if code == "environment.hub" else code)
    assert str(caught.value.hint).endswith("; /a b is finished and kept: repeat with `moeq push '/a b' org/x`")
