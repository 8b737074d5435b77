"""Commands that are shown to be typed: the flags are those that ranks, types and variables need, and no others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.commands import convert_command, next_command, serve_converted
from moeq.pipeline.plan.decide import answer
from moeq.pipeline.plan.options import ConvertOptions, Question

ALL = ["vllm", "sglang", "transformers", "load_experts"]
VLLM, SGLANG = "vllm serve DST", "python -m sglang.launch_server --model-path DST"


def on(**fields: Any) -> Deployment:
    return Deployment(gpu=parse_gpu("A100"), **fields)


@pytest.mark.parametrize(
    ("deployment", "dtype", "loaders", "command"),
    [
        (on(), "bfloat16", ALL, VLLM),
        (on(), "float16", ALL, f"{VLLM} --dtype bfloat16"),
        (on(dtype="fp16"), "float16", ALL, VLLM),
        (on(tp=2), "bfloat16", ALL, f"{VLLM} --tensor-parallel-size 2"),
        (on(ep=2), "bfloat16", ALL, f"{VLLM} --tensor-parallel-size 2 --enable-expert-parallel"),
        (
            on(ep=2, eplb=True),
            "bfloat16",
            ALL,
            f"{VLLM} --tensor-parallel-size 2 --enable-expert-parallel --enable-eplb",
        ),
        (
            on(ep=4, pcp=2, eplb=True, redundant_experts=8),
            "bfloat16",
            ALL,
            f"{VLLM} --tensor-parallel-size 2 --prefill-context-parallel-size 2 --enable-expert-parallel --enable-eplb"
            " --eplb-config.num_redundant_experts 8",
        ),
        (on(ep=4, dp=4), "bfloat16", ALL, f"{VLLM} --data-parallel-size 4 --enable-expert-parallel"),
        (
            on(ep=4, dp=2),
            "bfloat16",
            ALL,
            f"{VLLM} --tensor-parallel-size 2 --data-parallel-size 2 --enable-expert-parallel",
        ),
        (on(engine="sglang"), "bfloat16", ALL, SGLANG),
        (on(engine="sglang", tp=2), "bfloat16", ALL, f"{SGLANG} --tp-size 2"),
        (on(engine="sglang", ep=4), "bfloat16", ALL, f"{SGLANG} --tp-size 4 --ep-size 4"),
        (on(engine="sglang"), "bfloat16", ["vllm"], VLLM),
        (on(), "bfloat16", ["sglang"], SGLANG),
        (on(env=(("A", "x y"),)), "bfloat16", ALL, f"A='x y' {VLLM}"),
        (on(), "bfloat16", ALL[2:], "`import moeq.engines.transformers` and from_pretrained('DST')"),
        (on(), "bfloat16", ["load_experts"], "moeq.load_experts('DST', layer)"),
        (on(), "bfloat16", [], None),
    ],
)
def test_serving_a_conversion(deployment: Deployment, dtype: str, loaders: list[str], command: str | None) -> None:
    assert serve_converted("DST", dtype, deployment, loaders) == command


@pytest.mark.parametrize(
    ("question", "flags"),
    [
        (Question(on()), "--gpu A100"),
        (Question(on(tp=2, dtype="fp16")), "--gpu A100 --tp 2 --dtype fp16"),
        (Question(on(ep=2, dp=2, engine="moeq")), "--gpu A100 --ep 2 --dp 2 --engine moeq"),
        (Question(on(backend="marlin"), ConvertOptions(layout="marlin-wna16/1")),
         "--gpu A100 --backend marlin --layout marlin-wna16/1"),
    ],
)  # fmt: skip
def test_converting(question: Question, flags: str, checkpoints: Path) -> None:
    found = answer(moeq.open(checkpoints / "gptq-int4-g32-qwen3moe"), question)
    assert convert_command("SRC", found) == f"moeq convert SRC DST {flags}"


@pytest.mark.parametrize(("env", "start"), [((), "vllm serve"), ((("A", "1"),), "A=1 vllm serve")])
def test_converting_and_then_serving_is_one_line(env: tuple[Any, ...], start: str, checkpoints: Path) -> None:
    checkpoint = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe")
    found = answer(checkpoint, Question(on(env=env)))
    assert next_command("SRC", checkpoint, found) == f"moeq convert SRC DST --gpu A100 && {start} DST"
