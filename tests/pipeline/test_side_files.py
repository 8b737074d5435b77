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
