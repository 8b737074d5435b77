"""Families of models in SGLang: small random ones, converted, in the engine's own classes on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_scripts import make_family
from engines.families import write_family
from engines.test_sglang_models import engine, model_of, parameters_beside_experts  # noqa: F401 - a fixture
from load.deployments import convert
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models import transformers

import moeq
from moeq.engines.sglang.config import MoeqMoEMethod, activation_arguments
from moeq.errors import MoeqError
from moeq.load import activation
from moeq.oracle.loaders import SGLANG_MODELS

#: Keys that published configs have and that transformers' class leaves out or names otherwise, by family.
PUBLISHED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "qwen3_moe": {},
    "mixtral": {},
    "olmoe": {},
    "phimoe": make_family.PUBLISHED["phimoe"],
    "minimax_m2": {**make_family.PUBLISHED["minimax_m2"], "rotary_dim": 32},
    "ernie4_5_moe": {},
    "glm4_moe": {},
    "glm4_moe_lite": {"first_k_dense_replace": 1},
    "deepseek_v2": {"moe_layer_freq": 1, "scoring_func": "softmax", "topk_method": "greedy"},
    "deepseek_v3": {"moe_layer_freq": 1, **make_family.PUBLISHED["deepseek_v3"]},
    "mellum": {},
    "lfm2_moe": {},
    "hy_v3": {"route_norm": True, "first_k_dense_replace": 1},
    "hunyuan_v1_moe": {"moe_intermediate_size": [128, 128], "use_mixed_mlp_moe": 1, "num_shared_expert": [1, 1]}
    | {"use_qk_norm": True},
    "exaone_moe": {"is_moe_layer": [False, True]},
    "dots1": {},
    "solar_open": {},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "sdar_moe": {"architectures": ["SDARMoeForCausalLM"]},
    "nemotron_h": {"layers_block_type": ["moe", "attention"]},
    "cohere2_moe": {"first_k_dense_replace": 1},
    "deepseek_v32": {"moe_layer_freq": 1, **make_family.PUBLISHED["deepseek_v3"]},
    "glm_moe_dsa": {"moe_layer_freq": 1, **make_family.PUBLISHED["deepseek_v3"]},
    "mimo_v2_flash": {"hybrid_layer_pattern": [1, 0], "moe_layer_freq": [0, 1], "sliding_window_size": 32}
    | {"swa_head_dim": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_rope_theta": 1e4}
    | {"layernorm_epsilon": 1e-5, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True}
    | {"rope_theta": 1e4, "rope_parameters": None, "rope_scaling": None},
}
#: Attributes that models of transformers read and its class of the config leaves out in some versions.
ATTRIBUTES: dict[str, dict[str, Any]] = {
    "cohere2_moe": {"mlp_layer_types": ["dense", "sparse"], "prefix_dense_intermediate_size": 128}
}
#: Options without which the engine refuses a family on a CPU.
OPTIONS: dict[str, dict[str, Any]] = {
    "exaone_moe": {"attention_backend": "triton"},
    "qwen3_next": {"disable_radix_cache": True},
    "qwen3_5_moe_text": {"disable_radix_cache": True},
    "nemotron_h": {"disable_radix_cache": True},
}


def folders(family: str, tmp_path: Path) -> tuple[Path, Path]:
    """A converted folder without a config for the other layers, and the folder of plain weights."""
    write_family(tmp_path / "source", family, **ATTRIBUTES.get(family, {}))
    for folder in ("source", "source-plain"):
        change(tmp_path / folder, lambda document: document.update(PUBLISHED.get(family, {})))
    out = convert(tmp_path / "source", tmp_path / "out", "marlin-wna16/1")
    change(out, lambda document: document["quantization_config"].pop("original"))
    return out, tmp_path / "source-plain"


def change(folder: Path, by: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((folder / "config.json").read_text())
    by(document)
    (folder / "config.json").write_text(json.dumps(document))


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers, "get_device", lambda: "cpu")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))  # options of sparse attention ask for it


@pytest.mark.cover(every=8)
@pytest.mark.parametrize("family", PUBLISHED)
def test_experts_and_other_parameters(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts are the conversion's, and all other parameters those of the engine's own load of the plain weights."""
    out, plain = folders(family, tmp_path)
    options = OPTIONS.get(family, {})
    model = model_of(out, tmp_path / "store", **options)
    checkpoint = moeq.open(out)
    assert checkpoint.info.architecture in SGLANG_MODELS
    layers = [one for one in model.modules() if isinstance(one, FusedMoE)]
    assert all(isinstance(layer.quant_method, MoeqMoEMethod) for layer in layers)
    numbers = [layer.quant_method.entry.layer for layer in layers]
    assert numbers == [entry.layer for entry in checkpoint.manifest.layers]
    for number, layer in zip(numbers, layers, strict=True):
        wanted = moeq.load_tensors(out, number)
        for role in ("w13", "w2"):
            for part, tensor in getattr(wanted, role).items():
                assert torch.equal(getattr(layer, f"{role}_{part}").data, tensor), (number, role, part)
        meant = activation.activation_of(checkpoint.info.activation, checkpoint.source.config)
        assert activation_arguments(layer.quant_method.config) == activation.activation_arguments(meant)
    monkeypatch.setattr(DefaultModelLoader, "postprocess_weights", staticmethod(lambda model, device: None))
    found, own = (
        dict(parameters_beside_experts(one)) for one in (model, model_of(plain, tmp_path / "store", **options))
    )
    assert found.keys() == own.keys()
    assert [name for name, tensor in own.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.slow
def test_a_class_that_runs_its_experts_otherwise(tmp_path: Path) -> None:
    out, _ = folders("afmoe", tmp_path)
    with pytest.raises(
        MoeqError, match="AfmoeForCausalLM does not run its experts through SGLang's FusedMoE"
    ) as caught:
        model_of(out, tmp_path / "store")
    assert caught.value.code == "usage.unsupported-model"
