"""Experts that are packed on the CPU: what a rank takes of an update, and what weights that stay must not lose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from layouts.matrices import random_matrix
from refusing import refuses
from update.made import W2, W13, made

import moeq
from moeq.checkpoint.manifest import StackedRole
from moeq.layouts.layout import Layout
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.shards import Range
from moeq.model.tensor_bytes import same_matrix
from moeq.schemes.base import Scheme
from moeq.update.incoming import NewWeights, ProjectionBlock
from moeq.update.layers import WritableLayer
from moeq.update.merge import merged_matrix, whole_matrix
from moeq.update.packing import calibrations_of, check_reversible, pack
from moeq.update.snapshot import messages_of, read_digests, read_matrix

INT8ACT = "marlin-wna16-int8act/1"


@pytest.fixture(scope="module", name="scheme")
def _scheme(checkpoints) -> Scheme:
    return moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").scheme_of(0)


def filled(layer: WritableLayer, factor: float | None = None) -> WritableLayer:
    """The layer with random experts, packed under one factor where the layout has one."""
    for role in layer.tensors:
        matrices = [random_matrix(layer.own(role), seed) for seed in range(2)]
        for row, matrix in enumerate(matrices):
            layout: Layout = layer.layout
            if factor is not None:
                layout = layout.with_calibration(factor)
            for name, tensor in layout.pack(matrix).items():
                layer.tensors[role][name][row].copy_(tensor.view(layer.tensors[role][name][row].shape))
    return layer


@pytest.mark.parametrize("first", [True, False])
def test_a_rank_takes_its_features_of_an_update(first: bool, scheme: Scheme) -> None:
    """Columns of `down`, and rows of gate and of up; one rank alone adds the bias."""
    whole13, whole2 = replace(W13, n=512, bias_dtype="bf16"), replace(W2, k=256, bias_dtype="bf16")
    own13, own2 = replace(whole13, n=256), replace(whole2, k=128)
    held = Range(0, 128) if first else Range(128, 256)
    specs: dict[StackedRole, MatrixSpec] = {"w13": whole13, "w2": whole2}
    layer = made(
        "marlin-wna16/1", scheme, own13, own2, specs=specs, written=specs, intermediate=held, adds_w2_bias=first
    )
    assert not layer.is_whole
    features, groups = slice(held.start, held.stop), slice(held.start // 32, held.stop // 32)
    new, old = random_matrix(replace(whole2, role="down"), 1), random_matrix(own2, 2)
    found = merged_matrix(layer, "w2", old, {"down": NewWeights(new)}, None)
    assert torch.equal(found.codes, new.codes[:, features])
    assert torch.equal(found.scales, new.scales[:, groups])
    assert new.bias is not None
    assert found.bias is not None
    assert torch.equal(found.bias, new.bias if first else torch.zeros_like(new.bias))
    up = random_matrix(replace(whole13, role="up", n=256), 3)
    old = random_matrix(own13, 4)
    found = merged_matrix(layer, "w13", old, {"up": NewWeights(up)}, None)
    assert torch.equal(found.codes, torch.cat([old.codes[:128], up.codes[features]]))
    assert torch.equal(found.scales, torch.cat([old.scales[:128], up.scales[features]]))
    assert torch.equal(found.bias, torch.cat([old.bias[:128], up.bias[features]]))  # type: ignore[index, arg-type]
    assert whole_matrix(layer, "w13", {"up": NewWeights(up)}) is None
    assert whole_matrix(layer, "w2", {"down": NewWeights(replace(new, bias=None))}) is None
    rank = whole_matrix(layer, "w2", {"down": NewWeights(new)})
    assert rank is not None
    assert torch.equal(rank.codes, new.codes[:, features])


def test_a_block_lands_in_the_part_of_it_that_a_rank_has(scheme: Scheme) -> None:
    whole2 = replace(W2, k=256)
    specs: dict[StackedRole, MatrixSpec] = {"w13": replace(W13, n=512), "w2": whole2}
    layer = made("marlin-wna16/1", scheme, specs=specs, written=specs, intermediate=Range(128, 256), adds_w2_bias=False)
    old = random_matrix(W2, 2)
    for columns, taken in ((Range(64, 192), slice(0, 64)), (Range(0, 128), slice(0, 0)), (Range(0, 64), slice(0, 0))):
        block = ProjectionBlock(Range(8, 40), columns)
        new = random_matrix(block.spec_of(replace(whole2, role="down")), 1)
        found = merged_matrix(layer, "w2", old, {"down": NewWeights(new)}, block)
        wanted = old.codes.clone(), old.scales.clone()
        if taken.stop:
            wanted[0][8:40, taken] = new.codes[:, 64:]
            wanted[1][8:40, :2] = new.scales[:, 2:]
        assert torch.equal(found.codes, wanted[0])
        assert torch.equal(found.scales, wanted[1])


def test_rows_that_are_sorted_in_one_order_stay_in_it(scheme: Scheme) -> None:
    w13, w2 = (replace(one, act_order=True) for one in (W13, W2))
    layer, old = made("marlin-act-order/1", scheme, w13, w2), random_matrix(w13, 1)
    assert old.group_index is not None
    up = replace(random_matrix(replace(w13, role="up", n=128), 2), group_index=old.group_index.long())
    found = merged_matrix(layer, "w13", old, {"up": NewWeights(up)}, None)
    assert torch.equal(found.codes[128:], up.codes)
    text = "layer 4 up: gate and up rows are sorted in one order (g_idx), which this update would change"
    for other, index in (
        (layer, old.group_index.flip(0)),
        (layer, None),
        (replace(layer, specs={"w13": w13, "w2": replace(w2, k=256)}), old.group_index),
    ):
        with refuses("usage.shared-tensor", text, "write gate and up in one update: projection 'w13'"):
            merged_matrix(other, "w13", old, {"up": NewWeights(replace(up, group_index=index))}, None)


def test_what_packing_rounds_is_counted_and_kept(scheme: Scheme) -> None:
    layer, matrix = made(INT8ACT, scheme), random_matrix(W2, 3)
    layout = layer.layout.with_calibration(layer.layout.calibrate(matrix) or 0.0)
    packed, held, losses = pack(layer, layout, "w2", matrix)
    assert losses == layout.losses(matrix) > 0
    assert same_matrix(held, layout.unpack(packed, W2))
    assert not same_matrix(held, matrix)
    exact = made("marlin-wna16/1", scheme)
    assert pack(exact, exact.layout, "w2", matrix)[1:] == (matrix, 0)

    class Wrong(type(exact.layout)):  # type: ignore[misc]
        def unpack(self, parts: dict[str, torch.Tensor], spec: MatrixSpec) -> QuantizedMatrix:
            found: QuantizedMatrix = super().unpack(parts, spec)
            return replace(found, codes=found.codes ^ 1)

    text = "layer 4 w2: the packed bytes do not unpack to the update's values"
    with refuses("bug.round-trip", text, "nothing was written; report this as a bug in moeq"):
        pack(exact, Wrong(), "w2", matrix)


def test_weights_that_stay_keep_their_bytes_or_the_update_is_refused(scheme: Scheme) -> None:
    own = made(INT8ACT, scheme)
    layer = filled(own, own.layout.calibrate(random_matrix(W2, 0)))
    held = read_matrix(layer, "w2", 0)
    assert calibrations_of(layer, "w2") == [layer.layout.calibrate(read_matrix(layer, "w2", row)) for row in range(2)]
    check_reversible(layer, "w2", held, 0)
    text = (
        f"layer 4 w2: {INT8ACT} has rounded the weights that stay, and rounding them again would change them: "
        f"{layer.layout.lossy}"
    )
    hint = "write all of w2 in one update: projection 'w2' without rows and columns"
    with refuses("usage.shared-tensor", text, hint):
        check_reversible(layer, "w2", replace(held, scales=held.scales * 3.1), 0)
    exact = filled(made("marlin-wna16/1", scheme))
    check_reversible(exact, "w2", read_matrix(exact, "w2", 1), 1)
    strict = replace(exact, layout=get_layout(exact.layout.id))  # type: ignore[arg-type]
    check_reversible(strict, "w2", random_matrix(W2, 7), 0)  # nothing is rounded, whatever is there


def test_an_update_under_a_factor_that_all_experts_share(scheme: Scheme) -> None:
    own = made(INT8ACT, scheme)
    layer = filled(own, 1.0)
    writer = moeq.Writer([layer])
    known = [calibrations_of(layer, role) for role in ("w13", "w2")]
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)) * 1e-3
    done = writer.update(4, 1, "down", weight)
    assert (done.rows, done.losses > 0, done.digest) == ((1,), True, moeq.snapshot(layer))
    first, second = writer._calibrations[4, "w2"]
    assert (first, second) == (known[1][0], pytest.approx(calibrations_of(layer, "w2")[1], rel=0.2))
    before = {name: tensor.clone() for name, tensor in layer.tensors["w2"].items()}
    with pytest.raises(moeq.MoeqError, match=r"this update changes the largest from \S+ to \S+, so every") as caught:
        writer.update(4, 1, "down", weight * 1e6)
    assert caught.value.code == "usage.shared-tensor"
    assert caught.value.message.startswith("layer 4 w2: group scales are stored relative to the largest one of all")
    assert all(torch.equal(before[name], tensor) for name, tensor in layer.tensors["w2"].items())


def test_digests_that_kernels_read_are_those_of_the_cpu(scheme: Scheme) -> None:
    w13, w2 = replace(W13, n=32, k=32), replace(W2, n=32, k=32)
    layer = filled(made("triton-wna16/1", scheme, w13, w2))
    wanted = read_digests(layer, (), gather=False)
    assert sorted(wanted) == [(expert, name) for expert in (0, 1) for name in ("down", "gate", "up")]
    known = {(0, "down")}
    found = read_digests(layer, known, gather=True)
    assert found == {key: value for key, value in wanted.items() if key not in known}


@pytest.mark.parametrize(("layout", "gather"), [("triton-wna16/1", None), ("marlin-wna16-fp8act/1", True)])
def test_digests_without_a_kernel(layout: str, gather: bool | None, scheme: Scheme, monkeypatch) -> None:
    """On a CPU none runs unasked, and none reads a layout that is more than an index map."""
    layer = filled(made(layout, scheme))
    wanted = read_digests(layer, (), gather=False)
    monkeypatch.setattr("moeq_kernels.blake3.digests", None)
    assert read_digests(layer, (), gather=gather) == wanted
    assert len(wanted) == 6


def test_messages_are_whole_blocks(scheme: Scheme) -> None:
    """BLAKE3 hashes blocks of 64 bytes: the last one ends in zeros."""
    layer = filled(made("triton-wna16/1", scheme))
    messages, length = messages_of(layer, "w2", slice(0, 2))
    assert messages.shape == (2, 1, -(-length // 64) * 64)
    assert not messages[:, :, length:].any()
