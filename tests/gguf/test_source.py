"""Which files are one GGUF model, and what is said where they are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf_files import gguf_bytes, moe_metadata, moe_tensors, write_model

from moeq.errors import MoeqError
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


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([(0, 2), (0, 2)], "m-00002-of-00002.gguf says that it is part 0 of 2, its name 1 of 2"),
        ([(0, 3), (1, 3)], "m-00001-of-00002.gguf says that it is part 0 of 3"),
        ([(0, 2), (None, None)], "part None of None"),
        ([(0, 2)], "m.gguf says that it is part 0 of 2, its name 0 of 1"),
        ([(None, None)], None),
        ([(0, 1)], None),
        ([(0, 0)], None),
    ],
)
def test_what_parts_say_of_themselves(said: list[tuple[int | None, int | None]], words: str | None, tmp_path) -> None:
    metadata = moe_metadata("qwen3moe", layers=1, hidden=64, inner=64, experts=2)
    tensors = moe_tensors(np.random.default_rng(0), layers=1, hidden=64, inner=64, experts=2)
    for number, (part, count) in enumerate(said):
        own = {} if count is None else {"split.no": part, "split.count": count}
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
