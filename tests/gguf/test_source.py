"""Which files are one GGUF model, and what is said where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint.hub_server import Hub, serving
from gguf_files import gguf_bytes, moe_metadata, moe_tensors, random_tensor, write_model
from huggingface_hub import constants
from refusing import refuses

from moeq.errors import MoeqError
from moeq.gguf import source as source_module
from moeq.gguf.header import GgufTensor
from moeq.gguf.source import choose_files, entry_of, is_gguf, names_repository_file
from moeq.model import open as open_checkpoint

PARTS = tuple(f"m-{number:05d}-of-00003.gguf" for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a.gguf"], True),
        (["a.GGUF", "config.json"], True),
        (["mmproj-a.gguf"], False),
        (["MMPROJ.gguf", "a.gguf"], True),
        (["a.gguf", "model.safetensors"], False),
        (["a.gguf", "model.safetensors.index.json"], False),
        (["config.json"], False),
    ],
)
def test_folders(names: list[str], expected: bool, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    assert is_gguf(tmp_path) is expected
    assert is_gguf(tmp_path / names[0]) is names[0].lower().endswith(".gguf")
    assert not is_gguf(tmp_path / "absent.gguf")
    assert not is_gguf(tmp_path / "absent")
    assert not is_gguf(Path("a\0b"))


@pytest.mark.parametrize(
    ("names", "asked", "expected"),
    [
        (["a.gguf", "config.json", "mmproj-a.gguf"], None, ("a.gguf",)),
        (["a.gguf", "b.gguf"], "b.gguf", ("b.gguf",)),
        ([*PARTS[::-1], "other.txt"], None, PARTS),
        ([*PARTS, "a.gguf"], PARTS[1], PARTS),
        (["m-00001-of-00001.gguf"], None, ("m-00001-of-00001.gguf",)),
    ],
)
def test_the_files_of_one_model(names: list[str], asked: str | None, expected: tuple[str, ...]) -> None:
    assert choose_files(names, asked, "here") == expected


@pytest.mark.parametrize(
    ("names", "asked", "code", "words"),
    [
        (["b.gguf", "a.gguf"], None, "usage.several-models", "here holds 2 GGUF models: a.gguf, b.gguf"),
        ([f"{n}.gguf" for n in range(7)], None, "usage.several-models", "7 GGUF models: 0.gguf, 1.gguf, .* 5.gguf ..."),
        (PARTS[1:], None, "source.missing-shard", "1 of the 3 parts of m are missing: m-00001-of-00003.gguf"),
        (PARTS[:1], PARTS[0], "source.missing-shard", "2 of the 3 parts"),
        (["m-00000-of-00000.gguf"], None, "source.missing-shard", "0 of the 0 parts"),
    ],
)
def test_files_that_are_no_model(names: list[str], asked: str | None, code: str, words: str) -> None:
    with pytest.raises(MoeqError, match=words) as caught:
        choose_files(names, asked, "here")
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("org/repo/a.gguf", True),
        ("org/repo/folder/a.GGUF", True),
        ("org/repo", False),
        ("org/a.gguf", False),
        ("org/repo/a.txt", False),
        ("/org/a.gguf", False),
        ("../repo/a.gguf", False),
    ],
)
def test_files_of_a_repository(text: str, expected: bool) -> None:
    assert names_repository_file(text) is expected


def test_a_file_of_a_repository_may_lie_in_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is opened then is asked of the Hub."""
    monkeypatch.setattr(source_module, "GgufRepository", lambda *given: given)
    assert source_module.open_gguf_repository("org/repo", None) == ("org/repo", None, None)
    assert source_module.open_gguf_repository("org/repo/a.gguf", "main") == ("org/repo", "main", "a.gguf")
    assert source_module.open_gguf_repository("org/repo/in/a.gguf", None) == ("org/repo", None, "in/a.gguf")


@pytest.fixture(name="hub")
def _hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with serving() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield running


