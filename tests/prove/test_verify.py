"""What verify finds: every damaged byte, by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pipeline.mixing import flip
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moeq.checkpoint.manifest import read_manifest, seal
from moeq.checkpoint.source import LocalSource
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.prove.restore import restore
from moeq.prove.verify import Verification, verify

NAME = "gptq-int4-g32-qwen3moe"
PREFIX = "model.layers.1.mlp.experts"


@pytest.fixture(scope="module")
def clean(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("verify") / "out"
    convert(checkpoints / NAME, out, Deployment(gpu=parse_gpu("A100")))
    return out


@pytest.fixture
def out(clean: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(clean, tmp_path / "out"))


def place(folder: Path, name: str) -> tuple[Path, int, int]:
    entry = LocalSource(folder, "").tensors[name]
    return folder / entry.file, entry.start, entry.nbytes


def names(found: Verification) -> list[str]:
    return [mismatch.name for mismatch in found.mismatches]


def test_a_clean_conversion(clean, checkpoints) -> None:
    alone, together = verify(clean), verify(clean, checkpoints / NAME)
    assert alone.ok
    assert together.ok
    assert (alone.units, alone.source_units) == (24, 0)
    with safe_open(checkpoints / NAME / "model.safetensors", "pt") as file:
        rest = [name for name in file.keys() if ".experts." not in name]  # noqa: SIM118 - not a dict
    assert (together.units, together.source_units, together.tensors) == (24, 24, len(rest))
    assert alone.tensors == len(rest)
    assert any("integrity, not origin" in note for note in alone.notes)
    assert not any("integrity" in note for note in together.notes)
    slow = verify(clean, checkpoints / NAME, slow=True)
    assert slow.ok
    size = sum(entry.nbytes for entry in LocalSource(clean, "").tensors.values())
    for found, source, files in ((alone, None, 4), (together, str(checkpoints / NAME), 1), (slow, together.source, 1)):
        assert (found.destination, found.source, found.bytes, found.losses) == (str(clean), source, size, 0)
        assert (found.signed, found.unproven, found.mismatches, found.files) == (None, (), (), files)
    assert [note.partition(":")[0] for note in together.notes] == ["taken from moeq.json, since no source tells it"]
    assert [note[:50] for note in alone.notes] == [
        "bytes were compared with moeq.json's digests of by", "the digests in moeq.json themselves were trusted. ",
    ]  # fmt: skip
    assert [note[:50] for note in verify(clean, slow=True).notes] == [alone.notes[1][:50]]


def test_every_step_is_counted_once(clean, checkpoints) -> None:
    tensors = len(LocalSource(clean, "").tensors)
    for source, slow, total in ((None, False, tensors), (None, True, tensors + 8), (checkpoints / NAME, True, None)):
        told: list[tuple[int, int, str]] = []
        assert verify(clean, source, slow=slow, progress=lambda *step, to=told: to.append(step)).ok
        done, of, _ = told[-1]
        assert done == of == (total or of)
        assert [step[0] for step in told].count(of) == 1


def test_configs_without_the_code_that_they_named(checkpoints, tmp_path) -> None:
    source = Path(shutil.copytree(checkpoints / NAME, tmp_path / "source"))
    config = {"auto_map": {"AutoTokenizer": "code.T"}, "eos_token": "."}
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    out = tmp_path / "out"
    convert(source, out, Deployment(gpu=parse_gpu("A100")), no_code=True)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"eos_token": "."}
    assert verify(out, source).ok
    (source / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "!"}))
    found = verify(out, source)
    assert "tokenizer_config.json differs from the source's" in [one.text for one in found.mismatches]


@pytest.mark.parametrize("workers", [1, 3])
def test_a_flipped_byte_names_its_expert(out, workers) -> None:
    path, start, size = place(out, f"{PREFIX}.w2_weight")
    flip(path, start + 2 * size // 4)  # the first byte of expert 2
    assert names(verify(out, workers=workers)) == ["layer 1 expert 2 down"]
    with pytest.raises(MoeqError, match="layer 1 expert 2 down no longer holds") as caught:
        restore(out, out.parent / "back")
    assert caught.value.exit_code == ExitCode.SOURCE
    assert [folder.name for folder in out.parent.iterdir()] == ["out"]


def test_bytes_of_padding_are_named_by_their_tensor(checkpoints, tmp_path) -> None:
    """Ranks of four are padded to a tile; values of another layer that differ are named as well, and once."""
    out = tmp_path / "out"
    convert(checkpoints / NAME, out, Deployment(gpu=parse_gpu("A100"), tp=4, engine="moeq"))
    padded, valued = "model.layers.0.mlp.experts.w2_weight.rank0", f"{PREFIX}.w2_weight.rank3"
    path, start, size = place(out, padded)
    flip(path, start + size - 1)
    text = f"the bytes of tensor {padded} are not those that were written"
    assert [mismatch.text for mismatch in verify(out).mismatches] == [text]
    text = "layer 0: padding bytes differ from those that the source gives"
    assert [mismatch.text for mismatch in verify(out, checkpoints / NAME).mismatches] == [text]
    flip(*place(out, valued)[:2])
    alone = verify(out)
    assert names(alone) == ["layer 1 expert 0 down", padded]
    assert (alone.units, alone.ok) == (23, False)
    together = verify(out, checkpoints / NAME)
    assert sorted(names(together)) == ["layer 0", "layer 1 expert 0 down"]
    assert together.units == 23


def test_swapped_experts_are_recognised(out) -> None:
    for part in ("w13_weight", "w13_scale"):
        path, start, size = place(out, f"{PREFIX}.{part}")
        data, row = bytearray(path.read_bytes()), size // 4
        one, two = data[start : start + row], data[start + row : start + 2 * row]
        data[start : start + 2 * row] = two + one
        path.write_bytes(data)
    found = verify(out)
    assert names(found) == [f"layer 1 expert {expert} {role}" for expert in (0, 1) for role in ("gate", "up")]
    assert found.mismatches[0].text.endswith("it holds the values of expert 1 gate")


def test_damage_outside_the_experts(out, checkpoints) -> None:
    path, start, _ = place(out, "model.norm.weight")
    flip(path, start + 5)
    (out / "quantize_config.json").write_text("{}")
    assert names(verify(out)) == ["model.norm.weight", "quantize_config.json"]
    found = verify(out, checkpoints / NAME)
    assert names(found) == ["model.norm.weight", "quantize_config.json"]
    assert found.mismatches[0].text.endswith("at byte 5")


def test_damage_to_what_leads_back(out, checkpoints) -> None:
    entry = read_manifest(out).restore
    data = (out / entry.file).read_bytes()
    at = data.index(b'"hidden_size"')
    (out / entry.file).write_bytes(data[: at + 1] + b"H" + data[at + 2 :])
    assert names(verify(out, checkpoints / NAME)) == ["config.json"]


def test_a_changed_config_is_noticed(out, checkpoints) -> None:
    document = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**document, "rope_theta": 1}))
    assert names(verify(out, checkpoints / NAME)) == ["config.json"]


def test_another_source_differs_everywhere(clean, checkpoints) -> None:
    found = verify(clean, checkpoints / "gptq-int8-g64-qwen3moe")
    kinds = {mismatch.kind for mismatch in found.mismatches}
    assert {"identity", "source-values", "tensor", "kept"} <= kinds
    assert len([row for row in found.mismatches if row.kind == "source-values"]) == 24


def test_only_conversions_are_verified(checkpoints, clean) -> None:
    with pytest.raises(MoeqError, match="not an output of `moeq convert`") as caught:
        verify(checkpoints / NAME)
    assert caught.value.exit_code == ExitCode.USAGE
    with pytest.raises(MoeqError, match="itself an output"):
        verify(clean, clean)


def test_a_missing_file_is_the_folders_fault(out) -> None:
    (out / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(MoeqError) as caught:
        verify(out)
    assert caught.value.exit_code == ExitCode.SOURCE


def sealed(out: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest and seal it again, as somebody would who means to deceive."""
    document = json.loads((out / "moeq.json").read_text())
    change(document)
    (out / "moeq.json").write_text(json.dumps(document | {"seal": seal(document)}))


