"""What the plug-in answers and refuses inside vLLM's own packages where no whole layer has to run."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import engine, experts_layer, loaded_layer, ranks_of
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.platforms import current_platform

import moeq
from moeq.deploy.detect import detect_cpu
from moeq.deploy.gpus import parse_gpu
from moeq.engines.converted_config import source_unread
from moeq.engines.vllm import backends, experts_method, float_experts, one_layer, own_experts, plugin
from moeq.engines.vllm import config as config_module
from moeq.engines.vllm import engine_experts as device_module
from moeq.errors import MoeqError
from moeq.load.ranks import Rank
from moeq_kernels import gpu as kernel_gpus
from moeq_kernels.gpu import H200

NAME = "gptq-int4-g32-qwen3moe"


@pytest.mark.parametrize(
    ("name", "capability", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", (9, 0), "H100"),
        ("NVIDIA H100 80GB HBM3", (8, 9), "sm89"),
        ("NVIDIA H100 80GB HBM3", (9, 1), "sm91"),
        ("Some board", (8, 6), "sm86"),
    ],
)
def test_the_device_is_the_platforms(name: str, capability: tuple[int, int], expected: str, monkeypatch) -> None:
    """A name counts where its capability is the driver's."""
    kind = type(current_platform)
    where = SimpleNamespace(major=capability[0], minor=capability[1])
    monkeypatch.setattr(kind, "is_cuda", lambda self: True)
    monkeypatch.setattr(kind, "get_device_capability", classmethod(lambda cls, device_id=0: where))
    monkeypatch.setattr(kind, "get_device_name", classmethod(lambda cls, device_id=0: name))
    if expected == "sm91":
        with pytest.raises(MoeqError, match="sm91"):
            device_module.current_gpu()
    else:
        assert device_module.current_gpu().name == expected


@pytest.mark.parametrize("is_cpu", [True, False])
def test_without_cuda_the_drivers_are_asked(is_cpu: bool, monkeypatch) -> None:
    kind, found = type(current_platform), parse_gpu("MI300X")
    monkeypatch.setattr(kind, "is_cuda", lambda self: False)
    monkeypatch.setattr(kind, "is_cpu", lambda self: is_cpu)
    for gpu in (found, None):
        monkeypatch.setattr(device_module, "detect_gpu", lambda gpu=gpu: gpu)
        assert device_module.current_gpu() == (detect_cpu() if is_cpu else gpu or parse_gpu("XPU"))


def test_a_config_without_the_sources_own() -> None:
    kind = get_quantization_config("moeq")
    config = kind.from_config({"quant_method": "moeq"})
    linear = LinearBase.__new__(LinearBase)
    torch.nn.Module.__init__(linear)
    assert isinstance(config.get_quant_method(linear, "model.layers.0.x"), UnquantizedLinearMethod)
    assert config.get_quant_method(torch.nn.Module(), "model.layers.0.x") is None
    assert config._is_plain("vision_tower") is False
    assert kind.get_min_capability() == 75
    assert kind.override_quantization_method({"quant_method": "fp8"}, "moeq") == "moeq"
    assert kind.override_quantization_method({"quant_method": "fp8"}, "fp8") is None


def test_why_a_source_is_not_read_is_said_after_what_convert_says(checkpoints: Path, monkeypatch) -> None:
    source = checkpoints / NAME
    config = get_quantization_config("moeq").from_config(moeq.open(source).quantization_config)
    config.maybe_update_config(str(source))
    config.unread = source_unread("gptq", "vLLM", ValueError("no such method"))
    monkeypatch.setattr(config_module, "current_gpu", lambda: parse_gpu("A100"))
    with engine(), pytest.raises(MoeqError, match="layers outside the experts are still gptq"):
        config.get_quant_method(torch.nn.Module(), "model.layers.0.x")


def test_options_of_moeq_are_an_object() -> None:
    for given, found in (
        (None, None),
        ("text", None),
        ({}, None),
        ({"moeq": {"kernels": "auto"}}, {"kernels": "auto"}),
    ):
        assert config_module._own_options(given) == found
    with pytest.raises(MoeqError, match="moeq in --additional-config is 'auto', not an object") as refused:
        config_module._own_options({"moeq": "auto"})
    assert refused.value.code == "usage.kernels"


