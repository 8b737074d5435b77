"""Who holds what in a deployment, whether one file serves it, and the arithmetic where it cannot be."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeq.errors import MoeqError
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec
from moeq.model.division import Shard, divide, slicing_obstacle, split_experts, split_intermediate
from moeq.model.shards import Range

W2 = MatrixSpec("w2", 256, 256, "int4", 32, "bf16")
SPECS = {"w13": MatrixSpec("w13", 512, 256, "int4", 32, "bf16"), "w2": W2}
MARLIN, CALIBRATED = "marlin-wna16/1", "marlin-wna16-int8act/1"


@pytest.mark.parametrize(
    ("layout", "tp", "ep", "expected"),
    [
        (MARLIN, 1, 1, (None, "unsharded", "one rank holds every expert whole")),
        (MARLIN, 4, 1, ("tp", "unsharded", "sliceable for tp 4: N by 64, K by whole groups (16 where channel-wise)")),
        (MARLIN, 8, 1, ("tp", "ranks", "32 intermediate features per rank are padded to 64")),
        (MARLIN, 1, 2, ("ep", "unsharded", "sliceable by expert: ranks of ep 2 read whole experts")),
        (CALIBRATED, 2, 1, ("tp", "ranks", f"{CALIBRATED} does not allow slices of w13 along N")),
        (CALIBRATED, 1, 2, ("ep", "ranks", "all local experts, so each ep rank has its own")),
    ],
)
def test_one_file_or_one_for_each_rank(layout: str, tp: int, ep: int, expected: tuple[str | None, str, str]) -> None:
    found = divide("layer 0", SPECS, get_layout(layout, allow_lossy=True), 5, tp, ep, None)
    assert (found.axis, found.written) == expected[:2]
    assert found.why.endswith(expected[2])
    if ep > 1:
        assert found.shards == (Shard(0, Range(0, 3), Range(0, 256)), Shard(1, Range(3, 5), Range(0, 256)))
    else:
        size = 256 // tp
        parts = [Range(rank * size, rank * size + size) for rank in range(tp)]
        assert found.shards == tuple(Shard(rank, Range(0, 5), part) for rank, part in enumerate(parts))


def test_experts_are_dealt_in_order() -> None:
    assert [part.size for part in split_experts("layer 0", 7, 3)] == [3, 2, 2]
    assert split_experts("layer 0", 3, 3) == [Range(0, 1), Range(1, 2), Range(2, 3)]
    with pytest.raises(MoeqError, match="layer 0 has 3 experts, too few for ep 4") as caught:
        split_experts("layer 0", 3, 4)
    assert (caught.value.code, caught.value.hint) == ("usage.ep", "ep 3 works")


@pytest.mark.parametrize(
    ("k", "group", "tp", "unit", "message", "hint"),
    [
        (256, 32, 3, None, "the intermediate size 256 / 3 leaves a remainder of 1", "tp 2 works, and so does tp 4;"),
        (192, 64, 2, None, "192 / 2 = 96 per rank cuts groups of 64 (96 % 64 = 32)", "tp 1 works, and so does tp 3;"),
        (160, 32, 4, 32, "160 / 32 = 5 blocks leave the last of 4 ranks without work", "tp 3 works, and so does tp 5;"),
        (96, 96, 64, 32, "96 / 32 = 3 blocks leave the last of 64 ranks without work", "tp 3 works;"),
    ],
)
def test_sizes_that_cannot_be_cut(k: int, group: int, tp: int, unit: int | None, message: str, hint: str) -> None:
    with pytest.raises(MoeqError) as caught:
        split_intermediate("layer 0", replace(W2, k=k, group_size=group), tp, unit)
    assert caught.value.message == f"layer 0 cannot be cut for tp {tp}: {message}"
    assert caught.value.code == ("usage.group-cut" if "groups" in message else "usage.tp")
    assert (caught.value.hint or "").startswith(hint)
    assert "or expert parallelism (" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("change", "tp", "unit", "sizes"),
    [
        ({"k": 200, "group_size": 64}, 1, None, [200]),
        ({"k": 192, "group_size": 192}, 2, None, [96, 96]),
        ({"k": 192, "group_size": 64, "act_order": True}, 2, None, [96, 96]),
        ({"k": 160}, 3, 32, [64, 64, 32]),
        ({"k": 160}, 5, 32, [32] * 5),
        ({"k": 192, "group_size": 48}, 2, 80, [96, 96]),
    ],
)
def test_sizes_that_can_be_cut(change: dict[str, int], tp: int, unit: int | None, sizes: list[int]) -> None:
    parts = split_intermediate("layer 0", replace(W2, **change), tp, unit)
    assert [part.size for part in parts] == sizes
    assert [part.start for part in parts] == [sum(sizes[:rank]) for rank in range(tp)]


@pytest.mark.parametrize(
    ("layout", "k", "parts", "why"),
    [
        (MARLIN, 256, [Range(0, 128), Range(128, 256)], None),
        (MARLIN, 320, [Range(0, 160)], "160 intermediate features per rank are padded to 192"),
        (MARLIN, 96, [Range(0, 64)], "the intermediate size 96 is padded to 128, so ranks are padded apart"),
        (MARLIN, 256, [Range(0, 64), Range(64, 128)], None),
        (MARLIN, 256, [Range(32, 160)], f"{MARLIN} slices w13 along N by 64; a rank has 32 .. 160"),
        ("triton-wna16/1", 256, [Range(0, 48)], "triton-wna16/1 slices w2 along K by 32; a rank has 0 .. 48"),
    ],
)
def test_why_a_packing_cannot_be_sliced(layout: str, k: int, parts: list[Range], why: str | None) -> None:
    specs = {"w13": replace(SPECS["w13"], n=2 * k), "w2": replace(W2, k=k)}
    assert slicing_obstacle(specs, get_layout(layout), parts) == why
