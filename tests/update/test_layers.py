"""Tensors of a layer: what is told of them, which are refused, and which the gather kernel leaves to the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoint.test_manifest import manifest
from refusing import refuses
from update.made import W2, W13, made

import moeq
from moeq.load.rank_reading import Window
from moeq.load.ranks import Rank, plan_rank
from moeq.model.shards import Range
from moeq.schemes.base import Scheme
from moeq.update.device import Gather, obstacle
from moeq.update.layers import WritableLayer, _features, snapshot_digest

LAYOUT = "marlin-wna16/1"
HINT = "pass the tensors that moeq.load_tensors returns for this rank"


@pytest.fixture(scope="module", name="scheme")
def _scheme(checkpoints) -> Scheme:
    return moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").scheme_of(0)


def test_what_a_layer_tells(scheme: Scheme) -> None:
    layer = made(LAYOUT, scheme)
    assert (layer.rows(0), layer.rows(1), layer.rows(2)) == ([0], [1], [])
    assert (layer.padded("w13"), layer.padded("w2"), layer.own("w13"), layer.own("w2")) == (W13, W2, W13, W2)
    assert (layer.names("w13"), layer.names("w2"), layer.is_whole) == (("gate", "up"), ("down",), True)
    assert layer.row_bytes("w2") == 256 * 128 // 2 + 256 * 4 * 2
    assert layer.device == torch.device("cpu")
    assert (layer.rank.tp_size, layer.digests, layer.interleaved) == (1, {}, False)
    plain = made(LAYOUT, scheme, replace(W13, n=128, gated=False))
    assert (plain.projections, plain.names("w13")) == (("up", "down"), ("up",))
    assert snapshot_digest(4, iter([(0, "down", "a")])) != snapshot_digest(4, iter([(0, "down", "b")]))


def changed(layer: WritableLayer, role: Any, part: str, change: Callable[[torch.Tensor], Any]) -> dict[Any, Any]:
    tensors = {role: dict(parts) for role, parts in layer.tensors.items()}
    tensors[role][part] = change(tensors[role][part])
    return tensors


def frozen(tensor: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return tensor.clone()


@pytest.mark.parametrize(
    ("part", "change", "why"),
    [
        ("scale", lambda one: one[:1], "w2_scale is torch.float16 [1, 4, 256], not torch.float16 [2, 4, 256]"),
        ("scale", lambda one: one.view(torch.int16),
         "w2_scale is torch.int16 [2, 4, 256], not torch.float16 [2, 4, 256]"),
        ("weight", lambda one: one.to(torch.int64),
         "w2_weight is torch.int64 [2, 8, 512], not torch.int32 [2, 8, 512]"),
        ("scale", lambda one: one.to(torch.float8_e4m3fn),
         "w2_scale is torch.float8_e4m3fn [2, 4, 256], not torch.float16 [2, 4, 256]"),
        ("scale", lambda one: one.mT.contiguous().mT,
         "w2_scale has strides (1024, 1, 4), so its bytes are not one block"),
        ("scale", lambda one: one.clone().requires_grad_(),
         "w2_scale requires a gradient, and packed weights have none"),
        ("scale", frozen, "w2_scale was made in torch's inference mode, which freezes it"),
        ("scale", lambda one: torch.empty_like(one, device="meta"), "its tensors are on several devices"),
        ("more", None, "w2 has parts ['more', 'scale', 'weight'], ['scale', 'weight'] are needed"),
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_written(part: str, change: Any, why: str, scheme: Scheme) -> None:
    layer = made(LAYOUT, scheme)
    if change is None:
        tensors = {"w13": layer.tensors["w13"], "w2": {**layer.tensors["w2"], part: torch.zeros(1)}}
    else:
        tensors = changed(layer, "w2", part, change)
    with refuses("usage.update-target", f"layer 4 in layout {LAYOUT}: {why}", HINT):
        replace(layer, tensors=tensors)


def test_tensors_may_be_wider_or_lie_side_by_side(scheme: Scheme) -> None:
    layer = made(LAYOUT, scheme)
    replace(layer, tensors=changed(layer, "w2", "scale", lambda one: one.float()))
    memory = torch.zeros(4 * 2 * 4 * 256, dtype=torch.float16)
    first, second = (memory[at : at + 2048].view(2, 4, 256) for at in (0, 2048))
    beside = {"w13": layer.tensors["w13"], "w2": {**layer.tensors["w2"], "scale": first}}
    replace(layer, tensors=beside)
    other = replace(layer, layer=5, tensors=changed(made(LAYOUT, scheme), "w2", "scale", lambda one: second))
    moeq.Writer([replace(layer, tensors=beside), other])
    shared = replace(layer, layer=5, tensors=changed(made(LAYOUT, scheme), "w2", "scale", lambda one: first))
    with refuses("usage.update-target", "layers 4 and 5 share memory", "give every layer tensors of its own"):
        moeq.Writer([replace(layer, tensors=beside), shared])
    for start, why in ((4096, None), (4095, "w13_scale and w2_scale share memory")):
        whole = torch.zeros(4096 + 2048, dtype=torch.float16)
        tensors = changed(layer, "w13", "scale", lambda one, whole=whole: whole[:4096].view_as(one))
        tensors["w2"]["scale"] = whole[start : start + 2048].view(2, 4, 256)
        with nullcontext() if why is None else refuses("usage.update-target", f"layer 4 in layout {LAYOUT}: {why}"):
            replace(layer, tensors=tensors)
    with refuses("usage.update-target", f"layer 4 in layout {LAYOUT}: this number was given twice", HINT):
        moeq.Writer([layer, layer])


@pytest.mark.parametrize(
    ("layout", "role", "wider", "why"),
    [
        (LAYOUT, "w13", False, None),
        (LAYOUT, "w2", True, "w2_scale is torch.float32, but the layout stores F16"),
        ("marlin-wna16-int8act/1", "w2", False,
         "group scales are stored relative to the largest one of all local experts"),
        ("marlin-wna16-fp8act/1", "w2", False, "marlin-wna16-fp8act/1 is more than an index map"),
    ],
)  # fmt: skip
def test_what_the_gather_kernel_does_not_write(layout, role, wider, why, scheme: Scheme) -> None:
    layer = made(layout, scheme)
    if wider:
        layer = replace(layer, tensors=changed(layer, role, "scale", lambda one: one.float()))
    assert obstacle(layer, role) == why


def test_act_order_and_values_that_may_not_fit_are_left_to_the_cpu(scheme: Scheme) -> None:
    sorted_columns = replace(W13, act_order=True), replace(W2, act_order=True)
    assert obstacle(made("marlin-act-order/1", scheme, *sorted_columns), "w2") == (
        "act-order sorts the columns of every expert"
    )
    fp8 = (replace(one, element="e4m3", group_size=one.k, scale_dtype="bf16") for one in (W13, W2))
    why = obstacle(made("marlin-fp8/1", scheme, *fp8), "w2") or ""
    assert why.startswith(
        "values may not fit, so that they have to be looked at: scales and biases that are no bf16 numbers"
    )


def test_experts_that_are_quantised_and_written_together(scheme: Scheme) -> None:
    """All rows of a rank make up one tall matrix where nothing is padded, shared, cut or out of order."""

    def together(layer: WritableLayer, role: Any = "w2") -> bool:
        return Gather(layer, role).writes_all_experts_at_once

    layer, weight = made(LAYOUT, scheme), scheme.weight

    def sharing(rows: int) -> WritableLayer:
        scale = replace(weight.scale, group_shape=(rows, weight.scale.group_shape[1]))
        return replace(layer, scheme=replace(scheme, weight=replace(weight, scale=scale)))

    assert together(layer)
    assert together(layer, "w13")
    assert not together(replace(layer, written={**layer.written, "w2": replace(W2, k=96)}))
    assert not together(replace(layer, specs={**layer.specs, "w2": replace(W2, bias_dtype="f16")}))
    assert not together(replace(layer, scheme=replace(scheme, weight=replace(weight, scale2=weight.scale))))
    assert [together(sharing(rows)) for rows in (-1, 1, 32, 100, W2.n)] == [False, True, True, False, True]
    assert not together(made("rdna3-int4/1", scheme)), "its zero points arrange no tensor"
    orders = [(0, 1), (1, 0), (0, 0), (2, 7)]
    assert [together(replace(layer, experts=order)) for order in orders] == [True, False, False, True]


def test_intermediate_features_of_a_rank() -> None:
    """All of them; those that its file holds; those of its window, without the padding at the end."""
    padded, by_rank = manifest().layers
    w2 = padded.matrices["w2"]
    whole = replace(padded, matrices={**padded.matrices, "w2": replace(w2, spec=replace(w2.spec, k=100))})
    assert _features(whole, plan_rank(whole, Rank())) == Range(0, 100)
    parts = [plan_rank(by_rank, Rank(number, 2)) for number in range(2)]
    assert [_features(by_rank, part) for part in parts] == [Range(0, 64), Range(64, 128)]
    part = parts[0]
    for window, found in (((0, 64), Range(0, 64)), ((64, 128), Range(64, 100)), ((128, 192), Range(100, 100))):
        cut = replace(part.matrices["w2"], window=Window((0, 256), window))
        assert _features(whole, replace(part, matrices={**part.matrices, "w2": cut})) == found
