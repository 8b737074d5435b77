"""Act-order where projections have one group, many groups, or one of them each."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from checkpoint.builder import Stored, Tensors, config, experts, quantization, write

import moeq
from moeq.checkpoint.manifest import read_manifest
from moeq.prove.restore import restore
from moeq.prove.verify import verify

OWN = moeq.Deployment(gpu=moeq.gpu("H100"), engine="moeq")


def checkpoint(folder: Path, hidden: int, intermediate: int, group: int) -> Path:
    """Random GPTQ experts with columns in random order; gate and up of an expert share theirs."""
    rng = np.random.default_rng(hidden + intermediate)
    orders: dict[int, np.ndarray] = {}

    def make(n: int, k: int) -> Tensors:
        size = k if group == -1 else group
        groups = -(-k // size)
        order = orders.setdefault(k, rng.permutation(k))
        scales = rng.uniform(0.001, 0.01, (groups, n)).astype("<f2")
        return {
            "qweight": Stored("I32", (k // 8, n), rng.bytes(k * n // 2)),
            "qzeros": Stored("I32", (groups, n // 8), b"\x77" * (groups * n // 2)),
            "scales": Stored("F16", (groups, n), scales.tobytes()),
            "g_idx": Stored("I32", (k,), (order // size).astype("<i4").tobytes()),
        }

    rest = {"model.layers.0.mlp.gate.weight": Stored("BF16", (2, hidden))}
    document = config(
        hidden_size=hidden,
        moe_intermediate_size=intermediate,
        quantization_config=quantization(group_size=group, desc_act=True),
    )
    return write(folder, {**rest, **experts(hidden=hidden, intermediate=intermediate, make=make)}, document)


@pytest.mark.cover(every=5)
@pytest.mark.parametrize(
    ("hidden", "intermediate", "group", "layout"),
    [
        (256, 128, -1, "marlin-wna16/1"),
        (256, 128, 128, "marlin-act-order/1"),
        (128, 256, 128, "marlin-act-order/1"),
        (128, 128, 128, "marlin-act-order/1"),
        (256, 128, 64, "marlin-act-order/1"),
    ],
)
def test_what_is_decided_is_converted(tmp_path: Path, hidden: int, intermediate: int, group: int, layout: str) -> None:
    source, made = checkpoint(tmp_path / "source", hidden, intermediate, group), tmp_path / "made"
    opened = moeq.open(source)
    assert opened.scheme_of(0).act_order == (group != -1)
    moeq.convert(source, made, OWN)
    assert {entry.layout for entry in read_manifest(made).layers} == {layout}
    assert verify(made, source=source).ok
    restore(made, tmp_path / "back")
    for path in source.iterdir():
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
    loaded = moeq.open(made)
    for role in ("gate", "up", "down"):
        assert np.array_equal(loaded.dequantize(0, 1, role), opened.dequantize(0, 1, role))
