"""vLLM's quantisation config `moeq`: which checkpoint it opens, the deployment it describes, what classes never see."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.vllm_engine import config_of, engine, experts_layer, ranks_of
from torch import nn
from vllm.config import LoadConfig
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

import moeq
from moeq.deploy.gpus import parse_gpu
from moeq.engines.choice import EngineOptions
from moeq.engines.experts_source import open_experts
from moeq.engines.vllm import config as config_module
from moeq.engines.vllm.config import MoeqConfig, deployment_of, method_of
from moeq.engines.vllm.engine_experts import RELEASE
from moeq.engines.vllm.experts_method import MoeqMoEMethod
from moeq.errors import MoeqError
from moeq.oracle.loaders import TRANSFORMERS_GUARD
from moeq.oracle.versions import BUILTIN

NAME = "gptq-int4-g32-qwen3moe"


class Inner:
    """Config of a source's method that notes what it is told."""

    packed_modules_mapping: Any = None
    kv_cache_scheme = None

    def __init__(self) -> None:
        self.told: list[Any] = []

    def get_name(self) -> str:
        return "fp8"

    def maybe_update_config(self, *given: Any, **named: Any) -> None:
        self.told.append((given, named))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> tuple[str, Any]:
        return prefix, self.packed_modules_mapping

    def apply_vllm_mapper(self, mapper: Any) -> None:
        self.told.append(mapper)


@pytest.mark.parametrize(
    ("ranks", "dtype", "kernels", "expected"),
    [
        ((1, 1, False), torch.bfloat16, "auto", {"tp": 1, "ep": 1, "dp": 1, "dtype": "bf16"}),
        ((2, 3, False), torch.float16, "auto", {"tp": 2, "ep": 1, "dp": 3, "dtype": "fp16"}),
        ((2, 3, True), torch.float32, "engine", {"tp": 2, "ep": 6, "dp": 3, "dtype": "bf16"}),
        ((4, 1, True), None, "moeq", {"tp": 4, "ep": 4, "dp": 1, "dtype": "bf16"}),
    ],
)
def test_the_deployment_of_a_source(ranks, dtype, kernels, expected, monkeypatch) -> None:
    monkeypatch.setattr(config_module, "current_gpu", lambda: parse_gpu("A100"))
    tp, dp, spread = ranks
    parallel = SimpleNamespace(tensor_parallel_size=tp, data_parallel_size=dp, enable_expert_parallel=spread)
    model = None if dtype is None else SimpleNamespace(dtype=dtype)
    config = SimpleNamespace(parallel_config=parallel, model_config=model)
    found = deployment_of(config, EngineOptions(kernels=kernels))
    own = kernels == "moeq"
    assert (found.engine, found.backend) == (BUILTIN if own else f"vllm@{RELEASE}", "auto")
    assert {name: getattr(found, name) for name in expected} == expected
    assert found.gpu.name == "A100"
    config.kernel_config = SimpleNamespace(moe_backend="marlin")
    assert deployment_of(config, EngineOptions(kernels=kernels)).backend == ("auto" if own else "marlin")


def test_a_repository_is_opened_at_its_revision_and_a_folder_as_it_is(folders, monkeypatch) -> None:
    asked: list[tuple[str, str | None, bool]] = []

    def opened(where: str, revision: str | None, log: Any, *, converted: bool) -> Any:
        asked.append((where, revision, converted))
        return open_experts(str(folders[NAME]), None, log, converted=converted)

    monkeypatch.setattr(config_module, "open_experts", opened)
    document = {"quant_method": "moeq"}  # the engine's config of the source's method would look for the repository
    for where, revision in (("org/model", "abc"), (str(folders[NAME]), None)):
        config = MoeqConfig.from_config(document)
        assert config.checkpoint is None
        config.maybe_update_config(where, revision="abc")
        assert asked.pop() == (where, revision, True)
        assert config.checkpoint is not None
        copied = pickle.loads(pickle.dumps(config))
        assert asked.pop() == (where, revision, True), "each process of a rank opens it again"
        assert copied.checkpoint is not None
        assert copied.experts is not config.experts
    empty = pickle.loads(pickle.dumps(MoeqConfig.from_config(document)))
    assert empty.experts is None
    assert not asked


def test_a_source_whose_config_is_in_a_file_of_its_own(checkpoints: Path) -> None:
    """The engine then knows no config, and the checkpoint does."""
    source = checkpoints / NAME
    config = MoeqConfig(None, converted=False)
    assert config.inner is None
    config.maybe_update_config(str(source))
    assert "gptq" in config.inner.get_name()
    kept = MoeqConfig(None, converted=False)
    kept.unread = MoeqError("answer.no-backend", "it is not read")
    kept.maybe_update_config(str(source))
    assert kept.inner is None, "why it is not read is said when a layer is made"
    given = MoeqConfig(None, converted=False)
    given.inner = inner = Inner()  # type: ignore[assignment]
    given.maybe_update_config(str(source), "hf", "abc")
    assert given.inner is inner
    assert inner.told == [((str(source),), {"hf_config": "hf", "revision": "abc"})]
    given.apply_vllm_mapper("mapper")
    assert inner.told[-1] == "mapper"
    MoeqConfig(None, converted=True).apply_vllm_mapper("mapper")


