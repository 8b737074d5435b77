"""Small checkpoints of the self-test are what they are named after, and equal seeds write equal ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import moeq
from moeq.check import synthetic
from moeq.check.synthetic import RECIPES
from moeq.layouts.registry import get_layout

SCHEMES = {
    "gptq-int4": "gptq int4 g32 sym",
    "gptq-int4-asym": "gptq int4 g32 asym",
    "gptq-int4-actorder": "gptq int4 g32 sym act-order",
    "gptq-int8": "gptq int8 g32 sym",
    "awq-int4": "awq int4 g32 asym",
    "w8a8-int8": "ct-int8 int8 channel sym act-int8",
    "mxfp4": "mxfp4 e2m1 g32 sym",
    "nvfp4": "nvfp4 e2m1 g16 sym act-e2m1",
    "fp8-block": "fp8-block e4m3 g128 sym act-e4m3",
    "fp8-channel": "fp8 e4m3 channel sym act-e4m3",
    "mxfp8": "mxfp8 e4m3 g32 sym act-e4m3",
}


def test_every_recipe_is_of_its_scheme_and_fits_its_layout(tmp_path: Path) -> None:
    found = {}
    for recipe in RECIPES:
        recipe.write(tmp_path / recipe.name)
        checkpoint = moeq.open(tmp_path / recipe.name)
        assert checkpoint.info.refusals == ()
        assert (checkpoint.info.num_experts, checkpoint.info.top_k) == (4, 2)
        (scheme,) = checkpoint.info.schemes
        found[recipe.name] = scheme.title
        for role in ("w13", "w2"):
            assert get_layout(recipe.layout, allow_lossy=True).problems(checkpoint.matrix(0, 1, role).spec) == []
    assert found == SCHEMES


def test_seeds(tmp_path: Path) -> None:
    for number, seed in enumerate((0, 0, 1)):
        RECIPES[0].write(tmp_path / str(number), seed)
    first, again, other = ((tmp_path / str(number) / "model.safetensors").read_bytes() for number in range(3))
    assert first == again != other


def test_nvfp4_has_a_scale_of_down_that_is_not_that_of_gate_and_up(tmp_path: Path) -> None:
    """A kernel that takes the one for the other is seen."""
    (recipe,) = (one for one in RECIPES if one.name == "nvfp4")
    recipe.write(tmp_path / "made")
    stored = load_file(tmp_path / "made" / "model.safetensors")
    scales: dict[str, set[float]] = {}
    for name, tensor in stored.items():
        if name.endswith(".weight_scale_2"):
            scales.setdefault(name.split(".")[-2], set()).add(float(tensor))
    gate, up, down = (scales[f"{name}_proj"] for name in ("gate", "up", "down"))
    assert gate == up
    assert len(gate) == len(down) == len(gate | down) - 1 == 1


#: Numbers of an expert: part to dtype, shape of gate, least and greatest number (E4M3 as bytes).
GPTQ = {"g_idx": ("int32", [128], 0, 3)}
PARTS: dict[str, dict[str, tuple[str, list[int], float, float]]] = {
    "gptq-int4": {**GPTQ, "qzeros": ("int32", [4, 8], 0x77777777, 0x77777777)},
    "gptq-int4-actorder": {**GPTQ, "qzeros": ("int32", [4, 8], 0x77777777, 0x77777777)},
    "gptq-int8": {**GPTQ, "qzeros": ("int32", [4, 16], 0x7F7F7F7F, 0x7F7F7F7F)},
    "w8a8-int8": {"weight": ("int8", [64, 128], -127, 127)},
    "nvfp4": {
        "weight": ("uint8", [64, 64], 0, 255),
        "weight_scale": ("float8_e4m3fn", [64, 8], 48, 76),
        "input_scale": ("float32", [], 0.01, 0.01),
        "weight_scale_2": ("float32", [], 0.004, 0.004),
    },
    "fp8-block": {"weight": ("float8_e4m3fn", [64, 128], 0, 253)},
    "fp8-channel": {"weight": ("float8_e4m3fn", [64, 128], 0, 253)},
    "mxfp8": {"weight": ("float8_e4m3fn", [64, 128], 0, 253), "weight_scale": ("uint8", [64, 4], 113, 117)},
}


def ct_config(kind: str) -> dict[str, object]:
    codes = {"num_bits": 8, "type": kind, "symmetric": True}
    weights, activations = {"strategy": "channel", "dynamic": False}, {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": codes | weights, "input_activations": codes | activations}
    ignored = ["model.layers.0.mlp.gate", "lm_head"]
    names = {"quant_method": "compressed-tensors", "format": f"{kind}-quantized"}
    return {**names, "config_groups": {"group_0": group}, "ignore": ignored}


def gptq_config(bits: int, sym: bool = True, order: bool = False) -> dict[str, object]:
    names = {"quant_method": "gptq", "checkpoint_format": "gptq"}
    return {**names, "bits": bits, "group_size": 32, "sym": sym, "desc_act": order}


def modelopt(kind: str, group: int) -> dict[str, object]:
    return {"quant_method": "modelopt", "quant_algo": kind, "group_size": group, "exclude_modules": ["lm_head"]}


CONFIGS: dict[str, dict[str, object]] = {
    "gptq-int4": gptq_config(4),
    "gptq-int4-asym": gptq_config(4, sym=False),
    "gptq-int4-actorder": gptq_config(4, order=True),
    "gptq-int8": gptq_config(8),
    "awq-int4": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    "w8a8-int8": ct_config("int"),
    "mxfp4": {"quant_method": "mxfp4"},
    "nvfp4": modelopt("NVFP4", 16),
    "fp8-block": {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
    "fp8-channel": ct_config("float"),
    "mxfp8": modelopt("MXFP8", 32),
}  # fmt: skip


def test_configs_are_those_that_tools_write() -> None:
    assert {recipe.name: recipe.quantization for recipe in RECIPES} == CONFIGS


#: Sizes of every recipe, under the names of both families.
SIZES = {
    "hidden_size": 128, "num_hidden_layers": 1, "num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 32, "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}  # fmt: skip
QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 64}
FAMILIES: dict[bool, dict[str, object]] = {
    True: {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "intermediate_size": 64, "swiglu_limit": 7},
    False: {**QWEN, "intermediate_size": 128, "norm_topk_prob": True},
}


def test_models_are_of_the_family_that_has_the_format(tmp_path: Path) -> None:
    for recipe in RECIPES:
        recipe.write(tmp_path / recipe.name)
        config = json.loads((tmp_path / recipe.name / "config.json").read_text())
        assert config.pop("quantization_config") == CONFIGS[recipe.name]
        assert config == {**SIZES, **FAMILIES[recipe.name == "mxfp4"]}
        names = set(load_file(tmp_path / recipe.name / "model.safetensors"))
        if recipe.name == "mxfp4":
            parts = {f"experts.{name}_proj_{part}" for name in ("gate_up", "down") for part in ("blocks", "scales")}
            biases = {"router.weight", "router.bias", "experts.gate_up_proj_bias", "experts.down_proj_bias"}
            assert names == {f"model.layers.0.mlp.{one}" for one in parts | biases}
        else:
            modules = {name.rpartition(".")[0].removeprefix("model.layers.0.mlp.") for name in names}
            places = {f"experts.{e}.{name}_proj" for e in range(4) for name in ("gate", "up", "down")}
            assert modules == places | {"gate"}


def fields(words: torch.Tensor, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Return the fields of int32 words along a new last axis, the lowest bits first."""
    found = torch.stack([(words.long() >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)], dim=-1)
    return found if order is None else found[..., list(order)]


