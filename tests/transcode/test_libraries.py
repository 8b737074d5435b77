"""Transcoded checkpoints read by the real libraries: what each reads is bit for bit what the source means.

Every test needs its library and is skipped without: compressed-tensors (with transformers), GPTQModel, AutoAWQ,
ModelOpt; `test_libraries_vllm.py` has those of vLLM. None of them is a dependency of moeq; `recorded.json` says with
which versions these tests last passed.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transcode.libraries import (
    FP8,
    FP8_OF_MODELOPT,
    INTEGERS,
    MIXTRAL,
    MXFP8,
    NVFP4,
    assert_equal,
    parts_of,
    result,
    source_values,
)

from moeq.model import open as open_checkpoint
from moeq.schemes.dequantize import dequantize
from moeq.transcode.transcode import transcode

# compressed-tensors


@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        *((name, "compressed-tensors", {}) for name in (*INTEGERS, "ct-mxfp4-qwen3moe", "mxfp4-gptoss")),
        ("ct-int4-g128-qwen3moe", "compressed-tensors", {"regroup": 32}),
        ("gptq-int4-g128-mixtral", "compressed-tensors", {"regroup": 64, "names": "mlp"}),
        ("ct-mxfp4-qwen3moe", "nvfp4-compressed-tensors", {}),
        ("mxfp4-gptoss", "nvfp4-compressed-tensors", {}),
        *((name, "compressed-tensors", {}) for name in (*FP8, *NVFP4, MXFP8)),
        *((name, "nvfp4-compressed-tensors", {}) for name in NVFP4),
    ],
)
def test_compressed_tensors_reads_the_same_values(
    checkpoints: Path, tmp_path: Path, name: str, target: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    config, tensors = result(checkpoints / name, tmp_path / "out", target, **options)
    parsed = QuantizationConfig.model_validate(config["quantization_config"])
    schemes = {target: scheme for scheme in parsed.config_groups.values() for target in scheme.targets}
    count = 0
    for module, expected in source_values(checkpoints / name):
        parts = parts_of(tensors, module)
        parts.pop("bias", None)
        if parts["weight_scale"].dtype in (torch.float16, torch.bfloat16):
            # The library multiplies in the scale's type; float32 holds every product exactly.
            parts["weight_scale"] = parts["weight_scale"].float()
        scheme = schemes[next((text for text in schemes if re.match(text[3:], module)), "Linear")]
        reader = BaseCompressor.get_value_from_registry(scheme.format or parsed.format)
        read = reader.decompress(parts, scheme)["weight"]
        assert_equal(read, expected.to(read.dtype).float(), module)
        # The library rounds NVFP4 and MXFP8 to bfloat16, as it does the source's.
        rounded = name in (*NVFP4, MXFP8)
        assert read.dtype == torch.float32 or rounded or torch.equal(expected.to(read.dtype).float(), expected)
        count += 1
    assert count >= 12


@pytest.mark.cover(every=11)
@pytest.mark.parametrize(
    ("name", "target", "options"),
    [
        # transformers 5.23 leaves zero points out when it gathers experts: it loads no asymmetric ones.
        *((name, "compressed-tensors", {}) for name in INTEGERS if name not in (*MIXTRAL, "awq-int4-g32-qwen3moe")),
        ("gptq-int4-g128-mixtral", "compressed-tensors", {"names": "block-sparse-moe"}),
        ("ct-int4-g128-qwen3moe", "compressed-tensors", {"regroup": 32}),
        ("ct-mxfp4-qwen3moe", "bf16", {}),
        ("awq-int4-g32-qwen3moe", "bf16", {"allow_lossy": True}),
        ("gptq-int4-g32-qwen3moe", "bf16", {"allow_lossy": True, "names": "stacked"}),
        ("mxfp4-gptoss", "bf16", {}),
        ("mxfp4-gptoss", "mxfp4", {}),
    ],
)
def test_transformers_loads_it_whole(
    checkpoints: Path, tmp_path: Path, name: str, target: str, options: dict[str, Any]
) -> None:
    pytest.importorskip("transformers")
    if target == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    source = checkpoints / name
    transcode(source, tmp_path / "out", target, **options)
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True, dtype="auto")
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    ckpt, count = open_checkpoint(source), 0
    for layer in ckpt.info.moe_layers:
        experts = loaded.model.layers[layer].mlp.experts
        for expert in range(ckpt.num_experts(layer)):
            gate, up, down = (dequantize(ckpt.matrix(layer, expert, role)) for role in ("gate", "up", "down"))
            read_up, read_down = experts.gate_up_proj[expert].detach(), experts.down_proj[expert].detach()
            if "gptoss" in name:
                read_up, read_down = read_up.t(), read_down.t()
                joined = torch.stack([gate, up], dim=1).flatten(0, 1)
            else:
                joined = torch.cat([gate, up])
            assert torch.equal(read_up, joined.to(read_up.dtype))
            assert torch.equal(read_down, down.to(read_down.dtype))
            count += 1
    assert count == 8


def test_transformers_answers_alike_from_both(checkpoints: Path, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from transformers import AutoModelForCausalLM

    source = checkpoints / "ct-int4-g128-qwen3moe"
    transcode(source, tmp_path / "out", "compressed-tensors", regroup=32)
    tokens = torch.arange(24).reshape(2, 12) % 60
    answers = []
    for folder in (source, tmp_path / "out"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            answers.append(model(tokens).logits)
    assert torch.equal(answers[0], answers[1])


# GPTQModel


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("name", [*INTEGERS, "gptq-int4-g32-actorder-qwen3moe"])
def test_gptqmodel_reads_the_same_values(checkpoints: Path, tmp_path: Path, name: str, version: str) -> None:
    pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT, QuantizeConfig
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    config, tensors = result(checkpoints / name, tmp_path / "out", version)
    table = config["quantization_config"]
    parsed = QuantizeConfig.from_quant_config(dict(table))
    assert (parsed.bits, parsed.group_size, parsed.sym, parsed.desc_act) == tuple(
        table[key] for key in ("bits", "group_size", "sym", "desc_act")
    )
    assert parsed.format == FORMAT(version)
    count = 0
    for module, expected in source_values(checkpoints / name):
        parts = parts_of(tensors, module)
        n, k = expected.shape
        linear = TorchLinear(
            bits=parsed.bits,
            group_size=parsed.group_size,
            sym=parsed.sym,
            desc_act=parsed.desc_act,
            in_features=k,
            out_features=n,
            format=FORMAT(version),
        )
        for part in ("qweight", "qzeros", "g_idx"):
            assert getattr(linear, part).shape == parts[part].shape
            setattr(linear, part, parts[part])
        linear.scales = parts["scales"].float()
        if version == "gptq":
            convert_gptq_v1_to_v2_format_module(linear, bits=parsed.bits, pack_dtype=torch.int32)
        linear.post_init()
        assert_equal(linear.dequantize_weight().t(), expected, module)
        count += 1
    assert count >= 12


@pytest.mark.parametrize("name", ["ct-int4-asym-g32-mixtral", "awq-int4-g32-qwen3moe", "gptq-int8-g64-qwen3moe"])
def test_gptqmodel_packs_the_same_words(checkpoints: Path, tmp_path: Path, name: str) -> None:
    """Its own packer, given our values, writes what we wrote."""
    pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.quantization import FORMAT

    config, tensors = result(checkpoints / name, tmp_path / "out", "gptq_v2")
    table, ckpt = config["quantization_config"], open_checkpoint(checkpoints / name)
    for projection in ("gate", "up", "down"):
        matrix = ckpt.matrix(1, 2, projection)
        spec = matrix.spec
        plain = torch.nn.Linear(spec.k, spec.n, bias=False)
        plain.weight.data = dequantize(matrix)
        zeros = torch.full_like(matrix.scales, spec.symmetric_zero) if matrix.zeros is None else matrix.zeros
        linear = TorchLinear(
            bits=table["bits"],
            group_size=table["group_size"],
            sym=table["sym"],
            desc_act=False,
            in_features=spec.k,
            out_features=spec.n,
            format=FORMAT.GPTQ_V2,
        )
        index = torch.arange(spec.k, dtype=torch.int32) // spec.group_size
        linear.pack_original(plain, matrix.scales.float(), zeros.float(), g_idx=index)
        parts = parts_of(tensors, f"{ckpt.expert_prefix(1)}.2.{projection}_proj")
        assert torch.equal(linear.qweight, parts["qweight"])
        assert torch.equal(linear.qzeros, parts["qzeros"])
        assert torch.equal(linear.g_idx, parts["g_idx"])


# AutoAWQ


def test_autoawq_means_the_same_by_the_source(checkpoints: Path) -> None:
    """The values that everything above is compared with: AutoAWQ's own reader finds them in an AWQ source."""
    pytest.importorskip("awq.utils.packing_utils")
    from awq.utils.packing_utils import dequantize_gemm

    source = checkpoints / "awq-int4-g32-qwen3moe"
    tensors = load_file(source / "model.safetensors")
    for module, expected in source_values(source):
        parts = parts_of(tensors, module)
        read = dequantize_gemm(parts["qweight"], parts["qzeros"], parts["scales"], 4, 32)
        assert torch.equal(read.t(), expected.to(read.dtype)), module


