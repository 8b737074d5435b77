"""The SGLang plug-in inside SGLang's own Python packages, without a GPU; kernels in Triton's interpreter."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench_scripts import make_checkpoint
from engines.sglang_engine import HookRegistry, config_of, experts_layer, loaded_layer, run
from load.deployments import convert, reference_layer, warmed_problems
from sglang.srt.arg_groups.choices import MOE_RUNNER_BACKEND_CHOICES, QUANTIZATION_CHOICES
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.moe import utils as moe_utils
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.token_dispatcher import standard
from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.gptq import GPTQConfig
from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.lora.layers import FusedMoEWithLoRA
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models.utils import WeightsMapper
from sglang.srt.runtime_context import get_exec, get_flags, get_spec

import moeq
from moeq.deploy.gpus import parse_gpu
from moeq.engines.experts_source import ConvertedExpertsSource
from moeq.engines.sglang import config as sglang_config
from moeq.engines.sglang import plugin
from moeq.engines.sglang.config import MoeqConfig, MoeqMoEMethod, register_config
from moeq.errors import MoeqError
from moeq.load import warmup
from moeq.load.torch_loader import open_converted
from moeq.oracle.versions import BUILTIN

#: Those whose other layers SGLang reads on a CPU.
LAYOUTS = {
    "ct-int4-g128-qwen3moe": "marlin-wna16/1",
    "ct-int4-asym-g32-mixtral": "marlin-wna16/1",
    "ct-w8a8-qwen3moe": "int8-w8a8/1",
    "awq-int4-g32-qwen3moe": "triton-wna16/1",
}
INT4 = "ct-int4-asym-g32-mixtral"


@pytest.fixture(scope="module")
def folders(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    out = tmp_path_factory.mktemp("sglang")
    return {name: convert(checkpoints / name, out / name, layout) for name, layout in LAYOUTS.items()}


@pytest.fixture
def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(6, 256, generator=generator).to(torch.bfloat16)
    weights = torch.softmax(torch.randn(6, 2, generator=generator), -1)
    ids = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(6)]).to(torch.int32)
    return x, weights, ids


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


def test_the_engine_knows_method_runner_and_hook() -> None:
    register_config()  # again
    assert QUANTIZATION_METHODS["moeq"] is MoeqConfig
    assert QUANTIZATION_CHOICES.count("moeq") == MOE_RUNNER_BACKEND_CHOICES.count("moeq") == 1
    assert resolve_moe_runner_backend("moeq").value == "moeq"
    assert "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only" in HookRegistry._patched


@pytest.mark.parametrize("name", list(LAYOUTS))
def test_a_layer_is_the_sources(name, folders, checkpoints, batch) -> None:
    layer = loaded_layer(folders[name])
    assert isinstance(layer.quant_method, MoeqMoEMethod)
    assert layer.runner_backend.value == "moeq"
    wanted = reference_layer(moeq.open(checkpoints / name), 1, *batch)
    assert error(run(layer, batch), wanted) < (0.03 if "w8a8" in name else 0.01)


@pytest.mark.parametrize("where", ["tp", "ep"])
def test_ranks_hold_their_bytes_and_add_up(where, folders, batch, monkeypatch) -> None:
    monkeypatch.setattr(standard, "get_device", lambda: "cpu")  # the dispatcher asks for an accelerator
    whole = run(loaded_layer(folders[INT4]), batch).float()
    summed = torch.zeros_like(whole)
    for rank in (0, 1):
        layer = loaded_layer(folders[INT4], **{where: (rank, 2)})
        wanted = moeq.load_experts(folders[INT4], 1, **{f"{where}_rank": rank, f"{where}_size": 2})
        assert torch.equal(layer.w13_weight, wanted.w13.weight)
        assert torch.equal(layer.w2_zero, wanted.w2.zero)
        summed += run(layer, batch).float()
    assert error(summed, whole) < 0.01


def test_the_routed_scaling_factor_and_padding_are_kept(folders, batch) -> None:
    x, weights, ids = batch
    plain = run(loaded_layer(folders[INT4]), batch)
    scaled = run(
        loaded_layer(folders[INT4], routed_scaling_factor=2.0), (x, weights, torch.where(x[:, :1] > 0, -1, ids))
    )
    kept = x[:, 0] <= 0
    assert torch.equal(scaled[kept], 2 * plain[kept])
    assert not scaled[~kept].any()


def test_a_scaling_factor_is_not_multiplied_into_the_input(folders, batch) -> None:
    x, weights, ids = batch[0], batch[1][:, :1], batch[2][:, :1]
    given = {"apply_router_weight_on_input": True, "top_k": 1}
    plain = run(loaded_layer(folders[INT4], **given), (x, weights, ids))
    scaled = run(loaded_layer(folders[INT4], **given, routed_scaling_factor=2.0), (x, weights, ids))
    assert torch.equal(scaled, 2 * plain)


def test_a_prompt_longer_than_the_layer_was_prepared_for(folders, batch, monkeypatch) -> None:
    """Without chunks (`--chunked-prefill-size -1`) the engine runs a prompt in one step, however long it is."""
    whole = run(loaded_layer(folders[INT4]), batch)
    monkeypatch.setattr(sglang_config, "_max_tokens", lambda: 4)
    layer = loaded_layer(folders[INT4])
    assert layer.quant_method.info.layer.max_tokens == 4
    assert torch.equal(run(layer, batch), whole)
    none = tuple(tensor[:0] for tensor in batch)
    assert run(layer, none).shape == (0, 256)


def test_the_log_says_once_which_kernels_run(folders, monkeypatch, caplog) -> None:
    monkeypatch.setattr(warmup, "_READY", {})
    with caplog.at_level(logging.INFO, "moeq"):
        for _ in range(2):
            loaded_layer(folders[INT4])
    said = [record.getMessage() for record in caplog.records if record.name.startswith("moeq")]
    assert len(said) == 1
    assert "portable kernels, because" in said[0]


def test_dummy_weights_are_not_read_and_give_numbers(folders, batch) -> None:
    for name, folder in folders.items():
        layer = experts_layer(folder, load_format="dummy")
        generator = torch.Generator().manual_seed(1)
        for parameter in layer.parameters():
            if parameter.is_floating_point():
                parameter.data.uniform_(-1e-3, 1e-3, generator=generator)
        layer.quant_method.process_weights_after_loading(layer)
        assert torch.isfinite(run(layer, batch)).all(), name
        assert not torch.equal(layer.w13_weight, moeq.load_experts(folder, 1).w13.weight), name


@pytest.mark.parametrize("where", ["tp", "ep"])
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_what_a_rank_calls_is_what_warmup_compiles(name, where, folders) -> None:
    warmed = warmed_problems(folders[name], where, 2)
    if warmed is None:
        return
    layer = experts_layer(folders[name], **{where: (1, 2)})
    method = layer.quant_method
    tensors = {name: tensor.to("meta") for name, tensor in layer.named_parameters()}
    assert method.prepared(tensors, "H200").problem in warmed


def test_a_model_gets_all_tensors_but_the_converted_experts(folders) -> None:
    """Through the engine's own loader, which the hook is around."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = experts_layer(folders[INT4])
            self.quant_config = self.experts.quant_config

        def load_weights(self, weights) -> None:
            self.seen = [name for name, _ in weights]
            self.asked = self.quant_config.get_name()

    model, checkpoint = Model(), moeq.open(folders[INT4])
    tensors = [(name, torch.empty(0)) for name in checkpoint.source.tensors]
    DefaultModelLoader.load_weights_only(model, iter(tensors), torch.device("cpu"))
    assert set(model.seen) == set(checkpoint.source.tensors) - checkpoint.source.expert_names
    assert len(model.seen) < len(tensors)
    assert model.asked == "compressed_tensors"  # how the tensors of other layers lie
    assert isinstance(model.quant_config, MoeqConfig)


