"""vLLM's own argument parser and model config accept the line that moeq says to type, and need no more than it has."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from engines.vllm_engine import vllm
from vllm.config import ModelConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.utils.argparse_utils import FlexibleArgumentParser

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.model.converted import ConvertedCheckpoint
from moeq.pipeline.plan.commands import next_command, next_of_converted, serve_source
from moeq.pipeline.plan.decide import advised
from moeq.pipeline.plan.options import Question

#: Deployments, and the fields of the engine's arguments that they have to give.
DEPLOYMENTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {"tensor_parallel_size": 1, "enable_expert_parallel": False}),
    "tp": ({"tp": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": False}),
    "ep": ({"ep": 2}, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "dp": ({"tp": 2, "ep": 4, "dp": 2}, {"tensor_parallel_size": 2, "data_parallel_size": 2}),
    "fp16": ({"dtype": "fp16"}, {"dtype": "float16"}),
}

NEEDED = ("--tensor-parallel-size", "--data-parallel-size", "--enable-expert-parallel", "--dtype")


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parser's defaults hold a device, and the engine finds none here."""
    monkeypatch.setattr(type(current_platform), "device_type", "cpu")


def parsed(command: str) -> Any:
    """What the engine's parser makes of `vllm serve MODEL ...`."""
    program, serve, model, *words = shlex.split(command)
    assert (program, serve) == ("vllm", "serve")
    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    found = parser.parse_args(["--model", model, *words])
    return found, words


@pytest.mark.parametrize("name", list(DEPLOYMENTS))
def test_the_engine_takes_the_line(name, checkpoints, tmp_path, monkeypatch) -> None:
    options, wanted = DEPLOYMENTS[name]
    where = Deployment(gpu=parse_gpu("H100"), **options)
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    moeq.convert(source, tmp_path / "DST", where)
    checkpoint = moeq.open(tmp_path / "DST")
    assert isinstance(checkpoint, ConvertedCheckpoint)
    line = next_of_converted(str(tmp_path / "DST"), checkpoint)
    found, words = parsed(line)
    assert {field: getattr(found, field) for field in wanted} == wanted
    assert all(
        word.startswith(("--tensor", "--data", "--enable-expert", "--dtype")) or word.isalnum() for word in words
    )
    # The dtype is the deployment's, with the option or by the config alone.
    model = ModelConfig(model=found.model, skip_tokenizer_init=True, dtype=found.dtype)
    assert model.dtype is {"bf16": torch.bfloat16, "fp16": torch.float16}[where.dtype]
    assert model.quantization == "moeq"
    answer = advised(moeq.open(source), Question(where))
    monkeypatch.chdir(tmp_path)
    following = next_command(str(source), moeq.open(source), answer)
    assert following is not None
    assert following.partition(" && ")[2] == line.replace(str(tmp_path / "DST"), "DST")


def test_a_source_is_served_with_what_was_asked_for(checkpoints: Path) -> None:
    source = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    answer = advised(source, Question(Deployment(gpu=parse_gpu("H100"), backend="marlin")))
    command = serve_source(source.info.name, source, answer)
    assert command is not None
    assert parsed(command)[0].moe_backend == "marlin"


assert vllm  # the module is skipped without the engine
