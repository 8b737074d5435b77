"""What stands in for parts that older releases of vLLM lack, inside this one."""

from __future__ import annotations

import inspect
from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import loaded_layer
from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts
from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts as real_fused_experts
from vllm.model_executor.layers.fused_moe.oracle import int8, int_wna16
from vllm.model_executor.layers.quantization.utils import quant_utils

from moeq.engines.vllm import backends, older_versions
from moeq.engines.vllm.older_versions import (
    AskableWNA16Experts,
    FunctionalExperts,
    FunctionalKernel,
    act_order_arguments,
    triton_kernel,
)
from moeq.errors import MoeqError
from moeq.layouts.registry import layout_class

TRITON = "gptq-int4-g128-mixtral"


@pytest.fixture
def layer(folders, gpu, buffers) -> Any:
    """A layer that the engine's own Triton kernels run."""
    found = loaded_layer(folders[TRITON], kernels="engine")
    assert found.quant_method.entry.layout == "triton-wna16/1"
    return found


def made(layer: Any, moe: Any = None) -> Any:
    method = layer.quant_method
    return triton_kernel(
        moe_quant_config=method.moe_quant_config,
        moe_config=moe or method.moe,
        experts_cls=AskableWNA16Experts,
        routing_tables=layer._expert_routing_tables(),
    )


def test_the_function_gets_the_layers_tensors_and_tokens(layer, monkeypatch) -> None:
    """It runs kernels for a GPU, which are not here: what it is called with is compared."""
    called: dict[str, Any] = {}

    def fused_experts(*given: Any, **named: Any) -> str:
        called.update(named, given=given)
        return "sums"

    monkeypatch.setattr(older_versions, "fused_experts", fused_experts)
    method, kernel = layer.quant_method, made(layer)
    assert isinstance(kernel, FunctionalKernel)
    assert not kernel.is_monolithic
    assert type(kernel.fused_experts) is AskableWNA16Experts
    assert set(inspect.signature(real_fused_experts).parameters) >= {
        *("hidden_states", "w1", "w2", "topk_weights", "topk_ids", "activation", "apply_router_weight_on_input"),
        *("global_num_experts", "expert_map", "quant_config"),
    }
    method.moe_kernel = kernel
    x, weights, ids = torch.ones(3, layer.moe_config.hidden_dim), torch.ones(3, 2), torch.zeros(3, 2)
    assert method.apply(layer, x, weights, ids, None, None) == "sums"
    assert [id(one) for one in called.pop("given")] == [id(x), id(layer.w13_weight), id(layer.w2_weight)]
    assert called.pop("quant_config") is method.moe_quant_config
    assert called.pop("topk_weights") is weights
    assert called.pop("topk_ids") is ids
    assert called == {
        "activation": layer.activation,
        "apply_router_weight_on_input": layer.apply_router_weight_on_input,
        "global_num_experts": 4,
        "expert_map": None,
    }


def test_tokens_of_other_ranks_are_refused(layer) -> None:
    moe = SimpleNamespace(moe_parallel_config=SimpleNamespace(use_all2all_kernels=True))
    with pytest.raises(MoeqError, match="without its all-to-all kernels") as refused:
        made(layer, moe)
    assert refused.value.code == "answer.no-backend"
    assert "start without data parallelism" in (refused.value.hint or "")


def test_what_the_classes_say_they_support() -> None:
    scheme = AskableWNA16Experts._supports_quant_scheme
    for key in (quant_utils.kInt4Static, quant_utils.kInt4StaticAsym, quant_utils.kInt8Static):
        assert scheme(key, None) is True
        assert scheme(key, quant_utils.kInt8DynamicTokenSym) is False
    assert scheme(quant_utils.kFp8StaticTensorSym, None) is False
    assert scheme(None, None) is False
    assert FunctionalExperts.supports_lora() is AskableWNA16Experts.supports_lora() is False
    assert AskableWNA16Experts._supports_activation is TritonExperts._supports_activation


@pytest.mark.parametrize(
    ("version", "functional"),
    [((0, 26, 0), True), ((0, 27, 1), True), ((0, 28, 0), False), ((0, 28), False), ((1, 0), False)],
)
def test_which_versions_run_w8a8_through_the_function(version: tuple[int, ...], functional: bool, monkeypatch) -> None:
    monkeypatch.setattr(backends, "VERSION", version)
    row = backends._int8(layout_class("int8-w8a8/1").vllm_readers()[0])
    assert (row.classes() == [FunctionalExperts]) is functional
    assert (row.kernel is triton_kernel) is functional
    if not functional:
        assert row.classes() == int8.backend_to_kernel_cls(int8.Int8MoeBackend.TRITON)


def test_where_the_oracle_does_not_know_tritons_experts(monkeypatch) -> None:
    """As in 0.26.0: no function of the engine's builds their kernel."""
    reader = layout_class("triton-wna16/1").vllm_readers()[0]
    here = backends._triton_wna16(reader)
    assert here.kernel is not triton_kernel
    assert here.quant_config is backends._triton_config
    monkeypatch.setattr(int_wna16, "WNA16MoEBackend", Enum("WNA16MoEBackend", ["MARLIN"]))
    before = backends._triton_wna16(reader)
    assert before.classes() == [AskableWNA16Experts]
    assert before.kernel is triton_kernel
    assert before.quant_config is backends._triton_config
    assert before.title == here.title == reader.backend


def test_act_order_is_the_kernels_order_of_columns() -> None:
    row = backends._act_order(layout_class("marlin-act-order/1").vllm_readers()[0])
    assert row.kernel_arguments is act_order_arguments
    order, index = torch.tensor([[1, 0, 3, 2]]).int(), torch.tensor([[0, 0, 1, 1]]).int()
    tensors = {
        "w13_scale": torch.ones(1, 2, 8), "w13_group_index": index, "w13_permutation": order,
        "w2_scale": torch.ones(1, 1, 8), "w2_group_index": index, "w2_permutation": order,
    }  # fmt: skip
    found = act_order_arguments(tensors)
    assert found.pop("is_k_full") is True
    assert found.pop("w13_g_idx") is index
    assert found.pop("w13_g_idx_sort_indices") is order
    assert found == {"w2_g_idx": None, "w2_g_idx_sort_indices": None}, "the kernel refuses an order for one group"


@pytest.mark.parametrize(
    ("part", "values"),
    [
        ("permutation", [1, 0, 3, 3]),
        ("permutation", [1, 0, 3, 4]),
        ("permutation", [1, 0, 2, -1]),
        ("group_index", [0, 0, 1, 2]),
        ("group_index", [0, 0, 1, -1]),
    ],
)
def test_an_order_that_the_kernel_would_follow_out_of_memory(part: str, values: list[int]) -> None:
    tensors = {
        "w13_scale": torch.ones(1, 2, 8),
        "w13_group_index": torch.tensor([[0, 0, 1, 1]]).int(),
        "w13_permutation": torch.tensor([[1, 0, 3, 2]]).int(),
    }
    with pytest.raises(MoeqError, match=f"w13_{part}"):
        act_order_arguments(tensors | {f"w13_{part}": torch.tensor([values]).int()})
