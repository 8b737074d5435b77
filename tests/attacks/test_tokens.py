"""The token of the Hub appears in nothing that moeq writes: no output, event, summary, report or file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint.hub_uploads import ROLES, serving_uploads
from forks import starting

SOURCE = "gptq-int4-g32-qwen3moe"

#: What a token looks like, so that it is found cut up, encoded or in a URL as well.
TOKEN = "hf_TokenThatNobodyMayRead"
PARTS = (TOKEN, TOKEN[3:], TOKEN[:12], TOKEN[-12:])


@pytest.fixture(scope="module")
def runner(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs commands with the token in every place where people put it, and gathers all that they write."""
    folder = tmp_path_factory.mktemp("tokens")
    with pytest.MonkeyPatch.context() as patched, serving_uploads() as (hub, _uploads):
        patched.setitem(ROLES, TOKEN, "write")
        shutil.copytree(checkpoints / SOURCE, folder / "source")
        hub.add("org/source", checkpoints / SOURCE)
        home = folder / "home"
        home.mkdir()
        (home / "token").write_text(TOKEN)
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "GITHUB_"))}
        ours = {
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HUGGING_FACE_HUB_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
            "GITHUB_ACTIONS": "true",
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            "MOEQ_DEBUG": "1",
        }
        said: list[str] = []
        with starting(tmp_path_factory.mktemp("said"), {**inherited, **ours}, "import torch") as starter:

            def moeq(*argv: object, **more: str) -> int:
                ended = starter.run(*argv, seconds=120, env=more, first=f"os.chdir({str(folder)!r})")
                said.extend((ended.out, ended.err))
                return ended.code

            yield moeq, hub, said, folder


@pytest.fixture
def traces(runner: Any) -> Any:
    """`runner`, that has said nothing yet."""
    runner[2].clear()
    return runner


def found(said: list[str], folder: Path) -> list[str]:
    """Where any part of the token is, but for the file that it was put into."""
    places = [f"output {number}" for number, text in enumerate(said) if any(part in text for part in PARTS)]
    for path in folder.rglob("*"):
        if path.is_file() and path != folder / "home" / "token":
            data = path.read_bytes()
            places += [str(path) for part in PARTS if part.encode() in data or part in path.name]
    return places


@pytest.mark.slow
def test_all_commands(traces) -> None:
    moeq, hub, said, folder = traces
    out, events = folder / "out", folder / "events.jsonl"
    assert moeq("inspect", "org/source", "--gpu", "a100", "-v") == 0
    assert moeq("convert", "org/source", out, "--gpu", "a100", "--events", events, "--push", "org/mine") == 0
    assert f"Bearer {TOKEN}" in hub.authorizations, "it was used"
    assert moeq("verify", "org/mine", "--source", "org/source", "--json") == 0, said[-2]
    assert moeq("restore", out, folder / "back") == 0
    report = ("--digests-only", "--html", folder / "page.html", "--junit", folder / "suite.xml")
    assert moeq("run-check", out, *report) == 0
    assert events.stat().st_size > 0
    assert (folder / "summary.md").stat().st_size > 0
    assert found(said, folder) == []


@pytest.mark.slow
def test_failures(traces) -> None:
    """What goes wrong on the way, with the client's own errors and tracebacks asked for."""
    moeq, hub, said, folder = traces
    for argv in (
        ("inspect", "org/missing"),
        ("inspect", f"org/{TOKEN}"),
        ("convert", folder / "source", folder / "o", "--gpu", "a100", "--push", "forbidden/name"),
        ("convert", "org/source", folder / "o", "--gpu", "none-such"),
        ("push", folder / "source", "org/name"),
    ):
        assert moeq(*argv) != 0
    hub.add("org/never-asked-for", folder / "source")
    assert moeq("inspect", "org/never-asked-for", HF_ENDPOINT="http://127.0.0.1:9") != 0
    assert found([text.replace(f"org/{TOKEN}", "") for text in said], folder) == []
