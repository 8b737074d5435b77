"""Advice about a checkpoint on a deployment: memory, the way back to the source, and what a GPU has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.decide import advised
from moeq.pipeline.plan.options import Question
from moeq.report.advice import advice
from moeq.report.text import human_bytes


def given(source: Path, gpu: str, **deployment: Any) -> dict[str, Any]:
    checkpoint = moeq.open(source)
    found = advised(checkpoint, Question(Deployment(parse_gpu(gpu), **deployment)))
    return advice("src", checkpoint, found)


@pytest.mark.parametrize(("gpu", "gib"), [("A100", 80), ("sm80", 0)])
def test_memory(gpu: str, gib: int, checkpoints: Path) -> None:
    source = checkpoints / "gptq-int4-g32-qwen3moe"
    facts = given(source, gpu, tp=2)
    memory, lines = facts["memory"], [text for _, text in facts["lines"]]
    assert (memory["rest_per_rank"], memory["gpu_bytes"]) == (moeq.open(source).info.other_bytes // 2, gib << 30)
    both = human_bytes(memory["experts_per_rank"] + memory["rest_per_rank"])
    parts = [human_bytes(memory[name]) for name in ("experts_per_rank", "rest_per_rank")]
    assert any(f"{both} of weights per rank (experts {parts[0]}, the rest {parts[1]})" in text for text in lines)
    more = f"{human_bytes(memory['engine_repack_bytes'])} more while the engine repacks the source at load"
    assert any(text.startswith(more) for text in lines)
    assert ("the GPU has 80.0 GiB" in lines) is (gib == 80)


def test_what_cannot_be_converted(checkpoints: Path) -> None:
    facts = given(checkpoints / "ct-fp8-block-qwen3moe", "H100", tp=2)
    assert [facts[name] for name in ("converts", "layout", "convert", "memory", "loads_in")] == [
        False,
        None,
        None,
        None,
        [],
    ]
    facts = given(checkpoints / "gptq-int4-g32-qwen3moe", "A100")
    assert facts["converts"]
    assert facts["convert"].startswith("moeq convert src")
    assert ("or", f"{facts['serve']} (the source in the engine's kernels)") in facts["lines"]
    assert ("next", facts["next"]) in facts["lines"]


def test_advisories_say_what_helps_and_how_to_check(checkpoints: Path) -> None:
    facts = given(checkpoints / "awq-int4-g32-qwen3moe", "sm120")
    row = facts["advisories"][0]
    assert (row["code"], row["issue"]) == ("new-architecture", "vllm-project/vllm#41477")
    text = (
        f"new-architecture (vllm-project/vllm#41477), {row['versions']}: {row['symptom']}; "
        f"what helps: {row['workaround']}; to check: {row['check']}"
    )
    assert ("advisory", text) in facts["lines"]
    facts = given(checkpoints / "ct-fp8-block-qwen3moe", "A100")
    assert [text.split(",")[0] for name, text in facts["lines"] if name == "advisory"] == [
        "activation-precision-differs"
    ]
