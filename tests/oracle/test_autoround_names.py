"""Widths, data types, packings and backends of AutoRound that each version of vLLM lists."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from moeq.oracle.engines.vllm.configs import auto_round
from moeq.oracle.engines.vllm.configs.question import ConfigRefusal
from moeq.oracle.engines.vllm.policy import load_policy


def said(version: str, bits: int, type_: str, packing: str, **config: str) -> str | None:
    """The refusal, or None."""
    question: Any = SimpleNamespace(policy=load_policy(f"vllm@{version}"), config=config)
    try:
        auto_round._check_names(question, bits, type_, packing)
    except ConfigRefusal as refused:
        return refused.text
    return None


@pytest.mark.parametrize(
    ("version", "widths", "types", "packings"),
    [
        ("0.26.0", "2, 3, 4, 8", "int", 2),
        ("0.27.1", "2, 3, 4, 8", "int and mx_fp", 3),
        ("0.29.0", "2, 3, 4, 8", "int and mx_fp and fp", 4),
        ("0.30.0", "2, 3, 4, 5, 6, 7, 8", "int and mx_fp and fp", 4),
    ],
)
def test_names(version: str, widths: str, types: str, packings: int) -> None:
    known = [auto_round._GPTQ, auto_round._AWQ, auto_round._MX, auto_round._FP8][:packings]
    for packing in known:
        assert said(version, 4, "int", packing) is None
    assert said(version, 4, "int", "x") == f"packing_format x is not one of {', '.join(known)}"
    for bits in (1, 9):
        expected = f"AutoRound with {bits} bits is not supported, only {widths}"
        assert said(version, bits, "int", auto_round._GPTQ) == expected
    assert all(said(version, int(bits), "int", auto_round._GPTQ) is None for bits in widths.split(", "))
    refusal = f"AutoRound data_type nv_fp is not supported, only {types}"
    assert said(version, 4, "nv_fp", auto_round._GPTQ) == refusal
    assert (said(version, 4, "mx_fp4e2m1", auto_round._GPTQ) is None) is ("mx_fp" in types)
    for name in types.split(" and "):
        assert said(version, 8, name, auto_round._GPTQ) is None
    for key in ("backend", "vllm_backend"):
        assert said(version, 4, "int", auto_round._GPTQ, **{key: "auto"}) is None
        refusal = said(version, 4, "int", auto_round._GPTQ, **{key: "other"}) or ""
        assert refusal.startswith("AutoRound backend other is not one of ")
