"""Numbers that are used as indices: any int32 in them is refused by name, in memory, in folders and in kernels."""

from __future__ import annotations

import dataclasses
import random
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from attacks.running import moeq_command
from attacks.tampering import consistent, places, rewrite
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts.cases import specs
from layouts.matrices import random_matrix
from support.cases import Recipe, make_layer, route

import moeq
from moeq.cli.app import run
from moeq.errors import MoeqError
from moeq.indices import check_indices
from moeq.layouts import words
from moeq.layouts.base import INDEX_PARTS
from moeq.layouts.registry import LAYOUTS, get_layout
from moeq_kernels import fused_moe
from moeq_kernels.errors import KernelArgumentError

__all__ = ["moeq_command"]

SOURCE = "gptq-int4-g32-actorder-qwen3moe"
INT32 = st.one_of(st.sampled_from([-1, 0, 1, -(2**31), 2**31 - 1, 2**31 - 128]), st.integers(-(2**31), 2**31 - 1))

#: Layouts that store indices, with a spec of each that does.
INDEXED = [
    (name, spec)
    for name in LAYOUTS
    for spec in specs(name)
    if not set(INDEX_PARTS).isdisjoint(get_layout(name).tensors(spec)) and spec.num_groups > 1
]


@pytest.fixture(autouse=True)
def compiled_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "COMPILED_FROM", 0)


def test_the_layouts_with_indices_are_found() -> None:
    assert {name for name, _ in INDEXED} == {"marlin-act-order/1"}


@pytest.mark.cover("part")
@pytest.mark.parametrize(("name", "spec"), INDEXED[:4], ids=str)
@pytest.mark.parametrize("part", INDEX_PARTS)
@settings(max_examples=60, deadline=None)
@given(value=INT32, place=st.integers(0, 10_000))
def test_any_number_in_a_packed_matrix(name, spec, part, value, place) -> None:
    layout, matrix = get_layout(name), random_matrix(spec)
    packed = layout.pack(matrix)
    held, at = packed[part], place % len(packed[part])
    before = int(held[at])
    held[at] = value
    bound = spec.k if part == "permutation" else spec.num_groups
    if value == before or (part == "group_index" and 0 <= value < bound):
        layout.unpack(packed, spec)
        return
    with pytest.raises(MoeqError, match=part) as caught:
        layout.unpack(packed, spec)
    assert caught.value.code == "source.bad-data"


@pytest.fixture(scope="module")
def folder(checkpoints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("indices") / "out"
    arguments = ["--gpu", "a100", "--engine", "moeq", "--layout", "marlin-act-order/1", "--quiet"]
    assert run(["convert", str(checkpoints / SOURCE), str(out), *arguments]) == 0
    return out


@pytest.mark.cover(every=6)
@pytest.mark.parametrize("part", INDEX_PARTS)
@pytest.mark.parametrize("seed", range(3))
def test_any_number_in_a_folder(part, seed, folder, checkpoints, tmp_path, moeq_command) -> None:
    """Also with digests that agree with it: then the numbers themselves are all that tells."""
    rng = random.Random(f"{part} {seed}")
    out = Path(shutil.copytree(folder, tmp_path / "out"))
    name = rng.choice([name for name in places(out) if name.endswith(part)])
    place = places(out)[name]
    value = rng.choice([-1, -(2**31), 2**31 - 1, 1 << 20, rng.randrange(-(2**31), -1)])
    count = (place[2] - place[1]) // 4
    rewrite(place, struct.pack("<i", value), 4 * rng.randrange(count))
    for _ in range(2):
        for argv in (
            ("verify", out),
            ("verify", out, "--source", checkpoints / SOURCE),
            ("run-check", out, "--source", checkpoints / SOURCE),
            ("restore", out, tmp_path / "back"),
        ):
            answer = moeq_command(*argv)
            assert answer.code in (1, 4), (argv, answer.out, answer.err)
            assert not (tmp_path / "back").exists()
        layer = int(name.split("layers.")[1].split(".")[0])
        with pytest.raises(MoeqError):
            moeq.load_experts(out, layer, verify=True)
        with pytest.raises(MoeqError, match=part):
            moeq.load_experts(out, layer, verify=False)
        consistent(out)


@pytest.mark.parametrize("part", INDEX_PARTS)
@settings(max_examples=30, deadline=None)
@given(value=INT32, place=st.integers(0, 100_000), role=st.sampled_from(["w13", "w2"]))
def test_any_number_in_a_record_of_the_kernels(part, value, place, role) -> None:
    packed, _ = make_layer(Recipe("marlin-act-order/1"), torch.device("cpu"))
    matrix = getattr(packed, role)
    held = getattr(matrix, part).clone()
    held.view(-1)[place % held.numel()] = value
    bound = matrix.k if part == "permutation" else matrix.num_groups
    if 0 <= value < bound:
        return
    routed = route(3, 128, 4, 2, device=torch.device("cpu"))
    damaged = dataclasses.replace(packed, **{role: dataclasses.replace(matrix, **{part: held})})
    with pytest.raises(KernelArgumentError, match=rf"{role}\.{part} ranges from"):
        fused_moe(routed.x, damaged, routed.weights, routed.ids)


@pytest.mark.cover(every=5)
@pytest.mark.parametrize("value", [-1, -(2**31), -7, 2**31 - 1, 1 << 20])
@pytest.mark.parametrize("part", INDEX_PARTS)
def test_kernels_read_nothing_beyond(part, value, monkeypatch) -> None:
    """Without the check before them: what an index out of range names counts as 0, and no other memory is read."""
    packed, _ = make_layer(Recipe("marlin-act-order/1"), torch.device("cpu"))
    routed = route(3, 128, 4, 2, device=torch.device("cpu"))
    held = getattr(packed.w13, part).clone()
    held[:, 5] = value
    damaged = dataclasses.replace(packed, w13=dataclasses.replace(packed.w13, **{part: held}))
    monkeypatch.setattr("moeq_kernels.validate._check_indices", lambda *_: None)
    room = torch.full((9, routed.x.shape[1]), float("nan"), dtype=routed.x.dtype)
    room[3:6] = routed.x
    found = fused_moe(room[3:6], damaged, routed.weights, routed.ids)
    # The column that the entry belongs to has no product then, as with tokens that are 0 there: one copy for an expert.
    x = routed.x.repeat(4, 1, 1)
    for expert, column in enumerate(packed.w13.permutation[:, 5].tolist()):
        x[expert, :, column] = 0
    ids = torch.arange(4, dtype=routed.ids.dtype).repeat_interleave(3)[:, None]
    mine = torch.stack([(routed.weights * (routed.ids == expert)).sum(1) for expert in range(4)]).view(-1, 1)
    expected = fused_moe(x.flatten(0, 1), packed, mine, ids).view(4, *found.shape).sum(0)
    assert bool(found.isfinite().all())
    assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=0.02 * float(expected.abs().max()))


