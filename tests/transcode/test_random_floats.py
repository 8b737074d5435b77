"""Random checkpoints of FP8, MXFP8, MXFP4 and NVFP4 to every target: both paths come to the same, files or refusals.

Sizes that blocks do not divide, scales of 0 and near the ends of their types, negative zeros, codes that are no number.
What is said to be exact is decoded here, with numpy, by the formats' definitions. `MOEQ_RANDOM` is the number of seeds.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pipeline.mixing import content
from safetensors.torch import load_file, save_file

from moeq.errors import MoeqError
from moeq.layouts import words
from moeq.schemes.dequantize import E2M1_VALUES
from moeq.transcode.target_formats import ENGINE_TARGETS
from moeq.transcode.transcode import transcode

pytest.importorskip("numba")

KINDS = ("tensor", "static", "channel", "block", "mxfp8", "mxfp4", "nvfp4", "nvfp4-activations")
SEEDS = range(int(os.environ.get("MOEQ_RANDOM", "6")))

_E4M3 = torch.arange(256).to(torch.uint8).view(torch.float8_e4m3fn).double()


def config_of(kind: str) -> dict[str, Any]:
    if kind.startswith("mxfp4"):
        weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
        group = {"targets": ["Linear"], "weights": weights}
        table = {"config_groups": {"group_0": group}, "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}
        return {**table, "quant_method": "compressed-tensors"}
    if kind in ("tensor", "block", "channel"):
        table = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
        return {**table, "weight_block_size": [128, 128]} if kind == "block" else table
    algorithms = {"static": "FP8", "mxfp8": "MXFP8", "nvfp4": "W4A16_NVFP4", "nvfp4-activations": "NVFP4"}
    return {"quant_method": "modelopt", "quant_algo": algorithms[kind], "ignore": ["lm_head"]}


def scales(draw: np.random.Generator, *shape: int) -> torch.Tensor:
    """float32, as tools write them or not."""
    low, high = draw.choice([(-9, -6), (-9, -6), (-30, 10), (-149, 120)])
    found = np.exp2(draw.uniform(low, high, shape)).astype(np.float32)
    if draw.random() < 0.3:
        found = np.exp2(np.round(np.log2(found + np.float32(1e-45)))).astype(np.float32)
    if draw.random() < 0.2:
        found.flat[draw.integers(found.size)] = 0
    return torch.from_numpy(found)


def made(kind: str, n: int, k: int, draw: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Parts and values, float32 `[n, k]`."""
    if kind in ("mxfp4", "nvfp4", "nvfp4-activations"):
        codes = torch.from_numpy(draw.integers(0, 16, (n, k), dtype=np.uint8))
        packed, numbers = codes[:, 0::2] | codes[:, 1::2] << 4, torch.tensor(E2M1_VALUES).double()[codes.long()]
        if kind == "mxfp4":
            low, spread = int(draw.choice([0, 60, 110, 220])), int(draw.choice([1, 12, 30]))
            exponents = torch.from_numpy(draw.integers(low, low + spread, (n, k // 32), dtype=np.uint8))
            values = numbers * torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
            return {"weight_packed": packed, "weight_scale": exponents}, values.float()
        octets = torch.from_numpy(draw.integers(0, 0x7F, (n, k // 16), dtype=np.uint8))
        factor = scales(draw, 1)[0] if draw.random() < 0.5 else torch.tensor(2.0 ** int(draw.integers(-12, 2)))
        factor = torch.where(factor > 1e-30, factor, 0.5)
        values = numbers * _E4M3[octets.long()].repeat_interleave(16, 1) * factor.double()
        parts = {"weight": packed, "weight_scale": octets.view(torch.float8_e4m3fn), "weight_scale_2": factor.clone()}
        if kind != "nvfp4":
            parts["input_scale"] = torch.tensor(float(np.float32(draw.uniform(0.001, 0.1))))
        return parts, values.float()
    octets = draw.integers(0, 256, (n, k), dtype=np.uint8)
    if draw.random() < 0.9:
        octets[(octets & 0x7F) == 0x7F] = 0x80
    numbers = _E4M3[torch.from_numpy(octets).long()]
    parts = {"weight": torch.from_numpy(octets).view(torch.float8_e4m3fn)}
    if kind == "mxfp8":
        exponents = torch.from_numpy(draw.integers(100, 140, (n, k // 32), dtype=np.uint8))
        spread = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
        return {**parts, "weight_scale": exponents}, (numbers * spread).float()
    shape = {"channel": (n, 1), "block": (-(-n // 128), -(-k // 128))}.get(kind, (1,))
    found, name = scales(draw, *shape), "weight_scale_inv" if kind == "block" else "weight_scale"
    if draw.random() < 0.4:
        found = found.bfloat16()
    if kind == "static":
        parts["input_scale"] = torch.tensor(float(np.float32(draw.uniform(0.001, 0.1))))
    spread = found.double()
    if kind == "block":
        spread = spread.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    stored = found[0] if kind == "static" else found
    return {**parts, name: stored.clone()}, (numbers * spread).float()


def write(folder: Path, kind: str, seed: int) -> dict[str, torch.Tensor]:
    """A checkpoint of two experts; values by module."""
    draw = np.random.default_rng([seed, KINDS.index(kind)])
    hidden, intermediate = (32 * int(draw.integers(1, 10)) for _ in range(2))
    tensors = {"model.layers.0.mlp.gate.weight": torch.ones(2, hidden, dtype=torch.bfloat16)}
    values = {}
    for expert in range(2):
        sizes = {
            "gate_proj": (intermediate, hidden),
            "up_proj": (intermediate, hidden),
            "down_proj": (hidden, intermediate),
        }
        for name, (n, k) in sizes.items():
            module = f"model.layers.0.mlp.experts.{expert}.{name}"
            parts, values[module] = made(kind, n, k, draw)
            tensors |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    table = {"model_type": "qwen3_moe", "num_hidden_layers": 1, "hidden_size": hidden, "num_experts_per_tok": 1}
    table |= {"num_experts": 2, "num_attention_heads": 2, "moe_intermediate_size": intermediate}
    (folder / "config.json").write_text(json.dumps({**table, "quantization_config": config_of(kind)}))
    return values


def outcome(source: Path, out: Path, target: str, *, lossy: bool) -> dict[str, bytes] | tuple[str, str]:
    try:
        transcode(source, out, target, workers=1, allow_lossy=lossy)
    except MoeqError as error:
        return error.code, error.message
    return content(out)


@pytest.mark.cover(every=16)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_both_paths_come_to_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, kind: str) -> None:
    values = write(tmp_path / "source", kind, seed)
    for target in ENGINE_TARGETS:
        lossy, found = (seed + len(target)) % 2 == 1, []
        for path, least in (("reference", 1 << 40), ("fast", 0)):
            monkeypatch.setattr(words, "COMPILED_FROM", least)
            found.append(outcome(tmp_path / "source", tmp_path / f"{path}-{target}", target, lossy=lossy))
        assert found[0] == found[1], target
        if isinstance(found[0], dict) and target in ("bf16", "fp16"):
            tensors = load_file(next((tmp_path / f"fast-{target}").glob("*.safetensors")))
            for file in (tmp_path / f"fast-{target}").glob("*.safetensors"):
                tensors |= load_file(file)
            for module, wanted in values.items():
                read = tensors[f"{module}.weight"]
                assert torch.equal(read, wanted.to(read.dtype)) or wanted.isnan().any(), (module, target)
