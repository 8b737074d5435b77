"""Contradictions of headers and config, and what a scan counts: each warning with its whole sentence."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import pytest
from checkpoint.builder import (
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    Stored,
    config,
    experts,
    gptq,
    halves,
    quantization,
    router,
    write,
)

import moeq
from moeq.errors import MoeqError
from moeq.model.scan import scan

PREFIX = "model.layers.0.mlp.experts"


def warnings_of(folder: Path, tensors: Any = None, **changes: Any) -> dict[str, str]:
    opened = moeq.open(write(folder, tensors, config(**changes)))
    return {one.code: one.message for one in opened.info.warnings}


def plain(n: int, k: int) -> dict[str, Stored]:
    return {"weight": Stored("BF16", (n, k))}


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        ({}, None, ""),
        (
            {"moe_intermediate_size": 48},
            "config.sizes-differ",
            "experts have 32 intermediate features, the config declares 48; the tensors count",
        ),
        (
            {"quantization_config": quantization(group_size=24)},
            "shape.partial-group",
            "K=64 is not a multiple of group size 24: the last group is partial",
        ),
        (
            {"quantization_config": quantization(dynamic={"-:.*": {}})},
            "config.excludes-quantized",
            f"the config excludes {PREFIX}.0.down_proj from quantisation, the tensors are quantised; they count",
        ),
    ],
)
def test_config_against_headers(changes: dict[str, Any], code: str | None, message: str, tmp_path: Path) -> None:
    tensors = {**router(), **experts(group=24)} if code == "shape.partial-group" else None
    found = warnings_of(tmp_path, tensors, **changes)
    assert found == ({} if code is None else {code: message})


def test_a_config_that_quantises_plain_tensors(tmp_path: Path) -> None:
    found = warnings_of(tmp_path, {**router(), **experts(make=plain)})
    words = f"the config quantises {PREFIX}.0.down_proj, the tensors are not quantised; they count"
    assert found["config.quantizes-plain"] == words


def test_a_name_that_says_awq(tmp_path: Path) -> None:
    found = warnings_of(tmp_path / "awq" / "My-AWQ-model")
    assert found == {"name.says-awq": "the name says AWQ, the config says gptq; the config counts"}
    assert warnings_of(tmp_path / "awq" / "model") == {}


@pytest.mark.parametrize("hidden", [32, 128])
def test_experts_of_another_hidden_size(hidden: int, tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match=f"experts read 64 features, the config declares hidden_size {hidden}") as e:
        warnings_of(tmp_path, hidden_size=hidden)
    assert e.value.code == "source.inconsistent"


def test_another_number_of_experts(tmp_path: Path) -> None:
    with pytest.raises(MoeqError, match="the config declares 3 experts, the tensors of layer 0 have 2") as caught:
        warnings_of(tmp_path, num_experts=3)
    assert caught.value.code == "source.inconsistent"


def test_layers_that_are_not_complete(tmp_path: Path) -> None:
    tensors = {**router(), **experts()}
    for name in [name for name in tensors if "1.up_proj" in name]:
        del tensors[name]
    with pytest.raises(MoeqError) as caught:
        warnings_of(tmp_path, tensors)
    assert caught.value.message == "layer 0: experts 1 lack up"
    assert caught.value.hint == "the checkpoint is not complete; download it again"
    tensors = {**router(), **experts(names=("gate_proj", "", "down_proj"))}
    with pytest.raises(MoeqError, match=r"layer 0: projections \['down', 'gate'\], expected \(gate,\) up and down"):
        warnings_of(tmp_path, tensors)
    some = {**router(), **experts(), **{name: row for name, row in experts(make=plain).items() if ".1." in name}}
    some = {name: row for name, row in some.items() if ".1." not in name or name.endswith("proj.weight")}
    with pytest.raises(MoeqError) as caught:
        warnings_of(tmp_path, some)
    assert caught.value.message == "layer 0: experts 1 are not quantised, the others are"
    assert "quantise again with every expert calibrated" in (caught.value.hint or "")


def scanned(folder: Path, expert: int = 0, projection: str = "gate_proj", **parts: Stored) -> dict[str, str]:
    tensors = {**router(), **experts()}
    tensors |= {f"{PREFIX}.{expert}.{projection}.{part}": stored for part, stored in parts.items()}
    return {one.code: one.message for one in scan(moeq.open(write(folder, tensors)))}


def index(*groups: int) -> Stored:
    return Stored("I32", (len(groups),), struct.pack(f"<{len(groups)}i", *groups))


def test_a_scan_counts_and_names_the_first(tmp_path: Path) -> None:
    assert scanned(tmp_path) == {}
    tensors = {**router(), **experts(scale=0.0)}
    (found,) = scan(moeq.open(write(tmp_path, tensors)))
    assert found.code == "data.all-zero"
    assert found.message.endswith(f"(6 tensors, first {PREFIX}.0.gate_proj.scales)")


def test_a_scan_tells_how_far_it_is(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    assert scan(moeq.open(write(tmp_path)), lambda done, of: told.append((done, of))) == []
    assert told == [(0, 1), (1, 1)]


def test_a_scan_of_scales(tmp_path: Path) -> None:
    values = halves(0.5, 2 * INTERMEDIATE - 3) + halves(0.0, 1) + halves(-1.0, 1) + halves(float("nan"), 1)
    found = scanned(tmp_path, 1, "up_proj", scales=Stored("F16", (2, INTERMEDIATE), values))
    assert found.keys() == {"data.scale-zero", "data.scale-negative", "data.scale-nonfinite"}
    assert all(one.endswith(f"(1 tensors, first {PREFIX}.1.up_proj.scales)") for one in found.values())
    for value, code in ((0.0, "zero"), (-1.0, "negative"), (float("inf"), "nonfinite")):
        scales = Stored("F16", (2, INTERMEDIATE), halves(0.5, 2 * INTERMEDIATE - 1) + halves(value, 1))
        assert scanned(tmp_path, 1, "up_proj", scales=scales).keys() == {f"data.scale-{code}"}


@pytest.mark.parametrize(
    ("word", "symmetric", "code"),
    [
        (0x77777777, True, None),
        (0x88888888, True, "data.zeros-convention"),
        (0x66666666, True, "data.zeros-not-constant"),
        (0x88888887, True, "data.zeros-not-constant"),
        (0x12345678, False, None),
        (0x1F345678, False, "data.zeros-of-zero"),
    ],
)
def test_a_scan_of_zero_points(word: int, symmetric: bool, code: str | None, tmp_path: Path) -> None:
    tensors = {**router(), **experts(zeros=word)}
    opened = moeq.open(write(tmp_path, tensors, config(quantization_config=quantization(sym=symmetric))))
    assert [one.code for one in scan(opened)] == ([] if code is None else [code])


@pytest.mark.parametrize(
    ("groups", "act_order", "codes"),
    [
        ([0] * 32 + [1] * 32, False, []),
        ([0] * 32 + [1] * 32, True, ["data.act-order-trivial"]),
        ([0] * 64, False, ["data.g-idx-placeholder"]),
        ([0] * 64, True, ["data.g-idx-range"]),
        ([1] * 32 + [0] * 32, False, ["data.act-order-undeclared"]),
        ([1] * 32 + [0] * 32, True, ["data.act-order"]),
        ([0] * 33 + [1] * 31, False, ["data.g-idx-range"]),
    ],
)
def test_a_scan_of_group_indices(groups: list[int], act_order: bool, codes: list[str], tmp_path: Path) -> None:
    def make(n: int, k: int) -> dict[str, Stored]:
        found = gptq(n, k)
        return {**found, "g_idx": index(*groups)} if k == HIDDEN else found  # down has one group

    document = config(quantization_config=quantization(desc_act=act_order))
    found = scan(moeq.open(write(tmp_path, {**router(), **experts(make=make)}, document)))
    assert [one.code for one in found] == codes
    assert all(f"({2 * EXPERTS} tensors, first {PREFIX}.0.gate_proj.g_idx)" in one.message for one in found)


def test_a_scan_of_gate_beside_up(tmp_path: Path) -> None:
    found = scanned(tmp_path, g_idx=index(*[1] * 32, *[0] * 32))
    assert found.keys() == {"data.act-order-undeclared", "data.gate-up-order"}
    assert found["data.gate-up-order"].endswith(f"(1 tensors, first {PREFIX}.0.gate_proj)")


@pytest.mark.parametrize(("second", "differ"), [(2.0, False), (2.001, False), (2.003, True), (-2.0, True)])
def test_a_scan_of_second_scales(second: float, differ: bool, tmp_path: Path) -> None:
    def make(value: float) -> Any:
        return lambda n, k: {
            "weight": Stored("U8", (n, k // 2)),
            "weight_scale": Stored("F8_E4M3", (n, k // 16), b"\x38" * (n * k // 16)),
            "weight_scale_2": Stored("F32", (), struct.pack("<f", value)),
        }

    tensors = {**router(), **experts(names=("gate_proj", "", "down_proj"), make=make(2.0))}
    tensors |= experts(names=("", "up_proj", ""), make=make(second))
    document = config(quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4"})
    found = {one.code: one.message for one in scan(moeq.open(write(tmp_path, tensors, document)))}
    assert ("data.gate-up-scale" in found) is differ
    if differ:
        assert f"({EXPERTS} tensors, first {PREFIX}.0.gate_proj (2 and {second:g}))" in found["data.gate-up-scale"]
    assert ("data.scale-negative" in found) is (second < 0)


def test_a_scan_of_biases(tmp_path: Path) -> None:
    for value, expected in ((0.0, True), (1.0, False)):
        bias = Stored("F16", (INTERMEDIATE,), halves(0.0, INTERMEDIATE - 1) + halves(value, 1))

        def make(n: int, k: int, bias: Stored = bias) -> dict[str, Stored]:
            return {**gptq(n, k), "bias": bias if n == INTERMEDIATE else Stored("F16", (n,), halves(1.0, n))}

        found = scan(moeq.open(write(tmp_path, {**router(), **experts(make=make)})))
        assert [one.code for one in found] == (["data.bias-zero"] if expected else [])


def test_exponent_bytes(tmp_path: Path) -> None:
    def make(n: int, k: int) -> dict[str, Stored]:
        scales = b"\x7f" * (n * k // 32 - 2) + (b"\x00\xff" if k == HIDDEN else b"\x01\xfe")
        return {"weight_packed": Stored("U8", (n, k // 2)), "weight_scale": Stored("U8", (n, k // 32), scales)}

    found = scan(moeq.open(write(tmp_path, {**router(), **experts(make=make)}, config(quantization_config=None))))
    assert [one.code for one in found] == ["data.e8m0-nan", "data.e8m0-zero"]


def test_one_group_has_no_order(tmp_path: Path) -> None:
    """Indices mean nothing where all columns share a scale, and may differ between gate and up."""
    tensors = {**router(), **experts(group=HIDDEN)}
    tensors[f"{PREFIX}.0.gate_proj.g_idx"] = index(*[1] * 32, *[0] * 32)
    opened = moeq.open(write(tmp_path, tensors, config(quantization_config=quantization(group_size=HIDDEN))))
    assert scan(opened) == []
