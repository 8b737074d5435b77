"""What becomes of the files beside the weights: written, kept for the way back, left out, or refused."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moeq.checkpoint.source import LocalSource
from moeq.errors import MoeqError
from moeq.pipeline.plan import side_files
from moeq.pipeline.plan.side_files import copied_files, plan_side_files, without_code

NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture
def source(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / NAME, tmp_path / "source"))


def test_other_weights_are_left_out_and_named(source: Path) -> None:
    for name in ("pytorch_model.bin", "model.gguf", "tokenizer.json"):
        (source / name).write_bytes(b"{}")
    plan = plan_side_files(LocalSource(source, ""), no_code=False)
    assert {"pytorch_model.bin", "model.gguf"} == {*plan.missing} - {"model.safetensors"}
    assert plan.sizes["tokenizer.json"] == 2
    assert "pytorch_model.bin" not in plan.sizes
    assert "config.json" in plan.kept
    assert "config.json" not in plan.sizes


@pytest.mark.parametrize(("no_code", "written"), [(False, True), (True, False)])
def test_code_is_named_and_written_unless_it_is_not_wanted(no_code: bool, written: bool, source: Path) -> None:
    (source / "modeling.py").write_text("x = 1\n")
    (source / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"A": "modeling.A"}}))
    plan = plan_side_files(LocalSource(source, ""), no_code=no_code)
    assert {"modeling.py", "tokenizer_config.json"} <= set(plan.code)
    assert ("modeling.py" in plan.sizes) == written
    assert ("tokenizer_config.json" in plan.stripped) == no_code
    assert plan.no_code == no_code


def test_what_names_no_code_and_what_no_system_can_hold(source: Path) -> None:
    (source / "notes.txt").write_text(json.dumps({"auto_map": {"A": "modeling.A"}}))
    (source / "tokenizer_config.json").write_text("no JSON with an auto_map in it")
    (source / "generation_config.json").write_text(json.dumps({"eos": "auto_map"}))
    (source / "CON").write_text("x")
    plan = plan_side_files(LocalSource(source, ""), no_code=True)
    assert (plan.code, plan.stripped, plan.unusable) == ((), (), ("CON",))
    assert {"notes.txt", "tokenizer_config.json", "generation_config.json"} <= plan.sizes.keys()


def test_code_is_left_out_wherever_it_is_named() -> None:
    document = [{"auto_map": {}, "a": [{"auto_map": {}, "b": 1}, "auto_map"]}]
    assert without_code(document) == [{"a": [{"b": 1}, "auto_map"]}]


def test_a_file_that_is_too_large_is_refused(source: Path) -> None:
    with (source / "notes.dat").open("wb") as file:
        file.truncate((1 << 30) + 1)
    with pytest.raises(
        MoeqError, match=r"notes\.dat has 1,073,741,825 bytes, but the limit for a file beside the weights is"
    ):
        plan_side_files(LocalSource(source, ""), no_code=False)


@pytest.mark.parametrize(
    ("here", "source_has", "expected"),
    [
        ((), (), {}),
        (("README.md",), (), {"README.md": "README.md"}),
        (("README.md", "README.source.md"), (), {"README.md": "README.source.md"}),
        (
            ("README.md", "README.source.md"),
            ("README.source.md",),
            {"README.md": "README.md", "README.source.md": "README.source.md"},
        ),
    ],
)
def test_the_sources_card_has_another_name_where_a_conversion_was_pushed(
    here: tuple[str, ...], source_has: tuple[str, ...], expected: dict[str, str], source: Path, tmp_path: Path
) -> None:
    for name in ("README.md", *source_has):
        (source / name).touch()
    plan = plan_side_files(LocalSource(source, ""), no_code=False)
    converted = Path(shutil.copytree(source, tmp_path / "converted"))
    for name in ("README.md", "README.source.md"):
        (converted / name).unlink(missing_ok=True)
    for name in here:
        (converted / name).touch()
    found = copied_files(LocalSource(converted, ""), plan)
    assert {name: new for name, new in found.items() if name.startswith("README")} == expected


@pytest.mark.parametrize(
    ("raw", "runs"),
    [
        *((bytes((0x80, protocol)), 2 <= protocol <= 5) for protocol in range(8)),
        (b"\x80\x04rest", True),
        (b"\x80", False),
        (b"", False),
        (b"\x02\x80", False),
        (b"{}", False),
    ],
)
def test_pickles_are_told_by_their_first_bytes(raw: bytes, runs: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(raw)
    source: Any = SimpleNamespace(open=lambda name: os.open(tmp_path / name, os.O_RDONLY))
    assert side_files._is_pickle(source, "file") is runs


@pytest.mark.parametrize("protocol", range(2, 6))
def test_they_are_those_that_python_writes(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(pickle.dumps({"a": 1}, protocol))
    source: Any = SimpleNamespace(open=lambda name: os.open(tmp_path / name, os.O_RDONLY))
    assert side_files._is_pickle(source, "file")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.safetensors", "missing"),
        ("a.bin", "missing"),
        ("a.bin.index.json", "missing"),
        ("a.pt", "missing"),
        ("a.pth", "missing"),
        ("a.gguf", "missing"),
        ("README.md", "kept and written"),
        ("README.source.md", "kept and written"),
        ("moeq-restore.data", "kept"),
        ("a.PY", "code"),
        ("a.so", "code"),
        ("a.joblib", "code"),
        ("a.ckpt", "code"),
        ("a.txt", "written"),
        ("notes.jsonl", "written"),
    ],
)
def test_kinds_of_files(source: Path, name: str, kind: str) -> None:
    for path in source.glob("*.safetensors.index.json"):
        path.unlink()
    (source / name).write_bytes(b"{}")
    plan = plan_side_files(LocalSource(source, ""), no_code=False)
    bare = plan_side_files(LocalSource(source, ""), no_code=True)
    assert (name in plan.missing) == (kind == "missing")
    assert (name in plan.kept) == kind.startswith("kept")
    assert (name in plan.sizes) == (kind in ("written", "kept and written", "code"))
    assert (name in plan.code) == (name in bare.code) == (kind == "code")
    assert (name in bare.missing) == (kind in ("missing", "code"))
    assert plan.sizes.get(name, 2) == 2
    assert plan.stripped == bare.stripped == ()


def test_the_largest_files(source: Path) -> None:
    """A file beside the weights, and one that is kept for the way back."""
    with (source / "notes.dat").open("wb") as file:
        file.truncate(side_files.MAX_SIDE_BYTES)
    assert plan_side_files(LocalSource(source, ""), no_code=False).sizes["notes.dat"] == 1 << 30
    limit = side_files.limit_of("README.md")
    assert limit == side_files.limit_of("config.json") < side_files.limit_of("x.safetensors.index.json")
    with (source / "README.md").open("wb") as file:
        file.truncate(limit)
    assert plan_side_files(LocalSource(source, ""), no_code=False).sizes["README.md"] == limit
    with (source / "README.md").open("wb") as file:
        file.truncate(limit + 1)
    with pytest.raises(MoeqError) as caught:
        plan_side_files(LocalSource(source, ""), no_code=False)
    assert (caught.value.code, caught.value.hint) == (
        "source.too-large", "move it out of the folder if it is not part of the model",
    )  # fmt: skip
    assert f"README.md has {limit + 1:,} bytes, but the limit for a file beside the weights is {limit:,}" in str(
        caught.value
    )


def test_a_config_that_names_code_is_written_all_the_same(source: Path) -> None:
    """`config.json` is written anew in any case; others are stripped, and kept for the way back."""
    for name in ("config.json", "processor_config.json"):
        path = source / name
        before = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps({**before, "auto_map": {"A": "modeling.A"}}))
    plan = plan_side_files(LocalSource(source, ""), no_code=True)
    assert set(plan.code) == {"config.json", "processor_config.json"}
    assert plan.stripped == ("processor_config.json",)
    assert {"config.json", "processor_config.json"} <= set(plan.kept)
    assert side_files.stripped_file(LocalSource(source, ""), "processor_config.json") == b"{}\n"
    kept = plan_side_files(LocalSource(source, ""), no_code=False)
    assert kept.stripped == ()
    assert "processor_config.json" in kept.sizes
    assert "processor_config.json" not in kept.kept
