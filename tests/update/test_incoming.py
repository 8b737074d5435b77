"""Tensors of an update: which are taken, and what is said of the others, before anything is written."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from refusing import refuses
from update.made import W2, W13, made

import moeq
from moeq.matrix import MatrixSpec
from moeq.model.shards import Range
from moeq.schemes.base import Scheme
from moeq.update.incoming import (
    ProjectionBlock,
    _common_global_scale,
    _declared,
    check_block,
    merged_tensors,
    named_tensors,
    read_layer,
    read_update,
    wanted_spec,
    whole_block,
)
from moeq.update.layers import WritableLayer
from moeq.update.quantize import RULES, nvfp4_global_scale

LAYOUT = "marlin-wna16/1"
HINT = "pass the parts as the source stores them (gptq int4 g32 sym), or float weights [N, K]"
CPU = torch.device("cpu")
FLOATS = torch.zeros(128, 256)


@pytest.fixture(scope="module", name="scheme")
def _scheme(checkpoints) -> Scheme:
    return moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").scheme_of(0)


@pytest.fixture(name="layer")
def _layer(scheme: Scheme) -> WritableLayer:
    return made(LAYOUT, scheme)


def scaled(scheme: Scheme, rows: int, columns: int) -> Scheme:
    """The scheme with scales of so many rows and columns."""
    scale = replace(scheme.weight.scale, group_shape=(rows, columns))
    return replace(scheme, weight=replace(scheme.weight, scale=scale))


def test_specs_and_blocks(layer: WritableLayer) -> None:
    assert wanted_spec(layer, "gate") == replace(W13, role="gate", n=128, gated=True)
    assert wanted_spec(layer, "gate_up") == W13
    down = wanted_spec(layer, "down")
    assert down == replace(W2, role="down")
    assert whole_block(down) == ProjectionBlock(Range(0, 256), Range(0, 128))
    assert ProjectionBlock(Range(8, 16), Range(32, 64)).spec_of(down) == replace(down, n=8, k=32)
    assert ProjectionBlock(Range(8, 16), Range(0, 128)).spec_of(down) == replace(down, n=8)
    assert ProjectionBlock(Range(8, 16), Range(0, 16)).spec_of(down) == replace(down, n=8, k=16, group_size=16)


ALL = Range(0, 256), Range(0, 128)


@pytest.mark.parametrize(
    ("rows", "columns", "why"),
    [
        (ALL[0], ALL[1], None),
        (Range(3, 4), ALL[1], None),
        (ALL[0], Range(32, 128), None),
        (Range(0, 0), ALL[1], "rows 0 .. 0 are empty or outside 0 .. 256"),
        (Range(-1, 4), ALL[1], "rows -1 .. 4 are empty or outside 0 .. 256"),
        (Range(0, 257), ALL[1], "rows 0 .. 257 are empty or outside 0 .. 256"),
        (ALL[0], Range(0, 129), "columns 0 .. 129 are empty or outside 0 .. 128"),
        (ALL[0], Range(16, 64), "columns 16 .. 64 cut a scale's block of 32 (16 % 32 = 16, 64 % 32 = 0)"),
        (ALL[0], Range(32, 90), "columns 32 .. 90 cut a scale's block of 32 (32 % 32 = 0, 90 % 32 = 26)"),
    ],
)
def test_blocks_that_can_be_written(rows: Range, columns: Range, why: str | None, layer: WritableLayer) -> None:
    block = ProjectionBlock(rows, columns)
    if why is None:
        check_block(layer, "down", block)
        return
    start = columns.start // 32 * 32
    hint = f"columns {start} .. {-(-columns.stop // 32) * 32} are whole blocks" if "cut" in why else None
    with refuses("usage.illegal-slice", f"layer 4 down: {why}", hint):
        check_block(layer, "down", block)


@pytest.mark.parametrize(
    ("rows", "group", "act_order", "block", "why"),
    [
        (-1, 128, False, (Range(0, 8), ALL[1]), "one scale belongs to the whole matrix"),
        (1, 128, False, (ALL[0], Range(0, 32)), "one scale belongs to all columns of a row"),
        (1, 32, True, (Range(0, 8), ALL[1]), "act-order sorts all columns of the matrix in one order"),
    ],
)
def test_blocks_that_share_with_the_rest(rows, group, act_order, block, why, layer, scheme) -> None:
    spec = replace(W2, group_size=group, act_order=act_order)
    other = replace(layer, scheme=scaled(scheme, rows, group), specs={"w13": W13, "w2": spec})
    with refuses("usage.shared-tensor", f"layer 4 down has no slices: {why}", "write the whole projection"):
        check_block(other, "down", ProjectionBlock(*block))
    check_block(other, "down", ProjectionBlock(*ALL))


def test_blocks_of_rows_that_share_scales(layer: WritableLayer, scheme: Scheme) -> None:
    other = replace(layer, scheme=scaled(scheme, 96, 32))
    for rows in (Range(96, 192), Range(192, 256)):  # the last one is cut
        check_block(other, "down", ProjectionBlock(rows, ALL[1]))
    text = "layer 4 down: rows 96 .. 200 cut a scale's block of 96 (96 % 96 = 0, 200 % 96 = 8)"
    with refuses("usage.illegal-slice", text, "rows 96 .. 256 are whole blocks"):
        check_block(other, "down", ProjectionBlock(Range(96, 200), ALL[1]))


def test_tensors_by_their_names(layer: WritableLayer) -> None:
    one, two = torch.zeros(1, requires_grad=True), torch.ones(1)
    found = named_tensors(layer, "w13", {"gate": one, "up": {"qweight": two}})
    assert {name: list(parts) for name, parts in found.items()} == {"gate": ["weight"], "up": ["qweight"]}
    assert not found["gate"]["weight"].requires_grad
    for name, wanted in (("gate", "gate"), ("down", "down"), ("w2", "down"), ("gate_up", "gate_up")):
        assert list(named_tensors(layer, name, one)) == [wanted]
    plain = made(LAYOUT, layer.scheme, replace(W13, n=128, gated=False))
    assert list(named_tensors(plain, "gate_up", one)) == ["up"]
    for names, wrong in (("gate and up", one), ("gate and up", {"gate": one})):
        with refuses("usage.update-tensors", f"layer 4 w13: pass a mapping with the tensors of {names}", HINT):
            named_tensors(layer, "w13", wrong)
    for wrong, kind in ((None, "NoneType"), ({"qweight": 1}, "dict")):
        text = f"layer 4 down: a tensor or tensors by part are needed, not {kind}"
        with refuses("usage.update-tensors", text, HINT):
            named_tensors(layer, "down", wrong)
    text = "an expert has no projection 'gate'"
    with refuses("usage.no-such-projection", text, "projections: gate, up, down, w2, w13, gate_up"):
        named_tensors(plain, "gate", one)


def test_a_projection_is_given_once(layer: WritableLayer) -> None:
    parts = {"weight": FLOATS}
    assert list(merged_tensors(layer, {"gate": parts}, {"up": parts, "down": parts})) == ["gate", "up", "down"]
    for given, more in (("gate", "gate_up"), ("gate_up", "up"), ("down", "down")):
        with refuses("usage.update-tensors", f"layer 4 {given} and {more}: a projection is given twice", HINT):
            merged_tensors(layer, {given: parts}, {more: parts})


TEXT = "int4 [128, 256] symmetric in groups of 32, f16 scales, bias None"


def test_tensors_that_are_refused(layer: WritableLayer) -> None:
    def refused(why: str, name: str = "gate", spec: MatrixSpec | None = None, **parts: torch.Tensor) -> None:
        other = layer if spec is None else replace(layer, specs={"w13": spec, "w2": W2})
        with refuses("usage.update-tensors", f"layer 4 {name}: {why}", HINT):
            read_update(other, {name: parts}, None, "compressed-tensors", CPU)

    refused("float weights must come without g_idx, scales", weight=FLOATS, scales=FLOATS, g_idx=FLOATS)
    refused("the weights are [1, 256], not [128, 256]", weight=FLOATS[:1])
    refused("bias is [128], the layer has None [128]", weight=FLOATS, bias=FLOATS[:, 0])
    biased = replace(W13, bias_dtype="bf16")
    refused("bias is [127], the layer has bf16 [128]", spec=biased, weight=FLOATS, bias=FLOATS[1:, 0])
    title = "the layer's form is GPTQ: int32 words along K, scales and zero points per group, these tensors are"
    refused(f"{title} nothing")
    refused(f"{title} a torch.complex64[2], b F32[128, 256]",
            b=FLOATS, a=torch.zeros(2, dtype=torch.complex64))  # fmt: skip
    parts = {
        "qweight": torch.zeros(32, 128, dtype=torch.int32),
        "scales": torch.ones(8, 128, dtype=torch.float16),
        "qzeros": torch.full((8, 16), 0x77777777, dtype=torch.int32),
    }
    half = {"qweight": parts["qweight"][:, :64], "scales": parts["scales"][:, :64], "qzeros": parts["qzeros"][:, :8]}
    refused(f"the tensors hold {TEXT.replace('128', '64')}, but the layer holds {TEXT}", **half)
    text = "layer 4 gate: 16 words hold K=256 codes of 2 bits, the config declares 4"
    with refuses("usage.update-tensors", text, "the config does not describe this tensor"):
        read_update(layer, {"gate": parts | {"qweight": parts["qweight"][:16]}}, None, "compressed-tensors", CPU)
    order = torch.arange(256, dtype=torch.int32) % 8
    text = "g_idx and the act-order of the layer contradict each other"
    refused(text, **parts, g_idx=order)
    found = read_update(layer, {"gate": parts}, None, "compressed-tensors", CPU)["gate"]
    assert (found.matrix.spec, found.weight) == (wanted_spec(layer, "gate"), None)
    assert bool((found.matrix.codes == 0).all())


def test_gate_and_up_of_nvfp4_have_the_scale_of_the_larger_weights(layer: WritableLayer, checkpoints) -> None:
    """ModelOpt stores a multiplier, compressed-tensors its reciprocal."""
    nvfp4 = replace(layer, scheme=moeq.open(checkpoints / "modelopt-nvfp4-qwen3moe").scheme_of(0))
    given = {"gate": {"weight": FLOATS + 1}, "up": {"weight": FLOATS - 7}}
    for rule in RULES:
        found, alone = _common_global_scale(nvfp4, given, rule), nvfp4_global_scale(FLOATS - 7, rule)
        assert found is not None
        assert torch.equal(found, alone)
        assert _common_global_scale(layer, given, rule) is None
        assert _common_global_scale(nvfp4, {**given, "up": {"qweight": FLOATS}}, rule) is None


def test_fused_rows_in_an_order_that_nobody_knows(layer: WritableLayer) -> None:
    unknown = replace(layer, interleaved=None)
    why = "layer 4 gate_up: nothing says whether its rows are two halves or alternate; pass w13"
    with refuses("usage.update-tensors", why, HINT):
        read_update(unknown, {"gate_up": {"weight": torch.zeros(256, 256)}}, None, "compressed-tensors", CPU)
    with refuses("usage.update-tensors", why, HINT):
        read_layer(unknown, "gate_up", torch.zeros(2, 256, 256))
    weight = torch.arange(256.0).view(256, 1).expand(256, 256)
    for interleaved, gate in ((False, weight[:128]), (True, weight[::2])):
        known = replace(layer, interleaved=interleaved)
        found = read_update(known, {"gate_up": {"weight": weight}}, None, "compressed-tensors", CPU)
        assert found["gate"].weight is not None
        assert torch.equal(found["gate"].weight, gate)
        alone = read_update(layer, {"gate": {"weight": gate}}, None, "compressed-tensors", CPU)["gate"]
        assert torch.equal(found["gate"].matrix.codes, alone.matrix.codes)


@pytest.mark.parametrize(
    ("projection", "weights", "name", "why"),
    [
        ("down", torch.zeros(2, 256, 127), "down", "float weights [2, 256, 128] are needed, not [2, 256, 127]"),
        ("w13", {"gate": torch.zeros(2, 128, 256)}, "w13", "pass the weights of gate and up"),
        ("gate_up", torch.zeros(2, 128, 256), "gate_up", "float weights [2, 256, 256] are needed, not [2, 128, 256]"),
        ("down", 7, "down", "float weights [2, 256, 128] are needed, not int"),
    ],
)
def test_weights_of_a_layer(projection: str, weights: Any, name: str, why: str, layer: WritableLayer) -> None:
    with refuses("usage.update-tensors", f"layer 4 {name}: {why}", HINT):
        read_layer(layer, projection, weights)
    found = torch.randn(2, 128, 256)
    names, held = read_layer(layer, "w13", {"up": found, "gate": -found})
    assert (names, torch.equal(held, torch.cat([-found, found], dim=1))) == (["gate", "up"], True)


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (
            "gptq-int4-g32-actorder-qwen3moe",
            {"method": "gptq", "variant": "gptq", "bits": 4, "group_size": 32, "act_order": True, "strategy": "group"},
        ),
        ("awq-int4-g32-qwen3moe", {"method": "awq", "variant": "gemm", "symmetric": False, "act_order": False}),
        ("ct-fp8-block-qwen3moe", {"bits": 8, "group_size": None, "block": (128, 128), "strategy": "block"}),
        ("ct-fp8-channel-qwen3moe", {"bits": 8, "group_size": -1, "block": None, "strategy": "channel"}),
        ("mxfp4-gptoss", {"method": "mxfp4", "group_size": 32, "block": None, "symmetric": True, "activation": None}),
    ],
)
def test_a_scheme_as_a_config_would_declare_it(name: str, wanted: dict[str, Any], checkpoints) -> None:
    scheme = moeq.open(checkpoints / name).scheme_of(0)
    found = vars(_declared(scheme))
    assert {key: found[key] for key in wanted} == wanted
    assert (found["activation"], found["writer"]) == (scheme.activation, scheme.writer)
    assert found["rule"] == "the converted checkpoint"
