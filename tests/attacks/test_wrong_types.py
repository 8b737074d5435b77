"""A wrong type anywhere in a file from a stranger is exit code 4 with the place, never a bug, never a traceback."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from attacks.mutations import REMOVED, mutations, nested, sample, with_value
from attacks.running import moeq_command
from checkpoint.test_fuzz import QUANTIZATIONS

import moeq
from moeq.cli.app import run
from moeq.deploy.deployment import Deployment
from moeq.errors import EXIT_CODES, ExitCode, MoeqError, as_moeq_error
from moeq.pipeline.state import journal
from moeq.report.conversion_facts import conversion_facts
from moeq.report.publishing import CardOptions, render_card

__all__ = ["moeq_command"]

#: All mutations are thousands; every run of the suite takes so many of each document.
SAMPLE = int(os.environ.get("MOEQ_MUTATIONS", "100"))

SOURCE = "gptq-int4-g32-qwen3moe"


def outcome(action: Callable[[], object]) -> MoeqError | None:
    """What came of it; anything but success and an expected failure is a failure of the test."""
    try:
        action()
    except MoeqError as error:
        return error
    return None


def check(error: MoeqError | None, where: object) -> None:
    if error is not None:
        assert error.exit_code in (ExitCode.USAGE, ExitCode.SOURCE, ExitCode.NO), (where, error.code, error.message)
        assert not error.code.startswith("bug"), (where, error.message)
        assert len(error.message) < 3000, where


@pytest.fixture(scope="module")
def converted(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rank by rank, so that the manifest has everything that one can have."""
    out = tmp_path_factory.mktemp("types") / "out"
    argv = ["--gpu", "a100", "--tp", "2", "--layout", "marlin-wna16/1", "--quiet"]
    assert run(["convert", str(checkpoints / "gptq-int8-g64-qwen3moe"), str(out), *argv]) == 0
    return out


def used(folder: Path) -> None:
    """Everything that reads a manifest, as far as it gets."""
    checkpoint = moeq.open(folder)
    json.dumps(checkpoint.info.to_json())
    for layer in checkpoint.info.moe_layers:
        checkpoint.scheme_of(layer)
        checkpoint.matrix(layer, 0, "down")
    manifest = checkpoint.manifest
    Deployment.from_json(manifest.deployment)
    conversion_facts(manifest)
    render_card(manifest, CardOptions("org/name", None, 1, None, {}))


@pytest.mark.slow
def test_manifest(converted, tmp_path) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "out"))
    document = json.loads((converted / "moeq.json").read_text())
    refused = 0
    for path, value in sample(mutations(document), 4 * SAMPLE, 1):
        (folder / "moeq.json").write_text(json.dumps(with_value(document, path, value)))
        error = outcome(lambda: used(folder))
        check(error, (path, value))
        refused += error is not None
    assert refused > 2 * SAMPLE, "most are noticed"


