"""FP8 and NVFP4 in their spellings, on checkpoints put together here by the formats' definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transcode.libraries import tensors_of

import moeq
from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint
from moeq.prove.diff import diff
from moeq.schemes.dequantize import E2M1_VALUES, dequantize
from moeq.transcode.transcode import transcode

Parts = dict[str, torch.Tensor]
Make = Callable[[int, int, torch.Generator], tuple[Parts, torch.Tensor]]

_E2M1 = torch.tensor(E2M1_VALUES, dtype=torch.float64)


def fp8_codes(n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(n, k, generator=generator) * 50).to(torch.float8_e4m3fn)


def fp8_tensor(n: int, k: int, generator: torch.Generator) -> tuple[Parts, torch.Tensor]:
    codes, scale = fp8_codes(n, k, generator), torch.rand((), generator=generator) / 100 + 0.001
    parts = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.02)}
    return parts, (codes.double() * scale.double()).float()


def fp8_channel(n: int, k: int, generator: torch.Generator) -> tuple[Parts, torch.Tensor]:
    codes, scale = fp8_codes(n, k, generator), torch.rand(n, 1, generator=generator) / 100 + 0.001
    return {"weight": codes, "weight_scale": scale}, (codes.double() * scale.double()).float()


def fp8_block(n: int, k: int, generator: torch.Generator) -> tuple[Parts, torch.Tensor]:
    codes = fp8_codes(n, k, generator)
    scale = torch.rand(-(-n // 128), -(-k // 128), generator=generator) / 100 + 0.001
    spread = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
    return {"weight": codes, "weight_scale_inv": scale}, (codes.double() * spread.double()).float()


def mxfp8(n: int, k: int, generator: torch.Generator) -> tuple[Parts, torch.Tensor]:
    codes = fp8_codes(n, k, generator)
    exponents = torch.randint(100, 130, (n, k // 32), generator=generator, dtype=torch.uint8)
    spread = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    return {"weight": codes, "weight_scale": exponents}, (codes.double() * spread).float()


def nvfp4(n: int, k: int, generator: torch.Generator, multiplier: float) -> tuple[Parts, torch.Tensor]:
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(n, k // 16, generator=generator) * 400 + 1).to(torch.float8_e4m3fn)
    factor = torch.tensor(multiplier, dtype=torch.float32)
    values = _E2M1[codes.long()] * scales.double().repeat_interleave(16, 1) * factor.double()
    packed = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": factor, "input_scale": torch.tensor(0.1)}
    return parts, values.float()


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
MXFP8 = {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}


@pytest.fixture
def build(checkpoints: Path, tmp_path: Path) -> Callable[[Make, dict[str, Any]], tuple[Path, dict[str, torch.Tensor]]]:
    """A checkpoint whose experts are made by a function, and their values by module."""

    def made(make: Make, config: dict[str, Any]) -> tuple[Path, dict[str, torch.Tensor]]:
        base, folder = checkpoints / "ct-mxfp4-qwen3moe", tmp_path / "source"
        folder.mkdir()
        tensors = {name: t for name, t in load_file(base / "model.safetensors").items() if ".experts." not in name}
        values, generator = {}, torch.Generator().manual_seed(7)
        for layer in (0, 1):
            for expert in range(4):
                for name, n, k in (("gate_proj", 128, 256), ("up_proj", 128, 256), ("down_proj", 256, 128)):
                    module = f"model.layers.{layer}.mlp.experts.{expert}.{name}"
                    parts, values[module] = make(n, k, generator)
                    tensors |= {f"{module}.{part}": tensor for part, tensor in parts.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        table = json.loads((base / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**table, "quantization_config": config}))
        return folder, values

    return made


def assert_values(folder: Path, values: dict[str, torch.Tensor]) -> None:
    ckpt = open_checkpoint(folder)
    for module, expected in values.items():
        layer, expert = int(module.split(".")[2]), int(module.split(".")[5])
        found = dequantize(ckpt.matrix(layer, expert, module.rpartition(".")[2].removesuffix("_proj")))
        assert torch.equal(found, expected), module


@pytest.mark.cover(every=10)
@pytest.mark.parametrize(
    ("make", "config", "target"),
    [
        (fp8_tensor, MODELOPT, "fp8"),
        (fp8_tensor, MODELOPT, "compressed-tensors"),
        (fp8_tensor, {**FP8, "activation_scheme": "static"}, "modelopt"),
        (fp8_channel, FP8, "compressed-tensors"),
        (mxfp8, MXFP8, "compressed-tensors"),
        (mxfp8, MXFP8, "modelopt"),
        (fp8_block, {**FP8, "weight_block_size": [128, 128]}, "fp8"),
        (fp8_block, {**FP8, "weight_block_size": [128, 128]}, "compressed-tensors"),
        (lambda n, k, g: nvfp4(n, k, g, 0.000213), NVFP4, "nvfp4"),
        (lambda n, k, g: nvfp4(n, k, g, 2.0**-11), NVFP4, "compressed-tensors"),
    ],
)
def test_spellings_are_exact(
    build: Callable[..., tuple[Path, dict[str, torch.Tensor]]],
    tmp_path: Path,
    make: Make,
    config: dict[str, Any],
    target: str,
) -> None:
    source, values = build(make, config)
    assert_values(source, values)
    found = transcode(source, tmp_path / "out", target)
    assert found.exact
    assert_values(tmp_path / "out", values)
    assert diff(source, tmp_path / "out").equal
    scales = {name for name in load_file(source / "model.safetensors") if name.endswith("input_scale")}
    # Block-scaled FP8 has scales at run time; where the config asks for those, engines never read the stored ones.
    kept = target != "fp8" and config != FP8
    assert found.dropped == ({"input_scale": len(scales)} if scales and not kept else {})
    ending = "input_global_scale" if config == NVFP4 and target == "compressed-tensors" else "input_scale"
    written = {name: t for name, t in tensors_of(tmp_path / "out").items() if name.endswith(("input_scale", ending))}
    assert {name.rpartition(".")[0] for name in written} == (
        {name.rpartition(".")[0] for name in scales} if kept else set()
    )
    wanted = {"input_scale": 0.1 if config == NVFP4 else 0.02, "input_global_scale": 10.0}[ending]
    assert all(tensor.item() == torch.tensor(wanted).item() for tensor in written.values())


@pytest.mark.parametrize("target", ["modelopt", "compressed-tensors"])
def test_scales_of_activations_come_back_bit_for_bit(
    build: Callable[..., tuple[Path, Any]], tmp_path: Path, target: str
) -> None:
    """Static FP8 in ModelOpt's spelling, through another one and back."""
    source, _ = build(fp8_tensor, MODELOPT)
    first = transcode(source, tmp_path / "there", target)
    second = transcode(tmp_path / "there", tmp_path / "back", "modelopt")
    assert first.exact
    assert second.exact
    assert not first.dropped
    assert not second.dropped
    before, after = load_file(source / "model.safetensors"), tensors_of(tmp_path / "back")
    assert before.keys() == after.keys()
    assert all(before[name].shape == after[name].shape for name in before)
    assert all(
        torch.equal(before[name].flatten().view(torch.uint8), after[name].flatten().view(torch.uint8))
        for name in before
    )
    if target == "compressed-tensors":
        table = json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]
        activations = table["config_groups"]["group_0"]["input_activations"]
        assert (activations["strategy"], activations["dynamic"]) == ("tensor", False)


