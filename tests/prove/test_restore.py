"""The way back: the same files, also where a source holds what its matrices do not tell."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pipeline.mixing import Tensors, content, flip, rewritten
from refusing import refuses
from safetensors.torch import load_file, save_file

from moeq.checkpoint.header import read_header
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.layouts import words
from moeq.model import open as open_checkpoint
from moeq.pipeline.convert import convert
from moeq.pipeline.events import Event, UnitFinished
from moeq.pipeline.plan.units import CHUNK_BYTES, PackUnit
from moeq.pipeline.state.restore_data import restore_data_of
from moeq.prove import rebuild
from moeq.prove.rebuild import RebuiltPart
from moeq.prove.restore import restore
from moeq.prove.verify import verify

A100 = Deployment(gpu=parse_gpu("A100"))
DOWN = "model.layers.1.mlp.experts.2.down_proj"


def check(source: Path, tmp_path: Path, kept: tuple[str, ...] = ()) -> Path:
    out = tmp_path / "out"
    assert convert(source, out, A100).manifest.restore.kept == kept
    found = verify(out, source)
    assert found.ok, found.mismatches
    restoration = restore(out, tmp_path / "back")
    assert restoration.kept == len(kept)
    assert content(tmp_path / "back") == content(source)
    return out


def test_an_unused_group_index_is_kept(checkpoints, tmp_path) -> None:
    """With one group, g_idx means nothing, and writers leave anything in it."""

    def change(tensors: Tensors) -> Tensors:
        return tensors | {f"{DOWN}.g_idx": torch.arange(128, dtype=torch.int32).flip(0)}

    source = rewritten(checkpoints / "gptq-int4-g128-mixtral", tmp_path / "source", change)
    out = check(source, tmp_path, (f"{DOWN}.g_idx",))
    flip(out / "moeq-restore.data", -1)
    assert [row.name for row in verify(out, source).mismatches] == [f"{DOWN}.g_idx"]


def test_what_was_kept_survives_an_interruption(checkpoints, tmp_path) -> None:
    def change(tensors: Tensors) -> Tensors:
        name = DOWN.replace("layers.1", "layers.0")
        return tensors | {f"{name}.g_idx": torch.arange(128, dtype=torch.int32).flip(0)}

    def stop(event: Event) -> None:
        if isinstance(event, UnitFinished) and event.unit == "layer-0/w2":
            raise KeyboardInterrupt

    source = rewritten(checkpoints / "gptq-int4-g128-mixtral", tmp_path / "source", change)
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", A100, progress=stop)
    conversion = convert(source, tmp_path / "out", A100)
    assert conversion.resumed_units >= 1
    assert len(conversion.manifest.restore.kept) == 1
    convert(source, tmp_path / "whole", A100)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    restore(tmp_path / "out", tmp_path / "back")
    assert content(tmp_path / "back") == content(source)


def test_an_odd_weight_shape_is_kept(checkpoints, tmp_path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return tensors | {f"{DOWN}.weight_shape": torch.tensor([[256, 128]])}

    source = rewritten(checkpoints / "ct-int4-g128-qwen3moe", tmp_path / "source", change)
    check(source, tmp_path, (f"{DOWN}.weight_shape",))


def test_stale_copies_in_other_shards_come_back(checkpoints, tmp_path) -> None:
    """The index decides which copy of a tensor counts; the other one is part of the file all the same."""
    source = tmp_path / "source"
    source.mkdir()
    original = checkpoints / "gptq-int4-g128-mixtral"
    tensors = load_file(original / "model.safetensors")
    (source / "config.json").write_bytes((original / "config.json").read_bytes())
    first = dict(list(tensors.items())[::2])
    second = {name: tensor for name, tensor in tensors.items() if name not in first}
    weight_map = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.safetensors")}
    save_file({**first, next(iter(second)): torch.full((3,), 7)}, source / "a.safetensors")
    save_file(second, source / "b.safetensors")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    check(source, tmp_path)


def test_headers_come_back_as_they_were(checkpoints, tmp_path) -> None:
    """Odd spacing, order and metadata of a header are part of the file."""
    source = tmp_path / "source"
    source.mkdir()
    original = checkpoints / "ct-w8a8-qwen3moe"
    (source / "config.json").write_bytes((original / "config.json").read_bytes())
    data = (original / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["__metadata__"] = {"format": "pt", "note": "written by hand"}
    raw = json.dumps(dict(reversed(header.items())), indent=1).encode()
    (source / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])
    check(source, tmp_path)


def test_other_weight_formats_are_named_as_missing(checkpoints, tmp_path) -> None:
    source = rewritten(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "source", dict)
    (source / "pytorch_model.bin").write_bytes(b"an old pickle")
    convert(source, tmp_path / "out", A100)
    assert restore(tmp_path / "out", tmp_path / "back").missing == ("pytorch_model.bin",)


def test_nothing_is_overwritten(checkpoints, tmp_path) -> None:
    convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", A100)
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "thesis.tex").write_text("precious")
    with pytest.raises(MoeqError, match="not an output of moeq") as caught:
        restore(tmp_path / "out", tmp_path / "back")
    assert caught.value.exit_code == ExitCode.USAGE
    with pytest.raises(MoeqError, match="the source itself"):
        restore(tmp_path / "out", tmp_path / "out")
    assert content(tmp_path / "back") == {"thesis.tex": b"precious"}


def test_only_conversions_can_be_restored(checkpoints, tmp_path) -> None:
    with pytest.raises(MoeqError, match="not an output of `moeq convert`"):
        restore(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "back")


@pytest.mark.parametrize("damage", ["missing", "truncated", "bad header"])
def test_damaged_restore_data_leaves_nothing_behind(damage, checkpoints, tmp_path) -> None:
    convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", A100)
    path = tmp_path / "out" / "moeq-restore.data"
    data = path.read_bytes()
    path.write_bytes({"truncated": data[:-1], "bad header": data[:8] + b"X" + data[9:]}.get(damage, b""))
    if damage == "missing":
        path.unlink()
    with pytest.raises(MoeqError) as caught:
        restore(tmp_path / "out", tmp_path / "back")
    assert caught.value.exit_code == ExitCode.SOURCE
    assert [folder.name for folder in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def on_fast_path(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str, int]]:
    """Lets the fast path take small matrices; a list of what it rebuilt: layer, role, expert."""
    pytest.importorskip("numba")
    monkeypatch.setattr(words, "COMPILED_FROM", 0)
    found: list[tuple[int, str, int]] = []

    def told(*given: Any) -> Generator[tuple[PackUnit, int, list[RebuiltPart]], None, None]:
        for row in rebuild.rebuild_experts(*given):
            found.append((row[0].layer, row[0].role, row[1]))
            yield row

    monkeypatch.setattr("moeq.prove.restore.rebuild_experts", told)
    return found


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("gptq-int4-g32-qwen3moe", "marlin-wna16/1"),
        ("gptq-int8-g64-qwen3moe", "triton-wna16/1"),
        ("awq-int4-g32-qwen3moe", "marlin-wna16/1"),
        ("ct-int4-asym-g32-mixtral", "triton-wna16/1"),
        ("ct-w8a8-qwen3moe", "int8-w8a8/1"),
        ("mxfp4-gptoss", "triton-kernels-hopper/1"),
        ("mxfp4-gptoss", "marlin-mxfp4-interleaved/1"),
        ("mxfp4-gptoss", "trtllm-mxfp4/1"),
        ("ct-nvfp4-qwen3moe", "marlin-nvfp4/1"),
        ("modelopt-nvfp4-qwen3moe", "marlin-nvfp4/1"),
        ("ct-fp8-block-qwen3moe", "marlin-fp8/1"),
        ("ct-fp8-tensor-qwen3moe", "marlin-fp8-fp16/1"),
    ],
)
def test_both_paths_give_the_source(name, layout, tp, checkpoints, tmp_path, on_fast_path) -> None:
    deployment = Deployment(gpu=parse_gpu("H100"), tp=tp)
    manifest = convert(checkpoints / name, tmp_path / "out", deployment, layout=layout, force_layout=True).manifest
    restoration = restore(tmp_path / "out", tmp_path / "back")
    assert len(set(on_fast_path)) == len(on_fast_path) == sum(2 * entry.num_experts for entry in manifest.layers)
    assert restore(tmp_path / "out", tmp_path / "slow", slow=True).rebuilt == restoration.rebuilt
    assert content(tmp_path / "back") == content(tmp_path / "slow") == content(checkpoints / name)


def test_kept_tensors_keep_the_fast_path_away_from_their_experts(checkpoints, tmp_path, on_fast_path) -> None:
    def change(tensors: Tensors) -> Tensors:
        return tensors | {f"{DOWN}.g_idx": torch.arange(128, dtype=torch.int32).flip(0)}

    source = rewritten(checkpoints / "gptq-int4-g128-mixtral", tmp_path / "source", change)
    check(source, tmp_path, (f"{DOWN}.g_idx",))
    assert {(1, "w2", expert) for expert in range(4)}.difference(on_fast_path) == {(1, "w2", 2)}
    assert {row[:2] for row in on_fast_path} == {(0, "w13"), (0, "w2"), (1, "w13"), (1, "w2")}


def test_kept_tensors_of_a_fast_path_are_put_back_on_it(checkpoints, tmp_path, on_fast_path) -> None:
    """A group index of zeros is a placeholder, which the fast path reads as the plain order."""

    def change(tensors: Tensors) -> Tensors:
        return tensors | {f"{DOWN}.g_idx": torch.zeros(128, dtype=torch.int32)}

    source = rewritten(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "source", change)
    check(source, tmp_path, (f"{DOWN}.g_idx",))
    assert (1, "w2", 2) in on_fast_path


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("slow", [False, True])
def test_a_changed_expert_is_never_restored(slow, checkpoints, tmp_path, on_fast_path) -> None:
    convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", A100)
    name = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))[-1]
    flip(tmp_path / "out" / name, -3000)
    with pytest.raises(MoeqError, match="no longer holds the values") as caught:
        restore(tmp_path / "out", tmp_path / "back", slow=slow)
    assert caught.value.code == "source.digest-mismatch"
    assert not (tmp_path / "back").exists()


def test_other_tensors_than_this_version_would_write_take_the_reference_path(
    checkpoints, tmp_path, on_fast_path, monkeypatch
) -> None:
    """Whatever the plan says is held against the tensors that are there before a loop touches memory."""
    convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", A100)
    sizes = rebuild.tensor_bytes
    monkeypatch.setattr(rebuild, "tensor_bytes", lambda shape, dtype: sizes(shape, dtype) + 8)
    restore(tmp_path / "out", tmp_path / "back")
    assert not on_fast_path
    assert content(tmp_path / "back") == content(checkpoints / "gptq-int4-g32-qwen3moe")


@pytest.mark.slow
def test_the_fast_path_needs_no_torch(checkpoints, tmp_path) -> None:
    convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", A100)
    program = (
        "import sys; from moeq.layouts import words; words.COMPILED_FROM = 0; from moeq.prove.restore import restore; "
        "restore(sys.argv[1], sys.argv[2]); sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "out"), str(tmp_path / "back")]
    assert subprocess.run(command, check=False).returncode == 0


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("name", ["text/elsewhere.json", "text/a/b", "stray/x/y", "tensor/"])
def test_restore_data_without_the_config_is_refused(checkpoints, tmp_path, name: str) -> None:
    """What is rebuilt would not be the source, whatever the packed experts hold."""
    convert(checkpoints / "gptq-int4-g32-qwen3moe", tmp_path / "out", Deployment(gpu=parse_gpu("A100")))
    path = tmp_path / "out" / "moeq-restore.data"
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    header[name] = header.pop("text/config.json")
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + raw[8 + size :])
    with pytest.raises(MoeqError) as caught:
        restore(tmp_path / "out", tmp_path / "back")
    assert caught.value.exit_code == ExitCode.SOURCE
    assert not (tmp_path / "back").exists()


def with_rest(checkpoints: Path, folder: Path) -> Path:
    """A source with an embedding of several pieces, a tokenizer and metadata in its header."""
    original = checkpoints / "gptq-int4-g32-qwen3moe"
    tensors = load_file(original / "model.safetensors")
    random = torch.Generator().manual_seed(5)
    tensors["model.embed_tokens.weight"] = torch.randint(256, (3, CHUNK_BYTES - 77), generator=random).to(torch.uint8)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"note": "written by a quantiser"})
    (folder / "config.json").write_bytes((original / "config.json").read_bytes())
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    return folder


def places_of(out: Path) -> dict[str, tuple[str, int]]:
    """A byte of each kind of copy in a conversion: its file, and where in the file it is."""
    raw = (out / "moeq-restore.data").read_bytes()
    found = {"header metadata": ("moeq-restore.data", raw.index(b"written by a quantiser"))}
    found["config"] = ("moeq-restore.data", raw.index(b"hidden_size"))
    found["tokenizer"] = ("tokenizer.json", 12)
    for path in out.glob("*.safetensors"):
        entry = read_header(path, path.name).tensors.get("model.embed_tokens.weight")
        if entry is not None:
            found["first piece"] = (path.name, entry.start + 3)
            found["second piece"] = (path.name, entry.start + CHUNK_BYTES + 3)
            found["last byte"] = (path.name, entry.end - 1)
    return found


def test_copies_of_several_pieces_come_back(checkpoints, tmp_path) -> None:
    source = with_rest(checkpoints, tmp_path / "source")
    check(source, tmp_path)
    before = len(os.listdir("/proc/self/fd"))
    restore(tmp_path / "out", tmp_path / "again")
    assert len(os.listdir("/proc/self/fd")) == before, "every file is closed"


@pytest.mark.cover(every=4)
@pytest.mark.parametrize(
    "kind", ["header metadata", "config", "tokenizer", "first piece", "second piece", "last byte", "manifest"]
)
def test_a_flipped_bit_in_a_copy_is_never_restored(kind: str, checkpoints, tmp_path) -> None:
    convert(with_rest(checkpoints, tmp_path / "source"), tmp_path / "out", A100)
    if kind == "manifest":
        path = tmp_path / "out" / "moeq.json"
        document = json.loads(path.read_text())
        document["restore"]["copied"].remove("tokenizer.json")
        path.write_text(json.dumps(document))
    else:
        name, at = places_of(tmp_path / "out")[kind]
        path = tmp_path / "out" / name
        raw = bytearray(path.read_bytes())
        raw[at] ^= 1
        path.write_bytes(raw)
    with pytest.raises(MoeqError) as caught:
        restore(tmp_path / "out", tmp_path / "back")
    assert caught.value.exit_code == ExitCode.SOURCE
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["out", "source"]


def test_old_conversions_without_digests_are_not_restored(checkpoints, tmp_path) -> None:
    out = tmp_path / "out"
    convert(checkpoints / "ct-w8a8-qwen3moe", out, A100)
    document = json.loads((out / "moeq.json").read_text())
    document |= {"schema": "moeq.manifest/1", "files": None}
    (out / "moeq.json").write_text(json.dumps(document))
    with pytest.raises(MoeqError, match="no digests of files") as caught:
        restore(out, tmp_path / "back")
    assert caught.value.code == "source.no-keepsake"


@pytest.mark.cover(every=2)
@pytest.mark.parametrize("slow", [False, True])
def test_a_second_run_compares_and_says_so(slow: bool, checkpoints, tmp_path, on_fast_path) -> None:
    source = with_rest(checkpoints, tmp_path / "source")
    convert(source, tmp_path / "out", A100)
    first = restore(tmp_path / "out", tmp_path / "back")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "back").iterdir()}
    again = restore(tmp_path / "out", tmp_path / "back", slow=slow)
    assert (first.existed, again.existed) == (False, True)
    assert replace(again, existed=False) == first
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "back").iterdir()}
    assert content(tmp_path / "back") == content(source)


@pytest.mark.cover(every=9)
@pytest.mark.parametrize(
    "damage", ["expert", "second piece", "header", "size", "tokenizer", "config", "stranger", "absent", "link"]
)
def test_another_folder_is_neither_taken_for_done_nor_touched(damage: str, checkpoints, tmp_path, on_fast_path) -> None:
    convert(with_rest(checkpoints, tmp_path / "source"), tmp_path / "out", A100)
    back = tmp_path / "back"
    restore(tmp_path / "out", back)
    weights = back / "model.safetensors"
    tensors = read_header(weights, weights.name).tensors
    if damage == "expert":
        flip(
            weights, next(entry.start for name, entry in tensors.items() if name.endswith("experts.1.up_proj.qweight"))
        )
    elif damage == "second piece":
        flip(weights, tensors["model.embed_tokens.weight"].start + CHUNK_BYTES)
    elif damage == "header":
        flip(weights, weights.read_bytes().index(b"quantiser"))
    elif damage == "size":
        weights.write_bytes(weights.read_bytes() + b"\0")
    elif damage in ("tokenizer", "config"):
        flip(back / f"{damage}.json", 5)
    elif damage == "stranger":
        (back / "thesis.tex").write_text("precious")
    elif damage == "absent":
        (back / "tokenizer.json").unlink()
    else:
        back.rename(tmp_path / "moved")
        back.symlink_to(tmp_path / "moved")
    before = content(back)
    with pytest.raises(MoeqError) as caught:
        restore(tmp_path / "out", back)
    assert caught.value.code == "usage.destination-exists"
    assert "force" not in (caught.value.hint or "")
    assert content(back) == before


def test_restore_data_that_become_shorter_are_not_taken_for_whole(checkpoints, tmp_path) -> None:
    convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", A100)
    restore_data = restore_data_of(open_checkpoint(tmp_path / "out"))
    name, text = next(iter(restore_data.texts.items()))
    assert restore_data.read(f"text/{name}") == text
    os.truncate(restore_data.path, restore_data.path.stat().st_size // 4)
    with pytest.raises(MoeqError, match="ends inside") as caught:
        restore_data.read(f"text/{name}")
    assert caught.value.code == "source.truncated"


@pytest.mark.cover(every=2)
@pytest.mark.parametrize(
    ("kind", "name"), [("header metadata", "header of model.safetensors"), ("config", "config.json")]
)
def test_restore_data_that_changed_are_named_by_their_file(kind: str, name: str, checkpoints, tmp_path) -> None:
    source = with_rest(checkpoints, tmp_path / "source")
    convert(source, tmp_path / "out", A100)
    file, at = places_of(tmp_path / "out")[kind]
    raw = bytearray((tmp_path / "out" / file).read_bytes())
    raw[at] ^= 1
    (tmp_path / "out" / file).write_bytes(raw)
    assert [row.name for row in verify(tmp_path / "out", source).mismatches if row.kind == "kept"] == [name]


def test_copies_ask_for_room_before_the_first(checkpoints, tmp_path, monkeypatch) -> None:
    convert(with_rest(checkpoints, tmp_path / "source"), tmp_path / "out", A100)
    asked: list[dict[str, int]] = []
    monkeypatch.setattr("moeq.prove.restore.require_free_space", lambda folder, sizes: asked.append({**sizes}))
    restore(tmp_path / "out", tmp_path / "back")
    restore(tmp_path / "out", tmp_path / "back")
    assert asked == [{"tokenizer.json": (tmp_path / "source" / "tokenizer.json").stat().st_size}]


def test_reads_that_fail_or_end_early_name_their_file(checkpoints, tmp_path, monkeypatch) -> None:
    convert(checkpoints / "ct-w8a8-qwen3moe", tmp_path / "out", A100)
    again, module = "run the same command again", sys.modules["moeq.prove.restore"]

    def fail(*given: object) -> int:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(module, "open_file_digest", fail)
        with refuses("source.unreadable", "moeq-restore.data: Input/output error", again):
            restore(tmp_path / "out", tmp_path / "back")
    entry = open_checkpoint(tmp_path / "out").source.entry("lm_head.weight")
    with monkeypatch.context() as patched:
        patched.setattr(module, "read_at", fail)
        with refuses("source.unreadable", f"{entry.file}: Input/output error", again):
            restore(tmp_path / "out", tmp_path / "back")
        patched.setattr(module, "read_at", lambda fd, view, at: len(view) - 1)
        with refuses("source.truncated", f"{entry.file} ends inside tensor {entry.name}"):
            restore(tmp_path / "out", tmp_path / "back")
    assert [folder.name for folder in tmp_path.iterdir()] == ["out"]


def test_what_the_folder_does_not_give_is_named(checkpoints, tmp_path, monkeypatch) -> None:
    """Tensors of another size, those that no part rebuilds, and those that are left out."""
    out, name = tmp_path / "out", "gptq-int4-g32-qwen3moe"
    convert(checkpoints / name, out, A100)
    parts, again = sys.modules["moeq.prove.restore"].stored_parts, "convert the source again"
    with monkeypatch.context() as patched:
        patched.setattr("moeq.prove.restore.stored_parts", lambda *a: [replace(one, rebuilt=None) for one in parts(*a)])
        text = "tensor model.layers.0.mlp.experts.0.gate_proj.g_idx can neither be rebuilt nor was it kept"
        with refuses("source.bad-manifest", text, again):
            restore(out, tmp_path / "back", slow=True, workers=1)
        patched.setattr("moeq.prove.restore.stored_parts", lambda *a: [*parts(*a)][:-1])
        with pytest.raises(
            MoeqError, match=r"^16 tensors of model.safetensors were not rebuilt, first model.lay"
        ) as caught:
            restore(out, tmp_path / "back", slow=True)
        assert (caught.value.code, caught.value.hint) == ("source.bad-manifest", again)
    entry = open_checkpoint(out).source.entry("model.norm.weight")
    tensors = load_file(out / entry.file)
    tensors["model.norm.weight"] = torch.cat([tensors["model.norm.weight"]] * 2)
    save_file(tensors, out / entry.file, {"format": "pt"})
    text = f"tensor model.norm.weight has {2 * entry.nbytes:,} bytes, the source had {entry.nbytes:,}"
    with refuses("source.bad-manifest", text, again):
        restore(out, tmp_path / "back")
