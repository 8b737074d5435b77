"""Ranks: context and sequence parallelism, load balancing with replicas, and more ranks than experts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from oracle.asking import POLICY, ask, gptq, gpu
from oracle.examples import scheme

from moeq.oracle.engines import moeq as builtin_engine
from moeq.oracle.engines.moeq import builtin_sizes
from moeq.oracle.engines.vllm.outcome import Outcome, resolve
from moeq.oracle.engines.vllm.policy import EnginePolicy, load_policy
from moeq.oracle.records import MoeShape, Sizes

SHAPE = MoeShape(4096, 1408, 64, 8, model_type="qwen3_moe")
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}


def outcome(
    name: str = "H100", shape: MoeShape = SHAPE, config: Any = None, policy: EnginePolicy = POLICY, **on: Any
) -> Outcome:
    return resolve(policy, gptq() if config is None else config, shape, gpu(name, **on))


def failed(found: Outcome) -> dict[str, str]:
    return {gate.code: f"{gate.text}; {gate.remedy}" for gate in found.gates if not gate.passed}


def test_context_parallel_ranks_share_experts_as_data_parallel_ones_do() -> None:
    assert outcome(pcp=2, tp=2).case.moe_tp == 4
    spread = outcome(pcp=2, tp=2, ep=4)
    assert (spread.case.local_experts, spread.case.all2all) == (16, "allgather_reducescatter")
    assert not failed(spread)
    assert "tp x dp x pcp = 2 x 1 x 2 = 4, not 2" in failed(outcome(pcp=2, tp=2, ep=2))["G5"]
    assert "ep is tp x dp = 2 x 1 = 2, not 4" in failed(outcome(tp=2, ep=4))["G5"]


@pytest.mark.parametrize(("version", "works"), [("0.29.0", False), ("0.30.0", True)])
def test_context_beside_data_parallelism(version: str, works: bool) -> None:
    found = outcome(policy=load_policy(f"vllm@{version}"), pcp=2, dp=2)
    assert ("G10" not in failed(found)) == works


def test_more_ranks_than_experts() -> None:
    text = failed(outcome(tp=8, dp=16, ep=128))["G5"]
    assert "ep 128 is more than 64 experts: 64 of 128 ranks would hold none" in text
    assert not failed(outcome("B200", config=FP8, tp=8, dp=16, ep=128, eplb=True, redundant_experts=64))


@pytest.mark.parametrize(
    ("on", "text"),
    [
        ({"tp": 4, "eplb": True}, "needs expert parallelism over more than one rank; ep 4"),
        ({"tp": 6, "ep": 6, "eplb": True}, "64 do not divide by ep 6; 2 redundant experts"),
        ({"tp": 6, "ep": 6, "eplb": True, "redundant_experts": 2}, ""),
        ({"tp": 4, "ep": 4, "redundant_experts": 4}, "4 redundant experts need expert load balancing, which is off"),
    ],
)
def test_load_balancing(on: dict[str, Any], text: str) -> None:
    found = failed(outcome("B200", config=FP8, **on))
    assert text in found["G10"] if text else not found


@pytest.mark.parametrize(("version", "works"), [("0.30.0", False), ("0.31.0", True)])
def test_load_balancing_on_xpu(version: str, works: bool) -> None:
    found = outcome("xpu", policy=load_policy(f"vllm@{version}"), config=FP8, tp=4, ep=4, eplb=True)
    assert ("G10" not in failed(found)) == works


@pytest.mark.parametrize(
    ("model", "on", "backend"),
    [
        ("qwen3_moe", {"dp": 2}, "FLASHINFER_CUTLASS"),  # tokens of a tensor-parallel rank are its own
        ("qwen3_moe", {}, "FLASHINFER_TRTLLM"),
        ("mixtral", {"dp": 2}, "FLASHINFER_TRTLLM"),
    ],
)
def test_sequence_parallelism(model: str, on: dict[str, int], backend: str) -> None:
    """Per-tensor FP8 on Blackwell: TensorRT-LLM's class that routes itself refuses split sequences."""
    shape = replace(SHAPE, model_type=model, routing="RenormalizeNaive")
    found = outcome("B200", shape, FP8, tp=2, ep=2 * on.get("dp", 1), **on)
    assert found.selection.selected is not None
    assert found.selection.selected.backend == backend