def test_tensors_that_no_layer_takes_are_not_dropped() -> None:
    """A model class whose experts are not vLLM's; with pipeline parallelism a rank may have no experts at all."""
    seen: list[str] = []

    class Model(torch.nn.Module):
        def load_weights(self, weights: Any) -> set[str] | None:
            seen.extend(name for name, _ in weights)
            return None if "none" in seen else set(seen)

    config_module._STACKED[Model] = {"experts.w13_weight"}
    load, tensor = config_module._without_experts(Model), torch.zeros(1)
    with pytest.raises(MoeqError, match="Model does not run its experts through vLLM's RoutedExperts") as refused:
        load(Model(), [("a", tensor), ("experts.w13_weight", tensor)])
    assert refused.value.code == "usage.unsupported-model"
    part = Model()
    part.missing = PPMissingLayer()
    seen.clear()
    assert load(part, [("a", tensor), ("experts.w13_weight", tensor), ("b", tensor)]) == {"a", "b"}
    assert load(part, [("none", tensor)]) is None


def test_another_version_refuses_with_the_class_of_a_config() -> None:
    try:
        plugin._register_refusal("0.1.0")
        kind = get_quantization_config("moeq")
        with pytest.raises(MoeqError, match=r"this is vLLM 0\.1\.0") as refused:
            kind.from_config({})
        assert refused.value.code == "environment.engine-version"
        config = kind()
        assert (config.get_name(), config.get_min_capability()) == ("moeq", 0)
        assert config.get_supported_act_dtypes() == config.get_config_filenames() == []
        assert config.get_quant_method(None, "") is None
    finally:
        plugin.register()
    assert get_quantization_config("moeq") is not kind


class TestMethod:
    def test_experts_are_counted_as_the_engine_does(self, folders) -> None:
        layer = experts_layer(folders[NAME], kernels="moeq")
        method = layer.quant_method
        with pytest.raises(
            MoeqError, match="holds 3 experts in the engine and 4 by moeq's linear placement"
        ) as refused:
            method.create_weights(torch.nn.Module(), 3, 256, 128, torch.bfloat16)
        assert refused.value.code == "usage.ep"

    def test_bytes_for_another_gpu_are_refused(self, folders, monkeypatch) -> None:
        method = experts_layer(folders[NAME], kernels="moeq").quant_method
        kind = type(current_platform)
        monkeypatch.setattr(kind, "is_cuda", lambda self: True)
        for capability, right in (((8, 0), True), ((9, 0), False)):
            where = SimpleNamespace(major=capability[0], minor=capability[1])
            monkeypatch.setattr(kind, "get_device_capability", classmethod(lambda cls, device_id=0, it=where: it))
            if right:
                experts_method._check_device(method.experts)
                continue
            with pytest.raises(MoeqError, match=r"converted for A100 \(sm80\), and this GPU is sm90"):
                experts_method._check_device(method.experts)
        monkeypatch.setattr(kind, "is_cuda", lambda self: False)
        experts_method._check_device(method.experts)

    def test_every_rank_has_all_experts_where_a_backend_has_no_map(self, folders, gpu) -> None:
        method = experts_layer(folders[NAME], kernels="engine").quant_method
        alone = replace(method.engine, spreads=False)
        experts_method._check_start(alone, method.moe, method.entry, Rank(0, 1))
        split = Rank(ep_rank=1, ep_size=2)
        experts_method._check_start(method.engine, method.moe, method.entry, split)
        with pytest.raises(MoeqError, match="has no map of experts") as refused:
            experts_method._check_start(alone, method.moe, method.entry, split)
        assert refused.value.code == "usage.ep"

    def test_a_gpu_without_marlins_activations(self, folders, gpu, monkeypatch) -> None:
        method = experts_layer(folders[NAME], kernels="engine").quant_method

        def refuse() -> None:
            raise ValueError("this GPU has no FP8")

        monkeypatch.setattr(experts_method, "get_marlin_input_dtype", refuse)
        with pytest.raises(MoeqError, match="this GPU has no FP8") as refused:
            experts_method._check_marlin_input(method.engine)
        assert refused.value.code == "environment.marlin-input"
        assert refused.value.hint == "unset VLLM_MARLIN_INPUT_DTYPE"

    def test_scales_that_the_engine_computed_are_not_reloaded(self, folders, gpu) -> None:
        layer = loaded_layer(folders["gptq-int4-g128-mixtral"], kernels="engine")
        method = layer.quant_method
        method.check_reload(layer)
        layer.other_weight = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        layer.w13_empty = torch.nn.Parameter(torch.ones(0), requires_grad=False)
        method.check_reload(layer)
        layer.w13_copied = torch.nn.Parameter(torch.ones(2), requires_grad=False)
        with pytest.raises(MoeqError, match="the engine's kernel reads w13_copied") as refused:
            method.check_reload(layer)
        assert refused.value.code == "usage.reload"

    @pytest.mark.parametrize("sinks", [True, False])
    def test_a_kernel_that_routes_gets_what_the_layer_says(self, sinks: bool, folders) -> None:
        layer = loaded_layer(folders[NAME], kernels="moeq")
        layer.routing_sink = "sink"

        def with_sink(*given: Any, routing_sink: Any, **named: Any) -> Any:
            return given, {**named, "routing_sink": routing_sink}

        def without(*given: Any, activation: Any, **named: Any) -> Any:
            assert "routing_sink" not in named
            return given, {**named, "activation": activation}

        method = layer.quant_method
        experts = SimpleNamespace(consumes_expert_mask=False)
        method.moe_kernel = SimpleNamespace(fused_experts=experts, apply_monolithic=with_sink if sinks else without)
        x, logits = torch.ones(1, 2), torch.ones(1, 4)
        given, named = method.apply_monolithic(layer, x, logits)
        assert [id(one) for one in given] == [id(x), id(layer.w13_weight), id(layer.w2_weight), id(logits)]
        assert ("routing_sink" in named) is sinks
        expected = {"activation", "global_num_experts", "expert_map", "apply_router_weight_on_input"}
        expected |= {"num_expert_group", "topk_group", "e_score_correction_bias", "routed_scaling_factor"}
        for name in expected:
            assert named[name] is getattr(layer, name), name


