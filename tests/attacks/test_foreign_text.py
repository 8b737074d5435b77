"""Names and values from strangers in every output of every command: they are shown, and nothing acts on them."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
import yaml
from attacks.running import HOSTILE, Answer, acting, moeq_command

import moeq
from moeq.checkpoint.manifest import read_manifest
from moeq.cli.app import COMMANDS, run
from moeq.errors import MoeqError
from moeq.foreign import in_code, in_html, in_markdown, plain
from moeq.report.conversion_facts import render_failure
from moeq.report.publishing import CardOptions, render_card

__all__ = ["moeq_command"]

SOURCE = "gptq-int4-g32-qwen3moe"
Command = Callable[..., Answer]


@pytest.fixture(scope="module")
def clean(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("text") / "out"
    assert run(["convert", str(checkpoints / SOURCE), str(out), "--gpu", "a100", "--quiet"]) == 0
    return out


def texts(document: Any) -> Iterator[tuple[dict[str, Any] | list[Any], Any]]:
    """Holder and key of every text in a JSON document."""
    items = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in list(items):
        if isinstance(value, str):
            yield document, key
        elif isinstance(value, (dict, list)):
            yield from texts(value)


@pytest.fixture(scope="module")
def free(clean: Path, tmp_path_factory: pytest.TempPathFactory) -> list[int]:
    """Numbers of the texts in moeq.json that may be anything: only people read them."""
    folder = Path(shutil.copytree(clean, tmp_path_factory.mktemp("free") / "out"))
    original = json.loads((clean / "moeq.json").read_text())
    found = []
    for number in range(len(list(texts(original)))):
        (folder / "moeq.json").write_text(json.dumps(poisoned(original, [number], "\x1b:?")))
        try:
            moeq.open(folder)
        except MoeqError:
            continue
        found.append(number)
    assert len(found) > 20
    return found


def poisoned(manifest: dict[str, Any], places: list[int], text: str) -> dict[str, Any]:
    """A manifest with the text appended to the values at these places."""
    manifest = json.loads(json.dumps(manifest))
    found = list(texts(manifest))
    for number in places:
        holder, key = found[number]
        holder[key] = f"{holder[key]}{text}"
    return {**manifest, "advisories": [text]}


def shown(answer: Answer) -> None:
    assert list(acting(answer.out)) == []
    assert list(acting(answer.err)) == []


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("text", HOSTILE)
class TestManifest:
    """moeq.json of somebody else."""

    @pytest.fixture
    def folder(self, text: str, clean: Path, free: list[int], tmp_path: Path) -> Path:
        folder = Path(shutil.copytree(clean, tmp_path / "out"))
        manifest = poisoned(json.loads((folder / "moeq.json").read_text()), free, text)
        (folder / "moeq.json").write_text(json.dumps(manifest))
        return folder

    @pytest.mark.cover(every=8)
    def test_terminal(self, folder, checkpoints, tmp_path, moeq_command) -> None:
        for argv in (
            ("inspect", folder, "-v"),
            ("verify", folder),
            ("verify", folder, "--source", checkpoints / SOURCE),
            ("restore", folder, tmp_path / "back"),
            ("diff", folder, checkpoints / SOURCE),
            ("oracle", folder, "--gpu", "a100"),
            ("plan", folder, "--gpu", "a100"),
            ("convert", folder, tmp_path / "again", "--gpu", "a100"),
            ("finalize", folder),
        ):
            shown(moeq_command(*argv))

    @pytest.mark.cover(every=8)
    def test_each_value_alone(self, text, clean, tmp_path, moeq_command) -> None:
        """One value at a time gets further than all at once."""
        folder = Path(shutil.copytree(clean, tmp_path / "one"))
        original = json.loads((clean / "moeq.json").read_text())
        places = [key for _, key in texts(original)]
        for number in range(0, len(places), max(len(places) // 12, 1)):
            manifest = json.loads(json.dumps(original))
            holder, key = list(texts(manifest))[number]
            holder[key] = text
            (folder / "moeq.json").write_text(json.dumps(manifest))
            shown(moeq_command("inspect", folder))


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("text", HOSTILE)
class TestNames:
    """Folders, revisions, options: text that a script may pass on from somewhere."""

    @pytest.mark.cover(every=8)
    def test_every_command_with_a_hostile_argument(self, text, moeq_command) -> None:
        name = text.replace("\x00", "").replace("/", "_")
        for command in COMMANDS:
            shown(moeq_command(command, name))
            shown(moeq_command(command, name, name, "--gpu", name))
            shown(moeq_command(command, "--no-such-" + name))

    @pytest.mark.cover(every=8)
    def test_destination(self, text, checkpoints, tmp_path, moeq_command) -> None:
        out = tmp_path / text.replace("\x00", "").replace("/", "_")
        converted = moeq_command("convert", checkpoints / SOURCE, out, "--gpu", "a100")
        shown(converted)
        if converted.code == 0:
            for argv in (("verify", out), ("restore", out, tmp_path / "back"), ("convert", checkpoints / SOURCE, out)):
                shown(moeq_command(*argv))

    def test_annotations_are_the_only_commands(self, text, moeq_command, monkeypatch) -> None:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        answer = moeq_command("inspect", f"{text.replace(chr(0), '')}")
        lines = [line for line in answer.err.splitlines() if line.lstrip().startswith("::")]
        assert len(lines) == 1
        assert lines[0].startswith("::error title=moeq inspect ")
        assert [found for found in acting(answer.err) if "::error title=moeq inspect" not in found] == []


@pytest.mark.slow
@pytest.mark.parametrize("text", HOSTILE)
def test_config_of_a_source(text, checkpoints, tmp_path, moeq_command) -> None:
    source = Path(shutil.copytree(checkpoints / SOURCE, tmp_path / "source"))
    original = json.loads((source / "config.json").read_text())
    for number in range(len(list(texts(original)))):
        config = json.loads(json.dumps(original))
        holder, key = list(texts(config))[number]
        holder[key] = f"{holder[key]}{text}"
        (source / "config.json").write_text(json.dumps(config))
        shown(moeq_command("inspect", source, "--gpu", "a100"))


class Tags(HTMLParser):
    """Elements and attributes that a browser would see."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {tag, *(f"@{name}" for name, _ in attrs)}


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("text", HOSTILE)
def test_reports_of_run_check(text, clean, free, tmp_path, moeq_command) -> None:
    folder = Path(shutil.copytree(clean, tmp_path / text.replace("\x00", "").replace("/", "_")))
    manifest = poisoned(json.loads((folder / "moeq.json").read_text()), free, text)
    (folder / "moeq.json").write_text(json.dumps(manifest))
    page, suite = tmp_path / "page.html", tmp_path / "suite.xml"
    refused = moeq_command("inspect", folder)  # it asks whether the folder fits where it was made for
    assert refused.code == 4
    assert "error: deployment: gpu.platform is" in refused.err
    shown(refused)
    shown(moeq_command("run-check", folder, "--digests-only", "--html", page, "--junit", suite))
    tags = Tags()
    tags.feed(page.read_text())
    assert not tags.seen & {"script", "img", "a", "iframe", "@onerror", "@onload", "@href", "@src"}
    assert list(acting(page.read_text())) == []
    ET.parse(suite)
    assert list(acting(suite.read_text())) == []
    manifest["deployment"]["gpu"]["platform"], manifest["deployment"]["dtype"] = "cuda", "bf16"
    (folder / "moeq.json").write_text(json.dumps(manifest))
    inspected = moeq_command("inspect", folder)
    assert inspected.code == 0
    shown(inspected)


