"""The NVFP4, FP8 and MXFP8 checkpoints of this folder: quantised by llm-compressor and ModelOpt on a CPU.

    python make_float.py

Needs llm-compressor 0.14, compressed-tensors 0.19 and nvidia-modelopt 0.47. The digests are those of README.md: they
share no code with moeq, and every value is compared with the weight that it was quantised from. `--digests` only
computes them again; names make only those.
"""

from __future__ import annotations

import copy
import hashlib
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

HERE = Path(__file__).parent

#: Name to preset of the tool, whether it needs calibration data, hidden size, intermediate size, experts.
CASES: dict[str, tuple[str, bool, int, int, int]] = {
    "ct-nvfp4a16-qwen3moe": ("NVFP4A16", False, 256, 64, 3),
    "ct-nvfp4-qwen3moe": ("NVFP4", True, 256, 64, 2),
    "ct-fp8-block-qwen3moe": ("FP8_BLOCK", False, 256, 128, 2),
    "ct-fp8-channel-qwen3moe": ("FP8_DYNAMIC", False, 128, 64, 3),
    "ct-fp8-tensor-qwen3moe": ("FP8", True, 128, 64, 3),
    "ct-mxfp8-qwen3moe": ("MXFP8A16", False, 128, 64, 3),
    "modelopt-nvfp4-qwen3moe": ("NVFP4_DEFAULT_CFG", True, 256, 64, 2),
    "modelopt-fp8-qwen3moe": ("FP8_DEFAULT_CFG", True, 128, 64, 3),
}

#: Largest error of a value beside the largest weight of its matrix, by preset.
BOUNDS = {"NVFP4A16": 0.2, "NVFP4": 0.2, "FP8_BLOCK": 0.04, "FP8_DYNAMIC": 0.04, "FP8": 0.04, "MXFP8A16": 0.07}
BOUNDS |= {"NVFP4_DEFAULT_CFG": 0.2, "FP8_DEFAULT_CFG": 0.05}  # gate and up share a scale

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M1 = np.concatenate([_E2M1, -_E2M1])


def e4m3(octets: np.ndarray) -> np.ndarray:
    """Values of E4M3 bytes: sign, 4 bits of exponent with bias 7, 3 bits of mantissa."""
    bits = octets.astype(np.int64)
    exponent, mantissa = bits >> 3 & 15, bits & 7
    value = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    return np.where(bits >> 7, -value, value)


def values(parts: dict[str, torch.Tensor]) -> np.ndarray:
    """float32 `[N, K]`: codes times scales, in float64, rounded once."""
    octets = {name: tensor.view(torch.uint8).numpy() for name, tensor in parts.items() if tensor.element_size() == 1}
    if "weight_scale_2" in parts or "weight_packed" in parts:
        packed = octets["weight_packed" if "weight_packed" in parts else "weight"]
        codes = E2M1[np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)]
        if "weight_scale_2" in parts:
            shared = parts["weight_scale_2"].numpy()
        else:  # readers multiply by the float32 reciprocal of the stored divisor
            shared = np.float32(1) / parts["weight_global_scale"].numpy()
        scales = np.repeat(e4m3(octets["weight_scale"]), 16, axis=1) * shared.astype(np.float64)
    else:
        codes = e4m3(octets["weight"])
        if parts["weight_scale"].dtype == torch.uint8:
            scales = np.repeat(2.0 ** (octets["weight_scale"].astype(np.int64) - 127), 32, axis=1)
        else:
            scales = parts["weight_scale"].double().numpy()
            if scales.shape == (codes.shape[0] // 128, codes.shape[1] // 128):
                scales = np.repeat(np.repeat(scales, 128, axis=0), 128, axis=1)
    return (codes * scales).astype(np.float32)


def quantise(name: str, plain: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    preset, calibrated, hidden, inner, experts = CASES[name]
    torch.manual_seed(7)
    config = Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=64,
        moe_intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=experts,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=512,
        dtype="bfloat16",
        tie_word_embeddings=False,
    )
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 0.02)
    model.save_pretrained(plain)
    texts = torch.randint(0, 32, (8, 64))
    if name.startswith("modelopt"):
        by_modelopt(model, preset, texts, folder)
        return
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from torch.utils.data import DataLoader

    data: dict[str, Any] = {}
    if calibrated:
        rows = [{"input_ids": ids, "attention_mask": torch.ones_like(ids)} for ids in texts]
        data = {"dataset": DataLoader(rows, batch_size=1), "num_calibration_samples": 8, "max_seq_length": 64}
    recipe = QuantizationModifier(
        targets="Linear", scheme=preset, ignore=["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]
    )
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    oneshot(model=model, recipe=recipe, moe_calibrate_all_experts=True, **data)
    model.save_pretrained(folder, save_compressed=True)


def by_modelopt(model: Any, preset: str, texts: torch.Tensor, folder: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    def forward(quantised: Any) -> None:
        with torch.no_grad():
            for ids in texts:
                quantised(ids[None])

    config = copy.deepcopy(getattr(mtq, preset))
    config["quant_cfg"].append({"quantizer_name": "*self_attn*", "enable": False})
    model.config.architectures = [type(model).__name__]
    mtq.quantize(model, config, forward_loop=forward)
    export_hf_checkpoint(model, dtype=torch.bfloat16, export_dir=folder)


def digests(folder: Path, plain: dict[str, torch.Tensor] | None, bound: float) -> dict[str, Any]:
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if ".experts." in name:
            modules.setdefault(name.rpartition(".")[0], {})[name.rpartition(".")[2]] = tensor
    found = {}
    for module, parts in sorted(modules.items()):
        dequantised = values(parts) + np.float32(0)
        layer, expert, projection = (module.split(".")[place] for place in (2, 5, 6))
        if plain is not None:
            wanted = plain[f"{module}.weight"].double().numpy()
            worst = np.abs(dequantised - wanted).max() / np.abs(wanted).max()
            assert worst <= bound, f"{module}: {worst}"
        found[f"layers.{layer}.experts.{expert}.{projection.removesuffix('_proj')}"] = {
            "shape": list(dequantised.shape),
            "sha256": hashlib.sha256(dequantised.astype("<f4").tobytes()).hexdigest(),
            "first": [round(float(value), 9) for value in dequantised[0, :4]],
        }
    return found


def main() -> None:
    path = HERE / "expected.json"
    expected = json.loads(path.read_text())
    for name, (preset, *_) in CASES.items():
        if sys.argv[1:] and name not in sys.argv and "--digests" not in sys.argv:
            continue
        plain = None
        if "--digests" not in sys.argv:
            with tempfile.TemporaryDirectory() as scratch:
                quantise(name, Path(scratch, "plain"), Path(scratch, name))
                plain = load_file(Path(scratch, "plain", "model.safetensors"))
                (HERE / name).mkdir(exist_ok=True)
                for file in ("config.json", "hf_quant_config.json", "model.safetensors"):
                    if Path(scratch, name, file).exists():
                        shutil.copyfile(Path(scratch, name, file), HERE / name / file)
        expected[name] = digests(HERE / name, plain, BOUNDS[preset])
    path.write_text(json.dumps(expected, indent=1))


if __name__ == "__main__":
    main()