# ModelOpt


@pytest.mark.parametrize("name", [*FP8_OF_MODELOPT, *NVFP4, MXFP8, "modelopt-nvfp4-qwen3moe"])
def test_modelopt_reads_the_same_values(checkpoints: Path, tmp_path: Path, name: str) -> None:
    pytest.importorskip("modelopt.torch.quantization.qtensor")
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    config, tensors = result(checkpoints / name, tmp_path / "out", "modelopt")
    algorithm = config["quantization_config"]["quant_algo"].upper()
    for module, expected in source_values(checkpoints / name):
        parts, (n, k) = parts_of(tensors, module), expected.shape
        codes, scale = parts["weight"], parts["weight_scale"]
        if algorithm == "MXFP8":
            read = MXFP8QTensor(expected.shape, torch.float32, codes).dequantize(scale=scale)
        elif "NVFP4" in algorithm:
            # Its reader multiplies both scales in float32 before the code, which rounds twice.
            factor = (scale.float() * parts["weight_scale_2"]).repeat_interleave(16, 1)
            unit = torch.ones((), dtype=torch.float32)
            ones = torch.full_like(scale, 1.0)
            values = NVFP4QTensor(expected.shape, torch.float32, codes).dequantize(
                scale=ones, double_scale=unit, block_sizes={-1: 16}
            )
            assert torch.allclose(values * factor, expected, rtol=2e-7, atol=0)
            exact = values.double() * scale.double().repeat_interleave(16, 1) * parts["weight_scale_2"].double()
            read = exact.float()
        else:
            read = FP8QTensor(expected.shape, torch.float32, codes).dequantize(dtype=torch.float32, scale=scale)
        assert_equal(read, expected, module)
        assert (n, k) == tuple(read.shape)