def test_a_scale_of_activations_without_a_divisor_is_said(
    build: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    """No float32 has the reciprocal 1.9999999: readers get its neighbour, and the report says so."""

    def make(n: int, k: int, generator: torch.Generator) -> tuple[Parts, torch.Tensor]:
        parts, values = nvfp4(n, k, generator, 0.5)
        return {**parts, "input_scale": torch.tensor(1.9999999)}, values

    source, _ = build(make, NVFP4)
    with pytest.raises(MoeqError, match=r"input_global_scale.*1 of 1 numbers"):
        transcode(source, tmp_path / "refused", "compressed-tensors")
    found = transcode(source, tmp_path / "out", "compressed-tensors", allow_lossy=True)
    assert {loss.module.rpartition(".")[2] for loss in found.losses} == {"input_global_scale"}
    assert all(0 < loss.relative < 2e-7 for loss in found.losses)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_an_impossible_scale_of_activations_is_named(
    build: Callable[..., tuple[Path, Any]], tmp_path: Path, value: float
) -> None:
    source, _ = build(lambda n, k, g: ({**fp8_tensor(n, k, g)[0], "input_scale": torch.tensor(value)}, None), MODELOPT)
    with pytest.raises(MoeqError, match=r"experts\.\d\.\w+_proj: input_scale is"):
        transcode(source, tmp_path / "out", "modelopt")


@pytest.mark.parametrize(
    ("make", "config"),
    [(fp8_tensor, FP8), (fp8_channel, FP8)],
)
def test_experts_that_no_engine_loads_from_modelopt_are_refused(
    build: Callable[..., tuple[Path, Any]], tmp_path: Path, make: Make, config: dict[str, Any]
) -> None:
    """vLLM's class for ModelOpt's FP8 experts has one weight scale per tensor and static activation scales."""
    source, _ = build(make, config)
    with pytest.raises(MoeqError, match="engines would not load the result: layer 0: ") as error:
        transcode(source, tmp_path / "out", "modelopt")
    assert error.value.code == "usage.target"
    assert "ModelOptFp8MoEMethod cannot load the experts" in error.value.message
    assert not (tmp_path / "out").exists()


def test_blocks_of_experts_are_in_a_mixed_table(build: Callable[..., tuple[Path, Any]], tmp_path: Path) -> None:
    """vLLM reads experts with blocks from a mixed table, under DeepSeek's names; other modules have ModelOpt's."""
    source, _ = build(fp8_block, {**FP8, "weight_block_size": [128, 128]})
    prefix, (parts, _) = "model.layers.0.self_attn.o_proj", fp8_block(256, 256, torch.Generator().manual_seed(3))
    kept = {name: one for name, one in tensors_of(source).items() if not name.startswith(prefix)}
    kept |= {f"{prefix}.{part}": one for part, one in parts.items()}
    save_file(kept, source / "model.safetensors", {"format": "pt"})
    assert transcode(source, tmp_path / "there", "modelopt").exact
    config = json.loads((tmp_path / "there" / "config.json").read_text())["quantization_config"]
    assert config["quant_algo"] == "MIXED_PRECISION"
    assert {row["quant_algo"] for row in config["quantized_layers"].values()} == {"fp8_pb_wo"}
    after = tensors_of(tmp_path / "there")
    scales = {name: tensor.ndim for name, tensor in after.items() if "_scale" in name}
    assert {name.endswith("_scale_inv"): ndim for name, ndim in scales.items()} == {True: 2, False: 4}
    assert all((".experts." in name) == name.endswith("_scale_inv") for name in scales)
    found = moeq.decide(
        open_checkpoint(tmp_path / "there"), moeq.Deployment(gpu=moeq.gpu("H100"), engine="vllm@0.33.0")
    )
    assert (found.ok, found.method) == (True, "Fp8MoEMethod")
    transcode(tmp_path / "there", tmp_path / "back", "fp8")
    before, back = tensors_of(source), tensors_of(tmp_path / "back")
    assert before.keys() == back.keys()
    assert all(torch.equal(before[name].view(torch.uint8), back[name].view(torch.uint8)) for name in before)


def test_scales_of_a_kv_cache_are_copied(build: Callable[..., tuple[Path, Any]], tmp_path: Path) -> None:
    source, _ = build(fp8_tensor, MODELOPT)
    tensors = load_file(source / "model.safetensors")
    prefix = "model.layers.0.self_attn.k_proj"
    parts, _ = fp8_tensor(128, 256, torch.Generator().manual_seed(3))
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(prefix)}
    tensors |= {f"{prefix}.{part}": tensor for part, tensor in parts.items()} | {f"{prefix}.k_scale": torch.tensor(0.3)}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert transcode(source, tmp_path / "out", "compressed-tensors").exact
    assert tensors_of(tmp_path / "out")[f"{prefix}.k_scale"] == torch.tensor(0.3)
    assert diff(source, tmp_path / "out").equal