class TestOwnKernels:
    def test_why_they_would_be_those_for_any_gpu(self, folders, monkeypatch) -> None:
        moe = copy.copy(ranks_of(folders[NAME])[0])
        layer = experts_layer(folders[NAME], kernels="moeq")
        assert own_experts.slow_reason(moe, None) == "experts are on cpu"
        moe.device = "cuda"
        unknown = replace(H200, name="B300", capability=(10, 3))
        monkeypatch.setattr(kernel_gpus, "gpu_of", lambda device: unknown)
        assert own_experts.slow_reason(moe, None) == "B300 is not a GPU that moeq has kernels for"
        moe.is_lora_enabled = True
        assert own_experts.slow_reason(moe, None) == "adapters (LoRA) run in no others"
        assert layer.quant_method.choice.own

    def test_what_the_classes_say_of_themselves(self) -> None:
        rows, batches = own_experts.MoeqExperts, own_experts.MoeqBatchedExperts
        assert rows._supports_no_act_and_mul() is True
        assert rows._supports_quant_scheme(None, None) is True
        assert rows.expects_unquantized_inputs.fget(None) is True
        assert batches.expects_unquantized_inputs.fget(None) is False
        assert batches.supports_lora() is False

    def test_layers_are_prepared_for_the_tokens_of_all_ranks(self, monkeypatch) -> None:
        prepared = {}
        monkeypatch.setattr(own_experts, "prepared_layer", lambda packed, **named: prepared.update(named))
        moe = SimpleNamespace(
            moe_parallel_config=SimpleNamespace(dp_size=3, pcp_size=2), experts_per_token=4, max_num_tokens=16,
            in_dtype=torch.float16, hidden_dim=256, activation=MoEActivation.SILU, swiglu_limit=None,
            gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None, is_act_and_mul=True,
        )  # fmt: skip
        given = own_experts.activation_arguments(moe)
        own_experts._prepare(moe, SimpleNamespace(), 8, "H200")
        wanted = {"top_k": 4, "max_tokens": 96, "dtype": torch.float16, "hidden_size": 256}
        assert prepared == {**wanted, "num_experts": 8, "gpu": "H200", **given}
        assert given["activation"] == "silu"

    def test_adapters_by_the_number_of_their_slices(self) -> None:
        first = [torch.ones(1), torch.ones(2)], [torch.ones(3), torch.ones(4)]
        second = [torch.ones(5)], [torch.ones(6)]

        def sizes(slices: int, gated: bool, activation: MoEActivation = MoEActivation.SILU) -> tuple[Any, ...]:
            context = SimpleNamespace(
                w13_lora_a_stacked=first[0][:slices],
                w13_lora_b_stacked=first[1][:slices],
                w2_lora_a_stacked=second[0],
                w2_lora_b_stacked=second[1],
                w13_num_slices=slices,
            )
            found = own_experts.adapters_of(context, gated, activation)
            matrices = (found.gate, found.up, found.gate_up, found.down)
            return (*(one and (len(one.a), len(one.b)) for one in matrices), found.interleaved)

        assert sizes(1, False) == (None, (1, 3), None, (5, 6), False)
        assert sizes(2, True) == ((1, 3), (2, 4), None, (5, 6), False)
        assert sizes(1, True) == (None, None, (1, 3), (5, 6), False)
        assert sizes(1, True, MoEActivation.SWIGLUOAI) == (None, None, (1, 3), (5, 6), True)


