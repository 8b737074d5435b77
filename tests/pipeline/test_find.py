"""Which layers have a fast path: how their projections are read, and which shards cut them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkpoint.builder import Stored, experts, router, write, write_sharded

import moeq
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec
from moeq.pipeline.plan.layer_plan import LayerPlan, plan_layer
from moeq.pipeline.plan.options import ConvertOptions, Ranks

pytest.importorskip("numba")

from moeq.pipeline.pack.fast.codecs import Shifted
from moeq.pipeline.pack.fast.find import (
    _fields,
    _repeated,
    _shard_path,
    _signatures,
    build_fast_path,
    projection_readers,
)
from moeq.pipeline.pack.fast.path import FastPath
from moeq.pipeline.pack.fast.scratch import Region

SPEC = MatrixSpec("w2", 64, 128, "int4", 32, "f16")


def built(source: Path, layout: str, role: Any, *, tp: int = 1, **options: Any) -> tuple[LayerPlan, FastPath | None]:
    made = moeq.open(source)
    plan = plan_layer(made, 0, layout, Ranks(tp), ConvertOptions(**options))
    written = plan.entry.matrices[role].spec
    return plan, build_fast_path(made.experts(0), role, plan.layout, plan.shards, written)


def test_fields_of_a_matrix() -> None:
    assert _fields(SPEC) == {"codes", "scales"}
    assert _fields(replace(SPEC, symmetric=False, bias_dtype="f16")) == {"codes", "scales", "zeros", "bias"}


def test_readers_in_the_order_of_packed_rows(checkpoints: Path) -> None:
    """Each has scratch of its own, behind that of the one before."""
    kind = moeq.open(checkpoints / "gptq-int4-g32-qwen3moe").experts(0).kind(0)
    asked: list[str] = []

    def stored_as(name: Any, described: Any) -> Any:
        asked.append(name)
        return SimpleNamespace(scratch_bytes=65)

    both = projection_readers(kind, "w13", stored_as)
    assert both is not None
    assert [(one.name, one.region, one.interleaved) for one in both] == [
        ("gate", Region(0, 65), False), ("up", Region(128, 65), False),
    ]  # fmt: skip
    assert [one.holds[0][0] for one in both] == ["gate", "up"]
    (down,) = projection_readers(kind, "w2", stored_as) or ()
    assert (down.name, asked) == ("down", ["gate", "up", "down"])
    assert projection_readers(kind, "w13", lambda name, described: None) is None
    ungated = replace(kind, projections={name: one for name, one in kind.projections.items() if name != "gate"})
    assert [one.name for one in projection_readers(ungated, "w13", stored_as) or ()] == ["up"]
    assert projection_readers(replace(kind, projections={}), "w13", stored_as) is None


def test_stacked_gate_and_up_are_held_by_one_reader(checkpoints: Path) -> None:
    kind = moeq.open(checkpoints / "mxfp4-gptoss").experts(0).kind(0)

    def stored_as(name: Any, described: Any) -> Any:
        return SimpleNamespace(scratch_bytes=0)

    (one,) = projection_readers(kind, "w13", stored_as) or ()
    assert (one.name, one.interleaved, [held for held, _ in one.holds]) == ("gate_up", True, ["gate", "up"])
    assert {spec.n for _, spec in one.holds} == {kind.spec("w13").n // 2}
    assert projection_readers(replace(kind, interleaved=None), "w13", stored_as) is None
    assert projection_readers(replace(kind, interleaved=None), "w2", stored_as) is not None


def test_scratch_of_repeated_groups() -> None:
    written = replace(SPEC, group_size=16, symmetric=False)
    reader: Any = SimpleNamespace(holds=(("gate", SPEC), ("up", SPEC)))
    rows = list(_repeated(128, [reader], written))
    scales, zeros = 64 * 8 * 2, 64 * 8
    assert rows == [
        (Region(128, scales), Region(128 + scales, zeros)),
        (Region(128 + scales + zeros, scales), Region(128 + 2 * scales + zeros, zeros)),
    ]
    ((_, none),) = _repeated(0, [SimpleNamespace(holds=(("down", SPEC),))], replace(written, symmetric=True))  # type: ignore[list-item]
    assert none.nbytes == 0


@pytest.mark.parametrize("role", ["w13", "w2"])
def test_a_fast_path_has_the_parts_of_its_layout(checkpoints: Path, role: Any) -> None:
    plan, path = built(checkpoints / "gptq-int4-g32-qwen3moe", "marlin-wna16/1", role)
    assert path is not None
    (shard,) = path.shards
    assert (shard.holds_all, shard.is_first, shard.shared) == (True, True, None)
    assert all(part.dense for part in shard.parts)
    assert (path.splits, path.repeated, path.may_round, path.spec) == (1, (), False, plan.entry.matrices[role].spec)
    assert path.elements.start == path.readers[-1].region.stop
    assert path.expected.start == path.elements.stop
    assert path.scratch_bytes == path.expected.stop
    assert path.elements.nbytes == max(part.element_bytes for part in shard.parts)


def test_ranks_have_paths_of_their_own(checkpoints: Path) -> None:
    _, path = built(checkpoints / "gptq-int4-g32-qwen3moe", "marlin-wna16/1", "w2", tp=2)
    assert path is not None
    if len(path.shards) > 1:
        assert [shard.is_first for shard in path.shards] == [True, False]
        assert not any(part.dense for shard in path.shards for part in shard.parts)
    _, grouped = built(checkpoints / "gptq-int4-g32-qwen3moe", "triton-wna16/1", "w2", regroup=16)
    assert grouped is not None
    assert grouped.splits == 2
    assert len(grouped.repeated) == 1
    assert grouped.scratch_bytes == grouped.repeated[-1][-1].stop


@pytest.mark.parametrize(("repeats", "kept"), [(128, 128), (1, 1)])
def test_rows_that_share_a_scale_are_read_once(checkpoints: Path, repeats: int, kept: int) -> None:
    made = moeq.open(checkpoints / "ct-fp8-block-qwen3moe")
    plan = plan_layer(made, 0, "marlin-fp8/1", Ranks())
    spec = plan.entry.matrices["w2"].spec
    path = _shard_path(get_layout("marlin-fp8/1"), spec, plan.shards[0], dense=True, repeats=repeats)
    assert path is not None
    (scale,) = (part for part in path.parts if part.field == "scales")
    assert isinstance(scale.widen, Shifted)
    assert scale.widen.repeats == kept


def test_experts_may_lie_in_several_files(tmp_path: Path) -> None:
    """All have to be stored alike; where they are stored does not matter."""
    tensors = {**router(), **experts()}
    last = {name: one for name, one in tensors.items() if ".1.down_proj." in name}
    files = {"a.safetensors": {name: one for name, one in tensors.items() if name not in last}, "b.safetensors": last}
    _, path = built(write_sharded(tmp_path / "files", files), "triton-wna16/1", "w2")
    assert path is not None
    odd = {**tensors, "model.layers.0.mlp.experts.1.down_proj.scales": Stored("BF16", (1, 64))}
    made = moeq.open(write(tmp_path / "odd", odd))
    assert _signatures(made.experts(0)) is None
    alike = _signatures(moeq.open(tmp_path / "files").experts(0))
    assert alike is not None
    assert {name: (sig.dtype, sig.shape) for name, sig in alike["down"].items()} == {
        "qweight": ("I32", (4, 64)), "qzeros": ("I32", (1, 8)), "scales": ("F16", (1, 64)), "g_idx": ("I32", (32,)),
    }  # fmt: skip