@pytest.mark.parametrize("text", HOSTILE)
def test_job_summary_and_model_card(text, clean, free) -> None:
    folder = clean.parent / "card"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    document = poisoned(json.loads((clean / "moeq.json").read_text()), free, text)
    document["source"]["revision"] = text
    (folder / "moeq.json").write_text(json.dumps(document))
    manifest = read_manifest(folder)
    options = CardOptions("org/name", None, 1, None, {"license": text, "language": ["en", text]})
    card = render_card(manifest, options)
    _, front, body = card.split("---\n", 2)
    fields = yaml.safe_load(front)
    assert fields["library_name"] == "moeq"
    assert set(fields) <= {"license", "language", "library_name", "tags"}
    failure = render_failure("moeq convert", MoeqError("source.x", f"a {text} b", f"c {text} d"))
    for page in (body, failure):
        assert list(acting(page)) == []
        assert not re.search(r"<(script|img|svg)", re.sub(r"`[^`\n]*`", "", page))
        outside = re.sub(r"`[^`\n]*`|```.*?```", "", page, flags=re.DOTALL)
        assert not re.search(r"(?<!\\)\]\(http", outside), "no link that moeq did not make"


@pytest.mark.parametrize("text", HOSTILE)
def test_the_gate(text) -> None:
    """What each form of the gate promises, for every text."""
    assert list(acting(plain(text))) == []
    assert plain(text).isprintable()
    assert "\n" not in plain(text)
    assert not re.search(r"[<>\"']", in_html(text))
    assert in_code(text).count("`") == 2
    assert "|" not in re.sub(r"\\\|", "", in_code(text) + in_markdown(text))


@pytest.mark.slow
def test_every_character(moeq_command) -> None:
    """All of Unicode through the gate: what comes out is printable, and printable text is left alone."""
    for start in range(0, 0x110000, 0x1000):
        text = "x" + "".join(map(chr, range(start, start + 0x1000)))
        gated = plain(text, most=1 << 20)
        assert gated.isprintable()
        assert len(gated) >= len(text)
    assert plain("Größe 模型 модель 🤗") == "Größe 模型 модель 🤗"


def test_events_are_json_lines(checkpoints, tmp_path, moeq_command) -> None:
    for number, text in enumerate(HOSTILE):
        log = tmp_path / f"events-{number}"
        moeq_command("convert", checkpoints / SOURCE / text.replace("\x00", ""), tmp_path / "out", "--events", log)
        for line in log.read_text().splitlines():
            assert line.isascii()
            assert list(acting(line)) == []
            json.loads(line)