def test_block_fp8_comes_back_byte_for_byte(build: Callable[..., tuple[Path, Any]], tmp_path: Path) -> None:
    source, _ = build(fp8_block, {**FP8, "weight_block_size": [128, 128]})
    transcode(source, tmp_path / "there", "compressed-tensors")
    transcode(tmp_path / "there", tmp_path / "back", "fp8")
    after = {name: t for file in (tmp_path / "back").glob("*.safetensors") for name, t in load_file(file).items()}
    before = load_file(source / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].view(torch.uint8), after[name].view(torch.uint8)) for name in before)


def deepseek_v4(folder: Path) -> dict[str, torch.Tensor]:
    """A small DeepSeek-V4: FP4 experts and FP8 attention under exponent bytes. Values by module."""
    generator = torch.Generator().manual_seed(11)
    tensors, values = {"embed.weight": torch.zeros(64, 256, dtype=torch.bfloat16)}, {}
    for layer in (0, 1):
        tensors[f"layers.{layer}.ffn.gate.weight"] = torch.randn(4, 256, generator=generator).to(torch.bfloat16)
        module = f"layers.{layer}.attn.wq_a"
        codes = fp8_codes(128, 256, generator)
        exponents = torch.randint(115, 122, (1, 2), generator=generator, dtype=torch.uint8)
        tensors |= {f"{module}.weight": codes, f"{module}.scale": exponents.view(torch.float8_e8m0fnu)}
        values[module] = codes.float() * torch.exp2(exponents.float() - 127).repeat_interleave(128, 1)
        for expert in range(4):
            for name, n, k in (("w1", 128, 256), ("w3", 128, 256), ("w2", 256, 128)):
                module = f"layers.{layer}.ffn.experts.{expert}.{name}"
                packed = torch.randint(0, 256, (n, k // 2), generator=generator, dtype=torch.uint8)
                exponents = torch.randint(112, 122, (n, k // 32), generator=generator, dtype=torch.uint8)
                tensors[f"{module}.weight"] = packed.view(torch.int8)
                tensors[f"{module}.scale"] = exponents.view(torch.float8_e8m0fnu)
                codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)
                scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
                values[module] = (_E2M1[codes.long()] * scales).float()
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 2, "hidden_size": 256, "moe_intermediate_size": 128}
    config |= {"n_routed_experts": 4, "num_experts_per_tok": 2, "expert_dtype": "fp4"}
    table = {**FP8, "scale_fmt": "ue8m0", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": table}))
    return values


@pytest.mark.cover(every=4)
@pytest.mark.parametrize("target", ["compressed-tensors", "fp8", "bf16", "deepseek-v4"])
def test_deepseek_v4_in_other_spellings_and_back(tmp_path: Path, target: str) -> None:
    source = tmp_path / "source"
    values = deepseek_v4(source)
    assert transcode(source, tmp_path / "out", target).exact
    compared = diff(source, tmp_path / "out")
    assert compared.equal, compared
    ckpt = open_checkpoint(tmp_path / "out")
    tensors = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    for module, expected in values.items():
        if target == "bf16":
            assert torch.equal(tensors[f"{module}.weight"].float(), expected), module
        elif ".experts." in module:
            role = {"w1": "gate", "w3": "up", "w2": "down"}[module.rpartition(".")[2]]
            found = dequantize(ckpt.matrix(int(module.split(".")[1]), int(module.split(".")[4]), role))
            assert torch.equal(found, expected), module
    if target in ("compressed-tensors", "deepseek-v4"):
        transcode(tmp_path / "out", tmp_path / "back", "deepseek-v4")
        back = {name: t for file in (tmp_path / "back").glob("*.safetensors") for name, t in load_file(file).items()}
        before = load_file(source / "model.safetensors")
        assert before.keys() == back.keys()
        assert all(
            before[name].dtype == back[name].dtype
            and torch.equal(before[name].view(torch.uint8), back[name].view(torch.uint8))
            for name in before
        )
        table = json.loads((tmp_path / "back" / "config.json").read_text())
        assert table["expert_dtype"] == "fp4"
        assert table["quantization_config"]["scale_fmt"] == "ue8m0"


def test_channel_scales_do_not_make_blocks(build: Callable[..., tuple[Path, Any]], tmp_path: Path) -> None:
    source, _ = build(fp8_channel, FP8)
    found = transcode(source, tmp_path / "out", "fp8", allow_lossy=True)
    assert len(found.losses) == found.projections == 24
    assert all(0 < loss.relative < 0.04 for loss in found.losses)


def test_a_divisor_is_the_multipliers_where_there_is_one(
    build: Callable[..., tuple[Path, Any]], tmp_path: Path
) -> None:
    """Not every float32 is the float32 reciprocal of one: then the scale is off by its last bit, and that is said."""
    mantissas = torch.linspace(1, 2, 24, dtype=torch.float64).float().tolist()
    there = iter(mantissas)
    source, values = build(lambda n, k, g: nvfp4(n, k, g, next(there) / 1024), NVFP4)
    found = transcode(source, tmp_path / "out", "compressed-tensors", allow_lossy=True)
    tensors = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    lossy = {loss.module for loss in found.losses}
    for module, mantissa in zip(values, mantissas, strict=True):
        wanted = torch.tensor(mantissa / 1024, dtype=torch.float32)
        divisor = tensors[f"{module}.weight_global_scale"][0]
        near = [divisor]
        for _ in range(4):
            near += [torch.nextafter(near[-1], near[-1] * 2)]
        below = [divisor]
        for _ in range(4):
            below += [torch.nextafter(below[-1], below[-1] / 2)]
        possible = any(bool(1 / candidate == wanted) for candidate in (*near, *below))
        assert (module not in lossy) == possible == bool(1 / divisor == wanted)
    assert 0 < len(lossy) < 24
    assert all(loss.relative < 2e-7 for loss in found.losses)
