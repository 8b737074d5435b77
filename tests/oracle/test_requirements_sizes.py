"""Requirements on sizes: what backends round up, pad and halve."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from oracle.asking import POLICY, ask, codes, gpu
from oracle.examples import GPT_OSS, SHAPE, scheme

from moeq.oracle.engines.vllm.sizes import marlin_padded, round_up, shrunk_group, sizes_for
from moeq.oracle.records import CandidateReport


# Executed values for gpt-oss, hidden = intermediate = 2880.
@pytest.mark.parametrize(
    ("device", "extra", "expected"),
    [
        ("A100", {}, (3072, 2944)),
        ("A100", {"tp": 8}, (3072, 384)),
        ("H100", {}, (2880, 2880)),
        ("H100", {"packages": {"triton_kernels": False}}, (2944, 2944)),
        ("B200", {}, (3072, 2944)),
        ("MI300X", {}, (3072, 3072)),
        ("CPU", {}, (2880, 2880)),
    ],
)
def test_r12_round_up_is_reported(device: str, extra: dict[str, Any], expected: tuple[int, int]) -> None:
    verdict = ask(scheme("mxfp4", "e2m1", 32, scale="e8m0"), gpu(device, **extra), GPT_OSS)
    assert verdict.sizes is not None
    assert (verdict.sizes.padded_hidden, verdict.sizes.padded_intermediate) == expected
    assert any(str(expected[0]) in gate.text for gate in verdict.gates if gate.code == "G5")


@pytest.mark.parametrize(
    ("inner", "group", "padded"),
    [(96, 32, 128), (352, 32, 384), (704, 64, 704), (192, 64, 192), (360, -1, 384), (160, 32, 192)],
)
def test_r12_marlin_padding(inner: int, group: int, padded: int) -> None:
    assert marlin_padded(inner, group) == padded
    assert round_up(inner, 64) <= padded


def test_r12_round_up_depends_on_nothing_else() -> None:
    from moeq.oracle.engines.vllm.case import Case, Method

    method = Method("GptOssMxfp4MoEMethod", "mxfp4", "mxfp4", "kMxfp4Static")
    for name in ("H100", "XPU", "MI300X"):
        one = Case(POLICY, gpu(name), GPT_OSS, method)
        other = Case(POLICY, gpu(name, lora=True, eplb=True), replace(GPT_OSS, num_experts=8), method)
        for backend in POLICY.families["mxfp4"].backends:
            row = CandidateReport(backend, "", None, None, True)
            found = [
                (sizes.padded_hidden, sizes.padded_intermediate)
                for sizes in (sizes_for(one, row), sizes_for(other, row))
            ]
            assert found[0] == found[1]


def test_r35_interleaved_padding() -> None:
    shape = replace(SHAPE, activation="swigluoai")
    assert "padding-breaks-interleaved-halves" in codes(ask(scheme("gptq", group=32), gpu("A100", tp=8), shape))
    assert "padding-breaks-interleaved-halves" not in codes(ask(scheme("gptq", group=32), gpu("A100"), shape))


def test_r36_padding_without_gate() -> None:
    shape = replace(SHAPE, activation="relu2_no_mul", gated=False)
    assert "padding-breaks-non-gated" in codes(ask(scheme("gptq", group=32), gpu("A100", tp=8), shape))
    assert "padding-breaks-non-gated" not in codes(ask(scheme("gptq", group=32), gpu("A100", tp=8)))


def test_group_halving() -> None:
    assert [shrunk_group(4096, inner, 128) for inner in (192, 352, 360)] == [64, 32, 8]