#: Integer formats: bits, least and greatest stored zero point, and places of consecutive columns in AWQ's words.
INTEGERS: dict[str, tuple[int, int, int, tuple[int, ...] | None]] = {
    "gptq-int4": (4, 7, 7, None),  # 8, stored minus one
    "gptq-int4-asym": (4, 0, 14, None),
    "gptq-int4-actorder": (4, 7, 7, None),
    "gptq-int8": (8, 127, 127, None),
    "awq-int4": (4, 0, 15, (0, 4, 1, 5, 2, 6, 3, 7)),
}


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_have_every_code_in_every_place_of_a_word(name: str, tmp_path: Path) -> None:
    """AutoGPTQ packs codes along K and AutoAWQ along N, 32 / bits to a word."""
    bits, least, most, order = INTEGERS[name]
    (recipe,) = (one for one in RECIPES if one.name == name)
    recipe.write(tmp_path / name)
    stored = load_file(tmp_path / name / "model.safetensors")
    codes, per = [], 32 // bits
    for projection, n, k in (("gate", 64, 128), ("up", 64, 128), ("down", 128, 64)):
        for expert in range(4):
            prefix = f"model.layers.0.mlp.experts.{expert}.{projection}_proj."
            packed, zeros = stored[prefix + "qweight"], stored[prefix + "qzeros"]
            assert packed.shape == ((k, n // per) if order else (k // per, n))
            assert (zeros.shape, stored[prefix + "scales"].shape) == ((k // 32, n // per), (k // 32, n))
            assert {packed.dtype, zeros.dtype} == {torch.int32}
            assert stored[prefix + "scales"].dtype == torch.float16
            codes.append(fields(packed, bits, order).reshape(-1, per))
            used = fields(zeros, bits, order)
            assert (int(used.min()), int(used.max())) == (least, most)
            if f"{prefix}g_idx" in stored:
                index = stored[f"{prefix}g_idx"].long()
                assert torch.bincount(index).tolist() == [32] * (k // 32)
                assert torch.equal(index, torch.arange(k) // 32) == (name != "gptq-int4-actorder")
    every = torch.cat(codes)
    for place in range(per):
        assert len(every[:, place].unique()) == 1 << bits
        others = [one for one in range(per) if one != place]
        assert all(not torch.equal(every[:, place], every[:, other]) for other in others)


def test_codes_are_where_the_formats_say() -> None:
    """Draw the numbers with the same seed and find them by the definitions of AutoGPTQ and AutoAWQ."""

    def drawn() -> torch.Generator:
        return torch.Generator().manual_seed(5)

    codes = torch.randint(16, (64, 16), generator=drawn())
    awq = synthetic._awq("", 16, 64, drawn())["qweight"]
    for column in range(16):
        shift = 4 * (0, 4, 1, 5, 2, 6, 3, 7)[column % 8]
        assert torch.equal((awq[:, column // 8].long() >> shift) & 15, codes[:, column])
    gptq = synthetic._gptq(4, 32)("", 16, 64, drawn())["qweight"]
    for row in range(64):
        assert torch.equal((gptq[row // 8].long() >> 4 * (row % 8)) & 15, codes[row])


@pytest.mark.parametrize(
    ("n", "k", "blocks"), [(64, 128, (1, 1)), (129, 256, (2, 2)), (128 * 129, 2, (129, 1)), (2, 128 * 129, (1, 129))]
)
def test_blocks_are_128_rows_and_columns(n: int, k: int, blocks: tuple[int, int]) -> None:
    made = synthetic._fp8_block("p.", n, k, torch.Generator().manual_seed(0))
    assert {name: tuple(one.shape) for name, one in made.items()} == {"p.weight": (n, k), "p.weight_scale_inv": blocks}


def test_stacked_experts_have_the_whole_range(tmp_path: Path) -> None:
    (recipe,) = (one for one in RECIPES if one.name == "mxfp4")
    recipe.write(tmp_path / "made")
    stored = load_file(tmp_path / "made" / "model.safetensors")
    base = "model.layers.0.mlp.experts."
    for name, n, k in (("gate_up", 128, 128), ("down", 128, 64)):
        blocks, scales = stored[f"{base}{name}_proj_blocks"], stored[f"{base}{name}_proj_scales"]
        assert (blocks.dtype, blocks.shape) == (torch.uint8, (4, n, k // 32, 16))
        assert len(blocks.unique()) == 256
        assert (scales.dtype, scales.shape) == (torch.uint8, (4, n, k // 32))
        assert scales.unique().tolist() == [118, 119, 120, 121, 122]
        bias = stored[f"{base}{name}_proj_bias"]
        assert (bias.dtype, bias.shape) == (torch.bfloat16, (4, n))
        assert 0.8 < float(bias.float().std()) < 1.2
    assert stored["model.layers.0.mlp.router.weight"].shape == (4, 128)
    assert stored["model.layers.0.mlp.router.bias"].shape == (4,)


def test_numbers_use_the_whole_range_of_their_type(tmp_path: Path) -> None:
    for recipe in RECIPES:
        recipe.write(tmp_path / recipe.name)
        stored = load_file(tmp_path / recipe.name / "model.safetensors")
        for part, (dtype, shape, least, most) in PARTS.get(recipe.name, {}).items():
            found = [one for name, one in stored.items() if name.endswith(f".gate_proj.{part}")]
            assert len(found) == 4
            whole = torch.stack([one.view(torch.uint8) if one.itemsize == 1 and one.is_floating_point() else one
                                 for one in found]).double()  # fmt: skip
            assert (str(found[0].dtype), list(found[0].shape)) == (f"torch.{dtype}", shape), (recipe.name, part)
            assert (float(whole.min()), float(whole.max())) == pytest.approx((least, most)), (recipe.name, part)
        for name, one in stored.items():
            if name.endswith(("scales", "weight_scale", "weight_scale_inv")) and one.itemsize in (2, 4):
                factor = {"weight_scale": 16 if one.itemsize == 2 else 64, "weight_scale_inv": 64}
                scaled = one.double() * factor.get(name.rpartition(".")[2], 1)
                assert float(scaled.min()) > 0.0039, name
                assert float(scaled.max()) < 0.0161, name
    fused = load_file(tmp_path / "mxfp4" / "model.safetensors")
    exponents = fused["model.layers.0.mlp.experts.gate_up_proj_scales"]
    assert (exponents.shape, int(exponents.min()), int(exponents.max())) == ((4, 128, 4), 118, 122)
    order = load_file(tmp_path / "gptq-int4-actorder" / "model.safetensors")
    gate, up = (order[f"model.layers.0.mlp.experts.1.{name}_proj.g_idx"] for name in ("gate", "up"))
    assert torch.equal(gate, up)
    assert not torch.equal(gate, gate.sort().values)