@pytest.mark.parametrize("guard", [TRANSFORMERS_GUARD, "sdpa"])
def test_classes_of_transformers_run_their_experts_as_usual(guard: str, folders) -> None:
    document = moeq.open(folders[NAME]).source.config["quantization_config"]
    whole = SimpleNamespace(_experts_implementation=guard)
    MoeqConfig.from_config({**document, "original": None}).maybe_update_config(str(folders[NAME]), hf_config=whole)
    assert whole._experts_implementation == ("eager" if guard == TRANSFORMERS_GUARD else guard)


class TestMethods:
    def layer(self, folder: Path) -> Any:
        layer = RoutedExperts.__new__(RoutedExperts)
        nn.Module.__init__(layer)
        layer.moe_config = ranks_of(folder)[0]
        return layer

    def test_only_packed_experts_get_moeqs(self, folders) -> None:
        config = config_of(folders[NAME])
        config.inner, config.packed_modules_mapping = Inner(), {"qkv_proj": ["q_proj"]}
        experts = self.layer(folders[NAME])
        others = [(experts, "model.layers.7.mlp.experts"), (experts, "mtp.layers.0.mlp.experts")]
        others += [(nn.Module(), "model.layers.0.mlp.experts")]
        with engine(additional_config={"moeq": {"kernels": "moeq"}}):
            method = config.get_quant_method(experts, "model.layers.1.mlp.experts")
            assert isinstance(method, MoeqMoEMethod)
            assert (method.entry.layer, method.dummy) == (1, False)
            for layer, name in others:
                assert config.get_quant_method(layer, name) == (name, config.packed_modules_mapping)
        dummy = LoadConfig(load_format="dummy")
        with engine(additional_config={"moeq": {"kernels": "moeq"}}, load_config=dummy):
            assert config.get_quant_method(experts, "model.layers.1.mlp.experts").dummy is True

    def test_a_part_without_quantised_tensors_is_found_once(self, folders) -> None:
        config = config_of(folders[NAME])
        tensors = config.checkpoint.source.tensors
        assert config._is_plain("model") is False
        assert config._is_plain("lm_head") is True
        assert config._is_plain("vision_tower") is False, "it has no tensors"
        assert config._plain == {"model": False, "lm_head": True, "vision_tower": False}
        assert {name.partition(".")[0] for name in tensors} == {"model", "lm_head"}


def test_modelopts_methods_are_told_apart_by_the_engines_classes() -> None:
    assert method_of({"quant_method": "gptq"}) == "gptq"
    nvfp4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    assert method_of(nvfp4) == "modelopt_fp4"
    assert method_of({"quant_method": "modelopt", "quant_algo": "FP8"}) == "modelopt"
    assert method_of({"quant_method": "modelopt", "quant_algo": "SOMETHING"}) == "modelopt"


class TestClasses:
    def test_each_class_is_wrapped_once_and_hides_all_names(self, monkeypatch) -> None:
        class Model(nn.Module):
            def load_weights(self, weights: Any) -> set[str]:
                return {name for name, _ in weights}

        original = Model.load_weights
        monkeypatch.setattr(config_module, "get_model_architecture", lambda config: (Model, "Model"))
        monkeypatch.setattr(config_module, "_STACKED", {})
        model: Any = SimpleNamespace()
        config_module.leave_experts_out(None, frozenset({"a"}))
        assert Model.load_weights is original
        config_module.leave_experts_out(model, frozenset({"a"}))
        wrapped = Model.load_weights
        assert wrapped is not original
        config_module.leave_experts_out(model, frozenset({"b"}))
        assert Model.load_weights is wrapped
        assert config_module._STACKED[Model] == {"a", "b"}

    def test_the_parameters_of_experts_count_as_loaded(self, folders, monkeypatch) -> None:
        class Model(nn.Module):
            def load_weights(self, weights: Any) -> set[str]:
                return {name for name, _ in weights}

        monkeypatch.setattr(config_module, "_STACKED", {Model: {"stacked"}})
        load, model = config_module._without_experts(Model), Model()
        model.experts = layer = experts_layer(folders[NAME], kernels="moeq")
        tensor = torch.zeros(1)
        found = load(model, [("norm", tensor), ("stacked", tensor)])
        assert found == {"norm", *(f"experts.{name}" for name, _ in layer.named_parameters())}

    def test_whether_the_engine_itself_reads(self, monkeypatch) -> None:
        loader = DefaultModelLoader.__new__(DefaultModelLoader)
        assert config_module._is_engines_reading(loader.get_all_weights(None, None)) is True
        assert config_module._is_engines_reading(name for name in ()) is False
        assert config_module._is_engines_reading([]) is False
        monkeypatch.delattr(DefaultModelLoader, "get_all_weights")
        assert config_module._is_engines_reading([]) is False


def test_a_layer_without_a_model_is_built(folders) -> None:
    """`run-check` builds layers so."""
    config = copy.copy(config_of(folders[NAME]))
    config.inner = None
    with engine():
        assert config.get_quant_method(nn.Module(), "model.layers.0.x") is None
