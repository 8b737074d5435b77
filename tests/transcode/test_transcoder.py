"""One item of a transcoding on the reference path: what is refused, sorted, carried over and measured."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from refusing import refuses
from transcode.test_recoders import written

from moeq.errors import MoeqError
from moeq.matrix import MatrixSpec, QuantizedMatrix
from moeq.model import open as open_checkpoint
from moeq.schemes.base import QuantKey, ScaleKey, Scheme
from moeq.schemes.format import PartSig
from moeq.transcode.act_order import column_order, require_sorted, sort_columns, sort_rows
from moeq.transcode.spellings import pack
from moeq.transcode.survey import TranscodeRequest
from moeq.transcode.transcode_plan import make_transcode_plan
from moeq.transcode.transcoder import _block, _check_order, _check_zeros, _require_size

SPEC = MatrixSpec("down", 2, 8, "int4", 4, "f16", symmetric=False, act_order=True, bias_dtype="f16")


def matrix(index: list[int] | None = None) -> QuantizedMatrix:
    return QuantizedMatrix(
        SPEC,
        torch.arange(16, dtype=torch.uint8).reshape(2, 8),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]).half(),
        zeros=torch.tensor([[5, 6], [7, 8]], dtype=torch.uint8),
        group_index=None if index is None else torch.tensor(index, dtype=torch.int32),
        global_scale=torch.tensor([1.0, 2.0]),
        bias=torch.tensor([0.5, 1.5]).half(),
    )


def test_columns_are_sorted_by_group() -> None:
    """Columns of one group keep their order; what is in order already is left alone."""
    assert column_order(matrix()) is None
    assert column_order(matrix([0, 0, 0, 0, 1, 1, 1, 1])) is None
    order = column_order(matrix([1, 0, 1, 0, 0, 1, 0, 1]))
    assert order is not None
    assert order.tolist() == [1, 3, 4, 6, 0, 2, 5, 7]
    found = sort_columns(matrix([1, 0, 1, 0, 0, 1, 0, 1]), order)
    assert found.codes.tolist() == [order.tolist(), (order + 8).tolist()]
    assert (found.spec, found.group_index) == (replace(SPEC, act_order=False), None)
    same = matrix([0, 0, 0, 0, 1, 1, 1, 1])
    assert sort_columns(same, None).codes is same.codes


def test_rows_are_sorted_in_all_parts() -> None:
    one = matrix()
    assert sort_rows(one, None) is one
    found = sort_rows(one, torch.tensor([1, 0]))
    for part in ("codes", "scales", "zeros", "global_scale", "bias"):
        assert torch.equal(getattr(found, part), getattr(one, part).flip(0)), part
        assert getattr(found, part).is_contiguous()
    bare = sort_rows(replace(one, zeros=None, global_scale=None, bias=None), torch.tensor([1, 0]))
    assert (bare.zeros, bare.global_scale, bare.bias) == (None, None, None)


def test_hidden_features_cannot_be_sorted() -> None:
    same = require_sorted(matrix([0, 0, 0, 0, 1, 1, 1, 1]), "up")
    assert (same.group_index, same.spec.act_order) == (None, False)
    hint = 'to="gptq_v2" keeps g_idx; to="bf16", allow_lossy=True has no groups'
    message = (
        "up: its columns are hidden features in activation order, and all layers share one order of them; only down "
        "projections can be sorted"
    )
    with refuses("usage.act-order", message, hint):
        require_sorted(matrix([1, 0, 0, 0, 0, 1, 1, 1]), "up")


def test_an_order_that_the_config_denies() -> None:
    """Headers and config promise columns in order: what is planned has no place for another one."""
    ordered, plain = (written("gptq", replace(SPEC, act_order=order), SPEC) for order in (True, False))
    _check_order(matrix(), plain)
    _check_order(matrix([1, 0, 0, 0, 0, 1, 1, 1]), ordered)
    message = "down: g_idx is out of order although the config says desc_act: false"
    with refuses("source.inconsistent", message, "correct the quantisation config: desc_act has to be true"):
        _check_order(matrix([1, 0, 0, 0, 0, 1, 1, 1]), plain)


def test_zero_points_that_readers_disagree_about() -> None:
    output = written("gptq", SPEC, SPEC, zero_point="stored-minus-one")
    zero = replace(matrix(), zeros=torch.tensor([[0, 6], [0, 8]], dtype=torch.uint8))
    for allowed, one in ((output, matrix()), (written("gptq", SPEC, SPEC, zero_point="stored"), zero)):
        _check_zeros(one, allowed)
    _check_zeros(replace(zero, zeros=None), output)
    message = "down: 2 of 4 zero points are 0; GPTQ v1 stores them minus one, and its readers disagree about -1"
    with refuses("answer.zero-points", message, 'to="gptq_v2" stores zero points as they are'):
        _check_zeros(zero, output)


def test_a_part_of_another_size_is_a_bug() -> None:
    output = written("gptq", SPEC, SPEC)
    _require_size(output, "bias", np.zeros(4, np.uint8), 4)
    for size in (3, 5):
        with pytest.raises(ValueError, match=f"down.bias has 4 bytes, but its place has {size}"):
            _require_size(output, "bias", np.zeros(4, np.uint8), size)


def test_a_part_that_no_format_packs_is_a_bug() -> None:
    scheme = Scheme("gptq", QuantKey("int4", "i32-packed", ScaleKey("f16", "group", (1, 4))))
    with refuses("bug.no-part", "down: gptq does not pack other as F16 [2]", "report this as a bug in moeq"):
        pack(matrix(), {"other": PartSig("F16", (2,))}, scheme, "down")


@pytest.mark.parametrize(
    ("spelling", "before", "after", "block"),
    [
        ("fp8-block", SPEC, replace(SPEC, element="e4m3"), (128, 128)),
        ("modelopt-fp8-block", SPEC, replace(SPEC, element="e4m3"), (128, 128)),
        ("plain", SPEC, replace(SPEC, element="bf16", group_size=8), (1, 4)),
        ("ct-pack", SPEC, replace(SPEC, group_size=2), (1, 2)),
        ("kt-amx-int8/1", SPEC, replace(SPEC, element="int8", group_size=8), (1, 8)),
    ],
)
def test_numbers_that_share_a_scale(
    spelling: str, before: MatrixSpec, after: MatrixSpec, block: tuple[int, int]
) -> None:
    assert _block(written(spelling, before, after)) == block


@pytest.mark.parametrize("to", ["compressed-tensors", "modelopt"])
def test_a_source_that_ends_within_a_static_scale(checkpoints: Path, tmp_path: Path, to: str) -> None:
    """Files are as long as their headers say when a job begins; one may shrink while it is read."""
    from moeq.pipeline.pack.inputs import InputFile
    from moeq.transcode.find_fast_item import FastPaths
    from moeq.transcode.transcode_plan import ExpertItem
    from moeq.transcode.transcoder import Transcoder

    made = open_checkpoint(checkpoints / "modelopt-nvfp4-qwen3moe")
    plan = make_transcode_plan(made, TranscodeRequest("src", to, allow_lossy=True))
    item = ExpertItem(0, 0, "w2")
    unit = next(unit for unit in plan.units if unit.id == "layer-0/w2")
    form = plan.file(unit.file).form
    outputs = plan.outputs(item, form)
    file, start, stop = FastPaths(made, plan, form).places(item, [("down", "input_scale")])[0]
    whole = made.source.path(file).read_bytes()
    worker = Transcoder.__new__(Transcoder)
    worker._plan, worker._paths = plan, FastPaths(made, plan, form)
    for size, ends in ((stop, False), (stop - 1, True), (start, True)):
        (tmp_path / "short").write_bytes(whole[:size])
        fd = os.open(tmp_path / "short", os.O_RDONLY)
        try:
            worker._inputs = {file: InputFile(fd, file, [])}
            if not ends:
                found, _ = worker._carried(item, outputs)
                (((name, part), data),) = found.items()
                assert (name, part, data.nbytes) == ("down", outputs["down"].projected.activation.target, 4)
                continue
            with pytest.raises(MoeqError, match=f"{file}: ended before byte {stop:,} while being read") as caught:
                worker._carried(item, outputs)
            assert caught.value.code == "source.truncated"
        finally:
            worker._inputs[file].close()