def test_replicas_count_as_experts() -> None:
    """Kernels of Triton take fewer than 1024 experts."""
    many = replace(SHAPE, num_experts=960)
    found = outcome(shape=many, tp=8, ep=8, eplb=True, redundant_experts=64, backend="triton")
    assert "1024 experts (64 redundant), at most" in str(found.selection.error)


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_lora_on_unquantised_experts_ignores_a_requested_backend(version: str) -> None:
    """A shard that TensorRT-LLM's class for adapters does not take goes to Triton, whatever is asked for."""
    shape = replace(SHAPE, intermediate_size=192, routing="Renormalize")
    found = outcome("B200", shape, {}, load_policy(f"vllm@{version}"), lora=True, backend="flashinfer_cutlass")
    assert found.selection.selected is not None
    assert found.selection.selected.backend == "TRITON"


@pytest.mark.parametrize(
    ("options", "text", "remedy"),
    [
        ({"ep": 4, "eplb": True, "redundant_experts": 3}, "67 do not divide by ep 4", "4 redundant experts"),
        ({"ep": 4, "redundant_experts": 4}, "4 redundant experts need expert load balancing", "eplb=True"),
        ({"eplb": True}, "needs expert parallelism over more than one rank", "ep above 1"),
        ({"ep": 4, "eplb": True, "redundant_experts": 4}, None, None),
    ],
    ids=str,
)
def test_moeqs_own_kernels_run_experts_that_the_engine_can_balance(options, text, remedy) -> None:
    verdict = ask(scheme("gptq", group=128), gpu("H100", engine="moeq", **options), SHAPE)
    assert verdict.ok == (text is None)
    if text is not None:
        reasons = [reason for report in verdict.candidates for reason in report.reasons if text in reason.text]
        assert len(reasons) == len(verdict.candidates)
        assert all(remedy in str(reason.remedy) for reason in reasons)


@pytest.mark.parametrize(("ep", "local"), [(1, 10), (2, 5), (3, 4), (4, 3), (10, 1)])
def test_sizes_that_moeqs_layouts_store(ep: int, local: int) -> None:
    """Padding is to what the layout needs along each axis, along k to whole groups; the fullest rank counts."""
    request: Any = SimpleNamespace(
        shape=SimpleNamespace(hidden_size=100, num_experts=10),
        intermediate=90,
        group=48,
        deployment=SimpleNamespace(ep=ep),
    )
    row: Any = SimpleNamespace(format=SimpleNamespace(k_multiple=32, n_multiple=20))
    assert builtin_sizes(request, row) == Sizes(100, 90, 160, 480, local)
    request.group = 0
    assert builtin_sizes(request, row) == Sizes(100, 90, 160, 160, local)


@pytest.mark.parametrize(
    ("ordered", "takes", "tp", "said"),
    [
        (True, True, 1, []),
        (False, False, 2, []),
        (True, True, 2, [("act-order with tp 2: any row may use any group", "ep 2")]),
        (True, False, 1, [("columns are reordered by activation order, this kernel does not permute x", None)]),
        (False, True, 1, [("only for checkpoints with act-order", None)]),
    ],
)
def test_act_order_in_moeqs_kernels(ordered: bool, takes: bool, tp: int, said: list[tuple[str, str | None]]) -> None:
    request: Any = SimpleNamespace(scheme=SimpleNamespace(act_order=ordered), tp=tp)
    row: Any = SimpleNamespace(format=SimpleNamespace(act_order=takes))
    found = list(builtin_engine._act_order(request, row))
    assert {one.code for one in found} <= {"K07_ACT_ORDER"}
    assert [(one.text, one.remedy) for one in found] == said
