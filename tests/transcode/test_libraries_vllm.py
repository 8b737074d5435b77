"""Transcoded checkpoints read by vLLM: its config parsers, names and sizes of its parameters. Skipped without vLLM."""

from __future__ import annotations

import json
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transcode.libraries import FP8, FP8_OF_MODELOPT, INTEGERS, MXFP8, NVFP4, Tensors, result


def _modules(config: dict[str, Any], tensors: Tensors) -> tuple[list[str], list[str]]:
    """Quantised modules and plain ones with a matrix, by tensors alone."""
    marks = ("weight_packed", "qweight", "weight_scale_inv", "weight_scale")
    names = {name.rpartition(".")[0]: name for name in tensors}
    quantised = {name for name in names if any(f"{name}.{mark}" in tensors for mark in marks)}
    plain = [
        name
        for name in names
        if name not in quantised
        and f"{name}.weight" in tensors
        and tensors[f"{name}.weight"].dim() == 2
        and "embed" not in name
    ]
    return sorted(quantised), sorted(plain)


_FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}


def _fused(names: list[str]) -> list[str]:
    """Module names as vLLM fuses them."""
    return [name.replace("q_proj", "qkv_proj") for name in names if not name.endswith(("k_proj", "v_proj"))]


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "compressed-tensors") for name in (*INTEGERS, "ct-mxfp4-qwen3moe")),
        ("ct-mxfp4-qwen3moe", "nvfp4-compressed-tensors"),
        *((name, "compressed-tensors") for name in (*FP8, *NVFP4, MXFP8)),
    ],
)
def test_vllm_parses_compressed_tensors(checkpoints: Path, tmp_path: Path, name: str, target: str) -> None:
    pytest.importorskip("vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors")
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    config, tensors = result(checkpoints / name, tmp_path / "out", target)
    parsed = CompressedTensorsConfig.from_config(config["quantization_config"])
    parsed.packed_modules_mapping = _FUSED
    quantised, plain = _modules(config, tensors)
    linear = torch.nn.Linear(1, 1)
    for module in _fused(quantised):
        scheme = parsed.get_scheme_dict(linear, module)
        assert scheme is not None, module
        kind = {
            "pack-quantized": parsed._is_wNa16_group_channel(scheme["weights"], scheme["input_activations"]),
            "mxfp4-pack-quantized": parsed._is_mxfp4(scheme["weights"]),
            "nvfp4-pack-quantized": parsed._is_nvfp4_format(scheme["weights"]),
            "mxfp8-quantized": parsed._is_mxfp8(scheme["weights"]),
            "float-quantized": scheme["weights"].type == "float" and scheme["weights"].num_bits == 8,
        }
        assert kind[scheme["format"]], module
        if scheme["format"] == "pack-quantized":
            assert scheme["weights"].symmetric == (f"{quantised[0]}.weight_zero_point" not in tensors)
    for module in _fused(plain):
        assert parsed.get_scheme_dict(linear, module) is None, module


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("name", INTEGERS)
def test_vllm_parses_gptq(checkpoints: Path, tmp_path: Path, name: str, version: str) -> None:
    pytest.importorskip("vllm.model_executor.layers.quantization.auto_gptq")
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQConfig
    from vllm.model_executor.layers.quantization.utils.gptq_utils import get_dynamic_override

    config, tensors = result(checkpoints / name, tmp_path / "out", version)
    table = config["quantization_config"]
    if not table["sym"]:
        # What vLLM 0.33 does not take at all, in whichever version: compressed-tensors is its way.
        with pytest.raises(ValueError, match="sym=False"):
            AutoGPTQConfig.from_config(table)
        return
    parsed = AutoGPTQConfig.from_config(table)
    assert AutoGPTQConfig.override_quantization_method(table, None) == "auto_gptq"
    quantised, plain = _modules(config, tensors)
    assert all(get_dynamic_override(parsed, name) is None for name in _fused(quantised))
    assert all(get_dynamic_override(parsed, name) is False for name in _fused(plain) if name != "lm_head")


