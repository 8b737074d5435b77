"""Small faults with wide effects: odd scales, a full stdout, limits of the process, one flipped bit, odd file names."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from attacks.conftest import Place, command, contents
from safetensors.torch import load_file, save_file

from moeq.checkpoint.disk import disk_errors
from moeq.checkpoint.outputs import OutputFolder
from moeq.errors import MoeqError, as_moeq_error
from moeq.pipeline.state.journal import read_journals

ROOT = Path(__file__).parents[2]
SHAPES = {"two numbers": 2, "no number": 0}


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("count", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("name", ["ct-nvfp4-qwen3moe", "modelopt-nvfp4-qwen3moe"])
def test_a_global_scale_that_is_not_one_number(checkpoints: Path, tmp_path: Path, name: str, count: int) -> None:
    source = shutil.copytree(checkpoints / name, tmp_path / "source")
    tensors = load_file(source / "model.safetensors")
    found = next(
        key
        for key in tensors
        if ".experts." in key and "input" not in key and key.endswith(("global_scale", "scale_2"))
    )
    tensors[found] = tensors[found].reshape(-1).repeat(2)[:count].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    for words in (
        ["convert", source, tmp_path / "out", "--gpu", "b200", "--engine", "moeq"],
        ["transcode", source, tmp_path / "other", "--to", "bf16"],
        ["diff", source, checkpoints / name],
        ["inspect", source],
    ):
        answer = command(*words)
        assert answer.code in (1, 4), (words, answer)
        assert answer.code == 4 or words[0] == "inspect", answer
        if answer.code == 4:
            assert f"has shape [{count}], expected one number" in answer.document["error"]["message"]


@pytest.mark.cover(every=2)
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("name", ["inspect", "verify"])
def test_a_document_that_cannot_be_written_is_no_yes(converted_place: Place, name: str) -> None:
    folder = converted_place.out if name == "verify" else converted_place.source
    program = [sys.executable, "-c", "from moeq.cli.app import main; main()", name, str(folder), "--json"]
    with open("/dev/full", "w") as full:
        result = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False)
    assert result.returncode == 5, result.stderr
    assert "the answer could not be written to stdout: No space left on device" in result.stderr


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("spare", range(1, 12, 2))
def test_too_few_open_files_are_the_limits_fault(place: Place, spare: int) -> None:
    """Not the source's, and not the destination's: work can go on with a higher limit."""

    def limited() -> None:
        used = max(int(name) for name in os.listdir("/proc/self/fd")) + 1
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + spare, used + spare))

    answer = place.convert("--workers", "4", prepare=limited)
    if answer.code != 0:
        assert (answer.code, answer.error) == (5, "resources.open-files"), answer
        assert "ulimit -n" in answer.document["error"]["hint"]
    assert place.convert().code == 0  # goes on, or says that all is done


@pytest.mark.parametrize("error", [OSError, ImportError, RuntimeError])
def test_too_little_memory_for_a_library_is_no_bug(tmp_path: Path, error: type[Exception]) -> None:
    """Seen with `ulimit -v`: torch could not be loaded, while a file was open for writing and without."""
    found = error("libgomp.so.1: failed to map segment from shared object")
    assert as_moeq_error(found).code == "resources.memory"
    if error is OSError:
        with pytest.raises(MoeqError) as raised, disk_errors(tmp_path / "model.safetensors"):
            raise found
        assert raised.value.code == "resources.memory"


def interrupted(place: Place) -> Path:
    """A work folder with some units finished, and its journal."""
    answer = place.convert("--shard", "0/2")
    assert answer.code == 0, answer
    shared = place.partial / "moeq-journal.0-of-2.jsonl"
    assert shared.is_file()
    return shared


def units_of(folder: Path) -> int:
    with OutputFolder(folder) as opened:
        return len(read_journals(opened).records)


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.9, "seal"])
def test_a_flipped_bit_in_the_first_line_of_the_journal(place: Place, at: float | str) -> None:
    """The command that wrote it knows what it said: finished units count, and the line is mended."""
    journal = interrupted(place)
    whole, finished = journal.read_bytes(), units_of(place.partial)
    assert finished > 0
    end = whole.index(b"\n")
    position = end - 10 if at == "seal" else int(float(at) * (end - 90))
    journal.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
    assert units_of(place.partial) == 0
    answer = place.convert("--shard", "0/2")
    assert answer.code == 0, answer
    assert answer.document["resumed_units"] == finished
    assert journal.read_bytes() == whole
    assert place.convert().code == 0


def test_finalize_names_the_damaged_journal(place: Place) -> None:
    journal = interrupted(place)
    journal.write_bytes(b"X" + journal.read_bytes()[1:])
    answer = command("finalize", place.out)
    assert (answer.code, answer.error) == (2, "usage.unreadable-journal"), answer
    assert journal.name in answer.document["error"]["message"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [b"CON", b"aux.json", b"caf\xe9.txt", b"trailing. "])
def test_a_side_file_that_not_every_system_can_have_is_left_out(place: Place, name: bytes) -> None:
    (Path(os.fsdecode(os.fsencode(place.source) + b"/" + name))).write_bytes(b"notes")
    answer = place.convert()
    assert answer.code == 0, answer
    assert "left out" in answer.err
    assert ascii(os.fsdecode(name)) in answer.err
    assert os.fsdecode(name) not in contents(place.out)
    assert command("verify", place.out, "--source", place.source).code == 0
    assert command("transcode", place.source, place.home / "other", "--to", "compressed-tensors").code == 0


def test_a_projection_that_differs_is_not_counted_as_proven(converted_place: Place) -> None:
    out = converted_place.out
    before = command("verify", out).document["units"]
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    name = next(key for key in index if key.endswith("w13_weight"))
    with open(out / index[name], "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        start = 8 + length + header[name]["data_offsets"][0]
        file.seek(start)
        byte = file.read(1)
        file.seek(start)
        file.write(bytes([byte[0] ^ 1]))
    answer = command("verify", out)
    assert answer.code == 1
    wrong = {row["name"] for row in answer.document["mismatches"] if row["kind"] == "values"}
    assert wrong
    assert answer.document["units"] == before - len(wrong)