@settings(max_examples=40, deadline=None)
@given(value=INT32, place=st.integers(0, 5))
def test_any_id_and_any_map(value, place) -> None:
    packed, _ = make_layer(Recipe(), torch.device("cpu"))
    routed = route(3, 128, 4, 2, device=torch.device("cpu"))
    if not -1 <= value < 4:
        ids = routed.ids.clone().to(torch.int32)
        ids.view(-1)[place] = value
        with pytest.raises(KernelArgumentError, match="topk_ids run from"):
            fused_moe(routed.x, packed, routed.weights, ids)
        expert_map = torch.arange(4, dtype=torch.int32)
        expert_map[place % 4] = value
        with pytest.raises(KernelArgumentError, match="expert_map"):
            fused_moe(routed.x, packed, routed.weights, routed.ids, expert_map=expert_map)


class TestCompiledLoops:
    """Loops have no bounds of their own: what calls them checks the indices that it hands over."""

    @pytest.fixture(autouse=True)
    def numba(self) -> None:
        pytest.importorskip("numba")

    @pytest.mark.parametrize("value", [-1, 64, 2**31 - 1, -(2**31)])
    def test_orders_of_columns(self, value: int) -> None:
        from moeq.layouts.loops import columns

        codes = np.zeros((2, 64), np.uint8)
        packed = np.zeros((64 * 4 // 32, 2), np.uint32)
        order = np.arange(64)
        order[7] = value
        calls = (
            lambda: columns.take(torch.from_numpy(codes), torch.from_numpy(order), torch.from_numpy(codes.copy())),
            lambda: columns.take_elements(codes, order, codes.copy()),
            lambda: columns.holds_taken_elements(codes, order, codes),
            lambda: columns.take_codes(packed, order, 4, packed.copy()),
            lambda: columns.holds_taken_codes(packed, order, 4, packed),
        )
        for call in calls:
            with pytest.raises(MoeqError, match="ranges from"):
                call()

    @pytest.mark.parametrize("value", [-1, 2, 2**31 - 1, -(2**31)])
    def test_groups_of_columns(self, value: int) -> None:
        from moeq.layouts.loops import floats

        index = np.arange(64, dtype=np.int32) // 32
        index[40] = value
        zeros, scales = np.zeros((2, 2), np.uint8), np.ones((2, 2))
        with pytest.raises(MoeqError, match="group index"):
            floats.CodedMatrix("int4", np.zeros((2, 8), np.uint32), zeros, scales, index, 32)


def test_kinds_of_numbers() -> None:
    for wrong in (torch.zeros(4), torch.zeros(4, dtype=torch.bool), torch.zeros(4, dtype=torch.int16), np.zeros(4)):
        with pytest.raises(MoeqError, match="indices are int32 or int64"):
            check_indices(wrong, 4, "it")
    for right in (torch.tensor([2, 0, 1, 3]), np.array([[2, 0, 1, 3], [0, 1, 2, 3]])):
        check_indices(right, 4, "it", each_once=True)
    for twice in (torch.tensor([[0, 1, 2, 3], [0, 1, 1, 3]]), np.array([2, 0, 2, 3]), torch.tensor([0, 1, 2])):
        with pytest.raises(MoeqError, match="does not name each of 4 columns once"):
            check_indices(twice, 4, "it", each_once=True)