class TestBackends:
    def test_what_only_some_of_them_do(self) -> None:
        """Those that read the same bytes instead count as well."""
        rows = [(layout, one) for layout, first in backends.BACKENDS.items() for one in (first, *first.instead)]
        mxfp4 = {layout for layout in backends.BACKENDS if layout in backends.MXFP4S or "mxfp4" in layout}
        cpu = {layout for layout in backends.BACKENDS if layout.startswith("cpu-amx-")}
        b12x = {("mxfp4-identity/1", "B12X_MXFP4_MXFP8"), ("mxfp4-identity/1", "B12X_MXFP4_BF16")}
        rounds = {(layout, one.reader.backend) for layout, one in rows if one.rounds_sizes}
        assert rounds == {(layout, one.reader.backend) for layout, one in rows if layout in mxfp4} - b12x
        assert {layout for layout, one in rows if not one.spreads} == cpu
        assert {layout for layout, one in rows if not one.finishes} == {"cpu-amx-int8/1"}
        unpadded = {
            one.reader.backend: (one.unpadded.tokens, one.unpadded.results)
            for layout, one in rows
            if any(vars(one.unpadded).values())
        }
        trtllm = {"FLASHINFER_TRTLLM_MXFP4_BF16": (False, True), "FLASHINFER_TRTLLM_MXFP4_MXFP8": (True, True)}
        assert unpadded == trtllm
        marlin = {"marlin-mxfp4-fp8act/1": "fp8", "marlin-mxfp4-fp8act-interleaved/1": "fp8"}
        assert {layout: one.marlin_input for layout, one in rows if one.marlin_input} == marlin
        forced = {(layout, one.reader.backend) for layout, one in rows if one.obstacle is float_experts.b12x_is_16_bit}
        assert forced == {("b12x-nvfp4/1", "B12X"), ("mxfp4-identity/1", "B12X_MXFP4_MXFP8")}
        for layout, one in rows:
            assert one.title.startswith("CPU (" if layout in cpu else one.reader.backend)
            assert one.option == one.reader.option
            assert one.dtypes == tuple({"bf16": "bfloat16", "fp16": "float16"}[name] for name in one.reader.dtypes)

    def test_a_single_group_is_a_channel_where_it_spans_k(self, folders) -> None:
        spec = experts_layer(folders[NAME]).quant_method.entry.matrices["w13"].spec
        one = replace(spec, group_size=spec.k)
        assert (spec.num_groups > 1, one.num_groups) == (True, 1)
        scales = {name: torch.ones(2, 1) for name in ("w13_scale", "w2_scale")}
        for given, wna16, triton in (
            (spec, spec.group_size, spec.group_size),
            (one, -1, max(spec.k, spec.n // 2)),
            (replace(spec, group_size=2 * spec.k), 2 * spec.k, 2 * spec.k),
        ):
            weights: Any = SimpleNamespace(w13=given)
            made = [make(scales, weights, {}) for make in (backends._wna16_config, backends._triton_config)]
            assert [one.block_shape for one in made] == [[0, wna16], [0, triton]]


class TestFloats:
    def test_stored_scales_of_activations_are_needed(self) -> None:
        with pytest.raises(MoeqError, match="Such experts quantises activations with stored scales") as refused:
            float_experts._stored(lambda: None, "Such experts")
        assert refused.value.code == "answer.no-backend"

    @pytest.mark.parametrize("before", [None, 90])
    def test_padded_sizes_are_written_where_the_engine_writes_them(self, before: int | None) -> None:
        weights: Any = SimpleNamespace(w2=SimpleNamespace(n=128, k=64))
        sizes = ("hidden_dim_unpadded", "hidden_dim", "intermediate_size_per_partition")
        for padded, expected in (
            ((), (before, 100, 60)),
            (sizes[:1], (before or 100, 100, 60)),
            (sizes[1:2], (before, 128, 60)),
            (sizes[2:], (before, 100, 64)),
            (sizes, (before or 100, 128, 64)),
        ):
            moe = SimpleNamespace(hidden_dim_unpadded=before, hidden_dim=100, intermediate_size_per_partition=60)
            float_experts._padded_sizes(SimpleNamespace(moe_config=moe), weights, padded)
            assert tuple(getattr(moe, name) for name in sizes) == expected


class TestOneLayer:
    def test_experts_that_route_get_logits_of_the_same_choice(self) -> None:
        seen: list[torch.Tensor] = []

        def forward(x: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits)
            return x

        method = SimpleNamespace(
            skip_forward_padding=True, is_monolithic=True, process_weights_after_loading=lambda layer: None
        )
        layer = SimpleNamespace(quant_method=method, global_num_experts=4, forward_monolithic=forward)
        weights, ids = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[3, 1], [0, 2]])
        x = torch.randn(2, 8)
        with engine():
            found = one_layer.ready(layer)[1](x, weights, ids)
        assert torch.equal(found, x)
        wanted = torch.zeros(2, 4).scatter(1, ids, weights)
        torch.testing.assert_close(seen[0].softmax(-1), wanted)

    def test_tensors_of_gpt_oss_go_where_its_class_puts_them(self) -> None:
        taken = {}

        class Parameter:
            def __init__(self, name: str) -> None:
                self.name = name

            def weight_loader(self, parameter: Any, tensor: torch.Tensor, **named: Any) -> None:
                assert parameter is self
                assert named["shard_id"] is named["expert_id"] is None
                taken[named["weight_name"]] = (self.name, tuple(tensor.shape))

        parts = ("weight", "weight_scale", "bias")
        names = [f"{role}_{part}" for role in ("w13", "w2") for part in parts]
        layer = SimpleNamespace(**{name: Parameter(name) for name in names})
        given = [
            (f"{projection}_{part}", torch.zeros(2, *shape))
            for projection in ("gate_up_proj", "down_proj")
            for part, shape in (("blocks", (4, 3, 16)), ("scales", (4, 3)), ("bias", (4,)))
        ]
        assert list(one_layer._load_gpt_oss(layer, given)) == [name for name, _ in given]
        shapes = ((2, 4, 48), (2, 4, 3), (2, 4))
        assert list(taken.values()) == list(zip(names, shapes * 2, strict=True))

    def test_a_tensor_that_the_engine_leaves_is_said(self, checkpoints, gpu, monkeypatch) -> None:
        checkpoint = moeq.open(checkpoints / "ct-int4-g128-qwen3moe")
        load = one_layer.RoutedExperts.load_weights

        def all_but_one(layer: Any, tensors: Any) -> Any:
            return list(load(layer, tensors))[1:]

        monkeypatch.setattr(one_layer.RoutedExperts, "load_weights", all_but_one)
        with one_layer.engine(torch.device("cpu")), pytest.raises(MoeqError) as refused:
            one_layer.source_layer(checkpoint, 1, "triton", torch.device("cpu"), torch.bfloat16)
        assert refused.value.code == "answer.engine-layer"
        found = [int(word) for word in refused.value.message.split() if word.isdigit()]
        assert found[0] == found[1] - 1
