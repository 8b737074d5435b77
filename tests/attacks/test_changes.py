"""Sources and conversions that change, lie about sizes, or bring code."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from attacks.conftest import Place, command, contents, write_safetensors
from safetensors import safe_open

from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.pipeline.events import Event, Started, UnitFinished

A100 = Deployment(gpu=parse_gpu("a100"))


def rewritten(path: Path) -> None:
    """Another file of the same name, as editors and `mv` make it."""
    data = path.read_bytes()
    new = path.with_name("new")
    new.write_bytes(data.replace(b"1", b"2") if path.suffix == ".json" else data[::-1])
    os.replace(new, path)


def edited(path: Path) -> None:
    """In place, with the time of the last change put back."""
    info = path.stat()
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns + 1))


def longer(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def shorter(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def gone(path: Path) -> None:
    path.unlink()


def exchanged(path: Path) -> None:
    """The same bytes under another inode: nothing tells that they always were the same."""
    new = path.with_name("new")
    new.write_bytes(path.read_bytes())
    os.replace(new, path)


@pytest.mark.cover(every=12)
@pytest.mark.parametrize("change", [rewritten, edited, longer, shorter, gone, exchanged], ids=lambda one: one.__name__)
@pytest.mark.parametrize("file", ["config.json", "quantize_config.json", "model.safetensors.index.json", "vocab.txt"])
@pytest.mark.parametrize("when", [Started, UnitFinished], ids=lambda kind: kind.__name__)
def test_a_source_that_changes_meanwhile(
    place: Place, file: str, change: Callable[[Path], None], when: type[Event]
) -> None:
    """A conversion that ends well can be taken back to what it was made of, whatever happened meanwhile."""
    with safe_open(place.source / "model.safetensors", "pt") as weights:
        index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(weights.keys(), "model.safetensors")}
    (place.source / "model.safetensors.index.json").write_text(json.dumps(index))
    (place.source / "vocab.txt").write_text("one\ntwo\n")
    original = contents(place.source)
    seen: list[Event] = []

    def progress(event: Event) -> None:
        if isinstance(event, when) and not seen:
            seen.append(event)
            change(place.source / file)

    refused: MoeqError | None = None
    try:
        convert(place.source, place.out, A100, progress=progress)
    except MoeqError as error:
        refused = error
    if refused is not None:
        assert refused.exit_code == ExitCode.SOURCE
        assert not place.out.exists()
        return
    assert command("restore", place.out, place.home / "back").code == 0
    back = contents(place.home / "back")
    assert back in (original, contents(place.source)), "one or the other, never a mix"


HUGE = [0, -1, 1 << 20, 1 << 31, 1 << 40, 1 << 62, 1 << 63, 1 << 64, 10**30]


@pytest.mark.cover(every=9)
@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("ranks", [False, True])
def test_counts_of_a_manifest_are_checked_against_bytes(converted_place: Place, value: int, ranks: bool) -> None:
    place = converted_place
    manifest = json.loads((place.out / "moeq.json").read_text())
    for layer in manifest["layers"]:
        layer["num_experts"] = value
        if ranks:
            rank = {"rank": 0, "experts": [0, 4], "intermediate": [0, 128], "matrices": layer["matrices"]}
            layer["ranks"] = [rank, {**rank, "rank": 1, "experts": [4, value]}]
    (place.out / "moeq.json").write_text(json.dumps(manifest))
    for argv in (["inspect", place.out], ["verify", place.out], ["restore", place.out, place.home / "back"]):
        answer = command(*argv)
        assert answer.code == 4, answer
        assert answer.processor < 5


@pytest.mark.cover(every=9)
@pytest.mark.parametrize("value", HUGE)
@pytest.mark.parametrize("key", ["num_experts", "num_hidden_layers", "num_experts_per_tok", "moe_intermediate_size"])
def test_counts_of_a_config_are_checked_against_bytes(place: Place, key: str, value: int) -> None:
    config = json.loads((place.source / "config.json").read_text())
    (place.source / "config.json").write_text(json.dumps({**config, key: value}))
    answer = command("inspect", place.source)
    assert answer.code in (0, 4), answer
    assert answer.processor < 5


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("size", [1 << 31, 1 << 40])
@pytest.mark.parametrize("name", ["tokenizer.json", "notes.bin2", "README.md"])
def test_a_huge_side_file_is_refused_while_planning(place: Place, name: str, size: int) -> None:
    """Sparse, so that it costs its author nothing."""
    with (place.source / name).open("wb") as file:
        file.truncate(size)
    answer = place.convert()
    assert (answer.code, answer.error) == (4, "source.too-large"), answer
    assert answer.processor < 5
    assert not place.partial.exists()


def test_a_dangling_side_file_is_found_while_planning(place: Place) -> None:
    (place.source / "tokenizer.json").symlink_to("gone.json")
    for argv in ([], ["--dry-run"]):
        answer = place.convert(*argv)
        assert (answer.code, answer.error) == (4, "source.missing-file"), answer
        assert not place.partial.exists()


def test_restore_data_of_petabytes(converted_place: Place) -> None:
    """A header that promises a file larger than any disk is refused before anything is made."""
    place = converted_place
    with safe_open(place.out / "moeq-restore.data", "numpy") as file:
        tensors = {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118
    table = {"x": {"dtype": "U8", "shape": [1 << 50], "data_offsets": [0, 1 << 50]}}
    raw = json.dumps(table).encode()
    tensors["header/huge.safetensors"] = len(raw).to_bytes(8, "little") + raw
    write_safetensors(place.out / "moeq-restore.data", tensors, {"format": "moeq-restore/1"})
    answer = command("restore", place.out, place.home / "back")
    assert answer.code in (4, 5), answer
    assert answer.processor < 5
    assert not (place.home / "back").exists()
    assert not (place.home / "back.moeq-partial").exists()


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, ("touch /tmp/moeq-was-unpickled",)


CODE = {
    "modeling_evil.py": b"import os\n",
    "Helper.PY": b"",
    "ops.so": b"\x7fELF",
    "extra.pkl": pickle.dumps(Bomb()),
    "innocent.json.txt": pickle.dumps(Bomb()),
    "vocab.dat": pickle.dumps({"a": 1}, protocol=2),
}


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("no_code", [False, True])
def test_code_is_named_and_left_out(place: Place, no_code: bool) -> None:
    for name, data in CODE.items():
        (place.source / name).write_bytes(data)
    auto_map = {"AutoModelForCausalLM": "modeling_evil.Model"}
    config = json.loads((place.source / "config.json").read_text())
    (place.source / "config.json").write_text(json.dumps({**config, "auto_map": auto_map}))
    (place.source / "tokenizer_config.json").write_text(json.dumps({"a": {"auto_map": auto_map}, "b": 1}))
    before = contents(place.source)
    answer = place.convert(*(["--no-code"] if no_code else []))
    assert answer.code == 0, answer
    code = set(answer.document["code"])
    assert code == {*CODE, "config.json", "tokenizer_config.json"}
    out = contents(place.out)
    for name in CODE:
        assert (name in out) != no_code
    for name in ("config.json", "tokenizer_config.json"):
        assert (b"auto_map" in out[name]) != no_code
    assert json.loads(out["tokenizer_config.json"])["b"] == 1
    assert no_code or "--no-code" in answer.err
    assert command("verify", place.out, "--source", place.source).code == 0
    answer = command("restore", place.out, place.home / "back")
    assert answer.code == 0
    expected = {name: data for name, data in before.items() if not (no_code and name in CODE)}
    assert contents(place.home / "back") == expected
    assert set(answer.document["missing"]) == (set(CODE) if no_code else set())
    assert not Path("/tmp/moeq-was-unpickled").exists()
