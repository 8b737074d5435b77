"""torchao: vectors that the library wrote on a CPU, decoded to its own numbers; whole checkpoints; damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from orphan_files import stored, vectors, write_torchao, write_torchao_stacks
from safetensors.torch import load_file

from moeq.errors import MoeqError
from moeq.model import open as open_checkpoint
from moeq.schemes.torchao import _blocked_shape, _from_blocked, read_config
from moeq.transcode.transcode import transcode

VECTORS = vectors("torchao")

#: A stack has one scale of a tensor per expert, or whole blocks of scales, which `write_torchao_stacks` does not make.
STACKED = [name for name in VECTORS if name != "int8-tensor" and not name.endswith("blocked")]


@pytest.mark.parametrize(
    ("make", "name"),
    [*((write_torchao, name) for name in VECTORS), *((write_torchao_stacks, name) for name in STACKED)],
)
def test_the_numbers_of_the_library(make: Any, name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make(tmp_path / "model", VECTORS[name]))
    expected = stored(VECTORS[name]["values"])
    for projection in ("gate", "up", "down"):
        assert torch.equal(checkpoint.dequantize(0, 1, projection).to(expected.dtype), expected)
    scheme = checkpoint.scheme_of(0)
    assert scheme.weight.symmetric == ("asym" not in name)
    assert scheme.format == f"torchao-{name.split('-')[0].replace('int4tensor', 'int4')}" or name.startswith("int")
    assert (scheme.activation is not None) == ("a8" in name or name.startswith("mx-"))


@pytest.mark.parametrize("name", ["int8", "int8-tensor", "int4-g8", "int4-g8-asym", "int3-channel-asym"])
def test_integers_stay_integers(name: str, tmp_path: Path) -> None:
    source = write_torchao(tmp_path / "model", VECTORS[name])
    assert transcode(source, tmp_path / "out", "compressed-tensors").exact
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    assert after.scheme_of(0).format == "ct-pack"
    assert after.spec(0, "gate").bits == before.spec(0, "gate").bits
    for projection in ("gate", "down"):
        assert torch.equal(before.dequantize(0, 0, projection), after.dequantize(0, 0, projection))


def test_rules_by_name_and_pattern() -> None:
    rules = {
        "model.layers.0.mlp.experts.0.up_proj": VECTORS["int4-g8-asym"]["config"],
        r"re:model\.layers\.\d\.mlp\.experts\..*": VECTORS["int4-g8"]["config"],
        "_default": VECTORS["int8-w8a8"]["config"],
    }
    table = {"quant_type": {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": rules}}}}
    declaration = read_config({**table, "modules_to_not_convert": ["lm_head"]}, "config.json")
    experts = "model.layers.0.mlp.experts"
    found = [declaration.resolve(name) for name in (f"{experts}.0.up_proj", f"{experts}.1.up_proj", "q", "lm_head")]
    assert [one and one.symmetric for one in found] == [False, True, True, None]
    assert [one and one.activation is not None for one in found] == [False, False, True, None]
    hostile = {"re:(a+)+b": VECTORS["int4-g8"]["config"]}
    table = {"quant_type": {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": hostile}}}}
    with pytest.raises(MoeqError, match="unbounded time"):
        read_config(table, "config.json")


@pytest.mark.parametrize("config", [[], "int4_weight_only", {"_type": 3}, {"default": {}}, None])
def test_hostile_configs(config: object) -> None:
    with pytest.raises(MoeqError) as caught:
        read_config({"quant_type": {"default": config}}, "config.json")
    assert caught.value.code == "source.bad-config"


@pytest.mark.parametrize(
    ("part", "tensor", "words"),
    [
        ("_weight_scale", torch.ones(16, 3), "_weight_scale is"),
        ("_weight_scale", torch.ones(16), "_weight_scale is"),
        ("_weight_scale", torch.full((16, 2), float("nan"), dtype=torch.bfloat16), "not finite"),
        ("_weight_zero_point", torch.zeros(16, 1, dtype=torch.int8), "_weight_zero_point is"),
        ("_weight_zero_point", torch.zeros(16, 2), "_weight_zero_point is F32"),
        ("_weight_zero_point", torch.ones(16, 2, dtype=torch.int8), "not 0"),
        ("_weight_qdata", torch.full((16, 16), 8, dtype=torch.int8), "-8 to 7"),
        ("_weight_act_pre_scale", torch.ones(16), "act_pre_scale changes"),
    ],
)
def test_parts_that_do_not_fit(tmp_path: Path, part: str, tensor: torch.Tensor, words: str) -> None:
    source = write_torchao(tmp_path / "model", VECTORS["int4-g8"], **{part: tensor})
    with pytest.raises(MoeqError, match=words) as caught:
        open_checkpoint(source).dequantize(0, 0, "gate")
    assert caught.value.code.startswith("source.")


@pytest.mark.parametrize(
    ("target", "name", "exact"),
    [
        ("compressed-tensors", "float8-row", True),
        ("compressed-tensors", "float8-tensor", True),
        ("compressed-tensors", "float8-row-a8", True),
        ("compressed-tensors", "int4tensor-g16-a8", True),
        ("fp32", "int4tensor-g16", True),
        ("bf16", "int4tensor-g16", False),
    ],
)
def test_packed_int4_and_float8(target: str, name: str, exact: bool, tmp_path: Path) -> None:
    """Symmetric codes and FP8 stay what they are; zero points in floats make floats."""
    source = write_torchao(tmp_path / "model", VECTORS[name])
    found = transcode(source, tmp_path / "out", target, allow_lossy=not exact)
    assert found.exact == exact
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    if target in ("fp32", "bf16"):
        tensors = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
        written = tensors["model.layers.0.self_attn.o_proj.weight"]
    else:
        written = after.dequantize(0, 0, "down")
    assert torch.equal(before.dequantize(0, 0, "down").to(written.dtype), written)


def test_blocks_of_float8(tmp_path: Path) -> None:
    """One scale per 128 x 128, as `PerBlock` makes them; of a few rows, blocks are as small as the shapes say."""
    vector = VECTORS["float8-row"]
    scales = torch.tensor([[0.5, 0.25], [2.0, 1.0]])
    source = write_torchao(tmp_path / "model", vector, _weight_scale=scales)
    codes = stored(vector["parts"]["_weight_qdata"]).float()
    expected = codes * scales.repeat_interleave(8, 0).repeat_interleave(8, 1)
    assert torch.equal(open_checkpoint(source).dequantize(0, 0, "up"), expected)


@pytest.mark.parametrize(
    ("name", "part", "tensor", "words"),
    [
        ("int4tensor-g16", "_weight_scale", torch.ones(2, 16), "_weight_scale is"),
        ("int4tensor-g16", "_weight_scale", torch.ones(3, 32), "_weight_scale is"),
        ("int4tensor-g16", "_weight_zero_point", None, "with zero points"),
        ("int4tensor-g16", "_weight_zero_point", torch.zeros(1, 32), "_weight_zero_point is"),
        ("int4tensor-g16", "_weight_zero_point", torch.full((2, 32), float("inf")), "not finite"),
        ("int4tensor-g16-a8", "_weight_zero_point", torch.ones(2, 32), "not 0"),
        ("int4tensor-g16", "_weight_act_pre_scale", torch.ones(32), "act_pre_scale changes"),
        ("float8-row", "_weight_scale", torch.ones(3, 1), "_weight_scale is"),
        ("float8-row", "_weight_scale", torch.ones(16, 2), "_weight_scale is"),
        ("float8-row", "_weight_scale", torch.full((16, 1), float("nan")), "not finite"),
    ],
)
def test_packed_parts_that_do_not_fit(
    tmp_path: Path, name: str, part: str, tensor: torch.Tensor | None, words: str
) -> None:
    source = write_torchao(tmp_path / "model", VECTORS[name], **{part: tensor})
    with pytest.raises(MoeqError, match=words) as caught:
        open_checkpoint(source).dequantize(0, 0, "gate")
    assert caught.value.code.startswith("source.")


@pytest.mark.parametrize(
    ("target", "name"),
    [
        ("compressed-tensors", "mx-fp4"),
        ("compressed-tensors", "mx-fp8-blocked"),
        ("modelopt", "mx-nvfp4-blocked"),
        ("compressed-tensors", "mx-nvfp4-single"),
    ],
)
def test_scales_of_few_numbers_stay(target: str, name: str, tmp_path: Path) -> None:
    source = write_torchao(tmp_path / "model", VECTORS[name])
    assert transcode(source, tmp_path / "out", target).exact
    before, after = open_checkpoint(source), open_checkpoint(tmp_path / "out")
    for projection in ("gate", "up", "down"):
        assert torch.equal(before.dequantize(0, 1, projection), after.dequantize(0, 1, projection))
    one, other = before.matrix(0, 0, "down"), after.matrix(0, 0, "down")
    assert torch.equal(one.codes, other.codes)
    assert torch.equal(one.scales.view(torch.uint8), other.scales.view(torch.uint8))


def test_scales_in_the_order_of_cublas(tmp_path: Path) -> None:
    """Scale `[n, g]` of a block of 128 x 4 lies in row `n % 32`, behind those of `n // 32` other runs of four."""
    order = torch.arange(32 * 32).reshape(32, 32)
    found = _from_blocked(
        torch.arange(2 * 512, dtype=torch.int32).remainder(251).to(torch.uint8).reshape(32, 32), 100, 7
    )
    places = [[512 * (g // 4) + 16 * (n % 32) + 4 * (n // 32) + g % 4 for g in range(7)] for n in range(100)]
    assert torch.equal(found, order.flatten()[torch.tensor(places)].remainder(251).to(torch.uint8))


@pytest.mark.parametrize(
    ("name", "part", "tensor", "words"),
    [
        ("mx-fp4", "_weight_scale", torch.ones(32, 2, dtype=torch.float8_e8m0fnu), "weight_scale is"),
        ("mx-fp8-blocked", "_weight_scale", torch.ones(16, 32, dtype=torch.float8_e8m0fnu), "weight_scale is"),
        (
            "mx-fp8-blocked",
            "_weight_scale",
            torch.full((32, 1), 255, dtype=torch.uint8).view(torch.float8_e8m0fnu),
            "not finite",
        ),
        ("mx-nvfp4-blocked", "_weight_per_tensor_scale", torch.ones(2), "expected one number"),
        ("mx-nvfp4-blocked", "_weight_per_tensor_scale", torch.tensor(float("nan")), "finite"),
        ("mx-nvfp4-single", "_weight_qdata", torch.zeros(16, 9, dtype=torch.uint8), "scale is"),
    ],
)
def test_few_scales_that_do_not_fit(tmp_path: Path, name: str, part: str, tensor: torch.Tensor, words: str) -> None:
    source = write_torchao(tmp_path / "model", VECTORS[name], **{part: tensor})
    with pytest.raises(MoeqError, match=words) as caught:
        open_checkpoint(source).dequantize(0, 0, "gate")
    assert caught.value.code.startswith("source.")


@pytest.mark.parametrize("kind", ["Int4TilePackedTo4dTensor", "Int4PlainInt32Tensor", "MXTensor", "", "["])
def test_other_classes_are_refused(tmp_path: Path, kind: str) -> None:
    vector = VECTORS["int8"] | {"metadata": json.dumps({"_type": kind, "_data": {}}) if kind != "[" else "[" * 5000}
    (use,) = open_checkpoint(write_torchao(tmp_path / "model", vector)).info.schemes
    assert use.refusal is not None
    assert "torchao" in use.refusal


@pytest.mark.parametrize(
    ("n", "groups", "shape"),
    [
        (1, 1, (32, 16)),
        (128, 4, (32, 16)),
        (129, 4, (64, 16)),
        (128, 5, (32, 32)),
        (256, 8, (64, 32)),
        (130, 9, (64, 48)),
    ],
)
def test_shapes_in_the_order_of_cublas(n: int, groups: int, shape: tuple[int, int]) -> None:
    """Tiles of 128 rows and 4 groups, each as 32 rows of 16."""
    assert _blocked_shape(n, groups) == shape