def test_other_layers_keep_the_method_of_the_source(folders) -> None:
    assert config_of(folders[INT4]).inner.get_name() == "compressed_tensors"


class TestWhatTheSourcesConfigIsTold:
    """The engine tells the config that it has; the source's decides about layers."""

    @pytest.fixture
    def document(self, folders) -> dict:
        found = moeq.open(folders[INT4]).source.config["quantization_config"]
        ignored = [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
        return {**found, "original": {**found["original"], "ignore": ignored}}

    def unquantised(self, config: MoeqConfig, name: str) -> bool:
        return isinstance(config.get_quant_method(LinearBase(1, 1), name), UnquantizedLinearMethod)

    def test_which_layers_the_model_makes_one_of(self, document) -> None:
        joined = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        config = MoeqConfig.from_config({**document, "packed_modules_mapping": joined, "hf_config": None})
        assert config.packed_modules_mapping == joined
        assert self.unquantised(config, "model.layers.0.self_attn.qkv_proj")
        config = MoeqConfig.from_config({**document, "packed_modules_mapping": {}})
        config.update_packed_modules_mapping(joined)
        assert self.unquantised(config, "model.layers.0.self_attn.qkv_proj")

    def test_how_the_model_names_them(self, document) -> None:
        config = MoeqConfig.from_config(document)
        config.apply_weight_name_mapper(WeightsMapper(orig_to_new_prefix={"model.": "language_model."}))
        assert self.unquantised(config, "language_model.layers.0.self_attn.q_proj")

    def test_that_the_key_value_cache_has_scales(self, document) -> None:
        assert MoeqConfig.from_config(document).kv_cache_quant_algo is None
        scheme = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
        document["original"]["kv_cache_scheme"] = scheme
        assert MoeqConfig.from_config(document).kv_cache_quant_algo == "FP8"

    def test_blocks_of_weights(self, document) -> None:
        fp8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        assert MoeqConfig.from_config({**document, "original": fp8}).weight_block_size == [128, 128]
        assert MoeqConfig(None).weight_block_size is None


def test_shared_experts_stay_what_they_are(folders) -> None:
    """The engine runs them as one more routed expert where it can, which converted experts have no room for."""

    class Model:
        shared_experts_fusion_disable_reason = staticmethod(lambda hf_config, quant_config: None)
        num_fusable_shared_experts = staticmethod(lambda hf_config: 1)

    config = config_of(folders[INT4])
    assert moe_utils.resolve_shared_experts_config(Model, None, config.inner).num_fused_shared_experts == 1
    assert moe_utils.resolve_shared_experts_config(Model, None, config).num_fused_shared_experts == 0
    assert config.can_fuse_shared_expert() is False


class TestDraftLayers:
    @pytest.fixture(autouse=True)
    def drafting(self) -> Iterator[None]:
        get_flags().moe.in_speculative_scope = True
        yield
        get_flags().moe.in_speculative_scope = False

    def experts(self) -> FusedMoE:
        layer = FusedMoE.__new__(FusedMoE)
        torch.nn.Module.__init__(layer)
        layer.is_draft = get_flags().moe.in_speculative_scope
        return layer

    def test_of_the_same_checkpoint_are_not_converted_whatever_their_number(self, folders) -> None:
        """Qwen3-Next's class names its draft layer `model.layers.0`, like the first of the model."""
        config_of(folders[INT4])
        assert MoeqConfig(None).get_quant_method(self.experts(), "model.layers.0.mlp.experts") is None

    def test_a_draft_model_of_its_own_is_read_from_its_own_folder(self, folders) -> None:
        config_of(folders["ct-w8a8-qwen3moe"])
        with get_spec().override(speculative_draft_model_path=str(folders[INT4])):
            method = MoeqConfig(None).get_quant_method(self.experts(), "model.layers.0.mlp.experts")
        assert method.experts.checkpoint.source.name == moeq.open(folders[INT4]).source.name


class TestRefusals:
    def refused(self, folder: Path, **options: object) -> MoeqError:
        with pytest.raises(MoeqError) as caught:
            loaded_layer(folder, **options)
        return caught.value

    def test_another_version(self, monkeypatch) -> None:
        monkeypatch.setattr(plugin, "version", lambda name: "0.5.99")
        with pytest.raises(MoeqError, match=r"SGLang 0\.5\.99") as caught:
            plugin.register()
        assert "sglang==0.5.23" in (caught.value.hint or "")

    def test_an_activation_that_the_kernels_do_not_compute(self, folders) -> None:
        assert "silu_rounded" in self.refused(folders[INT4], activation="silu_rounded").message

    @pytest.mark.parametrize(
        ("config", "expected"),
        [
            ({}, {"activation": "silu", "limit": None}),
            ({"swiglu_limit": 10.0}, {"activation": "silu", "limit": 10.0}),
            # Step-3.5: without alpha the engine clamps after the sigmoid.
            ({"gemm1_clamp_limit": 7.0}, {"activation": "swiglu_step", "limit": 7.0}),
            (
                {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0},
                {"activation": "swiglu_oai", "alpha": 1.702, "beta": 1.0, "limit": 7.0},
            ),
            # Kimi-K3: the engine hands over both bounds in these.
            (
                {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0},
                {"activation": "situ", "alpha": 4.0, "limit": 25.0},
            ),
            ({"activation": "gelu_tanh"}, {"activation": "gelu_tanh", "limit": None}),
            ({"activation": "relu2", "is_gated": False}, {"activation": "relu2", "limit": None}),
        ],
    )
    def test_activations_and_their_numbers(self, config: dict, expected: dict) -> None:
        from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

        from moeq.engines.sglang.config import activation_arguments

        assert activation_arguments(MoeRunnerConfig(**config)) == expected

    def test_e4m3_activations_beside_four_bit_weights(self, folders, monkeypatch) -> None:
        """The environment variable asks for them, and only Hopper GPUs multiply them."""
        monkeypatch.setenv("MOEQ_ACTIVATIONS", "fp8")
        with pytest.raises(MoeqError, match="fp8 activations") as caught:
            loaded_layer(folders["ct-int4-g128-qwen3moe"])
        assert caught.value.code == "answer.no-kernel"

    @pytest.mark.parametrize("option", [{"cpu_offload_gb": 8}, {"offload_group_size": 4}])
    def test_experts_that_are_moved_away(self, option, folders) -> None:
        """Kernels would read what is left, or nothing, and give numbers all the same."""
        config_of(folders[INT4])
        with get_exec().offload.override(**option):
            experts = ConvertedExpertsSource(open_converted(folders[INT4]))
            method = MoeqMoEMethod(experts, experts.checkpoint.manifest.layers[0])
            layer = SimpleNamespace(num_fused_shared_experts=0)
            with pytest.raises(MoeqError) as caught:
                method.create_weights(layer, 4, 256, 128, torch.bfloat16)
        assert caught.value.code == "usage.offload"

    def test_another_way_to_the_tensors(self, folders) -> None:
        error = self.refused(folders[INT4], load_format="sharded_state")
        assert error.code == "usage.load-format"
        assert "auto" in (error.hint or "")

    def test_adapters_on_experts(self, folders) -> None:
        backend = SimpleNamespace(name="triton", is_moe_lora=False)
        with pytest.raises(MoeqError, match="adapters") as caught:
            FusedMoEWithLoRA(loaded_layer(folders[INT4]), backend)
        assert caught.value.code == "answer.no-kernel"

    def test_outputs_of_every_choice(self, folders) -> None:
        assert self.refused(folders[INT4], no_combine=True).code == "answer.no-kernel"

    def test_ranks_that_the_files_do_not_serve(self, folders) -> None:
        error = self.refused(folders[INT4], tp=(0, 4))
        assert error.code == "usage.tp"
        assert "--tp 4" in (error.hint or "")

    def test_a_layout_without_a_kernel(self, checkpoints, tmp_path) -> None:
        folder = convert(checkpoints / INT4, tmp_path / "out", "humming-wna16/1")
        assert self.refused(folder).code == "answer.no-kernel"


#: Formats of random layers. SGLang reads neither NVFP4 nor MXFP8 as `make_checkpoint` names them (ModelOpt's).
KINDS = ("gptq", "awq", "ct-int4", "w8a8", "fp8-tensor", "fp8-channel", "fp8-block", "fp8-block-f32", "mxfp4")


@pytest.mark.cover("kind", "where")
@pytest.mark.parametrize("where", [{}, {"tp": (1, 2)}, {"ep": (1, 2)}], ids=["whole", "tp", "ep"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_source_is_packed_while_it_is_loaded(kind, where, tmp_path, monkeypatch) -> None:
    """`--quantization moeq`: tensors of a random layer are those of the converted folder, or both are refused alike."""
    made = sglang_config.make_deployment
    monkeypatch.setattr(sglang_config, "make_deployment", lambda options: made({**options, "gpu": "A100"}))
    for name, config in (("gptq", GPTQConfig), ("mxfp4", Mxfp4Config)):  # listed where there is a GPU
        monkeypatch.setitem(QUANTIZATION_METHODS, name, config)
    draw = random.Random(f"{kind} {where}")
    model = make_checkpoint.MODELS["tiny-oss" if kind == "mxfp4" else "tiny"]
    sizes = {"hidden": 128 * draw.randint(1, 4), "intermediate": 256 * draw.randint(1, 2)}
    model = replace(model, **sizes, num_experts=2 * draw.randint(4, 6), attention={})
    source, out = tmp_path / "source", tmp_path / "out"
    make_checkpoint.write_checkpoint(source, model, kind, make_checkpoint.Size(2, None, 64), seed=draw.randrange(99))
    ranks = {name: size for name, (_, size) in where.items()}
    ranks |= {"tp": ranks["ep"]} if "ep" in ranks else {}
    refused = None
    try:
        moeq.convert(source, out, moeq.Deployment(gpu=parse_gpu("A100"), engine=BUILTIN, **ranks))
    except MoeqError as error:
        refused = error
    if refused is not None:
        with pytest.raises(MoeqError) as caught:
            loaded_layer(source, **where)
        assert caught.value.code == refused.code
        return
    wanted, found = (dict(loaded_layer(folder, **where).named_parameters()) for folder in (out, source))
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
