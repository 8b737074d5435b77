"""Experts that moeq's kernels choose from the engine's logits: which rules they take, and that they choose the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import engine, loaded_layer, ranks_of
from vllm.config import get_current_vllm_config
from vllm.config.aux_output import AuxOutputConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.fused_moe.config import RoutingMethodType
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_bias_router import FusedTopKBiasRouter
from vllm.model_executor.layers.fused_moe.router.fused_topk_router import FusedTopKRouter
from vllm.model_executor.layers.fused_moe.router.grouped_topk_router import GroupedTopKRouter

from moeq.engines.vllm.engine_experts import VERSION
from moeq.engines.vllm.router import router_of
from moeq_kernels import Router

pytestmark = [
    pytest.mark.usefixtures("buffers"),
    pytest.mark.skipif(VERSION < (0, 33), reason="the engine chooses experts up to vLLM 0.32"),
]

INT4 = "gptq-int4-g32-qwen3moe"
BIAS = torch.tensor([0.1, -0.3, 0.6, 0.0])
#: Attributes of the engine's layers that no rule below changes.
PLAIN = {
    "renormalize": True,
    "use_grouped_topk": False,
    "num_expert_group": None,
    "topk_group": None,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "e_score_correction_bias": None,
    "custom_routing_function": None,
    "apply_router_weight_on_input": False,
}
GROUPED = {"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1}
#: Rules of models as the engine's layers hold them, and what the kernels make of them.
RULES: dict[str, tuple[dict[str, Any], Router]] = {
    "qwen3": ({}, Router(2)),
    "olmoe": ({"renormalize": False}, Router(2, renormalize=False)),
    "deepseek-v2": (
        {**GROUPED, "renormalize": False, "routed_scaling_factor": 16.0},
        Router(2, renormalize=False, scaling_factor=16.0, num_groups=2, topk_groups=1),
    ),
    "deepseek-v3": (
        {**GROUPED, "scoring_func": "sigmoid", "routed_scaling_factor": 2.5, "e_score_correction_bias": BIAS},
        Router(2, "sigmoid", True, 2.5, 2, 1, "top2"),
    ),
    "minimax-m2": (
        {"scoring_func": "sigmoid", "e_score_correction_bias": BIAS, "routed_scaling_factor": 2.0},
        Router(2, "sigmoid", True, 2.0, group_score="top2"),
    ),
    # The engine's plain routers do not apply the factor.
    "llama4-like": (
        {"scoring_func": "sigmoid", "renormalize": False, "routed_scaling_factor": 3.0},
        Router(2, "sigmoid", False),
    ),
}


def engine_router(rule: dict[str, Any]) -> Any:
    """The router that the engine's factory makes on a GPU for a rule."""
    given = {**PLAIN, **rule}
    common = {name: given[name] for name in ("renormalize", "scoring_func")}
    scaled = {name: given[name] for name in ("routed_scaling_factor", "e_score_correction_bias")}
    if given["use_grouped_topk"]:
        groups = {name: given[name] for name in ("num_expert_group", "topk_group")}
        return GroupedTopKRouter(2, 4, **groups, **common, **scaled)
    if given["e_score_correction_bias"] is not None:
        return FusedTopKBiasRouter(2, 4, **common, **scaled)
    return FusedTopKRouter(2, 4, **common)


def chosen_rule(rule: dict[str, Any], *, layer: dict[str, Any] | None = None, **record: Any) -> Router | None:
    """What the kernels take of a rule; `layer` and `record` change the engine's layer and its record."""
    parallel = SimpleNamespace(enable_eplb=False, dp_size=1, use_all2all_kernels=False)
    moe = SimpleNamespace(**{
        "require_decomposed_backend": False,
        "has_hash_routing": False,
        "is_lora_enabled": False,
        "moe_parallel_config": parallel,
        "routing_method": engine_router(rule).routing_method_type,
        **record,
    })  # fmt: skip
    attributes = {**PLAIN, **rule, "top_k": 2, "global_num_experts": 4, **(layer or {})}
    return router_of(moe, SimpleNamespace(**attributes))


def found(rule: dict[str, Any], **changes: Any) -> Router | None:
    with engine():
        return chosen_rule(rule, **changes)


@pytest.mark.parametrize("name", list(RULES))
def test_rules_of_models_are_the_kernels(name: str) -> None:
    rule, wanted = RULES[name]
    assert found(rule) == wanted


@pytest.mark.parametrize(
    "change",
    [
        {"require_decomposed_backend": True},
        {"has_hash_routing": True},
        {"is_lora_enabled": True},
        {"routing_method": RoutingMethodType.Custom},
        {"routing_method": RoutingMethodType.Simulated},
        *(
            {"moe_parallel_config": SimpleNamespace(**{
                "enable_eplb": False, "dp_size": 1, "use_all2all_kernels": False, **one
            })}
            for one in ({"enable_eplb": True}, {"dp_size": 2}, {"use_all2all_kernels": True})
        ),
        {"layer": {"custom_routing_function": print}},
        {"layer": {"apply_router_weight_on_input": True}},
        {"layer": {"scoring_func": "sigmoid"}},  # not what the record says
        {"layer": {"global_num_experts": 1}},
    ],
    ids=str,
)  # fmt: skip
def test_the_engine_chooses_where_somebody_else_needs_the_choice(change: dict[str, Any]) -> None:
    assert found({}, **change) is None


