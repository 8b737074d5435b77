"""Which tensor-parallel degrees a checkpoint can be converted for, and why not for others."""

from __future__ import annotations

from pathlib import Path

import pytest

import moeq
from moeq.deploy.deployment import Deployment
from moeq.deploy.gpus import parse_gpu
from moeq.pipeline.plan.decide import Degree, degrees


def heads(tp: int) -> str:
    return f"2 attention heads are not divisible by tp {tp} (2 % {tp} = 2)"


def groups(tp: int) -> str:
    return f"128 / {tp} = {128 // tp} per rank cuts groups of 32 ({128 // tp} % 32 = {128 // tp})"


def blocks(tp: int) -> str:
    return f"128 / 32 = 4 blocks leave the last of {tp} ranks without work"


@pytest.mark.parametrize(
    ("name", "layouts", "others"),
    [
        (
            "gptq-int4-g32-qwen3moe",
            ("marlin-wna16/1", "marlin-wna16/1"),
            ((32, heads(4)), (None, groups(8)), (None, groups(16))),
        ),
        (
            "gptq-int4-g128-mixtral",
            ("marlin-wna16/1", "triton-wna16/1"),
            ((32, heads(4)), (16, heads(8)), (8, heads(16))),
        ),
        (
            "mxfp4-gptoss",
            ("moeq-mxfp4/1", "moeq-mxfp4/1"),
            ((32, heads(4)), (None, blocks(8)), (None, blocks(16))),
        ),
    ],
)
def test_every_degree_has_its_layout_or_its_reason(
    name: str, layouts: tuple[str, str], others: tuple[tuple[int | None, str], ...], checkpoints: Path
) -> None:
    checkpoint = moeq.open(checkpoints / name)
    refused = [Degree(tp, size, False, None, why) for tp, (size, why) in zip((4, 8, 16), others, strict=True)]
    assert degrees(checkpoint, None) == (Degree(1, 128, True), Degree(2, 64, True), *refused)
    taken = [Degree(tp, 128 // tp, True, layout) for tp, layout in zip((1, 2), layouts, strict=True)]
    assert degrees(checkpoint, Deployment(parse_gpu("H100"), tp=8)) == (*taken, *refused)
    assert degrees(checkpoint, Deployment(parse_gpu("H100"), ep=4, dp=4), (2,)) == (taken[1],)