@pytest.mark.slow
def test_manifest_by_every_command(converted, checkpoints, tmp_path, moeq_command) -> None:
    folder = Path(shutil.copytree(converted, tmp_path / "out"))
    document = json.loads((converted / "moeq.json").read_text())
    source = checkpoints / "gptq-int8-g64-qwen3moe"
    commands = (
        ("inspect", folder),
        ("verify", folder),
        ("verify", folder, "--source", source),
        ("restore", folder, tmp_path / "back"),
        ("diff", folder, source),
        ("run-check", folder, "--digests-only"),
    )
    for number, (path, value) in enumerate(sample(mutations(document), SAMPLE // 5, 2)):
        (folder / "moeq.json").write_text(json.dumps(with_value(document, path, value)))
        shutil.rmtree(tmp_path / "back", ignore_errors=True)
        moeq_command(*commands[number % len(commands)])


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("table", range(len(QUANTIZATIONS)))
def test_quantisation_config(table, checkpoints, tmp_path, moeq_command) -> None:
    """Of every dialect: inspect, the oracle and a plan."""
    folder = Path(shutil.copytree(checkpoints / SOURCE, tmp_path / "source"))
    (folder / "quantize_config.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = json.loads(json.dumps(QUANTIZATIONS[table]()))
    found = mutations(config, skip=lambda path: path[0] != "quantization_config")
    for number, (path, value) in enumerate(sample(found, SAMPLE // 2, table)):
        (folder / "config.json").write_text(json.dumps(with_value(config, path, value)))
        command = (
            ("inspect", folder, "--gpu", "h100"),
            ("oracle", folder, "--gpu", "a100"),
            ("plan", folder, "--gpu", "b200"),
        )
        moeq_command(*command[number % 3])


@pytest.mark.slow
@pytest.mark.parametrize("name", [SOURCE, "mxfp4-gptoss"])
def test_config(name, checkpoints, tmp_path, moeq_command) -> None:
    folder = Path(shutil.copytree(checkpoints / name, tmp_path / "source"))
    config = json.loads((folder / "config.json").read_text())
    for number, (path, value) in enumerate(sample(mutations(config), SAMPLE, 3)):
        (folder / "config.json").write_text(json.dumps(with_value(config, path, value)))
        command = (
            ("inspect", folder, "--gpu", "h100"),
            ("oracle", folder, "--gpu", "a100"),
            ("plan", folder, "--gpu", "a100"),
        )
        moeq_command(*command[number % 3])


def test_index(checkpoints, tmp_path) -> None:
    folder = Path(shutil.copytree(checkpoints / "mxfp4-gptoss", tmp_path / "source"))
    document = json.loads((folder / "model.safetensors.index.json").read_text())
    document["weight_map"] = dict(list(document["weight_map"].items()))
    for path, value in sample(mutations(document), SAMPLE, 4):
        (folder / "model.safetensors.index.json").write_text(json.dumps(with_value(document, path, value)))
        check(outcome(lambda: moeq.open(folder)), (path, value))


def framed(document: Any) -> bytes:
    raw = json.dumps(document).encode()
    return len(raw).to_bytes(8, "little") + raw


def header_of(path: Path) -> tuple[Any, bytes]:
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def test_header(checkpoints, tmp_path) -> None:
    folder = Path(shutil.copytree(checkpoints / SOURCE, tmp_path / "source"))
    document, data = header_of(folder / "model.safetensors")
    document = dict(list(document.items())[:30])
    for path, value in sample(mutations(document), SAMPLE, 5):
        (folder / "model.safetensors").write_bytes(framed(with_value(document, path, value)) + data)
        check(outcome(lambda: moeq.open(folder)), (path, value))


@pytest.mark.slow
def test_restore_data(converted, tmp_path, moeq_command) -> None:
    """Its own header, and every header and config kept in it."""
    folder = Path(shutil.copytree(converted, tmp_path / "out"))
    document, data = header_of(folder / "moeq-restore.data")
    base = 0
    kept = {name: document[name]["data_offsets"] for name in document if name != "__metadata__"}
    for number, (path, value) in enumerate(sample(mutations(document), SAMPLE // 4, 6)):
        (folder / "moeq-restore.data").write_bytes(framed(with_value(document, path, value)) + data)
        moeq_command("restore", folder, tmp_path / f"back-{number}")
    for name, (start, stop) in kept.items():
        raw = data[base + start : base + stop]
        inner = json.loads(raw[8:] if name.startswith("header/") else raw)
        for number, (path, value) in enumerate(sample(mutations(inner), SAMPLE // 8, 7)):
            changed = json.dumps(with_value(inner, path, value)).encode()
            changed = framed(with_value(inner, path, value)) if name.startswith("header/") else changed
            held = {other: data[base + a : base + b] for other, (a, b) in kept.items()} | {name: changed}
            table, joined = {}, b""
            for other, one in held.items():
                table[other] = {
                    "dtype": "U8",
                    "shape": [len(one)],
                    "data_offsets": [len(joined), len(joined) + len(one)],
                }
                joined += one
            (folder / "moeq-restore.data").write_bytes(framed(table) + joined)
            moeq_command("restore", folder, tmp_path / f"{name.replace('/', '_')}-{number}")


@pytest.mark.slow
def test_journal(checkpoints, tmp_path, moeq_command) -> None:
    """Lines with right seals and wrong types."""

    def sealed(row: Any, first: bytes) -> bytes:
        return journal._sealed(row, first) if isinstance(row, dict) else json.dumps(row).encode() + b"\n"

    source, out = checkpoints / SOURCE, tmp_path / "out"
    assert moeq_command("convert", source, out, "--gpu", "a100", "--shard", "0/2").code == 0
    (path,) = (tmp_path / "out.moeq-partial").glob("moeq-journal*")
    original = path.read_bytes()
    rows = [json.loads(line) for line in original.splitlines()]
    for row in rows:
        del row["seal"]
    for place, value in sample(mutations(rows), SAMPLE // 4, 8):
        if len(place) > 1 or value is not REMOVED:
            changed = with_value(rows, place, value)
            first = sealed(changed[0], b"")
            path.write_bytes(first + b"".join(sealed(row, journal._seal_of(first)) for row in changed[1:]))
            answer = moeq_command("finalize", out)
            assert answer.code in (1, 2, 4), (place, value)
    path.write_bytes(original)
    assert moeq_command("convert", source, out, "--gpu", "a100").code == 0


@pytest.mark.slow
def test_plan_document(checkpoints, tmp_path, moeq_command) -> None:
    plan = tmp_path / "plan.json"
    assert moeq_command("plan", checkpoints / SOURCE, "--gpu", "a100", "-o", plan).code == 0
    document = json.loads(plan.read_text())
    for path, value in sample(mutations(document), SAMPLE // 8, 9):
        plan.write_text(json.dumps(with_value(document, path, value)))
        argv = ("convert", checkpoints / SOURCE, tmp_path / "out", "--gpu", "a100", "--plan", plan, "--dry-run")
        assert moeq_command(*argv).code in (0, 2, 4)


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("depth", [70, 700, 5000, 100_000])
@pytest.mark.parametrize("file", ["config.json", "quantize_config.json", "generation_config.json", "moeq.json"])
def test_deep_nesting(depth, file, checkpoints, tmp_path, moeq_command) -> None:
    """Refused while reading, before anything is packed, or copied as it is."""
    folder = Path(shutil.copytree(checkpoints / SOURCE, tmp_path / "source"))
    inner = '{"a":' * depth + "1" + "}" * depth
    before = (folder / file).read_text().rstrip() if (folder / file).exists() else "{}"
    text = before[:-1] + (', "deep":' if before != "{}" else '"deep":') + inner + "}"
    (folder / file).write_text(text)
    answer = moeq_command("convert", folder, tmp_path / "out", "--gpu", "a100")
    if file in ("config.json", "quantize_config.json"):
        assert answer.code == 4, answer.err
        assert not (tmp_path / "out.moeq-partial").exists()
    moeq_command("inspect", folder)


@pytest.mark.slow
def test_deep_journal(checkpoints, tmp_path, moeq_command) -> None:
    out = tmp_path / "out"
    assert moeq_command("convert", checkpoints / SOURCE, out, "--gpu", "a100", "--shard", "0/2").code == 0
    (path,) = (tmp_path / "out.moeq-partial").glob("moeq-journal*")
    path.write_bytes(
        path.read_bytes() + json.dumps(nested(900)).encode() + b"\n" + b"[" * 200_000 + b"\n" + b"\xff\xfe\n"
    )
    assert moeq_command("convert", checkpoints / SOURCE, out, "--gpu", "a100").code == 0


@pytest.mark.cover(every=11)
@pytest.mark.parametrize(
    "dst", ["/", "", ".", "..", "/proc/self", "a/../..", "x/", "[/b]", "[red]", "\udcff", "a" * 300]
)
def test_destinations(dst, checkpoints, tmp_path, moeq_command, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    answer = moeq_command("convert", checkpoints / SOURCE, dst, "--gpu", "a100")
    assert answer.code in (0, 2, 3), (dst, answer.err)
    converted = moeq_command("convert", checkpoints / SOURCE, "fine", "--gpu", "a100")
    assert converted.code == 0
    assert moeq_command("restore", "fine", dst).code in (0, 2, 3), dst


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (MemoryError(), "resources.memory"),
        (OSError(28, "No space left on device"), "resources.disk-full"),
        (OSError(122, "Disk quota exceeded"), "resources.disk-full"),
        (OSError(12, "Cannot allocate memory"), "resources.memory"),
        (OSError(5, "Input/output error", "file"), "environment.io"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"),
            "resources.memory",
        ),
        (RuntimeError("can't start new thread"), "resources.memory"),
        (ImportError("libtorch_cpu.so: failed to map segment from shared object"), "resources.memory"),
        (SystemError("error return without exception set"), "resources.memory"),
        (RuntimeError("something else"), "bug.unexpected"),
        (KeyboardInterrupt(), "interrupted.signal"),
    ],
)
def test_what_the_machine_lacks_is_no_bug(error, code) -> None:
    assert as_moeq_error(error).code == code
    assert as_moeq_error(error).exit_code == EXIT_CODES[code.partition(".")[0]]
