"""Tensors of a layer before they are filled, and what stands in for weights that nobody reads."""

from __future__ import annotations

import pytest
import torch

from moeq.errors import MoeqError
from moeq.load.kernel_experts import check_e4m3, dummy_parts, empty_parts, row_order
from moeq.load.rank_reading import PAGE, Span, _spans
from moeq.matrix import MatrixSpec

W13 = MatrixSpec("w13", 256, 128, "int4", 32, "f16")
W2 = MatrixSpec("w2", 128, 128, "int4", 32, "f16", bias_dtype="bf16")


def test_parameters_have_the_shapes_of_the_layout_and_the_dtype_of_the_activations() -> None:
    parts = empty_parts("marlin-wna16/1", {"w13": W13, "w2": W2}, 3, "cpu", torch.bfloat16)
    shapes = {role: {part: tuple(tensor.shape) for part, tensor in parts[role].items()} for role in parts}
    assert shapes["w13"] == {"weight": (3, 8, 512), "scale": (3, 4, 256)}
    assert shapes["w2"] == {"weight": (3, 8, 256), "scale": (3, 4, 128), "bias": (3, 128)}
    assert [parts["w2"][part].dtype for part in ("weight", "scale", "bias")] == [torch.int32, *[torch.bfloat16] * 2]
    stored = empty_parts("marlin-wna16/1", {"w13": W13, "w2": W2}, 3, None, None)
    assert (stored["w13"]["scale"].dtype, stored["w2"]["bias"].dtype) == (torch.float16, torch.bfloat16)


def test_scales_that_engines_keep_are_not_rounded() -> None:
    spec = MatrixSpec("w2", 128, 128, "int8", 128, "f32")
    (parts,) = empty_parts("int8-w8a8/1", {"w2": spec}, 2, "meta", torch.bfloat16).values()
    assert (parts["scale"].dtype, parts["scale"].device.type) == (torch.float32, "meta")


def test_numbers_that_any_kernel_accepts() -> None:
    parts = {
        "weight": torch.zeros(2, 64, 64, dtype=torch.int32),
        "scale": torch.zeros(2, 4, dtype=torch.uint8),
        "bias": torch.full((2, 4), 3.0),
        "permutation": torch.full((2, 5), -1, dtype=torch.int32),
        "group_index": torch.full((2, 5), 7, dtype=torch.int32),
    }
    dummy_parts(parts)
    assert parts["permutation"].tolist() == [[0, 1, 2, 3, 4]] * 2
    assert not parts["group_index"].any()
    assert (parts["scale"] == 117).all()
    assert (parts["bias"] == 3.0).all()
    assert set(parts["weight"].view(torch.uint8).unique().tolist()) == set(range(256))


def test_the_order_of_gate_and_up_rows() -> None:
    assert row_order("marlin-wna16/1") == "gate-up"
    assert row_order("marlin-mxfp4-interleaved/1") == "interleaved"
    with pytest.raises(MoeqError, match="whose up rows come first") as caught:
        row_order("trtllm-nvfp4/1")
    assert caught.value.code == "answer.no-kernel"


def test_layouts_with_e4m3_activations() -> None:
    check_e4m3("marlin-fp8/1", "e4m3")
    check_e4m3("marlin-wna16/1", "int4")
    with pytest.raises(MoeqError, match="int8 weights in layout marlin-wna16/1 with e4m3 activations") as caught:
        check_e4m3("marlin-wna16/1", "int8")
    assert "marlin-fp8/1" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("positions", "size", "expected"),
    [
        ([3], 4, [(3, 4, None, 1)]),
        ([0, 1, 2, 3], 4, [(0, 4, None, 1)]),
        ([2, 3, 6, 7], 8, [(2, 8, [0, 2], 2)]),
        ([0, 4, 8], 9, [(0, 9, [0, 4, 8], 1)]),
        ([0, PAGE], PAGE + 1, [(0, PAGE + 1, [0, PAGE], 1)]),
        ([0, PAGE + 1], PAGE + 2, [(0, 1, None, 1), (PAGE + 1, PAGE + 2, None, 1)]),
        ([], 4, None),
        ([0, 0], 4, None),
        ([2, 1], 4, None),
        ([3, 4], 4, None),
    ],
)
def test_positions_become_spans(positions: list[int], size: int, expected: list[tuple[object, ...]] | None) -> None:
    found = _spans(torch.tensor(positions, dtype=torch.int64), size)
    if expected is None:
        assert found is None
        return
    assert found is not None

    def shown(span: Span) -> tuple[object, ...]:
        return (span.start, span.stop, None if span.chosen is None else span.chosen.tolist(), span.width)

    assert [shown(span) for span in found] == expected
    assert sum(span.kept for span in found) == len(positions)
