"""Tensor-parallel arithmetic, on the sizes of published models."""

from __future__ import annotations

import pytest

from moeq.matrix import MatrixSpec
from moeq.model.sharding import TP_DEGREES, shard_fit, shard_fits


def w2(k: int, group: int) -> MatrixSpec:
    return MatrixSpec("w2", 4096, k, "int4", group, "f16")


@pytest.mark.parametrize(
    ("k", "group", "tp", "shard", "fits", "padded"),
    [
        (768, 128, 1, 768, True, 768),  # Qwen3-30B-A3B
        (768, 128, 2, 384, True, 384),
        (768, 128, 4, 192, False, 256),
        (768, 32, 4, 192, True, 192),
        (2048, 32, 8, 256, True, 256),  # Kimi-K2
        (2880, 32, 8, 360, False, 384),  # gpt-oss
        (1856, 64, 2, 928, False, 960),  # Nemotron-3 Nano
        (14336, 128, 8, 1792, True, 1792),  # Mixtral
        (1408, 128, 16, 88, False, 128),  # GLM-4.5-Air
        (1000, 100, 3, None, False, 1600),
    ],
)
def test_shards(k: int, group: int, tp: int, shard: int | None, fits: bool, padded: int) -> None:
    found = shard_fit(w2(k, group), tp)
    assert (found.intermediate, found.fits, found.padded) == (shard, fits, padded)
    assert str(k) in found.arithmetic
    if not fits:
        assert f"pad shards to {padded}" in found.arithmetic


def test_one_scale_per_channel_needs_no_group_boundaries() -> None:
    assert shard_fit(w2(2048, 2048), 8).fits


def test_every_degree() -> None:
    assert [fit.tp for fit in shard_fits(w2(2048, 128))] == list(TP_DEGREES)
