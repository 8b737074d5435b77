"""vLLM's method for packed experts: what it tells the engine of sizes and kernels, and what it refuses."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import BACKENDS, engine, experts_layer, loaded_layer
from torch import nn
from vllm.platforms import current_platform

from moeq.engines.vllm import experts_method
from moeq.engines.vllm.engine_experts import UnpaddedSides
from moeq.errors import MoeqError
from moeq.load.ranks import Rank

NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture
def own(folders: dict[str, Path]) -> Any:
    return experts_layer(folders[NAME], kernels="moeq").quant_method


@pytest.fixture
def engines(folders: dict[str, Path], gpu: None) -> Any:
    return experts_layer(folders[NAME], kernels="engine").quant_method


def refused(code: str, make: Any, *given: Any) -> MoeqError:
    with pytest.raises(MoeqError) as caught:
        make(*given)
    assert caught.value.code == code
    return caught.value


class TestAnswers:
    def test_of_moeqs_kernels(self, own: Any) -> None:
        assert own.supports_eplb is True
        assert own.supports_pre_processed_weights is True
        assert own.skip_forward_padding is False
        assert own.has_unpadded_output is False
        assert own.maybe_roundup_sizes(100, 60, None, None) == (100, 60)
        assert own.title == "4 experts of [256, 128], marlin-wna16/1 int4, silu"

    def test_of_the_engines_kernels(self, engines: Any) -> None:
        assert engines.supports_eplb is False
        assert engines.supports_pre_processed_weights is False
        assert engines.maybe_roundup_sizes(100, 60, None, None) == (100, 60)
        row = engines.engine
        engines.engine = replace(row, rounds_sizes=True, unpadded=UnpaddedSides(tokens=True))
        assert engines.maybe_roundup_sizes(100, 60, None, None) == (256, 128)
        assert (engines.skip_forward_padding, engines.has_unpadded_output) == (True, False)
        engines.engine = replace(row, unpadded=UnpaddedSides(results=True))
        assert (engines.skip_forward_padding, engines.has_unpadded_output) == (False, True)

    def test_which_experts_a_rank_holds(self, folders: dict[str, Path], own: Any) -> None:
        assert own.held(None) is None, "without load balancing"
        method = experts_layer(folders[NAME], kernels="moeq", ep=(1, 2), redundant=2).quant_method
        assert method.held(nn.Module()) == (3, 0, 1), "before the engine has moved any"
        parallel = method.moe.moe_parallel_config
        parallel.dp_size = 2
        error = refused("usage.reload", method.held, nn.Module())
        assert "data-parallel engines reload one after the other" in error.message

    def test_scales_of_activations_are_ones_without_weights(self, folders: dict[str, Path]) -> None:
        method = experts_layer(folders[NAME], kernels="moeq", load_format="dummy").quant_method
        assert method.dummy is True
        for gated, halves in ((True, 2), (False, 1)):
            method.weights = replace(method.weights, w13=replace(method.weights.w13, gated=gated))
            found = method._activation_scales()
            assert torch.equal(found.w13, torch.ones(4, halves))
            assert torch.equal(found.w2, torch.ones(4))
            assert found.part == "input_scale"

    def test_exponents_have_the_engines_dtype(self) -> None:
        tensors = {
            "w13_scale": torch.ones(2, dtype=torch.uint8),
            "w2_scale": torch.ones(2),
            "w13_weight": torch.ones(2, dtype=torch.uint8),
        }
        found = experts_method._as_engine_dtypes(tensors)
        expected = {"w13_scale": torch.float8_e8m0fnu, "w2_scale": torch.float32, "w13_weight": torch.uint8}
        assert {name: one.dtype for name, one in found.items()} == expected

    def test_without_a_layerwise_reload_kernels_read_the_parameters(self, monkeypatch) -> None:
        layer = nn.Linear(2, 2)
        monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.reload.layerwise", None)
        assert experts_method._read_by_kernels(layer) == dict(layer.named_parameters())

    @pytest.mark.parametrize("is_cpu", [True, False])
    def test_the_option_that_means_this_device(self, is_cpu: bool, monkeypatch) -> None:
        monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: is_cpu)
        assert experts_method._gpu_option() == ("cpu" if is_cpu else "NAME")


class TestLoading:
    def test_later_calls_do_nothing(self, folders: dict[str, Path], monkeypatch) -> None:
        layer = loaded_layer(folders[NAME], kernels="moeq")
        kernel = layer.quant_method.moe_kernel
        monkeypatch.setattr(layer.quant_method.experts, "fill", None)
        layer.quant_method.process_weights_after_loading(layer)
        assert layer.quant_method.moe_kernel is kernel

    @pytest.mark.parametrize("finishes", [True, False])
    def test_whether_the_class_gets_the_filled_layer(self, finishes: bool, folders, gpu, monkeypatch) -> None:
        layer = experts_layer(folders[NAME], kernels="engine")
        method, seen = layer.quant_method, []
        method.engine = replace(method.engine, finishes=finishes)
        kind = method.experts_cls
        monkeypatch.setattr(kind, "process_weights_after_loading", lambda self, layer: seen.append(layer))
        with engine():
            method.process_weights_after_loading(layer)
        assert seen == ([layer] if finishes else [])

    def test_weights_of_another_process_are_not_read(self, folders: dict[str, Path], monkeypatch) -> None:
        layer = experts_layer(folders[NAME], kernels="moeq")
        filled: list[str] = []
        monkeypatch.setattr(layer.quant_method.experts, "fill", lambda *given: filled.append("files"))
        monkeypatch.setattr(experts_method, "is_weights_pre_processed", lambda: True)
        with engine():
            layer.quant_method.process_weights_after_loading(layer)
        assert filled == []
        assert layer.quant_method.moe_kernel is not None


class TestChoice:
    def test_an_order_of_columns_is_not_split(self, engines: Any) -> None:
        row = replace(engines.engine, reader=replace(engines.engine.reader, shards=False))
        check, given = experts_method._check_start, (engines.moe, engines.entry)
        check(row, *given, Rank(0, 1))
        check(row, *given, Rank(0, 1, 1, 2))
        check(engines.engine, *given, Rank(0, 2))
        error = refused("usage.tp", check, row, *given, Rank(0, 2))
        assert error.message == "layer 1: experts with act-order cannot be split over 2 ranks"

    def test_what_the_engine_says_against_a_backend(self, engines: Any) -> None:
        of_rank = (engines.moe, engines.entry, engines.rank, engines.weights)
        found = experts_method._supported_class(engines.engine, *of_rank)
        assert found is engines.experts_cls
        row = replace(engines.engine, obstacle=lambda weights: "a variable says no")
        error = refused("answer.no-backend", experts_method._supported_class, row, *of_rank)
        assert error.message.endswith("which vLLM does not run here: a variable says no")

    def test_the_backend_that_was_converted_for_comes_first(self, engines: Any, monkeypatch) -> None:
        """Then the engine's order; the first reason is said if none runs."""
        first = engines.engine
        second = replace(first, title="OTHER", reader=replace(first.reader, backend="OTHER"))
        monkeypatch.setitem(BACKENDS, engines.entry.layout, replace(first, instead=(second,)))
        given = (engines.moe, engines.entry, engines.rank, engines.weights)
        for preferred, title in (("OTHER", "OTHER"), (first.reader.backend, first.title), ("auto", first.title)):
            assert experts_method._engine_experts(*given, preferred)[0].title == title
        ill = [replace(row, obstacle=lambda weights, it=row.title: f"not {it}") for row in (first, second)]
        monkeypatch.setitem(BACKENDS, engines.entry.layout, replace(ill[0], instead=(ill[1],)))
        for preferred, title in (("OTHER", "OTHER"), ("auto", first.title)):
            error = refused("answer.no-backend", experts_method._engine_experts, *given, preferred)
            assert error.message.endswith(f"not {title}")
        monkeypatch.setitem(BACKENDS, engines.entry.layout, replace(ill[0], instead=(second,)))
        assert experts_method._engine_experts(*given, "auto")[0].title == "OTHER"

    def test_a_backend_by_name(self, engines: Any, monkeypatch) -> None:
        first = engines.engine
        second = replace(first, title="OTHER", reader=replace(first.reader, backend="OTHER"))
        third = replace(first, title="THIRD", reader=replace(first.reader, option="third"))
        monkeypatch.setitem(BACKENDS, engines.entry.layout, replace(first, instead=(second, third)))
        moe = SimpleNamespace(moe_backend="humming")
        given = (engines.entry, engines.rank, engines.weights, "auto")
        error = refused("usage.moe-backend", experts_method._engine_experts, moe, *given)
        assert "--moe-backend humming was requested, but the experts are packed for MARLIN" in error.message
        assert (error.hint or "").startswith("start with --moe-backend marlin or third, or convert")

    def test_eplb_and_the_engines_kernels(self) -> None:
        assert experts_method._eplb_error().code == "usage.eplb"
