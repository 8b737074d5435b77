"""What moeq's quantiser in transformers asks, refuses and leaves alone, where no model has to run."""

from __future__ import annotations

import importlib
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines.transformers_models import auto, load, packing_config
from torch import nn

import moeq
from moeq.deploy.gpus import parse_gpu
from moeq.engines.experts_source import PackingExpertsSource
from moeq.errors import MoeqError
from moeq.oracle.versions import BUILTIN

NAME = "gptq-int4-g32-qwen3moe"


@pytest.fixture
def module() -> Any:
    """`moeq.engines.transformers`, once the installed version is known to fit."""
    auto()
    return importlib.import_module("moeq.engines.transformers")


class Experts(nn.Module):
    """What the experts interface of transformers makes of a module."""

    is_transposed, has_bias = False, True


def model_of(module: nn.Module, **more: Any) -> Any:
    model = nn.Module()
    model.layers = nn.ModuleList([nn.Module()])
    model.layers[0].experts = module
    for name, value in {"config": SimpleNamespace(name_or_path="org/model"), "dtype": torch.float16, **more}.items():
        setattr(model, name, value)
    return model


def test_what_a_config_says(module: Any) -> None:
    plain = module.MoeqConfig()
    assert (plain.quant_method, plain.manifest, plain.layouts) == ("moeq", "moeq.json", [])
    assert (plain.original, plain.source, plain.revision, plain.prove_all) == (None, None, None, False)
    given = module.MoeqConfig(layouts=["a/1"], source="org/x", revision="abc", prove_all=True, other=1)
    assert (given.layouts, given.source, given.revision, given.prove_all) == (["a/1"], "org/x", "abc", True)
    assert given.more == {"other": 1}


def test_the_config_that_packs_keeps_the_sources_own(checkpoints: Path) -> None:
    original = moeq.open(checkpoints / NAME).source.config["quantization_config"]
    for prove_all in (False, True):
        found = packing_config(checkpoints / NAME, prove_all=prove_all).quantization_config
        assert found.pop("original") == original
        expected = {"quant_method": "moeq", "source": str(checkpoints / NAME), "revision": None}
        assert found == {**expected, "prove_all": prove_all}
    assert packing_config(checkpoints / NAME).quantization_config["prove_all"] is False


def test_what_transformers_may_not_do_with_packed_experts(module: Any) -> None:
    quantizer = module.MoeqQuantizer(module.MoeqConfig())
    assert quantizer.requires_calibration is True, "it must not quantise on the fly"
    assert quantizer.is_serializable() is False
    assert quantizer.is_trainable is False
    assert quantizer.get_weight_conversions() == []


def test_experts_are_found_by_both_attributes(module: Any) -> None:
    half = nn.Module()
    half.is_transposed = False
    assert module._experts(model_of(half)) == []
    del half.is_transposed
    half.has_bias = False
    assert module._experts(model_of(half)) == []
    experts = Experts()
    assert module._experts(model_of(experts)) == [("layers.0.experts", experts)]


def test_plain_weights_do_not_run_as_packed_ones(module: Any) -> None:
    with pytest.raises(MoeqError, match="Experts holds plain weights") as refused:
        module.experts_forward(Experts(), *[torch.ones(1)] * 3)
    assert refused.value.code == "usage.not-converted"


def test_a_converted_folder_is_not_packed(converted: dict[str, Path]) -> None:
    with pytest.raises(MoeqError, match="is converted") as refused:
        load(converted[NAME], config=packing_config(converted[NAME]))
    assert refused.value.code == "usage.already-converted"
    assert refused.value.hint == "load it without packing_config"


