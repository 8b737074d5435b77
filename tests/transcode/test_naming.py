"""Containers of experts that engines do not look into."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moeq.checkpoint.families import FAMILIES, ModelFamily
from moeq.transcode.naming import Naming, misplaced


def family(experts: str) -> ModelFamily:
    return next(one for one in FAMILIES if one.experts == experts)


@pytest.mark.parametrize(
    ("prefix", "experts", "note"),
    [
        ("model.layers.0.mlp.experts", "mlp.experts", None),
        ("model.layers.0.mlp.experts", None, None),
        ("model.layers.0.feed_forward.experts", "mlp.experts", None),
        (
            "model.layers.0.mlp.experts",
            "block_sparse_moe.experts",
            "experts are called mlp.experts; engines look for block_sparse_moe.experts in such models: ",
        ),
        (
            "model.layers.0.block_sparse_moe.experts",
            "mlp.experts",
            "experts are called block_sparse_moe.experts; engines look for mlp.experts in such models: ",
        ),
    ],
)
def test_containers(prefix: str, experts: str | None, note: str | None) -> None:
    naming = Naming(prefix, {})
    found = misplaced(naming, None if experts is None else family(experts))
    assert found == note or (note is not None and found is not None and found.startswith(note))
    assert misplaced(replace(naming, prefix="model.layers.0.other.experts"), family("mlp.experts")) is None
