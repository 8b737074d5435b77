"""Which groups can be divided into smaller ones, and what else is offered."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.regroup import regroup, regrouped_spec, ungroup

ORDER = "act-order assigns columns to groups one by one, so groups cannot be divided"
CHANNEL = "it has one scale per output channel, no groups"


def spec(group: int = 128, k: int = 256, **more: Any) -> MatrixSpec:
    return MatrixSpec("w2", 8, k, "int4", group, **{"scale_dtype": "f16", "symmetric": True, **more})


@pytest.mark.parametrize(
    ("before", "group", "why", "hint"),
    [
        (spec(act_order=True), 64, ORDER, "leave out regroup"),
        (spec(256), 64, CHANNEL, "leave out regroup"),
        (spec(32, scale_dtype="e8m0"), 16, "its format fixes groups of 32", "leave out regroup"),
        (spec(16), 8, "groups of 16 do not consist of groups of 8", "leave out regroup"),
        (spec(128), 96, "groups of 128 do not consist of groups of 96", "regroup=64"),
        (spec(32), 64, "groups of 32 do not consist of groups of 64", "regroup=16"),
        (spec(64), 15, "groups of 64 do not consist of groups of 15", "regroup=32"),
    ],
)
def test_groups_that_cannot_be_divided(before: MatrixSpec, group: int, why: str, hint: str) -> None:
    with pytest.raises(MoeqError) as caught:
        regrouped_spec(before, group)
    assert caught.value.code == "usage.regroup"
    assert caught.value.message == f"w2 cannot be regrouped to {group}: {why}"
    assert caught.value.hint == hint


@pytest.mark.parametrize(("before", "group"), [(spec(128), 16), (spec(32), 32), (spec(192, k=200), 64)])
def test_groups_that_can_be_divided(before: MatrixSpec, group: int) -> None:
    assert regrouped_spec(before, group).group_size == group


def test_parts_of_a_group_have_to_agree() -> None:
    """192 columns have a group of 128 and half a one; zero points are compared as well as scales."""
    before = spec(128, k=192, symmetric=False)
    scales, zeros = torch.rand(8, 2).half(), torch.arange(16, dtype=torch.uint8).view(8, 2)
    matrix = QuantizedMatrix(before, torch.zeros(8, 192, dtype=torch.uint8), scales, zeros)
    after = regroup(matrix, 64)
    assert torch.equal(after.scales, scales[:, [0, 0, 1]])
    assert after.zeros is not None
    assert torch.equal(after.zeros, zeros[:, [0, 0, 1]])
    back = ungroup(after, 128)
    assert back.spec == before
    assert torch.equal(back.scales, scales)
    after.zeros[7, 1] += 1
    with pytest.raises(MoeqError, match="w2: parts of a group of 128 have different scales or zero points") as caught:
        ungroup(after, 128)
    assert caught.value.code == "source.regrouped"
