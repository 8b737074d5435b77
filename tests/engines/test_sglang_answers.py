"""What the plug-in answers and refuses inside SGLang's own packages where no whole layer has to run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.sglang_engine import config_of, experts_layer, get_quantization_config
from load.deployments import convert
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.runtime_context import get_exec, get_model, get_spec
from torch import nn

import moeq
from moeq.engines.converted_config import source_unread
from moeq.engines.experts_source import PackingExpertsSource, open_experts
from moeq.engines.sglang import config as sglang_config
from moeq.engines.sglang import plugin
from moeq.engines.sglang.config import MoeqConfig, MoeqQuantInfo, MoeqRunnerCore, activation_arguments
from moeq.errors import MoeqError
from moeq.oracle.loaders import TRANSFORMERS_GUARD
from moeq.oracle.versions import BUILTIN

INT4 = "ct-int4-g128-qwen3moe"


@pytest.fixture(scope="module")
def folder(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(checkpoints / INT4, tmp_path_factory.mktemp("answers") / "out", "marlin-wna16/1")


@pytest.fixture
def a100(monkeypatch: pytest.MonkeyPatch) -> None:
    made = sglang_config.make_deployment
    monkeypatch.setattr(sglang_config, "make_deployment", lambda options: made({**options, "gpu": "A100"}))


class TestConfig:
    def test_what_it_says_of_itself(self) -> None:
        assert MoeqConfig.get_min_capability() == 80
        assert MoeqConfig(None).get_scaled_act_names() == []
        assert MoeqConfig(None).kv_cache_quant_algo is None
        assert MoeqConfig.override_quantization_method({"quant_method": "fp8"}, "moeq") == "moeq"
        assert MoeqConfig.override_quantization_method({"quant_method": "fp8"}, "fp8") is None
        assert MoeqConfig.override_quantization_method({"quant_method": "fp8"}, None) is None

    def test_a_method_that_the_engine_does_not_have(self, checkpoints: Path, a100: None) -> None:
        original = {"quant_method": "no-such-method"}
        with pytest.raises(MoeqError, match="still no-such-method") as refused:
            MoeqConfig.from_config({"quant_method": "moeq", "original": original})
        assert refused.value.code == "answer.no-backend"
        assert "SGLang does not read them" in refused.value.message
        config = MoeqConfig.from_config(original)
        assert config.converted is False
        assert config.unread is not None
        assert config.unread.message == refused.value.message

    def test_why_a_source_is_not_read_is_said_after_what_convert_says(self, checkpoints: Path, a100: None) -> None:
        config = config_of(checkpoints / INT4, quantization="moeq")
        layer = SimpleNamespace(moe_tp_size=1, moe_ep_size=1)
        assert isinstance(config.experts(layer, False), PackingExpertsSource)
        config.unread = source_unread("gptq", "SGLang", ValueError("no such method"))
        with pytest.raises(MoeqError, match="layers outside the experts are still gptq"):
            config.experts(layer, False)

    @pytest.mark.parametrize("guard", [TRANSFORMERS_GUARD, "sdpa", None])
    def test_classes_of_transformers_run_their_experts_as_usual(self, guard: str | None, folder: Path) -> None:
        document = moeq.open(folder).source.config["quantization_config"]
        for quantization in (document, document["original"]):
            whole = SimpleNamespace(_experts_implementation=guard)
            config = MoeqConfig.from_config({**quantization, "hf_config": whole})
            assert whole._experts_implementation == ("eager" if guard == TRANSFORMERS_GUARD else guard)
            assert config.converted is (quantization is document)

    def test_without_a_config_of_the_source(self) -> None:
        config = MoeqConfig.from_config({"quant_method": "moeq"})
        assert config.inner is None
        assert config.converted is True
        linear = LinearBase(1, 1)
        assert isinstance(config.get_quant_method(linear, "model.layers.0.q_proj"), UnquantizedLinearMethod)
        assert config.get_quant_method(nn.Module(), "model.layers.0.q_proj") is None
        config.update_packed_modules_mapping({"qkv_proj": ["q_proj"]})
        config.apply_weight_name_mapper(None)
        assert config.packed_modules_mapping == {"qkv_proj": ["q_proj"]}

    def test_layers_without_a_name_say_their_number(self, folder: Path) -> None:
        config = config_of(folder)
        layer = FusedMoE.__new__(FusedMoE)
        nn.Module.__init__(layer)
        layer.is_draft, layer.layer_id = False, 1
        assert config.get_quant_method(layer, "").entry.layer == 1
        assert config.get_quant_method(layer, "model.layers.0.mlp.experts").entry.layer == 0
        config.inner = None
        assert config.get_quant_method(layer, "model.layers.7.mlp.experts") is None, "that layer is not packed"

    def test_a_checkpoint_is_opened_once_at_its_revision(self, folder: Path, monkeypatch) -> None:
        asked: list[tuple[str, str | None, bool]] = []

        def opened(where: str, revision: str | None, log: Any, *, converted: bool) -> Any:
            asked.append((where, revision, converted))
            return open_experts(str(folder), None, log, converted=converted)

        monkeypatch.setattr(sglang_config, "open_experts", opened)
        config, other = config_of(folder), MoeqConfig(None)
        layer, draft = SimpleNamespace(), {"speculative_draft_model_path": "org/draft"}
        with get_model().override(model_path="org/model", revision="abc"):
            assert config.experts(layer, False) is config.experts(layer, False)
            with get_spec().override(**draft, speculative_draft_model_revision="def"):
                assert other.experts(layer, True) is not None
            with get_spec().override(speculative_draft_model_path="org/model"):
                assert MoeqConfig(None).experts(layer, True) is None
            assert MoeqConfig(None).experts(layer, True) is None
        assert asked == [("org/model", "abc", True), ("org/draft", "def", True)]


class TestMethod:
    def refused(self, make: Callable[[], Any]) -> MoeqError:
        with pytest.raises(MoeqError) as caught:
            make()
        return caught.value

    def create(self, method: Any, num_experts: int = 4, **fields: Any) -> nn.Module:
        layer = nn.Module()
        ranks = {"moe_tp_rank": 0, "moe_tp_size": 1, "moe_ep_rank": 0, "moe_ep_size": 1}
        for name, value in {**ranks, "num_fused_shared_experts": 0, "layer_id": 1, **fields}.items():
            setattr(layer, name, value)
        method.create_weights(layer, num_experts, 256, 128, torch.bfloat16)
        return layer

    def test_what_the_engine_was_started_for(self, folder: Path, monkeypatch) -> None:
        method = experts_layer(folder).quant_method
        assert dict(self.create(method).named_parameters()).keys() == method.empty(torch.bfloat16).keys()
        shared = self.refused(lambda: self.create(method, num_fused_shared_experts=1))
        assert shared.code == "usage.fused-shared-experts"
        assert shared.hint == "start with --disable-shared-experts-fusion"
        counted = self.refused(lambda: self.create(method, 3))
        assert counted.code == "usage.ep"
        assert "holds 3 experts in the engine and 4 by moeq" in counted.message
        monkeypatch.setattr(sglang_config, "get_moe_a2a_backend", lambda: SimpleNamespace(value="deepep"))
        exchange = self.refused(lambda: self.create(method))
        assert exchange.code == "answer.no-kernel"
        assert "--moe-a2a-backend deepep" in exchange.message

    def test_scales_that_no_balancing_would_move(self, checkpoints: Path, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.setitem(QUANTIZATION_METHODS, "mxfp4", Mxfp4Config)  # listed where there is a GPU
        source = checkpoints / "mxfp4-gptoss"
        method = experts_layer(convert(source, tmp_path / "out", "marlin-mxfp4-interleaved/1")).quant_method
        monkeypatch.setattr(sglang_config, "_places", lambda layer, held: lambda: (0, 1, 2, 3))
        self.create(method)
        method.activations = "fp8"
        error = self.refused(lambda: self.create(method))
        assert error.code == "usage.eplb"
        assert "scales that no load balancing would move" in error.message
        monkeypatch.setattr(sglang_config, "_places", lambda layer, held: None)
        self.create(method)

    def test_bytes_for_another_gpu(self, folder: Path, monkeypatch) -> None:
        layer = experts_layer(folder)
        method, where = layer.quant_method, SimpleNamespace(device=torch.device("cuda", 0))
        monkeypatch.setattr(sglang_config, "device_arch", lambda device: "sm90")
        there = SimpleNamespace(named_parameters=layer.named_parameters, w13_weight=where)
        error = self.refused(lambda: method.process_weights_after_loading(there))
        assert "converted for A100 (sm80), and this GPU is sm90" in error.message
        assert method.info is None

    def test_kernels_are_compiled_from_before_the_first_layer_is_filled(
        self, checkpoints: Path, a100: None, monkeypatch
    ) -> None:
        """Later calls, which the engine makes after every update of weights, do nothing."""
        seen: list[Any] = []
        fill = PackingExpertsSource.fill

        def filled(*given: Any) -> None:
            seen.append("fill")
            fill(*given)

        monkeypatch.setattr(PackingExpertsSource, "fill", filled)
        monkeypatch.setattr(sglang_config, "make_ready", lambda *given, wait: seen.append(wait))
        layer = experts_layer(checkpoints / INT4)
        method = layer.quant_method
        for _ in range(2):
            method.process_weights_after_loading(layer)
        assert seen == [False, "fill", True]
        seen.clear()
        later = experts_layer(checkpoints / INT4)
        later.quant_method.experts._unfilled.add(0)  # another layer is left
        later.quant_method.process_weights_after_loading(later)
        assert seen == [False, "fill", False], "other layers are filled while kernels are compiled"

    def test_a_layer_that_does_not_say_its_choices_takes_the_checkpoints(self, folder: Path, monkeypatch) -> None:
        prepared: dict[str, Any] = {}
        monkeypatch.setattr(sglang_config, "prepared_layer", lambda packed, **named: prepared.update(named))
        layer = experts_layer(folder)
        method = layer.quant_method
        tensors = {name: one.data for name, one in layer.named_parameters()}
        for top_k, expected in ((None, moeq.open(folder).info.top_k), (1, 1)):
            method.config.top_k = top_k
            method.prepared(tensors, "H200")
            assert prepared["top_k"] == expected
        assert prepared["max_tokens"] == sglang_config._max_tokens()
        assert (prepared["dtype"], prepared["hidden_size"]) == (torch.bfloat16, 256)
        assert prepared["router_weight_on_input"] is False
        assert prepared["gpu"] == "H200"
        assert prepared["activation"] == "silu"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"activation": "situ"}, {"activation": "situ", "alpha": 4.0, "limit": None}),
        ({"activation": "situ", "gemm1_alpha": 2.0}, {"activation": "situ", "alpha": 2.0, "limit": None}),
        (
            {"gemm1_alpha": 1.5, "gemm1_beta": 0.5},
            {"activation": "swiglu_oai", "alpha": 1.5, "beta": 0.5, "limit": None},
        ),
        ({"activation": "gelu", "swiglu_limit": 5.0}, {"activation": "gelu", "limit": None}),
        ({"activation": "gelu", "gemm1_clamp_limit": 5.0}, {"activation": "gelu", "limit": None}),
        ({"is_gated": False, "gemm1_alpha": 1.5}, {"activation": "silu", "limit": None}),
        (
            {"is_gated": False, "swiglu_limit": 5.0, "gemm1_clamp_limit": 7.0},
            {"activation": "silu", "limit": None},
        ),
    ],
)
def test_constants_of_activations(config: dict[str, Any], expected: dict[str, Any]) -> None:
    assert activation_arguments(MoeRunnerConfig(**config)) == expected


@pytest.mark.parametrize(
    ("dtype", "layer", "expected"),
    [
        (torch.float32, (1, 1), {"dtype": "bf16", "tp": 1}),
        (torch.bfloat16, (2, 1), {"dtype": "bf16", "tp": 2}),
        (torch.float16, (1, 4), {"dtype": "fp16", "ep": 4}),
    ],
)
def test_the_deployment_of_a_source(dtype, layer: tuple[int, int], expected: dict[str, Any], monkeypatch) -> None:
    monkeypatch.setattr(sglang_config, "make_deployment", lambda options: options)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        found: Any = sglang_config._deployment(SimpleNamespace(moe_tp_size=layer[0], moe_ep_size=layer[1]))
    finally:
        torch.set_default_dtype(before)
    assert found == {"engine": BUILTIN, **expected}


def test_when_experts_are_not_in_their_places(folder: Path, monkeypatch) -> None:
    config_of(folder)
    record = SimpleNamespace(physical_to_logical_map_cpu=torch.arange(24).view(2, 12))
    monkeypatch.setattr(sglang_config, "get_global_expert_location_metadata", lambda: record)
    layer = SimpleNamespace(moe_ep_rank=2, layer_id=1, uses_expert_location=True)
    assert sglang_config._places(layer, 3) is None
    moved = ({"enable_eplb": True}, {"init_expert_location": "given"}, {"ep_num_redundant_experts": 1})
    for options in moved:
        with get_exec().moe.override(**options):
            places = sglang_config._places(layer, 3)
            assert places is not None, options
            assert places() == (18, 19, 20)
            layer.uses_expert_location = False
            assert sglang_config._places(layer, 3) is None
            layer.uses_expert_location = True


@pytest.mark.parametrize(
    ("options", "tokens"),
    [
        ({}, 16384),
        ({"chunked_prefill_size": None, "max_prefill_tokens": None, "dp_size": None}, 16384),
        ({"chunked_prefill_size": 20000}, 20000),
        ({"chunked_prefill_size": -1, "max_prefill_tokens": 30000, "dp_size": 1}, 30000),
        ({"chunked_prefill_size": 8192, "max_prefill_tokens": 4096, "dp_size": 2}, 32768),
    ],
)
def test_a_step_has_a_chunk_of_every_rank(options: dict[str, int | None], tokens: int, monkeypatch) -> None:
    monkeypatch.setattr(sglang_config, "get_server_args", lambda: SimpleNamespace(**options))
    assert sglang_config._max_tokens() == tokens


@pytest.mark.parametrize("option", [*sglang_config.LOAD_FORMATS, "pt"])
def test_formats_in_which_the_engine_reads_the_files(option: str, monkeypatch) -> None:
    monkeypatch.setattr(sglang_config, "get_server_args", lambda: SimpleNamespace(load_format=option))
    if option != "pt":
        sglang_config._check_options()
        return
    with pytest.raises(MoeqError, match="--load-format pt does not read") as refused:
        sglang_config._check_options()
    assert refused.value.code == "usage.load-format"
    assert refused.value.hint == (
        "start with --load-format auto, safetensors, fastsafetensors, instanttensor, runai_streamer or dummy"
    )


class TestRunner:
    @pytest.mark.parametrize(
        ("scale", "on_input", "weight", "times"),
        [(None, False, 0.5, 1.0), (2.0, False, 1.0, 1.0), (2.0, True, 0.5, 2.0), (None, True, 0.5, 1.0)],
    )
    def test_pieces_and_scales(self, scale: float | None, on_input: bool, weight: float, times: float) -> None:
        """A layer that sums the weights of a token's choices tells which it was given."""
        sizes: list[int] = []

        def prepared(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            return x * weights.sum(1, keepdim=True) + ids.sum(1, keepdim=True)

        prepared.max_tokens = 3  # type: ignore[attr-defined]
        config = MoeRunnerConfig(routed_scaling_factor=scale, apply_router_weight_on_input=on_input)
        core, layer = MoeqRunnerCore(config), MoeqQuantInfo(prepared)  # type: ignore[arg-type]
        assert core.runner_backend.value == "moeq"
        x, weights, ids = torch.arange(14.0).view(7, 2), torch.full((7, 1), 0.5), torch.arange(7).view(7, 1)
        given = SimpleNamespace(hidden_states=x, topk_output=StandardTopKOutput(weights, ids, None))
        found = core.run_from_dispatch(given, layer, config).hidden_states
        assert torch.equal(found, times * (x * weight + ids))
        assert sizes == [3, 3, 1]
        sizes.clear()
        prepared.max_tokens = 1  # type: ignore[attr-defined]
        none = SimpleNamespace(hidden_states=x[:0], topk_output=StandardTopKOutput(weights[:0], ids[:0], None))
        assert core.run_from_dispatch(none, layer, config).hidden_states.shape == (0, 2)
        assert sizes == [0]

    def test_tokens_that_are_not_routed_yet(self, monkeypatch) -> None:
        routed = StandardTopKOutput(torch.ones(2, 1), torch.tensor([[3], [5]]), None)
        monkeypatch.setattr(BypassedTopKOutput, "to_standard", lambda self: routed)
        choices = BypassedTopKOutput(torch.ones(2, 4), torch.ones(2, 8), None)

        def prepared(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
            return x * ids

        prepared.max_tokens = 8  # type: ignore[attr-defined]
        config = MoeRunnerConfig()
        given = SimpleNamespace(hidden_states=torch.ones(2, 4), topk_output=choices)
        info = MoeqQuantInfo(prepared)  # type: ignore[arg-type]
        found = MoeqRunnerCore(config).run_from_dispatch(given, info, config).hidden_states
        assert found[:, 0].tolist() == [3.0, 5.0]


def test_the_version_that_was_tried_is_registered(monkeypatch) -> None:
    registered: list[bool] = []
    monkeypatch.setattr(plugin, "version", lambda name: plugin.ENGINES[0])
    monkeypatch.setattr(sglang_config, "register_config", lambda: registered.append(True))
    plugin.register()
    assert registered == [True]
    assert get_quantization_config("moeq") is MoeqConfig
