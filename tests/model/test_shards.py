"""Shards of single matrices, cut and joined, against slices by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model.shards import Range, join_shards, shard_matrix, shard_spec


def matrix(role: str, **change: object) -> QuantizedMatrix:
    """Eight rows of twelve columns in groups of four, with every part that a matrix may have."""
    spec = replace(MatrixSpec("w2", 8, 12, "int4", 4, "f32", symmetric=False, bias_dtype="f32"), role=role, **change)
    codes = torch.arange(8 * 12, dtype=torch.uint8).reshape(8, 12)
    scales = torch.arange(8.0 * spec.num_groups).reshape(8, -1)
    zeros = (100 + scales).to(torch.uint8)
    index = torch.arange(12, dtype=torch.int32) % 3 if spec.act_order else None
    return QuantizedMatrix(spec, codes, scales, zeros, group_index=index, bias=1 + torch.arange(8.0))


def same(left: QuantizedMatrix, right: QuantizedMatrix) -> bool:
    parts = ("codes", "scales", "zeros", "group_index", "bias")
    pairs = [(getattr(left, part), getattr(right, part)) for part in parts]
    equal = [a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs]
    return left.spec == right.spec and all(equal)


@pytest.mark.parametrize("gated", [True, False])
def test_rows_of_gate_and_up(gated: bool) -> None:
    whole = matrix("w13", gated=gated)
    part = Range(1, 3) if gated else Range(2, 8)
    rows = [1, 2, 5, 6] if gated else [2, 3, 4, 5, 6, 7]
    found = shard_matrix(whole, part, first=False)
    assert found.spec == replace(whole.spec, n=len(rows))
    for name in ("codes", "scales", "zeros", "bias"):
        assert torch.equal(getattr(found, name), getattr(whole, name)[rows]), name
    size = whole.spec.n // (2 if gated else 1)
    cuts = [Range(0, 1), part if gated else Range(1, 2), Range(3, 4) if gated else Range(2, size)]
    assert same(join_shards(whole.spec, [shard_matrix(whole, cut, first=False) for cut in cuts]), whole)


@pytest.mark.parametrize("first", [True, False])
def test_columns_of_w2(first: bool) -> None:
    whole = matrix("w2")
    found = shard_matrix(whole, Range(4, 12), first=first)
    assert found.spec == replace(whole.spec, k=8)
    assert torch.equal(found.codes, whole.codes[:, 4:])
    assert torch.equal(found.scales, whole.scales[:, 1:])
    assert found.zeros is not None
    assert torch.equal(found.zeros, whole.zeros[:, 1:])  # type: ignore[index]
    assert found.bias is not None
    assert found.bias.tolist() == ([1, 2, 3, 4, 5, 6, 7, 8] if first else [0] * 8)
    cuts = [shard_matrix(whole, cut, first=cut.start == 0) for cut in (Range(0, 4), Range(4, 12))]
    assert same(join_shards(whole.spec, cuts), whole)
    partial = shard_matrix(whole, Range(4, 10), first=True)  # a shard may end inside a group, not begin there
    assert (partial.spec.num_groups, partial.scales.shape) == (2, (8, 2))
    with pytest.raises(MoeqError, match="w2: a shard that starts at column 6 cuts a group of 4") as caught:
        shard_matrix(whole, Range(6, 12), first=True)
    assert caught.value.code == "usage.group-cut"


def test_one_scale_for_all_columns_and_act_order() -> None:
    channels = matrix("w2", group_size=12)
    found = shard_matrix(channels, Range(5, 12), first=False)
    assert (found.spec.k, found.spec.group_size, found.spec.num_groups) == (7, 7, 1)
    assert torch.equal(found.scales, channels.scales)
    ordered = matrix("w2", act_order=True)
    found = shard_matrix(ordered, Range(5, 12), first=False)
    assert (found.spec.k, found.spec.num_groups, found.spec.all_groups) == (7, 3, 3)
    assert found.group_index is not None
    assert found.group_index.tolist() == [2, 0, 1, 2, 0, 1, 2]
    assert torch.equal(found.scales, ordered.scales)
    for whole in (channels, ordered):
        cuts = [shard_matrix(whole, cut, first=cut.start == 0) for cut in (Range(0, 5), Range(5, 12))]
        assert same(join_shards(whole.spec, cuts), whole)


def test_a_shard_that_is_the_whole() -> None:
    for whole in (matrix("w2", act_order=True), matrix("w2"), matrix("w13")):
        part = Range(0, 12 if whole.spec.role == "w2" else 4)
        assert shard_spec(whole.spec, part) == whole.spec
        assert shard_matrix(whole, part, first=False) is whole
        assert join_shards(whole.spec, [whole]) is whole
