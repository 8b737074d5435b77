"""Pushing to the Hub: the real client against a loopback server that checks what it is sent, and reading back."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from attacks.test_signature import make_keys
from checkpoint.hub_uploads import Uploads, serving_uploads

from moeq.errors import MoeqError
from moeq.pipeline.push import check_name

INT4, OSS = "gptq-int4-g32-qwen3moe", "mxfp4-gptoss"
SOURCE_CARD = (
    "---\nlicense: apache-2.0\nlicense_link: LICENSE\nlanguage:\n- en\ntags: [x]\nmetrics: 3\n---\n# Tiny\nText.\n"
)

CLIENT = """
import contextlib, io, json, os, sys
from moeq.cli.app import run
for line in sys.stdin:
    ask = json.loads(line)
    os.environ.pop("HF_TOKEN", None)
    if ask["token"]:
        os.environ["HF_TOKEN"] = ask["token"]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        if ask["argv"][0] == "moeq.push":
            import dataclasses, moeq
            _, folder, repo, key = ask["argv"][:4]
            pushed = moeq.push(folder, repo, base_model="org/tiny", sign=key, progress=True)
            out.truncate(0)
            out.seek(0)
            out.write(json.dumps(dataclasses.asdict(pushed)))
            code = 0
        else:
            code = run(ask["argv"])
    print(json.dumps({"code": code, "out": out.getvalue(), "err": err.getvalue()}), flush=True)
"""


class Answer(NamedTuple):
    code: int
    document: dict[str, Any]
    err: str


class Hub(NamedTuple):
    """The server's two sides, and a command line that talks to it."""

    hub: Any
    uploads: Uploads
    moeq: Callable[..., Answer]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hub]:
    cache = tmp_path_factory.mktemp("hub")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GITHUB_"))}
    with serving_uploads() as (hub, uploads):
        # Xet, where the real Hub keeps large files, is a service of its own; the client falls back to LFS.
        ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", CLIENT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**inherited, **ours},
        )
        stdin, stdout = process.stdin, process.stdout
        assert stdin
        assert stdout

        def moeq(*argv: object, token: str | None = "hf_write") -> Answer:
            stdin.write(json.dumps({"argv": [*map(str, argv), "--json"], "token": token}) + "\n")
            stdin.flush()
            answer = json.loads(stdout.readline())
            return Answer(answer["code"], json.loads(answer["out"]), answer["err"])

        yield Hub(hub, uploads, moeq)
        stdin.close()
        process.wait(20)


