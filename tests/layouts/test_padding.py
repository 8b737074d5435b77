"""The padding planner: sizes, costs, halves apart, exact inverse, and that padding does not change any result."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts.cases import LAYOUT_IDS
from layouts.matrices import random_matrix, same
from torch import Tensor

from moeq.errors import MoeqError
from moeq.layouts.padding import plan_padding
from moeq.layouts.registry import get_layout
from moeq.matrix import MatrixSpec, QuantizedMatrix


def expert(hidden: int, intermediate: int, group: int, *, symmetric: bool = True, element: str = "int4",
           scale: str = "bf16", bias: str | None = None) -> tuple[MatrixSpec, MatrixSpec]:  # fmt: skip
    def spec(role: str, n: int, k: int) -> MatrixSpec:
        return MatrixSpec(role, n, k, element, group or k, scale, symmetric, bias_dtype=bias)  # type: ignore[arg-type]

    return spec("w13", 2 * intermediate, hidden), spec("w2", hidden, intermediate)


def values(matrix: QuantizedMatrix) -> Tensor:
    """float64 `[N, K]`: scale * (code - zero)."""
    spec = matrix.spec
    zeros = torch.full_like(matrix.scales, spec.symmetric_zero) if matrix.zeros is None else matrix.zeros
    columns = torch.arange(spec.k) // spec.group_size
    return (matrix.codes.double() - zeros.double()[:, columns]) * matrix.scales.double()[:, columns]


def forward(w13: QuantizedMatrix, w2: QuantizedMatrix, x: Tensor) -> Tensor:
    """One gated expert in float64."""
    first, second = values(w13), values(w2)
    half = w13.spec.n // 2
    hidden = x @ first.T + (0 if w13.bias is None else w13.bias.double())
    gate, up = hidden[:, :half], hidden[:, half:]
    return (torch.nn.functional.silu(gate) * up) @ second.T + (0 if w2.bias is None else w2.bias.double())


def test_sizes_and_cost_of_marlin_padding() -> None:
    w13, w2 = expert(128, 96, 32, symmetric=False)
    plan = plan_padding(get_layout("marlin-wna16/1"), w13, w2)
    assert (plan.w13.n, plan.w13.k, plan.w2.n, plan.w2.k) == (256, 128, 128, 128)
    # 32 more rows in each half of w13 and 32 more columns of w2, at 4 bits, with a bf16 scale and a nibble per group.
    assert plan.extra_bytes == (64 * 128 * 4 + 64 * 4 * 20 + 128 * 32 * 4 + 128 * 1 * 20) // 8
    assert plan.changes


def test_nothing_changes_where_sizes_fit() -> None:
    w13, w2 = expert(128, 128, 32)
    plan = plan_padding(get_layout("marlin-wna16/1"), w13, w2)
    matrix = random_matrix(w13)
    assert plan.extra_bytes == 0
    assert plan.pad(matrix) is plan.unpad(matrix) is matrix
    assert not plan.changes


@pytest.mark.parametrize(
    ("group", "intermediate", "wanted"), [(32, 96, 128), (128, 192, 256), (0, 96, 128), (96, 96, 128)]
)
def test_intermediate_is_a_multiple_of_tiles_and_whole_groups(group: int, intermediate: int, wanted: int) -> None:
    plan = plan_padding(get_layout("marlin-wna16/1"), *expert(256, intermediate, group))
    assert plan.w2.k == wanted
    assert plan.w13.n == 2 * wanted


@settings(max_examples=20)
@given(st.sampled_from([(32, True), (32, False), (64, True), (0, True)]), st.integers(1, 4), st.booleans())
def test_padding_is_inert_and_undone_exactly(kind: tuple[int, bool], units: int, biased: bool) -> None:
    group, symmetric = kind
    layout = get_layout("marlin-wna16/1")
    w13, w2 = expert(64, 32 * units if group != 64 else 64 * units, group, symmetric=symmetric,
                     bias="bf16" if biased else None)  # fmt: skip
    plan = plan_padding(layout, w13, w2)
    plain = random_matrix(w13, 1), random_matrix(w2, 2)
    padded = plan.pad(plain[0]), plan.pad(plain[1])
    x = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    assert torch.allclose(forward(*padded, x), forward(*plain, x), rtol=1e-12, atol=1e-12)
    for before, after in zip(plain, padded, strict=True):
        assert not layout.problems(after.spec)
        assert same(plan.unpad(layout.unpack(layout.pack(after), after.spec)), before)


def test_gate_and_up_are_padded_apart() -> None:
    w13, w2 = expert(64, 32, 32)
    matrix = random_matrix(w13)
    padded = plan_padding(get_layout("marlin-wna16/1"), w13, w2).pad(matrix)
    assert torch.equal(padded.codes[0:32], matrix.codes[0:32])
    assert torch.equal(padded.codes[64:96], matrix.codes[32:64])
    assert not padded.scales[32:64].any()
    assert not padded.scales[96:].any()


def test_fp8_activations_pad_with_the_code_that_is_rewritten_to_zero() -> None:
    w13, w2 = expert(64, 32, 32)
    padded = plan_padding(get_layout("marlin-wna16-fp8act/1"), w13, w2).pad(random_matrix(w13))
    assert (padded.codes[32:64] == 8).all()


def test_act_order_columns_are_never_padded() -> None:
    w13, w2 = (type(spec)(**{**vars(spec), "act_order": True}) for spec in expert(64, 96, 32))
    plan = plan_padding(get_layout("marlin-wna16/1"), w13, w2)
    with pytest.raises(MoeqError, match=r"K = 96 cannot be padded to 128"):
        plan.pad(random_matrix(w2))


@pytest.mark.parametrize("layout_id", [one for one in LAYOUT_IDS if "mxfp4" in one or "triton-kernels" in one])
def test_padded_sizes_of_every_mxfp4_layout_can_be_packed(layout_id: str) -> None:
    layout = get_layout(layout_id)
    w13, w2 = expert(2880, 2880, 32, element="e2m1", scale="e8m0", bias="bf16")
    plan = plan_padding(layout, w13, w2)
    assert not layout.problems(plan.w13), layout.problems(plan.w13)
    assert not layout.problems(plan.w2), layout.problems(plan.w2)


@pytest.mark.parametrize("gpu_rule", [("marlin-mxfp4/1", 128, 256), ("trtllm-mxfp4/1", 128, 256),
                                      ("deepgemm-mxfp4/1", 128, 128), ("triton-kernels-hopper/1", 64, 1),
                                      ("aiter-a16w4/1", 256, 256)])  # fmt: skip
def test_rounding_follows_the_engine(gpu_rule: tuple[str, int, int]) -> None:
    layout_id, intermediate, hidden = gpu_rule
    plan = plan_padding(get_layout(layout_id), *expert(2880, 2880, 32, element="e2m1", scale="e8m0"))
    assert plan.w2.k == -(-2880 // intermediate) * intermediate
    assert plan.w2.n == -(-2880 // hidden) * hidden