def test_groups_that_a_model_does_not_use_do_not_count() -> None:
    rule, wanted = RULES["minimax-m2"]
    assert found({**rule, "num_expert_group": 2, "topk_group": 1}) == wanted


def test_the_engine_chooses_where_it_has_a_rule_of_its_own() -> None:
    assert found({**GROUPED, "num_expert_group": 3}) is None
    assert found({**GROUPED, "num_expert_group": 4, "topk_group": 2}) is None
    assert found({"scoring_func": "softmax", "e_score_correction_bias": BIAS}) is None  # `Unspecified` in the engine


def test_the_engine_chooses_where_requests_may_ask_for_the_choice() -> None:
    with engine():
        get_current_vllm_config().aux_output_config = AuxOutputConfig(enable_return_routed_experts=True)
        assert chosen_rule({}) is None


def chosen_by_engine(rule: dict[str, Any], x: torch.Tensor, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The engine's own choice in torch; rules without groups have one, since others know no scores but softmax."""
    given = {**PLAIN, **rule}
    factor = given["routed_scaling_factor"]
    if not given["use_grouped_topk"]:
        groups = {"use_grouped_topk": True, "num_expert_group": 1, "topk_group": 1}
        given |= groups
        factor = factor if given["e_score_correction_bias"] is not None else 1.0
    names = (
        "use_grouped_topk", "num_expert_group", "topk_group", "renormalize", "scoring_func", "e_score_correction_bias",
    )  # fmt: skip
    router = CPURouter(2, 4, **{name: given[name] for name in names}, routed_scaling_factor=factor)
    return router.select_experts(x, logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", list(RULES))
def test_a_layer_computes_the_engines_choice(name: str, dtype: torch.dtype, folders: Any) -> None:
    rule = RULES[name][0]
    kind = engine_router(rule).routing_method_type
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(6, 256, generator=generator).to(torch.bfloat16)
    logits = (torch.randn(6, 4, generator=generator) * 2).to(dtype)
    layer = loaded_layer(folders[INT4], kernels="moeq", routing=rule, routing_method=kind)
    assert layer.quant_method.is_monolithic
    with engine():
        result = layer.forward_monolithic(x, logits)
    other = loaded_layer(folders[INT4], kernels="moeq")
    assert not other.quant_method.is_monolithic
    with engine():
        wanted = other.forward_modular(x, *chosen_by_engine(rule, x, logits.float()))
    assert float((result.float() - wanted.float()).norm() / wanted.float().norm()) < 0.004


def test_rows_that_fill_a_graph_take_no_expert(folders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = loaded_layer(folders[INT4], kernels="moeq", routing_method=RoutingMethodType.RenormalizeNaive)
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits = torch.randn(4, 4, generator=torch.Generator().manual_seed(2))
    padding = torch.tensor([False, False, True, True, True])  # the engine's buffer is longer than the call
    with engine():
        whole = layer.forward_monolithic(x, logits)
        with set_forward_context(None, get_current_vllm_config(), num_tokens=4):
            unpadded = layer.forward_monolithic(x, logits)
        with set_forward_context(None, get_current_vllm_config(), num_tokens=4, is_padding=padding):
            padded = layer.forward_monolithic(x, logits)
            monkeypatch.setenv("VLLM_MOE_SKIP_PADDING", "0")
            told_to_compute = layer.forward_monolithic(x, logits)
    assert torch.equal(unpadded, whole)
    assert torch.equal(padded[:2], whole[:2])
    assert not padded[2:].any()
    assert torch.equal(told_to_compute, whole)


def test_experts_of_other_ranks_are_left_out(folders: Any) -> None:
    options = {"kernels": "moeq", "routing_method": RoutingMethodType.RenormalizeNaive}
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    whole = loaded_layer(folders[INT4], **options)
    with engine():
        total = whole.forward_monolithic(x, logits).float()
    parts = []
    for rank in range(2):
        layer = loaded_layer(folders[INT4], ep=(rank, 2), **options)
        with engine(ep=2):
            parts.append(layer.forward_monolithic(x, logits).float())
    assert float((sum(parts) - total).norm() / total.norm()) < 0.004


def test_a_record_of_a_layer_has_the_fields_that_are_asked(folders: Any) -> None:
    moe, _ = ranks_of(folders[INT4])
    for name in ("require_decomposed_backend", "has_hash_routing", "is_lora_enabled", "routing_method"):
        assert hasattr(moe, name)