@pytest.fixture
def source(checkpoints: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "private" / "tiny-gptq"
    shutil.copytree(checkpoints / INT4, folder)
    (folder / "README.md").write_text(SOURCE_CARD)
    return folder


def front_matter(card: str) -> dict[str, Any]:
    return yaml.safe_load(card.split("---\n")[1])


def test_convert_and_push_and_read_back(running: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--gpu", "a100", "--push", "org/tiny-marlin", "--base-model", "org/tiny"]
    answer = running.moeq("convert", source, out, *options)
    assert answer.code == 0, answer.err
    push = answer.document["push"]
    assert push["repo"] == "org/tiny-marlin"
    assert push["url"].endswith("/org/tiny-marlin")
    assert running.uploads.visibility["org/tiny-marlin"] == "private"
    assert running.uploads.commits["org/tiny-marlin"] == ["marlin-wna16/1 of org/tiny, by moeq 0.1.0"]

    remote = running.hub.folders["org/tiny-marlin"]
    ours = {path.name: path.read_bytes() for path in out.iterdir()}
    theirs = {path.name: path.read_bytes() for path in remote.iterdir()}
    assert set(theirs) == {*ours, "README.source.md"}
    assert {name for name in ours if theirs[name] != ours[name]} == {"README.md", "moeq.json"}
    assert theirs["README.source.md"] == ours["README.md"] == SOURCE_CARD.encode()
    assert str(tmp_path).encode() not in theirs["moeq.json"] + theirs["README.md"]

    assert running.moeq("inspect", "org/tiny-marlin").document["kind"] == "converted"
    verified = running.moeq("verify", "org/tiny-marlin")
    assert (verified.code, verified.document["units"], verified.document["mismatches"]) == (0, 24, [])


def test_the_card(running: Hub, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    argv = ["convert", source, out, "--gpu", "a100", "--push", "org/carded", "--public", "--base-model", "org/tiny"]
    assert running.moeq(*argv).code == 0
    assert running.uploads.visibility["org/carded"] == "public"
    card = (running.hub.folders["org/carded"] / "README.md").read_text()
    assert front_matter(card) == {
        "license": "apache-2.0",
        "license_link": "LICENSE",
        "language": ["en"],
        "base_model": "org/tiny",
        "base_model_relation": "quantized",
        "library_name": "moeq",
        "tags": ["moeq", "mixture-of-experts", "gptq", "marlin-wna16/1"],
    }
    manifest = json.loads((out / "moeq.json").read_text())
    assert "16 of 16 packed matrices unpacked again and equal to the source" in card
    assert "24 in `moeq.json`" in card
    assert manifest["source"]["identity"] in card
    assert "| converted for | A100, bf16, vllm@0.33.0 |" in card
    assert "[README.source.md](README.source.md)" in card
    assert "hf download org/carded" in card


@pytest.mark.slow
@pytest.mark.parametrize("carded", [True, False])
def test_a_downloaded_push_leads_back_to_its_source(running: Hub, source: Path, tmp_path: Path, carded: bool) -> None:
    if not carded:
        (source / "README.md").unlink()
    repo, model, back = f"org/back-{carded}", tmp_path / "model", tmp_path / "back"
    assert running.moeq("convert", source, tmp_path / "out", "--gpu", "a100", "--push", repo).code == 0
    shutil.copytree(running.hub.folders[repo], model)
    (model / ".gitattributes").write_text("*.safetensors filter=lfs\n")  # the Hub makes one
    (model / ".cache").mkdir()
    verified = running.moeq("verify", model, "--source", source)
    assert (verified.code, verified.document["mismatches"]) == (0, [])
    (model / ".gitattributes").unlink()
    assert running.moeq("restore", model, back).code == 0
    assert {path.name: path.read_bytes() for path in back.iterdir()} == {
        path.name: path.read_bytes() for path in source.iterdir()
    }
    name = "README.source.md" if carded else "README.md"
    (model / name).write_text("changed")
    mismatches = running.moeq("verify", model, "--source", source).document["mismatches"]
    assert [row["name"] for row in mismatches] == ["README.md"]


@pytest.mark.slow
def test_a_source_on_the_hub_is_named_with_its_revision(running: Hub, checkpoints: Path, tmp_path: Path) -> None:
    repo = running.hub.add("org/original", checkpoints / OSS)
    answer = running.moeq("convert", repo, tmp_path / "out", "--gpu", "h100", "--push", "tester/converted")
    assert answer.code == 0, answer.err
    card = (running.hub.folders["tester/converted"] / "README.md").read_text()
    revision = json.loads((tmp_path / "out" / "moeq.json").read_text())["source"]["revision"]
    assert front_matter(card)["base_model"] == "org/original"
    assert f"| source | org/original at revision `{revision}` |" in card
    assert "moeq verify model --source org/original" in card
    assert "came without a model card" in card


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    ("repo", "token", "code", "says"),
    [
        pytest.param("no-org", "hf_write", "usage.push-name", "org/name", id="no organisation"),
        pytest.param("org/a/b", "hf_write", "usage.push-name", "org/name", id="a path"),
        pytest.param("org/sp ace", "hf_write", "usage.push-name", "org/name", id="a space"),
        pytest.param("org/mine", None, "environment.hub-token", "HF_TOKEN", id="no token"),
        pytest.param("org/mine", "hf_wrong", "environment.hub-token", "HTTP 401", id="unknown token"),
        pytest.param("org/mine", "hf_read", "environment.hub-token", "can only read", id="read-only token"),
        pytest.param("org/mine", "hf_fine", "environment.hub-token", "HTTP 40", id="fine-grained token without rights"),
        pytest.param("foreign/theirs", "hf_write", "environment.hub-token", "HTTP 40", id="not our namespace"),
        pytest.param("org/weights", "hf_write", "usage.push-target", "did not write", id="holds other weights"),
    ],
)
def test_refused_before_anything_is_converted(
    running: Hub, source: Path, tmp_path: Path, repo: str, token: str | None, code: str, says: str
) -> None:
    if repo == "org/weights":
        folder = running.uploads.root / repo
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        running.hub.add(repo, folder)
    answer = running.moeq("convert", source, tmp_path / "out", "--gpu", "a100", "--push", repo, token=token)
    error = answer.document["error"]
    assert error["code"] == code
    assert answer.code == {"usage": 2, "environment": 3}[code.partition(".")[0]]
    assert says in error["message"] + error["hint"]
    assert token is None or token not in json.dumps(answer.document)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["private"], "not even partial work"
    assert "org/mine" not in running.hub.folders


def test_a_wrong_base_model_is_refused_before_as_well(running: Hub, source: Path, tmp_path: Path) -> None:
    options = ["--gpu", "a100", "--push", "org/mine", "--base-model", "./somewhere"]
    answer = running.moeq("convert", source, tmp_path / "out", *options)
    assert (answer.code, answer.document["error"]["code"]) == (2, "usage.push-name")
    assert not (tmp_path / "out").exists()
    assert "org/mine" not in running.hub.folders


def test_a_dry_run_creates_no_repository(running: Hub, source: Path, tmp_path: Path) -> None:
    answer = running.moeq("convert", source, tmp_path / "out", "--gpu", "a100", "--push", "org/dry", "--dry-run")
    assert (answer.code, answer.document["push"]) == (0, None)
    assert "org/dry" not in running.hub.folders


@pytest.mark.slow
def test_a_push_that_fails_goes_on_where_it_was(running: Hub, source: Path, tmp_path: Path) -> None:
    out, uploads = tmp_path / "out", running.uploads
    # Other codes than the test above, so that the server does not know the files yet.
    uploads.blobs.clear()
    uploads.sent.clear()
    uploads.refuse_after = 2
    try:
        answer = running.moeq("convert", source, out, "--gpu", "a100", "--push", "org/flaky")
    finally:
        uploads.refuse_after = None
    error = answer.document["error"]
    assert (answer.code, error["code"]) == (3, "environment.hub-upload")
    assert f"moeq push {out} org/flaky" in error["hint"]
    assert (out / "moeq.json").is_file(), "the conversion is kept"
    assert list(running.hub.folders["org/flaky"].iterdir()) == [], "nothing is visible before the commit"
    assert len(uploads.blobs) == 2

    answer = running.moeq("push", out, "org/flaky")
    assert answer.code == 0, answer.err
    assert answer.document["schema"] == "moeq.push/1"
    assert set(uploads.sent.values()) == {1}, "what had arrived is not sent again"
    assert len(uploads.commits["org/flaky"]) == 1
    assert running.moeq("verify", "org/flaky").code == 0


@pytest.mark.slow
def test_another_layout_replaces_the_first(running: Hub, checkpoints: Path, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    source = tmp_path / "source"
    shutil.copytree(checkpoints / OSS, source)
    assert running.moeq("convert", source, first, "--gpu", "a100", "--push", "org/twice").code == 0
    assert (
        running.moeq("convert", source, second, "--gpu", "h100", "--layout", "mxfp4-identity/1", "--force-layout").code
        == 0
    )
    stale = running.hub.folders["org/twice"] / "model-00009-of-00009.safetensors"
    stale.write_bytes(b"an earlier push with more files")
    answer = running.moeq("push", second, "org/twice")
    assert answer.code == 0, answer.err
    assert answer.document["removed"] == [stale.name]
    assert not stale.exists()
    manifest = json.loads((running.hub.folders["org/twice"] / "moeq.json").read_text())
    assert {layer["layout"] for layer in manifest["layers"]} == {"mxfp4-identity/1"}
    assert running.moeq("verify", "org/twice").code == 0


def test_what_is_not_a_conversion_is_not_pushed(running: Hub, source: Path) -> None:
    answer = running.moeq("push", source, "org/raw")
    assert (answer.code, answer.document["error"]["code"]) == (2, "usage.not-converted")
    assert "org/raw" not in running.hub.folders


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    "repo", ["a--b/c", "org/x.git", "org/..", "org/-x", "org/x-", "o" * 50 + "/" + "n" * 50, "/x", ""]
)
def test_names_that_the_hub_refuses(repo: str) -> None:
    with pytest.raises(MoeqError, match="no name of a repository") as caught:
        check_name(repo)
    assert caught.value.code == "usage.push-name"


@pytest.mark.slow
def test_finished_work_is_pushed(running: Hub, checkpoints: Path, tmp_path: Path) -> None:
    argv = ["convert", checkpoints / INT4, tmp_path / "out", "--gpu", "a100"]
    assert running.moeq(*argv).document["already_done"] is False
    answer = running.moeq(*argv, "--push", "org/finished", "--base-model", "org/tiny")
    assert (answer.code, answer.document["already_done"]) == (0, True)
    assert answer.document["push"]["repo"] == "org/finished"
    assert running.moeq("verify", "org/finished").code == 0
    secret, public = make_keys(tmp_path, "one")
    pushed = running.moeq("moeq.push", tmp_path / "out", "org/from-python", secret).document
    assert (pushed["repo"], pushed["files"]) == ("org/from-python", answer.document["push"]["files"] + 1)
    verified = running.moeq("verify", "org/from-python", "--signed-by", public)
    assert (verified.code, verified.document["signed"]) == (0, True)