def test_vllm_parses_block_fp8(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm.model_executor.layers.quantization.fp8")
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config
    from vllm.model_executor.layers.quantization.utils.quant_utils import is_layer_skipped

    config, tensors = result(checkpoints / "ct-mxfp4-qwen3moe", tmp_path / "out", "fp8")
    parsed = Fp8Config.from_config(config["quantization_config"])
    assert parsed.weight_block_size == [128, 128]
    quantised, plain = _modules(config, tensors)
    assert not any(is_layer_skipped(name, parsed.ignored_layers, _FUSED) for name in _fused(quantised))
    assert all(is_layer_skipped(name, parsed.ignored_layers, _FUSED) for name in _fused(plain))


def test_vllm_parses_nvfp4(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm.model_executor.layers.quantization.modelopt")
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    config, tensors = result(checkpoints / "ct-mxfp4-qwen3moe", tmp_path / "out", "nvfp4")
    side = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    # A vLLM that finds the side file alone adds the method's name.
    for table in (config["quantization_config"], {**side, "quant_method": "modelopt"}):
        assert ModelOptNvFp4Config.override_quantization_method(table, None) == "modelopt_fp4"
        parsed = ModelOptNvFp4Config.from_config(table)
        parsed.packed_modules_mapping = _FUSED
        assert parsed.group_size == 16
        quantised, plain = _modules(config, tensors)
        assert not any(parsed.is_layer_excluded(name) for name in _fused(quantised))
        assert all(parsed.is_layer_excluded(name) for name in _fused(plain))


@pytest.mark.parametrize("name", [*FP8_OF_MODELOPT, MXFP8])
def test_vllm_parses_modelopt(checkpoints: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("vllm.model_executor.layers.quantization.modelopt")
    from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptMxFp8Config

    config, tensors = result(checkpoints / name, tmp_path / "out", "modelopt")
    side = json.loads((tmp_path / "out" / "hf_quant_config.json").read_text())
    for table in (config["quantization_config"], {**side, "quant_method": "modelopt"}):
        kind = ModelOptMxFp8Config if name == MXFP8 else ModelOptFp8Config
        parsed = kind.from_config(table)
        parsed.packed_modules_mapping = _FUSED
        assert parsed.quant_method == ("MXFP8" if name == MXFP8 else "FP8")
        quantised, plain = _modules(config, tensors)
        assert quantised
        assert not any(parsed.is_layer_excluded(module) for module in _fused(quantised))
        assert all(parsed.is_layer_excluded(module) for module in _fused(plain))


def test_vllm_knows_gpt_oss(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("vllm.model_executor.layers.quantization.mxfp4")
    from transformers import AutoConfig
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4Config

    config, _ = result(checkpoints / "mxfp4-gptoss", tmp_path / "out", "mxfp4")
    loaded = AutoConfig.from_pretrained(tmp_path / "out")
    table = config["quantization_config"]
    assert GptOssMxfp4Config.override_quantization_method(table, None, loaded) == "gpt_oss_mxfp4"


def _vllm_method(table: dict[str, Any], parsed: Any, module: str) -> Any:
    """vLLM's MoE method for a config, without the choice of a kernel, which needs a device."""
    from vllm.model_executor.layers.quantization.auto_gptq import AutoGPTQMoEMethod
    from vllm.model_executor.layers.quantization.fp8 import Fp8MoEMethod
    from vllm.model_executor.layers.quantization.modelopt import (
        ModelOptFp8MoEMethod,
        ModelOptMxFp8FusedMoE,
        ModelOptNvFp4FusedMoE,
    )

    moe = SimpleNamespace(is_act_and_mul=True, w13_num_shards=2, has_bias=False)
    known: dict[str, Any] = {"moe": moe, "quant_config": parsed, "weight_scale_refine": None, "use_global_sf": False}
    if table["quant_method"] == "compressed-tensors":
        scheme = parsed.get_scheme_dict(torch.nn.Linear(1, 1), module)
        weights = scheme["weights"]
        known |= {"strategy": weights.strategy, "group_size": weights.group_size, "symmetric": weights.symmetric}
        block = weights.block_structure
        known |= {"weight_quant": weights, "input_quant": scheme["input_activations"], "weight_block_size": block}
        known |= {"block_quant": block is not None}
        if scheme["format"] == "float-quantized":
            known["static_input_scales"] = not scheme["input_activations"].dynamic
        known |= {"num_bits": weights.num_bits, "packed_factor": Fraction(32, weights.num_bits)}
        ending, name = {
            "pack-quantized": ("wna16", "CompressedTensorsWNA16MoEMethod"),
            "mxfp4-pack-quantized": ("w4a4_mxfp4", "CompressedTensorsW4A4Mxfp4MoEMethod"),
            "nvfp4-pack-quantized": ("w4a4_nvfp4", "CompressedTensorsW4A4Nvfp4MoEMethod"),
            "float-quantized": ("w8a8_fp8", "CompressedTensorsW8A8Fp8MoEMethod"),
            "mxfp8-quantized": ("w8a8_mxfp8", "CompressedTensorsW8A8Mxfp8MoEMethod"),
        }[scheme["format"]]
        folder = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"
        kind = getattr(import_module(f"{folder}.compressed_tensors_moe_{ending}"), name)
    elif table["quant_method"] == "gptq":
        kind, known["input_dtype"] = AutoGPTQMoEMethod, None
    elif table["quant_method"] == "fp8":
        block = parsed.weight_block_size
        kind, known["moe_block_shape"] = Fp8MoEMethod, block
        known |= {"block_quant": True, "weight_block_size": block, "weight_scale_name": "weight_scale_inv"}
    else:
        kinds = {"FP8": ModelOptFp8MoEMethod, "MXFP8": ModelOptMxFp8FusedMoE}
        kind = kinds.get(table["quant_algo"], ModelOptNvFp4FusedMoE)
    method = object.__new__(kind)
    method.__dict__.update(known)
    return method


@pytest.mark.parametrize(
    ("name", "target"),
    [
        *((name, "compressed-tensors") for name in (*INTEGERS, "ct-mxfp4-qwen3moe")),
        *((name, "gptq") for name in INTEGERS if "asym" not in name and "awq" not in name),
        *(("ct-mxfp4-qwen3moe", target) for target in ("fp8", "nvfp4", "nvfp4-compressed-tensors")),
        *((name, "modelopt") for name in ("modelopt-fp8-qwen3moe", "ct-fp8-tensor-qwen3moe", MXFP8, *NVFP4)),
        *((name, "compressed-tensors") for name in (*FP8, *NVFP4, MXFP8)),
    ],
)
def test_vllm_has_a_place_for_every_expert(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, target: str
) -> None:
    """Its mapping meets every tensor, the parameters of its MoE method have their sizes, and none stays empty."""
    pytest.importorskip("vllm.model_executor.layers.fused_moe.routed_experts")
    from vllm.distributed import parallel_state
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.quantization import get_quantization_config

    config, tensors = result(checkpoints / name, tmp_path / "out", target)
    table = config["quantization_config"]
    monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=1, rank_in_group=0))
    algorithms = {"FP8": "modelopt", "MXFP8": "modelopt_mxfp8"}
    methods = {"gptq": "auto_gptq", "modelopt": algorithms.get(table.get("quant_algo"), "modelopt_fp4")}
    parsed = get_quantization_config(methods.get(table["quant_method"], table["quant_method"])).from_config(table)
    experts = {key: tensor for key, tensor in tensors.items() if ".experts." in key}
    short = any(".w1." in key for key in experts)
    gate, up, down = ("w1", "w3", "w2") if short else ("gate_proj", "up_proj", "down_proj")
    count = 1 + max(int(key.split(".experts.")[1].split(".")[0]) for key in experts)
    mapping = RoutedExperts.build_expert_params_mapping(gate, down, up, count, routed_experts_prefix="")
    layer: Any = torch.nn.Module()
    layer.hidden_size, layer.intermediate_size_per_partition = config["hidden_size"], _intermediate(config)
    first = next(key for key in experts if "layers.1." in key)
    _vllm_method(table, parsed, first.rpartition(".")[0]).create_weights(
        layer, count, config["hidden_size"], _intermediate(config), torch.bfloat16, global_num_experts=count,
        intermediate_size_full=_intermediate(config), weight_loader=None,
    )  # fmt: skip
    parameters, filled = dict(layer.named_parameters()), dict[str, int]()
    for key, tensor in experts.items():
        if "layers.1." not in key or key.endswith("g_idx"):  # which vLLM leaves out where columns are in order
            continue
        ((parameter, weight, expert, shard),) = [row for row in mapping if row[1] in key]
        written = key.partition("experts.")[2]
        full = parameter.removeprefix("experts.") + written[len(weight) - len("experts.") :]
        place = parameters[full][expert]
        # bfloat16 scales, as llm-compressor writes them, are copied into float32 parameters.
        widened = key.endswith("_scale") and (tensor.dtype, place.dtype) == (torch.bfloat16, torch.float32)
        assert key.endswith("weight_shape") or widened or tensor.dtype.itemsize == place.dtype.itemsize, key
        shared = 2 if shard in ("w1", "w3") and place.numel() != tensor.numel() else 1
        assert place.numel() == tensor.numel() * shared, (key, list(place.shape), list(tensor.shape))
        filled[full] = filled.get(full, 0) + 1
    assert {full: count * (2 if full.startswith("w13") else 1) for full in filled} == filled
    # What a weight-only result without biases and activation order leaves as vLLM initialises it.
    optional = ("bias", "g_idx", "input")
    assert {full for full in parameters if not any(word in full for word in optional)} <= filled.keys()
    inputs = {full for full in parameters if "input" in full}
    assert not (inputs & filled.keys()) or inputs <= filled.keys()


def _intermediate(config: dict[str, Any]) -> int:
    return int(config.get("moe_intermediate_size") or config["intermediate_size"])
