"""moeq's kernels as expert classes of vLLM: what they answer the engine, and what they are prepared with."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import engine, experts_layer, loaded_layer, ranks_of
from vllm.config.offload import OffloadConfig, PrefetchOffloadConfig
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceDelegate,
    TopKWeightAndReduceNoOP,
)
from vllm.platforms import current_platform

from moeq.engines.vllm import own_experts
from moeq.engines.vllm.own_experts import MoeqBatchedExperts, MoeqExperts
from moeq.errors import MoeqError
from moeq_kernels import gpu as kernel_gpus
from moeq_kernels import interpreter
from moeq_kernels.lora import MAX_RANK

NAME = "gptq-int4-g32-qwen3moe"
BATCHES = {"use_ep": True, "dp_size": 2, "all2all_backend": "deepep_low_latency"}


@pytest.fixture
def method(folders: dict[str, Path]) -> Any:
    return experts_layer(folders[NAME], kernels="moeq").quant_method


class TestSlowReason:
    @pytest.mark.parametrize("name", ["H200", "A100"])
    def test_the_kernels_of_a_known_gpu_say_why(self, name: str, method: Any, monkeypatch) -> None:
        moe, packed = copy.copy(method.moe), method.packed(method.empty(torch.bfloat16, "meta"))
        moe.device = "cuda"
        monkeypatch.setattr(kernel_gpus, "gpu_of", lambda device: kernel_gpus.GPUS[name])
        found = own_experts.slow_reason(moe, packed)
        assert found == own_experts._prepare(moe, packed, None, name).reason
        assert (found is None) is (name == "H200")

    def test_batches_were_not_measured(self, folders: dict[str, Path], monkeypatch) -> None:
        moe = copy.copy(ranks_of(folders[NAME], parallel=BATCHES)[0])
        moe.device = "cuda"
        monkeypatch.setattr(kernel_gpus, "gpu_of", lambda device: kernel_gpus.H200)
        said = "kernels for this GPU were not measured with batches by expert"
        assert own_experts.slow_reason(moe, None) == said


class TestClasses:
    @pytest.mark.parametrize(
        ("batched", "exchanges", "gathers", "rows", "batches"),
        [
            (False, False, False, True, False),
            (False, True, False, False, False),
            (False, True, True, True, False),
            (True, True, False, False, True),
        ],
    )
    def test_how_tokens_come(self, batched: bool, exchanges: bool, gathers: bool, rows: bool, batches: bool) -> None:
        parallel = SimpleNamespace(
            use_batched_activation_format=batched, use_all2all_kernels=exchanges, use_ag_rs_all2all_kernels=gathers
        )
        assert MoeqExperts._supports_parallel_config(parallel) is rows
        assert MoeqBatchedExperts._supports_parallel_config(parallel) is batches
        kind = own_experts.experts_class(SimpleNamespace(moe_parallel_config=parallel))
        assert kind is (MoeqBatchedExperts if batched else MoeqExperts)
        assert MoeqExperts.activation_format() is FusedMoEActivationFormat.Standard
        assert MoeqBatchedExperts.activation_format() is FusedMoEActivationFormat.BatchedExperts

    def test_they_run_on_gpus_and_in_the_interpreter(self, monkeypatch) -> None:
        for alike, interpreted in ((True, True), (True, False), (False, True), (False, False)):
            monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self, it=alike: it)
            monkeypatch.setattr(interpreter, "active", lambda it=interpreted: it)
            assert MoeqExperts._supports_current_device() is (alike or interpreted)

    def test_who_weights_and_sums(self) -> None:
        assert isinstance(MoeqExperts.finalize_weight_and_reduce_impl(None), TopKWeightAndReduceNoOP)
        assert isinstance(MoeqBatchedExperts.finalize_weight_and_reduce_impl(None), TopKWeightAndReduceDelegate)

    def test_sizes_of_buffers(self) -> None:
        prepared = SimpleNamespace(problem=SimpleNamespace(experts=4, intermediate=96))
        moe = SimpleNamespace(in_dtype=torch.bfloat16)
        self_: Any = SimpleNamespace(prepared=prepared, moe_config=moe, workspace_bytes=1001)
        assert MoeqExperts.workspace_shapes(self_, 5, 1, 256, 2, 8, 4) == ((0,), (501,), (5, 256))
        assert MoeqBatchedExperts.workspace_shapes(self_, 5, 1, 256, 2, 8, 4) == ((0,), (0,), (4, 5, 256))
        a1, ids = torch.empty(5, 256), torch.empty(5, 2)
        assert MoeqExperts.moe_problem_size(self_, a1, a1, a1, ids) == (4, 5, 96, 256, 2)
        batch = torch.empty(4, 7, 256)
        assert MoeqBatchedExperts.moe_problem_size(self_, batch, a1, a1, ids) == (4, 7, 96, 256, 2)

    def test_constants_of_the_engines_records(self) -> None:
        moe = SimpleNamespace(swiglu_alpha=1.5, swiglu_beta=0.5, swiglu_limit=9.0)
        constants = {"gemm1_alpha": 1.5, "gemm1_beta": 0.5, "gemm1_clamp_limit": 9.0}
        assert own_experts.clamp_arguments(moe) == constants


class TestKernel:
    def test_layers_run_alone_where_no_tokens_are_exchanged(self, folders: dict[str, Path], buffers: Any) -> None:
        kernel = loaded_layer(folders[NAME], kernels="moeq").quant_method.moe_kernel
        assert own_experts.runs_alone(kernel) is True
        other: Any = SimpleNamespace(prepare_finalize=object())
        assert own_experts.runs_alone(other) is False

    @pytest.mark.parametrize("wait", [True, False])
    def test_whether_the_engine_waits_for_compiling(self, wait: bool, folders, method, monkeypatch) -> None:
        waited: list[bool] = []
        monkeypatch.setattr(own_experts, "make_ready", lambda prepared, log, wait: waited.append(wait))
        layer = SimpleNamespace(_expert_routing_tables=lambda: None, expert_map=None, global_num_experts=4)
        packed = method.packed(method.empty(torch.bfloat16))
        with engine():
            made = own_experts.own_kernel(method.moe, packed, layer, wait=wait)
        assert type(made.fused_experts) is MoeqExperts
        own_experts.compile_early(method.moe, packed, layer)
        assert waited == [wait, False]
        batched = ranks_of(folders[NAME], parallel=BATCHES)[0]
        own_experts.compile_early(batched, packed, layer)
        assert waited == [wait, False], "the profiling run of the engine compiles for batches"

    def test_the_number_of_experts_of_all_ranks(self) -> None:
        assert own_experts._experts_of_all_ranks(SimpleNamespace(expert_map=None, global_num_experts=8)) is None
        ranks = SimpleNamespace(expert_map=torch.zeros(8), global_num_experts=8)
        assert own_experts._experts_of_all_ranks(ranks) == 8

    def test_batches_are_as_long_as_all_ranks_fill_them(self, method: Any, monkeypatch) -> None:
        given: dict[str, Any] = {}

        def batched_layer(x: Any, packed: Any, epilogue: Any, each: int, *, rows: int) -> str:
            given.update(x=x, epilogue=epilogue, each=each, rows=rows)
            return "prepared"

        monkeypatch.setattr(own_experts, "batched_layer", batched_layer)
        packed = method.packed(method.empty(torch.bfloat16))
        found: Any = own_experts._prepare_batches(method.moe, packed, max_num_tokens=7, num_dispatchers=3)
        assert found == "prepared"
        assert (given["each"], given["rows"]) == (11, 84), "42 choices of 4 experts, and 21 rows for each"
        assert (given["x"].shape[1], given["x"].dtype) == (256, torch.bfloat16)
        assert given["epilogue"].gated
        assert given["epilogue"].weight == ""


class TestRefusals:
    @pytest.mark.parametrize(
        ("offload", "refused"),
        [
            (OffloadConfig(), False),
            (OffloadConfig(prefetch=PrefetchOffloadConfig(offload_group_size=1)), True),
            (OffloadConfig(offload_backend="prefetch", prefetch=PrefetchOffloadConfig(offload_group_size=2)), True),
            (OffloadConfig(offload_backend="uva"), False),
        ],
    )
    def test_experts_that_the_engine_moves_away(self, offload: OffloadConfig, refused: bool, method: Any) -> None:
        with engine(offload_config=offload):
            if not refused:
                own_experts.check_own(method.moe, method.entry, method.part)
                return
            with pytest.raises(MoeqError, match="--offload-group-size") as caught:
                own_experts.check_own(method.moe, method.entry, method.part)
        assert caught.value.code == "answer.no-kernel"

    def test_what_the_class_does_not_support(self, method: Any, monkeypatch) -> None:
        monkeypatch.setattr(MoeqExperts, "_supports_activation", staticmethod(lambda activation: False))
        with engine(), pytest.raises(MoeqError, match=r"layer 1: moeq's .*activation") as caught:
            own_experts.check_own(method.moe, method.entry, method.part)
        assert caught.value.code == "answer.no-kernel"

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            ({}, None),
            ({"max_lora_rank": MAX_RANK}, None),
            ({"max_lora_rank": MAX_RANK + 1}, f"rank {MAX_RANK} at most"),
            ({"fully_sharded_loras": True}, "--fully-sharded-loras splits"),
            ({"lora_dtype": "auto"}, None),
            ({"lora_dtype": torch.bfloat16}, None),
            ({"lora_dtype": torch.float16}, "adapters are torch.float16"),
        ],
    )
    def test_adapters(self, options: dict[str, Any], words: str | None, monkeypatch) -> None:
        fields = {"max_lora_rank": 16, "fully_sharded_loras": False, "lora_dtype": None, **options}
        lora, moe = SimpleNamespace(**fields), SimpleNamespace(in_dtype=torch.bfloat16)
        monkeypatch.setattr(own_experts, "get_current_vllm_config", lambda: SimpleNamespace(lora_config=lora))
        if words is None:
            own_experts.check_adapters(moe)
            return
        with pytest.raises(MoeqError, match=words) as caught:
            own_experts.check_adapters(moe)
        assert caught.value.code == "answer.no-kernel"


@pytest.mark.parametrize("sent", [True, False])
@pytest.mark.parametrize("meta", [True, False])
def test_the_adapter_of_each_token(sent: bool, meta: bool) -> None:
    """Tokens of other ranks bring theirs; the engine's own mapping is longer than a step."""
    mapping, own = torch.tensor([1, -1, 0, 5, 5]), torch.tensor([2, 2, -1, 7])
    stored = SimpleNamespace(no_lora_flag_cpu=torch.tensor([False]), token_lora_mapping=mapping)
    wrapper = SimpleNamespace(token_lora_indices=mapping, **({"token_mapping_meta": stored} if meta else {}))
    context = SimpleNamespace(punica_wrapper=wrapper, local_token_lora_mapping=own if sent else None)
    found = own_experts.adapters_of_tokens(context, 3)
    assert found is not None
    assert found.tolist() == ([2, 2, -1] if sent else [1, -1, 0])
    stored.no_lora_flag_cpu = torch.tensor([True])
    assert (own_experts.adapters_of_tokens(context, 3) is None) is meta
