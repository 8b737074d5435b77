"""Sources whose config, headers and data do not agree, or keep the config in an unusual place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.errors import ExitCode, MoeqError
from moeq.pipeline.convert import convert
from moeq.prove.restore import restore
from moeq.prove.verify import verify

A100 = Deployment(gpu=parse_gpu("A100"))
NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture
def source(checkpoints: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(checkpoints / NAME, tmp_path / "source"))


def test_a_config_that_hides_act_order_is_not_believed(source: Path, tmp_path: Path) -> None:
    """`desc_act: false` with a g_idx out of order: packed as the config says, every weight would get a wrong scale."""
    entry = moeq.open(source).source.tensors["model.layers.1.mlp.experts.2.down_proj.g_idx"]
    order = torch.arange(128, dtype=torch.int32) // 32
    with (source / entry.file).open("r+b") as file:
        file.seek(entry.start)
        file.write(order.flip(0).numpy().tobytes())
    with pytest.raises(MoeqError, match=r"layer 1 expert 2 w2: .* the data say .*act-order") as caught:
        convert(source, tmp_path / "out", A100)
    assert caught.value.exit_code == ExitCode.SOURCE
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_nested_quantisation_config(source: Path, tmp_path: Path) -> None:
    """Multimodal families keep it in the language model's sub-config; no copy of it may outlive the conversion."""
    config = json.loads((source / "config.json").read_text())
    original = config.pop("quantization_config")
    nested = {"model_type": "wrapper", "architectures": ["Wrapper"]}
    (source / "config.json").write_text(
        json.dumps({**nested, "text_config": {**config, "quantization_config": original}})
    )
    convert(source, tmp_path / "out", A100)
    result = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in result["text_config"]
    assert result["quantization_config"]["quant_method"] == "moeq"
    assert result["quantization_config"]["original"] == original
    assert verify(tmp_path / "out", source).ok
    restore(tmp_path / "out", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