def test_a_repository_and_one_of_its_files_have_their_names(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    (folder / "in").mkdir(parents=True)
    write_model(folder / "in" / "a.gguf", layers=1)
    (folder / "config.json").write_text("{}")
    repo = hub.add("org/models", folder)
    source = source_module.open_gguf_repository(f"{repo}/in/a.gguf", None)
    assert source.name == "org/models/in/a.gguf"
    assert [entry.file for entry in source.tensors.values()] == ["in/a.gguf"] * len(source.tensors)
    (folder / "in" / "a.gguf").rename(folder / "a.gguf")
    repo = hub.add("org/other", folder)
    source = source_module.open_gguf_repository(repo, None)
    assert source.name == "org/other"
    assert source.tensors
    (folder / "a.gguf").unlink()
    with refuses("source.no-weights", "org/none holds no GGUF files"):
        source_module.open_gguf_repository(hub.add("org/none", folder), None)


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([(0, 2), (0, 2)], "m-00002-of-00002.gguf says that it is part 0 of 2, but its name says 1 of 2"),
        ([(0, 3), (1, 3)], "m-00001-of-00002.gguf says that it is part 0 of 3"),
        ([(0, 2), (None, None)], "part None of None"),
        ([(0, 2)], "m.gguf says that it is part 0 of 2, but its name says 0 of 1"),
        ([(None, None)], None),
        ([(0, 1)], None),
        ([(0, 0)], None),
        ([(None, 1)], None),
        ([(None, 2)], "m.gguf says that it is part None of 2"),
    ],
)
def test_what_parts_say_of_themselves(said: list[tuple[int | None, int | None]], words: str | None, tmp_path) -> None:
    metadata = moe_metadata("qwen3moe", layers=1, hidden=64, inner=64, experts=2)
    tensors = moe_tensors(np.random.default_rng(0), layers=1, hidden=64, inner=64, experts=2)
    for number, (part, count) in enumerate(said):
        named = {"split.no": part, "split.count": count}
        own = {key: value for key, value in named.items() if value is not None}
        held = dict(list(tensors.items())[number :: len(said)])
        name = "m.gguf" if len(said) == 1 else f"m-{number + 1:05d}-of-{len(said):05d}.gguf"
        (tmp_path / name).write_bytes(gguf_bytes({**metadata, **own}, held))
    if words is None:
        assert open_checkpoint(tmp_path).info.num_experts == 2
        return
    with pytest.raises(MoeqError, match=words) as caught:
        open_checkpoint(tmp_path)
    assert caught.value.code == "source.inconsistent"


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    metadata = moe_metadata("qwen3moe", layers=1, hidden=64, inner=64, experts=2)
    tensors = moe_tensors(np.random.default_rng(0), layers=1, hidden=64, inner=64, experts=2)
    for number in (0, 1):
        own = {**metadata, "split.no": number, "split.count": 2}
        (tmp_path / f"m-{number + 1:05d}-of-00002.gguf").write_bytes(gguf_bytes(own, tensors))
    with pytest.raises(MoeqError, match=r"is in m-00001-of-00002\.gguf and in m-00002-of-00002\.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("kind", "name", "shape", "size", "expected"),
    [
        ("f32", "a.weight", (2, 64), 512, ("a.weight", "F32", (2, 64))),
        ("bf16", "a.bias", (64,), 128, ("a.bias", "BF16", (64,))),
        ("i64", "a.weight", (3,), 24, ("a.weight", "I64", (3,))),
        ("q8_0", "a.weight", (2, 64), 136, ("a.gguf_q8_0", "U8", (2, 68))),
        ("q8_0", "m.experts.up.weight", (3, 2, 64), 408, ("m.experts.up.gguf_q8_0", "U8", (3, 2, 68))),
        ("f16", "m.experts.up.weight", (3, 2, 64), 768, ("m.experts.up.gguf_f16", "U8", (3, 2, 128))),
        ("f16", "m.experts.up.bias", (3, 64), 384, ("m.experts.up.bias", "F16", (3, 64))),
        ("q8_0", "a.weight", (0, 64), 0, ("a.gguf_q8_0", "U8", (0, 0))),
    ],
)
def test_entries(kind, name, shape, size, expected) -> None:
    entry = entry_of(name, GgufTensor("t", kind, shape, 96, 96 + size), "m.gguf")
    assert (entry.file, entry.start, entry.end) == ("m.gguf", 96, 96 + size)
    assert (entry.name, entry.dtype, entry.shape) == expected


