"""The examples run as they are, in this process."""

from __future__ import annotations

import runpy
import shutil
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(monkeypatch: pytest.MonkeyPatch, name: str, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")


@pytest.mark.slow
def test_torch_moe_layer(converted, monkeypatch, capsys) -> None:
    run(monkeypatch, "torch_moe_layer.py", str(converted["gptq-int4-g32-qwen3moe"]), "1")
    assert "dtype=torch.bfloat16" in capsys.readouterr().out
    assert len((EXAMPLES / "torch_moe_layer.py").read_text().splitlines()) < 40


def test_update_weights(converted, monkeypatch, capsys) -> None:
    run(monkeypatch, "update_weights.py", str(converted["gptq-int4-g32-qwen3moe"]), "2")
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "expert 0 down",
        "expert 0 w13",
        "expert 1 down",
        "expert 1 w13",
    ]
    assert all("loss" in line for line in lines)


@pytest.mark.slow
def test_transformers_generate(converted, tmp_path, monkeypatch, capsys) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.1", reason="transformers 5.1 is not installed")
    pytest.importorskip("accelerate", reason="device_map needs accelerate")
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path / "model"
    shutil.copytree(converted["gptq-int4-g128-mixtral"], folder)
    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(64)}, unk_token="w63"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w63").save_pretrained(folder)
    run(monkeypatch, "transformers_generate.py", str(folder), "w1 w5 w7")
    printed = capsys.readouterr()
    assert printed.out.split()[:3] == ["w1", "w5", "w7"]
    assert len(printed.out.split()) > 10
    assert "MISSING" not in printed.out + printed.err