@pytest.mark.parametrize(
    ("dtype", "name", "prove_all"),
    [(torch.float16, "fp16", True), (torch.bfloat16, "bf16", False), (torch.float32, "bf16", False)],
)
def test_a_source_is_packed_for_this_process(dtype, name, prove_all, checkpoints, module, monkeypatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(PackingExpertsSource, "decide", lambda self, *given: asked.extend(given))
    quantizer = module.MoeqQuantizer(module.MoeqConfig(source=str(checkpoints / NAME), prove_all=prove_all))
    for gpu in (None, parse_gpu("H100")):
        monkeypatch.setattr(module, "detect_gpu", lambda gpu=gpu: gpu)
        asked.clear()
        assert isinstance(quantizer._packing(SimpleNamespace(dtype=dtype)), PackingExpertsSource)
        deployment, prove = asked
        assert (deployment.engine, deployment.dtype) == (BUILTIN, name)
        assert deployment.gpu.name == ("A100" if gpu is None else "H100")
        assert prove == ("all" if prove_all else "sample")


def test_a_layer_that_is_not_quantised_beside_those_that_are(module: Any) -> None:
    quantizer = module.MoeqQuantizer(module.MoeqConfig())
    quantizer.packing = SimpleNamespace(entry={1: "planned"}.get)
    assert quantizer._entry(1) == "planned"
    with pytest.raises(MoeqError, match="the experts of layer 0 are not quantised") as refused:
        quantizer._entry(0)
    assert refused.value.code == "answer.not-convertible"


def test_a_model_without_files_is_refused(module: Any) -> None:
    for files in (None, []):
        with pytest.raises(MoeqError, match="a converted model needs its files") as refused:
            module._open(model_of(Experts()), files)
        assert refused.value.code == "usage.no-files"


def test_the_manifest_of_a_snapshot_is_fetched(converted, module: Any, tmp_path: Path, monkeypatch) -> None:
    """transformers downloads weights alone; a manifest that is there is not asked for again."""
    cache, fetched = tmp_path / "cache", []
    folder = cache / "models--org--model" / "snapshots" / "abc"
    shutil.copytree(converted[NAME], folder)
    (folder / "moeq.json").unlink()

    def cached_file(name: str, file: str, *, revision: str, cache_dir: Path) -> None:
        fetched.append((name, file, revision, cache_dir))
        shutil.copy(converted[NAME] / file, folder)

    monkeypatch.setattr(module, "cached_file", cached_file)
    files = [str(next(folder.glob("*.safetensors")))]
    for _ in range(2):
        assert module._open(model_of(Experts()), files).kind == "converted"
    assert fetched == [("org/model", "moeq.json", "abc", cache)]
    plain = tmp_path / "elsewhere" / "abc"
    plain.mkdir(parents=True)
    with pytest.raises(MoeqError):
        module._open(model_of(Experts()), [str(plain / "model.safetensors")])
    assert len(fetched) == 1


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_gpu_has_to_be_the_one_of_the_bytes(device: str, converted, module: Any, monkeypatch) -> None:
    experts, asked = Experts(), []
    experts.w13_weight = SimpleNamespace(device=torch.device(device))
    experts.converted = SimpleNamespace(entry="entry")
    monkeypatch.setattr(module, "check_device", lambda checkpoint, device: asked.append((checkpoint, device.type)))
    monkeypatch.setattr(module, "check_kernel", lambda *given: asked.append(given))
    quantizer = module.MoeqQuantizer(module.MoeqConfig())
    quantizer.converted = "checkpoint"
    model = model_of(experts)
    assert quantizer._process_model_after_weight_loading(model) is model
    kernel = ("entry", torch.float16, "bf16")
    assert asked == ([("checkpoint", "cuda"), kernel] if device == "cuda" else [])


def test_tensors_beside_experts_keep_the_dtype_of_their_kind(module: Any) -> None:
    """The router's, but neither the experts' own nor whole numbers; a model's plan of dtypes comes first."""
    experts, block = Experts(), nn.Module()
    experts.gate = nn.Parameter(torch.ones(2))
    block.experts, block.gate, block.norm = experts, nn.Linear(2, 2, bias=False), nn.LayerNorm(2)
    block.register_buffer("correction", torch.ones(2))
    block.register_buffer("counts", torch.ones(2, dtype=torch.int64))
    model = nn.Module()
    model.block, model.other, model.dtype = block, nn.Linear(2, 2), torch.float16
    asked = []

    def plan(dtype: torch.dtype) -> dict[str, torch.dtype]:
        asked.append(dtype)
        return {"correct*": torch.float32, "norm": torch.bfloat16}

    model._get_dtype_plan = plan
    block.gate.half()
    assert module._dtypes_beside(model) == {
        "block.gate.weight": torch.float16,
        "block.norm.weight": torch.bfloat16,
        "block.norm.bias": torch.bfloat16,
        "block.correction": torch.float32,
    }
    assert asked == [torch.float16]
    quantizer = module.MoeqQuantizer(module.MoeqConfig())
    quantizer.beside = {"block.correction": torch.float64}
    experts.w13_weight, experts.converted = torch.ones(1), None
    quantizer._process_model_after_weight_loading(model)
    assert block.correction.dtype == torch.float64


def test_keys_of_packed_experts_are_neither_missing_nor_unexpected(checkpoints: Path, module: Any, monkeypatch) -> None:
    found: list[Any] = []
    before = module.MoeqQuantizer._process_model_before_weight_loading

    def noted(self: Any, model: Any, **given: Any) -> None:
        before(self, model, **given)
        found.append(model)

    monkeypatch.setattr(module.MoeqQuantizer, "_process_model_before_weight_loading", noted)
    load(checkpoints / NAME, config=packing_config(checkpoints / NAME), dtype=torch.bfloat16)
    (model,) = found
    missing, unexpected = model._keys_to_ignore_on_load_missing, model._keys_to_ignore_on_load_unexpected
    prefix = "model.layers.1.mlp.experts"
    for patterns, names in (
        (missing, [f"{prefix}.w13_weight"]),
        (unexpected, [f"{prefix}.w13_weight", f"{prefix}.0.gate_proj.qweight"]),
    ):
        for name in names:
            assert any(re.search(pattern, name) for pattern in patterns), name
        for name in (f"x{prefix}.w13", f"{prefix}2.w13", "model.layers.11.mlp.experts.w13"):
            assert not any(re.search(pattern, name) for pattern in patterns), name