@pytest.mark.parametrize("converts", [True, False])
def test_the_tokenizer_needs_transformers(converts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moeq.gguf.source.can_convert", lambda: converts)
    source = open_checkpoint(write_model(tmp_path / "m.gguf", layers=1)).source
    assert [one.code for one in source.warnings] == ([] if converts else ["gguf.no-tokenizer"])
    assert source.has_side_file("tokenizer.json") is converts
    (tmp_path / "own").mkdir()
    write_model(tmp_path / "own" / "m.gguf", layers=1)
    (tmp_path / "own" / "tokenizer.json").write_text("{}")
    source = open_checkpoint(tmp_path / "own").source
    assert (source.warnings, source.read_file("tokenizer.json", 9)) == ([], b"{}")


def with_tensors(tmp_path: Path, architecture: str = "qwen3moe", **tensors: tuple[str, tuple[int, ...]]) -> Any:
    """Open a model with some more tensors, by name (`__` is a dot)."""
    rng = np.random.default_rng(3)
    held = moe_tensors(rng, layers=1, hidden=64, inner=64, experts=2)
    held |= {name.replace("__", "."): random_tensor(rng, *tensor) for name, tensor in tensors.items()}
    metadata = moe_metadata(architecture, layers=1, hidden=64, inner=64, experts=2)
    (tmp_path / "m.gguf").write_bytes(gguf_bytes(metadata, held))
    return open_checkpoint(tmp_path / "m.gguf").source


def test_tensors_without_a_name_refuse_transcoding(tmp_path: Path) -> None:
    extra = {f"blk__0__odd_{number}__weight": ("f32", (4,)) for number in range(4)}
    source = with_tensors(tmp_path, **extra)
    refusal = source.config["quantization_config"]["refusal"]
    shown = "blk.0.odd_0.weight, blk.0.odd_1.weight, blk.0.odd_2.weight, blk.0.odd_3.weight"
    assert refusal == f"moeq knows no Hugging Face names of 4 of its tensors: {shown}"
    source = with_tensors(tmp_path, **extra, blk__0__odd_4__weight=("f32", (4,)))
    assert source.config["quantization_config"]["refusal"].endswith("of 5 of its tensors: " + shown + " and 1 more")


def test_computed_tensors_are_left_out(tmp_path: Path) -> None:
    source = with_tensors(tmp_path, rope_freqs__weight=("f32", (4,)))
    assert [one.code for one in source.warnings] == ["gguf.computed"]
    assert "refusal" not in source.config["quantization_config"]
    assert not [name for name in source.tensors if "rope" in name]


def test_types_are_counted(tmp_path: Path) -> None:
    table = with_tensors(tmp_path).config["quantization_config"]
    assert table == {
        "quant_method": "gguf",
        "experts": {"q4_0": 3},
        "others": {"q8_0": 6, "f32": 4},
    }


def test_two_names_for_one_tensor(tmp_path: Path) -> None:
    words = r"m\.gguf: blk\.0\.ffn_norm\.weight and .*post_attention_norm.* both become .*_attention_layernorm\.weight"
    with pytest.raises(MoeqError, match=words) as caught:
        with_tensors(tmp_path, blk__0__post_attention_norm__weight=("f32", (64,)))
    assert caught.value.code == "source.bad-names"


def test_half_a_projection_is_none(tmp_path: Path) -> None:
    """Shared experts of Granite need both halves; one alone has no name."""
    source = with_tensors(tmp_path, "granitemoe", blk__0__ffn_gate_shexp__weight=("f32", (8, 64)))
    assert "1 of its tensors: blk.0.ffn_gate_shexp.weight" in source.config["quantization_config"]["refusal"]
    halves = {f"blk__0__ffn_{one}_shexp__weight": ("f32", (8, 64)) for one in ("gate", "up")}
    source = with_tensors(tmp_path, "granitemoe", **halves)
    assert "refusal" not in source.config["quantization_config"]
    entry = source.tensors["model.layers.0.shared_mlp.input_linear.weight"]
    assert (entry.dtype, entry.shape, entry.file) == ("F32", (16, 64), "blk.0.ffn_gate_shexp of m.gguf")