def test_slow_unpacks_experts_whose_bytes_are_those_recorded(out) -> None:
    """Digests of files and of values may contradict each other: only unpacking shows it."""

    def change(document: dict[str, Any]) -> None:
        digests = document["layers"][1]["digests"]["up"]
        digests[0], digests[2] = digests[2], digests[0]

    sealed(out, change)
    assert verify(out).ok
    slow = verify(out, slow=True)
    assert sorted(names(slow)) == ["layer 1 expert 0 up", "layer 1 expert 2 up"]
    assert all("it holds the values of expert" in mismatch.text for mismatch in slow.mismatches)


def test_digests_of_another_kind_are_not_compared(out) -> None:
    sealed(out, lambda document: document.update(digest="sha256/other"))
    with pytest.raises(MoeqError, match="digests of the kind 'sha256/other'") as caught:
        verify(out)
    assert caught.value.code == "environment.digest"


def test_tensors_of_another_form_unknown_and_missing(out, checkpoints) -> None:
    path = next(path for path in sorted(out.glob("*.safetensors")) if "model.norm.weight" in load_file(path))
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].view(2, -1)
    tensors["model.extra"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    alone = [mismatch.text for mismatch in verify(out).mismatches]
    assert f"tensor model.extra is not known of {path.name}" in alone
    assert "the bytes of tensor model.norm.weight are not those that were written" not in alone  # they are the same
    together = verify(out, checkpoints / NAME)
    texts = [mismatch.text for mismatch in together.mismatches]
    shape = list(tensors["model.norm.weight"].shape)
    assert any(
        text.startswith("tensor model.norm.weight is ") and f"{shape}, the source gives" in text for text in texts
    )
    del tensors["model.extra"], tensors["model.norm.weight"]
    save_file(tensors, path, {"format": "pt"})
    index = out / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    del document["weight_map"]["model.norm.weight"]
    index.write_text(json.dumps(document))
    assert f"tensor model.norm.weight is missing from {path.name}" in [row.text for row in verify(out).mismatches]
    missing = verify(out, checkpoints / NAME)
    assert "tensor model.norm.weight of the source is missing" in [row.text for row in missing.mismatches]
